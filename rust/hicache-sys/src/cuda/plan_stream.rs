//! A stream of an engine that carries out segment plans on memory lent to it.
//!
//! Everything unsafe is said once, when memory is lent and when the stream is handed over. A plan is then checked against
//! what was lent, launched the way that [`super::choose()`] says, and what it touches is held until the device is done.

use std::fmt;
use std::sync::Arc;

use super::choose::{Choice, Facts, Wishes, choose};
use super::index_check::check_destinations;
use super::plan_device::{DeviceMemory, PlanDevice, PlanEvent, Touched};
use super::{Copy3, CudaError, SourceOrder, Stream};
use crate::segment_plan::{Extent, Extents, IndexSlice, PlanError, SegmentPlan, copies_of};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`: handles that stand for a default stream.
const LEGACY_STREAM: u64 = 1;
const STREAM_OF_THREAD: u64 = 2;

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
    /// Destination indices that are not below their limit and each there once; nothing was moved. Only where
    /// `HICACHE_CUDA_DEBUG` is 1.
    Destination {
        /// Number of the segment in its launch.
        segment: usize,
        /// Indices are below it.
        limit: u32,
        /// Indices that occurred before.
        duplicates: u32,
        /// Indices at or past the limit.
        past_limit: u32,
    },
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
            SubmitError::Destination { segment, limit, duplicates, past_limit } => write!(
                f,
                "segment {segment}: expected destination indices below {limit}, each once, found {duplicates} duplicates and {past_limit} at or past the limit"
            ),
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

/// A stream, with the device that carries out its plans.
#[derive(Debug)]
pub struct PlanStream {
    device: Arc<PlanDevice>,
    stream: Stream,
    wishes: Wishes,
}

impl PlanStream {
    /// Takes a stream of `device` by its handle; 0 is the legacy default stream.
    ///
    /// # Errors
    /// `Refused` for the handle that means the default stream of whichever thread uses it.
    ///
    /// # Safety
    /// The stream is of that device, and lives as long as this value. What it was given is waited for by events, so it
    /// may be destroyed before the device is done.
    pub unsafe fn new(
        device: &Arc<PlanDevice>,
        handle: u64,
        wishes: Wishes,
    ) -> Result<PlanStream, CudaError> {
        if handle == STREAM_OF_THREAD {
            let why = "expected a stream that is the same for every thread, found CU_STREAM_PER_THREAD";
            return Err(CudaError::Refused { call: "cuStreamWaitEvent", why: why.to_owned() });
        }
        let handle = if handle == LEGACY_STREAM { 0 } else { handle };
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::from_raw(handle) };
        Ok(PlanStream { device: Arc::clone(device), stream, wishes })
    }

    /// Its device.
    pub fn device(&self) -> &Arc<PlanDevice> {
        &self.device
    }

    /// Lets what is submitted from now on begin after `event`.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, event: &PlanEvent) -> Result<(), CudaError> {
        event.hold_back(self.stream)
    }

    /// An event that comes when everything submitted so far is done.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self) -> Result<PlanEvent, CudaError> {
        let _entered = self.device.enter()?;
        let event = self.device.event()?;
        event.record(self.stream)?;
        Ok(PlanEvent { event, device: Arc::clone(&self.device) })
    }

    /// Lets `event`, one of somebody else, come when everything submitted so far is done.
    ///
    /// # Errors
    /// The driver's.
    pub fn record_to(&self, event: &PlanEvent) -> Result<(), CudaError> {
        let _entered = self.device.enter()?;
        event.event.record(self.stream)
    }

    /// The way that `plan` would go and why; `has_host_indices` where its indices can be had in this process.
    ///
    /// # Errors
    /// `Choice` where there is none, or not the one that was asked for; `Cuda`.
    pub fn choose(
        &self,
        plan: &SegmentPlan,
        has_host_indices: bool,
    ) -> Result<(Choice, &'static str), SubmitError> {
        let _entered = self.device.enter()?;
        let facts = Facts::of(self.device.driver, self.device.kernels(), self.stream, has_host_indices)?;
        choose(plan, &facts, &self.wishes).map_err(SubmitError::Choice)
    }

    /// Checks `plans` against `touched` and gives them to the stream one after the other, with one event behind them,
    /// which is returned; it comes when `touched` is let go.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was submitted then, except that a driver may refuse a copy or launch after others.
    pub fn submit(
        &self,
        plans: &[SegmentPlan],
        touched: &Arc<Touched>,
        index: IndexPlace<'_>,
    ) -> Result<PlanEvent, SubmitError> {
        let device = &self.device;
        device.release_done()?;
        let _entered = device.enter()?;
        let has_host_indices = matches!(index, IndexPlace::Host(..));
        // Addresses of this process mean nothing to a kernel.
        let kernels = device.kernels().filter(|_| !has_host_indices);
        let facts = Facts::of(device.driver, kernels, self.stream, has_host_indices)?;
        if facts.is_capturing {
            let why = "expected a stream that is not being captured into a graph: what a plan touches is held until its event has come";
            return Err(SubmitError::Choice(why.to_owned()));
        }
        let mut choices = Vec::with_capacity(plans.len());
        let mut copies: Vec<Vec<Copy3>> = Vec::new();
        for plan in plans {
            validate(plan, touched, index).map_err(SubmitError::Plan)?;
            check_error_word(plan, touched)?;
            choices.push(choose(plan, &facts, &self.wishes).map_err(SubmitError::Choice)?.0);
            if let IndexPlace::Host(slices, _) = index {
                let mut of_plan = Vec::new();
                match copies_of(plan, slices, &mut of_plan).map_err(SubmitError::Plan)? {
                    0 => copies.push(of_plan),
                    bits => return Err(SubmitError::Index(bits)),
                }
            }
        }
        if let Some(kernels) = kernels.filter(|_| device.checks_indices()) {
            check_destinations(device, kernels, self.stream, plans)?;
        }
        let event = device.event()?;
        // Held whatever happens: the device may be at work on what came before a refusal.
        let given = match (index, kernels) {
            (IndexPlace::Host(_, order), _) => {
                let batched = matches!(choices.first(), Some(Choice::Copies { batched: true }));
                copies.iter().try_for_each(|copies| {
                    // SAFETY: every run lies in memory lent for it, which is held until the event below has come.
                    unsafe { device.driver.copy_runs(copies, batched, self.stream, order) }
                        .map_err(SubmitError::from)
                })
            }
            (IndexPlace::Device, Some(kernels)) => {
                plans.iter().zip(&choices).try_for_each(|(plan, choice)| {
                    // SAFETY: validated against memory that the device reaches, held until the event below has come; the
                    // stream is of this device.
                    unsafe { kernels.copy(plan, *choice, self.stream) }.map_err(SubmitError::from)
                })
            }
            (IndexPlace::Device, None) => {
                return Err(SubmitError::Choice("expected kernels on this device, found none".to_owned()));
            }
        };
        device.hold(self.stream, &event, touched)?;
        given?;
        Ok(PlanEvent { event, device: Arc::clone(device) })
    }
}

/// The device writes there: it has to be lent, too.
fn check_error_word(plan: &SegmentPlan, touched: &Touched) -> Result<(), SubmitError> {
    let (first, end) = (plan.error, plan.error.saturating_add(4));
    let lent = touched.error.as_ref().filter(|memory| memory.is_writable()).map(|memory| memory.extent());
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
        let usable = memory.iter().filter(|memory| memory.is_writable() || !only_writable);
        usable.map(|memory| memory.extent()).collect()
    };
    let index = match index {
        IndexPlace::Device => extents(&touched.index, false),
        IndexPlace::Host(slices, _) => slices.iter().map(IndexSlice::extent).collect(),
    };
    let (source, destination) = (extents(&touched.source, false), extents(&touched.destination, true));
    plan.validate(&Extents { source: &source, destination: &destination, index: &index })
}
