//! Validation: a plan that passes touches nothing but the memory lent to it, whatever its indices hold.

use super::disjoint::Runs;
use super::error::{PlanError, Side, in_range};
use super::{ABI, IndexKind, MAX_COUNT, MAX_SEGMENTS, Segment, SegmentPlan, SegmentSide, magic_division};

/// A range of addresses, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Address of the first byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl Extent {
    fn holds(&self, first: i128, end: i128) -> bool {
        let base = i128::from(self.base);
        base <= first && end <= base + i128::from(self.len)
    }
}

/// The memory that a plan may touch, in the addresses that the plan uses.
#[derive(Debug, Clone, Copy)]
pub struct Extents<'a> {
    /// What may be read: tensors, registered host ranges. All runs of a segment lie in one of them.
    pub source: &'a [Extent],
    /// What may be written, as for `source`.
    pub destination: &'a [Extent],
    /// Where index vectors may be.
    pub index: &'a [Extent],
}

impl SegmentPlan {
    /// Checks every number of the plan and the corners of every segment: for all indices below its limits the runs
    /// lie inside `extents`, no two runs that it writes touch each other, and nothing is written where the plan reads.
    /// Two equal indices in one vector are beyond this check (they are data); the debug index check finds them.
    ///
    /// # Errors
    /// What is wrong first, by segment and side.
    pub fn validate(&self, extents: &Extents<'_>) -> Result<(), PlanError> {
        in_range("ABI", self.abi, ABI, ABI)?;
        in_range("segments", self.segments, 1, MAX_SEGMENTS as u32)?;
        in_range("error word, aligned to 4", self.error % 4, 0, 0)?;
        for (number, segment) in self.used().iter().enumerate() {
            segment.check_counts()?;
            segment.source.check(number, Side::Source, segment, extents.source, extents.index)?;
            segment.destination.check(
                number,
                Side::Destination,
                segment,
                extents.destination,
                extents.index,
            )?;
            if !segment.destination.grid(segment).nested() {
                return Err(PlanError::RunsOverlap { segment: number });
            }
        }
        self.check_overlap()
    }

    fn check_overlap(&self) -> Result<(), PlanError> {
        let apart = |a: [Option<Runs>; 2], b: [Option<Runs>; 2]| {
            let pairs = a.iter().flatten().flat_map(|a| b.iter().flatten().map(move |b| (a, b)));
            pairs.into_iter().all(|(a, b)| a.apart(b))
        };
        for (segment, writer) in self.used().iter().enumerate() {
            let written = writer.destination.runs(writer);
            for (other, segment_read) in self.used().iter().enumerate() {
                if !apart(written, segment_read.source.runs(segment_read)) {
                    return Err(PlanError::SegmentsOverlap { segment, other, side: Side::Source });
                }
                if other < segment && !apart(written, segment_read.destination.runs(segment_read)) {
                    return Err(PlanError::SegmentsOverlap { segment, other, side: Side::Destination });
                }
            }
        }
        Ok(())
    }
}

impl Segment {
    fn check_counts(&self) -> Result<(), PlanError> {
        in_range("groups", self.groups, 1, u32::MAX)?;
        in_range("run bytes", self.run_bytes, 1, MAX_COUNT - 1)?;
        in_range("items * groups", u64::from(self.items) * u64::from(self.groups), 0, MAX_COUNT - 1)?;
        in_range("lanes_log2", self.lanes_log2, 0, 5)
    }
}

impl SegmentSide {
    fn check(
        &self,
        number: usize,
        side: Side,
        segment: &Segment,
        extents: &[Extent],
        index_extents: &[Extent],
    ) -> Result<(), PlanError> {
        let field = |field, expected: u64, found: u64| match expected == found {
            true => Ok(()),
            false => Err(PlanError::Field { segment: number, side, field, expected, found }),
        };
        in_range("page size", self.page_size, 1, MAX_COUNT - 1)?;
        in_range("limit", self.limit, 0, MAX_COUNT)?;
        in_range("index kind", self.index_kind, 0, IndexKind::Identity as u32)?;
        let (magic, shift) = magic_division(self.page_size);
        field("page_magic", magic.into(), self.page_magic.into())?;
        field("page_shift", shift.into(), self.page_shift.into())?;
        if self.index_bytes != 4 {
            field("index_bytes", 8, self.index_bytes.into())?;
        }
        let bytes = u64::from(self.index_len(segment.items)) * u64::from(self.index_bytes);
        let address = self.index;
        if self.index_kind == IndexKind::Identity as u32 {
            field("index", 0, address)?;
        } else if bytes > 0 {
            let (first, end) = (i128::from(address), i128::from(address) + i128::from(bytes));
            let aligned = address.is_multiple_of(u64::from(self.index_bytes)) && address != 0;
            if !aligned || !index_extents.iter().any(|extent| extent.holds(first, end)) {
                return Err(PlanError::IndexOutsideExtents { segment: number, side, address, bytes });
            }
        }
        let runs = self.runs(segment);
        let first = runs.iter().flatten().map(Runs::first).min();
        let end = runs.iter().flatten().map(Runs::end).max();
        if let (Some(first), Some(end)) = (first, end)
            && !extents.iter().any(|extent| extent.holds(first, end))
        {
            return Err(PlanError::OutsideExtents { segment: number, side, first, end });
        }
        Ok(())
    }

    /// Integers of the index vector that `items` items read.
    pub(crate) fn index_len(&self, items: u32) -> u32 {
        match IndexKind::from_code(self.index_kind) {
            Some(IndexKind::Token) => items,
            Some(IndexKind::Page) => items.div_ceil(self.page_size),
            Some(IndexKind::Identity) | None => 0,
        }
    }

    /// Pages, slots of each of them, and slots of a page after them, that indices below the limit can reach.
    fn reach(&self, items: u32) -> (u32, u32, u32) {
        let size = self.page_size;
        match IndexKind::from_code(self.index_kind) {
            Some(IndexKind::Token) if items > 0 => (self.limit / size, size, self.limit % size),
            Some(IndexKind::Page) => (self.limit, size.min(items), 0),
            Some(IndexKind::Identity) => (items / size, size, items % size),
            Some(IndexKind::Token) | None => (0, 0, 0),
        }
    }

    /// All places that the side's runs can have: whole pages, and a page that the limit or the items cut short.
    fn runs(&self, segment: &Segment) -> [Option<Runs>; 2] {
        let (pages, slots, rest) = self.reach(segment.items);
        let start = i128::from(self.base);
        let last = start + i128::from(pages) * i128::from(self.page_stride);
        [(start, pages, slots), (last, 1, rest)].map(|(start, pages, slots)| {
            (pages > 0 && slots > 0).then(|| self.runs_at(segment, start, pages, slots))
        })
    }

    /// The smallest grid of whole pages around them.
    fn grid(&self, segment: &Segment) -> Runs {
        let (pages, slots, rest) = self.reach(segment.items);
        let slots = if pages > 0 { slots } else { rest };
        self.runs_at(segment, self.base.into(), pages + u32::from(rest > 0), slots)
    }

    fn runs_at(&self, segment: &Segment, start: i128, pages: u32, slots: u32) -> Runs {
        let axes =
            [(self.page_stride, pages), (self.slot_stride, slots), (self.group_stride, segment.groups)];
        Runs::new(start, axes, segment.run_bytes)
    }
}
