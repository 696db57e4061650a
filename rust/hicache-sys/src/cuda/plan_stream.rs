//! A stream of an engine that carries out segment plans on memory lent to it.
//!
//! Everything unsafe is said once, when memory is lent and when the stream is handed over. A plan is then checked against
//! what was lent, launched the way that [`super::choose()`] says, and what it touches is held until the device is done.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use super::choose::{Choice, Facts, Wishes, choose};
use super::kernels::{Loaded, Report};
use super::{Copy3, CudaError, Driver, Event, SourceOrder, Stream};
use crate::Region;
use crate::segment_plan::{Extent, Extents, IndexSlice, PlanError, SegmentPlan, copies_of};

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

    /// Host memory that is registered with the driver.
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
}

/// Where the index vectors of a plan are.
#[derive(Debug, Clone, Copy)]
pub enum IndexPlace<'a> {
    /// In [`Touched::index`]: for kernels.
    Device,
    /// In this process, and the plan has their addresses here: for the copy engine, which may read the sources in this
    /// order.
    Host(&'a [IndexSlice<'a>], SourceOrder),
}

/// Why a plan was not submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmitError {
    /// The plan is wrong, or leaves what was lent.
    Plan(PlanError),
    /// Some index is at or past its limit, by the bits of its segments; nothing was moved. Only where the indices are in
    /// this process: a kernel sets these bits in the plan's error word.
    Index(u32),
    /// What was asked for cannot be done here.
    Choice(String),
    /// The driver said no.
    Cuda(CudaError),
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SubmitError::Plan(error) => error.fmt(f),
            SubmitError::Index(bits) => {
                write!(f, "expected indices below their limits, found others in segments {bits:#b}")
            }
            SubmitError::Choice(why) => f.write_str(why),
            SubmitError::Cuda(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SubmitError {}

impl From<CudaError> for SubmitError {
    fn from(error: CudaError) -> SubmitError {
        SubmitError::Cuda(error)
    }
}

/// A stream with the kernels of its device.
#[derive(Debug)]
pub struct PlanStream {
    driver: &'static Driver,
    loaded: &'static Loaded,
    stream: Stream,
    wishes: Wishes,
    pending: Mutex<VecDeque<(Event, Arc<Touched>)>>,
}

impl PlanStream {
    /// Takes a stream of device `ordinal` by its handle.
    ///
    /// # Errors
    /// A sentence where there is no driver, or the environment asks for something unknown.
    ///
    /// # Safety
    /// The stream is of that device, whose primary context is current wherever this value is used, and lives as long as
    /// this value.
    pub unsafe fn new(ordinal: u32, handle: u64, wishes: Wishes) -> Result<PlanStream, String> {
        let driver = Driver::get().map_err(ToString::to_string)?;
        let loaded = Loaded::of_device(ordinal)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::from_raw(handle) };
        Ok(PlanStream { driver, loaded, stream, wishes, pending: Mutex::default() })
    }

    /// How the kernels were found, or why there are none.
    pub fn report(&self) -> &Report {
        &self.loaded.report
    }

    /// Lets what is submitted from now on begin after `event`.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.stream.wait(event)
    }

    /// An event that comes when everything submitted so far is done.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self) -> Result<Event, CudaError> {
        let event = Event::new(self.driver)?;
        event.record(self.stream)?;
        Ok(event)
    }

    /// Checks `plan` against `touched` and gives it to the stream; returns the way it goes and why.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was submitted then, except that a driver may refuse a copy after others.
    pub fn submit(
        &self,
        plan: &SegmentPlan,
        touched: &Arc<Touched>,
        index: IndexPlace<'_>,
    ) -> Result<(Choice, &'static str), SubmitError> {
        self.release_done()?;
        validate(plan, touched, index).map_err(SubmitError::Plan)?;
        check_error_word(plan, touched)?;
        let has_host_indices = matches!(index, IndexPlace::Host(..));
        // Addresses of this process mean nothing to a kernel.
        let kernels = self.loaded.kernels.as_ref().filter(|_| !has_host_indices);
        let facts = Facts::of(self.driver, kernels, self.stream, has_host_indices)?;
        let (choice, why) = choose(plan, &facts, &self.wishes).map_err(SubmitError::Choice)?;
        // Held from before the launch on: whatever happens behind it, the device may be at work.
        let event = Event::new(self.driver)?;
        match (choice, index, kernels) {
            (Choice::Copies { batched }, IndexPlace::Host(slices, order), _) => {
                let mut copies: Vec<Copy3> = Vec::new();
                let bits = copies_of(plan, slices, &mut copies).map_err(SubmitError::Plan)?;
                if bits != 0 {
                    return Err(SubmitError::Index(bits));
                }
                // SAFETY: every run lies in memory lent for it, which is held until the event below has come.
                let copied = unsafe { self.driver.copy_runs(&copies, batched, self.stream, order) };
                self.hold(event, touched)?;
                copied?;
            }
            (_, _, Some(kernels)) => {
                // SAFETY: validated against memory that the device reaches, held until the event below has come; the
                // stream is of this device.
                let launched = unsafe { kernels.copy(plan, choice, self.stream) };
                self.hold(event, touched)?;
                launched?;
            }
            _ => return Err(SubmitError::Choice("expected kernels on this device, found none".to_owned())),
        }
        Ok((choice, why))
    }

    fn hold(&self, event: Event, touched: &Arc<Touched>) -> Result<(), CudaError> {
        let recorded = event.record(self.stream);
        if recorded.is_ok() {
            self.pending().push_back((event, Arc::clone(touched)));
        } else if self.stream.synchronize(self.driver).is_err_and(|error| !error.is_gone()) {
            // Nothing says when the device is done: rather memory that is never given back.
            std::mem::forget(Arc::clone(touched));
        }
        recorded
    }

    /// Lets go of what the device is done with.
    fn release_done(&self) -> Result<(), CudaError> {
        let mut pending = self.pending();
        while let Some((event, _)) = pending.front() {
            if !event.is_done()? {
                break;
            }
            pending.pop_front();
        }
        Ok(())
    }

    /// Waits until the device has done everything that was submitted. Release the interpreter lock first.
    ///
    /// # Errors
    /// The driver's.
    pub fn drain(&self) -> Result<(), CudaError> {
        self.stream.synchronize(self.driver)?;
        self.pending().clear();
        Ok(())
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<(Event, Arc<Touched>)>> {
        self.pending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for PlanStream {
    fn drop(&mut self) {
        if self.pending().is_empty() {
            return;
        }
        match self.drain() {
            // A driver that has ended does nothing any more.
            Err(error) if !error.is_gone() => {
                // The device may still be at work: rather memory that is never given back.
                std::mem::forget(std::mem::take(&mut *self.pending()));
            }
            _ => {}
        }
    }
}

/// The device writes there: it has to be lent, too.
fn check_error_word(plan: &SegmentPlan, touched: &Touched) -> Result<(), SubmitError> {
    let (first, end) = (plan.error, plan.error.saturating_add(4));
    let lent = touched.error.as_ref().filter(|memory| memory.writable).map(|memory| memory.extent);
    let is_inside = lent.is_some_and(|lent| lent.base <= first && end <= lent.base.saturating_add(lent.len));
    if plan.error == 0 || is_inside {
        return Ok(());
    }
    Err(SubmitError::Choice(format!(
        "expected an error word in memory lent for it, found address {first:#x}"
    )))
}

fn validate(plan: &SegmentPlan, touched: &Touched, index: IndexPlace<'_>) -> Result<(), PlanError> {
    let extents = |memory: &[Arc<DeviceMemory>], only_writable: bool| -> Vec<Extent> {
        let usable = memory.iter().filter(|memory| memory.writable || !only_writable);
        usable.map(|memory| memory.extent).collect()
    };
    let index = match index {
        IndexPlace::Device => extents(&touched.index, false),
        IndexPlace::Host(slices, _) => slices.iter().map(IndexSlice::extent).collect(),
    };
    let (source, destination) = (extents(&touched.source, false), extents(&touched.destination, true));
    plan.validate(&Extents { source: &source, destination: &destination, index: &index })
}
