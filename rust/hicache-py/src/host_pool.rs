//! Host pools and the leases of their slots from Python.

use std::os::fd::{AsFd, IntoRawFd};

use hicache_core::{Error, ErrorKind, HostPool, Lease};
use hicache_sys::memory::{MemoryOptions, Node, PageKind, Wish};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::arguments::{to_integers, to_u32, to_u64, type_name};
use crate::errors::Result;
use crate::exports::{DL_CPU, DL_CUDA_HOST, to_capsule};
use crate::store::to_bytes;

/// Pinned host memory in slots of one size.
#[pyclass(frozen, subclass, name = "_HostPool", module = "hicache_store")]
pub(crate) struct PyHostPool {
    /// `None` only while it is dropped.
    pool: Option<HostPool>,
}

impl PyHostPool {
    pub(crate) fn pool(&self) -> Result<&HostPool> {
        Ok(self.pool.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "the pool was closed"))?)
    }
}

impl Drop for PyHostPool {
    fn drop(&mut self) {
        let pool = self.pool.take();
        // Unregistering waits for the device: others need not wait for the interpreter meanwhile.
        let mut dropped = Some(pool);
        Python::try_attach(|py| {
            let pool = dropped.take();
            py.detach(move || drop(pool));
        });
    }
}

#[pymethods]
impl PyHostPool {
    #[new]
    #[pyo3(signature = (slots, slot_bytes, *, huge_pages="try", huge_page_bytes=None, numa=None, numa_required=false, prefault=true, touch_threads=None, lock="off", register="try", register_piece=None, shared=false, attach=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        slots: i64,
        slot_bytes: i64,
        huge_pages: &str,
        huge_page_bytes: Option<&Bound<'_, PyAny>>,
        numa: Option<&Bound<'_, PyAny>>,
        numa_required: bool,
        prefault: bool,
        touch_threads: Option<i64>,
        lock: &str,
        register: &str,
        register_piece: Option<&Bound<'_, PyAny>>,
        shared: bool,
        attach: Option<i32>,
    ) -> Result<Self> {
        let (slots, slot_bytes) = (to_u64("slots", slots)?, to_u64("slot_bytes", slot_bytes)?);
        let usual = MemoryOptions::default();
        let size = |name, size: Option<&Bound<'_, PyAny>>| -> Result<Option<usize>> {
            Ok(size.map(|size| to_bytes(name, size)).transpose()?.map(|bytes| bytes as usize))
        };
        let options = MemoryOptions {
            huge_pages: to_wish("huge_pages", huge_pages)?,
            huge_page_bytes: size("huge_page_bytes", huge_page_bytes)?,
            node: numa.map_or(Ok(Node::Any), to_node)?,
            node_is_required: numa_required,
            prefault,
            touch_threads: to_u32("touch_threads", touch_threads.unwrap_or(0))? as usize,
            lock: to_wish("lock", lock)?,
            register: to_wish("register", register)?,
            register_piece_bytes: size("register_piece", register_piece)?
                .unwrap_or(usual.register_piece_bytes),
            shared,
            ..usual
        };
        let Some(descriptor) = attach else {
            let pool = py.detach(|| HostPool::new(slots, slot_bytes, &options))?;
            return Ok(PyHostPool { pool: Some(pool) });
        };
        let descriptor = hicache_sys::memory::duplicate(descriptor)
            .map_err(|error| Error::config(format!("attach: file descriptor {descriptor}: {error}")))?;
        let pool = py.detach(|| HostPool::attach(descriptor.as_fd(), slots, slot_bytes, &options))?;
        Ok(PyHostPool { pool: Some(pool) })
    }

    /// Number of slots.
    #[getter]
    fn slots(&self) -> Result<u64> {
        Ok(self.pool()?.slots())
    }

    /// Bytes of one slot.
    #[getter]
    fn slot_bytes(&self) -> Result<u64> {
        Ok(self.pool()?.slot_bytes())
    }

    /// Bytes of all slots.
    #[getter]
    fn nbytes(&self) -> Result<u64> {
        Ok(self.pool()?.bytes())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.pool.as_ref().is_none_or(HostPool::is_closed)
    }

    /// What was got, in words.
    #[getter]
    fn got<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyTuple>> {
        Ok(PyTuple::new(py, self.pool()?.report()?.words())?)
    }

    /// Address of the memory as devices see it, or None.
    #[getter]
    fn device_address(&self, py: Python<'_>) -> Result<Option<u64>> {
        let pool = self.pool()?;
        Ok(py.detach(|| pool.device_address())?)
    }

    /// Returns what was got of what was wished for, and how full the pool is.
    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let pool = self.pool()?;
        let (report, usage) = (pool.report()?, pool.usage()?);
        let pages = match report.pages {
            PageKind::Ordinary => "ordinary",
            PageKind::Transparent => "thp",
            PageKind::Hugetlb => "hugetlb",
        };
        let stats = PyDict::new(py);
        stats.set_item("slots", pool.slots())?;
        stats.set_item("slot_bytes", pool.slot_bytes())?;
        stats.set_item("mapped_bytes", report.mapped_bytes)?;
        stats.set_item("pages", pages)?;
        stats.set_item("page_bytes", report.page_bytes)?;
        stats.set_item("huge_bytes", report.huge_bytes)?;
        stats.set_item("numa", report.node)?;
        stats.set_item("prefaulted", report.prefaulted)?;
        stats.set_item("locked", report.locked)?;
        stats.set_item("registered_pieces", &report.registered_pieces)?;
        stats.set_item("shared", report.shared)?;
        stats.set_item("unmet", &report.unmet)?;
        stats.set_item("free_slots", usage.free_slots)?;
        stats.set_item("leased_slots", usage.leased_slots)?;
        stats.set_item("leases", usage.leases)?;
        stats.set_item("views", usage.views)?;
        Ok(stats)
    }

    /// Leases slots to the caller, all or none.
    fn lease(&self, count: i64) -> Result<PySlotLease> {
        let count = to_u64("count", count)?;
        Ok(PySlotLease { lease: self.pool()?.lease(count)? })
    }

    /// Ends a lease of this pool.
    fn release(&self, lease: &PySlotLease) -> Result<()> {
        Ok(self.pool()?.release(&lease.lease)?)
    }

    /// Returns a file descriptor by which another process attaches; the caller closes it.
    fn share(&self) -> Result<i32> {
        let Some(descriptor) = self.pool()?.descriptor()? else {
            let message = "expected a pool made with shared=True, found one of this process alone";
            return Err(Error::new(ErrorKind::Unsupported, message).into());
        };
        Ok(descriptor.into_raw_fd())
    }

    /// Unregisters and unmaps the memory.
    fn close(&self, py: Python<'_>) -> Result<()> {
        let Some(pool) = &self.pool else { return Ok(()) };
        Ok(py.detach(|| pool.close())?)
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
    ) -> Result<()> {
        self.close(py)
    }

    /// Returns the kind and number of the device in DLPack.
    fn __dlpack_device__(&self) -> Result<(i32, i32)> {
        let registered = !self.pool()?.report()?.registered_pieces.is_empty();
        Ok((if registered { DL_CUDA_HOST } else { DL_CPU }, 0))
    }

    /// Returns the memory as a capsule.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> Result<Bound<'py, PyAny>> {
        let _ = stream; // host memory is of no stream
        let here = self.__dlpack_device__()?;
        let device = dl_device.unwrap_or(here);
        if device != here && device != (DL_CPU, 0) {
            let found = format!("expected the device ({DL_CPU}, 0), found {device:?}");
            return Err(pyo3::exceptions::PyBufferError::new_err(found).into());
        }
        if copy == Some(true) {
            return Err(pyo3::exceptions::PyBufferError::new_err("a pool's memory is not copied").into());
        }
        let region = self.pool()?.region()?;
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        Ok(to_capsule(py, region, device.0, versioned)?)
    }

    fn __repr__(&self) -> String {
        let Some(pool) = self.pool.as_ref().filter(|pool| !pool.is_closed()) else {
            return "<HostPool, closed>".to_owned();
        };
        let got = pool.report().map(|report| report.words().join(", ")).unwrap_or_default();
        format!("<HostPool of {} slots of {} bytes: {got}>", pool.slots(), pool.slot_bytes())
    }
}

/// Slots of a pool that the holder has until it is released or dropped.
#[pyclass(frozen, name = "SlotLease", module = "hicache_store")]
pub(crate) struct PySlotLease {
    lease: Lease,
}

#[pymethods]
impl PySlotLease {
    /// Numbers of the slots, in the order in which they were leased.
    #[getter]
    fn slots(&self) -> Result<Vec<i64>> {
        Ok(self.lease.slots()?)
    }

    /// Whether the slots were released.
    #[getter]
    fn released(&self) -> bool {
        self.lease.is_released()
    }

    /// Gives slots back: all, or those named.
    #[pyo3(signature = (slots=None))]
    fn release(&self, slots: Option<&Bound<'_, PyAny>>) -> Result<()> {
        match slots {
            None => Ok(self.lease.release()?),
            Some(slots) => Ok(self.lease.release_slots(&to_integers("slots", slots)?)?),
        }
    }

    fn __len__(&self) -> Result<usize> {
        Ok(self.lease.handles()?.len())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> Result<()> {
        if self.lease.is_released() { Ok(()) } else { Ok(self.lease.release()?) }
    }

    fn __repr__(&self) -> String {
        match self.lease.slots() {
            Ok(slots) => format!("<SlotLease of {} slots>", slots.len()),
            Err(_) => "<SlotLease, released>".to_owned(),
        }
    }
}

fn to_wish(name: &str, text: &str) -> Result<Wish> {
    match text {
        "off" => Ok(Wish::Off),
        "try" => Ok(Wish::Try),
        "require" => Ok(Wish::Require),
        _ => Err(Error::config(format!("{name}: expected off, try or require, found {text:?}")).into()),
    }
}

fn to_node(object: &Bound<'_, PyAny>) -> Result<Node> {
    if let Ok(text) = object.cast::<PyString>() {
        if text.to_cow()? == "local" {
            return Ok(Node::Local);
        }
    } else if let Ok(number) = object.extract::<i64>() {
        return Ok(Node::Number(to_u32("numa", number)?));
    }
    let found = match object.cast::<PyString>() {
        Ok(text) => format!("{:?}", text.to_cow()?),
        Err(_) => type_name(object),
    };
    Err(Error::config(format!("numa: expected the number of a node, \"local\" or None, found {found}"))
        .into())
}
