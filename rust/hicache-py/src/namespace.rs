//! Namespaces from Python.

use hicache_core::{Difference, Error, Namespace};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::to_u32;
use crate::errors::Result;

/// What must be equal for the bytes of two deployments to be interchangeable.
#[pyclass(frozen, eq, hash, name = "Namespace", module = "hicache_store")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyNamespace {
    pub(crate) inner: Namespace,
}

#[pymethods]
impl PyNamespace {
    /// Schema of the canonical bytes.
    #[classattr]
    const SCHEMA_VERSION: u32 = Namespace::SCHEMA_VERSION;

    /// The revision of one who knowingly gives none.
    #[classattr]
    const UNVERSIONED: &'static str = Namespace::UNVERSIONED;

    #[new]
    #[pyo3(signature = (model, *, revision, page_size, salt=None))]
    fn new(model: &str, revision: &str, page_size: i64, salt: Option<&str>) -> Result<Self> {
        let page_size = to_u32("page_size", page_size)?;
        Ok(PyNamespace { inner: Namespace::new(model, revision, page_size, salt)? })
    }

    /// Model id.
    #[getter]
    fn model(&self) -> &str {
        self.inner.model()
    }

    /// Weights revision.
    #[getter]
    fn revision(&self) -> &str {
        self.inner.revision()
    }

    /// Tokens in a page.
    #[getter]
    fn page_size(&self) -> u32 {
        self.inner.page_size()
    }

    /// Tenant or adapter, if any.
    #[getter]
    fn salt(&self) -> Option<&str> {
        self.inner.salt()
    }

    /// Whether the revision is `UNVERSIONED`.
    #[getter]
    fn is_unversioned(&self) -> bool {
        self.inner.is_unversioned()
    }

    /// First 16 bytes of the SHA-256 of the canonical bytes, in hex.
    #[getter]
    fn fingerprint(&self) -> String {
        self.inner.fingerprint().to_string()
    }

    /// Returns the bytes that the fingerprint covers.
    fn canonical_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.canonical_bytes())
    }

    /// Reads `canonical_bytes()` back.
    #[staticmethod]
    fn from_canonical_bytes(data: &[u8]) -> Result<Self> {
        Ok(PyNamespace { inner: Namespace::from_canonical_bytes(data)? })
    }

    /// Returns a JSON object as text.
    fn to_json(&self) -> String {
        self.inner.to_json().to_string()
    }

    /// Reads `to_json()` back.
    #[staticmethod]
    fn from_json(text: &str) -> Result<Self> {
        Ok(PyNamespace { inner: Namespace::from_json(&parse_json(text)?)? })
    }

    /// Returns the fields in which two namespaces differ.
    fn differences(&self, other: &PyNamespace) -> Vec<(String, String, String)> {
        to_tuples(self.inner.differences(&other.inner))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Result<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.getattr("from_json")?, (slf.get().to_json(),)))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (model, revision) = (repr(py, self.model())?, repr(py, self.revision())?);
        let salt = match self.salt() {
            Some(salt) => format!(", salt={}", repr(py, salt)?),
            None => String::new(),
        };
        Ok(format!("Namespace({model}, revision={revision}, page_size={}{salt})", self.page_size()))
    }
}

/// Text as a Python literal.
pub(crate) fn repr(py: Python<'_>, text: &str) -> PyResult<String> {
    PyString::new(py, text).repr()?.extract()
}

/// Differences as field, left, right.
pub(crate) fn to_tuples(differences: Vec<Difference>) -> Vec<(String, String, String)> {
    differences.into_iter().map(|found| (found.field, found.left, found.right)).collect()
}

/// Parses the JSON text of an identity.
pub(crate) fn parse_json(text: &str) -> Result<serde_json::Value> {
    let refuse = |error| Error::namespace(format!("expected JSON text, found an error at {error}"));
    Ok(serde_json::from_str(text).map_err(refuse)?)
}
