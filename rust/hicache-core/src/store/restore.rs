//! `restore`: stored pages to host memory, verified, each one exact or reported missing.

use std::time::Instant;

use crate::Result;
use crate::key::PageKey;
use crate::store::counters::Counter;
use crate::store::device_health::{Bounce, CallEnd};
use crate::store::reading::{Reader, asked_for};
use crate::store::view::{PoolMemory, View};
use crate::tile::Span;

/// What became of one page. The caller's memory is defined for `Restored` pages only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RestoreOutcome {
    /// Every byte asked for is there, and exact.
    Restored,
    /// Not asked for: no slot in any pool.
    Skipped,
    /// Not stored, in one of the pools asked for.
    Absent,
    /// Removed while it was read.
    Evicted,
    /// Not read before the deadline, or refused since the device was too slow for the calls before.
    Late,
    /// The system could not read it.
    Error,
    /// Its place holds another page's bytes.
    Foreign,
    /// Its bytes do not verify.
    Damaged,
}

impl RestoreOutcome {
    /// Every outcome.
    pub const ALL: [RestoreOutcome; 8] = [
        RestoreOutcome::Restored,
        RestoreOutcome::Skipped,
        RestoreOutcome::Absent,
        RestoreOutcome::Evicted,
        RestoreOutcome::Late,
        RestoreOutcome::Error,
        RestoreOutcome::Foreign,
        RestoreOutcome::Damaged,
    ];

    /// Name in Python and the tools.
    pub fn name(self) -> &'static str {
        match self {
            RestoreOutcome::Restored => "restored",
            RestoreOutcome::Skipped => "skipped",
            RestoreOutcome::Absent => "absent",
            RestoreOutcome::Evicted => "evicted",
            RestoreOutcome::Late => "late",
            RestoreOutcome::Error => "error",
            RestoreOutcome::Foreign => "foreign",
            RestoreOutcome::Damaged => "damaged",
        }
    }

    fn counter(self) -> Option<Counter> {
        Some(match self {
            RestoreOutcome::Skipped => return None,
            RestoreOutcome::Restored => Counter::RestoreRestored,
            RestoreOutcome::Absent => Counter::RestoreAbsent,
            RestoreOutcome::Evicted => Counter::RestoreEvicted,
            RestoreOutcome::Late => Counter::RestoreLate,
            RestoreOutcome::Error => Counter::RestoreError,
            RestoreOutcome::Foreign => Counter::RestoreForeign,
            RestoreOutcome::Damaged => Counter::RestoreDamaged,
        })
    }
}

/// Answer of `restore`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoreReport {
    /// What became of each page, over all pools asked for.
    pub outcomes: Vec<RestoreOutcome>,
    /// Raw bytes of restored pages.
    pub bytes: u64,
}

impl RestoreReport {
    /// For each page, whether it was restored.
    pub fn flags(&self) -> Vec<bool> {
        self.outcomes.iter().map(|&outcome| outcome == RestoreOutcome::Restored).collect()
    }

    fn pages(&self, outcome: RestoreOutcome) -> usize {
        self.outcomes.iter().filter(|&&have| have == outcome).count()
    }

    /// Pages restored from the first one on, before the first that was not.
    pub fn leading(&self) -> usize {
        self.outcomes.iter().take_while(|&&outcome| outcome == RestoreOutcome::Restored).count()
    }
}

/// How a restore is carried out.
#[derive(Debug, Clone, Copy, Default)]
pub struct RestoreOptions {
    /// Reads not started by then are not started at all; bounced ones that have not ended by then are left behind.
    pub deadline: Option<Instant>,
    /// Whether pages go through memory of the store, so that the call can leave reads behind that do not end.
    pub bounce: Bounce,
}

impl View {
    /// Brings pages into host memory: page `i` of each pool to slot `memory[pool].slots[i]`, nothing where that is
    /// -1. The call returns when nothing is in flight into the caller's memory: at its deadline if its pages bounce,
    /// else when the device has completed what was begun by then.
    ///
    /// # Errors
    /// `Geometry` for memory that does not fit, `Closed`. A page that cannot be had is an outcome, not an error.
    pub fn restore(
        &self,
        keys: &[PageKey],
        memory: Vec<PoolMemory<'_>>,
        options: RestoreOptions,
    ) -> Result<RestoreReport> {
        let report = self.restore_layers(keys, memory, None, options)?;
        self.note_restored(keys, &report);
        Ok(report)
    }

    /// [`View::restore`] of some layers of each pool, or of all; counted as a restore of its pages by whoever puts the
    /// parts together.
    pub(crate) fn restore_layers(
        &self,
        keys: &[PageKey],
        memory: Vec<PoolMemory<'_>>,
        layers: Option<&[Span]>,
        options: RestoreOptions,
    ) -> Result<RestoreReport> {
        self.inner.check_open()?;
        let memory = self.bind(memory, keys.len(), true)?;
        let Some(call) = self.inner.device.begin(options.deadline) else {
            return Ok(RestoreReport {
                outcomes: asked_for(keys.len(), &memory, RestoreOutcome::Late),
                bytes: 0,
            });
        };
        let (report, mut end) = if call.bounces(options.bounce) {
            self.restore_bounced(keys, &memory, layers, options.deadline)?
        } else {
            let reader = Reader {
                inner: &self.inner,
                state: &self.state,
                pools: &self.pools,
                engine: &*self.inner.engine,
                deadline: options.deadline,
                layers,
            };
            (reader.restore(keys, &memory)?, CallEnd::default())
        };
        end.moved = report.pages(RestoreOutcome::Restored);
        end.late = report.pages(RestoreOutcome::Late);
        call.end(end);
        Ok(report)
    }

    /// Counts a restore, and marks its pages as used.
    pub(crate) fn note_restored(&self, keys: &[PageKey], report: &RestoreReport) {
        let last = report.outcomes.iter().rposition(|&outcome| outcome == RestoreOutcome::Restored);
        if let Some(last) = last {
            self.state.touch(keys, last + 1);
        }
        let counters = &self.inner.counters;
        for outcome in RestoreOutcome::ALL {
            if let Some(counter) = outcome.counter() {
                counters.add(counter, report.pages(outcome) as u64);
            }
        }
        counters.add(Counter::RestoreBytes, report.bytes);
        self.inner.leave_counters(false);
    }
}
