//! The budget of the scratch buffers in which prefixes are assembled.

use std::sync::Mutex;

use hicache_ranks::scratch::{Mark, Room, ScratchBudget, ScratchSize};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::lock;
use crate::ranks::ownership::PyPlacement;

/// What the size of the buffers follows from.
#[pyclass(frozen, eq, name = "ScratchSize", module = "hicache_store.ranks")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PyScratchSize {
    inner: ScratchSize,
}

#[pymethods]
impl PyScratchSize {
    #[new]
    #[pyo3(signature = (placement, *, contexts, context, chunk))]
    fn new(placement: &PyPlacement, contexts: u32, context: u64, chunk: u64) -> Result<Self> {
        Ok(PyScratchSize { inner: ScratchSize::new(placement.inner, contexts, context, chunk)? })
    }

    /// Rows of one slot.
    #[getter]
    fn rows(&self) -> u64 {
        self.inner.rows()
    }

    /// Tokens of the prefix region.
    #[getter]
    fn prefix_tokens(&self) -> u64 {
        self.inner.prefix_tokens()
    }

    /// Tokens of the chunk region.
    #[getter]
    fn chunk_tokens(&self) -> u64 {
        self.inner.chunk_tokens()
    }

    /// Bytes charged before the KV pools are sized.
    #[pyo3(signature = (row_bytes, *, draft=false))]
    fn bytes(&self, row_bytes: u64, draft: bool) -> u64 {
        self.inner.bytes(row_bytes, draft)
    }

    /// Tokens that a prefix takes, padding included.
    fn padded(&self, pages: u32) -> u64 {
        self.inner.padded(pages)
    }
}

/// What one batch has reserved.
#[pyclass(frozen, name = "ScratchBudget", module = "hicache_store.ranks")]
pub(crate) struct PyScratchBudget {
    inner: Mutex<(ScratchBudget, Vec<Mark>)>,
}

#[pymethods]
impl PyScratchBudget {
    #[new]
    fn new(size: &PyScratchSize) -> Self {
        PyScratchBudget { inner: Mutex::new((ScratchBudget::new(size.inner), Vec::new())) }
    }

    /// Reserves room for a request; whether there was some.
    fn reserve(&self, prefix_pages: u32, extend_tokens: u64) -> Result<bool> {
        Ok(lock(&self.inner).0.reserve(prefix_pages, extend_tokens)? == Room::Granted)
    }

    /// Tokens reserved so far, of the prefix region and of the chunk region.
    #[getter]
    fn used(&self) -> (u64, u64) {
        lock(&self.inner).0.used()
    }

    /// Where the batch stands.
    fn mark(&self) -> usize {
        let (budget, marks) = &mut *lock(&self.inner);
        let mark = budget.mark();
        if marks.last() != Some(&mark) {
            marks.push(mark);
        }
        marks.len() - 1
    }

    /// Takes back what was reserved since a mark.
    fn rollback(&self, mark: usize) -> Result<()> {
        let (budget, marks) = &mut *lock(&self.inner);
        let Some(&to) = marks.get(mark) else {
            return Err(hicache_ranks::RankError::state(format!("mark {mark} of {}", marks.len())).into());
        };
        budget.rollback(to);
        marks.truncate(mark + 1);
        Ok(())
    }

    /// Begins the next batch.
    fn clear(&self) {
        let (budget, marks) = &mut *lock(&self.inner);
        budget.clear();
        marks.clear();
    }
}
