//! Transfers from Python: plans between host pools and device rows, and restores and backups layer by layer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use hicache_core::transfer::{
    Announce, Completion, CpuCopies, DeviceBuffer, Edges, Event, Executor, HostEvent, HostStream, LayerPlan,
    LayerwiseBackup, LayerwiseBackupTicket, LayerwiseRestore, LayerwiseTicket, Memory, Placed, Reading,
    Slots, TransferBackup, TransferPlan, TransferPool, TransferRestore,
};
use hicache_core::{BackupOptions, Bounce, ChainStart, Error, ErrorKind, RestoreOptions, Store, View};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyTuple};

use crate::arguments::{to_integers, to_u32, to_u64, type_name};
use crate::buffers::{Found, to_buffers};
use crate::errors::{Failure, Result};
use crate::keys::{to_key, to_keys};
use crate::layout::PyLayout;
use crate::notices;
use crate::reports::{PyBackupReport, PyRestoreReport};
use crate::view::{PyView, deadline};

/// Events of the host by the number that stands for them in lists of events.
static EVENTS: LazyLock<Mutex<HashMap<u64, Weak<HostEvent>>>> = LazyLock::new(Mutex::default);
static NEXT_EVENT: AtomicU64 = AtomicU64::new(1);

/// An event of the host: set once by whoever did the work, waited for by transfers.
#[pyclass(frozen, name = "HostEvent", module = "hicache_store")]
pub(crate) struct PyHostEvent {
    event: Arc<HostEvent>,
    handle: u64,
}

impl Drop for PyHostEvent {
    fn drop(&mut self) {
        EVENTS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&self.handle);
    }
}

#[pymethods]
impl PyHostEvent {
    #[new]
    fn new() -> Self {
        let (event, handle) = (HostEvent::new(), NEXT_EVENT.fetch_add(1, Ordering::Relaxed));
        let mut events = EVENTS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        events.insert(handle, Arc::downgrade(&event));
        drop(events);
        PyHostEvent { event, handle }
    }

    /// Says that the work is done.
    fn set(&self) {
        self.event.set();
    }

    /// Whether it is.
    #[getter]
    fn is_set(&self) -> Result<bool> {
        Ok(self.event.is_done()?)
    }

    /// Waits for it; whether it came in time.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> Result<bool> {
        let deadline = deadline(timeout)?;
        Ok(py.detach(|| self.event.wait_until(deadline))?)
    }

    /// The number that stands for it in lists of events.
    #[getter]
    fn handle(&self) -> u64 {
        self.handle
    }

    fn __repr__(&self) -> String {
        let is_set = self.event.is_done().unwrap_or(false);
        format!("<HostEvent {}, {}>", self.handle, if is_set { "set" } else { "not set" })
    }
}

fn to_event(name: &str, object: &Bound<'_, PyAny>) -> Result<Arc<HostEvent>> {
    if let Ok(event) = object.cast::<PyHostEvent>() {
        return Ok(Arc::clone(&event.get().event));
    }
    if !object.is_instance_of::<PyInt>() {
        let found = type_name(object);
        return Err(
            Error::config(format!("{name}: expected host events or their handles, found {found}")).into()
        );
    }
    let handle = to_u64(name, object.extract()?)?;
    let events = EVENTS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    events.get(&handle).and_then(Weak::upgrade).ok_or_else(|| {
        Error::config(format!("{name}: expected the handle of a live host event, found {handle}")).into()
    })
}

fn to_events(name: &str, object: Option<&Bound<'_, PyAny>>) -> Result<Vec<Arc<HostEvent>>> {
    let Some(object) = object else { return Ok(Vec::new()) };
    object.try_iter()?.map(|item| to_event(name, &item?)).collect()
}

fn as_events(events: Vec<Arc<HostEvent>>) -> Vec<Event> {
    events.into_iter().map(|event| event as Event).collect()
}

/// Streams are numbers of a device's driver; the host has one of its own, 0.
fn check_stream(stream: i64) -> Result<()> {
    match stream {
        0 => Ok(()),
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "expected stream 0, the host's own, found {stream}: memory of the host has no device streams"
            ),
        )
        .into()),
    }
}

/// One pool of a transfer: its pages on the host and on the device.
#[pyclass(frozen, name = "TransferPool", module = "hicache_store")]
pub(crate) struct PyTransferPool {
    pool: TransferPool,
}

#[pymethods]
impl PyTransferPool {
    #[new]
    #[pyo3(signature = (name, host, device, *, first_step=0))]
    fn new(name: &str, host: &Bound<'_, PyAny>, device: &Bound<'_, PyAny>, first_step: i64) -> Result<Self> {
        let device = match device.cast::<PyTuple>() {
            Ok(one) => vec![to_placed("device", one)?],
            Err(_) => device.try_iter()?.map(|item| to_placed("device", &item?)).collect::<Result<_>>()?,
        };
        let pool = TransferPool {
            name: name.to_owned(),
            host: to_placed("host", host)?,
            device,
            first_step: to_u32("first_step", first_step)?,
        };
        Ok(PyTransferPool { pool })
    }

    /// Name, as the store's view has it.
    #[getter]
    fn name(&self) -> &str {
        &self.pool.name
    }

    /// Layers of the pool.
    #[getter]
    fn layers(&self) -> u32 {
        self.pool.host.layout.tile.layers.len()
    }

    fn __repr__(&self) -> String {
        let layout = &self.pool.host.layout;
        format!("<TransferPool {:?}, {} of {} slots>", self.pool.name, layout.name, layout.slots)
    }
}

/// A layout with its memory, from a tuple of both.
fn to_placed(name: &str, object: &Bound<'_, PyAny>) -> Result<Placed> {
    let refuse = |found: String| -> Failure {
        Error::config(format!("{name}: expected a tuple of a Layout and its memory, found {found}")).into()
    };
    let pair = object.cast::<PyTuple>().map_err(|_| refuse(type_name(object)))?;
    let Ok((layout, memory)) = pair.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() else {
        return Err(refuse(format!("a tuple of {} items", pair.len())));
    };
    let layout = layout.cast::<PyLayout>().map_err(|_| refuse(type_name(&layout)))?;
    let memory = match to_buffers(&memory)? {
        Found::Host(regions) => Memory::Host(regions.into()),
        Found::Device(buffers) => {
            let buffers = buffers.into_iter().map(|(address, bytes)| DeviceBuffer { address, bytes });
            Memory::Device(buffers.collect::<Vec<_>>().into())
        }
    };
    Ok(Placed { layout: layout.get().inner.clone(), memory })
}

/// How the pages of all pools come from host pools to device rows and back, layer by layer.
#[pyclass(frozen, name = "TransferPlan", module = "hicache_store")]
pub(crate) struct PyTransferPlan {
    plan: Arc<TransferPlan>,
    copies: CpuCopies,
}

impl PyTransferPlan {
    fn names(&self) -> Vec<&str> {
        self.plan.pools().iter().map(|pool| pool.name.as_str()).collect()
    }

    /// Slots of every pool: one list for all of them, or a dict by name.
    fn slots(&self, name: &str, object: &Bound<'_, PyAny>) -> Result<Vec<Vec<i64>>> {
        let names = self.names();
        let Ok(given) = object.cast::<PyDict>() else {
            return Ok(vec![to_integers(name, object)?; names.len()]);
        };
        let refuse = |found: String| -> Failure {
            let names = names.join(", ");
            Error::config(format!("{name}: expected a dict with the pools {names}, found {found}")).into()
        };
        for key in given.keys() {
            if !key.extract::<&str>().is_ok_and(|key| names.contains(&key)) {
                return Err(refuse(format!("the key {}", key.repr()?)));
            }
        }
        let one = |pool: &&str| {
            let value = given.get_item(pool)?.ok_or_else(|| refuse(format!("none for {pool:?}")))?;
            to_integers(&format!("{name}[{pool:?}]"), &value)
        };
        names.iter().map(one).collect()
    }

    fn steps(&self, layers: Option<(i64, i64)>) -> Result<Range<usize>> {
        let all = self.plan.steps();
        let Some((start, end)) = layers else { return Ok(0..all as usize) };
        let (start, end) = (to_u32("layers", start)?, to_u32("layers", end)?);
        if start > end || end > all {
            return Err(Error::config(format!(
                "layers: expected a range within 0 to {all}, found {start} to {end}"
            ))
            .into());
        }
        Ok(start as usize..end as usize)
    }

    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn transfer(
        &self,
        py: Python<'_>,
        is_restore: bool,
        slots: (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
        layers: Option<(i64, i64)>,
        stream: i64,
        after: Option<&Bound<'_, PyAny>>,
        events: Option<&Bound<'_, PyAny>>,
    ) -> Result<u64> {
        check_stream(stream)?;
        let steps = self.steps(layers)?;
        let (after, events) = (to_events("after", after)?, to_events("events", events)?);
        if !events.is_empty() && events.len() != steps.len() {
            let (layers, found) = (steps.len(), events.len());
            return Err(Error::config(format!(
                "events: expected one for each of {layers} layers, found {found}"
            ))
            .into());
        }
        let (host, device) = (self.slots("host_slots", slots.0)?, self.slots("device_slots", slots.1)?);
        let pairs: Vec<(&[i64], &[i64])> =
            host.iter().map(Vec::as_slice).zip(device.iter().map(Vec::as_slice)).collect();
        let (plans, slots): (&[Arc<LayerPlan>], Slots) = if is_restore {
            (self.plan.restore(), self.plan.restore_slots(&pairs)?)
        } else {
            (self.plan.backup(), self.plan.backup_slots(&pairs)?)
        };
        py.detach(|| {
            for event in &after {
                event.wait_until(None)?;
            }
            let mut bytes = 0;
            for (number, plan) in plans[steps].iter().enumerate() {
                self.copies.copy_now(plan, &slots)?;
                if let Some(event) = events.get(number) {
                    event.set();
                }
                let of_pool = |one: &hicache_core::transfer::Move| {
                    slots.pools[one.pool].pairs().count() as u64 * one.plan.bytes()
                };
                bytes += plan.moves.iter().map(of_pool).sum::<u64>();
            }
            Ok(bytes)
        })
    }
}

#[pymethods]
impl PyTransferPlan {
    #[new]
    #[pyo3(signature = (pools, *, threads=1))]
    fn new(pools: &Bound<'_, PyAny>, threads: i64) -> Result<Self> {
        let pool = |item: PyResult<Bound<'_, PyAny>>| -> Result<TransferPool> {
            let item = item?;
            let pool = item.cast::<PyTransferPool>().map_err(|_| -> Failure {
                Error::config(format!("pools: expected TransferPool, found {}", type_name(&item))).into()
            })?;
            Ok(pool.get().pool.clone())
        };
        let pools = pools.try_iter()?.map(pool).collect::<Result<Vec<_>>>()?;
        let threads = to_u32("threads", threads)?;
        if !(1..=1024).contains(&threads) {
            return Err(Error::config(format!("threads: expected 1 to 1024, found {threads}")).into());
        }
        Ok(PyTransferPlan {
            plan: Arc::new(TransferPlan::new(pools)?),
            copies: CpuCopies::new(threads as usize)?,
        })
    }

    /// Layers, over all pools.
    #[getter]
    fn layers(&self) -> u32 {
        self.plan.steps()
    }

    /// Names of the pools, in order.
    #[getter]
    fn pool_names(&self) -> Vec<&str> {
        self.names()
    }

    /// Bytes of one page of all pools.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.plan.restore().iter().map(|plan| plan.page_bytes()).sum()
    }

    /// Copies pages from host slots to device slots.
    #[pyo3(signature = (host_slots, device_slots, layers=None, *, stream=0, after=None, events=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn restore(
        &self,
        py: Python<'_>,
        host_slots: &Bound<'_, PyAny>,
        device_slots: &Bound<'_, PyAny>,
        layers: Option<(i64, i64)>,
        stream: i64,
        after: Option<&Bound<'_, PyAny>>,
        events: Option<&Bound<'_, PyAny>>,
    ) -> Result<u64> {
        self.transfer(py, true, (host_slots, device_slots), layers, stream, after, events)
    }

    /// Copies pages from device slots to host slots.
    #[pyo3(signature = (host_slots, device_slots, layers=None, *, stream=0, after=None, events=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn backup(
        &self,
        py: Python<'_>,
        host_slots: &Bound<'_, PyAny>,
        device_slots: &Bound<'_, PyAny>,
        layers: Option<(i64, i64)>,
        stream: i64,
        after: Option<&Bound<'_, PyAny>>,
        events: Option<&Bound<'_, PyAny>>,
    ) -> Result<u64> {
        self.transfer(py, false, (host_slots, device_slots), layers, stream, after, events)
    }

    fn __repr__(&self) -> String {
        format!("<TransferPlan of {}, {} layers>", self.names().join(", "), self.plan.steps())
    }
}

/// Restores and backups of a view through a plan, layer by layer, each on a thread of its own.
#[pyclass(frozen, name = "LayerwiseRestore", module = "hicache_store")]
pub(crate) struct PyLayerwiseRestore {
    restore: LayerwiseRestore,
    backup: LayerwiseBackup,
    plan: Py<PyTransferPlan>,
    view: Arc<View>,
    store: Store,
    stream: Arc<dyn Executor>,
}

#[pymethods]
impl PyLayerwiseRestore {
    #[new]
    fn new(view: &Bound<'_, PyView>, plan: &Bound<'_, PyTransferPlan>) -> Result<Self> {
        let (view, store) = view.get().parts();
        let its_plan = &plan.get().plan;
        Ok(PyLayerwiseRestore {
            restore: LayerwiseRestore::new(Arc::clone(&view), Arc::clone(its_plan))?,
            backup: LayerwiseBackup::new(Arc::clone(&view), Arc::clone(its_plan))?,
            view,
            store,
            stream: Arc::new(HostStream::new(plan.get().copies.clone())?),
            plan: plan.clone().unbind(),
        })
    }

    /// Starts a restore from the store to host slots to device slots.
    #[pyo3(signature = (
        keys, host_slots, device_slots, *, host_free=None, device_free=None, stream=0, timeout=None, bounce="never",
        announce="pages", reading="auto"
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn start(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        host_slots: &Bound<'_, PyAny>,
        device_slots: &Bound<'_, PyAny>,
        host_free: Option<&Bound<'_, PyAny>>,
        device_free: Option<&Bound<'_, PyAny>>,
        stream: i64,
        timeout: Option<f64>,
        bounce: &str,
        announce: &str,
        reading: &str,
    ) -> Result<PyLayerTicket> {
        check_stream(stream)?;
        let plan = self.plan.get();
        let request = TransferRestore {
            keys: to_keys(keys)?,
            host_slots: plan.slots("host_slots", host_slots)?,
            device_slots: plan.slots("device_slots", device_slots)?,
            host_free: as_events(to_events("host_free", host_free)?),
            device_free: as_events(to_events("device_free", device_free)?),
            options: RestoreOptions { deadline: deadline(timeout)?, bounce: Bounce::parse(bounce)? },
            announce: match announce {
                "pages" => Announce::Pages,
                "layers" => Announce::Layers,
                _ => return Err(unknown("announce", announce, "pages or layers")),
            },
            reading: parse_reading(reading)?,
            edges: Edges::default(),
        };
        let stream = Arc::clone(&self.stream);
        let ticket = py.detach(|| self.restore.start(request, stream))?;
        Ok(PyLayerTicket { ticket, store: self.store.clone() })
    }

    /// Starts a backup from device slots to host slots to the store.
    #[pyo3(signature = (
        keys, host_slots, device_slots, *, parent=None, depth=None, host_free=None, ready=None, layer_ready=None,
        stream=0, timeout=None, bounce="never"
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn start_backup(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        host_slots: &Bound<'_, PyAny>,
        device_slots: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        depth: Option<i64>,
        host_free: Option<&Bound<'_, PyAny>>,
        ready: Option<&Bound<'_, PyAny>>,
        layer_ready: Option<&Bound<'_, PyAny>>,
        stream: i64,
        timeout: Option<f64>,
        bounce: &str,
    ) -> Result<PyBackupTicket> {
        check_stream(stream)?;
        let plan = self.plan.get();
        let request = TransferBackup {
            keys: to_keys(keys)?,
            host_slots: plan.slots("host_slots", host_slots)?,
            device_slots: plan.slots("device_slots", device_slots)?,
            host_free: as_events(to_events("host_free", host_free)?),
            ready: as_events(to_events("ready", ready)?),
            layer_ready: as_events(to_events("layer_ready", layer_ready)?),
            start: ChainStart {
                parent: parent.map(|parent| to_key(|| "parent".to_owned(), parent)).transpose()?,
                depth: depth.map(|depth| to_u32("depth", depth)).transpose()?,
            },
            options: BackupOptions { deadline: deadline(timeout)?, bounce: Bounce::parse(bounce)? },
            edges: Edges::default(),
        };
        let stream = Arc::clone(&self.stream);
        let ticket = py.detach(|| self.backup.start(request, stream))?;
        Ok(PyBackupTicket { ticket, store: self.store.clone() })
    }

    /// Layers, over all pools.
    #[getter]
    fn layers(&self) -> u32 {
        self.plan.get().plan.steps()
    }

    /// What carries out the copies.
    #[getter]
    fn executor(&self) -> &str {
        self.stream.name()
    }

    fn __repr__(&self) -> String {
        let pools = self.view.pool_names().join(", ");
        format!("<LayerwiseRestore of {pools}, {} layers, by {}>", self.layers(), self.executor())
    }
}

fn unknown(name: &str, found: &str, expected: &str) -> Failure {
    Error::config(format!("{name}: expected {expected}, found {found:?}")).into()
}

/// `auto`, `layers:N`, `pages:N`.
fn parse_reading(text: &str) -> Result<Reading> {
    let parsed = match text.split_once(':') {
        None if text == "auto" => Some(Reading::Auto),
        Some(("layers", count)) => count.parse().ok().map(Reading::Layers),
        Some(("pages", count)) => count.parse().ok().map(Reading::Pages),
        _ => None,
    };
    parsed.ok_or_else(|| unknown("reading", text, "auto, layers:N or pages:N"))
}

/// A restore under way.
#[pyclass(frozen, name = "LayerTicket", module = "hicache_store")]
pub(crate) struct PyLayerTicket {
    ticket: LayerwiseTicket,
    store: Store,
}

#[pymethods]
impl PyLayerTicket {
    /// Whether a layer can be read now.
    fn is_ready(&self, layer: i64) -> Result<bool> {
        Ok(self.ticket.gate().is_ready(to_u32("layer", layer)?)?)
    }

    /// Takes leave to read a layer, which must be ready.
    fn read(&self, layer: i64) -> Result<()> {
        Ok(self.ticket.gate().read(to_u32("layer", layer)?)?)
    }

    /// Waits until a layer can be read; whether it can.
    #[pyo3(signature = (layer, timeout=None))]
    fn wait(&self, py: Python<'_>, layer: i64, timeout: Option<f64>) -> Result<bool> {
        let (layer, deadline) = (to_u32("layer", layer)?, deadline(timeout)?);
        Ok(py.detach(|| self.ticket.gate().wait(layer, deadline))?)
    }

    /// Waits until nothing touches host or device slots any more; whether that is so.
    #[pyo3(signature = (timeout=None))]
    fn wait_drained(&self, py: Python<'_>, timeout: Option<f64>) -> Result<bool> {
        let deadline = deadline(timeout)?;
        Ok(py.detach(|| self.ticket.drained().wait_until(deadline))?)
    }

    /// Waits for the end, and says what became of each page.
    fn finish(&self, py: Python<'_>) -> Result<PyRestoreReport> {
        let report = py.detach(|| self.ticket.finish());
        notices::log(py, &self.store);
        Ok(report?.into())
    }

    fn __repr__(&self) -> String {
        let gate = self.ticket.gate();
        let ready = (0..gate.steps()).filter(|&layer| gate.is_ready(layer).unwrap_or(false)).count();
        format!("<LayerTicket, {ready} of {} layers ready>", gate.steps())
    }
}

/// A backup under way.
#[pyclass(frozen, name = "BackupTicket", module = "hicache_store")]
pub(crate) struct PyBackupTicket {
    ticket: LayerwiseBackupTicket,
    store: Store,
}

#[pymethods]
impl PyBackupTicket {
    /// Waits until nothing touches host or device slots any more; whether that is so.
    #[pyo3(signature = (timeout=None))]
    fn wait_drained(&self, py: Python<'_>, timeout: Option<f64>) -> Result<bool> {
        let deadline = deadline(timeout)?;
        Ok(py.detach(|| self.ticket.drained().wait_until(deadline))?)
    }

    /// Waits for the end, and says what became of each page; once.
    fn finish(&self, py: Python<'_>) -> Result<PyBackupReport> {
        let report = py.detach(|| self.ticket.finish());
        notices::log(py, &self.store);
        Ok(report?.into())
    }

    fn __repr__(&self) -> String {
        let is_done = self.ticket.drained().is_done().unwrap_or(true);
        format!("<BackupTicket, {}>", if is_done { "done" } else { "under way" })
    }
}
