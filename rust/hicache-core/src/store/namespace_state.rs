//! What this process knows of one namespace: its index, kept up to date from the journals.

use std::io;
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hicache_sys::lock::FileLock;

use crate::format::frame::{self, AddRun, AddUnit, Frame, FrameKind};
use crate::format::root::{decode_generation, encode_generation, pretty};
use crate::format::{ProcessId, SegmentId};
use crate::namespace::{Fingerprint, Namespace};
use crate::pool::Pool;
use crate::store::counters::{Counter, Counters};
use crate::store::index::{Index, Interest};
use crate::store::notices::{Level, Notices};
use crate::store::paths::Paths;
use crate::store::recover::{self, KnownUnits};
use crate::store::root;
use crate::store::segment_writer::SegmentWriter;
use crate::store::tail::{Tail, is_alive};
use crate::{Error, ErrorKind, Result};

/// How long `clear` waits for another process that clears.
const CLEAR_PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);

/// One namespace as this process sees it.
pub struct NamespaceState {
    /// The namespace.
    pub namespace: Namespace,
    /// Its identity, and the name of its folder.
    pub fingerprint: Fingerprint,
    /// This process's segments.
    pub writer: SegmentWriter,
    paths: Paths,
    index: RwLock<Index>,
    // Taken before `index`, never after it.
    tail: Mutex<Tailing>,
}

struct Tailing {
    tail: Tail,
    generation_file: Option<(u64, io::Result<std::time::SystemTime>)>,
}

impl NamespaceState {
    /// State of `namespace`, nothing read yet.
    pub fn new(paths: Paths, namespace: Namespace, process: ProcessId, segment_bytes: u64) -> Self {
        NamespaceState {
            fingerprint: namespace.fingerprint(),
            writer: SegmentWriter::new(paths.clone(), namespace.clone(), process, segment_bytes),
            namespace,
            index: RwLock::default(),
            tail: Mutex::new(Tailing { tail: Tail::new(paths.clone()), generation_file: None }),
            paths,
        }
    }

    /// The index, for look-ups.
    pub fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn tailing(&self) -> MutexGuard<'_, Tailing> {
        self.tail.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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

    /// Takes out objects that this process found unusable.
    pub fn apply_gone(&self, records: &[frame::Gone]) {
        self.index_mut().apply_gone(records);
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
        index.forget_objects();
        tailing.tail = Tail::new(self.paths.clone());
        // Before the journals are read: a writer that is dead by now has said all it ever will.
        let finished = self.finished_segments();
        let mut known = KnownUnits::new();
        self.poll(&mut tailing, &mut index, counters, Some(&mut known));
        self.recover(&mut index, &finished, known, counters, notices);
    }

    /// Takes in what all processes said since the last call.
    pub fn refresh(&self, counters: &Counters) {
        let mut tailing = self.tailing();
        let mut raised = None;
        self.look_at_generation(&mut tailing, |generation| raised = Some(generation));
        if let Some(generation) = raised {
            self.index_mut().raise_generation(generation);
        }
        // The index is locked for writing only if there is news.
        let mut guard = None;
        let report = tailing.tail.poll(&mut |frame| {
            if frame.namespace == self.fingerprint {
                apply(guard.get_or_insert_with(|| self.index_mut()), frame, counters, None);
            }
        });
        counters.add(Counter::JournalDamage, report.damaged_stretches);
    }

    fn poll(
        &self,
        tailing: &mut Tailing,
        index: &mut Index,
        counters: &Counters,
        mut known: Option<&mut KnownUnits>,
    ) {
        self.look_at_generation(tailing, |generation| index.raise_generation(generation));
        let report = tailing.tail.poll(&mut |frame| {
            if frame.namespace == self.fingerprint {
                apply(index, frame, counters, known.as_deref_mut());
            }
        });
        counters.add(Counter::JournalDamage, report.damaged_stretches);
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

    /// Segments whose writer is dead.
    fn finished_segments(&self) -> Vec<SegmentId> {
        let names = root::list(&self.paths.namespace(&self.fingerprint));
        let segments = names.iter().filter_map(|name| SegmentId::from_file_name(name));
        segments.filter(|id| !is_alive(&self.paths, id.process)).collect()
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
                recover::announce(directory, |unit, run| index.add_run(unit, run));
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
        Ok(true)
    }
}

/// Takes one frame of this namespace into the index.
fn apply(index: &mut Index, frame: &Frame<'_>, counters: &Counters, known: Option<&mut KnownUnits>) {
    let decoded = match frame.kind {
        FrameKind::Add => {
            frame::decode_add(frame.body, |unit: &AddUnit, run: AddRun<'_>| index.add_run(unit, &run)).map(
                |unit| {
                    if let Some(known) = known {
                        known.entry(unit.segment).or_default().push((unit.unit_offset, unit.unit_bytes));
                    }
                },
            )
        }
        FrameKind::Remove | FrameKind::Quarantine => {
            frame::decode_gone(frame.body).map(|records| index.apply_gone(&records))
        }
        _ => Ok(()),
    };
    if decoded.is_err() {
        counters.add(Counter::JournalDamage, 1);
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
