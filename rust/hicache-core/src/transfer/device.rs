//! Copies on a device: the layers of a plan, given to a stream of an engine as kernels or to the copy engine.
//!
//! ```text
//!   made with the plan:  host memory -> its address on the device    blocks for index vectors    one error word
//!
//!   stream:  [wait event]  ->  [launches of layer 0][event 0]  ->  [launches of layer 1][event 1]  ->  ...
//!                                   reads indices from a block, held until the event has come
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use hicache_sys::Region;
use hicache_sys::cuda::{
    Choice, CudaError, DeviceMemory, IndexPlace, MappedBlock, MappedBlocks, MappedMemory, PlanDevice,
    PlanEvent, PlanStream, Source, SourceOrder, SubmitError, Touched,
};
use hicache_sys::segment_plan::{IndexSlice, IndexVector, IndexWidth, SegmentPlan};

use super::device_event::{DeviceEvent, check_error_word, refused};
use super::event::Event;
use super::executor::Executor;
use super::lower::{IndexUnit, Indices, PoolIndices};
use super::plan::{LayerPlan, Memory, TransferPlan};
use super::slots::{PoolSlots, Slots};
use crate::{Error, ErrorKind, Result};

/// What the memory of one plan is to a device, made once; the streams of all its transfers share it.
#[derive(Debug)]
pub struct DevicePlans {
    device: Arc<PlanDevice>,
    /// Host memory as the device sees it.
    reached: Vec<(Arc<Region>, Arc<DeviceMemory>)>,
    blocks: Arc<MappedBlocks>,
    /// Kernels set bits in it, for good: bytes after a gap are announced by no event.
    error_word: Arc<MappedMemory>,
    by_kernel: AtomicU64,
    by_copy_engine: AtomicU64,
    last: Mutex<Option<String>>,
}

/// How the layers of a plan went to its device.
#[derive(Debug, Clone)]
pub struct DeviceReport {
    /// Number of the device, from 0.
    pub device: u32,
    /// What there is to move the bytes, such as `kernels compiled by NVRTC`.
    pub by: String,
    /// Compute capability, 10 x major + minor.
    pub capability: u32,
    /// What was tried in order to have kernels, and what came of it.
    pub tried: Vec<(String, String)>,
    /// Layers given to a kernel so far.
    pub kernel_layers: u64,
    /// Layers given to the copy engine so far.
    pub copy_engine_layers: u64,
    /// Which way the last layer went, and why.
    pub last: Option<String>,
}

impl DevicePlans {
    /// Looks for the device of `plan`, loads its kernels, asks where it sees the host memory, and makes a first block
    /// for index vectors.
    ///
    /// # Errors
    /// `Unsupported` where there is no such device, `Config` for host memory that is not registered with the driver,
    /// `Geometry` for memory of several devices, `Device` and `Limit` where a block cannot be had.
    pub fn new(plan: &TransferPlan) -> Result<Arc<DevicePlans>> {
        let device = device_of(plan)?;
        let mut reached: Vec<(Arc<Region>, Arc<DeviceMemory>)> = Vec::new();
        for (name, placed) in plan.placed() {
            let Memory::Host(regions) = &placed.memory else { continue };
            for region in &**regions {
                if !reached.iter().any(|(known, _)| Arc::ptr_eq(known, region)) {
                    let memory = device
                        .reach(Arc::clone(region))
                        .map_err(|error| unregistered(name, region, &error))?;
                    reached.push((Arc::clone(region), memory));
                }
            }
        }
        let blocks = MappedBlocks::new(&device)?;
        let error_word = Arc::new(MappedMemory::new(&device, 8)?);
        let (by_kernel, by_copy_engine, last) = Default::default();
        Ok(Arc::new(DevicePlans { device, reached, blocks, error_word, by_kernel, by_copy_engine, last }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<PlanDevice> {
        &self.device
    }

    /// An event of the device's driver, as transfers wait for it.
    pub fn event(&self, event: PlanEvent) -> Arc<DeviceEvent> {
        Arc::new(DeviceEvent::new(event, None))
    }

    /// A word for reports, as [`Executor::name`].
    pub fn name(&self) -> &'static str {
        if self.device.has_kernels() { "kernel" } else { "copy engine" }
    }

    /// How the layers went so far.
    pub fn report(&self) -> DeviceReport {
        let found = self.device.report();
        DeviceReport {
            device: self.device.ordinal(),
            by: found.chosen.to_string(),
            capability: found.capability,
            tried: found
                .steps
                .iter()
                .map(|(source, outcome)| (source.to_string(), outcome.clone()))
                .collect(),
            kernel_layers: self.by_kernel.load(Ordering::Relaxed),
            copy_engine_layers: self.by_copy_engine.load(Ordering::Relaxed),
            last: lock(&self.last).clone(),
        }
    }

    /// Waits until the device has done everything that was submitted, and lets go of it.
    ///
    /// # Errors
    /// `Device` where the driver says so, or an index was past its limit.
    pub fn drain(&self) -> Result<()> {
        self.device.drain().map_err(refused)?;
        check_error_word(&self.error_word)
    }

    /// Blocks of index vectors that nobody uses now.
    pub fn idle_blocks(&self) -> usize {
        self.blocks.idle()
    }

    /// Memory of one side as the device sees it.
    fn seen(&self, memory: &Memory) -> Result<Vec<Arc<DeviceMemory>>> {
        match memory {
            Memory::Host(regions) => regions.iter().map(|region| self.reach(region).cloned()).collect(),
            Memory::Device(buffers) => Ok(buffers.memory().ok_or_else(not_lent)?.to_vec()),
        }
    }

    fn reach(&self, region: &Arc<Region>) -> Result<&Arc<DeviceMemory>> {
        let found = self.reached.iter().find(|(known, _)| Arc::ptr_eq(known, region));
        let found =
            found.ok_or_else(|| Error::config("expected memory of the plan, found that of another"))?;
        Ok(&found.1)
    }

    /// Where a buffer begins, on the device.
    fn address(&self, memory: &Memory, number: usize) -> Option<u64> {
        match memory {
            Memory::Host(regions) => Some(self.reach(regions.get(number)?).ok()?.extent().base),
            Memory::Device(_) => Some(memory.buffer(number)?.address),
        }
    }
}

/// The device that all device memory of `plan` is of.
fn device_of(plan: &TransferPlan) -> Result<Arc<PlanDevice>> {
    let unsupported = |why: String| Error::new(ErrorKind::Unsupported, format!("memory of a device: {why}"));
    let mut addresses = Vec::new();
    for memory in plan.memory() {
        let Memory::Device(buffers) = memory else { continue };
        let lent = buffers.memory().ok_or_else(not_lent)?.iter().map(|memory| memory.extent());
        addresses.extend(lent.filter(|extent| extent.len > 0).map(|extent| extent.base));
    }
    let first = addresses.first().ok_or_else(|| unsupported("expected some, found none".to_owned()))?;
    let device = PlanDevice::of_address(*first).map_err(unsupported)?;
    if device.report().chosen == Source::Cpu {
        let tried: Vec<&str> = device.report().steps.iter().map(|(_, outcome)| outcome.as_str()).collect();
        return Err(unsupported(tried.join("; ")));
    }
    for &address in &addresses {
        let found = device.device_of(address).map_err(refused)?;
        if found != device.ordinal() {
            return Err(Error::geometry(format!(
                "expected all memory of a plan on device {}, found some on device {found}",
                device.ordinal()
            )));
        }
    }
    Ok(device)
}

/// The copies of one stream.
#[derive(Debug)]
pub struct DeviceCopies {
    plans: Arc<DevicePlans>,
    stream: PlanStream,
    /// The index vectors of the batch that was issued last, for its next layers.
    indices: Mutex<Option<(Arc<Slots>, Arc<DeviceIndices>)>>,
    /// The event behind the last copy.
    last: Mutex<Option<PlanEvent>>,
}

/// Index vectors of all pools, in a block that the device reads.
#[derive(Debug)]
struct DeviceIndices {
    block: MappedBlock,
    pools: Vec<PoolIndices>,
}

impl DeviceCopies {
    /// Copies of `plans` on a stream of their device.
    ///
    /// # Errors
    /// `Config` for a stream of another device.
    pub fn new(plans: &Arc<DevicePlans>, stream: PlanStream) -> Result<DeviceCopies> {
        if !Arc::ptr_eq(stream.device(), &plans.device) {
            return Err(Error::config("expected a stream of the device of the plan, found one of another"));
        }
        let (indices, last) = Default::default();
        Ok(DeviceCopies { plans: Arc::clone(plans), stream, indices, last })
    }

    /// Gives one layer of all pools to the stream.
    ///
    /// # Errors
    /// As [`Executor::copy`]; `Geometry` for a destination that is read-only.
    pub fn submit(&self, plan: &LayerPlan, slots: &Arc<Slots>) -> Result<()> {
        check_error_word(&self.plans.error_word)?;
        // Should the driver refuse a launch after others, the last event says nothing of those.
        *lock(&self.last) = None;
        if plan.moves.iter().all(|one| slots.pools[one.pool].pairs().next().is_none()) {
            return Ok(());
        }
        let mut touched = Touched::default();
        for one in &plan.moves {
            touched.source.extend(self.plans.seen(&one.src)?);
            touched.destination.extend(self.plans.seen(&one.dst)?);
        }
        if touched.destination.iter().any(|memory| !memory.is_writable()) {
            return Err(Error::geometry(
                "expected writable memory as a destination, found some that is read-only",
            ));
        }
        // The way depends on the runs, and not on where the index vectors are.
        let here = lower_here(plan, slots, &self.plans)?;
        let ways = here.iter().map(|plan| self.stream.choose(plan, true).map_err(not_submitted));
        let ways = ways.collect::<Result<Vec<_>>>()?;
        let by_kernel = ways.iter().find(|(choice, _)| !matches!(choice, Choice::Copies { .. }));
        let event = match by_kernel {
            Some(_) => self.submit_to_kernels(plan, slots, touched)?,
            None => self.submit_to_copy_engine(&here, slots, touched)?,
        };
        *lock(&self.last) = Some(event);
        let count = if by_kernel.is_some() { &self.plans.by_kernel } else { &self.plans.by_copy_engine };
        count.fetch_add(1, Ordering::Relaxed);
        if let Some((choice, why)) = by_kernel.or(ways.first()) {
            *lock(&self.plans.last) = Some(format!("{choice}: {why}"));
        }
        Ok(())
    }

    fn submit_to_kernels(&self, plan: &LayerPlan, slots: &Arc<Slots>, touched: Touched) -> Result<PlanEvent> {
        let indices = self.indices(slots)?;
        let mut launches =
            plan.lower_at(&indices.pools, &|memory, number| self.plans.address(memory, number))?;
        for launch in &mut launches {
            launch.error = self.plans.error_word.address(0);
        }
        let touched = Touched {
            index: vec![Arc::clone(indices.block.device())],
            error: Some(Arc::clone(self.plans.error_word.device())),
            lease: Some(indices),
            ..touched
        };
        self.stream.submit(&launches, &Arc::new(touched), IndexPlace::Device).map_err(not_submitted)
    }

    fn submit_to_copy_engine(
        &self,
        plans: &[SegmentPlan],
        slots: &Slots,
        touched: Touched,
    ) -> Result<PlanEvent> {
        let sides = slots.pools.iter().flat_map(|pool| [pool.source(), pool.destination()]);
        let slices: Vec<IndexSlice<'_>> = sides.map(IndexSlice::Eight).collect();
        // In the stream's order: what is read may be written by what the stream was given before.
        let place = IndexPlace::Host(&slices, SourceOrder::Stream);
        self.stream.submit(plans, &Arc::new(touched), place).map_err(not_submitted)
    }

    /// The index vectors of a batch on the device: put there with its first layer.
    fn indices(&self, slots: &Arc<Slots>) -> Result<Arc<DeviceIndices>> {
        let mut last = lock(&self.indices);
        if let Some((known, indices)) = &*last
            && Arc::ptr_eq(known, slots)
        {
            return Ok(Arc::clone(indices));
        }
        // A block that only waits here for its next layer is free again.
        *last = None;
        self.plans.device.release_done().map_err(refused)?;
        let bytes: usize = slots.pools.iter().map(|pool| 2 * size_of_val(pool.source())).sum();
        let block = self.plans.blocks.lease(&self.plans.device, bytes)?;
        let mut end = 0;
        let mut put = |slots: &[i64]| {
            let start = end;
            end += size_of_val(slots);
            block.put(start, slots);
            IndexVector { address: block.address(start), width: IndexWidth::Eight }
        };
        let pools = slots.pools.iter();
        let pools = pools.map(|pool| pool_indices(pool, put(pool.source()), put(pool.destination())));
        let pools = pools.collect::<Result<_>>()?;
        let indices = Arc::new(DeviceIndices { block, pools });
        *last = Some((Arc::clone(slots), Arc::clone(&indices)));
        Ok(indices)
    }

    /// Lets an event of the caller's come when everything submitted so far is done.
    ///
    /// # Errors
    /// `Device`.
    pub fn record_to(&self, event: &PlanEvent) -> Result<()> {
        self.stream.record_to(event).map_err(refused)
    }
}

impl Executor for DeviceCopies {
    fn name(&self) -> &'static str {
        self.plans.name()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        match event.on_device() {
            Some(event) => self.stream.wait(event).map_err(refused),
            None => event.wait_until(None).map(|_| ()),
        }
    }

    fn copy(&self, plan: &Arc<LayerPlan>, slots: &Arc<Slots>) -> Result<()> {
        self.submit(plan, slots)
    }

    fn record(&self, _step: Option<u32>) -> Result<Event> {
        let last = lock(&self.last).clone();
        let event = last.map_or_else(|| self.stream.record(), Ok).map_err(refused)?;
        Ok(Arc::new(DeviceEvent::new(event, Some(Arc::clone(&self.plans.error_word)))))
    }
}

/// The plans of a layer with its index vectors where they are in this process: what the copy engine is told.
fn lower_here(plan: &LayerPlan, slots: &Slots, plans: &DevicePlans) -> Result<Vec<SegmentPlan>> {
    let here = |slots: &[i64]| IndexVector { address: slots.as_ptr() as u64, width: IndexWidth::Eight };
    let pools = slots.pools.iter();
    let pools = pools.map(|pool| pool_indices(pool, here(pool.source()), here(pool.destination())));
    let pools = pools.collect::<Result<Vec<_>>>()?;
    plan.lower_at(&pools, &|memory, number| plans.address(memory, number))
}

fn pool_indices(pool: &PoolSlots, source: IndexVector, destination: IndexVector) -> Result<PoolIndices> {
    let pages = u32::try_from(pool.source().len());
    let pages = pages.map_err(|_| Error::geometry("expected fewer than 2^32 pages in a batch"))?;
    let indices = |vector| Indices { vector, unit: IndexUnit::Page };
    Ok(PoolIndices { pages, source: indices(source), destination: indices(destination) })
}

fn not_submitted(error: SubmitError) -> Error {
    let kind = match error {
        SubmitError::Plan(_) | SubmitError::Index(_) => ErrorKind::Geometry,
        SubmitError::Choice(_) => ErrorKind::Unsupported,
        _ => ErrorKind::Device,
    };
    Error::new(kind, error.to_string())
}

fn not_lent() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "expected memory of a CUDA device that was lent, found memory of a device named by its address alone",
    )
}

fn unregistered(pool: &str, region: &Region, error: &CudaError) -> Error {
    Error::config(format!(
        "pool {pool:?}: expected host memory that is registered with the CUDA driver, found {} bytes at {:#x} that are not ({error}): take it from a HostPool with register=\"require\"",
        region.len(),
        region.address()
    ))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
