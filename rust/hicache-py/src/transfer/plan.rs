//! Plans between host pools and device rows.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use hicache_core::Error;
use hicache_core::ErrorKind;
use hicache_core::transfer::{
    CpuCopies, DeviceCopies, DevicePlans, Event, Executor, LayerPlan, Memory, Placed, Slots, TransferPlan,
    TransferPool,
};
use hicache_sys::cuda::{Way, Wishes};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::event::{Events, Mark};
use crate::arguments::{to_integers, to_u32, type_name};
use crate::buffers::{Found, device_stream, to_buffers};
use crate::errors::{Failure, Result};
use crate::layout::PyLayout;

/// The host has one stream, 0.
pub(super) fn check_host_stream(stream: i64) -> Result<()> {
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
        Found::Device(buffers) => Memory::Device(buffers),
    };
    Ok(Placed { layout: layout.get().inner.clone(), memory })
}

/// How the pages of all pools come from host pools to device rows and back, layer by layer.
#[pyclass(frozen, name = "TransferPlan", module = "hicache_store")]
pub(crate) struct PyTransferPlan {
    pub(super) plan: Arc<TransferPlan>,
    pub(super) copies: CpuCopies,
    wishes: Wishes,
    /// What its memory is to a device, once that is known.
    device: Mutex<Option<Arc<DevicePlans>>>,
}

impl Drop for PyTransferPlan {
    fn drop(&mut self) {
        let device = self.device.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        // It waits for the device: others need not wait for the interpreter meanwhile.
        let mut device = Some(device);
        Python::try_attach(|py| {
            let device = device.take();
            py.detach(move || drop(device));
        });
    }
}

impl PyTransferPlan {
    /// What the plan's memory is to its device; `None` where all of it is the host's.
    pub(super) fn device(&self, py: Python<'_>) -> Result<Option<Arc<DevicePlans>>> {
        if !self.plan.is_on_device() {
            return Ok(None);
        }
        Ok(Some(py.detach(|| {
            let mut device = self.device.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            match &*device {
                Some(device) => Ok(Arc::clone(device)),
                None => DevicePlans::new(&self.plan).map(|made| Arc::clone(device.insert(made))),
            }
        })?))
    }

    /// The copies of a stream of the plan's device.
    pub(super) fn copies_on(&self, plans: &Arc<DevicePlans>, stream: i64) -> Result<DeviceCopies> {
        Ok(DeviceCopies::new(plans, device_stream(plans.device(), stream, self.wishes)?)?)
    }

    fn names(&self) -> Vec<&str> {
        self.plan.pools().iter().map(|pool| pool.name.as_str()).collect()
    }

    /// Slots of every pool: one list for all of them, or a dict by name.
    pub(super) fn slots(&self, name: &str, object: &Bound<'_, PyAny>) -> Result<Vec<Vec<i64>>> {
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
        let device = self.device(py)?;
        if device.is_none() {
            check_host_stream(stream)?;
        }
        let steps = self.steps(layers)?;
        let given = Events(device.as_ref());
        let (after, events) = (given.to_wait_for("after", after)?, given.marks("events", events)?);
        if !events.is_empty() && events.len() != steps.len() {
            let (layers, found) = (steps.len(), events.len());
            return Err(Error::config(format!(
                "events: expected one for each of {layers} layers, found {found}"
            ))
            .into());
        }
        let (host, device_slots) = (self.slots("host_slots", slots.0)?, self.slots("device_slots", slots.1)?);
        let pairs: Vec<(&[i64], &[i64])> =
            host.iter().map(Vec::as_slice).zip(device_slots.iter().map(Vec::as_slice)).collect();
        let (plans, slots): (&[Arc<LayerPlan>], Slots) = if is_restore {
            (self.plan.restore(), self.plan.restore_slots(&pairs)?)
        } else {
            (self.plan.backup(), self.plan.backup_slots(&pairs)?)
        };
        let (plans, slots) = (&plans[steps], Arc::new(slots));
        match device {
            None => py.detach(|| copy_now(&self.copies, plans, &slots, &after, &events))?,
            Some(device) => {
                let copies = self.copies_on(&device, stream)?;
                py.detach(|| submit(&copies, plans, &slots, &after, &events))?;
            }
        }
        let of_pool = |one: &hicache_core::transfer::Move| {
            slots.pools[one.pool].pairs().count() as u64 * one.plan.bytes()
        };
        Ok(plans.iter().flat_map(|plan| &plan.moves).map(of_pool).sum())
    }
}

/// Copies by the processor, now.
fn copy_now(
    copies: &CpuCopies,
    plans: &[Arc<LayerPlan>],
    slots: &Slots,
    after: &[Event],
    events: &[Mark],
) -> hicache_core::Result<()> {
    for event in after {
        event.wait_until(None)?;
    }
    for (number, plan) in plans.iter().enumerate() {
        copies.copy_now(plan, slots)?;
        if let Some(Mark::Host(event)) = events.get(number) {
            event.set();
        }
    }
    Ok(())
}

/// Gives copies to a stream, which does them when it comes to them.
fn submit(
    copies: &DeviceCopies,
    plans: &[Arc<LayerPlan>],
    slots: &Arc<Slots>,
    after: &[Event],
    events: &[Mark],
) -> hicache_core::Result<()> {
    if events.iter().any(|event| matches!(event, Mark::Host(_))) {
        return Err(Error::config(
            "events: expected handles of driver events where memory is a device's, found a host event",
        ));
    }
    for event in after {
        copies.wait(event)?;
    }
    for (number, plan) in plans.iter().enumerate() {
        copies.submit(plan, slots)?;
        if let Some(Mark::Device(event)) = events.get(number) {
            copies.record_to(event)?;
        }
    }
    Ok(())
}

#[pymethods]
impl PyTransferPlan {
    #[new]
    #[pyo3(signature = (pools, *, threads=1, way="auto"))]
    fn new(py: Python<'_>, pools: &Bound<'_, PyAny>, threads: i64, way: &str) -> Result<Self> {
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
        let way = match way {
            "auto" => None,
            "kernel" => Some(Way::Register),
            "copy_engine" => Some(Way::Copies),
            _ => {
                let expected = "auto, kernel or copy_engine";
                return Err(Error::config(format!("way: expected {expected}, found {way:?}")).into());
            }
        };
        let plan = PyTransferPlan {
            plan: Arc::new(TransferPlan::new(pools)?),
            copies: CpuCopies::new(threads as usize)?,
            wishes: Wishes { way, blocks: None },
            device: Mutex::default(),
        };
        // Kernels are loaded and blocks made now rather than by the first transfer, which says what is missing.
        drop(plan.device(py));
        Ok(plan)
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

    /// How layers went: by the CPU, or by what on the device, and why.
    fn report<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let report = PyDict::new(py);
        let Some(plans) = self.device(py)? else {
            report.set_item("by", "the CPU")?;
            return Ok(report);
        };
        let found = plans.report();
        report.set_item("by", found.by)?;
        report.set_item("device", found.device)?;
        report.set_item("capability", found.capability)?;
        report.set_item("tried", found.tried)?;
        report.set_item("kernel_layers", found.kernel_layers)?;
        report.set_item("copy_engine_layers", found.copy_engine_layers)?;
        report.set_item("last", found.last)?;
        Ok(report)
    }

    /// Waits until everything that was submitted is done.
    fn wait(&self, py: Python<'_>) -> Result<()> {
        let Some(plans) = self.device(py)? else { return Ok(()) };
        Ok(py.detach(|| plans.drain())?)
    }

    fn __repr__(&self) -> String {
        format!("<TransferPlan of {}, {} layers>", self.names().join(", "), self.plan.steps())
    }
}
