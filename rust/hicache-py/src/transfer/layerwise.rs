//! Restores and backups layer by layer.

use std::sync::Arc;

use hicache_core::transfer::{
    Announce, DevicePlans, Edges, Executor, HostStream, LayerwiseBackup, LayerwiseRestore, Reading,
    TransferBackup, TransferRestore,
};
use hicache_core::{BackupOptions, Bounce, ChainStart, Error, RestoreOptions, Store, View};
use pyo3::prelude::*;

use super::event::Events;
use super::plan::{PyTransferPlan, check_host_stream};
use super::tickets::{PyBackupTicket, PyLayerTicket};
use crate::arguments::to_u32;
use crate::errors::{Failure, Result};
use crate::keys::{to_key, to_keys};
use crate::view::{PyView, deadline};

/// Restores and backups of a view through a plan, layer by layer, each on a thread of its own.
#[pyclass(frozen, name = "LayerwiseRestore", module = "hicache_store")]
pub(crate) struct PyLayerwiseRestore {
    /// Goes before the plan, whose end waits for the device without the interpreter's lock.
    copies: Copies,
    restore: LayerwiseRestore,
    backup: LayerwiseBackup,
    plan: Py<PyTransferPlan>,
    view: Arc<View>,
    store: Store,
}

/// What carries the copies out.
enum Copies {
    /// A thread of the host.
    Host(Arc<HostStream>),
    /// The device, on the stream that a call names.
    Device(Arc<DevicePlans>),
}

impl PyLayerwiseRestore {
    /// The device, where the events of a call may be.
    fn device(&self) -> Option<&Arc<DevicePlans>> {
        match &self.copies {
            Copies::Host(_) => None,
            Copies::Device(plans) => Some(plans),
        }
    }

    fn executor_on(&self, stream: i64) -> Result<Arc<dyn Executor>> {
        match &self.copies {
            Copies::Host(copies) => {
                check_host_stream(stream)?;
                Ok(Arc::clone(copies) as Arc<dyn Executor>)
            }
            Copies::Device(plans) => Ok(Arc::new(self.plan.get().copies_on(plans, stream)?)),
        }
    }
}

#[pymethods]
impl PyLayerwiseRestore {
    #[new]
    fn new(py: Python<'_>, view: &Bound<'_, PyView>, plan: &Bound<'_, PyTransferPlan>) -> Result<Self> {
        let (view, store) = view.get().parts();
        let its_plan = &plan.get().plan;
        let copies = match plan.get().device(py)? {
            Some(plans) => Copies::Device(plans),
            None => Copies::Host(Arc::new(HostStream::new(plan.get().copies.clone())?)),
        };
        Ok(PyLayerwiseRestore {
            restore: LayerwiseRestore::new(Arc::clone(&view), Arc::clone(its_plan))?,
            backup: LayerwiseBackup::new(Arc::clone(&view), Arc::clone(its_plan))?,
            view,
            store,
            copies,
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
        let executor = self.executor_on(stream)?;
        let (plan, events) = (self.plan.get(), Events(self.device()));
        let request = TransferRestore {
            keys: to_keys(keys)?,
            host_slots: plan.slots("host_slots", host_slots)?,
            device_slots: plan.slots("device_slots", device_slots)?,
            host_free: events.to_wait_for("host_free", host_free)?,
            device_free: events.to_wait_for("device_free", device_free)?,
            options: RestoreOptions { deadline: deadline(timeout)?, bounce: Bounce::parse(bounce)? },
            announce: match announce {
                "pages" => Announce::Pages,
                "layers" => Announce::Layers,
                _ => return Err(unknown("announce", announce, "pages or layers")),
            },
            reading: parse_reading(reading)?,
            edges: Edges::default(),
        };
        let ticket = py.detach(|| self.restore.start(request, executor))?;
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
        let executor = self.executor_on(stream)?;
        let (plan, events) = (self.plan.get(), Events(self.device()));
        let request = TransferBackup {
            keys: to_keys(keys)?,
            host_slots: plan.slots("host_slots", host_slots)?,
            device_slots: plan.slots("device_slots", device_slots)?,
            host_free: events.to_wait_for("host_free", host_free)?,
            ready: events.to_wait_for("ready", ready)?,
            layer_ready: events.to_wait_for("layer_ready", layer_ready)?,
            start: ChainStart {
                parent: parent.map(|parent| to_key(|| "parent".to_owned(), parent)).transpose()?,
                depth: depth.map(|depth| to_u32("depth", depth)).transpose()?,
            },
            options: BackupOptions { deadline: deadline(timeout)?, bounce: Bounce::parse(bounce)? },
            edges: Edges::default(),
        };
        let ticket = py.detach(|| self.backup.start(request, executor))?;
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
        match &self.copies {
            Copies::Host(copies) => copies.name(),
            Copies::Device(plans) => plans.name(),
        }
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
