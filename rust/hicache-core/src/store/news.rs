//! Whether anybody said anything since the last look at the journals, told by one small file.
//!
//! With many processes, asking each journal for its length is what a look-up spends its time on. So whoever said
//! something then writes a number that was never there before into `journal/news`, and a look-up that finds the
//! number of its last look has missed nothing. The file is a hint: it may be missing, old or damaged, and a writer
//! may be killed before it gets to it. So a look-up trusts it for [`TRUSTED`] only, and whatever must not miss
//! anything looks at the journals themselves.

use std::fs::File;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hicache_sys::file::{self, Access};

use crate::store::paths::Paths;

/// For so long nothing new in the file means that there is nothing new in the journals.
pub const TRUSTED: Duration = Duration::from_millis(200);

/// Length of the file: one number.
const NEWS_BYTES: usize = 8;

/// How a process tells that it said something.
#[derive(Debug)]
pub struct Teller {
    path: PathBuf,
    /// Opened, and the number to start from drawn, when there is something to tell.
    started: OnceLock<Option<(File, u64)>>,
    told: AtomicU64,
}

impl Teller {
    /// Tells in the root of `paths`.
    pub fn new(paths: &Paths) -> Self {
        Teller { path: paths.news(), started: OnceLock::new(), told: AtomicU64::new(0) }
    }

    /// Tells that something was said. To be called when it can be read.
    pub fn tell(&self) {
        let Some((file, start)) = self.started.get_or_init(|| self.start()) else { return };
        let number = start.wrapping_add(self.told.fetch_add(1, Ordering::Relaxed));
        // Who is not told looks again within `TRUSTED`.
        let _ = file::write_all(file, &number.to_le_bytes(), 0);
    }

    /// Numbers from a random start on: of 2^64, no two tellers meet on the same one.
    fn start(&self) -> Option<(File, u64)> {
        let mut random = [0; NEWS_BYTES];
        getrandom::fill(&mut random).ok()?;
        Some((file::open_or_create(&self.path).ok()?, u64::from_le_bytes(random)))
    }
}

/// How a process learns whether anybody told.
#[derive(Debug)]
pub struct Listener {
    path: PathBuf,
    file: Option<File>,
    opened: Option<Instant>,
}

impl Listener {
    /// Listens in the root of `paths`.
    pub fn new(paths: &Paths) -> Self {
        Listener { path: paths.news(), file: None, opened: None }
    }

    /// The number that was told last; `None` when there is none that could be compared.
    pub fn last(&self) -> Option<u64> {
        let mut bytes = [0; NEWS_BYTES];
        file::read_exact(self.file.as_ref()?, &mut bytes, 0).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Opens the file that has the name now, where that was not done lately: somebody may have made or replaced it.
    pub fn open(&mut self, now: Instant) {
        if self.opened.is_none_or(|opened| now.duration_since(opened) >= TRUSTED) {
            self.file = file::open_read(&self.path, Access::Buffered).ok();
            self.opened = Some(now);
        }
    }
}
