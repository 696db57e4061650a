//! The account of one request: where its tokens came from.

use std::sync::Mutex;

use hicache_ranks::RankError;
use hicache_ranks::ledger::{Stage, Tier, TierLedger};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::lock;

const TIERS: [(&str, Tier); 4] = [
    ("device", Tier::Device),
    ("host", Tier::Host),
    ("storage", Tier::Storage),
    ("recomputed", Tier::Recomputed),
];

const STAGES: [(&str, Stage); 5] = [
    ("promised", Stage::Promised),
    ("agreed", Stage::Agreed),
    ("completed", Stage::Completed),
    ("materialized", Stage::Materialized),
    ("consumed", Stage::Consumed),
];

fn named<T: Copy>(what: &str, name: &str, known: &[(&str, T)]) -> Result<T> {
    let found = known.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|(known, _)| *known).collect();
        RankError::config(format!("{what} {name:?}: expected one of {}", names.join(", "))).into()
    })
}

/// Where the tokens of one request came from.
#[pyclass(frozen, name = "TierLedger", module = "hicache_store.ranks")]
pub(crate) struct PyTierLedger {
    inner: Mutex<TierLedger>,
}

#[pymethods]
impl PyTierLedger {
    #[new]
    fn new(prompt: u64) -> Self {
        PyTierLedger { inner: Mutex::new(TierLedger::new(prompt)) }
    }

    /// Counts tokens that were taken from a tier.
    fn take(&self, tier: &str, tokens: u64) -> Result<()> {
        lock(&self.inner).take(named("tier", tier, &TIERS)?, tokens);
        Ok(())
    }

    /// Counts tokens of the store that came so far.
    fn reach(&self, stage: &str, tokens: u64) -> Result<()> {
        lock(&self.inner).reach(named("stage", stage, &STAGES)?, tokens);
        Ok(())
    }

    /// Counts promised tokens that were not consumed, with the reason.
    fn shortfall(&self, reason: String, tokens: u64) {
        lock(&self.inner).shortfall(reason, tokens);
    }

    /// Counts rows that this rank copied to the device, and bytes moved for them.
    fn copied(&self, rows: u64, moved_bytes: u64) {
        lock(&self.inner).copied(rows, moved_bytes);
    }

    /// Tokens taken from a tier.
    fn tier(&self, tier: &str) -> Result<u64> {
        Ok(lock(&self.inner).tier(named("tier", tier, &TIERS)?))
    }

    /// Tokens of the store that came so far.
    fn stage(&self, stage: &str) -> Result<u64> {
        Ok(lock(&self.inner).stage(named("stage", stage, &STAGES)?))
    }

    /// Raises where the account does not add up.
    fn check(&self, row_bytes: u64) -> Result<()> {
        Ok(lock(&self.inner).check(row_bytes)?)
    }

    fn __repr__(&self) -> String {
        let ledger = lock(&self.inner);
        let tiers: Vec<_> =
            TIERS.iter().map(|(name, tier)| format!("{name}={}", ledger.tier(*tier))).collect();
        format!("TierLedger(prompt={}, {})", ledger.prompt(), tiers.join(", "))
    }
}
