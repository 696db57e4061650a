//! Copy plans: the byte runs that bring a rectangle of a page from one layout into another.
//!
//! A plan is made once for two layouts and used for every page: file reads, host copies and device copies
//! all follow it. This module computes runs; it moves no bytes.

use crate::error::{Error, Result};
use crate::layout::{ComponentLayout, Layout};
use crate::pool::RowUnit;
use crate::tile::{Span, Tile};

/// Where a run stands: at `offset + slot * slot_stride` of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The buffer.
    pub buffer: usize,
    /// Bytes from its start, in slot 0.
    pub offset: u64,
    /// Bytes from one slot to the next.
    pub slot_stride: u64,
}

impl Place {
    /// Offset of the run in `slot`.
    pub fn at(&self, slot: u64) -> u64 {
        self.offset + slot * self.slot_stride
    }

    /// True where `next` begins right behind `len` bytes of this place, in every slot.
    fn continues(&self, len: u64, next: &Place) -> bool {
        self.buffer == next.buffer && self.slot_stride == next.slot_stride && self.offset + len == next.offset
    }
}

/// Bytes that are together on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRun {
    /// Where they are.
    pub src: Place,
    /// Where they go.
    pub dst: Place,
    /// How many, at least 1.
    pub len: u64,
}

/// The runs of one page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    /// In the order of the source (buffer, then offset); no two neighbours could be one run.
    pub runs: Vec<CopyRun>,
    /// Bytes of all runs.
    pub bytes: u64,
}

impl CopyPlan {
    /// The most runs that are counted out before neighbours are merged, 224 MiB of them.
    pub const MAX_RUNS: u64 = 1 << 22;

    /// The plan that brings `rect` from `src` into `dst`, layouts of the same pool over tiles that both
    /// hold `rect`. A component with one row for the page is brought whole, whatever the tokens of `rect`.
    ///
    /// Every run lies within the buffers of both sides, for every slot.
    ///
    /// # Errors
    ///
    /// `Geometry` where the layouts differ in their components, `rect` is not inside both tiles, a layout's
    /// rule leads out of its buffers, or more than [`CopyPlan::MAX_RUNS`] runs would arise.
    pub fn between(src: &Layout, dst: &Layout, rect: &Tile) -> Result<CopyPlan> {
        rect.validate(Tile::MAX_PAGE_SIZE)?;
        for (side, layout) in [("source", src), ("destination", dst)] {
            if !layout.tile.contains(rect) {
                let tile = layout.tile;
                return Err(Error::geometry(format!("the {side} ({tile}) does not hold all of {rect}")));
            }
        }
        if src.components.len() != dst.components.len() {
            let (src, dst) = (src.components.len(), dst.components.len());
            return Err(Error::geometry(format!(
                "the source has {src} components, the destination {dst}: they are of different pools"
            )));
        }
        let mut runs = Vec::new();
        for (i, (from, to)) in src.components.iter().zip(&dst.components).enumerate() {
            if (from.row_bytes, from.unit) != (to.row_bytes, to.unit) {
                return Err(Error::geometry(format!(
                    "component {i}: the source has rows of {} bytes for each {}, the destination of {} bytes for each {}",
                    from.row_bytes,
                    from.unit.name(),
                    to.row_bytes,
                    to.unit.name()
                )));
            }
            let sides = [Side::new(src, from)?, Side::new(dst, to)?];
            for heads in head_parts(&sides, rect.heads) {
                push_runs(&sides, &Tile { heads, ..*rect }, &mut runs)?;
            }
        }
        runs.sort_unstable_by_key(|run| run.src);
        runs.dedup_by(|next, run| {
            let together = run.src.continues(run.len, &next.src) && run.dst.continues(run.len, &next.dst);
            if together {
                run.len += next.len;
            }
            together
        });
        runs.shrink_to_fit();
        let bytes = runs.iter().try_fold(0u64, |sum, run| sum.checked_add(run.len));
        let bytes = bytes.ok_or_else(|| Error::geometry("the rows of a layout overlap"))?;
        Ok(CopyPlan { runs, bytes })
    }

    /// True where the plan reads every byte of a source of one page and one buffer of `src_bytes`.
    pub fn covers_source(&self, src_bytes: u64) -> bool {
        let mut end = 0;
        for CopyRun { src, len, .. } in &self.runs {
            if (src.buffer, src.offset) != (0, end) {
                return false;
            }
            end += len;
        }
        end == src_bytes
    }
}

/// One component on one side.
struct Side<'a> {
    layout: &'a Layout,
    rule: &'a ComponentLayout,
    /// Exact bytes of the rule's buffer.
    buffer_bytes: u64,
}

impl<'a> Side<'a> {
    fn new(layout: &'a Layout, rule: &'a ComponentLayout) -> Result<Side<'a>> {
        let buffer_bytes = layout.buffer_bytes.get(rule.buffer).copied();
        match buffer_bytes {
            Some(buffer_bytes) if rule.heads_per_group > 0 && rule.row_bytes > 0 && layout.slots > 0 => {
                Ok(Side { layout, rule, buffer_bytes })
            }
            _ => Err(Error::geometry("a layout without slots, groups, rows or the buffer that it names")),
        }
    }

    /// Heads from the model-global `head` on that are one stride apart.
    fn even_heads(&self, head: u32) -> u32 {
        let rule = self.rule;
        if rule.group_stride == rule.head_stride.saturating_mul(u64::from(rule.heads_per_group)) {
            return u32::MAX;
        }
        rule.heads_per_group - (head - self.layout.tile.heads.start) % rule.heads_per_group
    }

    /// Strides of `rect`'s heads, tokens and layers.
    fn strides(&self, rect: &Tile) -> [u128; 3] {
        let skipped = match rect.tokens.count {
            1 => 1,
            _ => rect.tokens.step / self.layout.tile.tokens.step,
        };
        let token_stride = u128::from(self.rule.token_stride) * u128::from(skipped);
        [u128::from(self.rule.head_stride), token_stride, u128::from(self.rule.layer_stride)]
    }

    /// Offset of the first row of `rect` in slot 0. All factors are below 2^64 and 2^32.
    fn start(&self, rect: &Tile) -> u128 {
        let (rule, tile) = (self.rule, &self.layout.tile);
        let head = rect.heads.start - tile.heads.start;
        let (group, head) = (head / rule.heads_per_group, head % rule.heads_per_group);
        let token = match rule.unit {
            RowUnit::Token => (rect.tokens.first - tile.tokens.first) / tile.tokens.step,
            RowUnit::Page => 0,
        };
        [
            (rule.layer_stride, rect.layers.start - tile.layers.start),
            (rule.group_stride, group),
            (rule.head_stride, head),
            (rule.token_stride, token),
        ]
        .into_iter()
        .map(|(stride, count)| u128::from(stride) * u128::from(count))
        .sum::<u128>()
            + u128::from(rule.base)
    }

    /// Checks that a run of `len` bytes, `span` bytes behind `start` at most, lies within the buffer in
    /// every slot; the place at `start` then.
    fn place(&self, start: u128, span: u128, len: u128) -> Result<Place> {
        let slots = u128::from(self.layout.slots - 1) * u128::from(self.rule.page_stride);
        let end = start.checked_add(span).and_then(|end| end.checked_add(len)?.checked_add(slots));
        if end.is_none_or(|end| end > u128::from(self.buffer_bytes)) {
            let bytes = self.buffer_bytes;
            return Err(Error::geometry(format!("a row ends outside its buffer of {bytes} bytes")));
        }
        let offset = start as u64;
        Ok(Place { buffer: self.rule.buffer, offset, slot_stride: self.rule.page_stride })
    }
}

/// Cuts `heads` where a group ends on either side.
fn head_parts(sides: &[Side<'_>; 2], heads: Span) -> impl Iterator<Item = Span> {
    let mut start = heads.start;
    std::iter::from_fn(move || {
        if start == heads.end {
            return None;
        }
        let even = sides.iter().map(|side| side.even_heads(start)).fold(heads.end - start, u32::min);
        let part = Span { start, end: start + even };
        start = part.end;
        Some(part)
    })
}

/// One of the axes along which a component's rows repeat.
struct Axis {
    count: u64,
    src: u128,
    dst: u128,
}

/// Adds the runs of one component over `rect`, whose heads are evenly apart on both sides. Axes that are
/// contiguous on both sides become part of the run first, so that only the rest is counted out.
fn push_runs(sides: &[Side<'_>; 2], rect: &Tile, runs: &mut Vec<CopyRun>) -> Result<()> {
    let [src, dst] = sides;
    let token_rows = src.rule.unit.rows(rect);
    let counts = [u64::from(rect.heads.len()), token_rows, u64::from(rect.layers.len())];
    let (src_strides, dst_strides) = (src.strides(rect), dst.strides(rect));
    let mut axes: Vec<Axis> = (0..3)
        .map(|i| Axis { count: counts[i], src: src_strides[i], dst: dst_strides[i] })
        .filter(|axis| axis.count > 1)
        .collect();
    // Below 2^64 times three counts of at most 2^16: fits.
    let mut len = u128::from(src.rule.row_bytes);
    while let Some(i) = axes.iter().position(|axis| axis.src == len && axis.dst == len) {
        len *= u128::from(axes.swap_remove(i).count);
    }

    let span = |stride: fn(&Axis) -> u128| -> u128 {
        axes.iter().map(|axis| stride(axis) * u128::from(axis.count - 1)).sum()
    };
    let first = CopyRun {
        src: src.place(src.start(rect), span(|axis| axis.src), len)?,
        dst: dst.place(dst.start(rect), span(|axis| axis.dst), len)?,
        // `place` has checked that all of it lies within a buffer, so it fits.
        len: len as u64,
    };
    let count: u64 = axes.iter().map(|axis| axis.count).product();
    if count > CopyPlan::MAX_RUNS - runs.len() as u64 {
        return Err(Error::geometry(format!(
            "a plan of more than {} runs: the rows that are together on both sides have only {len} bytes",
            CopyPlan::MAX_RUNS
        )));
    }
    runs.reserve(count as usize);
    let begin = runs.len();
    runs.push(first);
    for axis in &axes {
        // All runs so far, once more for each further step along this axis.
        let end = runs.len();
        for step in 1..axis.count {
            for i in begin..end {
                let mut run = runs[i];
                run.src.offset += axis.src as u64 * step;
                run.dst.offset += axis.dst as u64 * step;
                runs.push(run);
            }
        }
    }
    Ok(())
}
