//! Writing pages of one chain from memory of the view's layouts to a segment, and publishing them together.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use hicache_sys::file::Piece;

use rayon::prelude::*;

use crate::Error;
use crate::format::block::{block_checksum, encode_block};
use crate::format::directory::{Block, Entry, Parent, Run, UNKNOWN_DEPTH};
use crate::format::form::Form;
use crate::key::PageKey;
use crate::store::Inner;
use crate::store::backup::{BackupOutcome, ChainStart};
use crate::store::chunk::{CHUNK_BYTES, cut, gather_blocks, pieces_checksum};
use crate::store::counters::Counter;
use crate::store::io::{IoEngine, Write, gather, is_late, late};
use crate::store::landing::Landing;
use crate::store::namespace_state::NamespaceState;
use crate::store::publish::{Payload, Publication, UnitPlan, Unpublished, consecutive};
use crate::store::room::Refused;
use crate::store::segment_writer::Reservation;
use crate::store::view::{BoundMemory, PoolState};

/// Pages to be stored, and what is known of them.
pub(crate) struct Chain<'a> {
    pub(crate) keys: &'a [PageKey],
    /// Slots of each pool, as the caller gave them.
    pub(crate) slots: &'a [&'a [i64]],
    /// For each pool and page, whether an object must be written.
    pub(crate) missing: &'a [Vec<bool>],
    pub(crate) start: ChainStart,
}

/// Most files that one batch is written to at once: each is a segment that is kept open.
const MOST_LANES: usize = 4;

/// Units that are written side by side have at least so many raw bytes.
const LANE_BYTES: u64 = 4 << 20;

/// What became of pages that were to be written.
#[derive(Default)]
pub(crate) struct Written {
    /// Raw bytes of the objects published.
    pub(crate) raw_bytes: u64,
    /// Bytes that their units take.
    pub(crate) stored_bytes: u64,
    /// The first page that was not published, and why.
    pub(crate) refused: Option<(usize, Refusal)>,
}

impl Written {
    /// None of the pages from `first` on.
    pub(crate) fn refused(first: usize, refusal: Refusal) -> Written {
        Written { refused: Some((first, refusal)), ..Written::default() }
    }
}

/// Writes pages of one namespace.
pub(crate) struct Writer<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) state: &'a NamespaceState,
    pub(crate) pools: &'a [PoolState],
    /// Who carries out the writes.
    pub(crate) engine: &'a dyn IoEngine,
    /// 0: bytes are stored as they are.
    pub(crate) zstd_level: i32,
    /// Nothing is written that was not begun by then, and nothing published.
    pub(crate) deadline: Option<Instant>,
}

/// Pages that become one unit.
struct UnitPages<'v, 'm> {
    pages: Range<usize>,
    plans: Vec<RunPlan<'v, 'm>>,
    /// Stored bytes of each page of each run, where they are compressed.
    compressed: Option<Vec<Vec<Vec<u8>>>>,
}

/// Pages of one pool that go into one run.
struct RunPlan<'v, 'm> {
    pool: &'v PoolState,
    memory: &'v BoundMemory<'m>,
    landing: Arc<Landing>,
    pages: Range<usize>,
}

/// For each pool and page: whether an object must be written.
pub(crate) fn missing(
    state: &NamespaceState,
    pools: &[PoolState],
    keys: &[PageKey],
    slots: &[&[i64]],
) -> Vec<Vec<bool>> {
    let index = state.index();
    let of_pool = |(pool, slots): (&PoolState, &&[i64])| {
        let coverage = pool.coverage(&index);
        let mut walk = coverage.walk(&index);
        let is_missing = |(key, &slot): (&PageKey, &i64)| slot >= 0 && !walk.has(key);
        keys.iter().zip(*slots).map(is_missing).collect()
    };
    pools.iter().zip(slots).map(of_pool).collect()
}

impl Writer<'_> {
    /// Whether the page before this one is still there: a chain that the root cannot hold displaces itself, and what
    /// comes after the gap would be of no use.
    fn has_parent(&self, chain: &Chain<'_>, page: usize) -> bool {
        let Some(before) = page.checked_sub(1) else { return true };
        self.state.refresh_within(&self.inner.counters, self.inner.device.clock.left(self.deadline));
        let index = self.state.index();
        let mut pools = self.pools.iter().zip(chain.slots).filter(|(_, slots)| slots[before] >= 0);
        pools.all(|(pool, _)| pool.coverage(&index).walk(&index).has(&chain.keys[before]))
    }

    /// Writes and publishes the missing objects of some pages: much of it as several units, side by side.
    pub(crate) fn write_pages(
        &self,
        chain: &Chain<'_>,
        memory: &[BoundMemory<'_>],
        pages: Range<usize>,
    ) -> Written {
        self.try_write_pages(chain, memory, pages.clone())
            .unwrap_or_else(|refusal| Written::refused(pages.start, refusal))
    }

    fn try_write_pages(
        &self,
        chain: &Chain<'_>,
        memory: &[BoundMemory<'_>],
        pages: Range<usize>,
    ) -> std::result::Result<Written, Refusal> {
        let (mut parts, mut units) = (Vec::new(), Vec::new());
        for pages in self.parts(chain, pages.clone()) {
            let mut plans = Vec::new();
            for ((pool, memory), missing) in self.pools.iter().zip(memory).zip(chain.missing) {
                for pages in consecutive(missing, pages.clone()) {
                    let landing =
                        pool.landing(&pool.form, &pool.spec.tile, memory).map_err(Refusal::from_error)?;
                    plans.push(RunPlan { pool, memory, landing, pages });
                }
            }
            let mut runs: Vec<Run> = plans.iter().map(|plan| plan.run(chain.keys, chain.start)).collect();
            let compressed = match self.zstd_level {
                0 => None,
                level => Some(
                    self.compress(&plans, &mut runs, level)
                        .map_err(|error| Refusal::from(Refused::Io(error)))?,
                ),
            };
            parts.push(UnitPages { pages, plans, compressed });
            units.push(UnitPlan::new(runs));
        }
        let stored_bytes: Vec<u64> = units.iter().map(|unit| unit.bytes).collect();
        let unknown: Vec<usize> = units.iter().map(UnitPlan::unknown_parents).collect();
        let mut publication = Publication::new(units);
        publication.deadline = self.deadline;
        let ended = publication.publish(self.inner, self.state, |payloads| {
            // Room was made by now, perhaps of what comes before.
            if !self.has_parent(chain, pages.start) {
                return Err(io::Error::other(Displaced));
            }
            match self.zstd_level {
                0 => self.write_straight(&parts, payloads),
                _ => self.write_compressed(&parts, payloads),
            }
        });
        let (published, refused) = match ended {
            Ok(()) => (parts.len(), None),
            Err(Unpublished { published, refused }) => {
                (published, Some((parts[published].pages.start, Refusal::from(refused))))
            }
        };
        let unknown: usize = unknown[..published].iter().sum();
        self.inner.counters.add(Counter::BackupUnknownParent, unknown as u64);
        Ok(Written {
            raw_bytes: parts[..published].iter().map(UnitPages::raw_bytes).sum(),
            stored_bytes: stored_bytes[..published].iter().sum(),
            refused,
        })
    }

    /// Pages in parts, as many as it is worth writing side by side.
    fn parts(&self, chain: &Chain<'_>, pages: Range<usize>) -> Vec<Range<usize>> {
        let missing_bytes = |page: usize| -> u64 {
            let of_pool = |(pool, missing): (&PoolState, &Vec<bool>)| {
                if missing[page] { pool.form.page_bytes } else { 0 }
            };
            self.pools.iter().zip(chain.missing).map(of_pool).sum()
        };
        let bytes: Vec<u64> = pages.clone().map(missing_bytes).collect();
        let lanes = self.engine.threads().min(MOST_LANES) as u64;
        let most = (bytes.iter().sum::<u64>() / LANE_BYTES).clamp(1, lanes);
        let parts = cut_evenly(&bytes, most).into_iter();
        parts.map(|part| pages.start + part.start..pages.start + part.end).collect()
    }

    /// Writes raw pages from where they are, each chunk right after its checksums.
    fn write_straight(&self, parts: &[UnitPages<'_, '_>], payloads: &mut [Payload<'_>]) -> io::Result<()> {
        struct Chunk<'c> {
            run: usize,
            pages: Range<usize>,
            bytes: Range<u64>,
            pieces: Vec<Piece<'c>>,
        }
        let mut chunks: Vec<Chunk<'_>> = Vec::new();
        let mut writes = Vec::new();
        let plans: Vec<&RunPlan<'_, '_>> = parts.iter().flat_map(|part| &part.plans).collect();
        let mut runs: Vec<(&mut Run, &Reservation)> = payloads
            .iter_mut()
            .flat_map(|Payload { runs, room }| runs.iter_mut().map(|run| (run, *room)))
            .collect();
        for (run, plan) in plans.iter().enumerate() {
            let form = &plan.pool.form;
            for (pages, bytes) in cut(form, plan.pages.len(), 0..form.page_bytes, CHUNK_BYTES) {
                let mut pieces = Vec::new();
                for page in pages.clone() {
                    let slot = plan.memory.slots[plan.pages.start + page] as u64;
                    plan.landing.pieces(bytes.clone(), slot, &plan.memory.regions, &mut pieces);
                }
                let (in_unit, room) = &runs[run];
                let first = in_unit.payload_offset + pages.start as u64 * form.page_bytes + bytes.start;
                writes.push(Write {
                    file: &room.file,
                    offset: room.offset + first,
                    len: pages.len() as u64 * (bytes.end - bytes.start),
                    from: plan.landing.is_straight.then(|| pieces.clone()),
                });
                chunks.push(Chunk { run, pages, bytes, pieces });
            }
        }
        let checksums: Vec<Vec<AtomicU64>> = runs
            .iter()
            .map(|(run, _)| {
                (0..run.entries.len() * run.form.blocks() as usize).map(|_| AtomicU64::new(0)).collect()
            })
            .collect();
        let seeds: Vec<Vec<u64>> = runs
            .iter()
            .map(|(run, _)| {
                run.entries.iter().map(|entry| run.form.seed(&self.state.fingerprint, &entry.key)).collect()
            })
            .collect();
        let store = |chunk: &Chunk<'_>, page: usize, block: u32, value: u64| {
            let blocks = plans[chunk.run].pool.form.blocks() as usize;
            checksums[chunk.run][page * blocks + block as usize].store(value, Ordering::Relaxed);
        };
        self.engine.write_batch(&writes, self.deadline, &|index, scratch| {
            let chunk = &chunks[index];
            let form = &plans[chunk.run].pool.form;
            let first_block = (chunk.bytes.start / u64::from(form.block_bytes)) as u32;
            let page_len = (chunk.bytes.end - chunk.bytes.start) as usize;
            if writes[index].from.is_none() {
                let (block_bytes, first_page) = (form.block_bytes as usize, chunk.pages.start);
                gather_blocks(&chunk.pieces, scratch, page_len, block_bytes, |page, block, bytes| {
                    let (page, block) = (first_page + page, first_block + block);
                    store(chunk, page, block, block_checksum(seeds[chunk.run][page], block, bytes));
                })?;
                return Ok(());
            }
            let plan = &plans[chunk.run];
            for page in chunk.pages.clone() {
                let slot = plan.memory.slots[plan.pages.start + page] as u64;
                let mut pieces = Vec::new();
                let mut at = chunk.bytes.start;
                for block in first_block.. {
                    if at >= chunk.bytes.end {
                        break;
                    }
                    let end = at + u64::from(form.block_raw_bytes(block));
                    pieces.clear();
                    plan.landing.pieces(at..end, slot, &plan.memory.regions, &mut pieces);
                    let value = pieces_checksum(seeds[chunk.run][page], block, &pieces)?;
                    store(chunk, page, block, value);
                    at = end;
                }
            }
            Ok(())
        })?;
        for ((run, _), checksums) in runs.iter_mut().zip(checksums) {
            let form = run.form;
            let blocks = form.blocks() as usize;
            for (page, entry) in run.entries.iter_mut().enumerate() {
                entry.blocks = (0..blocks)
                    .map(|block| Block {
                        stored_bytes: form.block_raw_bytes(block as u32),
                        checksum: checksums[page * blocks + block].load(Ordering::Relaxed),
                    })
                    .collect();
            }
        }
        Ok(())
    }

    /// Compresses every page, several at a time. Stored bytes of each page of each run.
    fn compress(
        &self,
        plans: &[RunPlan<'_, '_>],
        runs: &mut [Run],
        level: i32,
    ) -> io::Result<Vec<Vec<Vec<u8>>>> {
        let mut compressed = Vec::with_capacity(runs.len());
        for (run, plan) in runs.iter_mut().zip(plans) {
            let form = run.form;
            let one = |(page, entry): (usize, &mut Entry)| {
                let slot = plan.memory.slots[plan.pages.start + page] as u64;
                let seed = form.seed(&self.state.fingerprint, &entry.key);
                if self.inner.device.clock.is_past(self.deadline) {
                    return Err(late());
                }
                let (stored, blocks) =
                    compress_page(&form, &plan.landing, slot, &plan.memory.regions, seed, level)?;
                entry.blocks = blocks;
                Ok(stored)
            };
            let stored: io::Result<Vec<Vec<u8>>> =
                self.inner.workers.install(|| run.entries.par_iter_mut().enumerate().map(one).collect());
            let stored = stored?;
            run.payload_bytes = 0;
            for (entry, stored) in run.entries.iter_mut().zip(&stored) {
                entry.payload_offset = run.payload_bytes;
                run.payload_bytes += stored.len() as u64;
            }
            compressed.push(stored);
        }
        Ok(compressed)
    }

    fn write_compressed(&self, parts: &[UnitPages<'_, '_>], payloads: &[Payload<'_>]) -> io::Result<()> {
        let mut sources = Vec::new();
        let mut writes = Vec::new();
        for (part, Payload { runs, room }) in parts.iter().zip(payloads) {
            for (run, pages) in runs.iter().zip(part.compressed.iter().flatten()) {
                for (entry, stored) in run.entries.iter().zip(pages) {
                    let mut offset = room.offset + entry.payload_offset;
                    for chunk in stored.chunks(CHUNK_BYTES as usize) {
                        writes.push(Write { file: &room.file, offset, len: chunk.len() as u64, from: None });
                        sources.push(chunk);
                        offset += chunk.len() as u64;
                    }
                }
            }
        }
        self.engine.write_batch(&writes, self.deadline, &|index, scratch| {
            scratch.copy_from_slice(sources[index]);
            Ok(())
        })
    }
}

impl UnitPages<'_, '_> {
    fn raw_bytes(&self) -> u64 {
        self.plans.iter().map(|plan| plan.pages.len() as u64 * plan.pool.form.page_bytes).sum()
    }
}

impl RunPlan<'_, '_> {
    /// The run, its raw pages one after the other; blocks are filled in when they are known.
    fn run(&self, keys: &[PageKey], start: ChainStart) -> Run {
        let first = self.pages.start;
        let form = self.pool.form;
        let parent = match (first.checked_sub(1), start.parent, start.depth) {
            (Some(before), _, _) => Parent::Page(keys[before]),
            (None, Some(parent), _) => Parent::Page(parent),
            (None, None, Some(0)) => Parent::Root,
            (None, None, _) => Parent::Unknown,
        };
        let entry = |(page, key): (u64, &PageKey)| Entry {
            key: *key,
            payload_offset: page * form.page_bytes,
            blocks: Vec::new(),
        };
        Run {
            form,
            pool_bytes: self.pool.spec.pool.canonical_bytes(),
            payload_offset: 0,
            payload_bytes: self.pages.len() as u64 * form.page_bytes,
            parent,
            depth: start.depth.and_then(|depth| depth.checked_add(first as u32)).unwrap_or(UNKNOWN_DEPTH),
            entries: (0..).zip(&keys[self.pages.clone()]).map(entry).collect(),
        }
    }
}

/// Stored bytes and blocks of one page.
fn compress_page(
    form: &Form,
    landing: &Landing,
    slot: u64,
    regions: &[&hicache_sys::Region],
    seed: u64,
    level: i32,
) -> io::Result<(Vec<u8>, Vec<Block>)> {
    let mut raw = vec![0; form.page_bytes as usize];
    let mut pieces = Vec::new();
    landing.pieces(0..form.page_bytes, slot, regions, &mut pieces);
    gather(&pieces, &mut raw)?;
    let mut stored = Vec::with_capacity(raw.len());
    let mut blocks = Vec::with_capacity(form.blocks() as usize);
    for (index, block) in raw.chunks(form.block_bytes as usize).enumerate() {
        let start = stored.len();
        encode_block(form.codec, level, block, &mut stored)?;
        let bytes = &stored[start..];
        blocks.push(Block {
            stored_bytes: bytes.len() as u32,
            checksum: block_checksum(seed, index as u32, bytes),
        });
    }
    Ok((stored, blocks))
}

/// Cuts pages of so many bytes into at most `most` parts of about the same bytes. Each part ends with a page that has some.
fn cut_evenly(bytes: &[u64], most: u64) -> Vec<Range<usize>> {
    let all: u64 = bytes.iter().sum();
    let (mut parts, mut start, mut so_far) = (Vec::new(), 0, 0);
    for (page, &bytes) in bytes.iter().enumerate() {
        so_far += bytes;
        if bytes > 0 && so_far * most >= all * (parts.len() as u64 + 1) {
            parts.push(start..page + 1);
            start = page + 1;
        }
    }
    parts
}

/// A chain that is longer than the root can hold.
#[derive(Debug)]
struct Displaced;

impl std::fmt::Display for Displaced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the root cannot hold the whole chain: the pages before had to leave")
    }
}

impl std::error::Error for Displaced {}

/// Why a unit was not written.
pub(crate) struct Refusal {
    pub(crate) outcome: BackupOutcome,
    pub(crate) counter: Counter,
    pub(crate) reason: String,
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        let (outcome, counter) = match &refused {
            Refused::Late => (BackupOutcome::Late, Counter::BackupLate),
            Refused::Io(error) if is_late(error) => (BackupOutcome::Late, Counter::BackupLate),
            refused if refused.is_no_space() => (BackupOutcome::Refused, Counter::BackupRefusedNoSpace),
            Refused::Capacity(_) => (BackupOutcome::Refused, Counter::BackupRefusedCapacity),
            Refused::Busy => (BackupOutcome::Refused, Counter::BackupRefusedBusy),
            Refused::Io(error) if error.get_ref().is_some_and(|source| source.is::<Displaced>()) => {
                (BackupOutcome::Refused, Counter::BackupRefusedCapacity)
            }
            Refused::Io(_) | Refused::NoSpace(_) | Refused::Floor => {
                (BackupOutcome::Error, Counter::BackupError)
            }
        };
        Refusal { outcome, counter, reason: io::Error::from(refused).to_string() }
    }
}

impl Refusal {
    /// The deadline has passed.
    pub(crate) fn late() -> Self {
        Refusal::from(Refused::Late)
    }

    pub(crate) fn from_error(error: Error) -> Self {
        Refusal { outcome: BackupOutcome::Error, counter: Counter::BackupError, reason: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::cut_evenly;

    #[test]
    fn parts_are_even_and_none_is_empty() {
        assert_eq!(cut_evenly(&[1; 10], 4), [0..3, 3..5, 5..8, 8..10]);
        assert_eq!(cut_evenly(&[1; 10], 1), vec![0..10; 1]);
        assert_eq!(cut_evenly(&[1; 2], 4), [0..1, 1..2]);
        // Pages that are there already bring nothing, and are no part alone.
        assert_eq!(cut_evenly(&[8, 0, 0, 8], 4), [0..1, 1..4]);
        assert_eq!(cut_evenly(&[0, 0, 9, 0, 1], 4), [0..3, 3..5]);
    }
}
