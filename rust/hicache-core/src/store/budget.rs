//! Room under the root's capacity, shared by all processes and taken before bytes are written.
//!
//! The ledger has a limit for each live process, and one for everything that belongs to none. At every moment the
//! files of each take no more than its limit, and the limits together no more than the capacity; so the root stays
//! within it whatever the others do, and whoever dies. A process takes from what its limit leaves it, which costs no
//! system call, and raises the limit under the ledger's lock when that is not enough.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use crate::format::ProcessId;
use crate::format::ledger::{Ledger, LedgerEntry, MAX_LEDGER_ENTRIES};
use crate::format::root::RootDescription;
use crate::store::ledger_file::{LockedLedger, peek};
use crate::store::options::MIN_CAPACITY_BYTES;
use crate::store::paths::{Paths, parse_lock_name};
use crate::store::usage::Usage;
use crate::store::{next_temporary, now_ns, root};
use crate::{Error, Result};

/// Room is taken in whole blocks of this many bytes.
pub const BLOCK_BYTES: u64 = 4096;

/// How long a writer waits for the ledger: the write is refused then, rather than late.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long a change of the capacity, or the end of a process, waits for it.
const LONG_PATIENCE: Duration = Duration::from_secs(5);

/// Before it says that the root is full, a process measures, unless somebody did within this time.
const MEASURE_AGAIN_NS: u64 = 100_000_000;

const MOST_GRANT_BYTES: u64 = 64 << 20;

/// Why there is no room.
#[derive(Debug)]
pub enum NoRoom {
    /// The capacity is used up: this many bytes have to go first.
    Full {
        /// Bytes.
        short_by: u64,
    },
    /// The file system would be left with less than the free-space floor: this many bytes have to go first.
    Floor {
        /// Bytes.
        short_by: u64,
    },
    /// Others held the ledger for longer than a writer waits.
    Busy,
    /// More than an empty root could give.
    TooLarge,
    /// The system said no.
    Io(io::Error),
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoRoom::Full { short_by } => {
                write!(f, "the root's capacity is used up: {short_by} bytes too few")
            }
            NoRoom::Floor { short_by } => {
                write!(f, "the free-space floor is reached: {short_by} bytes too few")
            }
            NoRoom::Busy => f.write_str("other processes hold the budget's ledger"),
            NoRoom::TooLarge => f.write_str("more than the root's whole capacity"),
            NoRoom::Io(error) => write!(f, "the budget's ledger: {error}"),
        }
    }
}

impl std::error::Error for NoRoom {}

impl From<io::Error> for NoRoom {
    fn from(error: io::Error) -> Self {
        NoRoom::Io(error)
    }
}

/// Room that was taken and is being written to. Once dropped, what of it is not in files by then never will be:
/// drop it after the write, or after its blocks were allocated ahead.
#[derive(Debug)]
#[must_use = "room is settled as soon as this is dropped"]
pub struct Room<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl<'a> Room<'a> {
    /// Bytes that are held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives all of it back: nothing was written, or what was written is punched again.
    pub fn give_back(mut self) {
        self.give_back_part(self.bytes);
    }

    /// Gives back a part that was not needed, in whole blocks.
    pub fn give_back_part(&mut self, bytes: u64) {
        let bytes = (bytes / BLOCK_BYTES * BLOCK_BYTES).min(self.bytes);
        self.bytes -= bytes;
        let mut own = self.budget.own();
        own.in_flight -= bytes;
        own.left += bytes;
    }

    /// Takes a part away, rounded up to whole blocks, as room of its own; all of it if that is less.
    pub fn split(&mut self, bytes: u64) -> Room<'a> {
        let bytes = bytes.next_multiple_of(BLOCK_BYTES).min(self.bytes);
        self.bytes -= bytes;
        Room { budget: self.budget, bytes }
    }

    /// Keeps it taken when this value is gone. Bytes, for [`Budget::kept`].
    pub fn keep(self) -> u64 {
        std::mem::ManuallyDrop::new(self).bytes
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.budget.own().in_flight -= self.bytes;
    }
}

/// State of the ledger before something is freed, see [`Budget::before_freeing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BeforeFreeing(Option<u64>);

/// What is known of the budget.
#[derive(Debug, Clone)]
pub struct BudgetStatus {
    /// Bytes that all files may take.
    pub capacity: u64,
    /// Bytes that they take now.
    pub used: u64,
    /// Limit and outstanding bytes of each live process; empty when nobody writes.
    pub limits: Vec<(ProcessId, u64, u64)>,
    /// Limit of everything that belongs to no live process.
    pub nobody: u64,
    /// Bytes of the file system that are left to others.
    pub free_space_floor: u64,
    /// Bytes that the file system has left.
    pub available: u64,
}

/// The budget of a root as one process sees it.
#[derive(Debug)]
pub struct Budget {
    paths: Paths,
    process: ProcessId,
    read_only: bool,
    floor: u64,
    capacity: AtomicU64,
    used: AtomicU64,
    own: Mutex<Own>,
    /// Held for a visit of the ledger: the file's lock does not wait in line.
    visitor: Mutex<Visitor>,
}

/// What this process may still take. `left` and `in_flight` together are the bytes of its limit that its files do
/// not take yet, or may not: this sum grows only under the ledger's lock.
#[derive(Debug, Default)]
struct Own {
    left: u64,
    in_flight: u64,
}

#[derive(Debug)]
struct Visitor {
    description: RootDescription,
    /// Inode and time of change of `root.json` when it was read.
    seen: Option<(u64, i64, i64)>,
    has_measured: bool,
    is_released: bool,
}

impl Budget {
    /// The budget of the root at `paths`, which `description` describes, for `process`. Measures. The process must hold
    /// its lock from before it takes room until after [`Budget::release`].
    ///
    /// # Errors
    /// Those of looking at the file system. A ledger that cannot be used is told by the first `take`.
    pub fn open(
        paths: Paths,
        process: ProcessId,
        description: &RootDescription,
        free_space_floor_bytes: Option<u64>,
        read_only: bool,
    ) -> io::Result<Budget> {
        let total = hicache_sys::probe::file_system(&paths.root)?.total_bytes;
        let budget = Budget {
            floor: free_space_floor_bytes.unwrap_or((total / 64).min(1 << 30)),
            capacity: AtomicU64::new(description.capacity_bytes),
            used: AtomicU64::new(0),
            own: Mutex::default(),
            visitor: Mutex::new(Visitor {
                description: description.clone(),
                seen: None,
                has_measured: false,
                is_released: false,
            }),
            paths,
            process,
            read_only,
        };
        if !read_only {
            budget.measure();
        }
        Ok(budget)
    }

    /// Bytes that all files of the root may take, as of the last visit of the ledger.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Bytes of the file system that this process leaves to others.
    pub fn free_space_floor(&self) -> u64 {
        self.floor
    }

    /// Bytes of all limits together: what the files take, and what is granted beside it. Looks at the ledger.
    pub fn granted(&self) -> u64 {
        peek(&self.paths).map_or_else(|| self.used(), |ledger| ledger.sum())
    }

    /// Bytes that they took when they were last measured here.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Takes room for `bytes` of growth on disk, rounded up to whole blocks, before any of it is written.
    ///
    /// # Errors
    /// [`NoRoom`]; nothing was taken then.
    pub fn take(&self, bytes: u64) -> std::result::Result<Room<'_>, NoRoom> {
        let bytes = bytes.checked_next_multiple_of(BLOCK_BYTES).ok_or(NoRoom::TooLarge)?;
        match self.take_left(bytes) {
            Some(room) => Ok(room),
            None => self.raise(bytes),
        }
    }

    /// Room that was kept before, see [`Room::keep`]: as many bytes as that gave, once.
    pub fn kept(&self, bytes: u64) -> Room<'_> {
        Room { budget: self, bytes }
    }

    fn take_left(&self, bytes: u64) -> Option<Room<'_>> {
        let mut own = self.own();
        own.left = own.left.checked_sub(bytes)?;
        own.in_flight += bytes;
        Some(Room { budget: self, bytes })
    }

    /// Raises this process's limit by a grant, and takes from it.
    fn raise(&self, bytes: u64) -> std::result::Result<Room<'_>, NoRoom> {
        if self.read_only {
            return Err(NoRoom::Io(io::Error::new(
                io::ErrorKind::ReadOnlyFilesystem,
                "the store is open for reading",
            )));
        }
        let mut visit = self.visit(PATIENCE)?.ok_or(NoRoom::Busy)?;
        if visit.visitor.is_released {
            return Err(NoRoom::Io(io::Error::other("the store is closed")));
        }
        // Another thread may have brought room while this one waited.
        if let Some(room) = self.take_left(bytes) {
            return Ok(room);
        }
        if bytes > self.capacity().saturating_sub(reserve(self.capacity())) {
            return Err(NoRoom::TooLarge);
        }
        let known = visit.known.as_ref().is_some_and(|ledger| ledger.entry(self.process).is_some());
        if !known || !visit.visitor.has_measured {
            if !hicache_sys::lock::is_locked(&self.paths.process_lock(self.process))? {
                return Err(NoRoom::Io(io::Error::other(
                    "the process's lock is not held, or its file is gone",
                )));
            }
            self.measure_at(&mut visit, true)?;
        }
        let ledger = visit.ledger();
        match self.grant(&visit, bytes) {
            Err(NoRoom::Full { .. }) if may_measure(ledger.measured_ns) => {
                self.measure_at(&mut visit, true)?;
                self.grant(&visit, bytes)
            }
            granted => granted,
        }
    }

    /// Takes `bytes`, what is left first; the limit is raised by a usual grant, or by what is needed where that does
    /// not fit.
    fn grant(&self, visit: &Visit<'_>, bytes: u64) -> std::result::Result<Room<'_>, NoRoom> {
        let mut ledger = visit.ledger();
        let first = {
            let mut own = self.own();
            let first = own.left.min(bytes);
            own.left -= first;
            own.in_flight += first;
            Room { budget: self, bytes: first }
        };
        let need = bytes - first.bytes;
        let granted = match self.grantable(&ledger, need) {
            Ok(granted) => granted,
            Err(error) => {
                first.give_back();
                return Err(error);
            }
        };
        let outstanding = self.outstanding() + granted;
        if let Some(entry) = ledger.entry_mut(self.process) {
            entry.limit += granted;
            entry.outstanding = outstanding;
        }
        // The ledger first: what it says and nobody uses is room lost until the next measurement, no more.
        if let Err(error) = visit.locked.write(&ledger) {
            first.give_back();
            return Err(error.into());
        }
        let mut own = self.own();
        own.left += granted - need;
        own.in_flight += need;
        drop(own);
        let mut room = first;
        room.bytes += need;
        Ok(room)
    }

    /// Size of a grant of at least `need` bytes.
    fn grantable(&self, ledger: &Ledger, need: u64) -> std::result::Result<u64, NoRoom> {
        let (sum, capacity) = (ledger.sum(), self.capacity());
        let free = capacity.saturating_sub(sum);
        if need > free {
            return Err(NoRoom::Full { short_by: sum.saturating_add(need) - capacity });
        }
        let available = hicache_sys::probe::file_system(&self.paths.root)?.available_bytes;
        // What was promised and is not written yet will come out of it, too.
        let promised = ledger
            .entries
            .iter()
            .map(|entry| if entry.process == self.process { self.outstanding() } else { entry.outstanding })
            .fold(self.floor, u64::saturating_add);
        let above_floor = available.saturating_sub(promised);
        if need > above_floor {
            return Err(NoRoom::Floor { short_by: promised.saturating_add(need) - available });
        }
        let usual = self.usual_grant(ledger.entries.len()).max(need);
        Ok(if usual <= free.min(above_floor) { usual } else { need })
    }

    fn usual_grant(&self, live: usize) -> u64 {
        let share = self.capacity() / (16 * live.max(1) as u64);
        share.min(MOST_GRANT_BYTES) / BLOCK_BYTES * BLOCK_BYTES
    }

    /// To be called before blocks are punched, truncated or unlinked, for [`Budget::freed`].
    pub fn before_freeing(&self) -> BeforeFreeing {
        BeforeFreeing(peek(&self.paths).map(|ledger| ledger.measurements))
    }

    /// Lowers the limits of the processes whose files became this many bytes smaller on disk, as `st_blocks` before and
    /// after shows; of those that are dead or unknown, nobody's. One process at a time may free blocks of a file: the
    /// eviction lock sees to that. A ledger that is busy, or measured meanwhile, is measured again instead.
    pub fn freed(&self, before: BeforeFreeing, by_owner: &[(ProcessId, u64)]) {
        if self.read_only {
            return;
        }
        let Ok(Some(mut visit)) = self.visit(PATIENCE) else { return };
        let unmeasured = visit.known.clone().filter(|ledger| before.0 == Some(ledger.measurements));
        // What cannot be written down now is found by the next measurement.
        let _ = match unmeasured {
            Some(mut ledger) => {
                for &(process, bytes) in by_owner {
                    match ledger.entry_mut(process) {
                        Some(entry) => entry.limit = entry.limit.saturating_sub(bytes),
                        None => ledger.nobody = ledger.nobody.saturating_sub(bytes),
                    }
                }
                visit.locked.write(&ledger)
            }
            // That measurement may have seen the blocks gone: lowering again would lower too far.
            None => self.measure_at(&mut visit, false),
        };
    }

    /// Measures all files and sets the limits by them; dead processes leave the ledger. Gives the bytes that the files
    /// take, also when the ledger is busy or may not be written.
    pub fn measure(&self) -> u64 {
        if !self.read_only
            && let Ok(Some(mut visit)) = self.visit(PATIENCE)
            && self.measure_at(&mut visit, false).is_ok()
        {
            return self.used();
        }
        if self.read_only {
            let mut visitor = self.visitor();
            self.look_at_description(&mut visitor);
        }
        let used = Usage::measure(&self.paths).total;
        self.used.store(used, Ordering::Release);
        used
    }

    /// Sets the limits by the files. `register`: this process gets an entry if it has none.
    ///
    /// A limit is what the files take and what they may still grow by. Of this process that is known; of another the
    /// ledger has what it was when that one last asked, and it only became less since. All that is read before the
    /// files are looked at, so that a byte on its way from one to the other counts twice and never not at all.
    fn measure_at(&self, visit: &mut Visit<'_>, register: bool) -> io::Result<()> {
        let capacity = self.capacity();
        let known = visit.known.clone();
        let others = match &known {
            Some(ledger) => self.live_others(&ledger.entries),
            None => self.unknown_others(),
        };
        let is_registered = known.as_ref().is_some_and(|ledger| ledger.entry(self.process).is_some());
        let is_own = (register || is_registered || self.outstanding() > 0) && !visit.visitor.is_released;
        let surplus = self.own().left.saturating_sub(self.usual_grant(others.len() + 1));
        self.own_gives_up(surplus);
        let outstanding = self.outstanding();
        let usage = Usage::measure(&self.paths);
        let mut entries = Vec::with_capacity(others.len() + 1);
        for other in others {
            let used = usage.of(other.process);
            let limit = other.limit.min(used.saturating_add(other.outstanding)).max(used);
            entries.push(LedgerEntry { limit, ..other });
        }
        let mut owned: u64 = entries.iter().map(|entry| usage.of(entry.process)).sum();
        if is_own {
            if entries.len() == MAX_LEDGER_ENTRIES {
                return Err(io::Error::new(
                    io::ErrorKind::QuotaExceeded,
                    format!("expected at most {MAX_LEDGER_ENTRIES} writing processes, found one more"),
                ));
            }
            let used = usage.of(self.process);
            owned += used;
            entries.push(LedgerEntry { process: self.process, limit: used + outstanding, outstanding });
        }
        // Writes that outlive the end of this process's share are nobody's, like its files.
        let late = if is_own { 0 } else { outstanding };
        let rest = usage.total.saturating_sub(owned) + late;
        let mut ledger = Ledger {
            measurements: known.as_ref().map_or(now_ns(), |ledger| ledger.measurements.wrapping_add(1)),
            measured_ns: now_ns(),
            measured_bytes: usage.total,
            nobody: 0,
            entries,
        };
        // Over a capacity that became smaller: what is not used yet goes back.
        if ledger.sum().saturating_add(rest) > capacity
            && let Some(entry) = ledger.entry_mut(self.process)
        {
            let left = self.own().left;
            self.own_gives_up(left);
            entry.outstanding -= left;
            entry.limit -= left;
        }
        let free = capacity.saturating_sub(ledger.sum());
        ledger.nobody = rest.saturating_add(reserve(capacity)).min(free).max(rest);
        visit.locked.write(&ledger)?;
        visit.known = Some(ledger);
        visit.visitor.has_measured = true;
        self.used.store(usage.total, Ordering::Release);
        Ok(())
    }

    fn own_gives_up(&self, bytes: u64) {
        let mut own = self.own();
        own.left = own.left.saturating_sub(bytes);
    }

    fn live_others(&self, entries: &[LedgerEntry]) -> Vec<LedgerEntry> {
        let is_live = |entry: &&LedgerEntry| entry.process != self.process && self.is_live(entry.process);
        entries.iter().filter(is_live).copied().collect()
    }

    /// What the live processes may have been granted, when the ledger that knew it is gone. Each one that asks again
    /// says what it really was.
    fn unknown_others(&self) -> Vec<LedgerEntry> {
        let names = root::list(&self.paths.journals());
        let processes = names.iter().filter_map(|name| parse_lock_name(name));
        let grant = self.usual_grant(1);
        processes
            .filter(|&process| process != self.process && self.is_live(process))
            .map(|process| LedgerEntry { process, limit: u64::MAX, outstanding: grant })
            .take(MAX_LEDGER_ENTRIES)
            .collect()
    }

    /// In doubt a process lives: its room is not given to others.
    fn is_live(&self, process: ProcessId) -> bool {
        hicache_sys::lock::is_locked(&self.paths.process_lock(process)).unwrap_or(true)
    }

    /// Changes the capacity of the root for all processes; others learn of it when they next visit the ledger. With
    /// a smaller one nothing is removed here, and no room given until enough is gone.
    ///
    /// # Errors
    /// `Config` below 16 MiB, `Unsupported` in a root open for reading, `Io` when the system says no or the ledger
    /// stays busy for 5 s.
    pub fn resize(&self, capacity: u64) -> Result<()> {
        if capacity < MIN_CAPACITY_BYTES {
            return Err(Error::config(format!(
                "expected a capacity of at least {MIN_CAPACITY_BYTES} bytes (16 MiB), found {capacity}"
            )));
        }
        if self.read_only {
            return Err(Error::new(crate::ErrorKind::Unsupported, "the store is open for reading"));
        }
        let ledger_path = self.paths.budget();
        let mut visit = self
            .visit(LONG_PATIENCE)
            .and_then(|visit| visit.ok_or_else(|| io::ErrorKind::TimedOut.into()))
            .map_err(|error| Error::io("cannot lock", &ledger_path, error))?;
        let path = self.paths.description();
        let temporary = Paths::temporary(&self.paths.root, self.process, next_temporary());
        let description = RootDescription { capacity_bytes: capacity, ..visit.visitor.description.clone() };
        hicache_sys::file::publish_replacing(&path, &temporary, &description.encode())
            .map_err(|error| Error::io("cannot write", &path, error))?;
        self.look_at_description(&mut visit.visitor);
        self.measure_at(&mut visit, false).map_err(|error| Error::io("cannot write", &ledger_path, error))
    }

    /// Takes this process off the ledger: its files belong to nobody from now on, and it takes no more room.
    pub fn release(&self) {
        let mut visitor = self.visitor();
        if self.read_only || std::mem::replace(&mut visitor.is_released, true) {
            return;
        }
        drop(visitor);
        let has_entry = peek(&self.paths).is_none_or(|ledger| ledger.entry(self.process).is_some());
        self.own_gives_up(u64::MAX);
        // If not now, then when somebody sees that the process is gone.
        if has_entry && let Ok(Some(mut visit)) = self.visit(PATIENCE) {
            let _ = self.measure_at(&mut visit, false);
        }
    }

    /// What is known of the budget now. Changes nothing.
    pub fn status(&self) -> BudgetStatus {
        let ledger = peek(&self.paths).unwrap_or_default();
        let available =
            hicache_sys::probe::file_system(&self.paths.root).map_or(0, |found| found.available_bytes);
        let limits = ledger.entries.iter().map(|entry| (entry.process, entry.limit, entry.outstanding));
        BudgetStatus {
            capacity: self.capacity(),
            used: Usage::measure(&self.paths).total,
            limits: limits.collect(),
            nobody: ledger.nobody,
            free_space_floor: self.floor,
            available,
        }
    }

    fn outstanding(&self) -> u64 {
        let own = self.own();
        own.left + own.in_flight
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn visitor(&self) -> MutexGuard<'_, Visitor> {
        self.visitor.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Locks the ledger; `None` when it stays busy.
    fn visit(&self, patience: Duration) -> io::Result<Option<Visit<'_>>> {
        let deadline = Instant::now() + patience;
        let mut visitor = loop {
            match self.visitor.try_lock() {
                Ok(visitor) => break visitor,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Ok(None),
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
            }
        };
        let rest = deadline.saturating_duration_since(Instant::now());
        let Some(locked) = LockedLedger::lock(&self.paths, rest)? else { return Ok(None) };
        self.look_at_description(&mut visitor);
        let known = locked.read()?;
        Ok(Some(Visit { locked, visitor, known }))
    }

    /// Reads the capacity again if `root.json` changed. One that cannot be read changes nothing.
    fn look_at_description(&self, visitor: &mut Visitor) {
        let Ok(metadata) = std::fs::symlink_metadata(self.paths.description()) else { return };
        let seen = Some((metadata.ino(), metadata.mtime(), metadata.mtime_nsec()));
        if visitor.seen == seen {
            return;
        }
        if let Ok(Some(description)) = root::read_description(&self.paths) {
            self.capacity.store(description.capacity_bytes, Ordering::Release);
            visitor.description = description;
        }
        visitor.seen = seen;
    }
}

/// The ledger under its lock, for one process.
struct Visit<'a> {
    locked: LockedLedger,
    visitor: MutexGuard<'a, Visitor>,
    /// `None` when the ledger is damaged, or new.
    known: Option<Ledger>,
}

impl Visit<'_> {
    fn ledger(&self) -> Ledger {
        self.known.clone().unwrap_or_default()
    }
}

/// Part of the capacity that is granted to nobody: for folders, files in words, and the blocks that file systems
/// take for themselves when a file falls into many pieces. Nobody's limit has it as long as there is room.
fn reserve(capacity: u64) -> u64 {
    (capacity / 128).clamp(128 << 10, 8 << 20) / BLOCK_BYTES * BLOCK_BYTES
}

fn may_measure(measured_ns: u64) -> bool {
    // A clock that was set back must not stop it.
    now_ns().checked_sub(measured_ns).is_none_or(|age| age >= MEASURE_AGAIN_NS)
}
