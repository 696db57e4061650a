//! Views from Python: backup, match and restore of one rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hicache_core::{
    BackupOptions, Bounce, ChainStart, Error, HitPolicy, LayoutName, PoolMemory, RestoreOptions, Store, View,
    ViewPool,
};
use hicache_sys::Region;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use crate::arguments::{to_integers, to_u32, to_u64, type_name};
use crate::buffers::to_regions;
use crate::errors::{Failure, Result};
use crate::keys::{to_key, to_keys};
use crate::namespace::PyNamespace;
use crate::notices;
use crate::pool::{PyHitPolicy, PyPool};
use crate::reports::{PyBackupReport, PyMatch, PyRestoreReport};
use crate::tile::PyTile;

/// One pool of a view: what this rank holds of each page, and how.
#[pyclass(frozen, name = "PoolView", module = "hicache_store")]
#[derive(Clone)]
pub(crate) struct PyPoolView {
    pool: PyPool,
    tile: PyTile,
    layout: LayoutName,
    policy: HitPolicy,
    required: bool,
    page_bytes: Option<u64>,
    packed: Option<(u64, u64)>,
    read_by_all: bool,
}

impl PyPoolView {
    /// A required pool of which every page must be there.
    pub(crate) fn whole(pool: &PyPool, tile: PyTile, layout: LayoutName) -> Self {
        let (pool, policy) = (pool.clone(), HitPolicy::AllPages);
        PyPoolView {
            pool,
            tile,
            layout,
            policy,
            required: true,
            page_bytes: None,
            packed: None,
            read_by_all: false,
        }
    }

    /// Whether the pool's pages are parts of larger host pages.
    pub(crate) fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// The pool as the core takes it, for pages of `page_size` tokens.
    pub(crate) fn resolve(&self, page_size: u32) -> Result<ViewPool> {
        let tile = self.tile.resolve(page_size)?;
        self.check_page_bytes(&tile)?;
        Ok(ViewPool {
            pool: self.pool.inner.clone(),
            tile,
            layout: self.layout,
            packed: self.packed,
            policy: self.policy,
            required: self.required,
            read_by_all: self.read_by_all,
        })
    }

    fn check_page_bytes(&self, tile: &hicache_core::Tile) -> Result<()> {
        let computed = self.pool.inner.page_bytes(tile)?;
        match self.page_bytes {
            Some(expected) if expected != computed => Err(Error::geometry(format!(
                "expected pages of {expected} bytes in pool {:?}, computed {computed} from its components and {tile}",
                self.pool.inner.name()
            ))
            .into()),
            _ => Ok(()),
        }
    }
}

#[pymethods]
impl PyPoolView {
    #[new]
    #[pyo3(signature = (pool, tile, layout="page_first", policy=None, required=true, page_bytes=None, *, packed=None, read_by_all=false))]
    #[expect(clippy::too_many_arguments, reason = "they are the named arguments of a Python constructor")]
    fn new(
        pool: &PyPool,
        tile: &PyTile,
        layout: &str,
        policy: Option<&PyHitPolicy>,
        required: bool,
        page_bytes: Option<i64>,
        packed: Option<(i64, i64)>,
        read_by_all: bool,
    ) -> Result<Self> {
        let packed = packed.map(|(offset, host_page)| -> Result<_> {
            Ok((to_u64("packed part offset", offset)?, to_u64("packed host page bytes", host_page)?))
        });
        let view = PyPoolView {
            pool: pool.clone(),
            tile: *tile,
            layout: LayoutName::parse(layout)?,
            policy: policy.map_or(HitPolicy::AllPages, |policy| policy.inner),
            required,
            page_bytes: page_bytes.map(|bytes| to_u64("page_bytes", bytes)).transpose()?,
            packed: packed.transpose()?,
            read_by_all,
        };
        if let Some(tile) = view.tile.resolved() {
            view.check_page_bytes(&tile)?;
        }
        Ok(view)
    }

    /// Identity of the pool.
    #[getter]
    fn pool(&self) -> PyPool {
        self.pool.clone()
    }

    /// What this rank holds of each page.
    #[getter]
    fn tile(&self) -> PyTile {
        self.tile
    }

    /// Order of the rows in this rank's host memory.
    #[getter]
    fn layout(&self) -> String {
        self.layout.to_string()
    }

    /// Which pages must be there.
    #[getter]
    fn policy(&self) -> PyHitPolicy {
        PyHitPolicy { inner: self.policy }
    }

    /// Whether a prefix without this pool is no hit.
    #[getter]
    fn required(&self) -> bool {
        self.required
    }

    /// Bytes of a page as the engine computed them, if given.
    #[getter]
    fn page_bytes(&self) -> Option<u64> {
        self.page_bytes
    }

    /// Byte offset of the part, and bytes of a whole host page, if given.
    #[getter]
    fn packed(&self) -> Option<(u64, u64)> {
        self.packed
    }

    /// Whether other processes of this host read the same pages at about the same time.
    #[getter]
    fn read_by_all(&self) -> bool {
        self.read_by_all
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let required = if self.required { "required" } else { "optional" };
        let (pool, tile, policy) = (self.pool.__repr__(py)?, self.tile.__repr__(), self.policy);
        Ok(format!("<PoolView of {pool}, {tile}, {}, {policy}, {required}>", self.layout))
    }
}

/// A view of a namespace: what one rank of one deployment stores and asks for.
#[pyclass(frozen, name = "View", module = "hicache_store")]
pub(crate) struct PyView {
    view: Arc<View>,
    store: Store,
    /// All pools are parts of the same host pages: they share memory and slots.
    shares_memory: bool,
}

/// Host memory of all pools for one call, held until its end.
struct Memory {
    pools: Vec<(Vec<Arc<Region>>, Vec<i64>)>,
}

impl Memory {
    fn lend(&self) -> Vec<PoolMemory<'_>> {
        let lent = self
            .pools
            .iter()
            .map(|(regions, slots)| PoolMemory { regions: regions.iter().map(Arc::as_ref).collect(), slots });
        lent.collect()
    }
}

impl PyView {
    pub(crate) fn new(view: View, store: Store, shares_memory: bool) -> Self {
        PyView { view: Arc::new(view), store, shares_memory }
    }

    /// The view and its store, to be held by what outlives a call.
    pub(crate) fn parts(&self) -> (Arc<View>, Store) {
        (Arc::clone(&self.view), self.store.clone())
    }

    fn memory(&self, region: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>) -> Result<Memory> {
        let regions = self.by_pool("region", region, |_, one| to_regions(one))?;
        let slots = self.by_pool("slots", slots, to_integers)?;
        Ok(Memory { pools: regions.into_iter().zip(slots).collect() })
    }

    /// A policy for each pool that is to be consulted, from a dict by pool name.
    fn policies(&self, object: &Bound<'_, PyAny>) -> Result<Vec<Option<HitPolicy>>> {
        let pools = self.view.pool_names();
        let refuse = |found: String| -> Failure {
            let pools = pools.join(", ");
            Error::config(format!("policies: expected a dict with pools of {pools}, found {found}")).into()
        };
        let given = object.cast::<PyMapping>().map_err(|_| refuse(type_name(object)))?;
        let mut policies = vec![None; pools.len()];
        for item in given.items()?.iter() {
            let (name, policy): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
            let known =
                name.extract::<&str>().ok().and_then(|name| pools.iter().position(|pool| *pool == name));
            let Some(pool) = known else { return Err(refuse(format!("the key {}", name.repr()?))) };
            if policy.is_none() {
                continue;
            }
            let Ok(policy) = policy.cast::<PyHitPolicy>() else {
                return Err(refuse(format!("{} for {:?}", type_name(&policy), pools[pool])));
            };
            policies[pool] = Some(policy.get().inner);
        }
        Ok(policies)
    }

    /// One value for each pool, from a dict by pool name, or from one value where that can mean only one thing.
    fn by_pool<T: Clone>(
        &self,
        name: &str,
        object: &Bound<'_, PyAny>,
        convert: impl Fn(&str, &Bound<'_, PyAny>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let pools = self.view.pool_names();
        let refuse = |found: String| -> Failure {
            Error::config(format!(
                "{name}: expected a dict with the pools {}, found {found}",
                pools.join(", ")
            ))
            .into()
        };
        let Ok(given) = object.cast::<PyDict>() else {
            if pools.len() > 1 && !self.shares_memory {
                return Err(refuse(type_name(object)));
            }
            return Ok(vec![convert(name, object)?; pools.len()]);
        };
        for key in given.keys() {
            if !key.extract::<&str>().is_ok_and(|key| pools.contains(&key)) {
                return Err(refuse(format!("the key {}", key.repr()?)));
            }
        }
        let one = |pool: &&str| {
            let value = given.get_item(pool)?.ok_or_else(|| refuse(format!("none for {pool:?}")))?;
            convert(&format!("{name}[{pool:?}]"), &value)
        };
        pools.iter().map(one).collect()
    }
}

#[pymethods]
impl PyView {
    /// Stores pages of one chain from host memory.
    #[pyo3(signature = (keys, region, slots, parent=None, depth=None, *, timeout=None, bounce="never"))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn backup(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        region: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        depth: Option<i64>,
        timeout: Option<f64>,
        bounce: &str,
    ) -> Result<PyBackupReport> {
        let options = BackupOptions { deadline: deadline(timeout)?, bounce: Bounce::parse(bounce)? };
        let keys = to_keys(keys)?;
        let memory = self.memory(region, slots)?;
        let start = ChainStart {
            parent: parent.map(|parent| to_key(|| "parent".to_owned(), parent)).transpose()?,
            depth: depth.map(|depth| to_u32("depth", depth)).transpose()?,
        };
        let report = py.detach(|| self.view.backup_with(&keys, memory.lend(), start, options));
        notices::log(py, &self.store);
        Ok(report?.into())
    }

    /// Finds the longest prefix of `keys` that can be restored.
    #[pyo3(name = "match", signature = (keys, policies=None))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        policies: Option<&Bound<'_, PyAny>>,
    ) -> Result<PyMatch> {
        let policies = policies.map(|policies| self.policies(policies)).transpose()?;
        let keys = to_keys(keys)?;
        let answer = py.detach(|| match &policies {
            Some(policies) => self.view.match_pools(&keys, policies),
            None => self.view.match_prefix(&keys),
        });
        notices::log(py, &self.store);
        Ok(answer?.into())
    }

    /// Restores pages to host memory, each one exact or reported missing.
    #[pyo3(signature = (keys, region, slots, *, timeout=None, bounce="never"))]
    fn restore(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        region: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        bounce: &str,
    ) -> Result<PyRestoreReport> {
        let options = RestoreOptions { deadline: deadline(timeout)?, bounce: Bounce::parse(bounce)? };
        let keys = to_keys(keys)?;
        let memory = self.memory(region, slots)?;
        let report = py.detach(|| self.view.restore(&keys, memory.lend(), options));
        notices::log(py, &self.store);
        Ok(report?.into())
    }

    /// Forgets everything stored in the namespace, for all processes.
    fn clear(&self, py: Python<'_>) -> Result<usize> {
        let cleared = py.detach(|| self.view.clear());
        notices::log(py, &self.store);
        Ok(cleared?)
    }

    /// The namespace.
    #[getter]
    fn namespace(&self) -> PyNamespace {
        PyNamespace { inner: self.view.namespace().clone() }
    }

    /// Fingerprint of the namespace, in hex.
    #[getter]
    fn fingerprint(&self) -> String {
        self.view.fingerprint().to_string()
    }

    /// Names of the pools, in order.
    #[getter]
    fn pool_names(&self) -> Vec<&str> {
        self.view.pool_names()
    }

    /// Bytes of one page of each pool.
    #[getter]
    fn page_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let bytes = PyDict::new(py);
        for (index, name) in self.view.pool_names().into_iter().enumerate() {
            bytes.set_item(name, self.view.page_bytes(index))?;
        }
        Ok(bytes)
    }

    /// Objects that the index of this namespace holds.
    #[getter]
    fn indexed_objects(&self, py: Python<'_>) -> usize {
        py.detach(|| self.view.indexed_objects())
    }

    fn __repr__(&self) -> String {
        let pools = self.view.pool_names().join(", ");
        format!("<View of namespace {}, pools {pools}>", self.view.fingerprint())
    }
}

/// The moment `seconds` from now; `None` when that is never.
pub(crate) fn deadline(seconds: Option<f64>) -> Result<Option<Instant>> {
    let Some(seconds) = seconds else { return Ok(None) };
    if seconds.is_nan() {
        return Err(Error::config("timeout is not a number, expected seconds").into());
    }
    // What does not fit into a duration is longer than any run of this process.
    let wait = Duration::try_from_secs_f64(seconds.max(0.0)).ok();
    Ok(wait.and_then(|wait| Instant::now().checked_add(wait)))
}
