//! Where the tokens of a request came from, and how each number follows from the one before.
//!
//! ```text
//! device + host + storage + recomputed = prompt
//! consumed <= materialized <= completed <= agreed <= promised       (storage part)
//! promised - consumed = sum of the shortfalls
//! ```

use crate::error::{RankError, RankErrorKind, Result};
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

/// The account of one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TierLedger {
    prompt: u64,
    tiers: BTreeMap<Tier, u64>,
    stages: BTreeMap<Stage, u64>,
    shortfalls: BTreeMap<&'static str, u64>,
    copied_rows: u64,
    copied_bytes: u64,
}

impl TierLedger {
    /// An account of `prompt` tokens.
    pub fn new(prompt: u64) -> TierLedger {
        TierLedger { prompt, ..TierLedger::default() }
    }

    /// Counts tokens that were taken from a tier.
    pub fn take(&mut self, tier: Tier, tokens: u64) {
        *self.tiers.entry(tier).or_default() += tokens;
    }

    /// Counts tokens of the store that came so far.
    pub fn reach(&mut self, stage: Stage, tokens: u64) {
        *self.stages.entry(stage).or_default() += tokens;
    }

    /// Counts promised tokens that were not consumed, with the reason.
    pub fn shortfall(&mut self, reason: &'static str, tokens: u64) {
        *self.shortfalls.entry(reason).or_default() += tokens;
    }

    /// Counts rows that this rank copied to the device and the bytes that were moved for them.
    pub fn copied(&mut self, rows: u64, bytes: u64) {
        self.copied_rows += rows;
        self.copied_bytes += bytes;
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
        let sum: u64 = self.tiers.values().sum();
        if sum != self.prompt {
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
        let (short, reasons) =
            (self.stage(Stage::Promised) - consumed, self.shortfalls.values().sum::<u64>());
        if short != reasons {
            return fail(format!("{short} promised tokens were not consumed, {reasons} have a reason"));
        }
        if self.copied_bytes != self.copied_rows * row_bytes {
            return fail(format!("{} bytes moved for {} rows", self.copied_bytes, self.copied_rows));
        }
        Ok(())
    }
}
