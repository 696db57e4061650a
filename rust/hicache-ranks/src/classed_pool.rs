//! The allocator of pages by owner class, mirrored on all ranks.
//!
//! Every rank keeps the whole of it, all classes included, and gives the same answer to the same calls:
//! the lowest free pages of a class are taken first, whatever the order in which pages came back. So the
//! free lists of all ranks are equal without a message.

use crate::digest;
use crate::error::{RankError, RankErrorKind, Result};
use crate::placement::{Owner, Page, Placement};
use crate::rules::{Rule, Rules};

/// A run of pages of one path: `pages` pages, the first of owner `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Owner of the first page.
    pub start: Owner,
    /// Number of pages.
    pub pages: u32,
}

/// Free and taken pages of one pool, in one class per owner.
#[derive(Debug, Clone)]
pub struct ClassedPool {
    placement: Placement,
    per_class: u32,
    /// One bit per page of a class, set where free; classes one after the other.
    free: Vec<u64>,
    words_per_class: usize,
    counts: Vec<u32>,
    /// Exclusive or of the scattered numbers of the free pages.
    digest: u64,
    rules: Rules,
    own_order: bool,
}

impl ClassedPool {
    /// A pool of `pages_per_class` pages for each owner, all free.
    ///
    /// # Errors
    ///
    /// `config` where pages cannot be numbered with 32 bits.
    pub fn new(placement: Placement, pages_per_class: u32) -> Result<ClassedPool> {
        let owners = placement.owners();
        if pages_per_class.checked_mul(owners).is_none() {
            return Err(RankError::config(format!("{pages_per_class} pages for each of {owners} owners")));
        }
        let words_per_class = (pages_per_class as usize).div_ceil(64);
        let mut pool = ClassedPool {
            placement,
            per_class: pages_per_class,
            free: vec![0; words_per_class * owners as usize],
            words_per_class,
            counts: vec![0; owners as usize],
            digest: 0,
            rules: Rules::ALL,
            own_order: false,
        };
        (0..pages_per_class * owners).for_each(|page| _ = pool.give(page));
        Ok(pool)
    }

    /// Takes a rule away, on a rank that then has an order of its own where `own_order` says so.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules, own_order: bool) -> ClassedPool {
        self.rules = rules;
        self.own_order = own_order;
        self
    }

    /// The placement the classes follow.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Pages of the pool, free or taken.
    pub fn total(&self) -> u32 {
        self.per_class * self.placement.owners()
    }

    /// Free pages of each class.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// Free pages of all classes together: what is there, not what can be admitted.
    pub fn free_pages(&self) -> u32 {
        self.counts.iter().sum()
    }

    /// Pages that any cyclic run can count on: owners times the emptiest class. This is the number for
    /// admission; skewed locks can make it 0 while other classes still hold free pages.
    pub fn floor(&self) -> u32 {
        self.placement.owners() * self.counts.iter().copied().min().unwrap_or(0)
    }

    /// The class with most free pages, the lowest of equals.
    pub fn least_full_class(&self) -> Owner {
        let mut best = 0;
        for (class, &count) in self.counts.iter().enumerate() {
            if count > self.counts[best] {
                best = class;
            }
        }
        best as Owner
    }

    /// Whether the page is free.
    pub fn is_free(&self, page: Page) -> bool {
        if page >= self.total() {
            return false;
        }
        let (_, word, bit) = self.place(page);
        self.free[word] & bit != 0
    }

    /// Takes `pages` pages whose owners are `start`, `start + 1`, ... in turn: all of them, or none and `None`.
    pub fn alloc_cyclic(&mut self, start: Owner, pages: u32) -> Option<Vec<Page>> {
        let run = Run { start, pages };
        self.has_room(run).then(|| self.take_run(run))
    }

    /// As [`ClassedPool::alloc_cyclic`], as many pages as `into` is long, without a list of its own: false, and
    /// nothing taken or written, where there is no room.
    pub fn alloc_cyclic_into(&mut self, start: Owner, into: &mut [Page]) -> bool {
        let room = self.has_room(Run { start, pages: into.len() as u32 });
        if room {
            self.take_pages(start, into);
        }
        room
    }

    /// Takes the pages of several runs: all runs, or none and `None`.
    pub fn alloc_batch(&mut self, runs: &[Run]) -> Option<Vec<Vec<Page>>> {
        let mut batch = Vec::with_capacity(runs.len());
        for &run in runs {
            if !self.has_room(run) {
                if self.rules.hold(Rule::AllOrNothing) {
                    batch.iter().flatten().for_each(|&page| _ = self.give(page));
                }
                return None;
            }
            batch.push(self.take_run(run));
        }
        Some(batch)
    }

    /// Gives pages back.
    ///
    /// # Errors
    ///
    /// `ownership` where one of them is not taken or named twice; then none is given back.
    pub fn free(&mut self, pages: &[Page]) -> Result<()> {
        let total = self.total();
        for (given, &page) in pages.iter().enumerate() {
            if page >= total || !self.give(page) {
                pages[..given].iter().for_each(|&page| self.take(page));
                return Err(RankError::new(
                    RankErrorKind::Ownership,
                    format!("page {page} of {total} is given back but is not taken"),
                )
                .with("page", page));
            }
        }
        Ok(())
    }

    /// Digest of the free lists: equal on all ranks after equal calls.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Whether every class has what a cyclic run draws from it: the whole turns, and one page more from the
    /// first classes of the run.
    fn has_room(&self, run: Run) -> bool {
        let owners = self.placement.owners();
        if owners == 1 {
            return self.counts[0] >= run.pages;
        }
        let (turns, more) = (run.pages / owners, run.pages % owners);
        let mut class = run.start % owners;
        for place in 0..owners {
            if self.counts[class as usize] < turns + u32::from(place < more) {
                return false;
            }
            class = if class + 1 == owners { 0 } else { class + 1 };
        }
        true
    }

    /// Takes the pages of a run for which there is room.
    fn take_run(&mut self, run: Run) -> Vec<Page> {
        let mut taken = vec![0; run.pages as usize];
        self.take_pages(run.start, &mut taken);
        taken
    }

    /// The same, as many as `into` is long.
    fn take_pages(&mut self, start: Owner, into: &mut [Page]) {
        let owners = self.placement.owners();
        let mut class = if owners == 1 { 0 } else { start % owners };
        for slot in into {
            if let Some(page) = self.take_next(class) {
                *slot = page;
            }
            class = if class + 1 == owners { 0 } else { class + 1 };
        }
    }

    /// Takes the lowest free page of a class.
    fn take_next(&mut self, class: Owner) -> Option<Page> {
        let first = class as usize * self.words_per_class;
        let words = &mut self.free[first..first + self.words_per_class];
        let ordered = self.rules.hold(Rule::OrderedFreePages) || !self.own_order;
        let (place, bit) = if ordered {
            let place = words.iter().position(|&word| word != 0)?;
            (place, words[place].trailing_zeros())
        } else {
            let place = words.iter().rposition(|&word| word != 0)?;
            (place, 63 - words[place].leading_zeros())
        };
        words[place] &= !(1 << bit);
        let page = (place as u32 * 64 + bit) * self.placement.owners() + class;
        self.counts[class as usize] -= 1;
        self.digest ^= digest::scatter(u64::from(page));
        Some(page)
    }

    /// Class, word and bit of a page.
    #[inline]
    fn place(&self, page: Page) -> (usize, usize, u64) {
        let owners = self.placement.owners();
        let (class, local) = if owners == 1 { (0, page) } else { (page % owners, page / owners) };
        (class as usize, class as usize * self.words_per_class + (local / 64) as usize, 1 << (local % 64))
    }

    fn take(&mut self, page: Page) {
        let (class, word, bit) = self.place(page);
        self.free[word] &= !bit;
        self.counts[class] -= 1;
        self.digest ^= digest::scatter(u64::from(page));
    }

    /// Marks a page as free; false where it was.
    fn give(&mut self, page: Page) -> bool {
        let (class, word, bit) = self.place(page);
        if self.free[word] & bit != 0 {
            return false;
        }
        self.free[word] |= bit;
        self.counts[class] += 1;
        self.digest ^= digest::scatter(u64::from(page));
        true
    }
}
