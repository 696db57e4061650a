//! How a store is opened.

use std::time::Duration;

use crate::store::clock::Clock;
use crate::{Error, Result};

/// How payload goes to and from the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoMode {
    /// Written through the page cache; read through it what is there or is asked for again, and past it what is not,
    /// where the kernel tells (`cachestat`, Linux 6.5) and the file system allows it.
    #[default]
    Auto,
    /// Through the page cache.
    Buffered,
    /// Past the page cache, where the file system allows it and the addresses are aligned.
    Direct,
}

impl IoMode {
    /// Mode of this name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(IoMode::Auto),
            "buffered" => Ok(IoMode::Buffered),
            "direct" => Ok(IoMode::Direct),
            _ => Err(Error::config(format!("expected I/O mode auto, buffered or direct, found {name:?}"))),
        }
    }

    /// Name of the mode.
    pub fn name(self) -> &'static str {
        match self {
            IoMode::Auto => "auto",
            IoMode::Buffered => "buffered",
            IoMode::Direct => "direct",
        }
    }
}

/// Smallest capacity of a root, in bytes.
pub const MIN_CAPACITY_BYTES: u64 = 16 << 20;

/// Shortest time to live of pages.
pub const MIN_TIME_TO_LIVE: Duration = Duration::from_secs(1);

/// Most I/O threads.
pub const MAX_IO_THREADS: usize = 256;

/// How a store is opened. `Default` is what an engine wants.
#[derive(Clone)]
pub struct StoreOptions {
    /// Budget of a new root in bytes; an existing root keeps its own. `None`: half of the free space.
    pub capacity_bytes: Option<u64>,
    /// Open what exists, write nothing at all.
    pub read_only: bool,
    /// How payload goes to and from the disk.
    pub io_mode: IoMode,
    /// Threads for payload I/O and checksums. `None`: two for each core, 4 to 16.
    pub io_threads: Option<usize>,
    /// One `fdatasync` for each unit, before it is published.
    pub durable: bool,
    /// Check every restored byte.
    pub verify: bool,
    /// Most segment files held open at once, each with one descriptor for the page cache and, unless `io_mode` is
    /// `Buffered`, one past it.
    pub max_open_segments: usize,
    /// Bytes of the file system that are left to others: no write that leaves less. `None`: a 64th of the file
    /// system, at most 1 GiB.
    pub free_space_floor_bytes: Option<u64>,
    /// Pages recorded longer ago than this, by the wall clock, are misses and are removed. `None`: they stay.
    pub time_to_live: Option<Duration>,
    /// Compare pages that are stored already with those given to `backup` again, and count the ones that differ.
    /// Each costs a read; the stored page stays. Bounced backups are not compared.
    pub detect_conflicts: bool,
    /// Leave the housekeeping to the test.
    #[cfg(feature = "testing")]
    pub keeps_no_house: bool,
    /// Time as the store takes it where calls wait.
    #[cfg(feature = "testing")]
    pub clock: crate::store::clock::Clock,
    /// Injects faults into payload I/O.
    #[cfg(feature = "testing")]
    pub io_hook: Option<std::sync::Arc<dyn crate::store::io::IoHook>>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions {
            capacity_bytes: None,
            read_only: false,
            io_mode: IoMode::Auto,
            io_threads: None,
            durable: false,
            verify: true,
            max_open_segments: 64,
            free_space_floor_bytes: None,
            time_to_live: None,
            detect_conflicts: false,
            #[cfg(feature = "testing")]
            keeps_no_house: false,
            #[cfg(feature = "testing")]
            clock: Default::default(),
            #[cfg(feature = "testing")]
            io_hook: None,
        }
    }
}

impl StoreOptions {
    pub(crate) fn validate(&self) -> Result<()> {
        if let Some(capacity) = self.capacity_bytes.filter(|&capacity| capacity < MIN_CAPACITY_BYTES) {
            return Err(Error::config(format!(
                "expected a capacity of at least {MIN_CAPACITY_BYTES} bytes (16 MiB), found {capacity}"
            )));
        }
        if let Some(threads) = self.io_threads.filter(|threads| !(1..=MAX_IO_THREADS).contains(threads)) {
            return Err(Error::config(format!(
                "expected 1 to {MAX_IO_THREADS} I/O threads, found {threads}"
            )));
        }
        if let Some(time) = self.time_to_live.filter(|&time| time < MIN_TIME_TO_LIVE) {
            return Err(Error::config(format!("expected a time to live of at least 1 s, found {time:?}")));
        }
        if self.max_open_segments == 0 {
            return Err(Error::config("expected at least one open segment, found 0"));
        }
        Ok(())
    }

    /// Whether this process does what keeps the root in order.
    pub(crate) fn keeps_house(&self) -> bool {
        #[cfg(feature = "testing")]
        if self.keeps_no_house {
            return false;
        }
        !self.read_only
    }

    pub(crate) fn clock(&self) -> Clock {
        #[cfg(feature = "testing")]
        return self.clock.clone();
        #[cfg(not(feature = "testing"))]
        Clock::default()
    }

    pub(crate) fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        self.io_threads.unwrap_or((2 * cores).clamp(4, 16))
    }
}
