//! Which way a plan goes: a pure function of the plan and of what there is.

use std::fmt;

use super::kernels::{OLDEST_FOR_BULK, WIDTHS};
use crate::segment_plan::SegmentPlan;

/// Runs from this many bytes on are worth a descriptor of the copy engine.
pub const BATCH_RUN_BYTES: u32 = 128 << 10;

/// Threads of a block of the register kernels.
pub(super) const REGISTER_THREADS: u32 = 1024;

/// Stages of shared memory that a lane of the bulk kernel has; `BULK_DEPTH` in `cuda/segment_bulk.h`.
const BULK_DEPTH: u32 = 4;
const BULK_MAX_LANES: u32 = 32;
const BULK_SHARED_BYTES: u32 = 192 << 10;
const BULK_STAGE_BYTES: u32 = 24 << 10;

/// A way for the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// The copy engine, a copy for each run.
    Copies,
    /// The register kernel.
    Register,
    /// The bulk-copy kernel. It has never run on a GPU: only when asked.
    Bulk,
}

/// What there is to choose from, for one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Compute capability, 10 x major + minor, where there are kernels.
    pub kernels: Option<u32>,
    /// Most dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether the driver takes many copies in one call.
    pub has_copy_batch: bool,
    /// Whether the index vectors can be read by the CPU: the copy engine needs every address.
    pub has_host_indices: bool,
    /// Whether the stream is being captured into a graph.
    pub is_capturing: bool,
    /// Whether it is the legacy default stream, which takes no batches.
    pub is_legacy_stream: bool,
}

/// What the caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wishes {
    /// A way, or the best.
    pub way: Option<Way>,
    /// Blocks of a kernel at most; each takes a whole multiprocessor while it runs.
    pub blocks: Option<u32>,
}

/// What is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// A copy for each run, in one call if `batched`.
    Copies {
        /// Whether the driver takes them in one call.
        batched: bool,
    },
    /// The register kernel.
    Register {
        /// Bytes of a vector, or 0: each segment has its own width.
        width: u32,
        /// Blocks.
        grid: u32,
    },
    /// The bulk-copy kernel.
    Bulk {
        /// Blocks.
        grid: u32,
        /// Threads of a block that work.
        lanes: u32,
        /// Bytes of a stage.
        stage_bytes: u32,
    },
}

/// Chooses the way of `plan`, and says why in a few words.
///
/// # Errors
/// A sentence where what was asked for cannot be done, or nothing can.
pub fn choose(plan: &SegmentPlan, facts: &Facts, wishes: &Wishes) -> Result<(Choice, &'static str), String> {
    match wishes.way {
        Some(Way::Copies) => return Ok((copies(facts)?, "asked for")),
        Some(Way::Register) if facts.kernels.is_some() => {
            return Ok((register(plan, wishes), "asked for"));
        }
        Some(Way::Register) => return Err("expected kernels on this device, found none".to_owned()),
        Some(Way::Bulk) => return Ok((bulk(plan, facts, wishes)?, "asked for")),
        None => {}
    }
    let batches = facts.has_copy_batch && !facts.is_capturing && !facts.is_legacy_stream;
    let long_runs = plan.used().iter().all(|segment| segment.run_bytes >= BATCH_RUN_BYTES);
    if batches && facts.has_host_indices && long_runs {
        return Ok((Choice::Copies { batched: true }, "all runs are long"));
    }
    if facts.kernels.is_some() {
        return Ok((register(plan, wishes), "the widest vector that divides everything"));
    }
    Ok((copies(facts)?, "there are no kernels"))
}

fn copies(facts: &Facts) -> Result<Choice, String> {
    if !facts.has_host_indices {
        return Err("expected indices that the CPU can read, for the copy engine, found none".to_owned());
    }
    let batched = facts.has_copy_batch && !facts.is_capturing && !facts.is_legacy_stream;
    Ok(Choice::Copies { batched })
}

fn register(plan: &SegmentPlan, wishes: &Wishes) -> Choice {
    let widths = || plan.used().iter().map(|segment| segment.vector_bytes());
    let (narrowest, widest) = (widths().min().unwrap_or(16), widths().max().unwrap_or(16));
    debug_assert!(WIDTHS.contains(&narrowest));
    let width = if narrowest == widest { widest } else { 0 };
    Choice::Register { width, grid: grid(plan, wishes, REGISTER_THREADS) }
}

/// Enough blocks for the rows, within what was asked for: two by default, four where runs are short, since a block
/// then has less in flight.
fn grid(plan: &SegmentPlan, wishes: &Wishes, threads: u32) -> u32 {
    let shortest = plan.used().iter().map(|segment| segment.run_bytes).min().unwrap_or(u32::MAX);
    let most = wishes.blocks.unwrap_or(if shortest < 512 { 4 } else { 2 }).max(1);
    let blocks = plan.used().iter().map(|segment| {
        let rows = u64::from(segment.items) * u64::from(segment.groups);
        (rows << segment.lanes_log2).div_ceil(threads.into())
    });
    blocks.max().unwrap_or(1).clamp(1, most.into()) as u32
}

fn bulk(plan: &SegmentPlan, facts: &Facts, wishes: &Wishes) -> Result<Choice, String> {
    match facts.kernels {
        Some(capability) if capability >= OLDEST_FOR_BULK => {}
        Some(capability) => {
            return Err(format!(
                "expected compute capability {OLDEST_FOR_BULK} for the bulk kernel, found {capability}"
            ));
        }
        None => return Err("expected kernels on this device, found none".to_owned()),
    }
    if let Some(number) = plan.used().iter().position(|segment| segment.vector_bytes() != 16) {
        let width = plan.used()[number].vector_bytes();
        return Err(format!(
            "expected multiples of 16 for the bulk kernel, found segment {number} of multiples of {width}"
        ));
    }
    let longest = plan.used().iter().map(|segment| segment.run_bytes).max().unwrap_or(16);
    let stage_bytes = longest.min(BULK_STAGE_BYTES).next_multiple_of(128);
    let shared_bytes = facts.shared_bytes.min(BULK_SHARED_BYTES);
    let lanes = (shared_bytes / (BULK_DEPTH * stage_bytes)).min(BULK_MAX_LANES);
    if lanes == 0 {
        return Err(format!(
            "expected shared memory for stages of {stage_bytes} bytes, found {shared_bytes}"
        ));
    }
    let rows = plan.used().iter().map(|segment| u64::from(segment.items) * u64::from(segment.groups));
    let blocks = rows.max().unwrap_or(1).div_ceil(lanes.into());
    let grid = blocks.clamp(1, wishes.blocks.unwrap_or(2).max(1).into()) as u32;
    Ok(Choice::Bulk { grid, lanes, stage_bytes })
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Copies { batched: true } => f.write_str("the copy engine, in one batch"),
            Choice::Copies { batched: false } => f.write_str("the copy engine, copy by copy"),
            Choice::Register { width: 0, grid } => {
                write!(f, "the register kernel, each segment its own width, {grid} blocks")
            }
            Choice::Register { width, grid } => {
                write!(f, "the register kernel, {width} bytes a vector, {grid} blocks")
            }
            Choice::Bulk { grid, lanes, .. } => write!(f, "the bulk kernel, {grid} blocks of {lanes} lanes"),
        }
    }
}

impl Choice {
    /// Dynamic shared memory of a block, in bytes.
    pub(super) fn shared_bytes(&self) -> u32 {
        match self {
            Choice::Bulk { lanes, stage_bytes, .. } => lanes * BULK_DEPTH * stage_bytes,
            Choice::Copies { .. } | Choice::Register { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment_plan::{Segment, SegmentSide, Strides};

    fn plan(runs: &[(u32, u32)]) -> SegmentPlan {
        let segments: Vec<_> = runs
            .iter()
            .map(|&(run, items)| {
                let strides = Strides { page: run.into(), ..Strides::default() };
                let side = |base| SegmentSide::identity(base, strides, 1).unwrap();
                Segment::new(side(4096), side(1 << 40), items, 1, run).unwrap()
            })
            .collect();
        SegmentPlan::new(&segments).unwrap()
    }

    const ALL: Facts = Facts {
        kernels: Some(90),
        shared_bytes: 227 << 10,
        has_copy_batch: true,
        has_host_indices: true,
        is_capturing: false,
        is_legacy_stream: false,
    };

    #[test]
    fn the_table_of_choices() {
        let register = |width, grid| Choice::Register { width, grid };
        let batch = Choice::Copies { batched: true };
        let none = Facts { kernels: None, ..ALL };
        type Case<'a> = (&'a [(u32, u32)], Facts, Choice);
        let cases: [Case<'_>; 15] = [
            (&[(1152, 8192)], ALL, register(16, 2)),
            (&[(656, 8192)], ALL, register(16, 2)),
            (&[(132, 8192)], ALL, register(4, 4)),
            (&[(4097, 8192)], ALL, register(1, 2)),
            (&[(1152, 8192), (1152, 16)], ALL, register(16, 2)),
            // An odd sidecar: each segment its own width.
            (&[(1152, 8192), (132, 128)], ALL, register(0, 4)),
            // Few rows need no second block.
            (&[(1152, 3)], ALL, register(16, 1)),
            (&[(1152, 0)], ALL, register(16, 1)),
            // Long runs: the copy engine, where it can be given them.
            (&[(128 << 10, 64)], ALL, batch),
            (&[(128 << 10, 64), (1152, 64)], ALL, register(16, 2)),
            (&[(128 << 10, 64)], Facts { is_capturing: true, ..ALL }, register(16, 2)),
            (&[(128 << 10, 64)], Facts { has_host_indices: false, ..ALL }, register(16, 2)),
            (&[(128 << 10, 64)], Facts { is_legacy_stream: true, ..ALL }, register(16, 2)),
            (&[(1152, 64)], none, batch),
            (&[(1152, 64)], Facts { is_legacy_stream: true, ..none }, Choice::Copies { batched: false }),
        ];
        for (runs, facts, choice) in cases {
            let (chosen, why) = choose(&plan(runs), &facts, &Wishes::default()).unwrap();
            assert_eq!(chosen, choice, "{runs:?} {facts:?}: {why}");
        }
        let blind = Facts { has_host_indices: false, ..none };
        assert!(choose(&plan(&[(16, 1)]), &blind, &Wishes::default()).unwrap_err().contains("indices"));
    }

    #[test]
    fn bulk_only_when_asked_and_only_where_it_can() {
        let asked = Wishes { way: Some(Way::Bulk), blocks: None };
        let bulk = |run, items| choose(&plan(&[(run, items)]), &ALL, &asked).unwrap().0;
        // A warp of lanes with four stages each, as long as they fit into 192 KiB.
        assert_eq!(bulk(656, 8192), Choice::Bulk { grid: 2, lanes: 32, stage_bytes: 768 });
        assert_eq!(bulk(1536, 8192), Choice::Bulk { grid: 2, lanes: 32, stage_bytes: 1536 });
        assert_eq!(bulk(2048, 8192), Choice::Bulk { grid: 2, lanes: 24, stage_bytes: 2048 });
        assert_eq!(bulk(1 << 20, 3), Choice::Bulk { grid: 2, lanes: 2, stage_bytes: 24 << 10 });
        for run in [16, 512, 656, 2048, 24 << 10, 1 << 20] {
            assert!(bulk(run, 9).shared_bytes() <= 192 << 10);
        }
        let refused = |runs, facts: Facts| choose(&plan(runs), &facts, &asked).unwrap_err();
        assert!(refused(&[(132, 9)], ALL).contains("multiples of 4"));
        assert!(refused(&[(1152, 9)], Facts { kernels: Some(89), ..ALL }).contains("found 89"));
        assert!(refused(&[(1152, 9)], Facts { kernels: None, ..ALL }).contains("found none"));
        assert!(refused(&[(1152, 9)], Facts { shared_bytes: 1000, ..ALL }).contains("1000"));
    }

    #[test]
    fn wishes_are_followed() {
        let wishes = Wishes { way: Some(Way::Register), blocks: Some(16) };
        let choice = choose(&plan(&[(1 << 20, 4096)]), &ALL, &wishes).unwrap();
        assert_eq!(choice, (Choice::Register { width: 16, grid: 16 }, "asked for"));
        let wishes = Wishes { way: Some(Way::Copies), blocks: None };
        assert_eq!(choose(&plan(&[(16, 4)]), &ALL, &wishes).unwrap().0, Choice::Copies { batched: true });
    }

    #[test]
    fn the_constants_of_the_bulk_kernel_are_those_of_its_source() {
        let source = super::super::image::SOURCES[2].1;
        assert!(source.contains(&format!("#define BULK_DEPTH {BULK_DEPTH}u")));
        assert!(source.contains(&format!("#define BULK_MAX_LANES {BULK_MAX_LANES}u")));
        let source = super::super::image::SOURCES[0].1;
        assert!(source.contains(&format!("#define HICACHE_REGISTER_THREADS {REGISTER_THREADS}")));
    }
}
