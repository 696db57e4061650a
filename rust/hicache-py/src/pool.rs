//! Pools, their components and hit policies from Python.

use hicache_core::{Component, DType, Error, HitPolicy, Pool, PoolKind, RowUnit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PySequence};

use crate::arguments::{to_u32, type_name};
use crate::errors::Result;
use crate::namespace::{parse_json, repr, to_tuples};
use crate::tile::PyTile;

/// One of the arrays that a page consists of.
#[pyclass(frozen, eq, hash, name = "Component", module = "hicache_store")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyComponent {
    inner: Component,
}

#[pymethods]
impl PyComponent {
    #[new]
    #[pyo3(signature = (name, row_bytes, unit="token", dtype=None))]
    fn new(name: String, row_bytes: i64, unit: &str, dtype: Option<&str>) -> Result<Self> {
        let (row_bytes, unit) = (to_u32("row_bytes", row_bytes)?, RowUnit::parse(unit)?);
        let dtype = dtype.map(DType::parse).transpose()?;
        Ok(PyComponent { inner: Component { name, row_bytes, unit, dtype } })
    }

    /// Name, unique in the pool.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// Bytes of one token (or page), one layer, one head.
    #[getter]
    fn row_bytes(&self) -> u32 {
        self.inner.row_bytes
    }

    /// "token" or "page": how often there is a row.
    #[getter]
    fn unit(&self) -> &'static str {
        self.inner.unit.name()
    }

    /// Element type, where it is not the pool's.
    #[getter]
    fn dtype(&self) -> Option<&'static str> {
        self.inner.dtype.map(DType::name)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Component { name, row_bytes, unit, dtype } = &self.inner;
        let mut text = format!("Component({}, {row_bytes}", repr(py, name)?);
        if *unit != RowUnit::Token {
            text.push_str(&format!(", unit='{}'", unit.name()));
        }
        if let Some(dtype) = dtype {
            text.push_str(&format!(", dtype='{dtype}'"));
        }
        Ok(text + ")")
    }
}

/// The parts of a page of one kind of state.
#[pyclass(frozen, eq, hash, name = "Pool", module = "hicache_store")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyPool {
    pub(crate) inner: Pool,
}

#[pymethods]
impl PyPool {
    /// Schema of the canonical bytes.
    #[classattr]
    const SCHEMA_VERSION: u32 = Pool::SCHEMA_VERSION;

    #[new]
    #[pyo3(signature = (name, kind, dtype, components, row_format=None))]
    fn new(
        name: &str,
        kind: &str,
        dtype: &str,
        components: &Bound<'_, PyAny>,
        row_format: Option<&str>,
    ) -> Result<Self> {
        let (kind, dtype) = (PoolKind::parse(kind)?, DType::parse(dtype)?);
        Ok(PyPool { inner: Pool::new(name, kind, dtype, row_format, to_components(components)?)? })
    }

    /// The word by which the engine and a store know the pool.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// What sort of state it holds.
    #[getter]
    fn kind(&self) -> &'static str {
        self.inner.kind().name()
    }

    /// Canonical name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.inner.dtype().name()
    }

    /// Packing of the rows, where the element type does not tell.
    #[getter]
    fn row_format(&self) -> Option<&str> {
        self.inner.row_format()
    }

    /// The parts of a page, in order.
    #[getter]
    fn components(&self) -> Vec<PyComponent> {
        self.inner.components().iter().map(|component| PyComponent { inner: component.clone() }).collect()
    }

    /// First 16 bytes of the SHA-256 of the canonical bytes, in hex.
    #[getter]
    fn fingerprint(&self) -> String {
        self.inner.fingerprint().to_string()
    }

    /// Returns the bytes of one page of `tile`, which needs tokens.
    fn page_bytes(&self, tile: &PyTile) -> Result<u64> {
        Ok(self.inner.page_bytes(&tile.with_tokens()?)?)
    }

    /// Returns the bytes that the fingerprint covers.
    fn canonical_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.canonical_bytes())
    }

    /// Reads `canonical_bytes()` back.
    #[staticmethod]
    fn from_canonical_bytes(data: &[u8]) -> Result<Self> {
        Ok(PyPool { inner: Pool::from_canonical_bytes(data)? })
    }

    /// Returns a JSON object as text.
    fn to_json(&self) -> String {
        self.inner.to_json().to_string()
    }

    /// Reads `to_json()` back.
    #[staticmethod]
    fn from_json(text: &str) -> Result<Self> {
        Ok(PyPool { inner: Pool::from_json(&parse_json(text)?)? })
    }

    /// Returns the fields in which two pools differ.
    fn differences(&self, other: &PyPool) -> Vec<(String, String, String)> {
        to_tuples(self.inner.differences(&other.inner))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Result<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.getattr("from_json")?, (slf.get().to_json(),)))
    }

    pub(crate) fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let components = self.components();
        let components = components.iter().map(|component| component.__repr__(py));
        let components = components.collect::<PyResult<Vec<_>>>()?.join(", ");
        let row_format = match self.row_format() {
            Some(row_format) => format!(", row_format={}", repr(py, row_format)?),
            None => String::new(),
        };
        let name = repr(py, self.name())?;
        Ok(format!("Pool({name}, '{}', '{}', [{components}]{row_format})", self.kind(), self.dtype()))
    }
}

/// A dict of row bytes by name, or a sequence of components.
fn to_components(object: &Bound<'_, PyAny>) -> Result<Vec<Component>> {
    if let Ok(rows) = object.cast::<PyDict>() {
        return rows
            .iter()
            .map(|(name, row_bytes)| {
                let name: String = name.extract()?;
                let row_bytes = to_u32(&format!("components[{name:?}]"), row_bytes.extract()?)?;
                Ok(Component::per_token(&name, row_bytes))
            })
            .collect();
    }
    if object.cast::<PySequence>().is_err() {
        let found = type_name(object);
        return Err(Error::config(format!(
            "components: expected a dict of row bytes by name, or a list of Component, found {found}"
        ))
        .into());
    }
    let mut components = Vec::new();
    for (index, item) in object.try_iter()?.enumerate() {
        let item = item?;
        let Ok(component) = item.cast::<PyComponent>() else {
            let found = type_name(&item);
            return Err(
                Error::config(format!("components[{index}]: expected a Component, found {found}")).into()
            );
        };
        components.push(component.get().inner.clone());
    }
    Ok(components)
}

/// Which pages of a pool must be there for a prefix to be usable.
#[pyclass(frozen, eq, hash, name = "HitPolicy", module = "hicache_store")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyHitPolicy {
    pub(crate) inner: HitPolicy,
}

impl PyHitPolicy {
    fn checked(inner: HitPolicy) -> Result<Self> {
        inner.validate()?;
        Ok(PyHitPolicy { inner })
    }
}

#[pymethods]
impl PyHitPolicy {
    /// Returns the policy of KV: every page of the prefix.
    #[staticmethod]
    fn all_pages() -> Self {
        PyHitPolicy { inner: HitPolicy::AllPages }
    }

    /// Returns the policy of windows and states: only the last `pages` of the prefix.
    #[staticmethod]
    fn trailing_pages(pages: i64) -> Result<Self> {
        PyHitPolicy::checked(HitPolicy::TrailingPages(to_u32("pages", pages)?))
    }

    /// Returns the policy of states kept once for each block: the last `group_pages` of each `block_pages`.
    #[staticmethod]
    fn block_groups(block_pages: i64, group_pages: i64) -> Result<Self> {
        let block_pages = to_u32("block_pages", block_pages)?;
        let group_pages = to_u32("group_pages", group_pages)?;
        PyHitPolicy::checked(HitPolicy::BlockGroups { block_pages, group_pages })
    }

    fn __repr__(&self) -> String {
        match self.inner {
            HitPolicy::AllPages => "HitPolicy.all_pages()".to_owned(),
            other => format!("HitPolicy.{other}"),
        }
    }
}
