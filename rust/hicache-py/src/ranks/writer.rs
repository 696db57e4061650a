//! What a rank holds of a page, and which rank writes it.

use hicache_ranks::writer::{Holding, Pages, Range, Spread};
use hicache_ranks::{Rank, RankError};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::topology::PyTopology;

/// What a rank holds of a pool.
#[pyclass(frozen, eq, hash, get_all, name = "Holding", module = "hicache_store.ranks")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyHolding {
    /// The owner whose pages it holds; None for every page.
    owner: Option<u32>,
    /// Model-global layers, half open.
    layers: (u32, u32),
    /// Model-global KV heads, half open.
    heads: (u32, u32),
    /// First token within a page, and the distance of tokens.
    tokens: (u32, u32),
}

#[pymethods]
impl PyHolding {
    fn __repr__(&self) -> String {
        let PyHolding { owner, layers, heads, tokens } = self;
        let owner = owner.map_or_else(|| "None".to_owned(), |owner| owner.to_string());
        format!("Holding(owner={owner}, layers={layers:?}, heads={heads:?}, tokens={tokens:?})")
    }
}

/// How a pool is spread over the ranks.
#[pyclass(frozen, name = "Spread", module = "hicache_store.ranks")]
pub(crate) struct PySpread {
    inner: Spread,
}

#[pymethods]
impl PySpread {
    #[new]
    fn new(stages: Vec<(u32, u32)>, kv_heads: u32) -> Result<Self> {
        let stages = stages.into_iter().map(|(start, end)| Range { start, end }).collect();
        Ok(PySpread { inner: Spread::new(stages, kv_heads)? })
    }

    /// Layers dealt out to stages as evenly as possible.
    #[staticmethod]
    fn even(layers: u32, stages: u32, kv_heads: u32) -> Result<Self> {
        if layers < stages {
            return Err(RankError::config(format!("{layers} layers over {stages} stages")).into());
        }
        Ok(PySpread { inner: Spread::even(layers, stages, kv_heads)? })
    }

    /// What a rank holds.
    fn holding(&self, topology: &PyTopology, rank: u32) -> Result<PyHolding> {
        let at = topology.inner.coordinates(Rank(rank))?;
        let Holding { pages, layers, heads, tokens } = self.inner.holding(&topology.inner, at)?;
        let owner = match pages {
            Pages::All => None,
            Pages::OwnedBy(owner) => Some(owner),
        };
        let (layers, heads) = ((layers.start, layers.end), (heads.start, heads.end));
        Ok(PyHolding { owner, layers, heads, tokens: (tokens.lane, tokens.lanes) })
    }

    /// The rank that writes what a rank holds.
    fn writer(&self, topology: &PyTopology, rank: u32) -> Result<u32> {
        Ok(self.inner.writer(&topology.inner, Rank(rank))?.0)
    }

    /// Whether a rank writes what it holds.
    fn is_writer(&self, topology: &PyTopology, rank: u32) -> Result<bool> {
        Ok(self.inner.is_writer(&topology.inner, Rank(rank))?)
    }
}
