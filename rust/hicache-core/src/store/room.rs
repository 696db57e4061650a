//! Room for what is about to be written: from the budget, and where that is used up, by eviction.

use std::io;
use std::time::{Duration, Instant};

use crate::store::Inner;
use crate::store::budget::{NoRoom, Room};
use crate::store::counters::Counter;
use crate::store::evict::{Round, Want};
use crate::store::notices::Level;
use crate::store::paths::Paths;

/// How long a writer waits for another process that evicts.
const PATIENCE: Duration = Duration::from_secs(1);

/// After waiting in vain, writes are refused at once for this long: a stopped process must not slow down all others.
const QUIET: Duration = Duration::from_secs(1);

/// More rounds than this, and others take all that is freed: several of a millisecond while another process evicts.
const MOST_ROUNDS: u32 = 2000;

const EDQUOT: i32 = 122;

/// With so many times the free space that is needed, the disk is not full any more.
const PLENTY: u64 = 16;

/// A round frees this share of the capacity beside what is needed now, so that the next writes need none.
const AHEAD: u64 = 16;

/// Most bytes that a round frees ahead: punching takes time, and somebody waits for it.
const MOST_AHEAD_BYTES: u64 = 128 << 20;

/// Why a unit was not published.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The root's capacity is used up, and nothing could be evicted.
    Capacity(u64),
    /// The file system's free space is at its floor, and nothing could be evicted.
    Floor,
    /// Other processes held the ledger, or evicted, for too long.
    Busy,
    /// The file system has no room for it, in these words.
    NoSpace(String),
    /// The deadline passed before there was any.
    Late,
    /// The system said no.
    Io(io::Error),
}

impl Refused {
    /// Says which limit was met where the system only says that there is no room.
    pub(crate) fn explained(self, paths: &Paths) -> Self {
        match self {
            Refused::Io(error) if is_no_space(&error) => {
                let found = hicache_sys::probe::file_system(&paths.root).ok();
                let why = found.map_or_else(String::new, |found| match found {
                    found if found.total_inodes > 0 && found.free_inodes == 0 => "no inode is left: ".into(),
                    found => {
                        format!("{} bytes and {} inodes are left: ", found.available_bytes, found.free_inodes)
                    }
                });
                Refused::NoSpace(format!("{why}{error}"))
            }
            refused => refused,
        }
    }

    /// Whether there is no room, whatever the capacity says.
    pub(crate) fn is_no_space(&self) -> bool {
        match self {
            Refused::Floor | Refused::NoSpace(_) => true,
            Refused::Io(error) => is_no_space(error),
            Refused::Capacity(_) | Refused::Busy | Refused::Late => false,
        }
    }
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Refused::Io(error)
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        let full = |message: String| io::Error::new(io::ErrorKind::QuotaExceeded, message);
        match refused {
            Refused::Io(error) => error,
            Refused::Capacity(bytes) => full(format!("the root's capacity of {bytes} bytes is used up")),
            Refused::NoSpace(message) => io::Error::new(io::ErrorKind::StorageFull, message),
            Refused::Late => crate::store::io::late(),
            Refused::Floor => full("the file system's free space is at the floor that is kept".into()),
            Refused::Busy => {
                io::Error::new(io::ErrorKind::WouldBlock, "other processes held the budget for too long")
            }
        }
    }
}

/// ENOSPC, EDQUOT and EFBIG.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(28 | EDQUOT | 27))
}

/// Takes room for `bytes` on disk, evicting where there is none, until the deadline.
pub(crate) fn take(inner: &Inner, bytes: u64, deadline: Option<Instant>) -> Result<Room<'_>, Refused> {
    let patience = Instant::now() + PATIENCE;
    for last in (0..MOST_ROUNDS).map(|round| round + 1 == MOST_ROUNDS) {
        let (short_by, refused) = match inner.budget.take(bytes) {
            Ok(room) => return Ok(room),
            Err(NoRoom::Full { short_by }) => (short_by, Refused::Capacity(inner.budget.capacity())),
            Err(NoRoom::Floor { short_by }) => (short_by, Refused::Floor),
            Err(NoRoom::TooLarge) => return Err(Refused::Capacity(inner.budget.capacity())),
            Err(NoRoom::Busy) => return Err(Refused::Busy),
            Err(NoRoom::Io(error)) => return Err(Refused::Io(error)),
        };
        // What is evicted by then is for the next one.
        if inner.device.clock.is_past(deadline) {
            return Err(Refused::Late);
        }
        if last || !evict(inner, short_by, patience)? {
            return Err(refused);
        }
    }
    Err(Refused::Busy)
}

/// Makes room for `bytes` after the system said that there is none, whatever the budget says.
pub(crate) fn make(inner: &Inner, bytes: u64, error: &io::Error) {
    inner.counters.add(Counter::NoSpace, 1);
    let free = hicache_sys::probe::file_system(&inner.paths.root).map_or(0, |found| found.available_bytes);
    let is_quota = error.raw_os_error() == Some(EDQUOT);
    // A disk that has room again needs no page to leave; what a quota has left does not show there.
    if is_quota || free < PLENTY * bytes {
        // Whether it helped is for the next try to find out.
        let _ = evict(inner, bytes, Instant::now() + PATIENCE);
    }
}

/// Evicts ahead of need, so that a writer seldom waits for it: done by the processes that evicted lately. One that
/// knows the whole root gets ready before there are any.
pub(crate) fn keep_ahead(inner: &Inner) {
    let capacity = inner.budget.capacity();
    let left = capacity.saturating_sub(inner.budget.granted());
    let (wanted, least) = (capacity / AHEAD, capacity / AHEAD / 2);
    if inner.evictor.is_warm() {
        if left < least {
            inner.evict_aside(Want::Bytes((wanted - left).min(MOST_AHEAD_BYTES)));
        }
    } else if left < 2 * wanted && inner.is_writing() {
        inner.get_ready_to_evict();
    }
}

/// Evicts, or waits a moment for another process that does. `false`: there is nothing to evict.
fn evict(inner: &Inner, bytes: u64, deadline: Instant) -> Result<bool, Refused> {
    if inner.evictor.is_quiet() {
        return Err(Refused::Busy);
    }
    let ahead = (inner.budget.capacity() / AHEAD).min(MOST_AHEAD_BYTES);
    match inner.evict(Want::Bytes(bytes.saturating_add(ahead))) {
        // Small pages share blocks: many may leave before one comes free.
        Ok(Round::Done(freed)) => Ok(freed.bytes > 0 || freed.objects > 0),
        Ok(Round::Elsewhere) if Instant::now() < deadline => {
            std::thread::sleep(Duration::from_millis(1));
            Ok(true)
        }
        Ok(Round::Elsewhere) => {
            inner.evictor.be_quiet(QUIET);
            Err(Refused::Busy)
        }
        Err(error) => {
            inner.notices.push(Level::Warning, "eviction", || format!("cannot evict: {error}"));
            Ok(false)
        }
    }
}
