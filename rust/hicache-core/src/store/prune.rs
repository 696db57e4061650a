//! Making a root smaller on request, beside whoever uses it.

use std::time::{Duration, Instant};

use crate::store::Store;
use crate::store::evict::{Freed, Round, Want};
use crate::{Error, ErrorKind, Result};

/// How long a request waits for other processes that evict.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes asked of one round.
const STEP_BYTES: u64 = 256 << 20;

impl Store {
    /// Removes pages, the least useful first, until the root's files take at most `bytes` on disk or no page is left.
    ///
    /// # Errors
    /// `Closed`, `Unsupported` on a read-only store, `Io` when nobody can be told of the removes or another process
    /// evicts for too long. What was removed before stays removed.
    pub fn prune_to(&self, bytes: u64) -> Result<Freed> {
        let mut freed = self.prune(Want::Leftovers)?;
        loop {
            let over = self.inner.budget.measure().saturating_sub(bytes);
            if over == 0 {
                return Ok(freed);
            }
            let step = self.prune(Want::Bytes(over.min(STEP_BYTES)))?;
            freed = freed.plus(step);
            if step.objects == 0 {
                return Ok(freed);
            }
        }
    }

    /// Removes pages that were not used for `age`, in whole chains from their ends.
    ///
    /// # Errors
    /// As [`Store::prune_to`].
    pub fn prune_unused_for(&self, age: Duration) -> Result<Freed> {
        // Uses count from when they are told of: those of now must not come after the moment that is asked for.
        self.inner.leave_touches();
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.prune(Want::UnusedSince(crate::store::now_ns().saturating_sub(age)))
    }

    /// Changes the root's capacity, for all processes; pages leave until it holds.
    ///
    /// # Errors
    /// `Config` for less than the smallest capacity; else as [`Store::prune_to`].
    pub fn resize(&self, capacity_bytes: u64) -> Result<Freed> {
        self.check_writable()?;
        self.inner.budget.resize(capacity_bytes)?;
        self.prune_to(capacity_bytes)
    }

    fn prune(&self, want: Want) -> Result<Freed> {
        self.check_writable()?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let round = self.inner.evict(want);
            match round.map_err(|error| Error::io("cannot evict in", &self.inner.paths.root, error))? {
                Round::Done(freed) => return Ok(freed),
                Round::Elsewhere if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Round::Elsewhere => {
                    return Err(Error::new(
                        ErrorKind::Io,
                        format!(
                            "another process has held {} for too long",
                            self.inner.paths.evict().display()
                        ),
                    ));
                }
            }
        }
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_open()?;
        match self.inner.options.read_only {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Unsupported, "the store is open for reading only")),
        }
    }
}
