//! Digests of mirrored state that cost next to nothing to keep.

use super::record::{Kind, Record, Value};
use crate::digest::{mix, scatter};

/// Digest of the state that decisions come from, kept up to date change by change.
///
/// Locks and bases are digests of sets: the order of changes does not matter, undoing one leaves what was. The
/// LRU order is a digest of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateDigest {
    locks: u64,
    lru: u64,
    free: u64,
    bases: u64,
}

impl StateDigest {
    /// A lock of `node` was taken. Locks are counted.
    pub fn lock(&mut self, node: u64) {
        self.locks = self.locks.wrapping_add(scatter(node));
    }

    /// A lock of `node` was released.
    pub fn unlock(&mut self, node: u64) {
        self.locks = self.locks.wrapping_sub(scatter(node));
    }

    /// `node` became the most recently used one.
    pub fn touch(&mut self, node: u64) {
        self.lru = mix(self.lru, node);
    }

    /// The free lists now have this digest, see [`ClassedPool::digest`](crate::classed_pool::ClassedPool::digest);
    /// several pools are mixed by the caller.
    pub fn free_lists(&mut self, digest: u64) {
        self.free = digest;
    }

    /// The chain below `node` got a rotation base, or lost it again: the same call does both.
    pub fn base(&mut self, node: u64, base: u32) {
        self.bases ^= scatter(mix(node, u64::from(base)));
    }

    /// All of it in one number.
    pub fn combined(&self) -> u64 {
        [self.lru, self.free, self.bases].iter().fold(self.locks, |digest, &part| mix(digest, part))
    }

    /// A record of it.
    pub fn record(&self, step: u64) -> Record {
        let fields = [self.locks, self.lru, self.free, self.bases].map(Value::Digest).to_vec();
        Record { step, kind: Kind::State, name: "locks lru free bases".to_owned(), fields }
    }
}
