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
        let turned = u64::from(self.0) + u64::from(position);
        if owners == 1 { 0 } else { (turned % u64::from(owners)) as Owner }
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
        let start = self.copy_start(host, source, Rule::BackupKeepsOwner);
        host.alloc_cyclic(start, source.len() as u32)
    }

    /// As [`Ownership::allocate_backup`], into a list of the caller as long as `source`: false, and nothing taken or
    /// written, where the pool is full.
    pub fn allocate_backup_into(&self, host: &mut ClassedPool, source: &[Page], into: &mut [Page]) -> bool {
        let start = self.copy_start(host, source, Rule::BackupKeepsOwner);
        source.len() == into.len() && host.alloc_cyclic_into(start, into)
    }

    /// Device pages for a restore of the host pages `source`; `None` where the pool is full, on every rank alike.
    pub fn allocate_restore(&self, device: &mut ClassedPool, source: &[Page]) -> Option<Vec<Page>> {
        let start = self.copy_start(device, source, Rule::RestoreKeepsOwner);
        device.alloc_cyclic(start, source.len() as u32)
    }

    /// As [`Ownership::allocate_restore`], into a list of the caller, like [`Ownership::allocate_backup_into`].
    pub fn allocate_restore_into(
        &self,
        device: &mut ClassedPool,
        source: &[Page],
        into: &mut [Page],
    ) -> bool {
        let start = self.copy_start(device, source, Rule::RestoreKeepsOwner);
        source.len() == into.len() && device.alloc_cyclic_into(start, into)
    }

    /// Owner of the first page that a copy of `source` is written to.
    fn copy_start(&self, pool: &ClassedPool, source: &[Page], rule: Rule) -> Owner {
        match source.first() {
            Some(&first) if self.rules.hold(rule) => self.owner(first),
            _ => pool.least_full_class(),
        }
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
        Ok(self.own_pairs(owner, source, target)?.collect())
    }

    /// As [`Ownership::own_share`], one pair after the other. The whole copy is checked before the first.
    ///
    /// # Errors
    ///
    /// As [`Ownership::own_share`].
    pub fn own_pairs<'a>(
        &self,
        owner: Owner,
        source: &'a [Page],
        target: &'a [Page],
    ) -> Result<impl Iterator<Item = (Page, Page)> + use<'a>> {
        if source.len() != target.len() {
            let message = format!("a copy of {} pages to {} pages", source.len(), target.len());
            return Err(RankError::config(message));
        }
        let pairs = source.iter().copied().zip(target.iter().copied());
        for (from, to) in pairs.clone() {
            let (old, new) = (self.owner(from), self.owner(to));
            if old != new {
                let message = format!("page {from} of owner {old} would move to page {to} of owner {new}");
                return Err(RankError::new(RankErrorKind::Ownership, message));
            }
        }
        let (rules, placement) = (self.rules, self.placement);
        let own = move |page: Page| placement.owner(u64::from(page)) == owner;
        Ok(pairs.filter(move |&(from, _)| own(from) || !rules.hold(Rule::OwnShareOnly)))
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
