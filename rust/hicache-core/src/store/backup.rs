//! `backup`: pages of one chain from host memory to a segment, published together.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hicache_sys::file::Piece;

use rayon::prelude::*;

use crate::format::block::{block_checksum, encode_block};
use crate::format::directory::{Block, Entry, Parent, Run, UNKNOWN_DEPTH};
use crate::format::form::Form;
use crate::format::frame::short_key;
use crate::key::PageKey;
use crate::store::counters::Counter;
use crate::store::index::{MAX_RUN_PAGES, UNNAMED};
use crate::store::io::{Write, gather};
use crate::store::landing::Landing;
use crate::store::notices::Level;
use crate::store::publish::{UnitPlan, consecutive};
use crate::store::room::Refused;
use crate::store::segment_writer::Reservation;
use crate::store::view::{BoundMemory, PoolMemory, PoolState, View};
use crate::{Error, ErrorKind, Result};

/// Most raw bytes of one publication unit; compressed ones are held in memory before they are written.
const UNIT_BYTES: u64 = 256 << 20;
const COMPRESSED_UNIT_BYTES: u64 = 64 << 20;

/// About as many bytes as one write moves: small enough to be still in cache after its checksum.
pub(crate) const CHUNK_BYTES: u64 = 256 << 10;

/// What became of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackupOutcome {
    /// Written and published, in at least one pool.
    Stored,
    /// There already, in every pool given; nothing was written.
    Present,
    /// Not given: no slot in any pool.
    Skipped,
    /// No room, under the root's capacity or on the disk.
    Refused,
    /// The system could not write it.
    Error,
}

impl BackupOutcome {
    /// Every outcome.
    pub const ALL: [BackupOutcome; 5] = [
        BackupOutcome::Stored,
        BackupOutcome::Present,
        BackupOutcome::Skipped,
        BackupOutcome::Refused,
        BackupOutcome::Error,
    ];

    /// Name in Python and the tools.
    pub fn name(self) -> &'static str {
        match self {
            BackupOutcome::Stored => "stored",
            BackupOutcome::Present => "present",
            BackupOutcome::Skipped => "skipped",
            BackupOutcome::Refused => "refused",
            BackupOutcome::Error => "error",
        }
    }

    fn is_there(self) -> bool {
        matches!(self, BackupOutcome::Stored | BackupOutcome::Present)
    }
}

/// Answer of `backup`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupReport {
    /// What became of each page.
    pub outcomes: Vec<BackupOutcome>,
    /// Raw bytes of the objects written.
    pub raw_bytes: u64,
    /// Bytes that they take in the segment, directories included.
    pub stored_bytes: u64,
    /// Why pages were refused or not written, if any were.
    pub reason: Option<String>,
}

impl BackupReport {
    /// For each page, whether the store has it now: stored or present.
    pub fn flags(&self) -> Vec<bool> {
        self.outcomes.iter().map(|outcome| outcome.is_there()).collect()
    }

    /// Pages from the first one on that the store has, before the first that it has not.
    pub fn leading(&self) -> usize {
        self.outcomes.iter().take_while(|outcome| outcome.is_there()).count()
    }
}

/// Where a chain starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChainStart {
    /// Key of the page before the first one.
    pub parent: Option<PageKey>,
    /// Pages before the first one; 0 starts a sequence.
    pub depth: Option<u32>,
}

/// Pages of one pool that go into one run.
struct RunPlan<'v, 'm> {
    pool: &'v PoolState,
    memory: &'v BoundMemory<'m>,
    landing: Arc<Landing>,
    pages: Range<usize>,
}

impl View {
    /// Stores pages of one chain: `keys` in order, each pool's page `i` in slot `memory[pool].slots[i]`. All pools of
    /// a page become visible together. The call returns when the source memory is no longer needed.
    ///
    /// # Errors
    /// `Geometry` or `Config` for arguments that do not fit, `Closed`, `Unsupported` on a read-only store. A full or
    /// failing disk is an outcome of the pages, not an error.
    pub fn backup(
        &self,
        keys: &[PageKey],
        memory: Vec<PoolMemory<'_>>,
        start: ChainStart,
    ) -> Result<BackupReport> {
        self.inner.check_open()?;
        if self.inner.options.read_only {
            return Err(Error::new(ErrorKind::Unsupported, "the store is open for reading only"));
        }
        if start.depth == Some(0) && start.parent.is_some() {
            return Err(Error::config("expected no parent at depth 0, found one"));
        }
        let memory = self.bind(memory, keys.len(), false)?;
        refuse_unusable(keys)?;
        self.refresh();
        let missing = self.missing(keys, &memory);
        let start = self.known_start(keys, start);
        self.touch_present(keys, &missing);
        if self.inner.options.detect_conflicts {
            self.compare_present(keys, &memory, &missing);
        }
        let is_given = |page| memory.iter().any(|memory| memory.slots[page] >= 0);
        let outcome = |page| if is_given(page) { BackupOutcome::Present } else { BackupOutcome::Skipped };
        let mut report = BackupReport {
            outcomes: (0..keys.len()).map(outcome).collect(),
            raw_bytes: 0,
            stored_bytes: 0,
            reason: None,
        };
        for pages in self.units(keys.len(), &missing) {
            match self.write_unit(keys, &memory, &missing, pages.clone(), start) {
                Ok((raw_bytes, stored_bytes)) => {
                    report.raw_bytes += raw_bytes;
                    report.stored_bytes += stored_bytes;
                    set(&mut report.outcomes, &missing, pages, BackupOutcome::Stored);
                }
                Err(refusal) => {
                    // What comes after would hang in the air: a chain is usable only from its start.
                    set(&mut report.outcomes, &missing, pages.start..keys.len(), refusal.outcome);
                    self.count_refusal(&refusal, &report.outcomes);
                    report.reason = Some(refusal.reason);
                    break;
                }
            }
        }
        self.count(&report);
        Ok(report)
    }

    /// Where the chain starts: as the caller says, else as an earlier look-up told.
    fn known_start(&self, keys: &[PageKey], start: ChainStart) -> ChainStart {
        match keys.first() {
            Some(first) if start == ChainStart::default() => {
                self.state.known_start(first).unwrap_or_default()
            }
            _ => start,
        }
    }

    /// Storing what is there already is a use of it.
    fn touch_present(&self, keys: &[PageKey], missing: &[Vec<bool>]) {
        let present =
            (0..keys.len()).take_while(|&page| missing.iter().all(|missing| !missing[page])).count();
        self.state.touch(keys, present);
    }

    /// Whether the page before this one is still there: a chain that the root cannot hold displaces itself, and what
    /// comes after the gap would be of no use.
    fn has_parent(&self, keys: &[PageKey], memory: &[BoundMemory<'_>], page: usize) -> bool {
        let Some(before) = page.checked_sub(1) else { return true };
        self.refresh();
        let index = self.state.index();
        let mut pools = self.pools.iter().zip(memory).filter(|(_, memory)| memory.slots[before] >= 0);
        pools.all(|(pool, _)| pool.coverage(&index).walk(&index).has(&keys[before]))
    }

    /// For each pool and page: whether an object must be written.
    fn missing(&self, keys: &[PageKey], memory: &[BoundMemory<'_>]) -> Vec<Vec<bool>> {
        let index = self.state.index();
        let of_pool = |(pool, memory): (&PoolState, &BoundMemory<'_>)| {
            let coverage = pool.coverage(&index);
            let mut walk = coverage.walk(&index);
            let is_missing = |(key, &slot): (&PageKey, &i64)| slot >= 0 && !walk.has(key);
            keys.iter().zip(memory.slots).map(is_missing).collect()
        };
        self.pools.iter().zip(memory).map(of_pool).collect()
    }

    /// Cuts the chain into units: whole pages, with all pools of a page in the same one. Pages of which nothing is
    /// missing belong to none.
    fn units(&self, pages: usize, missing: &[Vec<bool>]) -> Vec<Range<usize>> {
        let most = if self.zstd_level > 0 { COMPRESSED_UNIT_BYTES } else { UNIT_BYTES };
        // In a small root, room is made and taken in small parts.
        let most = most.min(self.inner.segment_bytes());
        let mut units: Vec<Range<usize>> = Vec::new();
        let mut bytes = 0;
        for page in 0..pages {
            let of_pool = |(pool, missing): (&PoolState, &Vec<bool>)| {
                if missing[page] { pool.form.page_bytes } else { 0 }
            };
            let page_bytes: u64 = self.pools.iter().zip(missing).map(of_pool).sum();
            if page_bytes == 0 {
                continue;
            }
            match units.last_mut() {
                Some(unit) if bytes + page_bytes <= most && page - unit.start < MAX_RUN_PAGES => {
                    unit.end = page + 1;
                    bytes += page_bytes;
                }
                _ => {
                    units.push(page..page + 1);
                    bytes = page_bytes;
                }
            }
        }
        units
    }

    /// Writes and publishes the missing objects of some pages. Raw and stored bytes.
    fn write_unit(
        &self,
        keys: &[PageKey],
        memory: &[BoundMemory<'_>],
        missing: &[Vec<bool>],
        pages: Range<usize>,
        start: ChainStart,
    ) -> std::result::Result<(u64, u64), Refusal> {
        let mut plans = Vec::new();
        for ((pool, memory), missing) in self.pools.iter().zip(memory).zip(missing) {
            for pages in consecutive(missing, pages.clone()) {
                let landing =
                    pool.landing(&pool.form, &pool.spec.tile, memory).map_err(Refusal::from_error)?;
                plans.push(RunPlan { pool, memory, landing, pages });
            }
        }
        let mut runs: Vec<Run> = plans.iter().map(|plan| plan.run(keys, start)).collect();
        let compressed = match self.zstd_level {
            0 => None,
            level => Some(
                self.compress(&plans, &mut runs, level).map_err(|error| Refusal::from(Refused::Io(error)))?,
            ),
        };
        let unknown = runs.iter().filter(|run| run.parent == Parent::Unknown).count();
        let raw_bytes = plans.iter().map(|plan| plan.pages.len() as u64 * plan.pool.form.page_bytes).sum();
        let unit = UnitPlan::new(runs);
        let stored_bytes = unit.bytes;
        unit.publish(&self.inner, &self.state, |runs, room| {
            // Room was made by now, perhaps of what comes before.
            if !self.has_parent(keys, memory, pages.start) {
                return Err(io::Error::other(Displaced));
            }
            match &compressed {
                Some(stored) => self.write_compressed(runs, stored, room),
                None => self.write_straight(&plans, runs, room),
            }
        })?;
        self.inner.counters.add(Counter::BackupUnknownParent, unknown as u64);
        Ok((raw_bytes, stored_bytes))
    }

    /// Writes raw pages from where they are, each chunk right after its checksums while it is in cache.
    fn write_straight(
        &self,
        plans: &[RunPlan<'_, '_>],
        runs: &mut [Run],
        room: &Reservation,
    ) -> io::Result<()> {
        struct Chunk<'c> {
            run: usize,
            pages: Range<usize>,
            bytes: Range<u64>,
            pieces: Vec<Piece<'c>>,
        }
        let mut chunks: Vec<Chunk<'_>> = Vec::new();
        let mut writes = Vec::new();
        for (run, plan) in plans.iter().enumerate() {
            let form = &plan.pool.form;
            for (pages, bytes) in cut(form, plan.pages.len(), 0..form.page_bytes) {
                let mut pieces = Vec::new();
                for page in pages.clone() {
                    let slot = plan.memory.slots[plan.pages.start + page] as u64;
                    plan.landing.pieces(bytes.clone(), slot, &plan.memory.regions, &mut pieces);
                }
                let first = runs[run].payload_offset + pages.start as u64 * form.page_bytes + bytes.start;
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
            .map(|run| {
                (0..run.entries.len() * run.form.blocks() as usize).map(|_| AtomicU64::new(0)).collect()
            })
            .collect();
        let seeds: Vec<Vec<u64>> = runs
            .iter()
            .map(|run| {
                run.entries.iter().map(|entry| run.form.seed(&self.state.fingerprint, &entry.key)).collect()
            })
            .collect();
        let store = |chunk: &Chunk<'_>, page: usize, block: u32, value: u64| {
            let blocks = plans[chunk.run].pool.form.blocks() as usize;
            checksums[chunk.run][page * blocks + block as usize].store(value, Ordering::Relaxed);
        };
        self.inner.engine.write_batch(&writes, &|index, scratch| {
            let chunk = &chunks[index];
            let form = &plans[chunk.run].pool.form;
            let first_block = (chunk.bytes.start / u64::from(form.block_bytes)) as u32;
            let page_len = (chunk.bytes.end - chunk.bytes.start) as usize;
            if writes[index].from.is_none() {
                gather(&chunk.pieces, scratch)?;
                for (page, bytes) in chunk.pages.clone().zip(scratch.chunks(page_len)) {
                    for (block, bytes) in (first_block..).zip(bytes.chunks(form.block_bytes as usize)) {
                        store(chunk, page, block, block_checksum(seeds[chunk.run][page], block, bytes));
                    }
                }
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
        for (run, checksums) in runs.iter_mut().zip(checksums) {
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

    fn write_compressed(&self, runs: &[Run], stored: &[Vec<Vec<u8>>], room: &Reservation) -> io::Result<()> {
        let mut sources = Vec::new();
        let mut writes = Vec::new();
        for (run, pages) in runs.iter().zip(stored) {
            for (entry, stored) in run.entries.iter().zip(pages) {
                writes.push(Write {
                    file: &room.file,
                    offset: room.offset + entry.payload_offset,
                    len: stored.len() as u64,
                    from: None,
                });
                sources.push(stored);
            }
        }
        self.inner.engine.write_batch(&writes, &|index, scratch| {
            scratch.copy_from_slice(sources[index]);
            Ok(())
        })
    }

    fn count_refusal(&self, refusal: &Refusal, outcomes: &[BackupOutcome]) {
        let pages = outcomes.iter().filter(|&&outcome| outcome == refusal.outcome).count() as u64;
        self.inner.counters.add(refusal.counter, pages);
        self.inner.notices.push(Level::Warning, refusal.counter.name(), || {
            format!("{pages} pages were not stored: {}", refusal.reason)
        });
    }

    fn count(&self, report: &BackupReport) {
        let pages = |outcome| report.outcomes.iter().filter(|&&have| have == outcome).count() as u64;
        let counters = &self.inner.counters;
        counters.add(Counter::BackupStored, pages(BackupOutcome::Stored));
        counters.add(Counter::BackupPresent, pages(BackupOutcome::Present));
        counters.add(Counter::BackupRawBytes, report.raw_bytes);
        counters.add(Counter::BackupStoredBytes, report.stored_bytes);
        self.inner.leave_counters(false);
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

/// Checksum of a raw block that lies in pieces.
pub(crate) fn pieces_checksum(seed: u64, block: u32, pieces: &[Piece<'_>]) -> io::Result<u64> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
    if let [piece] = pieces {
        let whole = |bytes: &[u8]| block_checksum(seed, block, bytes);
        return piece.region.with_bytes(piece.offset, piece.len, whole).map_err(invalid);
    }
    let mut streaming = crate::format::block::StreamingChecksum::new(seed, block);
    for piece in pieces {
        piece.region.with_bytes(piece.offset, piece.len, |bytes| streaming.update(bytes)).map_err(invalid)?;
    }
    Ok(streaming.finish())
}

/// Cuts `pages` equal pages, of each the bytes `range`, into chunks of about [`CHUNK_BYTES`] at block borders:
/// several small pages at once, or a part of a large one.
pub(crate) fn cut(form: &Form, pages: usize, range: Range<u64>) -> Vec<(Range<usize>, Range<u64>)> {
    let page_len = range.end - range.start;
    if page_len <= CHUNK_BYTES / 2 {
        let at_once = (CHUNK_BYTES / page_len.max(1)) as usize;
        return (0..pages)
            .step_by(at_once)
            .map(|first| (first..(first + at_once).min(pages), range.clone()))
            .collect();
    }
    let step = CHUNK_BYTES.next_multiple_of(u64::from(form.block_bytes));
    let mut chunks = Vec::with_capacity(pages * page_len.div_ceil(step) as usize);
    for page in 0..pages {
        let mut at = range.start;
        while at < range.end {
            let end = (at + step).min(range.end);
            chunks.push((page..page + 1, at..end));
            at = end;
        }
    }
    chunks
}

fn set(outcomes: &mut [BackupOutcome], missing: &[Vec<bool>], pages: Range<usize>, outcome: BackupOutcome) {
    for page in pages {
        if missing.iter().any(|missing| missing[page]) {
            outcomes[page] = outcome;
        }
    }
}

/// Keys that come twice, and those that stand for a damaged entry in the index.
fn refuse_unusable(keys: &[PageKey]) -> Result<()> {
    let mut seen = std::collections::HashMap::with_capacity(keys.len());
    for (page, key) in keys.iter().enumerate() {
        if let Some(first) = seen.insert(key, page) {
            return Err(Error::config(format!(
                "expected keys of one chain, found the key of page {first} again at page {page}"
            )));
        }
    }
    match keys.iter().position(|key| short_key(key) == UNNAMED) {
        None => Ok(()),
        Some(page) => Err(Error::config(format!(
            "expected digests as keys, found one that starts with 16 zero bytes at page {page}"
        ))),
    }
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
struct Refusal {
    outcome: BackupOutcome,
    counter: Counter,
    reason: String,
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        let (outcome, counter) = match &refused {
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
    fn from_error(error: Error) -> Self {
        Refusal { outcome: BackupOutcome::Error, counter: Counter::BackupError, reason: error.to_string() }
    }
}
