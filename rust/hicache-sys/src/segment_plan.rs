//! The segment plan: what one launch of the copy kernels moves, and the same plan for the CPU.
//!
//! Every host layout, pool and sidecar reduces to segments: `items * groups` runs of `run_bytes` bytes, placed on
//! each side by three strides and an index. The structures are an ABI shared with `cuda/segment_plan.h`, which says
//! where each run is; sizes and offsets are asserted here and there. This module builds plans, checks them against
//! the memory they may touch, and walks them on the CPU. It knows neither pools nor drivers.

mod check;
mod copies;
mod cpu;
mod disjoint;
mod error;
mod gather;
#[cfg(test)]
mod tests;

pub use check::{Extent, Extents};
pub use copies::copies_of;
pub use cpu::{IndexSlice, Memory, run_on_cpu};
pub use error::{PlanError, Side};
pub use gather::{GatherRank, GatherShape, gather_pack, gather_unpack};

use std::mem::{offset_of, size_of};

/// Version of the plan's structures; equals `SEGMENT_PLAN_ABI`. An image of kernels made for another is refused.
pub const ABI: u32 = 1;

/// Segments of one plan at most.
pub const MAX_SEGMENTS: usize = 16;

/// Bound of limits, in tokens or pages, and of the runs of a segment: the kernels divide 31-bit numbers.
pub const MAX_COUNT: u32 = 1 << 31;

/// How the items of a segment find their page and slot on one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum IndexKind {
    /// The index holds a token for each item: page and slot are quotient and rest by the page size.
    Token = 0,
    /// The index holds a page for each `page_size` items.
    Page = 1,
    /// There is no index: items fill page after page.
    Identity = 2,
}

impl IndexKind {
    /// The kind of a side's `index_kind`, if there is such a kind.
    pub fn from_code(code: u32) -> Option<IndexKind> {
        [IndexKind::Token, IndexKind::Page, IndexKind::Identity].into_iter().find(|kind| *kind as u32 == code)
    }
}

/// Size of the signed integers of an index vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum IndexWidth {
    /// `i32`.
    Four = 4,
    /// `i64`.
    Eight = 8,
}

/// Where an index vector is, for the memory that walks the plan: a device address for a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexVector {
    /// Address of its first integer.
    pub address: u64,
    /// Size of its integers.
    pub width: IndexWidth,
}

/// Distances in bytes, of either sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Strides {
    /// From one page to the next.
    pub page: i64,
    /// From one slot of a page to the next.
    pub slot: i64,
    /// From one group to the next.
    pub group: i64,
}

/// One side of a segment. The fields are those of the C structure; make it with [`SegmentSide::tokens`],
/// [`SegmentSide::pages`] or [`SegmentSide::identity`], which fill them consistently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct SegmentSide {
    /// Address of the run of page 0, slot 0, group 0.
    pub base: u64,
    /// Bytes from one page to the next.
    pub page_stride: i64,
    /// Bytes from one slot of a page to the next.
    pub slot_stride: i64,
    /// Bytes from one group to the next.
    pub group_stride: i64,
    /// Address of the index vector, 0 without one.
    pub index: u64,
    /// Indices are below it; tokens or pages by the kind. Unused without an index.
    pub limit: u32,
    /// Slots of a page, at least 1.
    pub page_size: u32,
    /// With `page_shift`, division by the page size: `mulhi(2 * n, page_magic) >> page_shift`.
    pub page_magic: u32,
    /// See `page_magic`.
    pub page_shift: u32,
    /// The number of an [`IndexKind`].
    pub index_kind: u32,
    /// 4 or 8.
    pub index_bytes: u32,
}

/// Runs of one component of one layer: of K, of V, of latents, of a draft layer, of indexer pages, of states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Segment {
    /// Where the runs are read.
    pub source: SegmentSide,
    /// Where they are written.
    pub destination: SegmentSide,
    /// Tokens or pages to move, padding included.
    pub items: u32,
    /// Runs of one item, at least 1.
    pub groups: u32,
    /// Bytes of a run, contiguous on both sides.
    pub run_bytes: u32,
    /// `1 << lanes_log2` threads of a kernel share a run.
    pub lanes_log2: u32,
}

/// Up to [`MAX_SEGMENTS`] segments, moved by one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct SegmentPlan {
    /// [`ABI`].
    pub abi: u32,
    /// How many entries of `segment` count.
    pub segments: u32,
    /// Address of a `u32` that the device can write, or 0: bit `s` is set when an index of segment `s` was at or past
    /// its limit.
    pub error: u64,
    /// The segments; those past `segments` are zero.
    pub segment: [Segment; MAX_SEGMENTS],
}

const _: () = {
    assert!(size_of::<SegmentSide>() == 64 && offset_of!(SegmentSide, index) == 32);
    assert!(offset_of!(SegmentSide, limit) == 40 && offset_of!(SegmentSide, index_bytes) == 60);
    assert!(size_of::<Segment>() == 144 && offset_of!(Segment, destination) == 64);
    assert!(offset_of!(Segment, items) == 128 && offset_of!(Segment, lanes_log2) == 140);
    assert!(size_of::<SegmentPlan>() == 2320 && offset_of!(SegmentPlan, error) == 8);
    assert!(offset_of!(SegmentPlan, segment) == 16);
};

/// The multiplier and shift that divide every `n < 2^31` by `divisor`: `mulhi(2 * n, magic) >> shift`.
///
/// With `2^(shift - 1) < divisor <= 2^shift` and `magic = ceil(2^(31 + shift) / divisor)`, the error of the quotient is
/// below `n / 2^31 / divisor`, hence never reaches the next integer; and `magic < 2^32`.
fn magic_division(divisor: u32) -> (u32, u32) {
    let shift = u32::BITS - (divisor - 1).leading_zeros();
    let magic = (1_u64 << (31 + shift)).div_ceil(u64::from(divisor));
    (magic as u32, shift)
}

impl SegmentSide {
    /// A side whose index holds tokens: `limit` tokens in pages of `page_size`.
    ///
    /// # Errors
    /// [`PlanError::Count`] for a page size of 0 or above 2^31 - 1, a limit above 2^31, or an index at address 0.
    pub fn tokens(
        base: u64,
        strides: Strides,
        page_size: u32,
        limit: u32,
        index: IndexVector,
    ) -> Result<SegmentSide, PlanError> {
        SegmentSide::new(IndexKind::Token, base, strides, page_size, limit, Some(index))
    }

    /// A side whose index holds pages, each standing for `page_size` items: `limit` pages.
    ///
    /// # Errors
    /// As for [`SegmentSide::tokens`].
    pub fn pages(
        base: u64,
        strides: Strides,
        page_size: u32,
        limit: u32,
        index: IndexVector,
    ) -> Result<SegmentSide, PlanError> {
        SegmentSide::new(IndexKind::Page, base, strides, page_size, limit, Some(index))
    }

    /// A side without an index: item `i` is slot `i % page_size` of page `i / page_size`.
    ///
    /// # Errors
    /// As for [`SegmentSide::tokens`].
    pub fn identity(base: u64, strides: Strides, page_size: u32) -> Result<SegmentSide, PlanError> {
        SegmentSide::new(IndexKind::Identity, base, strides, page_size, 0, None)
    }

    fn new(
        kind: IndexKind,
        base: u64,
        strides: Strides,
        page_size: u32,
        limit: u32,
        index: Option<IndexVector>,
    ) -> Result<SegmentSide, PlanError> {
        error::in_range("page size", page_size, 1, MAX_COUNT - 1)?;
        error::in_range("limit", limit, 0, MAX_COUNT)?;
        if index.is_some_and(|index| index.address == 0) {
            return Err(PlanError::Count { what: "index address", least: 1, most: u64::MAX, found: 0 });
        }
        let (page_magic, page_shift) = magic_division(page_size);
        Ok(SegmentSide {
            base,
            page_stride: strides.page,
            slot_stride: strides.slot,
            group_stride: strides.group,
            index: index.map_or(0, |index| index.address),
            limit,
            page_size,
            page_magic,
            page_shift,
            index_kind: kind as u32,
            index_bytes: index.map_or(8, |index| index.width as u32),
        })
    }

    /// Quotient and rest of `number`, below 2^31, by the page size, as the kernels compute them.
    fn divide(&self, number: u32) -> (u32, u32) {
        let product = u64::from(number << 1) * u64::from(self.page_magic);
        let quotient = (product >> 32) as u32 >> self.page_shift;
        (quotient, number - quotient * self.page_size)
    }

    /// The side with whole pages as items, if their slots follow each other: `page_size` items become one.
    fn whole_pages(&self, page_size: u32, run_bytes: u32) -> Option<SegmentSide> {
        let slots_follow = self.slot_stride == i64::from(run_bytes);
        let page_stride = match IndexKind::from_code(self.index_kind)? {
            IndexKind::Token => return None,
            _ if !slots_follow => return None,
            _ if self.page_size == page_size => self.page_stride,
            IndexKind::Page => return None,
            // Pages of another size, without gaps between them: any page size gives the same places.
            IndexKind::Identity => {
                let page_bytes = i64::from(self.page_size) * self.slot_stride;
                (self.page_stride == page_bytes).then_some(i64::from(page_size) * i64::from(run_bytes))?
            }
        };
        let (page_magic, page_shift) = magic_division(1);
        Some(SegmentSide { page_stride, slot_stride: 0, page_size: 1, page_magic, page_shift, ..*self })
    }
}

impl Segment {
    /// A segment of `items * groups` runs of `run_bytes` bytes.
    ///
    /// # Errors
    /// [`PlanError::Count`] for no groups, empty runs, or `items * groups` of 2^31 and more.
    pub fn new(
        source: SegmentSide,
        destination: SegmentSide,
        items: u32,
        groups: u32,
        run_bytes: u32,
    ) -> Result<Segment, PlanError> {
        error::in_range("groups", groups, 1, u32::MAX)?;
        error::in_range("run bytes", run_bytes, 1, MAX_COUNT - 1)?;
        error::in_range("items * groups", u64::from(items) * u64::from(groups), 0, MAX_COUNT - 1)?;
        let segment = Segment { source, destination, items, groups, run_bytes, lanes_log2: 0 };
        Ok(Segment { lanes_log2: segment.lanes(), ..segment })
    }

    /// The widest vector, in bytes, that divides both bases, all strides in use and the run: 16, 8, 4, 2 or 1.
    pub fn vector_bytes(&self) -> u32 {
        let sides = [&self.source, &self.destination];
        let bits = sides.into_iter().fold(u64::from(self.run_bytes) | 16, |bits, side| {
            let slot = if side.page_size > 1 { side.slot_stride } else { 0 };
            let group = if self.groups > 1 { side.group_stride } else { 0 };
            bits | side.base | (side.page_stride | slot | group) as u64
        });
        1 << bits.trailing_zeros()
    }

    /// Bytes that the segment moves when nothing is padding.
    pub fn bytes(&self) -> u64 {
        u64::from(self.items) * u64::from(self.groups) * u64::from(self.run_bytes)
    }

    /// About four vectors for each thread, and a warp at most: the kernels load four before they store one.
    fn lanes(&self) -> u32 {
        let vectors = self.run_bytes / self.vector_bytes();
        (vectors / 4).checked_ilog2().unwrap_or(0).min(5)
    }

    /// Whole pages as items, where the slots of a page follow each other on both sides: longer runs, fewer of them.
    fn compact(&self) -> Segment {
        let size = match IndexKind::from_code(self.source.index_kind) {
            Some(IndexKind::Page) => self.source.page_size,
            _ => self.destination.page_size,
        };
        let run_bytes = self.run_bytes.checked_mul(size).filter(|&bytes| bytes < MAX_COUNT);
        let sides = [&self.source, &self.destination].map(|side| side.whole_pages(size, self.run_bytes));
        let ([Some(source), Some(destination)], Some(run_bytes)) = (sides, run_bytes) else { return *self };
        if size <= 1 || !self.items.is_multiple_of(size) {
            return *self;
        }
        let items = self.items / size;
        let compact = Segment { source, destination, items, run_bytes, ..*self };
        Segment { lanes_log2: compact.lanes(), ..compact }
    }
}

impl SegmentPlan {
    /// A plan of `segments`, without an error word.
    ///
    /// # Errors
    /// [`PlanError::Count`] for none or more than [`MAX_SEGMENTS`].
    pub fn new(segments: &[Segment]) -> Result<SegmentPlan, PlanError> {
        error::in_range("segments", segments.len() as u64, 1, MAX_SEGMENTS as u32)?;
        let mut segment = [Segment::default(); MAX_SEGMENTS];
        segment[..segments.len()].copy_from_slice(segments);
        Ok(SegmentPlan { abi: ABI, segments: segments.len() as u32, error: 0, segment })
    }

    /// The segments in use.
    pub fn used(&self) -> &[Segment] {
        &self.segment[..MAX_SEGMENTS.min(self.segments as usize)]
    }

    /// The same copies in longer runs: where both sides keep the slots of a page one behind the other and are indexed
    /// by page (or not at all), whole pages become the items. Sides indexed by token stay as they are: whether their
    /// tokens come in whole pages is in the index, which may be on a device.
    #[must_use]
    pub fn compact(&self) -> SegmentPlan {
        let mut plan = *self;
        for segment in &mut plan.segment[..self.used().len()] {
            *segment = segment.compact();
        }
        plan
    }

    /// Bytes that the plan moves when nothing is padding.
    pub fn bytes(&self) -> u64 {
        self.used().iter().map(Segment::bytes).sum()
    }
}
