//! Restores and backups under way.

use hicache_core::transfer::{LayerwiseBackupTicket, LayerwiseTicket};
use hicache_core::{Error, ErrorKind, Store};
use hicache_sys::cuda::Wishes;
use pyo3::prelude::*;

use crate::arguments::to_u32;
use crate::buffers::device_stream;
use crate::errors::Result;
use crate::notices;
use crate::reports::{PyBackupReport, PyRestoreReport};
use crate::view::deadline;

/// A restore under way.
#[pyclass(frozen, name = "LayerTicket", module = "hicache_store")]
pub(crate) struct PyLayerTicket {
    pub(super) ticket: LayerwiseTicket,
    pub(super) store: Store,
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

    /// Lets a stream of the device wait for a layer; whether its copies were given to the device in time.
    #[pyo3(signature = (layer, stream, timeout=None))]
    fn hold_back(&self, py: Python<'_>, layer: i64, stream: i64, timeout: Option<f64>) -> Result<bool> {
        let (layer, deadline) = (to_u32("layer", layer)?, deadline(timeout)?);
        let Some(event) = py.detach(|| self.ticket.gate().event(layer, deadline))? else { return Ok(false) };
        let Some(event) = event.on_device() else {
            let message = "expected a restore to memory of a device, found one to memory of the host";
            return Err(Error::new(ErrorKind::Unsupported, message).into());
        };
        let stream = device_stream(event.device(), stream, Wishes::default())?;
        stream.wait(event).map_err(|error| Error::new(ErrorKind::Device, error.to_string()))?;
        Ok(true)
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
    pub(super) ticket: LayerwiseBackupTicket,
    pub(super) store: Store,
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
