//! The page store: backup, match and restore over one root folder.
//!
//! It owns the root's files and what this process knows of them. It promises that a restored page is exact or
//! reported missing, and that a page is visible only when all of it is written. It knows nothing of engines,
//! Python or GPUs.
//!
//! Where to look (`ARCHITECTURE.md` has the drawing):
//!
//! - Calls: `options`, `view`, `backup`, `matching`, `restore`, `clear`, `prune`, `import`, `repair`.
//! - What this process knows: `namespace_state` over `index`, fed by `tail` from all journals when `news` says so; `coverage` (which stored forms
//!   serve a tile), `lookups` (which page precedes a backup).
//! - Payload: `reading` and `writing` (one call's pages), `io`, `chunk` and `landing` (how), `segment_writer` and `files`
//!   (where), `publish` (in which order), `stored_run` (copies as they are).
//! - Time: `clock`, `turn` (a lock that can be waited for until a deadline), `latencies`, `breaker` and `device_health` (is the
//!   device too slow), `bounce` and `bounced` (requests that a call can leave behind).
//! - Room: `room` puts together `budget` (with `ledger_file`, `usage`) and `evict` (with `catalog`, which chooses).
//! - On the side: `housekeeping` calls `duplicates` (with `conflicts`), `compact`, `checkpoint`, `finish`.
//! - A journal's life: `journal`, `tail`, `liveness` (what still matters), `checkpoint`, `merge`, `finish`, `recover`.
//! - The folder: `root`, `paths`. Said to people: `counters`, `notices`.

pub mod backup;
mod bounce;
mod bounced;
pub mod breaker;
pub mod budget;
pub mod catalog;
mod checkpoint;
mod chunk;
mod clear;
pub mod clock;
mod compact;
mod conflicts;
pub mod counters;
mod coverage;
pub mod device_health;
mod duplicates;
mod evict;
mod files;
mod finish;
mod housekeeping;
pub mod import;
mod index;
pub mod io;
mod journal;
mod landing;
mod latencies;
pub(crate) mod ledger_file;
mod liveness;
mod lookups;
pub mod matching;
mod merge;
mod namespace_state;
mod news;
pub mod notices;
pub mod options;
mod page_cache;
pub mod paths;
mod prune;
mod publish;
mod reading;
pub(crate) mod recover;
pub mod repair;
pub mod restore;
mod room;
pub(crate) mod root;
mod segment_writer;
mod stored_run;
pub(crate) mod tail;
#[cfg(feature = "testing")]
pub mod testing;
mod turn;
pub(crate) mod usage;
pub mod view;
mod writing;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

pub use backup::{BackupOptions, BackupOutcome, BackupReport, ChainStart};
pub use breaker::BreakerState;
pub use device_health::{Bounce, DeviceReport};
pub use evict::Freed;
pub use matching::{Match, PoolHit};
pub use options::{IoMode, StoreOptions};
pub use restore::{RestoreOptions, RestoreOutcome, RestoreReport};
pub use view::{PoolMemory, View, ViewOptions, ViewPool};

use crate::format::ProcessId;
use crate::format::frame::{FrameKind, encode_counters, encode_seal};
use crate::format::setup::Setup;
use crate::host_pool::PoolPlacement;
use crate::namespace::{Fingerprint, Namespace};
use crate::store::bounce::Bouncer;
use crate::store::budget::Budget;
use crate::store::counters::{Counter, Counters};
use crate::store::device_health::DeviceHealth;
use crate::store::evict::Evictor;
use crate::store::files::SegmentFiles;
use crate::store::finish::Finisher;
use crate::store::housekeeping::Housekeeping;
use crate::store::io::{InlineEngine, IoEngine, ThreadEngine, Transfers};
use crate::store::journal::Journal;
use crate::store::namespace_state::NamespaceState;
use crate::store::notices::{Level, Notice, Notices};
use crate::store::paths::Paths;
use crate::{Error, ErrorKind, Result};

/// Largest segment in bytes. A root of little capacity has smaller ones, so that room comes back in steps.
const SEGMENT_BYTES: u64 = 1 << 30;

/// Longest time that opening a store spends on what dead processes left; the rest is done on the side.
const FINISHING_AT_OPEN: Duration = Duration::from_secs(2);

/// Counters go to the journal at most this often while the store works.
const COUNTERS_EVERY: Duration = Duration::from_secs(1);

/// An open root.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
    handle: Arc<Handle>,
}

/// What the store, its views and importers share: with the last of them, the store closes.
pub(crate) struct Handle {
    inner: Arc<Inner>,
    housekeeping: Mutex<Option<Housekeeping>>,
}

pub(crate) struct Inner {
    pub(crate) paths: Paths,
    pub(crate) options: StoreOptions,
    pub(crate) process: ProcessId,
    pub(crate) counters: Arc<Counters>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) workers: Arc<rayon::ThreadPool>,
    pub(crate) engine: Box<dyn IoEngine>,
    /// For threads that may hang in the device.
    pub(crate) inline: InlineEngine,
    pub(crate) device: Arc<DeviceHealth>,
    pub(crate) bouncer: Bouncer,
    pub(crate) files: SegmentFiles,
    pub(crate) budget: Budget,
    pub(crate) evictor: Evictor,
    process_number: u32,
    journal: Mutex<JournalState>,
    namespaces: Mutex<HashMap<Fingerprint, Arc<NamespaceState>>>,
    next_segment: AtomicU32,
    closed: AtomicBool,
}

struct JournalState {
    journal: Option<Journal>,
    /// This process has ended for the others: it says nothing any more.
    has_ended: bool,
    counters_at: Instant,
    counters_sent: u64,
    /// How this process is set up, and whether the journal says so.
    setup: Setup,
    is_setup_said: bool,
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
        let mode = match options.io_mode {
            // A root that is only looked at is not written to: there, opening a segment shows whether it works.
            IoMode::Direct | IoMode::Auto if options.read_only => options.io_mode,
            IoMode::Direct | IoMode::Auto => probe_mode(options.io_mode, &paths, process, &notices),
            IoMode::Buffered => IoMode::Buffered,
        };
        let device =
            Arc::new(DeviceHealth::new(options.clock(), Arc::clone(&counters), Arc::clone(&notices)));
        let transfers = Arc::new(Transfers::new(
            mode,
            Arc::clone(&device),
            Arc::clone(&counters),
            Arc::clone(&notices),
            &options,
        ));
        let workers = Arc::new(start_workers(options.threads())?);
        let engine = Box::new(ThreadEngine::new(Arc::clone(&transfers), Arc::clone(&workers)));
        let files = SegmentFiles::new(paths.clone(), Arc::clone(&transfers), options.max_open_segments);
        let budget = Budget::open(
            paths.clone(),
            process,
            &description,
            options.free_space_floor_bytes,
            options.read_only,
        )
        .map_err(|error| Error::io("cannot look at", &paths.root, error))?;
        let keeps_house = options.keeps_house();
        let free_space_floor_bytes = Some(budget.free_space_floor());
        let journal = JournalState {
            journal: None,
            has_ended: false,
            counters_at: Instant::now(),
            counters_sent: 0,
            setup: Setup { free_space_floor_bytes, ..Setup::default() },
            is_setup_said: false,
        };
        let inner = Inner {
            paths,
            options,
            process,
            counters,
            notices,
            inline: InlineEngine::new(Arc::clone(&transfers)),
            bouncer: Bouncer::new(device.clock.clone()),
            device,
            transfers,
            workers,
            engine,
            files,
            budget,
            evictor: Evictor::default(),
            process_number: hicache_sys::process_number(),
            journal: Mutex::new(journal),
            namespaces: Mutex::default(),
            next_segment: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        };
        let inner = Arc::new(inner);
        let housekeeping = match keeps_house {
            false => None,
            true => {
                // First, so that a view finds all that the dead published.
                let mut finisher = Finisher::new(inner.paths.clone());
                inner.finish_aside(&mut finisher, FINISHING_AT_OPEN);
                Some(Housekeeping::start(&inner, finisher)?)
            }
        };
        let handle = Handle { inner: Arc::clone(&inner), housekeeping: Mutex::new(housekeeping) };
        Ok(Store { inner, handle: Arc::new(handle) })
    }

    /// Opens a view of `pools` in `namespace`: what one rank of one deployment stores and asks for.
    ///
    /// # Errors
    /// `Namespace` or `Geometry` for pools that do not fit, `Io` when the folder cannot be made, `Closed`.
    pub fn view(&self, namespace: Namespace, pools: Vec<ViewPool>, options: ViewOptions) -> Result<View> {
        self.inner.check_open()?;
        View::open(Arc::clone(&self.inner), Arc::clone(&self.handle), namespace, pools, options)
    }

    /// Folder of the root.
    pub fn path(&self) -> PathBuf {
        self.inner.paths.root.clone()
    }

    /// Budget of the root in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.inner.budget.capacity()
    }

    /// Bytes that the root's files take on disk.
    pub fn used_bytes(&self) -> u64 {
        self.inner.budget.measure()
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

    /// What is known of the device: whether it keeps up with the deadlines of calls.
    pub fn device(&self) -> DeviceReport {
        let (abandoned, bounce_bytes) = self.inner.bouncer.in_flight();
        DeviceReport { abandoned, bounce_bytes, ..self.inner.device.report() }
    }

    /// Leaves for the tools where the host pools of this process stand, and why; all of them at once, in place of what
    /// was left before. A process that never wrote anything leaves nothing.
    ///
    /// # Errors
    /// `Config` for more than 64 pools, or more than 16 KiB of words; `Closed`.
    pub fn note_pools(&self, pools: Vec<PoolPlacement>) -> Result<()> {
        self.inner.check_open()?;
        let mut state = self.inner.lock_journal();
        let setup = Setup { pools, ..state.setup.clone() };
        setup.validate()?;
        if setup != state.setup {
            (state.setup, state.is_setup_said) = (setup, false);
            self.inner.say_setup(&mut state);
        }
        Ok(())
    }

    /// Takes the lines that wait for the log.
    pub fn drain_notices(&self) -> Vec<Notice> {
        self.inner.notices.drain()
    }

    /// Seals what was written and ends this process for the others. Later calls of this store give `Closed`.
    /// Closing twice is fine; a forked child closes nothing of its parent's.
    ///
    /// Bounced requests that the device does not complete within half a second are left behind: for the others this
    /// process goes on living until the last of them has ended, or the process itself.
    pub fn close(&self) {
        self.handle.close();
    }
}

impl Handle {
    fn close(&self) {
        let housekeeping = self.housekeeping.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(housekeeping) = housekeeping {
            // In a forked child the thread is not there.
            if self.inner.process_number == hicache_sys::process_number() {
                // It may wait for a lock of a request that hangs in the device.
                let may_hang = self.inner.bouncer.in_flight().0 > 0;
                if may_hang { housekeeping.leave() } else { housekeeping.stop() }
            }
        }
        self.inner.close();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
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
        let segment_bytes = self.segment_bytes();
        let state = namespaces.entry(namespace.fingerprint()).or_insert_with(|| {
            Arc::new(NamespaceState::new(self.paths.clone(), namespace.clone(), self.process, segment_bytes))
        });
        Arc::clone(state)
    }

    /// Length of a full segment in bytes.
    pub(crate) fn segment_bytes(&self) -> u64 {
        SEGMENT_BYTES.min(self.budget.capacity() / 8).max(1 << 20)
    }

    /// The state of a namespace, if this process uses it.
    pub(crate) fn known_namespace(&self, namespace: &Fingerprint) -> Option<Arc<NamespaceState>> {
        let namespaces = self.namespaces.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        namespaces.get(namespace).cloned()
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
        self.say_at(now_ns(), kind, namespace, records, body)
    }

    /// Says something that became true at `written_ns`.
    pub(crate) fn say_at(
        &self,
        written_ns: u64,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> std::io::Result<()> {
        let mut state = self.lock_journal();
        self.started(&mut state)?;
        self.say_setup(&mut state);
        let journal = self.started(&mut state)?;
        // A unit has taken the room for its frame with its own. Removes must be told on a full disk too: they use what the
        // journal took ahead.
        let growth = if kind == FrameKind::Add { 0 } else { journal.growth(body.len() as u64) };
        let room = if growth > 0 { self.budget.take(growth).ok() } else { None };
        let said = journal.append_at(&self.transfers, written_ns, kind, namespace, records, body);
        drop(room);
        said
    }

    /// Whether this process has said anything yet.
    pub(crate) fn is_writing(&self) -> bool {
        self.lock_journal().journal.is_some()
    }

    /// Bytes on disk by which the journal grows when so many bytes of records are said.
    pub(crate) fn journal_growth(&self, body_bytes: u64) -> std::io::Result<u64> {
        let mut state = self.lock_journal();
        self.started(&mut state)?;
        self.say_setup(&mut state);
        Ok(self.started(&mut state)?.growth(body_bytes))
    }

    /// Makes this process known as alive, before its first segment appears.
    pub(crate) fn announce(&self) -> std::io::Result<()> {
        self.started(&mut self.lock_journal()).map(|_| ())
    }

    fn started<'a>(&self, state: &'a mut JournalState) -> std::io::Result<&'a mut Journal> {
        if state.has_ended {
            return Err(std::io::Error::other("the store is closed"));
        }
        if state.journal.is_none() {
            // A call that is under way while the store closes must not bring the process back to life.
            if self.closed.load(Ordering::Acquire) {
                return Err(std::io::Error::other("the store is closed"));
            }
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

    /// Says how this process is set up, if its journal has begun and does not say so. Where there is no room for it, or
    /// it fails, it is said later, or never: nothing depends on it.
    fn say_setup(&self, state: &mut JournalState) {
        let (Some(journal), false) = (&mut state.journal, state.is_setup_said || self.options.read_only)
        else {
            return;
        };
        let body = state.setup.encode();
        let growth = journal.growth(body.len() as u64);
        let room = if growth > 0 { self.budget.take(growth).ok() } else { None };
        if growth > 0 && room.is_none() {
            return;
        }
        let said = journal.append(&self.transfers, FrameKind::Setup, Fingerprint([0; 16]), 1, &body);
        drop(room);
        state.is_setup_said = said.is_ok();
    }

    /// Leaves the totals in the journal, now and then. A process that never wrote anything leaves none.
    pub(crate) fn leave_counters(&self, now: bool) {
        // Who is in a hurry does not wait for a thread that writes, or hangs in the device.
        let mut state = match self.journal.try_lock() {
            Ok(state) => state,
            Err(TryLockError::WouldBlock) if !now => return,
            Err(_) => self.lock_journal(),
        };
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
        self.say_setup(&mut state);
        state.counters_at = Instant::now();
    }

    /// Tells of the segments of a namespace that were sealed since the last time.
    pub(crate) fn tell_sealed(&self, state: &NamespaceState) {
        for sealed in state.writer.take_sealed() {
            let body = encode_seal(sealed.segment, sealed.file_bytes);
            // The seal in the segment says the same.
            let _ = self.say(FrameKind::Seal, state.fingerprint, 1, &body);
        }
    }

    /// The namespaces that this process uses.
    pub(crate) fn open_namespaces(&self) -> Vec<Arc<NamespaceState>> {
        let namespaces = self.namespaces.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        namespaces.values().cloned().collect()
    }

    fn close(self: &Arc<Self>) {
        if self.process_number != hicache_sys::process_number() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let inner = Arc::clone(self);
        self.bouncer.close(Box::new(move || inner.end()));
    }

    /// Ends this process for the others: nothing of it is on its way to a file any more.
    fn end(&self) {
        for state in self.open_namespaces() {
            state.writer.close(&self.transfers);
            self.tell_sealed(&state);
        }
        self.leave_touches();
        self.leave_counters(true);
        self.files.clear();
        self.budget.release();
        let mut state = self.lock_journal();
        state.has_ended = true;
        if let Some(journal) = state.journal.take() {
            journal.close();
        }
    }

    fn lock_journal(&self) -> MutexGuard<'_, JournalState> {
        self.journal.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn start_workers(threads: usize) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("hicache-io-{index}"))
        .build()
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot start {threads} I/O threads: {error}")))
}

/// `mode`, where what it needs works in the root; else `Buffered`.
fn probe_mode(mode: IoMode, paths: &Paths, process: ProcessId, notices: &Notices) -> IoMode {
    let temporary = Paths::temporary(&paths.root, process, next_temporary());
    let (level, found) = match mode {
        IoMode::Direct => (Level::Warning, hicache_sys::probe::direct_io(&temporary)),
        // Nobody asked for it by name: good to know, and no fault.
        _ => (Level::Info, hicache_sys::probe::direct_io(&temporary).and_then(|()| cachestat(paths))),
    };
    let Err(error) = found else { return mode };
    notices.push(level, "direct-probe", || {
        format!("direct I/O does not work in {}: {error}; going through the page cache", paths.root.display())
    });
    IoMode::Buffered
}

/// Whether the kernel says what of a file of the root is in the page cache.
fn cachestat(paths: &Paths) -> std::io::Result<()> {
    let file = std::fs::File::open(paths.description())?;
    hicache_sys::probe::cached_bytes(&file, 0, 1).map(|_| ())
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
