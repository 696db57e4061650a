//! What happened, counted by outcome. Totals only ever grow; each process leaves its own in its journal.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal;)*) => {
        /// A counter. Its number is part of the on-disk format and is never given to another meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Counter { $($(#[$doc])* $variant = $code,)* }

        impl Counter {
            /// Every counter.
            pub const ALL: &[Counter] = &[$(Counter::$variant,)*];

            /// Name in the tools and in Python.
            pub fn name(self) -> &'static str {
                match self { $(Counter::$variant => $name,)* }
            }
        }
    };
}

counters! {
    /// Pages of which at least one pool was written.
    BackupStored = 1, "backup_stored_pages";
    /// Pages that were there already.
    BackupPresent = 2, "backup_present_pages";
    /// Pages refused because the capacity is used up.
    BackupRefusedCapacity = 3, "backup_refused_capacity_pages";
    /// Pages refused because the file system or quota is full.
    BackupRefusedNoSpace = 4, "backup_refused_no_space_pages";
    /// Pages not written because the system said no.
    BackupError = 5, "backup_error_pages";
    /// Raw bytes of written objects.
    BackupRawBytes = 6, "backup_raw_bytes";
    /// Stored bytes of written objects.
    BackupStoredBytes = 7, "backup_stored_bytes";
    /// Runs written without knowing what comes before them.
    BackupUnknownParent = 8, "backup_unknown_parent_runs";
    /// Pages refused because other processes held the budget for too long.
    BackupRefusedBusy = 9, "backup_refused_busy_pages";
    /// Pages not written before the deadline.
    BackupLate = 13, "backup_late_pages";
    /// Calls of `match`.
    MatchCalls = 10, "match_calls";
    /// Pages asked for by `match`.
    MatchAsked = 11, "match_asked_pages";
    /// Pages that `match` promised.
    MatchHit = 12, "match_hit_pages";
    /// Pages restored exactly.
    RestoreRestored = 20, "restore_restored_pages";
    /// Pages that were not stored.
    RestoreAbsent = 21, "restore_absent_pages";
    /// Pages that were removed while they were read.
    RestoreEvicted = 22, "restore_evicted_pages";
    /// Pages whose bytes did not verify.
    RestoreDamaged = 23, "restore_damaged_pages";
    /// Pages whose place held another page's bytes.
    RestoreForeign = 24, "restore_foreign_pages";
    /// Pages that the system could not read.
    RestoreError = 25, "restore_error_pages";
    /// Pages not started before the deadline.
    RestoreLate = 26, "restore_late_pages";
    /// Raw bytes delivered.
    RestoreBytes = 27, "restore_bytes";
    /// Objects put into quarantine by this process.
    Quarantined = 30, "quarantined_objects";
    /// Stretches of journals that did not decode.
    JournalDamage = 31, "journal_damaged_stretches";
    /// Segments whose journal was missing and whose directories were read instead.
    SegmentsRebuilt = 32, "segments_rebuilt_from_directories";
    /// Writes or reads past the page cache that were refused and went through it.
    DirectFallbacks = 33, "direct_io_fallbacks";
    /// Objects that this process evicted, its own and others'.
    EvictedObjects = 40, "evicted_objects";
    /// Bytes on disk that went back by it.
    EvictedBytes = 41, "evicted_bytes";
    /// Objects that this process removed because they were older than the time to live.
    ExpiredObjects = 42, "expired_objects";
    /// Copies of this process's own that were removed because another copy stays.
    DuplicateObjects = 43, "duplicate_objects";
    /// Objects moved out of sparse segments.
    CompactedObjects = 44, "compacted_objects";
    /// Objects stored twice with different bytes.
    Conflicts = 45, "conflicting_objects";
    /// Writes that found the file system or quota full.
    NoSpace = 46, "no_space_errors";
    /// Segments of dead processes that this process finished.
    FinishedSegments = 47, "finished_segments";
    /// Pages read through memory of the store.
    BouncedReads = 50, "bounced_read_pages";
    /// Pages written through memory of the store.
    BouncedWrites = 51, "bounced_write_pages";
    /// Requests that a call left behind at its deadline, in flight in memory of the store.
    AbandonedRequests = 52, "abandoned_requests";
    /// Calls that could not bounce anything, since every thread for it hung in the device.
    BounceStuck = 53, "bounce_stuck_calls";
    /// How often the breaker opened.
    BreakerOpenings = 54, "breaker_openings";
    /// Calls refused at once while the breaker was open.
    BreakerRefused = 55, "breaker_refused_calls";
    /// Calls that ended more than 100 ms after their deadline.
    CallsPastDeadline = 56, "calls_past_deadline";
}

/// One process's counters.
pub struct Counters {
    values: Vec<AtomicU64>,
}

impl Default for Counters {
    fn default() -> Self {
        let last = Counter::ALL.iter().map(|&counter| counter as usize).max().unwrap_or(0);
        Counters { values: (0..=last).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Counters {
    /// Adds `amount`.
    pub fn add(&self, counter: Counter, amount: u64) {
        if amount > 0 {
            self.values[counter as usize].fetch_add(amount, Ordering::Relaxed);
        }
    }

    /// Present total.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize].load(Ordering::Relaxed)
    }

    /// Name and total of every counter.
    pub fn snapshot(&self) -> Vec<(Counter, u64)> {
        Counter::ALL.iter().map(|&counter| (counter, self.get(counter))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn numbers_and_names_are_unique() {
        let numbers: HashSet<_> = Counter::ALL.iter().map(|&counter| counter as u32).collect();
        let names: HashSet<_> = Counter::ALL.iter().map(|counter| counter.name()).collect();
        assert_eq!((numbers.len(), names.len()), (Counter::ALL.len(), Counter::ALL.len()));
    }
}
