//! Reading stored pages to memory of the view's layouts: where they are, one request for neighbours, what is verified,
//! what is tried again and what is given up.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hicache_sys::file::Piece;

use crate::Result;
use crate::format::block::{block_checksum, decode_block};
use crate::format::directory::Entry;
use crate::format::form::Form;
use crate::format::frame::{FrameKind, Gone, Location, Reason, encode_gone, short_key};
use crate::key::PageKey;
use crate::store::Inner;
use crate::store::chunk::{chunk_bytes, cut, pieces_checksum};
use crate::store::counters::Counter;
use crate::store::io::{IoEngine, Panicked, Read, SegmentFile, Way, is_late, late};
use crate::store::landing::Landing;
use crate::store::namespace_state::NamespaceState;
use crate::store::notices::Level;
use crate::store::restore::{RestoreOutcome, RestoreReport};
use crate::store::view::{BoundMemory, PoolState};
use crate::tile::{Span, Tile};

/// How long other threads may read the journals while a call that is late looks whether its pages are still there.
const PATIENCE: std::time::Duration = std::time::Duration::from_millis(20);

/// Stands for a panic where an error code is kept.
const PANICKED: i32 = -1;

/// A part of a page, to come from one object.
struct Part {
    page: usize,
    pool: usize,
    slot: u64,
    location: Location,
    unit_offset: u64,
    form: Form,
    seed: u64,
    landing: Arc<Landing>,
    /// 0 while nothing has failed, else the outcome; the first failure stays.
    state: AtomicU8,
    /// Blocks that have not come yet: a part is restored when each one has, not when nothing was heard of them.
    blocks_left: AtomicU32,
    /// Error code of the first failed transfer, 0 for none.
    errno: std::sync::atomic::AtomicI32,
}

impl Part {
    fn outcome(&self) -> RestoreOutcome {
        match RestoreOutcome::ALL[usize::from(self.state.load(Ordering::Acquire))] {
            RestoreOutcome::Restored if self.blocks_left.load(Ordering::Acquire) > 0 => RestoreOutcome::Error,
            outcome => outcome,
        }
    }

    /// Before the first try, and before the second.
    fn start(&self) {
        self.blocks_left
            .store(self.landing.blocks.iter().map(Range::len).sum::<usize>() as u32, Ordering::Release);
        self.state.store(0, Ordering::Release);
    }

    fn fail(&self, outcome: RestoreOutcome) {
        let _ = self.state.compare_exchange(0, outcome as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    fn fail_io(&self, error: &io::Error) {
        let is_panic = error.get_ref().is_some_and(|source| source.is::<Panicked>());
        let errno = if is_panic { PANICKED } else { error.raw_os_error().unwrap_or(0) };
        self.errno.store(errno, Ordering::Relaxed);
        self.fail(match error.kind() {
            _ if is_late(error) => RestoreOutcome::Late,
            // The file is shorter than what was written to it.
            io::ErrorKind::UnexpectedEof => RestoreOutcome::Damaged,
            _ => RestoreOutcome::Error,
        });
    }

    /// Whether trying again may help, or the object is to be given up.
    fn has_failed(&self) -> bool {
        matches!(self.outcome(), RestoreOutcome::Damaged | RestoreOutcome::Foreign | RestoreOutcome::Error)
    }

    /// Why the object should never be tried again; `None` when the fault was the machine's, not the object's.
    fn quarantine_reason(&self) -> Option<Reason> {
        match self.outcome() {
            RestoreOutcome::Damaged => Some(Reason::Damaged),
            RestoreOutcome::Foreign => Some(Reason::Foreign),
            // Out of memory or descriptors (ENOMEM, ENFILE, EMFILE), or a fault of ours: the object may be whole.
            RestoreOutcome::Error
                if matches!(self.errno.load(Ordering::Relaxed), 12 | 23 | 24 | PANICKED) =>
            {
                None
            }
            RestoreOutcome::Error => Some(Reason::Unreadable),
            _ => None,
        }
    }
}

/// Reads pages of one namespace.
pub(crate) struct Reader<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) state: &'a NamespaceState,
    pub(crate) pools: &'a [PoolState],
    /// Who carries out the reads.
    pub(crate) engine: &'a dyn IoEngine,
    /// Nothing is read that was not begun by then.
    pub(crate) deadline: Option<Instant>,
    /// Of each pool the layers that are wanted, where not all of them are.
    pub(crate) layers: Option<&'a [Span]>,
}

impl Reader<'_> {
    /// Brings pages to `memory`, one for each pool; counts nothing.
    pub(crate) fn restore(&self, keys: &[PageKey], memory: &[BoundMemory<'_>]) -> Result<RestoreReport> {
        let mut outcomes = asked_for(keys.len(), memory, RestoreOutcome::Restored);
        if !self.refresh() {
            return Ok(RestoreReport {
                outcomes: asked_for(keys.len(), memory, RestoreOutcome::Late),
                bytes: 0,
            });
        }
        let mut parts = self.locate(keys, memory, &mut outcomes)?;
        self.fetch(&parts, keys, memory);
        if parts.iter().any(|part| part.outcome() == RestoreOutcome::Evicted) {
            self.fetch_moved(&mut parts, keys, memory)?;
        }
        let mut bytes = 0;
        for part in &parts {
            let outcome = &mut outcomes[part.page];
            *outcome = (*outcome).max(part.outcome());
        }
        for part in parts.iter().filter(|part| outcomes[part.page] == RestoreOutcome::Restored) {
            bytes += part.landing.bytes;
        }
        Ok(RestoreReport { outcomes, bytes })
    }

    /// Takes in what other processes said; `false` when other threads are at it until after the deadline.
    fn refresh(&self) -> bool {
        let left = self.inner.device.clock.left(self.deadline);
        self.state.refresh_within(&self.inner.counters, left.map(|left| left.max(PATIENCE)))
    }

    /// Reads parts, and tries again what failed.
    fn fetch(&self, parts: &[Part], keys: &[PageKey], memory: &[BoundMemory<'_>]) {
        let all: Vec<&Part> = parts.iter().collect();
        self.read(&all, keys, memory, Grouping::Neighbours);
        self.look_again(&all, keys);
        let failed: Vec<&Part> = parts.iter().filter(|part| part.has_failed()).collect();
        if !failed.is_empty() {
            // A read that failed may have been one for many pages: each is asked for by itself now.
            self.read(&failed, keys, memory, Grouping::Single);
            self.look_again(&failed, keys);
            self.quarantine(&failed, keys);
        }
    }

    /// Looks for another copy of pages that were removed while they were read: a compaction moved them, or one of
    /// two copies went.
    fn fetch_moved(&self, parts: &mut Vec<Part>, keys: &[PageKey], memory: &[BoundMemory<'_>]) -> Result<()> {
        let mut again = vec![RestoreOutcome::Skipped; keys.len()];
        for part in parts.iter().filter(|part| part.outcome() == RestoreOutcome::Evicted) {
            again[part.page] = RestoreOutcome::Restored;
        }
        let moved = self.locate(keys, memory, &mut again)?;
        if moved.is_empty() {
            return Ok(());
        }
        self.fetch(&moved, keys, memory);
        parts.retain(|part| again[part.page] != RestoreOutcome::Restored);
        parts.extend(moved);
        Ok(())
    }

    /// Finds the objects that hold the pages; pages that cannot be had get their outcome.
    fn locate(
        &self,
        keys: &[PageKey],
        memory: &[BoundMemory<'_>],
        outcomes: &mut [RestoreOutcome],
    ) -> Result<Vec<Part>> {
        let index = self.state.index();
        let mut parts = Vec::new();
        for (number, (pool, memory)) in self.pools.iter().zip(memory).enumerate() {
            let coverage = pool.coverage(&index);
            for (page, (key, &slot)) in keys.iter().zip(memory.slots).enumerate() {
                let Ok(slot) = u64::try_from(slot) else { continue };
                let found = coverage.find(&index, &short_key(key));
                if found.is_empty() {
                    outcomes[page] = RestoreOutcome::Absent;
                }
                for (found, tile) in found {
                    let Some(tile) = of_layers(tile, self.layers, number) else { continue };
                    let form = *index.form(found);
                    parts.push(Part {
                        page,
                        pool: number,
                        slot,
                        location: index.location(found),
                        unit_offset: index.unit_offset(found),
                        form,
                        seed: form.seed(&self.state.fingerprint, key),
                        landing: pool.landing(&form, &tile, memory)?,
                        state: AtomicU8::new(0),
                        blocks_left: AtomicU32::new(0),
                        errno: 0.into(),
                    });
                }
            }
        }
        // A page that misses in one pool is missing: its other pools need not be read.
        parts.retain(|part| outcomes[part.page] == RestoreOutcome::Restored);
        // In the order of the disk, so that neighbours are read together.
        parts
            .sort_by_key(|part| (part.location.segment, part.location.entries_offset, part.location.ordinal));
        Ok(parts)
    }

    /// Reads and verifies the parts.
    fn read(&self, parts: &[&Part], keys: &[PageKey], memory: &[BoundMemory<'_>], grouping: Grouping) {
        parts.iter().for_each(|part| part.start());
        let files = self.files(parts);
        let entries = self.read_entries(parts, keys, &files);
        let bytes = parts.iter().map(|part| part.landing.bytes).sum();
        let chunk_bytes = chunk_bytes(bytes, self.engine.threads());
        let (mut chunks, mut reads) = (chunks(parts, &entries, grouping, chunk_bytes), Vec::new());
        chunks.retain(|chunk| {
            let (first, last) = (chunk.parts.start, chunk.parts.end - 1);
            let (Some(file), Some(start), Some(end)) =
                (&files[first], entries[first].get(), entries[last].get())
            else {
                return false;
            };
            let part = parts[first];
            let start = start.payload_offset + stored_before(start, chunk.blocks.start);
            let end = end.payload_offset + stored_before(end, chunk.blocks.end);
            let into = part.landing.is_straight.then(|| {
                let mut pieces = Vec::new();
                for part in &parts[chunk.parts.clone()] {
                    let raw = raw_range(&part.form, &chunk.blocks);
                    part.landing.pieces(raw, part.slot, &memory[part.pool].regions, &mut pieces);
                }
                pieces
            });
            reads.push(Read {
                file,
                offset: part.unit_offset.saturating_add(start),
                len: end.saturating_sub(start),
                into,
                way: if self.pools[part.pool].spec.read_by_all { Way::Shared } else { Way::Payload },
            });
            true
        });
        self.engine.read_batch(&reads, self.deadline, &|index, done| {
            let chunk = &chunks[index];
            match done {
                Ok(scratch) => self.finish_chunk(parts, &entries, memory, chunk, scratch),
                Err(error) => {
                    parts[chunk.parts.clone()].iter().for_each(|part| self.note_error(part, &error))
                }
            }
        });
    }

    /// The open segment of each part; parts whose segment does not open fail.
    fn files(&self, parts: &[&Part]) -> Vec<Option<Arc<SegmentFile>>> {
        let mut files: Vec<Option<Arc<SegmentFile>>> = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            if index > 0 && parts[index - 1].location.segment == part.location.segment {
                let same = files[index - 1].clone();
                if same.is_none() {
                    part.errno.store(parts[index - 1].errno.load(Ordering::Relaxed), Ordering::Relaxed);
                    part.fail(parts[index - 1].outcome());
                }
                files.push(same);
                continue;
            }
            if self.inner.device.clock.is_past(self.deadline) {
                part.fail(RestoreOutcome::Late);
                files.push(None);
                continue;
            }
            match self.inner.files.get(&self.state.fingerprint, part.location.segment) {
                Ok(file) => files.push(Some(file)),
                Err(error) => {
                    self.note_error(part, &error);
                    files.push(None);
                }
            }
        }
        files
    }

    /// Reads the directory entries: where exactly the bytes are, and their checksums. The full key decides here.
    fn read_entries(
        &self,
        parts: &[&Part],
        keys: &[PageKey],
        files: &[Option<Arc<SegmentFile>>],
    ) -> Vec<OnceLock<Entry>> {
        let entries: Vec<OnceLock<Entry>> = parts.iter().map(|_| OnceLock::new()).collect();
        let mut groups: Vec<Range<usize>> = Vec::new();
        for index in (0..parts.len()).filter(|&index| files[index].is_some()) {
            match groups.last_mut() {
                Some(group) if group.end == index && follows(parts[index - 1], parts[index]) => {
                    group.end = index + 1
                }
                _ => groups.push(index..index + 1),
            }
        }
        let mut reads = Vec::with_capacity(groups.len());
        for group in &groups {
            let part = parts[group.start];
            let entry_bytes = Entry::encoded_bytes(&part.form);
            let Some(file) = &files[group.start] else { continue };
            reads.push(Read {
                file,
                offset: part.location.entries_offset + u64::from(part.location.ordinal) * entry_bytes,
                len: group.len() as u64 * entry_bytes,
                into: None,
                way: Way::Cache,
            });
        }
        self.engine.read_batch(&reads, self.deadline, &|index, done| {
            let group = groups[index].clone();
            match done {
                Ok(bytes) => {
                    let entry_bytes = Entry::encoded_bytes(&parts[group.start].form) as usize;
                    for (index, bytes) in group.zip(bytes.chunks(entry_bytes)) {
                        let part = parts[index];
                        match Entry::decode(&part.form, &self.state.fingerprint, bytes) {
                            Ok(entry) if entry.key == keys[part.page] => {
                                let _ = entries[index].set(entry); // each index is in one group
                            }
                            Ok(_) => part.fail(RestoreOutcome::Foreign),
                            Err(_) => part.fail(RestoreOutcome::Damaged),
                        }
                    }
                }
                // One bad sector, or a file cut short, may spare some: take them one by one.
                Err(error) if group.len() > 1 && !is_late(&error) => {
                    self.read_entries_singly(parts, keys, files, &entries, group);
                }
                Err(error) => parts[group].iter().for_each(|part| self.note_error(part, &error)),
            }
        });
        entries
    }

    fn read_entries_singly(
        &self,
        parts: &[&Part],
        keys: &[PageKey],
        files: &[Option<Arc<SegmentFile>>],
        entries: &[OnceLock<Entry>],
        group: Range<usize>,
    ) {
        for index in group {
            let (part, Some(file)) = (parts[index], &files[index]) else { continue };
            if self.inner.device.clock.is_past(self.deadline) {
                self.note_error(part, &late());
                continue;
            }
            let entry_bytes = Entry::encoded_bytes(&part.form);
            let mut bytes = vec![0; entry_bytes as usize];
            let offset = part.location.entries_offset + u64::from(part.location.ordinal) * entry_bytes;
            match self.inner.transfers.read_small(file.path(), file.buffered(), &mut bytes, offset) {
                Ok(()) => match Entry::decode(&part.form, &self.state.fingerprint, &bytes) {
                    Ok(entry) if entry.key == keys[part.page] => {
                        let _ = entries[index].set(entry); // each index is in one group
                    }
                    Ok(_) => part.fail(RestoreOutcome::Foreign),
                    Err(_) => part.fail(RestoreOutcome::Damaged),
                },
                Err(error) => self.note_error(part, &error),
            }
        }
    }

    /// Verifies what landed, and brings what came to the scratch buffer to its place.
    fn finish_chunk(
        &self,
        parts: &[&Part],
        entries: &[OnceLock<Entry>],
        memory: &[BoundMemory<'_>],
        chunk: &Chunk,
        mut scratch: &[u8],
    ) {
        for index in chunk.parts.clone() {
            let (part, Some(entry)) = (parts[index], entries[index].get()) else { continue };
            let regions = &memory[part.pool].regions;
            let done = if part.landing.is_straight {
                self.verify_in_place(part, entry, chunk.blocks.clone(), regions)
            } else {
                self.unpack(part, entry, chunk.blocks.clone(), regions, &mut scratch)
            };
            if done {
                part.blocks_left.fetch_sub(chunk.blocks.len() as u32, Ordering::AcqRel);
            } else {
                part.fail(RestoreOutcome::Damaged);
            }
        }
    }

    fn verify_in_place(
        &self,
        part: &Part,
        entry: &Entry,
        blocks: Range<u32>,
        regions: &[&hicache_sys::Region],
    ) -> bool {
        if !self.inner.options.verify {
            return true;
        }
        let mut pieces: Vec<Piece<'_>> = Vec::new();
        blocks.into_iter().all(|block| {
            pieces.clear();
            part.landing.pieces(raw_range(&part.form, &(block..block + 1)), part.slot, regions, &mut pieces);
            let found = pieces_checksum(part.seed, block, &pieces);
            found.is_ok_and(|found| found == entry.blocks[block as usize].checksum)
        })
    }

    fn unpack(
        &self,
        part: &Part,
        entry: &Entry,
        blocks: Range<u32>,
        regions: &[&hicache_sys::Region],
        scratch: &mut &[u8],
    ) -> bool {
        let mut raw = Vec::new();
        let mut whole = true;
        for block in blocks {
            let stored = &entry.blocks[block as usize];
            let Some((bytes, rest)) = scratch.split_at_checked(stored.stored_bytes as usize) else {
                return false;
            };
            *scratch = rest;
            if self.inner.options.verify && block_checksum(part.seed, block, bytes) != stored.checksum {
                whole = false;
                continue; // the next part's bytes follow all the same
            }
            let range = raw_range(&part.form, &(block..block + 1));
            let raw_len = (range.end - range.start) as usize;
            let bytes = if bytes.len() == raw_len {
                bytes
            } else {
                raw.resize(raw_len, 0);
                if !decode_block(part.form.codec, bytes, &mut raw) {
                    whole = false;
                    continue;
                }
                &raw
            };
            whole &= part.landing.scatter(range, bytes, part.slot, regions).is_ok();
        }
        whole
    }

    /// After reading: an object that was removed meanwhile may have given zeros, or another's bytes.
    fn look_again(&self, parts: &[&Part], keys: &[PageKey]) {
        let is_known = self.refresh();
        let index = self.state.index();
        for part in parts {
            let is_there = index.has_location(&short_key(&keys[part.page]), &part.location);
            if !is_known {
                part.state.store(RestoreOutcome::Late as u8, Ordering::Release);
            } else if !is_there {
                part.state.store(RestoreOutcome::Evicted as u8, Ordering::Release);
            }
        }
    }

    /// Gives up objects that failed twice and are still there, for all processes.
    fn quarantine(&self, parts: &[&Part], keys: &[PageKey]) {
        let gone: Vec<Gone> = parts
            .iter()
            .filter_map(|part| {
                let reason = part.quarantine_reason()?;
                Some(Gone { location: part.location, key: short_key(&keys[part.page]), objects: 1, reason })
            })
            .collect();
        if gone.is_empty() {
            return;
        }
        self.state.apply_gone(&gone);
        for part in parts.iter().filter(|part| part.errno.load(Ordering::Relaxed) == 2) {
            // ENOENT: somebody took the file away by hand, and with it all its other pages.
            self.state.forget_segment(part.location.segment);
        }
        self.inner.counters.add(Counter::Quarantined, gone.len() as u64);
        for part in parts.iter().filter(|part| part.quarantine_reason().is_some()) {
            self.inner.notices.push(Level::Warning, part.outcome().name(), || {
                format!(
                    "page {} of pool {} in {} at byte {}: {}; it is given up and counted as missing",
                    keys[part.page],
                    self.pools[part.pool].spec.pool.name(),
                    part.location.segment,
                    part.location.entries_offset,
                    part.outcome().name()
                )
            });
        }
        if !self.inner.options.read_only {
            for records in gone.chunks(1 << 16) {
                // If it cannot be said now, the next process finds the same damage.
                let (count, body) = (records.len() as u32, encode_gone(records));
                let _ = self.inner.say(FrameKind::Quarantine, self.state.fingerprint, count, &body);
            }
        }
    }

    fn note_error(&self, part: &Part, error: &io::Error) {
        part.fail_io(error);
        if part.outcome() == RestoreOutcome::Error {
            self.inner.notices.push(Level::Warning, "read-error", || {
                format!("cannot read {}: {error}", part.location.segment)
            });
        }
    }
}

/// The part of `tile` that is wanted of pool `number`; `None` where nothing is.
pub(crate) fn of_layers(tile: Tile, layers: Option<&[Span]>, number: usize) -> Option<Tile> {
    match layers {
        None => Some(tile),
        Some(layers) => Some(Tile { layers: tile.layers.intersect(layers.get(number)?)?, ..tile }),
    }
}

/// `outcome` for each page that has a slot in some pool.
pub(crate) fn asked_for(
    pages: usize,
    memory: &[BoundMemory<'_>],
    outcome: RestoreOutcome,
) -> Vec<RestoreOutcome> {
    let is_asked_for = |page| memory.iter().any(|memory| memory.slots[page] >= 0);
    (0..pages).map(|page| if is_asked_for(page) { outcome } else { RestoreOutcome::Skipped }).collect()
}

/// How many pages one request reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grouping {
    /// As many as lie behind each other.
    Neighbours,
    /// One.
    Single,
}

/// Neighbouring parts read with one request: of all of them the blocks `blocks`.
struct Chunk {
    parts: Range<usize>,
    blocks: Range<u32>,
}

/// Cuts the parts whose entries are known into chunks of about `chunk_bytes`.
fn chunks(parts: &[&Part], entries: &[OnceLock<Entry>], grouping: Grouping, chunk_bytes: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut first = 0;
    while first < parts.len() {
        let mut end = first + 1;
        if entries[first].get().is_none() {
            first = end;
            continue;
        }
        while grouping == Grouping::Neighbours && end < parts.len() && continues(parts, entries, end) {
            end += 1;
        }
        let (form, blocks) = (&parts[first].form, &parts[first].landing.blocks);
        let block_bytes = u64::from(form.block_bytes);
        for range in blocks {
            let bytes = raw_range(form, range);
            let is_whole = bytes == (0..form.page_bytes);
            // Pages of which only some blocks are wanted do not follow each other on disk.
            let step = if is_whole { end - first } else { 1 };
            let groups = (first..end).step_by(step).map(|from| from..from + step);
            for group in groups {
                chunks.extend(cut(form, group.len(), bytes.clone(), chunk_bytes).into_iter().map(
                    |(pages, bytes)| Chunk {
                        parts: group.start + pages.start..group.start + pages.end,
                        blocks: (bytes.start / block_bytes) as u32..bytes.end.div_ceil(block_bytes) as u32,
                    },
                ));
            }
        }
        first = end;
    }
    chunks
}

/// Whether part `index` lies right behind the one before it and lands the same way.
fn continues(parts: &[&Part], entries: &[OnceLock<Entry>], index: usize) -> bool {
    let (before, part) = (parts[index - 1], parts[index]);
    let (Some(entry_before), Some(entry)) = (entries[index - 1].get(), entries[index].get()) else {
        return false;
    };
    follows(before, part)
        && Arc::ptr_eq(&before.landing, &part.landing)
        && entry.payload_offset == entry_before.payload_offset.saturating_add(entry_before.stored_bytes())
}

/// Whether `part` is the next page of the same run as `before`.
fn follows(before: &Part, part: &Part) -> bool {
    before.location.segment == part.location.segment
        && before.location.entries_offset == part.location.entries_offset
        && before.location.ordinal + 1 == part.location.ordinal
}

/// Stored bytes of a page before block `block`.
fn stored_before(entry: &Entry, block: u32) -> u64 {
    entry.blocks[..block as usize].iter().map(|block| u64::from(block.stored_bytes)).sum()
}

/// Raw bytes of some blocks of a page.
fn raw_range(form: &Form, blocks: &Range<u32>) -> Range<u64> {
    let block_bytes = u64::from(form.block_bytes);
    u64::from(blocks.start) * block_bytes..(u64::from(blocks.end) * block_bytes).min(form.page_bytes)
}
