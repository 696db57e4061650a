//! The page store: backup, match and restore over one root folder.
//!
//! It owns the root's files and what this process knows of them. It promises that a restored page is exact or
//! reported missing, and that a page is visible only when all of it is written. It knows nothing of engines,
//! Python or GPUs.

pub mod backup;
mod budget;
mod clear;
pub mod counters;
mod coverage;
mod files;
pub mod import;
mod index;
pub mod io;
mod journal;
mod landing;
pub mod matching;
mod namespace_state;
pub mod notices;
pub mod options;
pub(crate) mod paths;
mod publish;
pub(crate) mod recover;
pub mod restore;
pub(crate) mod root;
mod segment_writer;
pub(crate) mod tail;
pub mod view;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub use backup::{BackupOutcome, BackupReport, ChainStart};
pub use matching::{Match, PoolHit};
pub use options::{IoMode, StoreOptions};
pub use restore::{RestoreOptions, RestoreOutcome, RestoreReport};
pub use view::{PoolMemory, View, ViewOptions, ViewPool};

use crate::format::ProcessId;
use crate::format::frame::{FrameKind, encode_counters, encode_seal};
use crate::format::root::RootDescription;
use crate::namespace::{Fingerprint, Namespace};
use crate::store::budget::Budget;
use crate::store::counters::{Counter, Counters};
use crate::store::files::SegmentFiles;
use crate::store::io::{IoEngine, ThreadEngine, Transfers};
use crate::store::journal::Journal;
use crate::store::namespace_state::NamespaceState;
use crate::store::notices::{Level, Notice, Notices};
use crate::store::paths::Paths;
use crate::{Error, ErrorKind, Result};

/// Largest segment in bytes. A root of little capacity has smaller ones, so that room comes back in steps.
const SEGMENT_BYTES: u64 = 1 << 30;

/// Counters go to the journal at most this often while the store works.
const COUNTERS_EVERY: Duration = Duration::from_secs(1);

/// An open root.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) paths: Paths,
    pub(crate) options: StoreOptions,
    pub(crate) process: ProcessId,
    pub(crate) description: RootDescription,
    pub(crate) counters: Arc<Counters>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) workers: Arc<rayon::ThreadPool>,
    pub(crate) engine: Box<dyn IoEngine>,
    pub(crate) files: SegmentFiles,
    pub(crate) budget: Budget,
    process_number: u32,
    journal: Mutex<JournalState>,
    namespaces: Mutex<HashMap<Fingerprint, Arc<NamespaceState>>>,
    next_segment: AtomicU32,
    closed: AtomicBool,
}

struct JournalState {
    journal: Option<Journal>,
    counters_at: Instant,
    counters_sent: u64,
}

impl Store {
    /// Opens the root at `path`, made now if there is none.
    ///
    /// # Errors
    /// `Config` for bad options or a folder with other things in it, `Unsupported` for a file system or link that
    /// is not safe, `UnsupportedVersion` for a newer format, `Io` when the system says no. Nothing is changed then.
    pub fn open(path: &Path, options: StoreOptions) -> Result<Store> {
        options.validate()?;
        let paths = Paths::new(path);
        let (counters, notices) = (Arc::<Counters>::default(), Arc::<Notices>::default());
        let process = ProcessId::random()?;
        let description = root::open(&paths, &options, process, &notices)?;
        // A root that is only looked at is not written to: there, opening a segment shows whether it works.
        let direct = options.io_mode == IoMode::Direct
            && (options.read_only || probe_direct(&paths, process, &notices));
        let transfers =
            Arc::new(Transfers::new(direct, Arc::clone(&counters), Arc::clone(&notices), &options));
        let workers = Arc::new(start_workers(options.threads())?);
        let engine = Box::new(ThreadEngine::new(Arc::clone(&transfers), Arc::clone(&workers)));
        let files = SegmentFiles::new(paths.clone(), Arc::clone(&transfers), options.max_open_segments);
        let budget = Budget::new(description.capacity_bytes, root::used_bytes(&paths));
        let journal = JournalState { journal: None, counters_at: Instant::now(), counters_sent: 0 };
        let inner = Inner {
            paths,
            options,
            process,
            description,
            counters,
            notices,
            transfers,
            workers,
            engine,
            files,
            budget,
            process_number: hicache_sys::process_number(),
            journal: Mutex::new(journal),
            namespaces: Mutex::default(),
            next_segment: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        };
        Ok(Store { inner: Arc::new(inner) })
    }

    /// Opens a view of `pools` in `namespace`: what one rank of one deployment stores and asks for.
    ///
    /// # Errors
    /// `Namespace` or `Geometry` for pools that do not fit, `Io` when the folder cannot be made, `Closed`.
    pub fn view(&self, namespace: Namespace, pools: Vec<ViewPool>, options: ViewOptions) -> Result<View> {
        self.inner.check_open()?;
        View::open(Arc::clone(&self.inner), namespace, pools, options)
    }

    /// Folder of the root.
    pub fn path(&self) -> PathBuf {
        self.inner.paths.root.clone()
    }

    /// Budget of the root in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.inner.description.capacity_bytes
    }

    /// Bytes that the root's files take on disk.
    pub fn used_bytes(&self) -> u64 {
        self.inner.budget.measure(&self.inner.paths)
    }

    /// How payload is read and written.
    pub fn io_name(&self) -> String {
        self.inner.engine.name()
    }

    /// Identity of this process in the root.
    pub fn process(&self) -> ProcessId {
        self.inner.process
    }

    /// Totals of this process.
    pub fn counters(&self) -> Vec<(Counter, u64)> {
        self.inner.counters.snapshot()
    }

    /// Takes the lines that wait for the log.
    pub fn drain_notices(&self) -> Vec<Notice> {
        self.inner.notices.drain()
    }

    /// Seals what was written and ends this process for the others. Later calls of this store give `Closed`.
    /// Closing twice is fine; a forked child closes nothing of its parent's.
    pub fn close(&self) {
        self.inner.close();
    }
}

impl Inner {
    /// # Errors
    /// `Closed` after `close`, and in a forked child: it shares the parent's descriptors, not its state.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed"));
        }
        if self.process_number != hicache_sys::process_number() {
            return Err(Error::new(
                ErrorKind::Closed,
                "this is a forked child of the process that opened the store: open it again here",
            ));
        }
        Ok(())
    }

    pub(crate) fn namespace(&self, namespace: &Namespace) -> Arc<NamespaceState> {
        let mut namespaces = self.namespaces.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let segment_bytes = SEGMENT_BYTES.min(self.description.capacity_bytes / 8).max(1 << 20);
        let state = namespaces.entry(namespace.fingerprint()).or_insert_with(|| {
            Arc::new(NamespaceState::new(self.paths.clone(), namespace.clone(), self.process, segment_bytes))
        });
        Arc::clone(state)
    }

    pub(crate) fn next_segment_number(&self) -> u32 {
        self.next_segment.fetch_add(1, Ordering::Relaxed)
    }

    /// Says something to all processes.
    pub(crate) fn say(
        &self,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> std::io::Result<()> {
        let mut state = self.lock_journal();
        self.started(&mut state)?.append(&self.transfers, kind, namespace, records, body)
    }

    /// Makes this process known as alive, before its first segment appears.
    pub(crate) fn announce(&self) -> std::io::Result<()> {
        self.started(&mut self.lock_journal()).map(|_| ())
    }

    fn started<'a>(&self, state: &'a mut JournalState) -> std::io::Result<&'a mut Journal> {
        if state.journal.is_none() {
            let started = Journal::create(&self.paths, self.process);
            // The code is kept, so that a disk without room for a journal counts as full.
            state.journal = Some(started.map_err(|error| match error.errno() {
                Some(code) => std::io::Error::from_raw_os_error(code),
                None => std::io::Error::other(error),
            })?);
        }
        let Some(journal) = &mut state.journal else { unreachable!("filled above") };
        Ok(journal)
    }

    /// Leaves the totals in the journal, now and then. A process that never wrote anything leaves none.
    pub(crate) fn leave_counters(&self, now: bool) {
        let mut state = self.lock_journal();
        if self.options.read_only || (!now && state.counters_at.elapsed() < COUNTERS_EVERY) {
            return;
        }
        let values: Vec<(u32, u64)> =
            self.counters.snapshot().into_iter().map(|(counter, value)| (counter as u32, value)).collect();
        let sum = values.iter().map(|(_, value)| value).sum();
        if sum != state.counters_sent {
            let body = encode_counters(&values);
            // Counters that cannot be left now are left the next time, or lost with the process.
            let _ = self.started(&mut state).and_then(|journal| {
                journal.append(
                    &self.transfers,
                    FrameKind::Counters,
                    Fingerprint([0; 16]),
                    values.len() as u32,
                    &body,
                )
            });
            state.counters_sent = sum;
        }
        state.counters_at = Instant::now();
    }

    pub(crate) fn tell_sealed(&self, namespace: Fingerprint, sealed: &segment_writer::Sealed) {
        let body = encode_seal(sealed.segment, sealed.file_bytes);
        // The seal in the segment says the same.
        let _ = self.say(FrameKind::Seal, namespace, 1, &body);
    }

    fn close(&self) {
        if self.process_number != hicache_sys::process_number() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let namespaces: Vec<_> = {
            let namespaces = self.namespaces.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            namespaces.values().cloned().collect()
        };
        for state in namespaces {
            if let Ok(Some(sealed)) = state.writer.close(&self.transfers) {
                self.tell_sealed(state.fingerprint, &sealed);
            }
        }
        self.leave_counters(true);
        self.files.clear();
        if let Some(journal) = self.lock_journal().journal.take() {
            journal.close();
        }
    }

    fn lock_journal(&self) -> MutexGuard<'_, JournalState> {
        self.journal.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

fn start_workers(threads: usize) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("hicache-io-{index}"))
        .build()
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot start {threads} I/O threads: {error}")))
}

fn probe_direct(paths: &Paths, process: ProcessId, notices: &Notices) -> bool {
    let temporary = Paths::temporary(&paths.root, process, next_temporary());
    match hicache_sys::probe::direct_io(&temporary) {
        Ok(()) => true,
        Err(error) => {
            notices.push(Level::Warning, "direct-probe", || {
                format!(
                    "direct I/O does not work in {}: {error}; going through the page cache",
                    paths.root.display()
                )
            });
            false
        }
    }
}

/// Wall clock in ns since 1970, for people and ages; nothing is decided by it.
pub(crate) fn now_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// A number for a temporary name, new in this process.
pub(crate) fn next_temporary() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
