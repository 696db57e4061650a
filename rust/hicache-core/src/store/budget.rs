//! Room under the root's capacity, taken before bytes are written.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::store::paths::Paths;
use crate::store::root;

/// What a unit takes at most beside its bytes: the journal's and the directory's growth to whole disk blocks.
const MARGIN_BYTES: u64 = 16 << 10;

/// The root's budget as this process sees it: measured from the files, counted on between measurements.
pub struct Budget {
    capacity: u64,
    used: AtomicU64,
}

impl Budget {
    /// A budget of `capacity` bytes of which `used` are taken.
    pub fn new(capacity: u64, used: u64) -> Self {
        Budget { capacity, used: AtomicU64::new(used) }
    }

    /// Takes room for `bytes`; `false` when there is none, also after measuring anew what others gave back.
    pub fn take(&self, paths: &Paths, bytes: u64) -> bool {
        let want = bytes + MARGIN_BYTES;
        if self.try_take(want) {
            return true;
        }
        self.measure(paths);
        self.try_take(want)
    }

    /// Gives back what a unit that came to nothing had taken.
    pub fn give_back(&self, bytes: u64) {
        let want = bytes + MARGIN_BYTES;
        let _ = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| Some(used.saturating_sub(want)));
    }

    /// Measures the files, which is what counts.
    pub fn measure(&self, paths: &Paths) -> u64 {
        let used = root::used_bytes(paths);
        self.used.store(used, Ordering::Release);
        used
    }

    fn try_take(&self, want: u64) -> bool {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(want).filter(|&total| total <= self.capacity)
            })
            .is_ok()
    }
}
