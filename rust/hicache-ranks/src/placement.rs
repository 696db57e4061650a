//! Arithmetic of page ownership: which rank holds which physical page, and where.
//!
//! Ownership follows from the page number, so there is no directory that could be stale:
//!
//! ```text
//! page(loc) = loc / page_tokens      owner(page) = page mod owners      local(page) = page / owners
//! row(loc)  = local(page(loc)) * page_tokens + loc mod page_tokens
//! ```

use crate::error::{RankError, Result};

/// A physical page, numbered over all owners. Page 0 and up; the number says who owns it.
pub type Page = u32;

/// The owner of a page: a position on the axis that pages are dealt out over.
pub type Owner = u32;

/// How logical token slots map to owners, pages and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    owners: u32,
    page_tokens: u32,
}

impl Placement {
    /// A placement over `owners` ranks with pages of `page_tokens` tokens.
    ///
    /// # Errors
    ///
    /// `config` where one of them is 0.
    pub fn new(owners: u32, page_tokens: u32) -> Result<Placement> {
        if owners == 0 || page_tokens == 0 {
            return Err(RankError::config(format!(
                "{owners} owners and {page_tokens} tokens a page: both are at least 1"
            )));
        }
        Ok(Placement { owners, page_tokens })
    }

    /// Number of owners.
    pub fn owners(&self) -> u32 {
        self.owners
    }

    /// Tokens in a page.
    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    /// The page of a token slot.
    pub fn page(&self, loc: u64) -> u64 {
        loc / u64::from(self.page_tokens)
    }

    /// The owner of a page.
    pub fn owner(&self, page: u64) -> Owner {
        // A division is what costs here, and one owner is the common case.
        if self.owners == 1 { 0 } else { (page % u64::from(self.owners)) as Owner }
    }

    /// The page's number among its owner's pages.
    pub fn local(&self, page: u64) -> u64 {
        page / u64::from(self.owners)
    }

    /// The page with number `local` among the pages of `owner`.
    pub fn global(&self, owner: Owner, local: u64) -> u64 {
        local * u64::from(self.owners) + u64::from(owner)
    }

    /// The row of a token slot in its owner's memory.
    pub fn row(&self, loc: u64) -> u64 {
        let page_tokens = u64::from(self.page_tokens);
        self.local(self.page(loc)) * page_tokens + loc % page_tokens
    }

    /// The token slot of a row of `owner`.
    pub fn loc(&self, owner: Owner, row: u64) -> u64 {
        let page_tokens = u64::from(self.page_tokens);
        self.global(owner, row / page_tokens) * page_tokens + row % page_tokens
    }

    /// The token slots among `locs` that `owner` holds, in their order.
    pub fn owned<'a>(&'a self, locs: &'a [u64], owner: Owner) -> impl Iterator<Item = u64> + 'a {
        locs.iter().copied().filter(move |&loc| self.owner(self.page(loc)) == owner)
    }
}
