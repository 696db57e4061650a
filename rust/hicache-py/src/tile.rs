//! Tiles from Python. A tile may leave its tokens out: it then means every token of whatever page it is used with.

use hicache_core::{Error, Span, Tile, TokenLattice};
use pyo3::prelude::*;

use crate::arguments::to_u32;
use crate::errors::Result;

/// Layers x heads x tokens of a page, in model-global coordinates.
#[pyclass(frozen, eq, hash, name = "Tile", module = "hicache_store")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyTile {
    layers: Span,
    heads: Span,
    tokens: Option<TokenLattice>,
}

impl From<Tile> for PyTile {
    fn from(tile: Tile) -> Self {
        PyTile { layers: tile.layers, heads: tile.heads, tokens: Some(tile.tokens) }
    }
}

impl PyTile {
    /// The tile in a page of `page_size` tokens.
    pub(crate) fn resolve(&self, page_size: u32) -> Result<Tile> {
        let tokens = self.tokens.unwrap_or_else(|| TokenLattice::new(0, 1, page_size));
        Ok(Tile::new(self.layers, self.heads, tokens, page_size)?)
    }

    /// The tile, if it says which tokens it holds.
    pub(crate) fn resolved(&self) -> Option<Tile> {
        Some(Tile { layers: self.layers, heads: self.heads, tokens: self.tokens? })
    }

    /// The tile, where no page size is at hand.
    ///
    /// # Errors
    /// `Config` for a tile without tokens.
    pub(crate) fn with_tokens(&self) -> Result<Tile> {
        let refusal = || {
            Error::config(
                "expected a tile with tokens, found one of every token: give the page size with of_page(page_size)",
            )
        };
        Ok(self.resolved().ok_or_else(refusal)?)
    }
}

#[pymethods]
impl PyTile {
    #[new]
    #[pyo3(signature = (layers, heads, tokens=None))]
    fn new(layers: (i64, i64), heads: (i64, i64), tokens: Option<(i64, i64, i64)>) -> Result<Self> {
        let span = |name, (start, end)| -> Result<Span> {
            Ok(Span { start: to_u32(name, start)?, end: to_u32(name, end)? })
        };
        let (layers, heads) = (span("layers", layers)?, span("heads", heads)?);
        let lattice = |(first, step, count)| -> Result<TokenLattice> {
            let (first, step) = (to_u32("first token", first)?, to_u32("token step", step)?);
            Ok(TokenLattice::new(first, step, to_u32("token count", count)?))
        };
        let tile = PyTile { layers, heads, tokens: tokens.map(lattice).transpose()? };
        tile.resolve(Tile::MAX_PAGE_SIZE)?;
        Ok(tile)
    }

    /// First layer, and one past the last.
    #[getter]
    fn layers(&self) -> (u32, u32) {
        (self.layers.start, self.layers.end)
    }

    /// First KV head, and one past the last.
    #[getter]
    fn heads(&self) -> (u32, u32) {
        (self.heads.start, self.heads.end)
    }

    /// First token of the page, step and count; None for every token.
    #[getter]
    fn tokens(&self) -> Option<(u32, u32, u32)> {
        self.tokens.map(|tokens| (tokens.first, tokens.step, tokens.count))
    }

    /// Returns the tile with its tokens spelled out for pages of `page_size` tokens.
    fn of_page(&self, page_size: i64) -> Result<PyTile> {
        Ok(self.resolve(to_u32("page_size", page_size)?)?.into())
    }

    /// Returns the common part of two tiles with tokens, or None.
    fn intersect(&self, other: &PyTile) -> Result<Option<PyTile>> {
        Ok(self.with_tokens()?.intersect(&other.with_tokens()?).map(PyTile::from))
    }

    /// Tells whether every row of `other` is one of this tile; both need tokens.
    fn contains(&self, other: &PyTile) -> Result<bool> {
        Ok(self.with_tokens()?.contains(&other.with_tokens()?))
    }

    pub(crate) fn __repr__(&self) -> String {
        let (layers, heads) = (self.layers(), self.heads());
        match self.tokens() {
            Some(tokens) => format!("Tile(layers={layers:?}, heads={heads:?}, tokens={tokens:?})"),
            None => format!("Tile(layers={layers:?}, heads={heads:?})"),
        }
    }
}
