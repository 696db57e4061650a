//! For debugging: a look at the destination indices of a launch before it, on the stream that it goes to.
//!
//! Two equal destinations are data, and nothing that a plan can be checked for. The look waits for the stream, so it is
//! only taken where `HICACHE_CUDA_DEBUG` is 1.

use super::kernels::Kernels;
use super::launch::IndexReport;
use super::mapped::MappedMemory;
use super::plan_device::PlanDevice;
use super::plan_stream::SubmitError;
use super::{CudaError, Event, Stream};
use crate::segment_plan::{IndexKind, IndexVector, IndexWidth, SegmentPlan};

/// Bytes of the report, before the bitmap.
const REPORT_BYTES: usize = size_of::<IndexReport>();

/// Looks at the destination indices of `plans`, which were validated. The context is entered.
///
/// # Errors
/// `Destination` for the first vector that has duplicates, or an index at or past its limit; `Cuda`.
pub(super) fn check_destinations(
    device: &PlanDevice,
    kernels: &Kernels,
    stream: Stream,
    plans: &[SegmentPlan],
) -> Result<(), SubmitError> {
    let mut seen = Vec::new();
    for (number, segment) in plans.iter().flat_map(|plan| plan.used().iter().enumerate()) {
        let side = &segment.destination;
        let count = side.index_len(segment.items);
        if side.index_kind == IndexKind::Identity as u32 || count == 0 {
            continue;
        }
        let width = if side.index_bytes == 4 { IndexWidth::Four } else { IndexWidth::Eight };
        let vector = IndexVector { address: side.index, width };
        let one = (side.index, count, side.limit);
        if seen.contains(&one) {
            continue;
        }
        seen.push(one);
        let (duplicates, past_limit) = look(device, kernels, stream, vector, count, side.limit)?;
        if duplicates > 0 || past_limit > 0 {
            let (segment, limit) = (number, side.limit);
            return Err(SubmitError::Destination { segment, limit, duplicates, past_limit });
        }
    }
    Ok(())
}

/// Duplicates, and indices at or past the limit, of one vector.
fn look(
    device: &PlanDevice,
    kernels: &Kernels,
    stream: Stream,
    vector: IndexVector,
    count: u32,
    limit: u32,
) -> Result<(u32, u32), SubmitError> {
    let refused = |call, why: String| SubmitError::Cuda(CudaError::Refused { call, why });
    let bytes = REPORT_BYTES + (limit as usize).div_ceil(32) * 4;
    let place =
        MappedMemory::new(device, bytes).map_err(|error| refused("cuMemHostRegister", error.to_string()))?;
    let empty = IndexReport::EMPTY;
    place.put(0, &[empty.least, empty.most, 0, 0]);
    let (report, bitmap) = (place.address(0), place.address(REPORT_BYTES));
    // SAFETY: the plan was validated, so the device can read the vector; report and bitmap are memory of our own, which
    // nobody else uses and which lives until the stream has been waited for, below.
    let launched = unsafe { kernels.check_index(vector, count, limit, bitmap, report, stream) };
    let done = launched.and_then(|()| {
        let event = Event::new(device.driver)?;
        event.record(stream)?;
        event.synchronize()
    });
    if let Err(error) = done {
        if !error.is_gone() {
            // The device may still write there.
            std::mem::forget(place);
        }
        return Err(error.into());
    }
    Ok((place.word(24), place.word(20)))
}
