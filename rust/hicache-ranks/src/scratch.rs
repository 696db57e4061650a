//! The budget of the scratch buffers in which prefixes are assembled.
//!
//! Two slots alternate, one adjacent layer each. Their size is fixed at start, charged before the KV pools are
//! sized; admission then sees to it that no batch needs more. Each request's prefix is padded to whole gather
//! blocks, so a prefix of `p` pages takes `owners * ceil(p / owners)` pages of every slot.

use crate::error::{RankError, Result};
use crate::placement::Placement;
use crate::rules::{Rule, Rules};

/// What the size of the buffers follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchSize {
    placement: Placement,
    prefix_tokens: u64,
    chunk_tokens: u64,
}

impl ScratchSize {
    /// Slots, each one layer: they alternate.
    pub const SLOTS: u64 = 2;

    /// Buffers for `contexts` full prefixes of `context` tokens and `chunk` new tokens in one batch.
    ///
    /// # Errors
    ///
    /// `config` where one of them is 0 or the product does not fit.
    pub fn new(placement: Placement, contexts: u32, context: u64, chunk: u64) -> Result<ScratchSize> {
        let page = u64::from(placement.page_tokens());
        let span = page * u64::from(placement.owners());
        let padded = context.checked_next_multiple_of(span);
        let prefix = padded.and_then(|context| context.checked_mul(u64::from(contexts)));
        match (prefix, chunk.checked_next_multiple_of(page)) {
            (Some(prefix_tokens @ 1..), Some(chunk_tokens @ 1..)) => {
                Ok(ScratchSize { placement, prefix_tokens, chunk_tokens })
            }
            _ => Err(RankError::config(format!(
                "scratch for {contexts} contexts of {context} tokens and a chunk of {chunk}"
            ))),
        }
    }

    /// Rows of one slot: prefixes, chunk, and a page to which everything else resolves.
    pub fn rows(&self) -> u64 {
        self.prefix_tokens + self.chunk_tokens + u64::from(self.placement.page_tokens())
    }

    /// Bytes charged before the KV pools are sized; `draft` where a draft model has slots of its own.
    pub fn bytes(&self, row_bytes: u64, draft: bool) -> u64 {
        self.rows() * row_bytes * ScratchSize::SLOTS * if draft { 2 } else { 1 }
    }

    /// Tokens of the prefix region.
    pub fn prefix_tokens(&self) -> u64 {
        self.prefix_tokens
    }

    /// Tokens of the chunk region.
    pub fn chunk_tokens(&self) -> u64 {
        self.chunk_tokens
    }

    /// Tokens that a prefix of `pages` pages takes, padding included.
    pub fn padded(&self, pages: u32) -> u64 {
        let owners = u64::from(self.placement.owners());
        u64::from(pages).next_multiple_of(owners) * u64::from(self.placement.page_tokens())
    }
}

/// A point to roll back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(usize);

/// Whether there was room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Reserved.
    Granted,
    /// Not in this batch.
    Full,
}

/// What one batch has reserved.
#[derive(Debug, Clone)]
pub struct ScratchBudget {
    size: ScratchSize,
    held: Vec<(u64, u64)>,
    rules: Rules,
}

impl ScratchBudget {
    /// An empty batch.
    pub fn new(size: ScratchSize) -> ScratchBudget {
        ScratchBudget { size, held: Vec::new(), rules: Rules::ALL }
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> ScratchBudget {
        self.rules = rules;
        self
    }

    /// Reserves room for a request with `prefix_pages` cached pages and `extend_tokens` new tokens. It comes
    /// before its load is queued.
    ///
    /// # Errors
    ///
    /// `config` for a request that would not fit in an empty batch: waiting would not help it.
    pub fn reserve(&mut self, prefix_pages: u32, extend_tokens: u64) -> Result<Room> {
        let page = u64::from(self.size.placement.page_tokens());
        let prefix = if self.rules.hold(Rule::PaddedPrefix) {
            self.size.padded(prefix_pages)
        } else {
            u64::from(prefix_pages) * page
        };
        let chunk = extend_tokens.next_multiple_of(page);
        if prefix > self.size.prefix_tokens || chunk > self.size.chunk_tokens {
            return Err(RankError::config(format!(
                "{prefix_pages} cached pages and {extend_tokens} new tokens do not fit in scratch for {} and {}",
                self.size.prefix_tokens, self.size.chunk_tokens
            )));
        }
        let (used_prefix, used_chunk) = self.used();
        if used_prefix + prefix > self.size.prefix_tokens || used_chunk + chunk > self.size.chunk_tokens {
            return Ok(Room::Full);
        }
        self.held.push((prefix, chunk));
        Ok(Room::Granted)
    }

    /// Tokens reserved so far: of the prefix region and of the chunk region.
    pub fn used(&self) -> (u64, u64) {
        self.held.iter().fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1))
    }

    /// Where the batch stands.
    pub fn mark(&self) -> Mark {
        Mark(self.held.len())
    }

    /// Takes back what was reserved since: a load came out shorter or longer, or the request was not admitted.
    pub fn rollback(&mut self, mark: Mark) {
        if self.rules.hold(Rule::RollbackOnChange) {
            self.held.truncate(mark.0);
        }
    }

    /// Begins the next batch.
    pub fn clear(&mut self) {
        self.held.clear();
    }
}
