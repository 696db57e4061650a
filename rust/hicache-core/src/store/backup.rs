//! `backup`: pages of one chain from host memory to the store, all pools of a page together.

use std::ops::Range;
use std::time::Instant;

use crate::format::frame::short_key;
use crate::key::PageKey;
use crate::store::counters::Counter;
use crate::store::device_health::{Bounce, CallEnd};
use crate::store::index::{MAX_RUN_PAGES, UNNAMED};
use crate::store::notices::Level;
use crate::store::view::{BoundMemory, PoolMemory, PoolState, View};
use crate::store::writing::{Chain, Refusal, Writer, Written, missing};
use crate::{Error, ErrorKind, Result};

/// Most raw bytes of one publication unit; compressed ones are held in memory before they are written.
const UNIT_BYTES: u64 = 256 << 20;
const COMPRESSED_UNIT_BYTES: u64 = 64 << 20;

/// What became of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackupOutcome {
    /// Written and published, in at least one pool.
    Stored,
    /// There already, in every pool given; nothing was written.
    Present,
    /// Not given: no slot in any pool.
    Skipped,
    /// No room, under the root's capacity or on the disk.
    Refused,
    /// Not written before the deadline, or refused since the device was too slow for the calls before.
    Late,
    /// The system could not write it.
    Error,
}

impl BackupOutcome {
    /// Every outcome.
    pub const ALL: [BackupOutcome; 6] = [
        BackupOutcome::Stored,
        BackupOutcome::Present,
        BackupOutcome::Skipped,
        BackupOutcome::Refused,
        BackupOutcome::Late,
        BackupOutcome::Error,
    ];

    /// Name in Python and the tools.
    pub fn name(self) -> &'static str {
        match self {
            BackupOutcome::Stored => "stored",
            BackupOutcome::Present => "present",
            BackupOutcome::Skipped => "skipped",
            BackupOutcome::Refused => "refused",
            BackupOutcome::Late => "late",
            BackupOutcome::Error => "error",
        }
    }

    fn is_there(self) -> bool {
        matches!(self, BackupOutcome::Stored | BackupOutcome::Present)
    }
}

/// Answer of `backup`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupReport {
    /// What became of each page.
    pub outcomes: Vec<BackupOutcome>,
    /// Raw bytes of the objects written.
    pub raw_bytes: u64,
    /// Bytes that they take in the segment, directories included.
    pub stored_bytes: u64,
    /// Why pages were refused or not written, if any were.
    pub reason: Option<String>,
}

impl BackupReport {
    /// For each page, whether the store has it now: stored or present.
    pub fn flags(&self) -> Vec<bool> {
        self.outcomes.iter().map(|outcome| outcome.is_there()).collect()
    }

    fn pages(&self, outcome: BackupOutcome) -> usize {
        self.outcomes.iter().filter(|&&have| have == outcome).count()
    }

    /// Pages from the first one on that the store has, before the first that it has not.
    pub fn leading(&self) -> usize {
        self.outcomes.iter().take_while(|outcome| outcome.is_there()).count()
    }
}

/// Where a chain starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChainStart {
    /// Key of the page before the first one.
    pub parent: Option<PageKey>,
    /// Pages before the first one; 0 starts a sequence.
    pub depth: Option<u32>,
}

/// How a backup is carried out.
#[derive(Debug, Clone, Copy, Default)]
pub struct BackupOptions {
    /// Nothing is written that was not begun by then, and nothing published. Pages that were not published by then are
    /// late; one that bounced may still appear when it was on the point of it.
    pub deadline: Option<Instant>,
    /// Whether pages go through memory of the store, so that the call can leave writes behind that do not end.
    pub bounce: Bounce,
}

impl View {
    /// [`View::backup_with`] as long as it takes.
    ///
    /// # Errors
    /// Those of [`View::backup_with`].
    pub fn backup(
        &self,
        keys: &[PageKey],
        memory: Vec<PoolMemory<'_>>,
        start: ChainStart,
    ) -> Result<BackupReport> {
        self.backup_with(keys, memory, start, BackupOptions::default())
    }

    /// Stores pages of one chain: `keys` in order, each pool's page `i` in slot `memory[pool].slots[i]`. All pools of
    /// a page become visible together. The call returns when the source memory is no longer needed: at its deadline if
    /// its pages bounce, else when the device has completed what was begun by then.
    ///
    /// # Errors
    /// `Geometry` or `Config` for arguments that do not fit, `Closed`, `Unsupported` on a read-only store. A full,
    /// slow or failing disk is an outcome of the pages, not an error.
    pub fn backup_with(
        &self,
        keys: &[PageKey],
        memory: Vec<PoolMemory<'_>>,
        start: ChainStart,
        options: BackupOptions,
    ) -> Result<BackupReport> {
        self.inner.check_open()?;
        if self.inner.options.read_only {
            return Err(Error::new(ErrorKind::Unsupported, "the store is open for reading only"));
        }
        if start.depth == Some(0) && start.parent.is_some() {
            return Err(Error::config("expected no parent at depth 0, found one"));
        }
        let memory = self.bind(memory, keys.len(), false)?;
        refuse_unusable(keys)?;
        let start = self.known_start(keys, start);
        let given = |page: usize| memory.iter().any(|memory| memory.slots[page] >= 0);
        let mut report = BackupReport {
            outcomes: (0..keys.len())
                .map(|page| if given(page) { BackupOutcome::Present } else { BackupOutcome::Skipped })
                .collect(),
            raw_bytes: 0,
            stored_bytes: 0,
            reason: None,
        };
        let Some(call) = self.inner.device.begin(options.deadline) else {
            self.refuse(&mut report, Refusal::late(), given);
            self.count(&report);
            return Ok(report);
        };
        let mut end = CallEnd::default();
        if call.bounces(options.bounce) {
            end = self.backup_bounced(keys, &memory, start, options.deadline, &mut report);
        } else {
            self.backup_straight(keys, &memory, start, options.deadline, &mut report);
        }
        end.moved = report.pages(BackupOutcome::Stored);
        end.late = report.pages(BackupOutcome::Late);
        self.count(&report);
        call.end(end);
        Ok(report)
    }

    /// Writes from the caller's memory.
    fn backup_straight(
        &self,
        keys: &[PageKey],
        memory: &[BoundMemory<'_>],
        start: ChainStart,
        deadline: Option<Instant>,
        report: &mut BackupReport,
    ) {
        self.state.refresh_within(&self.inner.counters, self.inner.device.clock.left(deadline));
        let slots: Vec<&[i64]> = memory.iter().map(|memory| memory.slots).collect();
        let missing = missing(&self.state, &self.pools, keys, &slots);
        if self.inner.options.detect_conflicts {
            self.compare_present(keys, memory, &missing, deadline);
        }
        let chain = Chain { keys, slots: &slots, missing: &missing, start };
        let writer = Writer {
            inner: &self.inner,
            state: &self.state,
            pools: &self.pools,
            engine: &*self.inner.engine,
            zstd_level: self.zstd_level,
            deadline,
        };
        let most = if self.zstd_level > 0 { COMPRESSED_UNIT_BYTES } else { UNIT_BYTES };
        self.store_missing(&chain, most, report, |pages| writer.write_pages(&chain, memory, pages));
    }

    /// Stores what is missing, some pages after the others; with the first that are not written it ends. `write` writes
    /// the missing objects of some pages.
    pub(crate) fn store_missing(
        &self,
        chain: &Chain<'_>,
        most_bytes: u64,
        report: &mut BackupReport,
        mut write: impl FnMut(Range<usize>) -> Written,
    ) {
        self.touch_present(chain.keys, chain.missing);
        let is_missing = |page: usize| chain.missing.iter().any(|missing| missing[page]);
        for pages in self.units(chain.keys.len(), chain.missing, most_bytes) {
            let Written { raw_bytes, stored_bytes, refused } = write(pages.clone());
            report.raw_bytes += raw_bytes;
            report.stored_bytes += stored_bytes;
            let stored = pages.start..refused.as_ref().map_or(pages.end, |(first, _)| *first);
            set(&mut report.outcomes, stored, is_missing, BackupOutcome::Stored);
            if let Some((first, refusal)) = refused {
                // What comes after would hang in the air: a chain is usable only from its start.
                return self.refuse(report, refusal, |page| page >= first && is_missing(page));
            }
        }
    }

    /// Gives pages the outcome of a refusal.
    pub(crate) fn refuse(
        &self,
        report: &mut BackupReport,
        refusal: Refusal,
        is_refused: impl Fn(usize) -> bool,
    ) {
        let pages = 0..report.outcomes.len();
        set(&mut report.outcomes, pages, is_refused, refusal.outcome);
        self.count_refusal(&refusal, &report.outcomes);
        report.reason = Some(refusal.reason);
    }

    /// Where the chain starts: as the caller says, else as an earlier look-up told.
    fn known_start(&self, keys: &[PageKey], start: ChainStart) -> ChainStart {
        match keys.first() {
            Some(first) if start == ChainStart::default() => {
                self.state.known_start(first).unwrap_or_default()
            }
            _ => start,
        }
    }

    /// Storing what is there already is a use of it.
    fn touch_present(&self, keys: &[PageKey], missing: &[Vec<bool>]) {
        let present =
            (0..keys.len()).take_while(|&page| missing.iter().all(|missing| !missing[page])).count();
        self.state.touch(keys, present);
    }

    /// Cuts the chain into units: whole pages, with all pools of a page in the same one. Pages of which nothing is
    /// missing belong to none.
    fn units(&self, pages: usize, missing: &[Vec<bool>], most: u64) -> Vec<Range<usize>> {
        // In a small root, room is made and taken in small parts.
        let most = most.min(self.inner.segment_bytes());
        let mut units: Vec<Range<usize>> = Vec::new();
        let mut bytes = 0;
        for page in 0..pages {
            let of_pool = |(pool, missing): (&PoolState, &Vec<bool>)| {
                if missing[page] { pool.form.page_bytes } else { 0 }
            };
            let page_bytes: u64 = self.pools.iter().zip(missing).map(of_pool).sum();
            if page_bytes == 0 {
                continue;
            }
            match units.last_mut() {
                Some(unit) if bytes + page_bytes <= most && page - unit.start < MAX_RUN_PAGES => {
                    unit.end = page + 1;
                    bytes += page_bytes;
                }
                _ => {
                    units.push(page..page + 1);
                    bytes = page_bytes;
                }
            }
        }
        units
    }

    fn count_refusal(&self, refusal: &Refusal, outcomes: &[BackupOutcome]) {
        let pages = outcomes.iter().filter(|&&outcome| outcome == refusal.outcome).count() as u64;
        self.inner.counters.add(refusal.counter, pages);
        self.inner.notices.push(Level::Warning, refusal.counter.name(), || {
            format!("{pages} pages were not stored: {}", refusal.reason)
        });
    }

    fn count(&self, report: &BackupReport) {
        let pages = |outcome| report.pages(outcome) as u64;
        let counters = &self.inner.counters;
        counters.add(Counter::BackupStored, pages(BackupOutcome::Stored));
        counters.add(Counter::BackupPresent, pages(BackupOutcome::Present));
        counters.add(Counter::BackupRawBytes, report.raw_bytes);
        counters.add(Counter::BackupStoredBytes, report.stored_bytes);
        self.inner.leave_counters(false);
    }
}

fn set(
    outcomes: &mut [BackupOutcome],
    pages: Range<usize>,
    is_meant: impl Fn(usize) -> bool,
    outcome: BackupOutcome,
) {
    for page in pages.filter(|&page| is_meant(page)) {
        outcomes[page] = outcome;
    }
}

/// Keys that come twice, and those that stand for a damaged entry in the index.
fn refuse_unusable(keys: &[PageKey]) -> Result<()> {
    let mut seen = std::collections::HashMap::with_capacity(keys.len());
    for (page, key) in keys.iter().enumerate() {
        if let Some(first) = seen.insert(key, page) {
            return Err(Error::config(format!(
                "expected keys of one chain, found the key of page {first} again at page {page}"
            )));
        }
    }
    match keys.iter().position(|key| short_key(key) == UNNAMED) {
        None => Ok(()),
        Some(page) => Err(Error::config(format!(
            "expected digests as keys, found one that starts with 16 zero bytes at page {page}"
        ))),
    }
}
