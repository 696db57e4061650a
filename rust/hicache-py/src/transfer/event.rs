//! Events from Python: those of the host, and a driver's by their handles.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use hicache_core::Error;
use hicache_core::transfer::{Completion, DevicePlans, Event, HostEvent};
use hicache_sys::cuda::PlanEvent;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::arguments::{to_u64, type_name};
use crate::buffers::driver_event;
use crate::errors::Result;
use crate::view::deadline;

/// Events of the host by the number that stands for them in lists of events.
static EVENTS: LazyLock<Mutex<HashMap<u64, Weak<HostEvent>>>> = LazyLock::new(Mutex::default);
static NEXT_EVENT: AtomicU64 = AtomicU64::new(1);

/// Below it no process has memory, and hence no driver a handle.
const LEAST_ADDRESS: u64 = 4096;

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

/// Where the events of a call may be: on the device whose memory is moved, or on the host alone.
#[derive(Clone, Copy)]
pub(super) struct Events<'a>(pub(super) Option<&'a Arc<DevicePlans>>);

/// An event that a transfer comes to.
pub(super) enum Mark {
    Host(Arc<HostEvent>),
    Device(PlanEvent),
}

impl Events<'_> {
    /// Events to wait for: host events or their handles, and those of the driver by their handles.
    pub(super) fn to_wait_for(self, name: &str, object: Option<&Bound<'_, PyAny>>) -> Result<Vec<Event>> {
        let one = |mark| match (mark, self.0) {
            (Mark::Host(event), _) => Ok(event as Event),
            (Mark::Device(event), Some(plans)) => Ok(plans.event(event) as Event),
            (Mark::Device(_), None) => unreachable!("made with a device only"),
        };
        self.marks(name, object)?.into_iter().map(one).collect()
    }

    pub(super) fn marks(self, name: &str, object: Option<&Bound<'_, PyAny>>) -> Result<Vec<Mark>> {
        let Some(object) = object else { return Ok(Vec::new()) };
        object.try_iter()?.map(|item| self.mark(name, &item?)).collect()
    }

    fn mark(self, name: &str, object: &Bound<'_, PyAny>) -> Result<Mark> {
        if let Ok(event) = object.cast::<PyHostEvent>() {
            return Ok(Mark::Host(Arc::clone(&event.get().event)));
        }
        if !object.is_instance_of::<PyInt>() {
            let found = type_name(object);
            let expected = "expected host events or handles of events";
            return Err(Error::config(format!("{name}: {expected}, found {found}")).into());
        }
        let handle = to_u64(name, object.extract()?)?;
        let events = EVENTS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(event) = events.get(&handle).and_then(Weak::upgrade) {
            return Ok(Mark::Host(event));
        }
        drop(events);
        // A driver's handle is an address, and never as small as the number of a host event, alive or not.
        let is_number = handle < NEXT_EVENT.load(Ordering::Relaxed).max(LEAST_ADDRESS);
        match self.0 {
            Some(_) if handle == 0 => Err(Error::config(format!(
                "{name}: expected the handle of an event that was recorded once, found 0"
            ))
            .into()),
            Some(plans) if !is_number => Ok(Mark::Device(driver_event(plans.device(), handle)?)),
            _ => Err(Error::config(format!(
                "{name}: expected the handle of a live host event, found {handle}"
            ))
            .into()),
        }
    }
}
