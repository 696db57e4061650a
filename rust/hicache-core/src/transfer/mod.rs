//! Transfers: whole batches of pages between the store, host pools and device rows, layer by layer.
//!
//! ```text
//!   store --(read, verified)--> host slots --(executor: one copy a layer)--> device rows
//!                                   ^                    |
//!                                   +-- slot reuse ------+--> event of layer l --> gate --> reader of layer l
//! ```
//!
//! - `plan`: for each layer, how the pages of all pools come from one side to the other.
//! - `lower`: the plan of a layer as segments, what a kernel launches.
//! - `slots`: which page is where on both sides, checked once for all layers.
//! - `cpu`: the copies of the processor. `stream`: a thread that carries them out in order, like a device's stream.
//! - `device`: the copies of a device, given to a stream of an engine.
//! - `executor` and `event`: what the rest knows of streams and their events.
//! - `gate`: refuses a read of a layer before its load is done.
//! - `restore` and `backup`: the store's part of it.
//!
//! This module knows layouts and the store and no file; of the driver `device` knows what `hicache_sys::cuda` lends.

mod backup;
mod cpu;
mod device;
mod device_event;
mod event;
mod executor;
mod gate;
mod lower;
mod plan;
mod restore;
mod slots;
mod stream;

pub use backup::{LayerwiseBackup, LayerwiseBackupTicket, TransferBackup};
pub use cpu::{CpuCopies, copy_pages};
pub use device::{DeviceCopies, DevicePlans, DeviceReport};
pub use device_event::DeviceEvent;
pub use event::{Completion, Event, HostEvent};
pub use executor::Executor;
pub use gate::LayerGate;
pub use lower::{IndexUnit, Indices, PoolIndices};
pub use plan::{DeviceBuffer, DeviceBuffers, LayerPlan, Memory, Move, Placed, TransferPlan, TransferPool};
pub use restore::{Announce, LayerwiseRestore, LayerwiseTicket, Reading, TransferRestore};
pub use slots::{PoolSlots, Slots};
pub use stream::HostStream;

/// An order that a transfer keeps. Tests take single ones away, to see that each is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edge {
    /// A layer's copies begin after its bytes were read and verified.
    Load,
    /// Copies begin after the events of whoever used the destination rows before.
    Ready,
    /// A host slot is filled again after the event of the copies that read it.
    SlotReuse,
    /// A layer is read after the event of its copies.
    Loaded,
}

/// Which orders are kept: all of them, but for tests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Edges {
    without: Option<Edge>,
}

impl Edges {
    /// All but one.
    #[cfg(feature = "testing")]
    pub fn without(edge: Edge) -> Edges {
        Edges { without: Some(edge) }
    }

    fn hold(self, edge: Edge) -> bool {
        self.without != Some(edge)
    }
}
