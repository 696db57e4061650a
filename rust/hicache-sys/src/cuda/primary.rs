//! The primary context of a device: the one that engines use, never one of our own.

use std::ffi::c_void;

use super::{CudaError, Driver};

/// A device's primary context, kept alive. It is the one that torch uses; retaining it makes no second one.
#[derive(Debug)]
pub struct Primary {
    driver: &'static Driver,
    context: *mut c_void,
    device: i32,
}

// SAFETY: a context handle may be used from every thread; the driver locks what it must.
unsafe impl Send for Primary {}
// SAFETY: as above, and this value never changes.
unsafe impl Sync for Primary {}

impl Primary {
    /// Retains the primary context of device `ordinal`; the first user of a device makes it, which takes a while.
    pub fn retain(driver: &'static Driver, ordinal: i32) -> Result<Primary, CudaError> {
        let device = driver.device(ordinal)?;
        let context = driver.primary_retain(device)?;
        Ok(Primary { driver, context, device })
    }

    /// Retains the primary context of the device that this thread uses now, or else of device 0.
    pub fn of_this_thread(driver: &'static Driver) -> Result<Primary, CudaError> {
        let device = match driver.current_device()? {
            Some(device) => device,
            None => driver.device(0)?,
        };
        let context = driver.primary_retain(device)?;
        Ok(Primary { driver, context, device })
    }

    /// Makes the context this thread's own until the value is dropped.
    pub fn enter(&self) -> Result<Entered<'_>, CudaError> {
        self.driver.context_push(self.context)?;
        Ok(Entered { primary: self })
    }

    /// The driver's handle of the device.
    pub fn device(&self) -> i32 {
        self.device
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // What the parent retained is not a forked child's to release.
        if self.driver.is_inherited() {
            return;
        }
        // At the end of the process the driver may be gone, and the context with it.
        let _ = self.driver.primary_release(self.device);
    }
}

/// While it lives, a primary context is the current one of the thread that entered it.
#[derive(Debug)]
pub struct Entered<'a> {
    primary: &'a Primary,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let _ = self.primary.driver.context_pop();
    }
}
