//! Ownership along a chain: cyclic from a base, inherited by branches, kept by backup and restore.
//!
//! Position page `P` of a chain with base `b` belongs to owner `(b + P) mod N`. A chain takes its base once,
//! when its first page is allocated; whatever extends a path or branches off it continues the rotation. So
//! every path from the root is one cyclic run, each rank holds its share up to one page, and a gather of
//! equal blocks is enough.

use crate::classed_pool::ClassedPool;
use crate::error::{RankError, RankErrorKind, Result};
use crate::gather::GatherPlan;
use crate::placement::{Owner, Page, Placement};
use crate::rules::{Rule, Rules};

/// The rotation base of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Base(pub Owner);

impl Base {
    /// Owner of position page `position`, counted from the root.
    pub fn owner_at(self, position: u32, owners: u32) -> Owner {
        ((u64::from(self.0) + u64::from(position)) % u64::from(owners)) as Owner
    }
}

/// What becomes of a chain that was computed elsewhere and lands on a cached path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Splice {
    /// Its owners continue the path's: it may be inserted.
    Accepted,
    /// Two cyclic runs would meet in one path. The request keeps its pages and the tree stays as it is.
    Declined,
}

/// The rules of ownership over one placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ownership {
    placement: Placement,
    rules: Rules,
}

impl Ownership {
    /// The rules over `placement`.
    pub fn new(placement: Placement) -> Ownership {
        Ownership { placement, rules: Rules::ALL }
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> Ownership {
        self.rules = rules;
        self
    }

    /// Base of a chain that begins with nothing cached: the class with most free pages, the lowest of equals.
    pub fn new_chain(&self, pool: &ClassedPool) -> Base {
        Base(pool.least_full_class())
    }

    /// Base of pages that follow a cached node of base `parent`: the node's own, whoever asks.
    pub fn extension(&self, parent: Base, pool: &ClassedPool) -> Base {
        if self.rules.hold(Rule::BranchInheritsBase) { parent } else { self.new_chain(pool) }
    }

    /// Whether a chain of base `chain` may be inserted below a path of base `path`.
    pub fn splice(&self, path: Base, chain: Base) -> Splice {
        if path == chain || !self.rules.hold(Rule::SpliceDeclined) {
            Splice::Accepted
        } else {
            Splice::Declined
        }
    }

    /// Host pages for a backup of the device pages `source`; `None` where the pool is full, on every rank alike.
    pub fn allocate_backup(&self, host: &mut ClassedPool, source: &[Page]) -> Option<Vec<Page>> {
        self.same_owners(host, source, Rule::BackupKeepsOwner)
    }

    /// Device pages for a restore of the host pages `source`; `None` where the pool is full, on every rank alike.
    pub fn allocate_restore(&self, device: &mut ClassedPool, source: &[Page]) -> Option<Vec<Page>> {
        self.same_owners(device, source, Rule::RestoreKeepsOwner)
    }

    fn same_owners(&self, pool: &mut ClassedPool, source: &[Page], rule: Rule) -> Option<Vec<Page>> {
        let Some(&first) = source.first() else { return Some(Vec::new()) };
        let keep = self.rules.hold(rule);
        let start = if keep { self.owner(first) } else { pool.least_full_class() };
        pool.alloc_cyclic(start, source.len() as u32)
    }

    /// The owner of a page.
    pub fn owner(&self, page: Page) -> Owner {
        self.placement.owner(u64::from(page))
    }

    /// The pairs of a copy that `owner` carries out: those of its own pages.
    ///
    /// An empty share is a share: the operation is submitted and acknowledged all the same.
    ///
    /// # Errors
    ///
    /// `ownership` where a page would move to another owner, `config` where the lists differ in length.
    pub fn own_share(&self, owner: Owner, source: &[Page], target: &[Page]) -> Result<Vec<(Page, Page)>> {
        if source.len() != target.len() {
            let message = format!("a copy of {} pages to {} pages", source.len(), target.len());
            return Err(RankError::config(message));
        }
        let mut share = Vec::with_capacity(source.len());
        for (&from, &to) in source.iter().zip(target) {
            let (old, new) = (self.owner(from), self.owner(to));
            if old != new {
                let message = format!("page {from} of owner {old} would move to page {to} of owner {new}");
                return Err(RankError::new(RankErrorKind::Ownership, message));
            }
            if old == owner || !self.rules.hold(Rule::OwnShareOnly) {
                share.push((from, to));
            }
        }
        Ok(share)
    }

    /// The plan of a gather of cached prefixes, each a list of pages in order of position.
    ///
    /// # Errors
    ///
    /// As [`GatherPlan::new`].
    pub fn gather(&self, prefixes: &[&[Page]]) -> Result<GatherPlan> {
        GatherPlan::build(self.placement.owners(), prefixes, self.rules)
    }
}
