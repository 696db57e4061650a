//! Who is to blame for a wait that passed its deadline.
//!
//! The rank that a wait misses is often a victim itself: the last stage misses the middle one, which misses
//! the first, which was killed. So every rank tells, with its heartbeat and beside the engine's collectives,
//! whom it waits for. Following that from the own wait ends at a rank that waits for nobody, or is silent.

use crate::topology::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// What a rank last said of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Beat {
    /// Rises with each step and each answered ask.
    pub progress: u64,
    /// The ranks it misses; empty while it works.
    pub missing: Vec<Rank>,
}

/// The last words of all ranks.
#[derive(Debug, Clone, Default)]
pub struct Watch {
    beats: BTreeMap<Rank, Beat>,
    silent: BTreeSet<Rank>,
}

impl Watch {
    /// Nobody has said anything.
    pub fn new() -> Watch {
        Watch::default()
    }

    /// Notes a heartbeat.
    pub fn beat(&mut self, rank: Rank, beat: Beat) {
        self.silent.remove(&rank);
        self.beats.insert(rank, beat);
    }

    /// Notes that a rank's heartbeat stayed away for longer than its deadline.
    pub fn silence(&mut self, rank: Rank) {
        self.silent.insert(rank);
    }

    /// The rank that a wait for `missing` comes down to: a silent one where there is one on the way, otherwise
    /// one that waits for nobody; in a circle, the one that has come least far. `None` where nothing is missing.
    pub fn culprit(&self, missing: &[Rank]) -> Option<Rank> {
        let mut reached = BTreeSet::new();
        let mut next: Vec<Rank> = missing.to_vec();
        while let Some(rank) = next.pop() {
            if reached.insert(rank) && !self.silent.contains(&rank) {
                next.extend(self.beats.get(&rank).into_iter().flat_map(|beat| beat.missing.iter().copied()));
            }
        }
        let silent = reached.iter().find(|&rank| self.silent.contains(rank));
        let progress = |rank: &&Rank| self.beats.get(rank).map_or(0, |beat| beat.progress);
        let idle = |rank: &&Rank| self.beats.get(rank).is_none_or(|beat| beat.missing.is_empty());
        silent
            .or_else(|| reached.iter().filter(idle).min_by_key(progress))
            .or_else(|| reached.iter().min_by_key(progress))
            .copied()
    }
}
