//! What this process knows of one namespace: its index, kept up to date from the journals.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use hicache_sys::lock::FileLock;

use crate::format::frame::{self, AddRun, AddUnit, Frame, FrameKind, Gone, ShortKey, short_key};
use crate::format::root::{decode_generation, encode_generation, pretty};
use crate::format::{ProcessId, SegmentId};
use crate::key::PageKey;
use crate::namespace::{Fingerprint, Namespace};
use crate::pool::Pool;
use crate::store::backup::ChainStart;
use crate::store::counters::{Counter, Counters};
use crate::store::index::{Duplicate, Index, Interest};
use crate::store::lookups::Lookups;
use crate::store::matching::Match;
use crate::store::news::{Listener, TRUSTED, Teller};
use crate::store::notices::{Level, Notices};
use crate::store::paths::{Paths, parse_lock_name};
use crate::store::recover::{self, KnownUnits};
use crate::store::root;
use crate::store::segment_writer::SegmentWriter;
use crate::store::tail::{Tail, TailReport, is_alive};
use crate::store::turn::{Taken, Turn};
use crate::{Error, ErrorKind, Result};

/// How long `clear` waits for another process that clears.
const CLEAR_PATIENCE: Duration = Duration::from_secs(5);

/// One namespace as this process sees it.
pub struct NamespaceState {
    /// The namespace.
    pub namespace: Namespace,
    /// Its identity, and the name of its folder.
    pub fingerprint: Fingerprint,
    /// This process's segments.
    pub writer: SegmentWriter,
    /// The generation up to which this process has given up its segments.
    pub(crate) left_generation: AtomicU64,
    paths: Paths,
    index: RwLock<Index>,
    // Taken before `index`, never after it.
    tail: Turn<Tailing>,
    /// Last pages of prefixes that were used, not told of yet.
    touches: Mutex<Vec<ShortKey>>,
    /// Tells of a new generation; what a journal says is told by the journal.
    news: Teller,
    /// What came before the first missing page of the latest look-ups, whichever view asked.
    lookups: Mutex<Lookups>,
}

/// Most uses that wait to be told of; more are forgotten, recency being a hint.
const MOST_TOUCHES: usize = 1 << 16;

struct Tailing {
    tail: Tail,
    listener: Listener,
    /// When all that was said was last taken in, and the number that was told before it.
    looked: Option<(Instant, u64)>,
    generation_file: Option<(u64, io::Result<std::time::SystemTime>)>,
    /// Removes whose add was not read before them: it comes with the next look at all journals, or was of no
    /// interest here.
    pending: Vec<Gone>,
}

/// What is known while all journals are read for the first time.
struct Loading {
    /// Segments that were in the folder before.
    there: HashSet<SegmentId>,
    /// Bodies of adds of other segments: of ones that are gone, mostly, or that came since.
    deferred: Vec<Vec<u8>>,
    known: KnownUnits,
}

impl Loading {
    /// Takes note that a journal told of this unit.
    fn know(&mut self, unit: &AddUnit) {
        self.known.entry(unit.segment).or_default().push((unit.unit_offset, unit.unit_bytes));
    }
}

impl NamespaceState {
    /// State of `namespace`, nothing read yet.
    pub fn new(paths: Paths, namespace: Namespace, process: ProcessId, segment_bytes: u64) -> Self {
        NamespaceState {
            fingerprint: namespace.fingerprint(),
            writer: SegmentWriter::new(paths.clone(), namespace.clone(), process, segment_bytes),
            namespace,
            left_generation: AtomicU64::new(0),
            index: RwLock::new(Index::new(process)),
            tail: Turn::new(Tailing {
                tail: Tail::new(paths.clone()),
                listener: Listener::new(&paths),
                looked: None,
                generation_file: None,
                pending: Vec::new(),
            }),
            touches: Mutex::default(),
            news: Teller::new(&paths),
            lookups: Mutex::default(),
            paths,
        }
    }

    /// Takes note that the first `pages` of a chain were used: the last one stands for all.
    pub fn touch(&self, keys: &[PageKey], pages: usize) {
        let Some(last) = pages.checked_sub(1).and_then(|last| keys.get(last)) else { return };
        let last = short_key(last);
        let mut touches = self.touches.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if touches.last() != Some(&last) && touches.len() < MOST_TOUCHES {
            touches.push(last);
        }
    }

    /// Takes the uses that wait, each page once, the latest use last.
    pub fn take_touches(&self) -> Vec<ShortKey> {
        let mut touches =
            std::mem::take(&mut *self.touches.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        let mut seen = HashSet::with_capacity(touches.len());
        touches.reverse();
        touches.retain(|key| seen.insert(*key));
        touches.reverse();
        touches
    }

    /// Takes note of what comes before the first page that a look-up of `keys` missed: over all pools, and in each.
    pub(crate) fn note_lookup(&self, keys: &[PageKey], answer: &Match) {
        let mut lookups = self.lookups.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        lookups.note(keys, answer.pages);
        for pool in answer.pools.iter().filter(|pool| pool.pages != answer.pages) {
            lookups.note(keys, pool.pages);
        }
    }

    /// Where a chain that starts with `first` stands, if a look-up told.
    pub(crate) fn known_start(&self, first: &PageKey) -> Option<ChainStart> {
        self.lookups.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).start(first)
    }

    /// The index, for look-ups.
    pub fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn tailing(&self) -> Taken<'_, Tailing> {
        self.tail.take()
    }

    /// Makes the folder and describes the namespace and `pools` in words, where that is not done yet.
    pub fn describe(&self, process: ProcessId, pools: &[&Pool]) -> Result<()> {
        let folder = self.paths.namespace(&self.fingerprint);
        match std::fs::create_dir(&folder) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => refuse_link(&folder)?,
            Err(error) => return Err(Error::io("cannot create", &folder, error)),
        }
        let manifest = pretty(&self.namespace.to_json());
        self.publish_words(process, &self.paths.manifest(&self.fingerprint), &manifest)?;
        for pool in pools {
            let path = self.paths.pool(&self.fingerprint, &pool.fingerprint());
            self.publish_words(process, &path, &pretty(&pool.to_json()))?;
        }
        Ok(())
    }

    /// Puts `bytes` at `path` unless just these are there: what else stands under a fingerprint is damage.
    fn publish_words(&self, process: ProcessId, path: &std::path::Path, bytes: &[u8]) -> Result<()> {
        if root::read_file(path, 1 << 20).is_ok_and(|found| found == bytes) {
            return Ok(());
        }
        let folder = self.paths.namespace(&self.fingerprint);
        let temporary = Paths::temporary(&folder, process, crate::store::next_temporary());
        hicache_sys::file::publish_replacing(path, &temporary, bytes)
            .map_err(|error| Error::io("cannot write", path, error))
    }

    /// Takes out objects that this process removed or found unusable.
    pub fn apply_gone(&self, records: &[Gone]) {
        let mut index = self.index_mut();
        for record in records {
            index.apply_gone(record);
        }
    }

    /// Takes out a segment whose file was found missing.
    pub fn forget_segment(&self, segment: SegmentId) {
        self.index_mut().forget_segment(segment);
    }

    /// Copies of this process's own that are needless.
    pub fn take_duplicates(&self) -> Vec<Duplicate> {
        if self.index().has_duplicates() { self.index_mut().take_duplicates() } else { Vec::new() }
    }

    /// Takes in what a new view is interested in; what was skipped before is read again.
    pub fn add_interests(&self, interests: &[Interest], counters: &Counters, notices: &Notices) {
        let mut tailing = self.tailing();
        let mut index = self.index_mut();
        let mut is_new = false;
        for interest in interests {
            is_new |= index.add_interest(*interest);
        }
        if !is_new {
            return;
        }
        index.start_loading();
        tailing.tail = Tail::new(self.paths.clone());
        tailing.looked = None;
        tailing.pending.clear();
        // Before the journals are read: a writer that is dead by now has said all it ever will.
        let there = self.segments_there().unwrap_or_default();
        let finished = self.finished_segments(&there);
        let mut loading = Loading { there, deferred: Vec::new(), known: KnownUnits::new() };
        self.look_at_generation(&mut tailing, |generation| index.raise_generation(generation));
        let mut removes = Vec::new();
        let report = tailing.tail.poll(&mut |frame| {
            if frame.namespace == self.fingerprint {
                self.apply(&mut index, frame, counters, &mut removes, Some(&mut loading));
            }
        });
        counters.add(Counter::JournalDamage, report.damaged_stretches);
        self.add_deferred(&mut index, &mut loading);
        self.recover(&mut index, &finished, loading.known, counters, notices);
        tailing.pending = removes;
        if report.journals_gone {
            // A segment that was there when its add was read may have gone since, and with it the frames that said so.
            self.forget_missing_segments(&mut index);
        }
        // Also those of units that only a directory told of.
        tailing.pending.retain(|record| !index.apply_gone(record));
        index.finish_loading();
    }

    /// [`NamespaceState::refresh`] if anybody may have said anything. A process that is killed before it told is
    /// heard up to [`TRUSTED`] later: good enough for a look-up, since a restore looks for itself.
    pub fn refresh_if_told(&self, counters: &Counters) {
        let tailing = self.tailing();
        let is_up_to_date = tailing
            .looked
            .is_some_and(|(at, number)| at.elapsed() < TRUSTED && tailing.listener.last() == Some(number));
        if !is_up_to_date {
            self.refresh_with(tailing, counters);
        }
    }

    /// Takes in what all processes said since the last call.
    pub fn refresh(&self, counters: &Counters) {
        self.refresh_with(self.tailing(), counters);
    }

    /// [`NamespaceState::refresh`], unless another thread is at it for longer than `patience`; whether it was done.
    pub(crate) fn refresh_within(&self, counters: &Counters, patience: Option<Duration>) -> bool {
        let tailing = match patience {
            None => Some(self.tailing()),
            Some(patience) => self.tail.take_within(patience),
        };
        tailing.map(|tailing| self.refresh_with(tailing, counters)).is_some()
    }

    fn refresh_with(&self, mut tailing: Taken<'_, Tailing>, counters: &Counters) {
        // Before the journals are read: what is told after that is looked for the next time.
        let now = Instant::now();
        tailing.listener.open(now);
        let told = tailing.listener.last();
        let mut raised = None;
        self.look_at_generation(&mut tailing, |generation| raised = Some(generation));
        if let Some(generation) = raised {
            self.index_mut().raise_generation(generation);
        }
        // The index is locked for writing only if there is news.
        let mut guard = None;
        let mut removes = Vec::new();
        let Tailing { tail, pending, .. } = &mut *tailing;
        let report = tail.poll(&mut |frame| {
            if frame.namespace == self.fingerprint {
                let index = guard.get_or_insert_with(|| self.index_mut());
                self.apply(index, frame, counters, &mut removes, None);
            }
        });
        counters.add(Counter::JournalDamage, report.damaged_stretches);
        if !removes.is_empty() || !pending.is_empty() || report.journals_gone {
            let index = guard.get_or_insert_with(|| self.index_mut());
            self.apply_removes(index, removes, pending, report);
        }
        let is_complete = report.complete && pending.is_empty();
        tailing.looked = told.filter(|_| is_complete).map(|number| (now, number));
    }

    /// Removes come after the adds of the same look at the journals: who removes an object has read its add.
    fn apply_removes(
        &self,
        index: &mut Index,
        mut removes: Vec<Gone>,
        pending: &mut Vec<Gone>,
        report: TailReport,
    ) {
        pending.retain(|record| !index.apply_gone(record));
        if report.complete {
            // Their adds would have been read by now: they are of no interest here, or gone from the journals.
            pending.clear();
        }
        removes.retain(|record| !index.apply_gone(record));
        pending.append(&mut removes);
        if report.journals_gone {
            // Whoever rewrote a journal left out the removes of segments that are gone.
            self.forget_missing_segments(index);
        }
        index.rebuild_if_sparse();
    }

    fn is_there(&self, segment: SegmentId) -> bool {
        let path = self.paths.segment(&self.fingerprint, segment);
        // Any other answer than "no such file" leaves the question to whoever reads a page.
        std::fs::symlink_metadata(path).map_or_else(|error| error.kind() != io::ErrorKind::NotFound, |_| true)
    }

    fn forget_missing_segments(&self, index: &mut Index) {
        if let Ok(there) = self.segments_there() {
            index.retain_segments(&mut |segment| there.contains(&segment));
        }
    }

    /// Segments in the folder.
    fn segments_there(&self) -> io::Result<HashSet<SegmentId>> {
        let mut segments = HashSet::new();
        for entry in std::fs::read_dir(self.paths.namespace(&self.fingerprint))? {
            segments.extend(entry?.file_name().to_str().and_then(SegmentId::from_file_name));
        }
        Ok(segments)
    }

    /// Reads the generation file when it changed; a missing or damaged one says nothing, frames carry it too.
    fn look_at_generation(&self, tailing: &mut Tailing, raise: impl FnOnce(u64)) {
        use std::os::unix::fs::MetadataExt;
        let path = self.paths.generation(&self.fingerprint);
        let Ok(metadata) = std::fs::symlink_metadata(&path) else { return };
        // Each new generation is a new file, so its inode and time tell them apart.
        let (inode, modified) = (metadata.ino(), metadata.modified());
        if let Some((seen_inode, Ok(seen))) = &tailing.generation_file
            && *seen_inode == inode
            && modified.as_ref().is_ok_and(|modified| modified == seen)
        {
            return;
        }
        if let Some(generation) = root::read_file(&path, 64).ok().and_then(|bytes| decode_generation(&bytes))
        {
            raise(generation);
        }
        tailing.generation_file = Some((inode, modified));
    }

    /// Those of the segments `there` whose writer is dead. One that lives made its lock before its first segment,
    /// so a listing of the locks after that of the segments names it.
    fn finished_segments(&self, there: &HashSet<SegmentId>) -> Vec<SegmentId> {
        let names = root::list(&self.paths.journals());
        let locks: HashSet<ProcessId> = names.iter().filter_map(|name| parse_lock_name(name)).collect();
        let alive: HashSet<ProcessId> =
            locks.into_iter().filter(|&process| is_alive(&self.paths, process)).collect();
        there.iter().copied().filter(|id| !alive.contains(&id.process)).collect()
    }

    /// Reads the directories of those units in `finished` segments that no journal told of.
    fn recover(
        &self,
        index: &mut Index,
        finished: &[SegmentId],
        mut known: KnownUnits,
        counters: &Counters,
        notices: &Notices,
    ) {
        let (mut units, mut segments) = (0_u64, 0_u64);
        for &id in finished {
            let known = known.entry(id).or_default();
            known.sort_unstable();
            let path = self.paths.segment(&self.fingerprint, id);
            // Unreadable segments are found out, and told of, by whoever wants a page of them.
            let Ok(found) = recover::unknown_directories(&path, id, known) else { continue };
            let before = units;
            for directory in found.iter().filter(|found| found.header.namespace == self.fingerprint) {
                recover::announce(directory, |unit, run| index.add_run(unit, run, &mut |_| true));
                units += 1;
            }
            segments += u64::from(units > before);
        }
        counters.add(Counter::SegmentsRebuilt, segments);
        if segments > 0 {
            notices.push(Level::Warning, "rebuilt", || {
                format!("{units} units in {segments} segments were missing from the journals; read from their directories")
            });
        }
    }

    /// Takes in the adds of segments that were not there before. By now all their frames are read, and a segment is
    /// made before its first frame is written: one listing tells those that came from those that are gone.
    fn add_deferred(&self, index: &mut Index, loading: &mut Loading) {
        let deferred = std::mem::take(&mut loading.deferred);
        let there = if deferred.is_empty() { None } else { self.segments_there().ok() };
        let mut is_there = |segment: SegmentId| match &there {
            Some(there) => there.contains(&segment),
            None => self.is_there(segment),
        };
        for body in deferred {
            let unit = frame::decode_add(&body, |unit: &AddUnit, run: AddRun<'_>| {
                index.add_run(unit, &run, &mut is_there);
            });
            // What does not decode was counted when it was read.
            if let Ok(unit) = unit {
                loading.know(&unit);
            }
        }
    }

    /// Takes one frame of this namespace into the index; removes are collected.
    fn apply(
        &self,
        index: &mut Index,
        frame: &Frame<'_>,
        counters: &Counters,
        removes: &mut Vec<Gone>,
        loading: Option<&mut Loading>,
    ) {
        let decoded = match frame.kind {
            FrameKind::Add => {
                let mut is_deferred = false;
                let unit = frame::decode_add(frame.body, |unit: &AddUnit, run: AddRun<'_>| {
                    is_deferred |=
                        loading.as_ref().is_some_and(|loading| !loading.there.contains(&unit.segment));
                    if is_deferred {
                        index.raise_generation(unit.generation);
                    } else {
                        index.add_run(unit, &run, &mut |segment| loading.is_some() || self.is_there(segment));
                    }
                });
                match loading {
                    Some(loading) if is_deferred => {
                        loading.deferred.push(frame.body.to_vec());
                        unit.map(|_| ())
                    }
                    Some(loading) => unit.map(|unit| loading.know(&unit)),
                    None => unit.map(|_| ()),
                }
            }
            FrameKind::Remove | FrameKind::Quarantine => {
                frame::decode_gone(frame.body).map(|mut records| removes.append(&mut records))
            }
            _ => Ok(()),
        };
        if decoded.is_err() {
            counters.add(Counter::JournalDamage, 1);
        }
    }

    /// Raises the generation from `seen`, so that everything published up to now is forgotten by all. `false`:
    /// somebody else raised it since `seen`, which is as good.
    pub fn raise_generation(&self, process: ProcessId, seen: u64) -> Result<bool> {
        let path = self.paths.generation_lock(&self.fingerprint);
        let lock = FileLock::exclusive_within(&path, CLEAR_PATIENCE)
            .map_err(|error| Error::io("cannot lock", &path, error))?;
        let Some(_lock) = lock else {
            return Err(Error::new(
                ErrorKind::Io,
                format!("another process has held {} for too long", path.display()),
            ));
        };
        let path = self.paths.generation(&self.fingerprint);
        let stored = root::read_file(&path, 64).ok().and_then(|bytes| decode_generation(&bytes)).unwrap_or(0);
        if stored > seen {
            return Ok(false);
        }
        let folder = self.paths.namespace(&self.fingerprint);
        let temporary = Paths::temporary(&folder, process, crate::store::next_temporary());
        hicache_sys::file::publish_replacing(&path, &temporary, &encode_generation(seen + 1))
            .map_err(|error| Error::io("cannot write", &path, error))?;
        self.news.tell();
        Ok(true)
    }
}

fn refuse_link(folder: &std::path::Path) -> Result<()> {
    match std::fs::symlink_metadata(folder) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(Error::new(
            ErrorKind::Unsupported,
            format!("expected a folder, found a link or file at {}", folder.display()),
        )),
        Err(error) => Err(Error::io("cannot look at", folder, error)),
    }
}
