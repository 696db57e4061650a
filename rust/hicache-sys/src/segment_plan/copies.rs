//! The runs of a plan one by one: what the copy engine is given.

use super::cpu::{Place, Walk};
use super::{IndexSlice, PlanError, SegmentPlan, Side};

/// Adds a copy (destination, source, bytes) for each run of `plan` to `copies`, neighbours on both sides merged, and
/// returns the error bits as a kernel sets them. `index` are the plan's index vectors, in this process.
///
/// The plan is to be validated first: this only counts addresses out.
///
/// # Errors
/// [`PlanError::IndexOutsideExtents`] where an index vector of the plan is not among `index`; nothing was added then
/// for that segment and those after it.
pub fn copies_of(
    plan: &SegmentPlan,
    index: &[IndexSlice<'_>],
    copies: &mut Vec<(u64, u64, usize)>,
) -> Result<u32, PlanError> {
    let mut error = 0;
    for (number, segment) in plan.used().iter().enumerate() {
        let source = Walk::new(&segment.source, &[], index);
        let destination = Walk::new(&segment.destination, &[], index);
        for (walk, side) in [(&source, Side::Source), (&destination, Side::Destination)] {
            walk.check_index(number, side, segment.items)?;
        }
        for group in 0..segment.groups {
            for item in 0..segment.items {
                let places = [source.place(item), destination.place(item)];
                error |= u32::from(places.contains(&Place::PastLimit)) << number;
                let [Place::Slot(from), Place::Slot(to)] = places else { continue };
                let (from, to) = (source.address(from, group), destination.address(to, group));
                let len = segment.run_bytes as usize;
                match copies.last_mut() {
                    Some(last) if last.0 + last.2 as u64 == to && last.1 + last.2 as u64 == from => {
                        last.2 += len
                    }
                    _ => copies.push((to, from, len)),
                }
            }
        }
    }
    Ok(error)
}
