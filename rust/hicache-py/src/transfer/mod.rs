//! Transfers from Python: plans between host pools and device rows, and restores and backups layer by layer.

mod event;
mod layerwise;
mod plan;
mod tickets;

pub(crate) use event::PyHostEvent;
pub(crate) use layerwise::PyLayerwiseRestore;
pub(crate) use plan::{PyTransferPlan, PyTransferPool};
pub(crate) use tickets::{PyBackupTicket, PyLayerTicket};
