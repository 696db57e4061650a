//! Answers of the batch calls. Lists are built when they are first looked at.

use hicache_core::{BackupOutcome, BackupReport, Error, Match, RestoreOutcome, RestoreReport};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyString};

use crate::errors::Result;
use crate::namespace::repr;

/// Answer of `match`.
#[pyclass(frozen, name = "Match", module = "hicache_store")]
pub(crate) struct PyMatch {
    answer: Match,
    legal: PyOnceLock<Py<PyList>>,
}

impl From<Match> for PyMatch {
    fn from(answer: Match) -> Self {
        PyMatch { answer, legal: PyOnceLock::new() }
    }
}

#[pymethods]
impl PyMatch {
    /// The longest legal length in pages; 0 when there is none.
    #[getter]
    fn pages(&self) -> usize {
        self.answer.pages
    }

    /// Every legal length in pages, shortest first.
    #[getter]
    fn legal<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let build = || Ok::<_, PyErr>(PyList::new(py, self.answer.legal())?.unbind());
        Ok(self.legal.get_or_try_init(py, build)?.bind(py).clone())
    }

    /// What limited it; None when every page asked for is there.
    #[getter]
    fn limited_by(&self) -> Option<&str> {
        self.answer.limited_by.as_deref()
    }

    /// Each pool's own longest length in pages.
    #[getter]
    fn hits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let hits = PyDict::new(py);
        for pool in &self.answer.pools {
            hits.set_item(&pool.name, pool.pages)?;
        }
        Ok(hits)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let limited_by = match self.limited_by() {
            Some(reason) => repr(py, reason)?,
            None => "None".to_owned(),
        };
        Ok(format!("Match(pages={}, limited_by={limited_by}, hits={})", self.answer.pages, self.hits(py)?))
    }
}

/// An outcome of one page, by name.
trait Outcome: Copy + PartialEq + 'static {
    const ALL: &'static [Self];
    fn name(self) -> &'static str;
}

impl Outcome for BackupOutcome {
    const ALL: &'static [Self] = &BackupOutcome::ALL;

    fn name(self) -> &'static str {
        BackupOutcome::name(self)
    }
}

impl Outcome for RestoreOutcome {
    const ALL: &'static [Self] = &RestoreOutcome::ALL;

    fn name(self) -> &'static str {
        RestoreOutcome::name(self)
    }
}

/// Outcomes as a list of names, made on first use.
struct Names(PyOnceLock<Py<PyList>>);

impl Names {
    fn new() -> Self {
        Names(PyOnceLock::new())
    }

    fn list<'py, T: Outcome>(&self, py: Python<'py>, outcomes: &[T]) -> PyResult<Bound<'py, PyList>> {
        let build = || {
            let names: Vec<_> = T::ALL.iter().map(|known| PyString::intern(py, known.name())).collect();
            // Every outcome is one of its type's list.
            let name = |outcome: &T| &names[T::ALL.iter().position(|known| known == outcome).unwrap_or(0)];
            Ok::<_, PyErr>(PyList::new(py, outcomes.iter().map(name))?.unbind())
        };
        Ok(self.0.get_or_try_init(py, build)?.bind(py).clone())
    }
}

fn count<T: Outcome>(outcomes: &[T], name: &str) -> Result<usize> {
    let Some(wanted) = T::ALL.iter().find(|known| known.name() == name) else {
        let known: Vec<&str> = T::ALL.iter().map(|known| known.name()).collect();
        return Err(
            Error::config(format!("unknown outcome {name:?}: expected one of {}", known.join(", "))).into()
        );
    };
    Ok(outcomes.iter().filter(|outcome| *outcome == wanted).count())
}

/// "3 restored, 1 absent": what there is, in the order of the type's list.
fn summary<T: Outcome>(outcomes: &[T]) -> String {
    let count = |known: &T| outcomes.iter().filter(|outcome| *outcome == known).count();
    let counts = T::ALL.iter().map(|known| (count(known), known.name())).filter(|(count, _)| *count > 0);
    let parts: Vec<String> = counts.map(|(count, name)| format!("{count} {name}")).collect();
    if parts.is_empty() { "no pages".to_owned() } else { parts.join(", ") }
}

/// Answer of `backup`.
#[pyclass(frozen, name = "BackupReport", module = "hicache_store")]
pub(crate) struct PyBackupReport {
    report: BackupReport,
    names: Names,
}

impl From<BackupReport> for PyBackupReport {
    fn from(report: BackupReport) -> Self {
        PyBackupReport { report, names: Names::new() }
    }
}

#[pymethods]
impl PyBackupReport {
    /// What became of each page.
    #[getter]
    fn outcomes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.names.list(py, &self.report.outcomes)
    }

    /// Raw bytes of the objects written.
    #[getter]
    fn raw_bytes(&self) -> u64 {
        self.report.raw_bytes
    }

    /// Bytes that they take on disk, directories included.
    #[getter]
    fn stored_bytes(&self) -> u64 {
        self.report.stored_bytes
    }

    /// Why pages were refused or not written, if any were.
    #[getter]
    fn reason(&self) -> Option<&str> {
        self.report.reason.as_deref()
    }

    /// Returns for each page whether it is in the store.
    fn flags(&self) -> Vec<bool> {
        self.report.flags()
    }

    /// Pages in the store before the first one that is not.
    #[getter]
    fn leading(&self) -> usize {
        self.report.leading()
    }

    /// Returns the number of pages with this outcome.
    fn count(&self, outcome: &str) -> Result<usize> {
        count(&self.report.outcomes, outcome)
    }

    fn __len__(&self) -> usize {
        self.report.outcomes.len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let BackupReport { outcomes, raw_bytes, stored_bytes, reason } = &self.report;
        let reason = match reason {
            Some(reason) => format!(", reason {}", repr(py, reason)?),
            None => String::new(),
        };
        let pages = summary(outcomes);
        Ok(format!("<BackupReport: {pages}; {raw_bytes} bytes, {stored_bytes} on disk{reason}>"))
    }
}

/// Answer of `restore`.
#[pyclass(frozen, name = "RestoreReport", module = "hicache_store")]
pub(crate) struct PyRestoreReport {
    report: RestoreReport,
    names: Names,
}

impl From<RestoreReport> for PyRestoreReport {
    fn from(report: RestoreReport) -> Self {
        PyRestoreReport { report, names: Names::new() }
    }
}

#[pymethods]
impl PyRestoreReport {
    /// What became of each page.
    #[getter]
    fn outcomes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.names.list(py, &self.report.outcomes)
    }

    /// Raw bytes of restored pages.
    #[getter]
    fn bytes(&self) -> u64 {
        self.report.bytes
    }

    /// Whether every page asked for was restored.
    #[getter]
    fn all_restored(&self) -> bool {
        use RestoreOutcome::{Restored, Skipped};
        self.report.outcomes.iter().all(|outcome| matches!(outcome, Restored | Skipped))
    }

    /// Returns for each page whether it was restored.
    fn flags(&self) -> Vec<bool> {
        self.report.flags()
    }

    /// Pages restored before the first one that was not.
    #[getter]
    fn leading(&self) -> usize {
        self.report.leading()
    }

    /// Returns the number of pages with this outcome.
    fn count(&self, outcome: &str) -> Result<usize> {
        count(&self.report.outcomes, outcome)
    }

    fn __len__(&self) -> usize {
        self.report.outcomes.len()
    }

    fn __repr__(&self) -> String {
        format!("<RestoreReport: {}; {} bytes>", summary(&self.report.outcomes), self.report.bytes)
    }
}
