//! Votes from Python: on the hit of a request, the outcome of a copy, the capacity of pools.

use hicache_ranks::vote::{CapacityVote, HitVote, Lengths, OutcomeVote, PoolVote};
use hicache_ranks::{Outcome, Ticket};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::ask::{PyAsk, to_answer};

/// A set of legal prefix lengths, in pages. Length 0 is always legal.
#[pyclass(frozen, eq, name = "Lengths", module = "hicache_store.ranks")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PyLengths {
    inner: Lengths,
    span: u32,
}

#[pymethods]
impl PyLengths {
    #[new]
    #[pyo3(signature = (span, legal=Vec::new()))]
    fn new(span: u32, legal: Vec<u32>) -> Self {
        PyLengths { inner: Lengths::exactly(span, legal), span }
    }

    /// Every length up to `pages`.
    #[staticmethod]
    fn up_to(span: u32, pages: u32) -> Self {
        PyLengths { inner: Lengths::up_to(span, pages), span }
    }

    /// Pages that were asked for.
    #[getter]
    fn span(&self) -> u32 {
        self.span
    }

    /// The longest legal length.
    #[getter]
    fn longest(&self) -> u32 {
        self.inner.longest()
    }

    /// The lengths that are legal in both.
    fn intersect(&self, other: &PyLengths) -> Result<PyLengths> {
        let mut both = self.clone();
        both.inner.intersect(&other.inner)?;
        Ok(both)
    }

    fn __contains__(&self, length: u32) -> bool {
        self.inner.contains(length)
    }

    fn __repr__(&self) -> String {
        let legal: Vec<_> = (0..=self.span).filter(|&length| self.inner.contains(length)).collect();
        format!("Lengths({}, {legal:?})", self.span)
    }
}

/// The agreed hit.
#[pyclass(frozen, eq, get_all, name = "Hit", module = "hicache_store.ranks")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PyHit {
    /// Pages that every rank can use, over all pools.
    pages: u32,
    /// The longest legal length of each pool alone.
    by_pool: Vec<u32>,
}

#[pymethods]
impl PyHit {
    fn __repr__(&self) -> String {
        format!("Hit(pages={}, by_pool={:?})", self.pages, self.by_pool)
    }
}

/// What this rank has of a pool: leading pages, or legal lengths.
#[derive(FromPyObject)]
pub(crate) enum Has {
    Pages(u32),
    Lengths(Py<PyLengths>),
}

fn pool_vote(has: Option<Has>) -> PoolVote {
    match has {
        Some(Has::Pages(pages)) => PoolVote::AllPages(pages),
        Some(Has::Lengths(lengths)) => PoolVote::Ending(lengths.get().inner.clone()),
        None => PoolVote::NoVerdict,
    }
}

/// The vote of one rank on the hit of one request.
#[pyclass(frozen, name = "HitVote", module = "hicache_store.ranks")]
pub(crate) struct PyHitVote {
    inner: HitVote,
}

#[pymethods]
impl PyHitVote {
    #[new]
    #[pyo3(signature = (request, span, pools, *, masks=false))]
    fn new(request: u64, span: u32, pools: Vec<Option<Has>>, masks: bool) -> Self {
        let votes = pools.into_iter().map(pool_vote).collect();
        PyHitVote { inner: HitVote::new(request, span, masks, votes) }
    }

    /// The vote of a rank that has nothing.
    #[staticmethod]
    #[pyo3(signature = (request, span, pools, *, masks=false))]
    fn nothing(request: u64, span: u32, pools: usize, masks: bool) -> Self {
        PyHitVote { inner: HitVote::nothing(request, span, masks, pools) }
    }

    /// The request's number.
    #[getter]
    fn request(&self) -> u64 {
        self.inner.number()
    }

    /// The reduction to carry out.
    fn begin(&self) -> PyAsk {
        self.inner.ask().into()
    }

    /// The agreed hit.
    fn resume(&self, answer: &Bound<'_, PyAny>) -> Result<PyHit> {
        let hit = self.inner.resume(to_answer(answer)?)?;
        Ok(PyHit { pages: hit.pages, by_pool: hit.by_pool })
    }
}

/// The vote on the outcome of a copy that can fail on one rank alone.
#[pyclass(frozen, name = "OutcomeVote", module = "hicache_store.ranks")]
pub(crate) struct PyOutcomeVote {
    inner: OutcomeVote,
}

#[pymethods]
impl PyOutcomeVote {
    #[new]
    fn new(ticket: u64, complete: bool) -> Self {
        let outcome = if complete { Outcome::Done } else { Outcome::Failed };
        PyOutcomeVote { inner: OutcomeVote::new(Ticket(ticket), outcome) }
    }

    /// The reduction to carry out.
    fn begin(&self) -> PyAsk {
        self.inner.ask().into()
    }

    /// Whether it succeeded on all ranks.
    fn resume(&self, answer: &Bound<'_, PyAny>) -> Result<bool> {
        Ok(self.inner.resume(to_answer(answer)?)? == Outcome::Done)
    }
}

/// The smallest capacity of all ranks.
#[pyclass(frozen, name = "CapacityVote", module = "hicache_store.ranks")]
pub(crate) struct PyCapacityVote {
    inner: CapacityVote,
}

#[pymethods]
impl PyCapacityVote {
    #[new]
    fn new(pages: Vec<u64>) -> Self {
        PyCapacityVote { inner: CapacityVote::new(pages) }
    }

    /// The reduction to carry out.
    fn begin(&self) -> PyAsk {
        self.inner.ask().into()
    }

    /// The agreed capacities.
    fn resume(&self, answer: &Bound<'_, PyAny>) -> Result<Vec<u64>> {
        Ok(self.inner.resume(to_answer(answer)?)?)
    }
}
