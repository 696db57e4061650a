//! The one seam to whatever carries out copies: the processor, a copy engine, a kernel.

use std::sync::Arc;

use super::event::Event;
use super::plan::LayerPlan;
use super::slots::Slots;
use crate::Result;

/// Carries out copies in the order in which they are issued.
///
/// A call may return before its copy has been done: [`Executor::record`] says when it is. Memory of a copy stays valid
/// until then, which the plans see to by holding it.
pub trait Executor: Send + Sync {
    /// A word for reports: `cpu`, `copy engine`, `kernel`.
    fn name(&self) -> &'static str;

    /// Lets what is issued from now on begin after `event`.
    ///
    /// # Errors
    /// `Io` where the stream is lost.
    fn wait(&self, event: &Event) -> Result<()>;

    /// Issues the copies of one layer of all pools.
    ///
    /// # Errors
    /// `Unsupported` for memory that this executor cannot reach, `Io` where the stream is lost.
    fn copy(&self, plan: &Arc<LayerPlan>, slots: &Arc<Slots>) -> Result<()>;

    /// An event that comes when everything issued so far has been done; `step` is the layer that it ends, if it
    /// is the end of one.
    ///
    /// # Errors
    /// `Io` where the stream is lost.
    fn record(&self, step: Option<u32>) -> Result<Event>;
}
