//! Launching a plan: the kernels, or the copy engine, on a stream that the caller owns. No allocation, no waiting, no
//! host callback, so that a launch can be captured into a graph.

use std::ffi::c_void;

use super::choose::{Choice, Facts, REGISTER_THREADS};
use super::driver::function_attribute;
use super::kernels::{Kernels, WIDTHS};
use super::{Copy3, CudaError, Driver, SourceOrder, Stream};
use crate::segment_plan::{IndexVector, SegmentPlan};

/// `BulkShape` of `cuda/segment_bulk.h`.
#[repr(C)]
struct BulkShape {
    lanes: u32,
    stage_bytes: u32,
}

/// What the index check found; `IndexReport` of `cuda/segment_copy.cu`. It lives where the device can write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IndexReport {
    /// The least index that is not negative.
    pub least: i64,
    /// The largest.
    pub most: i64,
    /// Negative indices.
    pub padding: u32,
    /// Indices at or past the limit.
    pub past_limit: u32,
    /// Indices within the limit that occurred before.
    pub duplicates: u32,
    /// Unused.
    pub reserved: u32,
}

const _: () = assert!(size_of::<IndexReport>() == 32);

impl IndexReport {
    /// What the report must hold before the check.
    pub const EMPTY: IndexReport = IndexReport {
        least: i64::MAX,
        most: i64::MIN,
        padding: 0,
        past_limit: 0,
        duplicates: 0,
        reserved: 0,
    };
}

impl Facts {
    /// The facts for a launch on `stream`.
    ///
    /// # Errors
    /// Those of asking the driver whether the stream is being captured.
    pub fn of(
        driver: &Driver,
        kernels: Option<&Kernels>,
        stream: Stream,
        has_host_indices: bool,
    ) -> Result<Facts, CudaError> {
        Ok(Facts {
            kernels: kernels.map(|kernels| kernels.capability),
            shared_bytes: kernels.map_or(0, |kernels| kernels.shared_bytes),
            has_copy_batch: driver.has_copy_batch(),
            has_host_indices,
            is_capturing: stream.is_capturing(driver)?,
            is_legacy_stream: stream.handle() == 0,
        })
    }
}

impl Kernels {
    /// Launches `plan` by the register or bulk kernel, as chosen by [`super::choose()`]. The driver copies the plan before
    /// this returns.
    ///
    /// # Errors
    /// Those of the launch; `Refused` for a choice without a kernel.
    ///
    /// # Safety
    /// The plan was validated ([`SegmentPlan::validate`]) against memory that the device can reach at these addresses;
    /// that memory and the index vectors stay valid, and unused by others, until the stream has done the launch. The
    /// stream belongs to the device of these kernels.
    pub unsafe fn copy(&self, plan: &SegmentPlan, choice: Choice, stream: Stream) -> Result<(), CudaError> {
        let plan_place = (&raw const *plan).cast_mut().cast::<c_void>();
        match choice {
            Choice::Register { width, grid } => {
                let place = WIDTHS.iter().position(|&known| known == width);
                let function = place.map_or(self.mixed, |place| self.copy[place]);
                let (grid, block) = ([grid, 1, 1], [REGISTER_THREADS, 1, 1]);
                // SAFETY: the kernel takes one plan; the rest is the caller's promise.
                unsafe { self.driver.launch(function, grid, block, 0, stream.handle(), &mut [plan_place]) }
            }
            Choice::Bulk { grid, lanes, stage_bytes } => {
                let refused = |why: &str| CudaError::Refused { call: "cuLaunchKernel", why: why.to_owned() };
                let function = self.bulk.ok_or_else(|| refused("this device has no bulk kernel"))?;
                let shape = BulkShape { lanes, stage_bytes };
                let shape_place = (&raw const shape).cast_mut().cast::<c_void>();
                let shared = choice.shared_bytes();
                let (attribute, device) =
                    (function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES, self.primary.device());
                // SAFETY: a kernel of a library that is never unloaded.
                unsafe { self.driver.function_set(function, attribute, shared as i32, device) }?;
                let params = &mut [plan_place, shape_place];
                let (grid, block) = ([grid, 1, 1], [32, 1, 1]);
                // SAFETY: the kernel takes a plan and a shape; the rest is the caller's promise.
                unsafe { self.driver.launch(function, grid, block, shared, stream.handle(), params) }
            }
            Choice::Copies { .. } => {
                let why = "expected a kernel, found the copy engine".to_owned();
                Err(CudaError::Refused { call: "cuLaunchKernel", why })
            }
        }
    }

    /// For debugging: looks at `count` indices. `seen` is the address of a zeroed bitmap of `limit` bits, `report` that
    /// of an [`IndexReport`] that holds [`IndexReport::EMPTY`].
    ///
    /// # Errors
    /// Those of the launch.
    ///
    /// # Safety
    /// The device can read the indices and write the other two, until the stream has done the launch, and nobody else
    /// uses them meanwhile. The stream belongs to the device of these kernels.
    pub unsafe fn check_index(
        &self,
        index: IndexVector,
        count: u32,
        limit: u32,
        seen: u64,
        report: u64,
        stream: Stream,
    ) -> Result<(), CudaError> {
        let numbers = (index.address, index.width as u32, count, limit, seen, report);
        let place = |number: *const c_void| number.cast_mut();
        let params = &mut [
            place((&raw const numbers.0).cast()),
            place((&raw const numbers.1).cast()),
            place((&raw const numbers.2).cast()),
            place((&raw const numbers.3).cast()),
            place((&raw const numbers.4).cast()),
            place((&raw const numbers.5).cast()),
        ];
        let (grid, block) = ([1, 1, 1], [REGISTER_THREADS, 1, 1]);
        // SAFETY: the kernel takes these six numbers; the rest is the caller's promise.
        unsafe { self.driver.launch(self.index_check, grid, block, 0, stream.handle(), params) }
    }
}

impl Driver {
    /// Does `copies`, as [`crate::segment_plan::copies_of`] lists them, on the copy engine: in one call if `batched`,
    /// else one after the other.
    ///
    /// # Errors
    /// The driver's, at the first copy that it refuses.
    ///
    /// # Safety
    /// As for [`Driver::copy_batch_async`]: addresses are valid until the stream is done, `SourceOrder::Any` only for
    /// sources in host memory that are complete now, and the stream is alive.
    pub unsafe fn copy_runs(
        &self,
        copies: &[Copy3],
        batched: bool,
        stream: Stream,
        order: SourceOrder,
    ) -> Result<(), CudaError> {
        if batched {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_batch_async(copies, stream.handle(), order) };
        }
        for &(destination, source, len) in copies {
            // SAFETY: the caller's promise.
            unsafe { self.copy_async(destination, source, len, stream.handle()) }?;
        }
        Ok(())
    }
}
