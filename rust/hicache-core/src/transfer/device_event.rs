//! Events of a device's driver, as the rest of a transfer waits for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hicache_sys::cuda::{CudaError, MappedMemory, PlanEvent};

use super::event::Completion;
use crate::{Error, ErrorKind, Result};

/// Longest sleep between two looks at an event, where there is a deadline.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// An event of a device's driver: the end of our own copies, or one of somebody else's.
#[derive(Debug)]
pub struct DeviceEvent {
    event: PlanEvent,
    /// Of our own copies.
    error_word: Option<Arc<MappedMemory>>,
}

impl DeviceEvent {
    pub(super) fn new(event: PlanEvent, error_word: Option<Arc<MappedMemory>>) -> DeviceEvent {
        DeviceEvent { event, error_word }
    }

    fn look(&self) -> Result<bool> {
        if !self.event.is_done().map_err(refused)? {
            return Ok(false);
        }
        self.error_word.as_deref().map_or(Ok(()), check_error_word)?;
        Ok(true)
    }
}

impl Completion for DeviceEvent {
    fn is_done(&self) -> Result<bool> {
        self.look()
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<bool> {
        let Some(deadline) = deadline else {
            self.event.synchronize().map_err(refused)?;
            // What the device is done with is let go by whoever sees that it is.
            self.event.device().release_done().map_err(refused)?;
            return self.look();
        };
        let mut sleep = Duration::from_micros(20);
        while !self.look()? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            std::thread::sleep(sleep.min(left));
            sleep = LONGEST_SLEEP.min(sleep * 2);
        }
        Ok(true)
    }

    fn on_device(&self) -> Option<&PlanEvent> {
        Some(&self.event)
    }
}

/// Whether every index that kernels of the plan have met was below its limit.
pub(super) fn check_error_word(word: &MappedMemory) -> Result<()> {
    match word.word(0) {
        0 => Ok(()),
        bits => Err(Error::new(
            ErrorKind::Device,
            format!("expected indices below their limits, found others in segments {bits:#b} of a launch"),
        )),
    }
}

pub(super) fn refused(error: CudaError) -> Error {
    Error::new(ErrorKind::Device, error.to_string())
}
