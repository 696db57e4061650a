//! Copies by the processor: pages between memory of the host, by the strips of a plan.

use std::sync::Arc;

use hicache_sys::Region;
use hicache_sys::copy::{Runs, copy_runs};
use rayon::prelude::*;

use super::event::{Event, HostEvent};
use super::executor::Executor;
use super::plan::{LayerPlan, Memory};
use super::slots::{PoolSlots, Slots};
use crate::plan::{CopyPlan, Extent};
use crate::{Error, ErrorKind, Result};

/// Bytes from which on a batch is worth more than one thread.
const PARALLEL_BYTES: u64 = 4 << 20;

/// Copies every page of `slots` from `src` to `dst`, buffers as the plan's layouts number them. No memory is taken.
///
/// # Errors
/// `Geometry` where a buffer is smaller than the plan's layouts say, or is not to be written; nothing was copied then.
pub fn copy_pages(
    plan: &CopyPlan,
    src: &[Arc<Region>],
    dst: &[Arc<Region>],
    slots: &PoolSlots,
) -> Result<()> {
    check_memory(plan, src, dst)?;
    slots.pairs().try_for_each(|pair| copy_page(plan, src, dst, pair))
}

fn check_memory(plan: &CopyPlan, src: &[Arc<Region>], dst: &[Arc<Region>]) -> Result<()> {
    for (side, extent, regions) in [("source", plan.src(), src), ("destination", plan.dst(), dst)] {
        check_extent(side, extent, regions.iter().map(|region| region.len() as u64))?;
    }
    if dst.iter().any(|region| !region.is_writable()) {
        return Err(Error::geometry(
            "expected writable memory as a destination, found some that is read-only",
        ));
    }
    Ok(())
}

/// Whether buffers of these lengths hold what a layout says.
pub(super) fn check_extent(
    side: &str,
    extent: &Extent,
    buffers: impl ExactSizeIterator<Item = u64>,
) -> Result<()> {
    if buffers.len() != extent.buffer_bytes.len() {
        return Err(Error::geometry(format!(
            "expected {} buffers of the {side}, found {}",
            extent.buffer_bytes.len(),
            buffers.len()
        )));
    }
    for (number, (found, &needed)) in buffers.zip(&extent.buffer_bytes).enumerate() {
        if found < needed {
            return Err(Error::geometry(format!(
                "expected {needed} bytes in buffer {number} of the {side}, found {found}"
            )));
        }
    }
    Ok(())
}

fn copy_page(
    plan: &CopyPlan,
    src: &[Arc<Region>],
    dst: &[Arc<Region>],
    (from, to): (u64, u64),
) -> Result<()> {
    for strip in plan.strips() {
        let (source, destination) = (strip.first.src, strip.first.dst);
        let runs =
            Runs { src: source.at(from), dst: destination.at(to), len: strip.first.len, axes: strip.axes };
        copy_runs(&src[source.buffer], &dst[destination.buffer], &runs)
            .map_err(|error| Error::geometry(error.to_string()))?;
    }
    Ok(())
}

/// The processor as an executor: every copy has been done when the call that issues it returns.
#[derive(Debug, Clone)]
pub struct CpuCopies {
    workers: Option<Arc<rayon::ThreadPool>>,
    /// A forked child has none of the threads, and copies on the calling one.
    process: u32,
}

impl CpuCopies {
    /// Copies on `threads` threads, on the calling one alone where that is 1. Batches below 4 MiB stay on it anyway.
    ///
    /// # Errors
    /// `Io` where the threads cannot be started.
    pub fn new(threads: usize) -> Result<CpuCopies> {
        let process = hicache_sys::process_number();
        if threads <= 1 {
            return Ok(CpuCopies { workers: None, process });
        }
        let name = |number| format!("hicache-copy-{number}");
        let workers = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build();
        let workers = workers
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot start copy threads: {error}")))?;
        Ok(CpuCopies { workers: Some(Arc::new(workers)), process })
    }

    /// Copies one layer of all pools, now.
    ///
    /// # Errors
    /// `Unsupported` for memory that is not the host's.
    pub fn copy_now(&self, plan: &LayerPlan, slots: &Slots) -> Result<()> {
        let workers = self.workers.as_ref().filter(|_| self.process == hicache_sys::process_number());
        for one in &plan.moves {
            let (Memory::Host(src), Memory::Host(dst)) = (&one.src, &one.dst) else {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "the processor copies between memory of the host, found memory of a device",
                ));
            };
            let slots = &slots.pools[one.pool];
            let bytes = one.plan.bytes() * slots.source().len() as u64;
            match workers {
                Some(workers) if bytes >= PARALLEL_BYTES => {
                    check_memory(&one.plan, src, dst)?;
                    let pages = slots.source().par_iter().zip(slots.destination());
                    let copy = |(&from, &to): (&i64, &i64)| match (u64::try_from(from), u64::try_from(to)) {
                        (Ok(from), Ok(to)) => copy_page(&one.plan, src, dst, (from, to)),
                        _ => Ok(()),
                    };
                    workers.install(|| pages.try_for_each(copy))?;
                }
                _ => copy_pages(&one.plan, src, dst, slots)?,
            }
        }
        Ok(())
    }
}

impl Executor for CpuCopies {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn wait(&self, event: &Event) -> Result<()> {
        event.wait_until(None).map(|_| ())
    }

    fn copy(&self, plan: &Arc<LayerPlan>, slots: &Arc<Slots>) -> Result<()> {
        self.copy_now(plan, slots)
    }

    fn record(&self, _step: Option<u32>) -> Result<Event> {
        Ok(HostEvent::done())
    }
}
