//! Layouts from Python: where each row sits, to be compared with other arithmetic.

use hicache_core::{Error, Layout, LayoutName};
use pyo3::prelude::*;

use crate::arguments::{to_u32, to_u64};
use crate::errors::Result;
use crate::pool::PyPool;
use crate::tile::PyTile;

/// Where every row of every page of a tile sits, in one buffer or several.
#[pyclass(frozen, eq, name = "Layout", module = "hicache_store")]
#[derive(PartialEq, Eq)]
pub(crate) struct PyLayout {
    pub(crate) inner: Layout,
}

#[pymethods]
impl PyLayout {
    /// Returns the layout of one page alone: a stored object, or the engine's flat page.
    #[staticmethod]
    fn object(name: &str, pool: &PyPool, tile: &PyTile) -> Result<Self> {
        let inner = Layout::object(LayoutName::parse(name)?, &pool.inner, &tile.with_tokens()?)?;
        Ok(PyLayout { inner })
    }

    /// Returns the layout of an engine's host pool of `slots` pages.
    #[staticmethod]
    #[pyo3(signature = (name, pool, tile, slots, *, split_buffers=false))]
    fn host(name: &str, pool: &PyPool, tile: &PyTile, slots: i64, split_buffers: bool) -> Result<Self> {
        let (name, tile, slots) = (LayoutName::parse(name)?, tile.with_tokens()?, to_u64("slots", slots)?);
        Ok(PyLayout { inner: Layout::host(name, &pool.inner, &tile, slots, split_buffers)? })
    }

    /// Returns the layout of parts of larger host pages.
    #[staticmethod]
    #[pyo3(signature = (name, pool, tile, slots, *, part_offset, page_bytes))]
    fn packed(
        name: &str,
        pool: &PyPool,
        tile: &PyTile,
        slots: i64,
        part_offset: i64,
        page_bytes: i64,
    ) -> Result<Self> {
        let (name, tile, slots) = (LayoutName::parse(name)?, tile.with_tokens()?, to_u64("slots", slots)?);
        let part_offset = to_u64("part_offset", part_offset)?;
        let page_bytes = to_u64("page_bytes", page_bytes)?;
        Ok(PyLayout { inner: Layout::packed(name, &pool.inner, &tile, slots, part_offset, page_bytes)? })
    }

    /// Order of the axes.
    #[getter]
    fn name(&self) -> String {
        self.inner.name.to_string()
    }

    /// What each page holds.
    #[getter]
    fn tile(&self) -> PyTile {
        self.inner.tile.into()
    }

    /// Pages.
    #[getter]
    fn slots(&self) -> u64 {
        self.inner.slots
    }

    /// Exact bytes of each buffer.
    #[getter]
    fn buffer_bytes(&self) -> Vec<u64> {
        self.inner.buffer_bytes.clone()
    }

    /// Returns the buffer of a row and its byte offset there; layer and head are model-global.
    fn offset(&self, component: i64, slot: i64, layer: i64, head: i64, token: i64) -> Result<(usize, u64)> {
        let component = to_u64("component", component)? as usize;
        let slot = to_u64("slot", slot)?;
        let (layer, head) = (to_u32("layer", layer)?, to_u32("head", head)?);
        let token = to_u32("token", token)?;
        let tile = &self.inner.tile;
        let is_inside = component < self.inner.components.len()
            && slot < self.inner.slots
            && (tile.layers.start..tile.layers.end).contains(&layer)
            && (tile.heads.start..tile.heads.end).contains(&head)
            && tile.tokens.position(token).is_some();
        if !is_inside {
            return Err(Error::geometry(format!(
                "expected a row of {} components and {} slots of {tile}, found component {component}, slot {slot}, layer {layer}, head {head}, token {token}",
                self.inner.components.len(),
                self.inner.slots
            ))
            .into());
        }
        Ok(self.inner.offset(component, slot, layer, head, token))
    }

    fn __repr__(&self) -> String {
        format!("<Layout {} of {} slots, {}>", self.inner.name, self.inner.slots, self.tile().__repr__())
    }
}
