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
//! - A journal's life: `journal`, `tail`, `liveness` (what still matters), `checkpoint`, `merge`, `finish`, `recover`; `own_journal` (what this
//!   process says, and in which room).
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
mod own_journal;
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
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use backup::{BackupOptions, BackupOutcome, BackupReport, ChainStart};
pub use breaker::BreakerState;
pub use device_health::{Bounce, DeviceReport};
pub use evict::Freed;
pub use matching::{Match, PoolHit};
pub use options::{IoMode, StoreOptions};
pub use restore::{RestoreOptions, RestoreOutcome, RestoreReport};
pub use view::{PoolMemory, View, ViewOptions, ViewPool};

use crate::format::ProcessId;
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
use crate::store::namespace_state::NamespaceState;
use crate::store::notices::{Level, Notice, Notices};
use crate::store::own_journal::JournalState;
use crate::store::paths::Paths;
use crate::{Error, ErrorKind, Result};

/// Largest segment in bytes. A root of little capacity has smaller ones, so that room comes back in steps.
const SEGMENT_BYTES: u64 = 1 << 30;

/// Longest time that opening a store spends on what dead processes left; the rest is done on the side.
const FINISHING_AT_OPEN: Duration = Duration::from_secs(2);

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
        let journal = JournalState::new(Setup { free_space_floor_bytes, ..Setup::default() });
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
        self.drop_reserve();
        self.budget.release();
        let mut state = self.lock_journal();
        state.has_ended = true;
        if let Some(journal) = state.journal.take() {
            journal.close();
        }
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
