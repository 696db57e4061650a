//! Events: points in the work of a stream that somebody waits for.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use hicache_sys::cuda::PlanEvent;

use crate::{Error, ErrorKind, Result};

/// Something that comes to an end: an event of the host, or one of a driver.
pub trait Completion: Send + Sync {
    /// Whether it has.
    ///
    /// # Errors
    /// What it stands for has failed.
    fn is_done(&self) -> Result<bool>;

    /// Waits until it has, or until `deadline`; whether it has.
    ///
    /// # Errors
    /// What it stands for has failed.
    fn wait_until(&self, deadline: Option<Instant>) -> Result<bool>;

    /// The event of a device's driver that it is: a stream of a device waits for it by itself. `None` for one of the
    /// host, for which whoever issues the copies waits.
    fn on_device(&self) -> Option<&PlanEvent> {
        None
    }
}

/// A completion that is shared.
pub type Event = Arc<dyn Completion>;

/// An event of the host: set once, by whoever did the work.
#[derive(Debug, Default)]
pub struct HostEvent {
    /// The end, and why it failed where it did.
    ended: Mutex<Option<std::result::Result<(), String>>>,
    changed: Condvar,
}

impl HostEvent {
    /// One that is still to come.
    pub fn new() -> Arc<HostEvent> {
        Arc::new(HostEvent::default())
    }

    /// One that has come.
    pub fn done() -> Arc<HostEvent> {
        let event = HostEvent::new();
        event.set();
        event
    }

    /// Says that the work is done. The first end stays.
    pub fn set(&self) {
        self.end(Ok(()));
    }

    /// Says that the work will not be done.
    pub fn fail(&self, reason: impl Into<String>) {
        self.end(Err(reason.into()));
    }

    fn end(&self, end: std::result::Result<(), String>) {
        self.ended().get_or_insert(end);
        self.changed.notify_all();
    }

    fn ended(&self) -> MutexGuard<'_, Option<std::result::Result<(), String>>> {
        self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Completion for HostEvent {
    fn is_done(&self) -> Result<bool> {
        answer(&self.ended())
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<bool> {
        let mut ended = self.ended();
        while ended.is_none() {
            let Some(guard) = wait(&self.changed, ended, deadline) else { return self.is_done() };
            ended = guard;
        }
        answer(&ended)
    }
}

fn answer(ended: &Option<std::result::Result<(), String>>) -> Result<bool> {
    match ended {
        None => Ok(false),
        Some(Ok(())) => Ok(true),
        Some(Err(reason)) => Err(Error::new(ErrorKind::Io, reason.clone())),
    }
}

/// Waits for a change; `None` once `deadline` has passed.
pub(super) fn wait<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> Option<MutexGuard<'a, T>> {
    let Some(deadline) = deadline else {
        return Some(changed.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner()));
    };
    let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
    let (guard, _) = changed.wait_timeout(guard, left).unwrap_or_else(|poisoned| poisoned.into_inner());
    Some(guard)
}
