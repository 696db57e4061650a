//! Where the tokens of a request came from, and how each number follows from the one before.
//!
//! ```text
//! device + host + storage + recomputed = prompt
//! consumed <= materialized <= completed <= agreed <= promised       (storage part)
//! promised - consumed = sum of the shortfalls
//! ```

use crate::error::{RankError, RankErrorKind, Result};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The tier that tokens were taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// GPU memory.
    Device,
    /// Host memory.
    Host,
    /// The store.
    Storage,
    /// Nowhere: computed anew.
    Recomputed,
}

/// How far tokens of the store came, from first to last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// This rank's look-up found them.
    Promised,
    /// All ranks have them.
    Agreed,
    /// They have been read on all ranks.
    Completed,
    /// They are in the tree.
    Materialized,
    /// The request used them.
    Consumed,
}

impl Stage {
    /// Every stage in order.
    pub const ALL: [Stage; 5] =
        [Stage::Promised, Stage::Agreed, Stage::Completed, Stage::Materialized, Stage::Consumed];
}

/// The account of one request. Sums stop at the largest number that there is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TierLedger {
    prompt: u64,
    tiers: BTreeMap<Tier, u64>,
    stages: BTreeMap<Stage, u64>,
    shortfalls: BTreeMap<Cow<'static, str>, u64>,
    copied_rows: u64,
    copied_bytes: u64,
}

impl TierLedger {
    /// An account of `prompt` tokens.
    pub fn new(prompt: u64) -> TierLedger {
        TierLedger { prompt, ..TierLedger::default() }
    }

    /// Tokens of the prompt.
    pub fn prompt(&self) -> u64 {
        self.prompt
    }

    /// Counts tokens that were taken from a tier.
    pub fn take(&mut self, tier: Tier, tokens: u64) {
        add(self.tiers.entry(tier).or_default(), tokens);
    }

    /// Counts tokens of the store that came so far.
    pub fn reach(&mut self, stage: Stage, tokens: u64) {
        add(self.stages.entry(stage).or_default(), tokens);
    }

    /// Counts promised tokens that were not consumed, with the reason.
    pub fn shortfall(&mut self, reason: impl Into<Cow<'static, str>>, tokens: u64) {
        add(self.shortfalls.entry(reason.into()).or_default(), tokens);
    }

    /// Counts rows that this rank copied to the device and the bytes that were moved for them.
    pub fn copied(&mut self, rows: u64, bytes: u64) {
        add(&mut self.copied_rows, rows);
        add(&mut self.copied_bytes, bytes);
    }

    /// Tokens taken from a tier.
    pub fn tier(&self, tier: Tier) -> u64 {
        self.tiers.get(&tier).copied().unwrap_or(0)
    }

    /// Tokens that came so far.
    pub fn stage(&self, stage: Stage) -> u64 {
        self.stages.get(&stage).copied().unwrap_or(0)
    }

    /// The sums and chains of the module's head, and bytes that match rows of `row_bytes`.
    ///
    /// # Errors
    ///
    /// `rank_disagreement` with the sentence that does not hold.
    pub fn check(&self, row_bytes: u64) -> Result<()> {
        let fail = |message| Err(RankError::new(RankErrorKind::Disagreement, message));
        let sum = total(self.tiers.values());
        if sum != u128::from(self.prompt) {
            return fail(format!("tiers hold {sum} tokens, the prompt has {}", self.prompt));
        }
        for pair in Stage::ALL.windows(2) {
            let (earlier, later) = (self.stage(pair[0]), self.stage(pair[1]));
            if later > earlier {
                return fail(format!("{later} tokens {:?}, but only {earlier} {:?}", pair[1], pair[0]));
            }
        }
        let consumed = self.stage(Stage::Consumed);
        if consumed != self.tier(Tier::Storage) {
            return fail(format!("{consumed} tokens consumed, {} from storage", self.tier(Tier::Storage)));
        }
        let (short, reasons) = (self.stage(Stage::Promised) - consumed, total(self.shortfalls.values()));
        if u128::from(short) != reasons {
            return fail(format!("{short} promised tokens were not consumed, {reasons} have a reason"));
        }
        if u128::from(self.copied_bytes) != u128::from(self.copied_rows) * u128::from(row_bytes) {
            return fail(format!("{} bytes moved for {} rows", self.copied_bytes, self.copied_rows));
        }
        Ok(())
    }
}

fn add(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

fn total<'a>(numbers: impl Iterator<Item = &'a u64>) -> u128 {
    numbers.map(|&number| u128::from(number)).sum()
}
