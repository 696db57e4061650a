//! How the bytes of an object lie in the caller's memory: a copy plan, cut the way I/O needs it.

use std::ops::Range;

use hicache_sys::Region;
use hicache_sys::file::Piece;

use crate::format::form::{Codec, Form};
use crate::layout::Layout;
use crate::plan::{CopyPlan, cover_source};
use crate::tile::Tile;
use crate::{Error, Result};

/// Runs shorter than this on average go through a scratch buffer: a vector of tiny pieces costs more than a copy.
const SHORTEST_PIECE_BYTES: u64 = 4096;

/// One contiguous stretch on both sides.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    object: u64,
    buffer: usize,
    memory: u64,
    slot_stride: u64,
    len: u64,
}

/// Where the bytes of an object of one form go in host memory of one layout, or come from.
#[derive(Debug)]
pub struct Landing {
    /// By object offset.
    stretches: Vec<Stretch>,
    /// Blocks that hold a wanted byte.
    pub blocks: Vec<Range<u32>>,
    /// Whether every object byte has a place in memory and can be read and written there directly.
    pub is_straight: bool,
    /// Bytes moved for one page.
    pub bytes: u64,
}

impl Landing {
    /// Lands `piece` of an object of `form`, laid out as `object`, in memory laid out as `host`.
    pub fn new(form: &Form, object: &Layout, host: &Layout, piece: &Tile) -> Result<Self> {
        let plan = CopyPlan::between(object, host, piece)?;
        let runs = plan.runs()?;
        let stretches: Vec<Stretch> = runs
            .iter()
            .map(|run| Stretch {
                object: run.src.offset,
                buffer: run.dst.buffer,
                memory: run.dst.offset,
                slot_stride: run.dst.slot_stride,
                len: run.len,
            })
            .collect();
        let mut blocks: Vec<Range<u32>> = Vec::new();
        let block_bytes = u64::from(form.block_bytes);
        for stretch in &stretches {
            let first = (stretch.object / block_bytes) as u32;
            let end = (stretch.object + stretch.len).div_ceil(block_bytes) as u32;
            match blocks.last_mut() {
                Some(last) if first <= last.end => last.end = last.end.max(end),
                _ => blocks.push(first..end),
            }
        }
        let is_whole = cover_source(&runs, form.page_bytes);
        let is_long = plan.bytes() >= SHORTEST_PIECE_BYTES * stretches.len() as u64;
        let is_straight = form.codec == Codec::None && is_whole && is_long;
        Ok(Landing { stretches, blocks, is_straight, bytes: plan.bytes() })
    }

    /// Memory of the object bytes `range`, in object order, for the page in `slot`.
    pub fn pieces<'a>(&self, range: Range<u64>, slot: u64, regions: &[&'a Region], out: &mut Vec<Piece<'a>>) {
        for (stretch, part) in self.overlapping(range) {
            out.push(Piece {
                region: regions[stretch.buffer],
                offset: stretch.memory + slot * stretch.slot_stride + (part.start - stretch.object),
                len: part.end - part.start,
            });
        }
    }

    /// Copies the object bytes `range`, given as `bytes`, to the page in `slot`; bytes without a place are left.
    pub fn scatter(&self, range: Range<u64>, bytes: &[u8], slot: u64, regions: &[&Region]) -> Result<()> {
        let start = range.start;
        for (stretch, part) in self.overlapping(range) {
            let from = &bytes[(part.start - start) as usize..(part.end - start) as usize];
            let to = stretch.memory + slot * stretch.slot_stride + (part.start - stretch.object);
            regions[stretch.buffer].copy_in(to, from).map_err(|error| Error::geometry(error.to_string()))?;
        }
        Ok(())
    }

    fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = (&Stretch, Range<u64>)> {
        let first = self.stretches.partition_point(|stretch| stretch.object + stretch.len <= range.start);
        self.stretches[first..].iter().take_while(move |stretch| stretch.object < range.end).map(
            move |stretch| {
                (stretch, stretch.object.max(range.start)..(stretch.object + stretch.len).min(range.end))
            },
        )
    }
}
