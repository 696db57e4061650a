//! The plan of a gather: equal blocks from every owner, and where each prefix page lies afterwards.
//!
//! A gather assembles the cached prefixes of a batch in a scratch buffer. Every owner sends a block of `B`
//! pages in the order of their local numbers, padded with the trash page; blocks lie one after the other.
//! `B` is the sum over requests of `ceil(prefix pages / owners)`: known on the host, without looking at the
//! device. It holds because every path is one cyclic run.

use crate::error::{RankError, RankErrorKind, Result};
use crate::placement::Page;
use crate::rules::{Rule, Rules};
use std::collections::BTreeMap;

/// What every owner sends and where it lands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatherPlan {
    owners: u32,
    block: u32,
    sends: Vec<Vec<Page>>,
    scratch: BTreeMap<Page, u32>,
}

impl GatherPlan {
    /// The plan for a batch of prefixes, each a list of pages in order of position.
    ///
    /// # Errors
    ///
    /// `ownership` where an owner holds more pages than a block: then a path was not one cyclic run.
    pub fn new(owners: u32, prefixes: &[&[Page]]) -> Result<GatherPlan> {
        GatherPlan::build(owners, prefixes, Rules::ALL)
    }

    pub(crate) fn build(owners: u32, prefixes: &[&[Page]], rules: Rules) -> Result<GatherPlan> {
        if owners == 0 {
            return Err(RankError::config("a gather from 0 owners"));
        }
        let block = prefixes.iter().map(|prefix| (prefix.len() as u32).div_ceil(owners)).sum();
        let mut sends = vec![Vec::new(); owners as usize];
        for &page in prefixes.iter().copied().flatten() {
            sends[(page % owners) as usize].push(page);
        }
        let mut scratch = BTreeMap::new();
        for (owner, pages) in sends.iter_mut().enumerate() {
            pages.sort_unstable();
            if rules.hold(Rule::SharedPagesOnce) {
                pages.dedup();
            }
            if pages.len() > block as usize {
                return Err(RankError::new(
                    RankErrorKind::Ownership,
                    format!("owner {owner} holds {} pages of a gather with blocks of {block}", pages.len()),
                )
                .with("owner", owner));
            }
            for (position, &page) in pages.iter().enumerate() {
                scratch.insert(page, owner as u32 * block + position as u32);
            }
        }
        Ok(GatherPlan { owners, block, sends, scratch })
    }

    /// Pages in each owner's block.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Pages of the assembled prefix region, padding included.
    pub fn scratch_pages(&self) -> u32 {
        self.block * self.owners
    }

    /// The block of an owner: its pages in order of their local numbers, `None` for padding.
    pub fn send(&self, owner: u32) -> impl Iterator<Item = Option<Page>> + '_ {
        let pages = self.sends.get(owner as usize).map_or(&[][..], Vec::as_slice);
        let padding = (self.block as usize).saturating_sub(pages.len());
        pages.iter().copied().map(Some).chain(std::iter::repeat_n(None, padding))
    }

    /// Where a page lies in the prefix region; `None`, the trash page, for one that is not in the plan.
    pub fn scratch_page(&self, page: Page) -> Option<u32> {
        self.scratch.get(&page).copied()
    }
}
