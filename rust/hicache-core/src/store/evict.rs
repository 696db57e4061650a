//! Making room: one round of eviction, by whichever process holds the root's `evict` lock.
//!
//! The order is: everybody is told that pages leave, then their blocks are given back, then a file with nothing
//! left in it is unlinked. A reader that is in between finds the remove when it looks again after reading.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use hicache_sys::file::{self, Access};
use hicache_sys::lock::FileLock;

use crate::format::directory::Entry;
use crate::format::frame::{self, Frame, FrameKind, Gone, Reason, encode_gone};
use crate::format::root::decode_generation;
use crate::format::{ProcessId, SegmentId};
use crate::namespace::Fingerprint;
use crate::store::catalog::{Catalog, RunPlace, Victim};
use crate::store::counters::Counter;
use crate::store::paths::Paths;
use crate::store::tail::{Tail, is_alive};
use crate::store::{Inner, recover, root};

/// Records in one remove frame: few enough for the room that a journal has ahead, so that a full disk can be told
/// of removes.
const RECORDS_AT_ONCE: usize = 512;

/// Stored bytes that leave at once.
const STEP_BYTES: u64 = 32 << 20;

/// The catalog of a process that has not evicted for so long is given up.
const IDLE: Duration = Duration::from_secs(60);

/// What a round is to do.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Want {
    /// About so many stored bytes are to leave, the least useful pages first.
    Bytes(u64),
    /// Pages recorded before this moment leave, ns since 1970.
    RecordedBefore(u64),
    /// Pages last used before this moment leave, ns since 1970.
    UnusedSince(u64),
    /// Nothing leaves; blocks of what left before are given back.
    Leftovers,
}

/// What a round gave.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Freed {
    /// Objects that left.
    pub objects: u64,
    /// Bytes on disk that went back.
    pub bytes: u64,
}

impl Freed {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Freed) -> Freed {
        Freed { objects: self.objects + other.objects, bytes: self.bytes + other.bytes }
    }
}

/// How a round ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Round {
    /// It was carried out.
    Done(Freed),
    /// Another process, or another thread, is evicting.
    Elsewhere,
}

/// This process's knowledge of the whole root, while it evicts.
#[derive(Default)]
pub(crate) struct Evictor {
    warm: Mutex<Option<Warm>>,
    quiet_until: Mutex<Option<Instant>>,
}

pub(crate) struct Warm {
    pub(crate) catalog: Catalog,
    tail: Tail,
    /// Segments that will not grow.
    sealed: HashSet<SegmentId>,
    /// Whether the journals were read once.
    is_read: bool,
    used_at: Instant,
}

impl Evictor {
    /// Whether waiting for another process was in vain lately.
    pub(crate) fn is_quiet(&self) -> bool {
        lock(&self.quiet_until).is_some_and(|until| Instant::now() < until)
    }

    /// Gives up waiting for others for a while.
    pub(crate) fn be_quiet(&self, time: Duration) {
        *lock(&self.quiet_until) = Some(Instant::now() + time);
    }

    /// Whether this process evicted lately.
    pub(crate) fn is_warm(&self) -> bool {
        self.warm.try_lock().is_ok_and(|warm| warm.is_some())
    }

    /// Gives the catalog's memory back when it has not been needed for a while.
    pub(crate) fn forget_if_idle(&self) {
        if let Ok(mut warm) = self.warm.try_lock()
            && warm.as_ref().is_some_and(|warm| warm.used_at.elapsed() > IDLE)
        {
            *warm = None;
        }
    }
}

impl Warm {
    fn new(paths: &Paths) -> Self {
        Warm {
            catalog: Catalog::default(),
            tail: Tail::new(paths.clone()),
            sealed: HashSet::new(),
            is_read: false,
            used_at: Instant::now(),
        }
    }

    /// Whether a segment will not grow any more.
    pub(crate) fn is_finished(&self, paths: &Paths, namespace: Fingerprint, segment: SegmentId) -> bool {
        let has_seal = || {
            let file = file::open_read(&paths.segment(&namespace, segment), Access::Buffered).ok()?;
            recover::read_seal(&file, file::file_len(&file).ok()?).ok()
        };
        // A journal written anew does not tell of seals.
        self.sealed.contains(&segment) || !is_alive(paths, segment.process) || has_seal().is_some()
    }

    /// Takes in what all processes said.
    fn refresh(&mut self, paths: &Paths) {
        let Warm { catalog, tail, sealed, is_read, .. } = self;
        let mut removes: Vec<(Fingerprint, Vec<Gone>)> = Vec::new();
        let report = tail.poll(&mut |frame| take(catalog, sealed, &mut removes, frame));
        if report.complete {
            // Adds of removes that came with an earlier look would be known by now.
            catalog.settle();
        }
        for (namespace, records) in removes {
            catalog.remove(namespace, &records);
        }
        if report.journals_gone || !*is_read {
            // Whoever wrote a journal anew left out the removes of segments that are gone.
            let is_gone = |path: PathBuf| {
                std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            };
            for (namespace, segment) in catalog.segments() {
                if is_gone(paths.segment(&namespace, segment)) {
                    catalog.forget_segment(namespace, segment);
                }
            }
        }
        *is_read = true;
        for name in root::list(&paths.namespaces()) {
            let Ok(namespace) = name.parse::<Fingerprint>() else { continue };
            let path = paths.generation(&namespace);
            if let Some(generation) =
                root::read_file(&path, 64).ok().and_then(|bytes| decode_generation(&bytes))
            {
                catalog.raise_generation(namespace, generation);
            }
        }
    }
}

fn take(
    catalog: &mut Catalog,
    sealed: &mut HashSet<SegmentId>,
    removes: &mut Vec<(Fingerprint, Vec<Gone>)>,
    frame: &Frame<'_>,
) {
    let namespace = frame.namespace;
    // What does not decode is counted by whoever follows the journal for its pages.
    match frame.kind {
        FrameKind::Add => {
            let _ = frame::decode_add(frame.body, |unit, run| {
                catalog.add(namespace, unit, &run, frame.written_ns)
            });
        }
        FrameKind::Remove | FrameKind::Quarantine => {
            removes.extend(frame::decode_gone(frame.body).map(|records| (namespace, records)));
        }
        FrameKind::Touch => {
            if let Ok(keys) = frame::decode_touch(frame.body) {
                catalog.touch(namespace, keys, frame.written_ns);
            }
        }
        FrameKind::Seal => sealed.extend(frame::decode_seal(frame.body).map(|(segment, _)| segment)),
        FrameKind::Counters
        | FrameKind::Checkpoint
        | FrameKind::Inherited
        | FrameKind::Setup
        | FrameKind::Other(_) => {}
    }
}

impl Inner {
    /// One round of eviction.
    ///
    /// # Errors
    /// When the lock cannot be taken or nobody can be told of the removes; nothing left then that was not told of.
    pub(crate) fn evict(&self, want: Want) -> io::Result<Round> {
        let mut slot = match self.evictor.warm.try_lock() {
            Ok(slot) => slot,
            Err(TryLockError::WouldBlock) => return Ok(Round::Elsewhere),
            Err(TryLockError::Poisoned(poisoned)) => {
                // What the thread that panicked left half done is read anew.
                let mut slot = poisoned.into_inner();
                *slot = None;
                self.evictor.warm.clear_poison();
                slot
            }
        };
        if slot.is_none() {
            // The long part, which must not keep others from evicting.
            slot.insert(Warm::new(&self.paths)).refresh(&self.paths);
        }
        let Some(lock) = FileLock::try_exclusive(&self.paths.evict())? else {
            return Ok(Round::Elsewhere);
        };
        self.sign(&lock);
        // So that the pages which are used just now stay.
        self.leave_touches();
        let warm = slot.get_or_insert_with(|| Warm::new(&self.paths));
        warm.used_at = Instant::now();
        warm.refresh(&self.paths);
        let freed = match want {
            Want::Bytes(bytes) => self.remove_bytes(warm, bytes),
            Want::RecordedBefore(time) => {
                let victims = warm.catalog.choose_recorded_before(time);
                self.remove(warm, &victims, Reason::Expired)
            }
            Want::UnusedSince(time) => {
                let victims = warm.catalog.choose_unused_since(time);
                self.remove(warm, &victims, Reason::Evicted)
            }
            Want::Leftovers => self.remove(warm, &[], Reason::Evicted),
        };
        if freed.is_err() {
            // The catalog gave these pages up already: it is read anew the next time.
            *slot = None;
        }
        freed.map(Round::Done)
    }

    /// Leaves this process's name in the lock's file: whoever evicts goes on doing so, and the others need not know
    /// the whole root.
    fn sign(&self, lock: &FileLock) {
        let name = self.process.to_string();
        let is_signed = root::read_file(&self.paths.evict(), 64).is_ok_and(|bytes| bytes == name.as_bytes());
        if !is_signed {
            // A hint, which may be missing.
            let _ = file::write_all(lock.file(), name.as_bytes(), 0);
        }
    }

    /// Reads the whole root, unless a living process did so.
    pub(crate) fn get_ready_to_evict(&self) {
        let signed = root::read_file(&self.paths.evict(), 64).ok();
        let evictor = signed.and_then(|bytes| std::str::from_utf8(&bytes).ok()?.parse::<ProcessId>().ok());
        if evictor.is_some_and(|evictor| evictor != self.process && is_alive(&self.paths, evictor)) {
            return;
        }
        if let Ok(Some(lock)) = FileLock::try_exclusive(&self.paths.evict()) {
            self.sign(&lock);
            drop(lock);
            self.evict_aside(Want::Leftovers);
        }
    }

    /// Shows the catalog as it is now, if this process evicted lately.
    pub(crate) fn with_catalog<R>(&self, look: impl FnOnce(&Warm) -> R) -> Option<R> {
        let mut slot = lock(&self.evictor.warm);
        let warm = slot.as_mut()?;
        warm.refresh(&self.paths);
        Some(look(warm))
    }

    /// Removes objects of which this process just published copies, and gives their blocks back.
    pub(crate) fn remove_copied(&self, namespace: Fingerprint, gone: &[Gone]) -> io::Result<()> {
        self.tell_removed(namespace, gone)?;
        self.evict_aside(Want::Leftovers);
        Ok(())
    }

    /// Tells everybody that objects leave.
    fn tell_removed(&self, namespace: Fingerprint, gone: &[Gone]) -> io::Result<()> {
        for records in gone.chunks(RECORDS_AT_ONCE) {
            self.say(FrameKind::Remove, namespace, records.len() as u32, &encode_gone(records))?;
            if let Some(state) = self.known_namespace(&namespace) {
                state.apply_gone(records);
            }
        }
        Ok(())
    }

    /// A round of no hurry: what goes wrong is told in the log.
    pub(crate) fn evict_aside(&self, want: Want) {
        if let Err(error) = self.evict(want) {
            self.notices
                .push(crate::store::notices::Level::Warning, "eviction", || format!("cannot evict: {error}"));
        }
    }

    /// Removes pages of `bytes` in all, some at a time: what was given back makes room to tell of the next ones.
    fn remove_bytes(&self, warm: &mut Warm, bytes: u64) -> io::Result<Freed> {
        let mut freed = Freed::default();
        let mut left = bytes;
        loop {
            let victims = warm.catalog.choose(left.min(STEP_BYTES));
            let chosen: u64 = victims.iter().map(|victim| victim.bytes).sum();
            let step = self.remove(warm, &victims, Reason::Evicted)?;
            freed = freed.plus(step);
            left = left.saturating_sub(chosen.max(1));
            if victims.is_empty() || left == 0 {
                return Ok(freed);
            }
        }
    }

    /// Tells all of the victims and gives their blocks back.
    fn remove(&self, warm: &mut Warm, victims: &[Victim], reason: Reason) -> io::Result<Freed> {
        let mut freed = Freed::default();
        let mut by_namespace: BTreeMap<Fingerprint, Vec<Gone>> = BTreeMap::new();
        for victim in victims {
            by_namespace.entry(victim.namespace).or_default().push(victim.gone(reason));
            freed.objects += u64::from(victim.count);
        }
        for (namespace, gone) in by_namespace {
            self.tell_removed(namespace, &gone)?;
        }
        freed.bytes = self.give_blocks_back(warm);
        let counter = match reason {
            Reason::Expired => Counter::ExpiredObjects,
            _ => Counter::EvictedObjects,
        };
        self.counters.add(counter, freed.objects);
        self.counters.add(Counter::EvictedBytes, freed.bytes);
        Ok(freed)
    }

    /// Punches what is dead in all segments, and unlinks those with nothing left. Bytes that went back.
    pub(crate) fn give_blocks_back(&self, warm: &mut Warm) -> u64 {
        let before = self.budget.before_freeing();
        let mut by_owner: HashMap<ProcessId, u64> = HashMap::new();
        for (namespace, segment) in warm.catalog.changed() {
            let is_finished = warm.is_finished(&self.paths, namespace, segment);
            let bytes = self.free_segment(warm, namespace, segment, is_finished);
            *by_owner.entry(segment.process).or_default() += bytes;
        }
        let by_owner: Vec<(ProcessId, u64)> = by_owner.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        if !by_owner.is_empty() {
            self.budget.freed(before, &by_owner);
        }
        by_owner.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes on disk that went back.
    fn free_segment(
        &self,
        warm: &mut Warm,
        namespace: Fingerprint,
        segment: SegmentId,
        is_finished: bool,
    ) -> u64 {
        let path = self.paths.segment(&namespace, segment);
        let file = match file::open_write(&path, Access::Buffered) {
            Ok(file) => file,
            Err(error) => {
                // Already gone is as good. What cannot be opened now keeps its blocks until the next round.
                if error.kind() == io::ErrorKind::NotFound {
                    warm.catalog.forget_segment(namespace, segment);
                }
                return 0;
            }
        };
        let allocated = || file.metadata().map_or(0, |metadata| file::allocated_bytes(&metadata));
        let before = allocated();
        let mut entry_start = |place: &RunPlace, ordinal| entry_start(&file, namespace, place, ordinal);
        let free = warm.catalog.free_ranges(namespace, segment, is_finished, &mut entry_start);
        if free.is_empty && is_finished {
            // First the blocks, then the name: readers may still hold the file open.
            let emptied = file.set_len(0);
            if emptied.is_ok() && std::fs::remove_file(&path).is_ok() {
                warm.catalog.forget_segment(namespace, segment);
                warm.sealed.remove(&segment);
                self.files.forget(&namespace, segment);
            }
        } else {
            for range in free.ranges {
                // A file system that cannot punch gives the blocks back with the whole segment.
                let _ = file::punch_hole(&file, range.start, range.end - range.start);
            }
        }
        before.saturating_sub(allocated())
    }
}

/// Where the bytes of an object start in its segment, as its directory entry says.
fn entry_start(file: &std::fs::File, namespace: Fingerprint, place: &RunPlace, ordinal: u32) -> Option<u64> {
    let bytes = Entry::encoded_bytes(&place.form);
    let mut out = vec![0; usize::try_from(bytes).ok()?];
    let offset = u64::from(ordinal).checked_mul(bytes)?.checked_add(place.entries_offset)?;
    file::read_exact(file, &mut out, offset).ok()?;
    let entry = Entry::decode(&place.form, &namespace, &out).ok()?;
    place.unit_offset.checked_add(entry.payload_offset)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
