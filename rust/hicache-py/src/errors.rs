//! Errors of the core, and of the bindings themselves, as the exceptions of `hicache_store.exceptions`.

use hicache_core::{Error, ErrorKind};
use hicache_ranks::{RankError, RankErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Result of the bindings' functions.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// What a call ends with: an error of the core or of the ranks, or an exception that Python raised meanwhile.
pub(crate) enum Failure {
    Core(Error),
    Rank(RankError),
    Python(PyErr),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Core(error)
    }
}

impl From<RankError> for Failure {
    fn from(error: RankError) -> Self {
        Failure::Rank(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Failure::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) => error,
            Failure::Core(error) => {
                Python::attach(|py| exception(py, &error).unwrap_or_else(|broken| broken))
            }
            Failure::Rank(error) => {
                Python::attach(|py| rank_exception(py, &error).unwrap_or_else(|broken| broken))
            }
        }
    }
}

/// The exception that stands for `error`. The classes are plain Python, so that they pickle like any other.
fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let context = PyDict::new(py);
    for (name, value) in error.context() {
        context.set_item(name, value)?;
    }
    let filename = context.get_item("path")?;
    let classes = py.import("hicache_store.exceptions")?.getattr("BY_KIND")?;
    let class = classes.get_item(error.kind().name())?;
    let value = class.call1((error.message(), context, error.errno(), filename))?;
    Ok(PyErr::from_value(value))
}

/// The exception of `hicache_store.ranks.exceptions` that stands for `error`.
fn rank_exception(py: Python<'_>, error: &RankError) -> PyResult<PyErr> {
    let context = PyDict::new(py);
    for (name, value) in error.context() {
        context.set_item(name, value)?;
    }
    if let Some(rank) = error.rank() {
        context.set_item("rank", rank.0.to_string())?;
    }
    let classes = py.import("hicache_store.ranks.exceptions")?.getattr("BY_KIND")?;
    let class = classes.get_item(error.kind().name())?;
    Ok(PyErr::from_value(class.call1((error.message(), context))?))
}

/// Names of all kinds of errors of the ranks, in the order of `docs/ranks.md`.
#[pyfunction]
#[pyo3(name = "_rank_error_kinds")]
pub(crate) fn rank_error_kinds() -> Vec<&'static str> {
    RankErrorKind::ALL.into_iter().map(RankErrorKind::name).collect()
}

/// Names of all kinds of errors, in the order of `docs/errors.md`.
#[pyfunction]
#[pyo3(name = "_error_kinds")]
pub(crate) fn error_kinds() -> Vec<&'static str> {
    ErrorKind::ALL.into_iter().map(ErrorKind::name).collect()
}
