//! The plan walked on the CPU: the reference for the kernels, and what runs where there is no device.

use super::check::{Extent, Extents};
use super::error::{PlanError, Side};
use super::{IndexKind, Segment, SegmentPlan, SegmentSide};
use crate::Region;

/// An index vector in this process.
#[derive(Debug, Clone, Copy)]
pub enum IndexSlice<'a> {
    /// 32-bit indices.
    Four(&'a [i32]),
    /// 64-bit indices.
    Eight(&'a [i64]),
}

impl IndexSlice<'_> {
    /// Address of its first integer, as a plan names it.
    pub fn address(&self) -> u64 {
        match self {
            IndexSlice::Four(index) => index.as_ptr() as u64,
            IndexSlice::Eight(index) => index.as_ptr() as u64,
        }
    }

    /// The memory that it takes.
    pub fn extent(&self) -> Extent {
        let len = match self {
            IndexSlice::Four(index) => size_of_val(*index),
            IndexSlice::Eight(index) => size_of_val(*index),
        };
        Extent { base: self.address(), len: len as u64 }
    }

    /// The part that begins at the side's index address, if it has the side's width.
    fn tail_for(self, side: &SegmentSide) -> Option<Self> {
        let skipped = (side.index.checked_sub(self.address())? / u64::from(side.index_bytes)) as usize;
        match self {
            IndexSlice::Four(index) if side.index_bytes == 4 => index.get(skipped..).map(IndexSlice::Four),
            IndexSlice::Eight(index) if side.index_bytes == 8 => index.get(skipped..).map(IndexSlice::Eight),
            _ => None,
        }
    }

    fn get(&self, position: u32) -> Option<i64> {
        match self {
            IndexSlice::Four(index) => index.get(position as usize).map(|&value| value.into()),
            IndexSlice::Eight(index) => index.get(position as usize).copied(),
        }
    }
}

/// The memory that a walk may touch.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    /// What may be read.
    pub source: &'a [&'a Region],
    /// What may be written.
    pub destination: &'a [&'a Region],
    /// The index vectors.
    pub index: &'a [IndexSlice<'a>],
}

/// Moves what `plan` says within `memory`, and returns the error bits: bit `s` where an index of segment `s` was at or
/// past its limit, as a kernel sets them in the plan's error word (which is not touched).
///
/// # Errors
/// As for [`SegmentPlan::validate`]; a destination lent for reading only is none. Nothing was moved then, or only the
/// segments before one whose index has another width than the plan says.
pub fn run_on_cpu(plan: &SegmentPlan, memory: &Memory<'_>) -> Result<u32, PlanError> {
    let extents = |regions: &[&Region]| -> Vec<Extent> {
        regions
            .iter()
            .map(|region| Extent { base: region.address() as u64, len: region.len() as u64 })
            .collect()
    };
    let writable: Vec<&Region> =
        memory.destination.iter().copied().filter(|region| region.is_writable()).collect();
    let index: Vec<Extent> = memory.index.iter().map(IndexSlice::extent).collect();
    plan.validate(&Extents {
        source: &extents(memory.source),
        destination: &extents(&writable),
        index: &index,
    })?;
    let mut error = 0;
    for (number, segment) in plan.used().iter().enumerate() {
        let source = Walk::new(&segment.source, memory.source, memory.index);
        let destination = Walk::new(&segment.destination, &writable, memory.index);
        for (walk, side) in [(&source, Side::Source), (&destination, Side::Destination)] {
            walk.check_index(number, side, segment.items)?;
        }
        error |= u32::from(move_segment(segment, &source, &destination)) << number;
    }
    Ok(error)
}

/// Moves one validated segment; true where an index was past its limit.
fn move_segment(segment: &Segment, source: &Walk<'_>, destination: &Walk<'_>) -> bool {
    let mut past_limit = false;
    for item in 0..segment.items {
        // Both sides look, also where one of them skips: each reports its own indices.
        let places = [source.place(item), destination.place(item)];
        past_limit |= places.contains(&Place::PastLimit);
        let [Place::Slot(from), Place::Slot(to)] = places else { continue };
        for group in 0..segment.groups {
            let len = u64::from(segment.run_bytes);
            let (from, to) = (source.pointer(from, group, len), destination.pointer(to, group, len));
            if let (Some(from), Some(to)) = (from, to) {
                // SAFETY: both ranges lie in regions lent for this (`pointer` checked them), and validation found
                // nothing written where the plan reads.
                unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, len as usize) };
            }
        }
    }
    past_limit
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Offset of the item from the side's base.
    Slot(i64),
    Padding,
    PastLimit,
}

/// One side with the memory that holds it.
pub(super) struct Walk<'a> {
    side: &'a SegmentSide,
    regions: &'a [&'a Region],
    index: Option<IndexSlice<'a>>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        side: &'a SegmentSide,
        regions: &'a [&'a Region],
        index: &'a [IndexSlice<'a>],
    ) -> Walk<'a> {
        let holds = |index: &&IndexSlice<'_>| {
            let Extent { base, len } = index.extent();
            (base..base + len).contains(&side.index)
        };
        let index = index.iter().find(holds).and_then(|index| index.tail_for(side));
        Walk { side, regions, index }
    }

    /// Validation knows where indices are, not how wide: here a vector of the other width is refused.
    pub(super) fn check_index(&self, segment: usize, side: Side, items: u32) -> Result<(), PlanError> {
        let len = self.side.index_len(items);
        if len == 0 || self.index.is_some_and(|index| index.get(len - 1).is_some()) {
            return Ok(());
        }
        let bytes = u64::from(len) * u64::from(self.side.index_bytes);
        Err(PlanError::IndexOutsideExtents { segment, side, address: self.side.index, bytes })
    }

    pub(super) fn place(&self, item: u32) -> Place {
        let side = self.side;
        let (quotient, rest) = side.divide(item);
        let (position, slot) = match IndexKind::from_code(side.index_kind) {
            Some(IndexKind::Token) => (item, None),
            Some(IndexKind::Page) => (quotient, Some(rest)),
            Some(IndexKind::Identity) | None => return self.slot(quotient, rest),
        };
        // An index that is not there cannot pass validation.
        let Some(value) = self.index.and_then(|index| index.get(position)) else { return Place::PastLimit };
        if value < 0 {
            return Place::Padding;
        }
        if value >= side.limit.into() {
            return Place::PastLimit;
        }
        let value = value as u32;
        let (page, slot) = slot.map_or_else(|| side.divide(value), |slot| (value, slot));
        self.slot(page, slot)
    }

    fn slot(&self, page: u32, slot: u32) -> Place {
        let side = self.side;
        Place::Slot(i64::from(page) * side.page_stride + i64::from(slot) * side.slot_stride)
    }

    /// Address of the run of `group`.
    pub(super) fn address(&self, place: i64, group: u32) -> u64 {
        let offset = place + i64::from(group) * self.side.group_stride;
        self.side.base.wrapping_add_signed(offset)
    }

    /// Where that run is, checked once more against the region that holds it.
    fn pointer(&self, place: i64, group: u32, len: u64) -> Option<*mut u8> {
        let address = self.address(place, group);
        self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.address() as u64)?;
            region.pointer(offset, len).ok()
        })
    }
}
