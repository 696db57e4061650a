//! Reads from the store, from the agreed hit to publication.

use std::sync::Mutex;

use hicache_ranks::prefetch::{Part, Prefetch, ProgressVote, Reading, Report};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::ask::{PyAsk, to_answer};
use crate::ranks::lock;

fn part_name(part: Part) -> &'static str {
    match part {
        Part::Progress => "progress",
        Part::SidePools => "side_pools",
        Part::Done => "done",
    }
}

/// What one rank, or all of them, report of a read.
#[pyclass(frozen, eq, name = "Report", module = "hicache_store.ranks")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PyReport {
    inner: Report,
}

#[pymethods]
impl PyReport {
    /// The operation.
    #[getter]
    fn operation(&self) -> u64 {
        self.inner.operation
    }

    /// Which report of the operation this is, from 0.
    #[getter]
    fn index(&self) -> u32 {
        self.inner.index
    }

    /// Which part it closes.
    #[getter]
    fn part(&self) -> &'static str {
        part_name(self.inner.part)
    }

    /// Leading pages that are complete.
    #[getter]
    fn completed(&self) -> u32 {
        self.inner.completed
    }

    fn __repr__(&self) -> String {
        let Report { operation, index, completed, .. } = self.inner;
        let part = self.part();
        format!("<Report {index} of operation {operation}: {part}, {completed} pages complete>")
    }
}

/// The reading side of an operation on one rank.
#[pyclass(frozen, name = "Reading", module = "hicache_store.ranks")]
pub(crate) struct PyReading {
    inner: Mutex<Reading>,
}

#[pymethods]
impl PyReading {
    #[new]
    #[pyo3(signature = (operation, hit, batch, *, side_pools=false))]
    fn new(operation: u64, hit: u32, batch: u32, side_pools: bool) -> Result<Self> {
        Ok(PyReading { inner: Mutex::new(Reading::new(operation, hit, batch, side_pools)?) })
    }

    /// The part that is to be tried next.
    #[getter]
    fn next_part(&self) -> Option<&'static str> {
        lock(&self.inner).next_part().map(part_name)
    }

    /// Pages of the next batch, half open.
    #[getter]
    fn next_batch(&self) -> (u32, u32) {
        lock(&self.inner).next_batch()
    }

    /// Notes how the next part went.
    fn report(&self, pages: u32) -> Result<PyReport> {
        Ok(PyReport { inner: lock(&self.inner).report(pages)? })
    }
}

/// The vote on one report.
#[pyclass(frozen, name = "ProgressVote", module = "hicache_store.ranks")]
pub(crate) struct PyProgressVote {
    inner: ProgressVote,
}

#[pymethods]
impl PyProgressVote {
    #[new]
    fn new(report: &PyReport) -> Self {
        PyProgressVote { inner: ProgressVote::new(report.inner) }
    }

    /// The reduction to carry out.
    fn begin(&self) -> PyAsk {
        self.inner.ask().into()
    }

    /// The agreed report.
    fn resume(&self, answer: &Bound<'_, PyAny>) -> Result<PyReport> {
        Ok(PyReport { inner: self.inner.resume(to_answer(answer)?)? })
    }
}

/// What is to be done with the pages of an operation that is done.
#[pyclass(frozen, eq, get_all, name = "Publication", module = "hicache_store.ranks")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PyPublication {
    /// Pages `[0, publish)` become visible.
    publish: u32,
    /// Pages `[publish, free_to)` go back to the free list.
    free_to: u32,
}

#[pymethods]
impl PyPublication {
    fn __repr__(&self) -> String {
        format!("Publication(publish={}, free_to={})", self.publish, self.free_to)
    }
}

/// The scheduler's side of an operation.
#[pyclass(frozen, name = "Prefetch", module = "hicache_store.ranks")]
pub(crate) struct PyPrefetch {
    inner: Mutex<Prefetch>,
}

#[pymethods]
impl PyPrefetch {
    #[new]
    fn new(operation: u64, span: u32, hit: u32) -> Self {
        PyPrefetch { inner: Mutex::new(Prefetch::new(operation, span, hit)) }
    }

    /// The operation, by its number.
    #[getter]
    fn operation(&self) -> u64 {
        lock(&self.inner).operation()
    }

    /// Pages that were asked for.
    #[getter]
    fn span(&self) -> u32 {
        lock(&self.inner).span()
    }

    /// Agreed pages, at most the span.
    #[getter]
    fn hit(&self) -> u32 {
        lock(&self.inner).hit()
    }

    /// Pages that are complete on all ranks so far.
    #[getter]
    fn completed(&self) -> u32 {
        lock(&self.inner).completed()
    }

    /// Takes an agreed report; with the last comes what to do with the pages.
    fn consume(&self, report: &PyReport) -> Result<Option<PyPublication>> {
        let publication = lock(&self.inner).consume(report.inner)?;
        Ok(publication.map(|done| PyPublication { publish: done.publish, free_to: done.free_to }))
    }
}
