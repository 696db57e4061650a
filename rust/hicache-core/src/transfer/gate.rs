//! The gate between a restore and whoever reads its layers.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use super::event::{Event, wait};
use super::{Edge, Edges};
use crate::{Error, Result};

/// Refuses a read of a layer before its load is done.
///
/// A layer is ready when its pages have been announced (each of them is known to be whole) and its event has come. A
/// gate serves one restore: the next one has a gate of its own, as a tenant of a later epoch.
#[derive(Debug)]
pub struct LayerGate {
    state: Mutex<State>,
    changed: Condvar,
    edges: Edges,
}

struct State {
    /// By step: the event of its copies, once they have been issued.
    issued: Vec<Option<Event>>,
    is_announced: bool,
    /// Why no layer can be read any more.
    withdrawn: Option<String>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let issued = self.issued.iter().filter(|event| event.is_some()).count();
        write!(f, "{issued} of {} issued, announced {}", self.issued.len(), self.is_announced)
    }
}

impl LayerGate {
    /// A closed gate before `steps` layers.
    pub(super) fn new(steps: u32, edges: Edges) -> LayerGate {
        let issued = vec![None; steps as usize];
        let state = State { issued, is_announced: false, withdrawn: None };
        LayerGate { state: Mutex::new(state), changed: Condvar::new(), edges }
    }

    /// How many layers it guards.
    pub fn steps(&self) -> u32 {
        self.state().issued.len() as u32
    }

    /// The copies of a layer have been issued; they are done when `event` has come.
    pub(super) fn issue(&self, step: u32, event: Event) {
        self.state().issued[step as usize] = Some(event);
        self.changed.notify_all();
    }

    /// The pages of the restore are whole: layers may be read as their events come.
    pub(super) fn announce(&self) {
        self.state().is_announced = true;
        self.changed.notify_all();
    }

    /// Nothing may be read any more.
    pub(super) fn withdraw(&self, reason: impl Into<String>) {
        self.state().withdrawn.get_or_insert(reason.into());
        self.changed.notify_all();
    }

    /// Whether layer `step` can be read now.
    ///
    /// # Errors
    /// `Config` for a step that there is not, `Closed` where the restore was given up, `Io` where its copies failed.
    pub fn is_ready(&self, step: u32) -> Result<bool> {
        match self.issued(&self.state(), step)? {
            None => Ok(!self.edges.hold(Edge::Loaded)),
            Some(event) => Ok(event.is_done()? || !self.edges.hold(Edge::Loaded)),
        }
    }

    /// Takes leave to read layer `step`, which must be ready.
    ///
    /// # Errors
    /// As [`LayerGate::is_ready`], and `Config` where the layer is not ready.
    pub fn read(&self, step: u32) -> Result<()> {
        match self.is_ready(step)? {
            true => Ok(()),
            false => Err(Error::config(format!("a read of layer {step} before its load is done"))),
        }
    }

    /// Waits until layer `step` can be read, or until `deadline`; whether it can.
    ///
    /// # Errors
    /// As [`LayerGate::is_ready`].
    pub fn wait(&self, step: u32, deadline: Option<Instant>) -> Result<bool> {
        match self.event(step, deadline)? {
            Some(event) if self.edges.hold(Edge::Loaded) => {
                event.wait_until(deadline)?;
                self.is_ready(step)
            }
            found => Ok(found.is_some()),
        }
    }

    /// The event that a stream waits for before it reads layer `step`; `None` where the layer was not announced by
    /// `deadline`. An event is never given before its copies have been issued: waiting for one that nobody has
    /// recorded would be no wait at all.
    ///
    /// # Errors
    /// As [`LayerGate::is_ready`].
    pub fn event(&self, step: u32, deadline: Option<Instant>) -> Result<Option<Event>> {
        let mut state = self.state();
        loop {
            if let Some(event) = self.issued(&state, step)? {
                return Ok(Some(event));
            }
            match wait(&self.changed, state, deadline) {
                Some(guard) => state = guard,
                None => return Ok(None),
            }
        }
    }

    /// The event of a layer that has been issued and announced.
    fn issued(&self, state: &State, step: u32) -> Result<Option<Event>> {
        if let Some(reason) = &state.withdrawn {
            return Err(Error::new(crate::ErrorKind::Closed, format!("the restore was given up: {reason}")));
        }
        let Some(issued) = state.issued.get(step as usize) else {
            let steps = state.issued.len();
            return Err(Error::config(format!("expected a layer below {steps}, found {step}")));
        };
        Ok(issued.clone().filter(|_| state.is_announced))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
