//! Moving what still lives out of segments that are nearly empty, so that files and journals stay few, and small
//! pages that share a disk block with dead ones do not hold it for ever.
//!
//! Copies are published first, then the old ones are removed: a reader in between finds one of them. The bytes move
//! as they are stored, verified on the way.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::io;
use std::sync::Arc;

use hicache_sys::file::{self, Access};

use crate::format::SegmentId;
use crate::format::directory::{Directory, Entry};
use crate::format::frame::{Gone, Location, Reason, short_key};
use crate::namespace::Fingerprint;
use crate::store::catalog::LiveRun;
use crate::store::counters::Counter;
use crate::store::namespace_state::NamespaceState;
use crate::store::notices::Level;
use crate::store::publish::consecutive;
use crate::store::stored_run::{self, Origin, Stretch};
use crate::store::{Inner, recover};

/// Bytes published at once.
const UNIT_BYTES: u64 = 32 << 20;

/// A segment is worth the copying when its blocks on disk hold this many times what is live in them.
const WASTE: u64 = 2;

/// More segments than this for each one that the capacity holds, and sparse ones go even if their blocks are gone.
const MOST_SEGMENTS: u64 = 4;

/// Moves what lives in one sparse segment, if there is one worth it. Only a process that evicts knows of any.
pub(crate) fn one_sparse_segment(inner: &Inner) {
    let Some(work) = inner.with_catalog(|warm| find(inner, warm)).flatten() else { return };
    match copy(inner, &work) {
        Ok(gone) if gone.is_empty() => {}
        Ok(gone) => {
            let objects = gone.iter().map(|record| u64::from(record.objects)).sum();
            inner.counters.add(Counter::CompactedObjects, objects);
            if let Err(error) = inner.remove_copied(work.namespace, &gone) {
                note(inner, &work, &error);
            }
        }
        Err(error) => note(inner, &work, &error),
    }
}

fn note(inner: &Inner, work: &Work, error: &io::Error) {
    inner.notices.push(Level::Warning, "compaction", || {
        format!("cannot move pages out of sparse segment {}: {error}", work.segment)
    });
}

/// A segment and what lives in it.
struct Work {
    namespace: Fingerprint,
    segment: SegmentId,
    runs: Vec<LiveRun>,
}

fn find(inner: &Inner, warm: &super::evict::Warm) -> Option<Work> {
    let capacity = inner.budget.capacity();
    let has_too_many =
        warm.catalog.segments().len() as u64 > MOST_SEGMENTS * (capacity / inner.segment_bytes()).max(1);
    let mut sparse = warm.catalog.sparse();
    sparse.retain(|sparse| warm.is_finished(&inner.paths, sparse.namespace, sparse.segment));
    // Least to copy for what comes back.
    sparse.sort_by_key(|sparse| sparse.live_bytes);
    let is_worth_it = |sparse: &&super::catalog::Sparse| {
        let path = inner.paths.segment(&sparse.namespace, sparse.segment);
        let on_disk = std::fs::symlink_metadata(path).map_or(0, |metadata| file::allocated_bytes(&metadata));
        has_too_many || on_disk > WASTE * sparse.live_bytes + inner.segment_bytes() / 8
    };
    let found = sparse.iter().find(is_worth_it)?;
    let runs = warm.catalog.live_runs(found.namespace, found.segment);
    Some(Work { namespace: found.namespace, segment: found.segment, runs })
}

/// Publishes copies of what lives in the segment; what was copied, to be removed there.
fn copy(inner: &Inner, work: &Work) -> io::Result<Vec<Gone>> {
    let path = inner.paths.segment(&work.namespace, work.segment);
    let file = file::open_read(&path, Access::Buffered)?;
    let header = recover::read_header(&file).map_err(io::Error::other)?;
    let state = inner.namespace(&header.namespace);
    state.refresh(&inner.counters);
    let file_bytes = file.metadata()?.len();
    let mut directories: HashMap<u64, Option<Directory>> = HashMap::new();
    let mut batch = Batch {
        inner,
        state,
        generation: header.generation,
        stretches: Vec::new(),
        bytes: 0,
        written_ns: None,
        pending: Vec::new(),
        gone: Vec::new(),
    };
    for live in &work.runs {
        let directory = match directories.entry(live.place.directory_offset) {
            Slot::Occupied(slot) => slot.into_mut(),
            Slot::Vacant(slot) => {
                slot.insert(recover::read_directory(&file, live.place.directory_offset, file_bytes)?)
            }
        };
        let Some(directory) = directory else { continue };
        let at = live.place.entries_offset.wrapping_sub(live.place.directory_offset);
        let Some(read) = directory.runs.iter().find(|read| read.entries_offset == at) else { continue };
        let mut wanted = vec![false; read.entries.len()];
        let mut stored: Vec<Vec<u8>> = vec![Vec::new(); read.entries.len()];
        for stretch in &live.stretches {
            for (ordinal, key) in (stretch.first as usize..).zip(&stretch.keys) {
                let entry = read.entries.get(ordinal).and_then(Option::as_ref);
                let Some(entry) = entry.filter(|entry| short_key(&entry.key) == *key) else { continue };
                let bytes = read_stored(&file, live.place.unit_offset, entry)?;
                // What does not verify stays where it is, for a reader to give up.
                wanted[ordinal] = stored_run::is_whole(&work.namespace, &read.run, entry, &bytes);
                stored[ordinal] = bytes;
            }
        }
        for pages in consecutive(&wanted, 0..wanted.len()) {
            let Some(first) = read.entries[pages.start].as_ref() else { continue };
            let location = Location {
                segment: work.segment,
                entries_offset: live.place.entries_offset,
                ordinal: pages.start as u32,
            };
            let (key, objects) = (short_key(&first.key), pages.len() as u32);
            let payload = stored[pages.clone()].concat();
            let record = Gone { location, key, objects, reason: Reason::Duplicate };
            batch.add(Stretch::new(read, pages, payload), record, live.written_ns)?;
        }
    }
    batch.publish()?;
    Ok(batch.gone)
}

/// Stretches on their way into one unit.
struct Batch<'a> {
    inner: &'a Inner,
    state: Arc<NamespaceState>,
    generation: u64,
    stretches: Vec<Stretch>,
    bytes: u64,
    /// The oldest of them, which the unit says of all: none lives longer by being moved.
    written_ns: Option<u64>,
    pending: Vec<Gone>,
    gone: Vec<Gone>,
}

impl Batch<'_> {
    fn add(&mut self, stretch: Stretch, record: Gone, written_ns: u64) -> io::Result<()> {
        self.bytes += stretch.bytes();
        self.written_ns = Some(self.written_ns.map_or(written_ns, |oldest| oldest.min(written_ns)));
        self.stretches.push(stretch);
        self.pending.push(record);
        if self.bytes >= UNIT_BYTES { self.publish() } else { Ok(()) }
    }

    fn publish(&mut self) -> io::Result<()> {
        if self.stretches.is_empty() {
            return Ok(());
        }
        let stretches = std::mem::take(&mut self.stretches);
        let origin =
            self.written_ns.take().map(|written_ns| Origin { written_ns, generation: self.generation });
        stored_run::publish(self.inner, &self.state, stretches, origin)?;
        self.gone.append(&mut self.pending);
        self.bytes = 0;
        Ok(())
    }
}

fn read_stored(file: &std::fs::File, unit_offset: u64, entry: &Entry) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::other("a directory entry past the end of any file");
    let offset = unit_offset.checked_add(entry.payload_offset).ok_or_else(too_long)?;
    let mut bytes = vec![0; usize::try_from(entry.stored_bytes()).map_err(|_| too_long())?];
    file::read_exact(file, &mut bytes, offset)?;
    Ok(bytes)
}
