//! A device on which plans are carried out: its kernels, its events, and what is held until it is done.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use super::kernels::{Kernels, Loaded, Report};
use super::{CudaError, Driver, Entered, Event, Primary, Stream};
use crate::Region;
use crate::segment_plan::Extent;

/// Events that are kept for later use at most.
const MOST_IDLE_EVENTS: usize = 256;

/// Memory that a device reaches: rows of an engine's tensor, index vectors, registered host memory.
pub struct DeviceMemory {
    extent: Extent,
    writable: bool,
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl DeviceMemory {
    /// Lends `len` bytes at `address`, as the device knows it.
    ///
    /// # Safety
    /// Until the value is dropped the device can read these bytes, and write them if `writable`; `owner` keeps it so.
    /// What a submitted plan reads nobody changes, and what it writes nobody uses, until the device has done it.
    pub unsafe fn from_raw_parts(
        address: u64,
        len: u64,
        writable: bool,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> DeviceMemory {
        DeviceMemory { extent: Extent { base: address, len }, writable, _owner: owner }
    }

    /// Host memory that is registered with the driver. There must be a current context.
    ///
    /// # Errors
    /// The driver's where it is not, and `Refused` where the device has it in several places.
    pub fn of_region(driver: &Driver, region: Arc<Region>) -> Result<DeviceMemory, CudaError> {
        let (base, len) = (region.address(), region.len() as u64);
        let address = driver.host_device_pointer(base)?;
        let last = driver.host_device_pointer(base + (region.len().max(1) - 1))?;
        if last.wrapping_sub(address) != len.max(1) - 1 {
            let why = "expected registered memory in one piece, found several".to_owned();
            return Err(CudaError::Refused { call: "cuMemHostGetDevicePointer", why });
        }
        let writable = region.is_writable();
        Ok(DeviceMemory { extent: Extent { base: address, len }, writable, _owner: Some(Box::new(region)) })
    }

    /// Address and bytes, as plans name them.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Whether plans may write there.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({:?}, writable {})", self.extent, self.writable)
    }
}

/// What plans may touch, held until the device is done with them.
#[derive(Debug, Default)]
pub struct Touched {
    /// What may be read.
    pub source: Vec<Arc<DeviceMemory>>,
    /// What may be written; what was lent for reading only does not count.
    pub destination: Vec<Arc<DeviceMemory>>,
    /// Index vectors on the device.
    pub index: Vec<Arc<DeviceMemory>>,
    /// Where the plan's error word is, if it has one.
    pub error: Option<Arc<DeviceMemory>>,
    /// What else is let go when the device is done.
    pub lease: Option<Arc<dyn Any + Send + Sync>>,
}

/// Whether `HICACHE_CUDA_DEBUG` asks for checks that cost time.
fn is_debugging() -> Result<bool, String> {
    match std::env::var("HICACHE_CUDA_DEBUG").unwrap_or_default().as_str() {
        "" | "0" => Ok(false),
        "1" => Ok(true),
        word => Err(format!("expected HICACHE_CUDA_DEBUG to be 0 or 1, found {word:?}")),
    }
}

/// What a stream was given, until the event behind it has come.
#[derive(Debug)]
struct Pending {
    event: Arc<Event>,
    touched: Arc<Touched>,
    /// Of the stream, which may be gone.
    handle: u64,
}

/// A device with its kernels, shared by the streams that carry out plans on it. It holds what they touch until the
/// device is done; dropping it waits for that.
#[derive(Debug)]
pub struct PlanDevice {
    pub(super) driver: &'static Driver,
    loaded: &'static Loaded,
    primary: Primary,
    ordinal: u32,
    checks_indices: bool,
    pending: Mutex<Vec<Pending>>,
    idle: Mutex<Vec<Event>>,
}

impl PlanDevice {
    /// Device `ordinal`, which counts from 0. The first call loads its kernels, which may take a second.
    ///
    /// # Errors
    /// A sentence where there is no driver or no such device, or the environment asks for something unknown.
    pub fn new(ordinal: u32) -> Result<Arc<PlanDevice>, String> {
        let driver = Driver::get().map_err(ToString::to_string)?;
        let loaded = Loaded::of_device(ordinal)?;
        let primary =
            Primary::retain(driver, ordinal as i32).map_err(|error| format!("device {ordinal}: {error}"))?;
        let checks_indices = is_debugging()?;
        let (pending, idle) = Default::default();
        Ok(Arc::new(PlanDevice { driver, loaded, primary, ordinal, checks_indices, pending, idle }))
    }

    /// The device that memory at `address` belongs to.
    ///
    /// # Errors
    /// As [`PlanDevice::new`], and where the driver knows no such memory.
    pub fn of_address(address: u64) -> Result<Arc<PlanDevice>, String> {
        let driver = Driver::get().map_err(ToString::to_string)?;
        let ask = || {
            let primary = Primary::of_this_thread(driver)?;
            let _entered = primary.enter()?;
            driver.pointer_device(address)
        };
        let ordinal = ask().map_err(|error| format!("address {address:#x}: {error}"))?;
        PlanDevice::new(ordinal.unsigned_abs())
    }

    /// Number of the device, from 0.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// How the kernels were found, or why there are none.
    pub fn report(&self) -> &'static Report {
        &self.loaded.report
    }

    /// The kernels, where there are any.
    pub(super) fn kernels(&self) -> Option<&'static Kernels> {
        self.loaded.kernels.as_ref()
    }

    /// Whether there are kernels for it.
    pub fn has_kernels(&self) -> bool {
        self.loaded.kernels.is_some()
    }

    /// Whether destination indices are looked at before each launch.
    pub(super) fn checks_indices(&self) -> bool {
        self.checks_indices
    }

    /// Makes the device's context this thread's own. In a forked child there is none.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        if self.driver.is_inherited() {
            let why = "no CUDA in a forked child: start children by spawn".to_owned();
            return Err(CudaError::Refused { call: "cuCtxPushCurrent", why });
        }
        self.primary.enter()
    }

    /// Ordinal of the device that memory at `address` belongs to.
    ///
    /// # Errors
    /// The driver's where it knows no such memory.
    pub fn device_of(&self, address: u64) -> Result<u32, CudaError> {
        let _entered = self.enter()?;
        self.driver.pointer_device(address).map(i32::unsigned_abs)
    }

    /// Host memory as this device sees it, held by what is returned.
    ///
    /// # Errors
    /// As [`DeviceMemory::of_region`].
    pub fn reach(&self, region: Arc<Region>) -> Result<Arc<DeviceMemory>, CudaError> {
        let _entered = self.enter()?;
        DeviceMemory::of_region(self.driver, region).map(Arc::new)
    }

    /// Somebody else's event by its handle, as [`Event::borrowed`].
    ///
    /// # Errors
    /// `Refused` for the handle 0, which torch's events have until they are recorded.
    ///
    /// # Safety
    /// The handle is of a live event, which lives as long as the value and its copies.
    pub unsafe fn borrowed(self: &Arc<Self>, handle: u64) -> Result<PlanEvent, CudaError> {
        // SAFETY: the caller's promise.
        let event = unsafe { Event::borrowed(self.driver, handle) }?;
        Ok(PlanEvent { event: Arc::new(event), device: Arc::clone(self) })
    }

    /// An event of ours, used before or new. The context is entered.
    pub(super) fn event(&self) -> Result<Arc<Event>, CudaError> {
        let used = self.idle().pop();
        used.map_or_else(|| Event::new(self.driver), Ok).map(Arc::new)
    }

    /// Marks the work of `stream` up to now, and holds `touched` until it is done. The context is entered.
    pub(super) fn hold(
        &self,
        stream: Stream,
        event: &Arc<Event>,
        touched: &Arc<Touched>,
    ) -> Result<(), CudaError> {
        let recorded = event.record(stream);
        if recorded.is_ok() {
            let (event, touched) = (Arc::clone(event), Arc::clone(touched));
            self.pending().push(Pending { event, touched, handle: stream.handle() });
        } else if stream.synchronize(self.driver).is_err_and(|error| !error.is_gone()) {
            // Nothing says when the device is done: rather memory that is never given back.
            std::mem::forget(Arc::clone(touched));
        }
        recorded
    }

    /// Lets go of what the device is done with.
    ///
    /// # Errors
    /// The driver's.
    pub fn release_done(&self) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        let mut done = Vec::new();
        let mut pending = self.pending();
        // A stream does its work in order: what is behind work that is not done is not done. Streams are in no order
        // among each other.
        let (mut place, mut busy) = (0, Vec::new());
        while let Some(one) = pending.get(place) {
            if busy.contains(&one.handle) {
                place += 1;
            } else if one.event.is_done()? {
                done.push(pending.remove(place));
            } else {
                busy.push(one.handle);
            }
        }
        drop(pending);
        // Owners are let go without the lock; events that nobody else knows are used again.
        for Pending { event, touched, .. } in done {
            drop(touched);
            self.keep(event);
        }
        Ok(())
    }

    fn keep(&self, event: Arc<Event>) {
        if let Some(event) = Arc::into_inner(event) {
            let mut idle = self.idle();
            if idle.len() < MOST_IDLE_EVENTS {
                idle.push(event);
            }
        }
    }

    /// Waits until the device has done everything that was submitted, and lets go of it. Release the interpreter lock
    /// first.
    ///
    /// # Errors
    /// The driver's.
    pub fn drain(&self) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        loop {
            let Some(event) = self.pending().first().map(|first| Arc::clone(&first.event)) else {
                return Ok(());
            };
            event.synchronize()?;
            let is_this = |one: &Pending| Arc::ptr_eq(&one.event, &event);
            let done = {
                let mut pending = self.pending();
                let place = pending.iter().position(is_this);
                place.map(|place| pending.remove(place))
            };
            // Owners are let go without the lock.
            drop(done);
        }
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.pending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Event>> {
        self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for PlanDevice {
    fn drop(&mut self) {
        if self.driver.is_inherited() {
            // Nothing here is a forked child's: not the events, and not what the parent's device still uses.
            std::mem::forget(std::mem::take(&mut *self.pending()));
            std::mem::forget(std::mem::take(&mut *self.idle()));
            return;
        }
        let waited = if self.pending().is_empty() { Ok(()) } else { self.drain() };
        if waited.is_err_and(|error| !error.is_gone()) {
            // The device may still be at work: rather memory that is never given back. A driver that has ended does
            // nothing any more.
            std::mem::forget(std::mem::take(&mut *self.pending()));
        }
    }
}

/// A point in the work of a stream, with the device that it is of.
#[derive(Debug, Clone)]
pub struct PlanEvent {
    pub(super) event: Arc<Event>,
    pub(super) device: Arc<PlanDevice>,
}

impl PlanEvent {
    /// The driver's handle.
    pub fn handle(&self) -> u64 {
        self.event.handle()
    }

    /// The device that it is of.
    pub fn device(&self) -> &Arc<PlanDevice> {
        &self.device
    }

    /// Whether everything that was marked is done.
    ///
    /// # Errors
    /// The driver's, also those of the work itself.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _entered = self.device.enter()?;
        self.event.is_done()
    }

    /// Waits until everything that was marked is done. Release the interpreter lock first.
    ///
    /// # Errors
    /// As [`PlanEvent::is_done`].
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        self.event.synchronize()
    }

    /// Lets what is given to `stream` from now on wait for what was marked.
    ///
    /// # Errors
    /// The driver's.
    pub fn hold_back(&self, stream: Stream) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        stream.wait(&self.event)
    }
}
