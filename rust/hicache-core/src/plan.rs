//! Copy plans: how a rectangle of a page comes from one layout into another.
//!
//! A plan is made once for two layouts and used for every page. Its truth is strided: a [`Grid`] is one row
//! repeated along heads, groups of heads, tokens and layers. From the grids come the longest runs, still
//! strided ([`CopyPlan::strips`], what the processor copies), the same runs counted out one by one
//! ([`CopyPlan::runs`], what file I/O needs), and the segments of a kernel (`transfer::lower`). This module
//! computes; it moves no bytes.

use crate::error::{Error, Result};
use crate::layout::{ComponentLayout, Layout};
use crate::pool::RowUnit;
use crate::tile::{Span, Tile};

pub use hicache_sys::copy::Axis;

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

/// The rows of one component whose heads are evenly apart on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// The component of the pool.
    pub component: usize,
    /// The first row, `row bytes` long.
    pub first: CopyRun,
    /// Heads of a group.
    pub heads: Axis,
    /// Groups of heads.
    pub groups: Axis,
    /// Tokens; one step for a component with a row for the page.
    pub tokens: Axis,
    /// Layers.
    pub layers: Axis,
    /// A row for each token, or one for the page.
    pub unit: RowUnit,
}

/// Runs of equal length at even distances on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strip {
    /// The first one.
    pub first: CopyRun,
    /// How it repeats, innermost axis first; axes of one step come last.
    pub axes: [Axis; 4],
}

impl Strip {
    /// How many runs.
    pub fn runs(&self) -> u64 {
        self.axes.iter().map(|axis| axis.count).product()
    }

    /// Takes in axes along which the run goes on without a gap on both sides, and sorts the rest: the
    /// destination is walked in order, as far as that can be.
    fn fold(mut self) -> Strip {
        while let Some(axis) = self
            .axes
            .iter_mut()
            .find(|axis| axis.count > 1 && (axis.src, axis.dst) == (self.first.len, self.first.len))
        {
            // All of it was found to lie within a buffer, so it fits.
            self.first.len *= axis.count;
            *axis = Axis::ONE;
        }
        self.axes.sort_unstable_by_key(|axis| (axis.count == 1, axis.dst, axis.src));
        self
    }

    /// True where each run of `next` is right behind the same run of this strip.
    fn continues(&self, next: &Strip) -> bool {
        let (a, b) = (&self.first, &next.first);
        self.axes == next.axes && a.src.continues(a.len, &b.src) && a.dst.continues(a.len, &b.dst)
    }

    /// Every run, counted out.
    fn push_runs(&self, out: &mut Vec<CopyRun>) {
        let begin = out.len();
        out.push(self.first);
        for axis in self.axes {
            // All runs so far, once more for each further step along this axis.
            let end = out.len();
            for step in 1..axis.count {
                for i in begin..end {
                    let mut run = out[i];
                    run.src.offset += axis.src * step;
                    run.dst.offset += axis.dst * step;
                    out.push(run);
                }
            }
        }
    }
}

/// What a side of a plan needs: slots, and bytes of each buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Pages.
    pub slots: u64,
    /// Bytes of each buffer, at least.
    pub buffer_bytes: Vec<u64>,
}

/// How one page comes from one layout into another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    grids: Vec<Grid>,
    strips: Vec<Strip>,
    bytes: u64,
    src: Extent,
    dst: Extent,
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
    /// `Geometry` where the layouts differ in their components, `rect` is not inside both tiles, or a
    /// layout's rule leads out of its buffers.
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
        let mut grids = Vec::with_capacity(src.components.len());
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
                let grid = grid(i, &sides, &Tile { heads, ..*rect })?;
                match grids.last_mut() {
                    Some(last) if joins(last, &grid) => last.groups.count += 1,
                    Some(last) => match groups(&sides, last, &grid) {
                        Some(groups) => last.groups = groups,
                        None => grids.push(grid),
                    },
                    None => grids.push(grid),
                }
            }
        }
        let bytes = grids.iter().try_fold(0u64, |sum, grid| {
            let rows = grid.axes().iter().map(|axis| axis.count).product::<u64>();
            sum.checked_add(rows.checked_mul(grid.first.len)?)
        });
        let bytes = bytes.ok_or_else(|| Error::geometry("the rows of a layout overlap"))?;
        let strips = strips(&grids);
        let extent =
            |layout: &Layout| Extent { slots: layout.slots, buffer_bytes: layout.buffer_bytes.clone() };
        Ok(CopyPlan { grids, strips, bytes, src: extent(src), dst: extent(dst) })
    }

    /// The rows, by component.
    pub fn grids(&self) -> &[Grid] {
        &self.grids
    }

    /// The longest runs that are strided.
    pub fn strips(&self) -> &[Strip] {
        &self.strips
    }

    /// Bytes of one page.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the source needs.
    pub fn src(&self) -> &Extent {
        &self.src
    }

    /// What the destination needs.
    pub fn dst(&self) -> &Extent {
        &self.dst
    }

    /// The plan with its sides swapped.
    #[must_use]
    pub fn reversed(&self) -> CopyPlan {
        let axis = |axis: Axis| Axis { count: axis.count, src: axis.dst, dst: axis.src };
        let run = |run: CopyRun| CopyRun { src: run.dst, dst: run.src, len: run.len };
        let grids: Vec<Grid> = self
            .grids
            .iter()
            .map(|grid| Grid {
                first: run(grid.first),
                heads: axis(grid.heads),
                groups: axis(grid.groups),
                tokens: axis(grid.tokens),
                layers: axis(grid.layers),
                ..*grid
            })
            .collect();
        CopyPlan {
            strips: strips(&grids),
            grids,
            bytes: self.bytes,
            src: self.dst.clone(),
            dst: self.src.clone(),
        }
    }

    /// Every run, in the order of the source (buffer, then offset); no two neighbours could be one run.
    ///
    /// # Errors
    ///
    /// `Geometry` where more than [`CopyPlan::MAX_RUNS`] runs would arise.
    pub fn runs(&self) -> Result<Vec<CopyRun>> {
        let count = self.strips.iter().map(Strip::runs).fold(0, u64::saturating_add);
        if count > CopyPlan::MAX_RUNS {
            return Err(Error::geometry(format!(
                "{count} runs of {} bytes, where at most {} can be counted out",
                self.bytes / count,
                CopyPlan::MAX_RUNS
            )));
        }
        let mut runs = Vec::with_capacity(count as usize);
        self.strips.iter().for_each(|strip| strip.push_runs(&mut runs));
        runs.sort_unstable_by_key(|run| run.src);
        runs.dedup_by(|next, run| {
            let together = run.src.continues(run.len, &next.src) && run.dst.continues(run.len, &next.dst);
            if together {
                run.len += next.len;
            }
            together
        });
        runs.shrink_to_fit();
        Ok(runs)
    }
}

/// True where `runs`, in the order of [`CopyPlan::runs`], are every byte of a source of one page and one
/// buffer of `src_bytes`.
pub fn cover_source(runs: &[CopyRun], src_bytes: u64) -> bool {
    let mut end = 0;
    for CopyRun { src, len, .. } in runs {
        if (src.buffer, src.offset) != (0, end) {
            return false;
        }
        end += len;
    }
    end == src_bytes
}

impl Grid {
    /// Heads, groups, tokens, layers.
    pub fn axes(&self) -> [Axis; 4] {
        [self.heads, self.groups, self.tokens, self.layers]
    }
}

/// Whether `next` is one group further than the groups of `grid`.
fn joins(grid: &Grid, next: &Grid) -> bool {
    let (steps, a, b) = (grid.groups.count, &grid.first, &next.first);
    let is_next = |at: Place, then: Place, stride: u64| {
        at.buffer == then.buffer && at.offset + stride * steps == then.offset
    };
    steps > 1
        && (grid.component, grid.heads) == (next.component, next.heads)
        && is_next(a.src, b.src, grid.groups.src)
        && is_next(a.dst, b.dst, grid.groups.dst)
}

/// The groups that `grid` and `next` are the first two of, where they are: the same heads of two groups.
fn groups(sides: &[Side<'_>; 2], grid: &Grid, next: &Grid) -> Option<Axis> {
    let distance = |side: &Side<'_>, at: Place, then: Place| {
        let distance = then.offset.checked_sub(at.offset).filter(|_| at.buffer == then.buffer)?;
        (side.is_even() || distance.is_multiple_of(side.rule.group_stride)).then_some(distance)
    };
    let is_same = grid.groups.count == 1 && (grid.component, grid.heads) == (next.component, next.heads);
    is_same.then_some(Axis {
        count: 2,
        src: distance(&sides[0], grid.first.src, next.first.src)?,
        dst: distance(&sides[1], grid.first.dst, next.first.dst)?,
    })
}

/// The grids with their rows merged: along axes without gaps, and across components that stand behind each
/// other on both sides.
fn strips(grids: &[Grid]) -> Vec<Strip> {
    let mut strips: Vec<Strip> = Vec::with_capacity(grids.len());
    for grid in grids {
        let mut strip = Strip { first: grid.first, axes: grid.axes() }.fold();
        while let Some(last) = strips.last().filter(|last| last.continues(&strip)) {
            let mut merged = *last;
            merged.first.len += strip.first.len;
            strip = merged.fold();
            strips.pop();
        }
        strips.push(strip);
    }
    strips
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

    /// Whether all heads are one stride apart.
    fn is_even(&self) -> bool {
        let rule = self.rule;
        rule.group_stride == rule.head_stride.saturating_mul(u64::from(rule.heads_per_group))
    }

    /// Heads from the model-global `head` on that are one stride apart.
    fn even_heads(&self, head: u32) -> u32 {
        let rule = self.rule;
        if self.is_even() {
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

/// The rows of one component over `rect`, whose heads are evenly apart on both sides.
fn grid(component: usize, sides: &[Side<'_>; 2], rect: &Tile) -> Result<Grid> {
    let [src, dst] = sides;
    let token_rows = src.rule.unit.rows(rect);
    let counts = [u64::from(rect.heads.len()), token_rows, u64::from(rect.layers.len())];
    let strides = [src.strides(rect), dst.strides(rect)];
    let span = |side: usize| -> u128 { (0..3).map(|i| strides[side][i] * u128::from(counts[i] - 1)).sum() };
    let len = src.rule.row_bytes;
    let first = CopyRun {
        src: src.place(src.start(rect), span(0), u128::from(len))?,
        dst: dst.place(dst.start(rect), span(1), u128::from(len))?,
        len,
    };
    // Strides that are used were found to lie within a buffer, so that they fit.
    let axis = |i: usize| match counts[i] {
        1 => Axis::ONE,
        count => Axis { count, src: strides[0][i] as u64, dst: strides[1][i] as u64 },
    };
    Ok(Grid {
        component,
        first,
        heads: axis(0),
        groups: Axis::ONE,
        tokens: axis(1),
        layers: axis(2),
        unit: src.rule.unit,
    })
}
