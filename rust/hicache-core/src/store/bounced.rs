//! Restores and backups through memory of the store: requests own all that they touch, so that a call can leave them
//! behind at its deadline. Only the calling thread touches the caller's memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use hicache_sys::Region;

use crate::key::PageKey;
use crate::store::backup::{BackupReport, ChainStart};
use crate::store::bounce::{AbandonableBatch, BOUNCE_THREADS, BounceMemory, NoMemory};
use crate::store::counters::Counter;
use crate::store::device_health::CallEnd;
use crate::store::io::IoEngine;
use crate::store::reading::{Reader, asked_for, of_layers};
use crate::store::restore::{RestoreOutcome, RestoreReport};
use crate::store::view::{BoundMemory, PoolState, View};
use crate::store::writing::{Chain, Refusal, Writer, Written, missing};
use crate::tile::Span;
use crate::{Error, Result};

/// About as many bytes as one request brings: some for each thread are under way at once.
const REQUEST_BYTES: u64 = 4 << 20;

/// Most raw bytes that are published together.
const UNIT_BYTES: u64 = 8 << 20;

/// Requests of one call under way and waiting.
const MOST_REQUESTS: usize = 2 * BOUNCE_THREADS;

/// Pages in memory of the store, one pool after the other.
struct Staging {
    regions: Vec<Region>,
    /// Slot of each page in each pool; -1 for none.
    slots: Vec<Vec<i64>>,
    _memory: BounceMemory,
}

impl Staging {
    /// Room for the pages that `is_held` says, of `pages`. `memory` accounts for it.
    fn new(
        pools: &[PoolState],
        pages: usize,
        is_held: impl Fn(usize, usize) -> bool,
        memory: BounceMemory,
    ) -> Staging {
        let (mut regions, mut slots) = (Vec::with_capacity(pools.len()), Vec::with_capacity(pools.len()));
        for (number, pool) in pools.iter().enumerate() {
            let mut held = 0;
            let slot = |page| match is_held(number, page) {
                true => (held, held += 1).0,
                false => -1,
            };
            slots.push((0..pages).map(slot).collect());
            regions.push(Region::owned(held as usize * pool.form.page_bytes as usize));
        }
        Staging { regions, slots, _memory: memory }
    }

    fn bind<'a>(&'a self, pools: &[PoolState]) -> Result<Vec<BoundMemory<'a>>> {
        let bound = pools.iter().zip(&self.regions).zip(&self.slots).map(|((pool, region), slots)| {
            Ok(BoundMemory { regions: vec![region], slots, host: pool.staging()?, is_staging: true })
        });
        bound.collect()
    }

    /// First byte of a page in its region.
    fn offset(&self, pools: &[PoolState], number: usize, page: usize) -> Option<u64> {
        let slot = u64::try_from(self.slots[number][page]).ok()?;
        Some(slot * pools[number].form.page_bytes)
    }

    /// Copies page `page` of every pool that holds it to page `to` of the caller's memory.
    fn copy_out(
        &self,
        pools: &[PoolState],
        page: usize,
        memory: &[BoundMemory<'_>],
        to: usize,
        layers: Option<&[Span]>,
    ) -> Result<()> {
        for (number, (pool, memory)) in pools.iter().zip(memory).enumerate() {
            let Some(offset) = self.offset(pools, number, page) else { continue };
            let Some(piece) = of_layers(pool.spec.tile, layers, number) else { continue };
            let landing = pool.staging_landing(memory, &piece)?;
            let (bytes, slot) = (pool.form.page_bytes, memory.slots[to] as u64);
            let copied = self.regions[number]
                .with_bytes(offset, bytes, |from| landing.scatter(0..bytes, from, slot, &memory.regions));
            copied.map_err(|error| Error::geometry(error.to_string()))??;
        }
        Ok(())
    }

    /// Copies page `page` of every pool that holds it from the same page of the caller's memory.
    fn copy_in(&self, pools: &[PoolState], page: usize, memory: &[BoundMemory<'_>]) -> Result<()> {
        let outside = |error: hicache_sys::OutOfBounds| Error::geometry(error.to_string());
        for (number, (pool, memory)) in pools.iter().zip(memory).enumerate() {
            let Some(mut offset) = self.offset(pools, number, page) else { continue };
            let (landing, mut pieces) = (pool.staging_landing(memory, &pool.spec.tile)?, Vec::new());
            landing.pieces(0..pool.form.page_bytes, memory.slots[page] as u64, &memory.regions, &mut pieces);
            for piece in pieces {
                let copied = piece
                    .region
                    .with_bytes(piece.offset, piece.len, |from| self.regions[number].copy_in(offset, from));
                copied.map_err(outside)?.map_err(outside)?;
                offset += piece.len;
            }
        }
        Ok(())
    }
}

/// Pages of one restore that one request brings.
struct Group {
    pages: Range<usize>,
    bytes: u64,
}

impl View {
    /// A restore whose reads go to memory of the store, and from there to the caller's when they have come in time.
    pub(crate) fn restore_bounced(
        &self,
        keys: &[PageKey],
        memory: &[BoundMemory<'_>],
        layers: Option<&[Span]>,
        deadline: Option<Instant>,
    ) -> Result<(RestoreReport, CallEnd)> {
        let layers: Option<Arc<[Span]>> = layers.map(Arc::from);
        let outcomes = asked_for(keys.len(), memory, RestoreOutcome::Late);
        let mut report = RestoreReport { outcomes, bytes: 0 };
        let mut end = CallEnd::default();
        let (bouncer, groups) = (&self.inner.bouncer, self.groups(memory, &report.outcomes));
        let mut batch = AbandonableBatch::new(bouncer);
        let mut begun = 0;
        loop {
            while begun < groups.len()
                && batch.in_flight() < MOST_REQUESTS
                && !self.inner.device.clock.is_past(deadline)
            {
                let group = &groups[begun];
                let room = match bouncer.try_memory(group.bytes) {
                    Some(room) => room,
                    // The end of one of its own gives room.
                    None if batch.in_flight() > 0 => break,
                    None => match bouncer.memory(group.bytes, deadline) {
                        Ok(room) => room,
                        Err(_) => break,
                    },
                };
                self.submit_restore(
                    &mut batch,
                    begun,
                    &keys[group.pages.clone()],
                    memory,
                    group,
                    room,
                    &layers,
                    deadline,
                );
                begun += 1;
            }
            if batch.in_flight() == 0 {
                break;
            }
            let Some((number, ended)) = batch.next(deadline) else { break };
            let pages = groups[number].pages.clone();
            match ended {
                Ok((part, staging)) => {
                    self.bring(&mut report, part, &staging, memory, pages, layers.as_deref())?;
                }
                Err(error) => {
                    for outcome in &mut report.outcomes[pages] {
                        *outcome = (*outcome).max(RestoreOutcome::Error);
                    }
                    self.inner.notices.push(crate::store::notices::Level::Warning, "read-error", || {
                        format!("a bounced read failed: {error}")
                    });
                }
            }
        }
        end.is_stuck = self.note_stuck();
        self.note_abandoned(batch);
        Ok((report, end))
    }

    /// Cuts the pages that are asked for into requests.
    fn groups(&self, memory: &[BoundMemory<'_>], outcomes: &[RestoreOutcome]) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for page in (0..outcomes.len()).filter(|&page| outcomes[page] != RestoreOutcome::Skipped) {
            let wanted = self.pools.iter().zip(memory).filter(|(_, memory)| memory.slots[page] >= 0);
            let bytes: u64 = wanted.map(|(pool, _)| pool.form.page_bytes).sum();
            match groups.last_mut() {
                Some(group) if group.bytes + bytes <= REQUEST_BYTES => {
                    group.pages.end = page + 1;
                    group.bytes += bytes;
                }
                _ => groups.push(Group { pages: page..page + 1, bytes }),
            }
        }
        groups
    }

    #[expect(clippy::too_many_arguments, reason = "what a request owns")]
    fn submit_restore(
        &self,
        batch: &mut AbandonableBatch<(RestoreReport, Staging)>,
        number: usize,
        keys: &[PageKey],
        memory: &[BoundMemory<'_>],
        group: &Group,
        room: BounceMemory,
        layers: &Option<Arc<[Span]>>,
        deadline: Option<Instant>,
    ) {
        let first = group.pages.start;
        let is_wanted = |pool: usize, page: usize| memory[pool].slots[first + page] >= 0;
        let staging = Staging::new(&self.pools, keys.len(), is_wanted, room);
        let (inner, state) = (Arc::clone(&self.inner), Arc::clone(&self.state));
        let (pools, keys, layers) = (Arc::clone(&self.pools), keys.to_vec(), layers.clone());
        batch.submit(number, move || {
            let reader = Reader {
                inner: &inner,
                state: &state,
                pools: &pools,
                engine: &inner.inline,
                deadline,
                layers: layers.as_deref(),
            };
            let restored = staging.bind(&pools).and_then(|bound| reader.restore(&keys, &bound));
            restored.map(|report| (report, staging)).map_err(io::Error::other)
        });
    }

    /// Brings what a request restored to the caller.
    fn bring(
        &self,
        report: &mut RestoreReport,
        part: RestoreReport,
        staging: &Staging,
        memory: &[BoundMemory<'_>],
        pages: Range<usize>,
        layers: Option<&[Span]>,
    ) -> Result<()> {
        for (from, (to, outcome)) in pages.zip(part.outcomes).enumerate() {
            if outcome == RestoreOutcome::Restored {
                staging.copy_out(&self.pools, from, memory, to, layers)?;
                self.inner.counters.add(Counter::BouncedReads, 1);
            }
            report.outcomes[to] = outcome;
        }
        report.bytes += part.bytes;
        Ok(())
    }

    /// A backup whose pages are copied to memory of the store before they are written.
    pub(crate) fn backup_bounced(
        &self,
        keys: &[PageKey],
        memory: &[BoundMemory<'_>],
        start: ChainStart,
        deadline: Option<Instant>,
        report: &mut BackupReport,
    ) -> CallEnd {
        let mut end = CallEnd::default();
        let slots: Vec<Vec<i64>> = memory.iter().map(|memory| memory.slots.to_vec()).collect();
        let (keys, slots): (Arc<[PageKey]>, _) = (keys.into(), Arc::new(slots));
        let Some(missing) = self.find_missing(&keys, &slots, deadline, &mut end) else {
            let is_given = |page: usize| memory.iter().any(|memory| memory.slots[page] >= 0);
            self.refuse(report, Refusal::late(), is_given);
            return end;
        };
        let given = Arc::new(Given { keys, slots, missing, start });
        let slots = as_slices(&given.slots);
        self.store_missing(&given.chain(&slots), UNIT_BYTES, report, |pages| {
            let first = pages.start;
            let written = self.write_bounced(&given, memory, pages, deadline, &mut end);
            written.unwrap_or_else(|refusal| Written::refused(first, refusal))
        });
        end
    }

    /// What must be written, found out on a thread that may hang. `None`: not by the deadline.
    fn find_missing(
        &self,
        keys: &Arc<[PageKey]>,
        slots: &Arc<Vec<Vec<i64>>>,
        deadline: Option<Instant>,
        end: &mut CallEnd,
    ) -> Option<Vec<Vec<bool>>> {
        if self.inner.device.clock.is_past(deadline) {
            return None;
        }
        let mut batch = AbandonableBatch::new(&self.inner.bouncer);
        let (inner, state) = (Arc::clone(&self.inner), Arc::clone(&self.state));
        let (pools, keys, slots) = (Arc::clone(&self.pools), Arc::clone(keys), Arc::clone(slots));
        batch.submit(0, move || {
            state.refresh(&inner.counters);
            Ok(missing(&state, &pools, &keys, &as_slices(&slots)))
        });
        let found = batch.next(deadline).and_then(|(_, found)| found.ok());
        if found.is_none() {
            end.is_stuck |= self.note_stuck();
        }
        self.note_abandoned(batch);
        found
    }

    /// Writes the missing objects of some pages, and waits for it until the deadline.
    fn write_bounced(
        &self,
        given: &Arc<Given>,
        memory: &[BoundMemory<'_>],
        pages: Range<usize>,
        deadline: Option<Instant>,
        end: &mut CallEnd,
    ) -> std::result::Result<Written, Refusal> {
        let is_held = |pool: usize, page: usize| pages.contains(&page) && given.missing[pool][page];
        let of_pool = |(number, pool): (usize, &PoolState)| {
            pages.clone().filter(|&page| is_held(number, page)).count() as u64 * pool.form.page_bytes
        };
        let bytes = self.pools.iter().enumerate().map(of_pool).sum();
        let room = self.inner.bouncer.memory(bytes, deadline).map_err(|why| {
            end.is_stuck |= why == NoMemory::Stuck && self.note_stuck();
            Refusal::late()
        })?;
        let staging = Staging::new(&self.pools, given.keys.len(), is_held, room);
        for page in pages.clone() {
            staging.copy_in(&self.pools, page, memory).map_err(Refusal::from_error)?;
        }
        let count = pages.clone().filter(|&page| given.missing.iter().any(|missing| missing[page])).count();
        let mut batch = AbandonableBatch::new(&self.inner.bouncer);
        let (inner, state) = (Arc::clone(&self.inner), Arc::clone(&self.state));
        let (pools, zstd_level, owned) = (Arc::clone(&self.pools), self.zstd_level, Arc::clone(given));
        batch.submit(0, move || {
            let engine: &dyn IoEngine = &inner.inline;
            let writer = Writer { inner: &inner, state: &state, pools: &pools, engine, zstd_level, deadline };
            let slots = as_slices(&owned.slots);
            let bound = staging.bind(&pools).map_err(io::Error::other)?;
            Ok(writer.write_pages(&owned.chain(&slots), &bound, pages))
        });
        let written = match batch.next(deadline) {
            Some((_, Ok(written))) => Ok(written),
            Some((_, Err(error))) => Err(Refusal::from_error(Error::new(
                crate::ErrorKind::Io,
                format!("a bounced write failed: {error}"),
            ))),
            None => {
                end.is_stuck |= self.note_stuck();
                Err(Refusal::late())
            }
        };
        self.note_abandoned(batch);
        if written.as_ref().is_ok_and(|written| written.refused.is_none()) {
            self.inner.counters.add(Counter::BouncedWrites, count as u64);
        }
        written
    }

    /// Whether every thread hangs in requests of other calls.
    fn note_stuck(&self) -> bool {
        let is_stuck = self.inner.bouncer.is_stuck();
        self.inner.counters.add(Counter::BounceStuck, u64::from(is_stuck));
        is_stuck
    }

    fn note_abandoned<T: Send + 'static>(&self, batch: AbandonableBatch<T>) {
        self.inner.counters.add(Counter::AbandonedRequests, batch.abandon() as u64);
    }
}

/// The pages of a backup, owned by its requests.
struct Given {
    keys: Arc<[PageKey]>,
    slots: Arc<Vec<Vec<i64>>>,
    missing: Vec<Vec<bool>>,
    start: ChainStart,
}

impl Given {
    fn chain<'a>(&'a self, slots: &'a [&'a [i64]]) -> Chain<'a> {
        Chain { keys: &self.keys, slots, missing: &self.missing, start: self.start }
    }
}

fn as_slices(slots: &[Vec<i64>]) -> Vec<&[i64]> {
    slots.iter().map(Vec::as_slice).collect()
}
