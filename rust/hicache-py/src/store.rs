//! The store from Python.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use hicache_core::{Error, IoMode, LayoutName, PoolPlacement, Store, StoreOptions, ViewOptions};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PySequence, PyString};

use crate::arguments::{to_u64, type_name};
use crate::errors::{Failure, Result};
use crate::namespace::{PyNamespace, repr};
use crate::notices;
use crate::pool::PyPool;
use crate::pool_set::PyPoolSet;
use crate::tile::PyTile;
use crate::view::{PyPoolView, PyView};

/// Level where a codec names none: zstd's own.
const DEFAULT_ZSTD_LEVEL: i32 = 3;

/// An open root of pages.
#[pyclass(frozen, name = "Store", module = "hicache_store")]
pub(crate) struct PyStore {
    store: Store,
}

#[pymethods]
impl PyStore {
    /// Opens the root at `path`, made now if there is none.
    #[staticmethod]
    #[pyo3(signature = (path, capacity=None, *, read_only=false, io_mode="auto", io_threads=None, durable=false, verify=true, time_to_live=None, free_space_floor=None, detect_conflicts=false))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        capacity: Option<&Bound<'_, PyAny>>,
        read_only: bool,
        io_mode: &str,
        io_threads: Option<i64>,
        durable: bool,
        verify: bool,
        time_to_live: Option<f64>,
        free_space_floor: Option<&Bound<'_, PyAny>>,
        detect_conflicts: bool,
    ) -> Result<Self> {
        let options = StoreOptions {
            capacity_bytes: capacity.map(|size| to_bytes("capacity", size)).transpose()?,
            read_only,
            io_mode: IoMode::parse(io_mode)?,
            io_threads: io_threads
                .map(|threads| to_u64("io_threads", threads))
                .transpose()?
                .map(|threads| threads as usize),
            durable,
            verify,
            time_to_live: time_to_live.map(|seconds| to_duration("time_to_live", seconds)).transpose()?,
            free_space_floor_bytes: free_space_floor
                .map(|size| to_bytes("free_space_floor", size))
                .transpose()?,
            detect_conflicts,
            ..StoreOptions::default()
        };
        let store = py.detach(|| Store::open(&path, options))?;
        notices::log(py, &store);
        Ok(PyStore { store })
    }

    /// Opens a view of pools in a namespace.
    #[pyo3(signature = (namespace, pools, *, tile=None, layout=None, codec="none"))]
    fn view(
        &self,
        py: Python<'_>,
        namespace: &PyNamespace,
        pools: &Bound<'_, PyAny>,
        tile: Option<&PyTile>,
        layout: Option<&str>,
        codec: &str,
    ) -> Result<PyView> {
        let options = ViewOptions { zstd_level: to_zstd_level(codec)? };
        let pools = to_pool_views(pools, tile, layout)?;
        let shares_memory = pools.iter().all(PyPoolView::is_packed);
        let page_size = namespace.inner.page_size();
        let pools = pools.iter().map(|pool| pool.resolve(page_size)).collect::<Result<Vec<_>>>()?;
        let namespace = namespace.inner.clone();
        let view = py.detach(|| self.store.view(namespace, pools, options));
        notices::log(py, &self.store);
        Ok(PyView::new(view?, self.store.clone(), shares_memory))
    }

    /// Folder of the root.
    #[getter]
    fn path(&self) -> PathBuf {
        self.store.path()
    }

    /// Returns sizes, how payload is read and written, and what this process counted.
    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let (used_bytes, counters, device) =
            py.detach(|| (self.store.used_bytes(), self.store.counters(), self.store.device()));
        let counted = PyDict::new(py);
        for (counter, value) in counters {
            counted.set_item(counter.name(), value)?;
        }
        let stats = PyDict::new(py);
        stats.set_item("path", self.store.path().as_os_str())?;
        stats.set_item("capacity_bytes", self.store.capacity_bytes())?;
        stats.set_item("used_bytes", used_bytes)?;
        stats.set_item("io", self.store.io_name())?;
        stats.set_item("process", self.store.process().to_string())?;
        let told = PyDict::new(py);
        told.set_item("slow", device.is_slow)?;
        told.set_item("p99_read_seconds", device.p99_read.as_secs_f64())?;
        told.set_item("p99_write_seconds", device.p99_write.as_secs_f64())?;
        told.set_item("breaker", device.breaker.name())?;
        told.set_item("abandoned_requests", device.abandoned)?;
        told.set_item("bounce_bytes", device.bounce_bytes)?;
        stats.set_item("device", told)?;
        stats.set_item("counters", counted)?;
        Ok(stats)
    }

    /// Leaves for the tools where the host pools of this process stand, and why.
    fn note_pools(&self, py: Python<'_>, pools: &Bound<'_, PyAny>) -> Result<()> {
        let placed = to_placements(pools)?;
        Ok(py.detach(|| self.store.note_pools(placed))?)
    }

    /// Removes pages, the least useful first, until the root takes at most `size` on disk. The number of objects.
    fn prune(&self, py: Python<'_>, size: &Bound<'_, PyAny>) -> Result<u64> {
        let bytes = to_bytes("size", size)?;
        let freed = py.detach(|| self.store.prune_to(bytes));
        notices::log(py, &self.store);
        Ok(freed?.objects)
    }

    /// Removes pages that were not used for so many seconds. The number of objects.
    fn prune_unused_for(&self, py: Python<'_>, seconds: f64) -> Result<u64> {
        let age = to_duration("seconds", seconds)?;
        let freed = py.detach(|| self.store.prune_unused_for(age));
        notices::log(py, &self.store);
        Ok(freed?.objects)
    }

    /// Changes the root's capacity for all processes. The number of objects that left.
    fn resize(&self, py: Python<'_>, capacity: &Bound<'_, PyAny>) -> Result<u64> {
        let bytes = to_bytes("capacity", capacity)?;
        let freed = py.detach(|| self.store.resize(bytes));
        notices::log(py, &self.store);
        Ok(freed?.objects)
    }

    /// Seals what was written and ends this process for the others.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.store.close());
        notices::log(py, &self.store);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.close(py);
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let path = repr(py, &self.store.path().to_string_lossy())?;
        Ok(format!("<Store at {path}, capacity {} bytes>", self.store.capacity_bytes()))
    }
}

/// Places of pools: a set of them, or name, place and reason of each.
fn to_placements(pools: &Bound<'_, PyAny>) -> Result<Vec<PoolPlacement>> {
    if let Ok(set) = pools.cast::<PyPoolSet>() {
        return Ok(set.get().placements());
    }
    let placement = |(index, item): (usize, PyResult<Bound<'_, PyAny>>)| -> Result<PoolPlacement> {
        let item = item?;
        let (name, place, reason) = item.extract::<(String, String, String)>().map_err(|_| -> Failure {
            let found = type_name(&item);
            Error::config(format!("pools[{index}]: expected name, place and reason, found {found}")).into()
        })?;
        Ok(PoolPlacement { name, place, reason })
    };
    pools.try_iter()?.enumerate().map(placement).collect()
}

/// Bytes from an int, or from text with a unit.
pub(crate) fn to_bytes(name: &str, object: &Bound<'_, PyAny>) -> Result<u64> {
    if object.is_instance_of::<PyInt>() {
        let refusal = || Error::config(format!("{name}: expected 0 to {} bytes, found more", i64::MAX));
        return to_u64(name, object.extract().map_err(|_| refusal())?);
    }
    let Ok(text) = object.cast::<PyString>() else {
        let found = type_name(object);
        return Err(Error::config(format!(
            "{name}: expected bytes, or text such as \"500GiB\", found {found}"
        ))
        .into());
    };
    let text = text.to_cow()?;
    let size: ByteSize = text.trim().parse().map_err(|_| {
        Error::config(format!("{name}: expected a size such as \"500GiB\" or \"2TB\", found {text:?}"))
    })?;
    Ok(size.as_u64())
}

fn to_duration(name: &str, seconds: f64) -> Result<Duration> {
    let refusal = || Error::config(format!("{name} is {seconds}, expected seconds, 0 or more"));
    Ok(Duration::try_from_secs_f64(seconds).map_err(|_| refusal())?)
}

/// Level of "zstd" or "zstd:3"; `None` for "none".
fn to_zstd_level(codec: &str) -> Result<Option<i32>> {
    let level = match codec {
        "none" => return Ok(None),
        "zstd" => Some(DEFAULT_ZSTD_LEVEL),
        _ => codec.strip_prefix("zstd:").and_then(|level| level.parse().ok()),
    };
    let refusal = || Error::config(format!("expected codec none, zstd or zstd:LEVEL, found {codec:?}"));
    Ok(Some(level.ok_or_else(refusal)?))
}

/// Pools of a view: one or several `PoolView`, or a `Pool` with the tile and layout beside it.
fn to_pool_views(
    pools: &Bound<'_, PyAny>,
    tile: Option<&PyTile>,
    layout: Option<&str>,
) -> Result<Vec<PyPoolView>> {
    if let Ok(pool) = pools.cast::<PyPool>() {
        let Some(tile) = tile else {
            return Err(Error::config("expected tile beside a Pool, found none").into());
        };
        let layout = LayoutName::parse(layout.unwrap_or("page_first"))?;
        return Ok(vec![PyPoolView::whole(pool.get(), *tile, layout)]);
    }
    if tile.is_some() || layout.is_some() {
        return Err(
            Error::config("expected tile and layout inside each PoolView, found them beside it").into()
        );
    }
    if let Ok(pool) = pools.cast::<PyPoolView>() {
        return Ok(vec![pool.get().clone()]);
    }
    let refuse = |name: String, found: &Bound<'_, PyAny>| {
        Error::config(format!("{name}: expected PoolView, found {}", type_name(found)))
    };
    if pools.cast::<PySequence>().is_err() {
        return Err(refuse("pools".to_owned(), pools).into());
    }
    let mut views = Vec::new();
    for (index, item) in pools.try_iter()?.enumerate() {
        let item = item?;
        let Ok(pool) = item.cast::<PyPoolView>() else {
            return Err(refuse(format!("pools[{index}]"), &item).into());
        };
        views.push(pool.get().clone());
    }
    Ok(views)
}
