//! Slots that somebody has for a while.

use std::sync::{Arc, Mutex, PoisonError};

use super::Shared;
use super::slots::SlotHandle;
use crate::{Error, ErrorKind, Result};

/// Slots of one pool, of one holder. They are free again when it is released or dropped, whichever is first: hold it
/// until the last copy into or out of its slots is done.
#[derive(Debug)]
pub struct Lease {
    pool: Arc<Shared>,
    /// `None` once all were released.
    held: Mutex<Option<Vec<SlotHandle>>>,
}

impl Lease {
    pub(super) fn new(pool: Arc<Shared>, held: Vec<SlotHandle>) -> Lease {
        Lease { pool, held: Mutex::new(Some(held)) }
    }

    /// The slots, in the order in which they were leased, as the calls of a view take them.
    ///
    /// # Errors
    /// `Lease` after the release; `Closed` in a forked child.
    pub fn slots(&self) -> Result<Vec<i64>> {
        Ok(self.handles()?.iter().map(|handle| i64::from(handle.slot())).collect())
    }

    /// The slots with their generations, for whoever must know later whether they are still leased.
    ///
    /// # Errors
    /// As [`Lease::slots`].
    pub fn handles(&self) -> Result<Vec<SlotHandle>> {
        self.pool.check_process()?;
        self.held().clone().ok_or_else(released)
    }

    /// Whether the slots were released.
    pub fn is_released(&self) -> bool {
        !self.pool.is_inherited() && self.held().is_none()
    }

    /// Gives all slots back.
    ///
    /// # Errors
    /// `Lease` where that was done before, and nothing changes; `Closed` in a forked child.
    pub fn release(&self) -> Result<()> {
        self.pool.check_process()?;
        let mut held = self.held();
        let handles = held.take().ok_or_else(released)?;
        self.pool.end_lease(&handles)
    }

    /// Gives some slots back and keeps the others.
    ///
    /// # Errors
    /// `Lease` where one is not among them, or is named twice; nothing changes. `Closed` in a forked child.
    pub fn release_slots(&self, slots: &[i64]) -> Result<()> {
        self.pool.check_process()?;
        let mut held = self.held();
        let handles = held.as_mut().ok_or_else(released)?;
        let mut rest = handles.clone();
        let mut given = Vec::with_capacity(slots.len());
        for &slot in slots {
            let Some(place) = rest.iter().position(|handle| i64::from(handle.slot()) == slot) else {
                let message = format!("expected slots of this lease, found {slot}, which is not or no more");
                return Err(Error::new(ErrorKind::Lease, message).with("slot", slot));
            };
            given.push(rest.remove(place));
        }
        self.pool.release_slots(&given)?;
        *handles = rest;
        Ok(())
    }

    pub(super) fn is_of(&self, pool: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Option<Vec<SlotHandle>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A forked child may neither give back what its parent has, nor wait for a lock that a thread of it held.
        if self.pool.is_inherited() {
            return;
        }
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(handles) = held {
            let _ = self.pool.end_lease(&handles);
        }
    }
}

fn released() -> Error {
    Error::new(ErrorKind::Lease, "the lease was released already")
}
