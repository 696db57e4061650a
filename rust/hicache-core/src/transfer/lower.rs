//! Lowering: the plan of a layer as segment plans, what kernels launch.

use hicache_sys::segment_plan::{IndexVector, MAX_SEGMENTS, Segment, SegmentPlan, SegmentSide, Strides};

use super::plan::{LayerPlan, Memory, Move};
use crate::plan::{Axis, Grid, Place};
use crate::pool::RowUnit;
use crate::{Error, Result};

/// What the integers of an index vector count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexUnit {
    /// Slots of pages: one for each page.
    Page,
    /// Tokens: one for each token of each page, page number times tokens of a page and the token in it.
    Token,
}

/// An index vector of one pool on one side, where the executor reads it.
#[derive(Debug, Clone, Copy)]
pub struct Indices {
    /// Where it is.
    pub vector: IndexVector,
    /// What it counts.
    pub unit: IndexUnit,
}

/// The index vectors of one pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolIndices {
    /// Pages of the batch.
    pub pages: u32,
    /// Of the side that is read.
    pub source: Indices,
    /// Of the side that is written.
    pub destination: Indices,
}

/// Where a buffer begins, for whoever carries the plan out.
pub(super) type Addresses<'a> = dyn Fn(&Memory, usize) -> Option<u64> + 'a;

impl LayerPlan {
    /// The launches that move this layer of all pools: one, as long as its segments are at most
    /// [`MAX_SEGMENTS`]; tokens are made pages where both sides keep them together.
    ///
    /// `indices` has an entry for each pool of the plan.
    ///
    /// # Errors
    /// `Geometry` where a number does not fit a segment; `Config` for a pool without indices, and for token indices of a
    /// component with a row for each page.
    pub fn lower(&self, indices: &[PoolIndices]) -> Result<Vec<SegmentPlan>> {
        self.lower_at(indices, &|memory, number| memory.buffer(number).map(|buffer| buffer.address))
    }

    /// As [`LayerPlan::lower`], with buffers at the addresses that `place` gives them.
    pub(super) fn lower_at(
        &self,
        indices: &[PoolIndices],
        place: &Addresses<'_>,
    ) -> Result<Vec<SegmentPlan>> {
        let mut segments = Vec::with_capacity(MAX_SEGMENTS);
        for one in &self.moves {
            let Some(indices) = indices.get(one.pool) else {
                return Err(Error::config(format!(
                    "expected index vectors of pool {}, found none",
                    one.pool
                )));
            };
            for grid in one.plan.grids() {
                push_segments(one, grid, indices, place, &mut segments)?;
            }
        }
        let plan = |segments: &[Segment]| Ok(SegmentPlan::new(segments).map_err(refuse)?.compact());
        segments.chunks(MAX_SEGMENTS).map(plan).collect()
    }
}

fn refuse(error: hicache_sys::segment_plan::PlanError) -> Error {
    Error::geometry(error.to_string())
}

/// A grid has heads, groups, tokens and layers; a segment has slots (the tokens) and groups. What is together goes into
/// the run, the longest of the rest becomes the groups, and the others are counted out.
fn push_segments(
    one: &Move,
    grid: &Grid,
    indices: &PoolIndices,
    addresses: &Addresses<'_>,
    out: &mut Vec<Segment>,
) -> Result<()> {
    let mut run_bytes = grid.first.len;
    let mut axes = [grid.heads, grid.groups, grid.layers];
    while let Some(axis) =
        axes.iter_mut().find(|axis| axis.count > 1 && (axis.src, axis.dst) == (run_bytes, run_bytes))
    {
        run_bytes *= axis.count;
        *axis = Axis::ONE;
    }
    axes.sort_unstable_by_key(|axis| std::cmp::Reverse(axis.count));
    let [groups, outer, outermost] = axes;
    let tokens = narrow("tokens of a page", grid.tokens.count)?;
    let items = indices.pages.checked_mul(tokens);
    let items = items.ok_or_else(|| Error::geometry("expected fewer than 2^32 tokens in a batch"))?;
    for j in 0..outermost.count {
        for i in 0..outer.count {
            let offsets = [i * outer.src + j * outermost.src, i * outer.dst + j * outermost.dst];
            let source = Side {
                place: grid.first.src,
                memory: &one.src,
                slots: one.plan.src().slots,
                offset: offsets[0],
                slot: grid.tokens.src,
                group: groups.src,
            };
            let destination = Side {
                place: grid.first.dst,
                memory: &one.dst,
                slots: one.plan.dst().slots,
                offset: offsets[1],
                slot: grid.tokens.dst,
                group: groups.dst,
            };
            let source = source.lower(tokens, grid.unit, indices.source, addresses)?;
            let destination = destination.lower(tokens, grid.unit, indices.destination, addresses)?;
            let (groups, run_bytes) = (narrow("groups", groups.count)?, narrow("bytes of a run", run_bytes)?);
            out.push(Segment::new(source, destination, items, groups, run_bytes).map_err(refuse)?);
        }
    }
    Ok(())
}

/// One side of a grid.
struct Side<'a> {
    place: Place,
    memory: &'a Memory,
    slots: u64,
    offset: u64,
    slot: u64,
    group: u64,
}

impl Side<'_> {
    fn lower(
        &self,
        tokens: u32,
        unit: RowUnit,
        indices: Indices,
        addresses: &Addresses<'_>,
    ) -> Result<SegmentSide> {
        let address = addresses(self.memory, self.place.buffer);
        let address = address.ok_or_else(|| Error::geometry("a plan names a buffer that is not there"))?;
        // Within the buffer, as the plan has checked: it fits.
        let base = address + self.place.offset + self.offset;
        let strides = Strides {
            page: signed(self.place.slot_stride)?,
            slot: signed(self.slot)?,
            group: signed(self.group)?,
        };
        let slots = narrow("slots", self.slots)?;
        let side = match (indices.unit, unit) {
            (IndexUnit::Page, _) => SegmentSide::pages(base, strides, tokens, slots, indices.vector),
            (IndexUnit::Token, RowUnit::Token) => {
                let limit = narrow("tokens", u64::from(slots) * u64::from(tokens))?;
                SegmentSide::tokens(base, strides, tokens, limit, indices.vector)
            }
            (IndexUnit::Token, RowUnit::Page) => {
                return Err(Error::config(
                    "expected page indices for a component with a row for each page, found token indices",
                ));
            }
        };
        side.map_err(refuse)
    }
}

fn narrow(what: &str, number: u64) -> Result<u32> {
    u32::try_from(number).map_err(|_| Error::geometry(format!("expected {what} below 2^32, found {number}")))
}

fn signed(stride: u64) -> Result<i64> {
    i64::try_from(stride)
        .map_err(|_| Error::geometry(format!("expected a stride below 2^63, found {stride}")))
}
