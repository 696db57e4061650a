//! Choosing: who leaves, when, and what goes with it.
//!
//! The rule, measured in `docs/decisions/0005-eviction.md`: only leaves leave. Pages never used again since they
//! were stored may hold [`UNUSED_SHARE`] of the bytes; above that the one longest not in use among them leaves, below
//! it the one longest not in use of all. So a stream of pages that nobody asks for again displaces itself, and
//! what is used again is displaced only by what is used again, or by newer pages while those are few.

use super::pages::{NONE, USED};
use super::victims::Victims;
use super::{Catalog, Victim};

/// Share of the stored bytes that pages never used again may hold, as a fraction.
const UNUSED_SHARE: (u128, u128) = (3, 5);

impl Catalog {
    /// Chooses whole pages, leaves first, until at least `bytes` stored bytes or everything is chosen. They are dead in
    /// the catalog from now on.
    ///
    /// All objects of a page leave together, of every pool, tile, writer and copy. Whoever tells of the victims in
    /// several frames does so in this order.
    pub fn choose(&mut self, bytes: u64) -> Vec<Victim> {
        let mut victims = Victims::default();
        let mut freed = 0;
        while freed < bytes
            && let Some(page) = self.next_to_leave()
        {
            freed += self.evict(page, &mut victims).0;
        }
        self.compact();
        victims.finish()
    }

    /// Chooses all pages that hold anything recorded before this time, with all that continues them. For a time to
    /// live.
    pub fn choose_recorded_before(&mut self, ns: u64) -> Vec<Victim> {
        let mut victims = Victims::default();
        for segment in 0..self.segments.len() as u32 {
            let old_runs: Vec<u32> = match &self.segments[segment as usize] {
                Some(segment) if segment.oldest_ns < ns => {
                    let runs = segment.runs.values().copied();
                    runs.filter(|&run| self.runs[run].live > 0 && self.runs[run].written_ns < ns).collect()
                }
                _ => continue,
            };
            for run in old_runs {
                for ordinal in (0..self.runs[run].pages).rev() {
                    let Some(object) = self.runs.object(run, ordinal) else { break };
                    let page = self.runs.at(object).page;
                    if page != NONE {
                        self.evict_all_of(page, &mut victims);
                    }
                }
            }
            self.find_oldest(segment);
        }
        self.compact();
        victims.finish()
    }

    /// Chooses all pages that were not used since this time, nor anything that continues them. Storing a page counts
    /// as a use here.
    pub fn choose_unused_since(&mut self, ns: u64) -> Vec<Victim> {
        let mut victims = Victims::default();
        for used in [false, true] {
            while let Some((recency, page)) = self.queues.front(&mut self.pages, used)
                && recency < ns
            {
                self.evict(page, &mut victims);
            }
        }
        self.compact();
        victims.finish()
    }

    fn next_to_leave(&mut self) -> Option<u32> {
        let unused = self.queues.front(&mut self.pages, false);
        let used = self.queues.front(&mut self.pages, true);
        let (share, whole) = UNUSED_SHARE;
        let too_many_unused = u128::from(self.unused_bytes) * whole > u128::from(self.live_bytes) * share;
        let (Some(unused), Some(used)) = (unused, used) else { return Some(unused.or(used)?.1) };
        Some(if too_many_unused || unused.0 <= used.0 { unused.1 } else { used.1 })
    }

    /// Takes out a page and everything that continues it, tails first.
    fn evict_all_of(&mut self, top: u32, victims: &mut Victims) {
        let mut page = top;
        loop {
            while self.pages[page].first_child != NONE {
                page = self.pages[page].first_child;
            }
            let is_top = page == top;
            page = self.evict(page, victims).1;
            if is_top {
                return;
            }
        }
    }

    /// Takes out a leaf. Its bytes, and the nearest page or joint above it that is still known.
    fn evict(&mut self, page: u32, victims: &mut Victims) -> (u64, u32) {
        let mut bytes = 0;
        while self.pages[page].objects != NONE {
            let object = self.pages[page].objects;
            let (run, ordinal) = self.runs.place(object);
            let victim = self.victim(run, ordinal, page);
            bytes += victim.bytes;
            victims.push(run, victim);
            self.pages[page].objects = self.runs.at(object).next;
            self.bury(object, self.pages[page].flags & USED != 0);
        }
        (bytes, self.depart(page))
    }

    fn victim(&self, run: u32, first: u32, page: u32) -> Victim {
        let Some(segment) = self.segments[self.runs[run].segment as usize].as_ref() else {
            unreachable!("a segment is forgotten after its runs")
        };
        Victim {
            namespace: self.namespaces[usize::from(segment.namespace)].fingerprint,
            segment: segment.id,
            entries_offset: self.runs[run].entries_offset,
            first,
            count: 1,
            key: self.pages[page].key,
            form: self.forms[self.runs[run].form as usize],
            bytes: self.runs[run].bytes(first, 1),
        }
    }
}
