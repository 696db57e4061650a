//! The Python face of `hicache_ranks`: one file for each concept.
//!
//! A machine gives an `Ask` and is resumed with its answer: a list of ints, None for what has merely been done,
//! or `Expired`. Ranks are ints. Nothing here waits for another rank; whoever drives a machine does.

pub(crate) mod ack;
pub(crate) mod ask;
pub(crate) mod audit;
pub(crate) mod audited;
mod field;
pub(crate) mod layer_gate;
pub(crate) mod ledger;
pub(crate) mod ownership;
pub(crate) mod pp_sync;
pub(crate) mod prefetch;
pub(crate) mod restore;
pub(crate) mod scratch;
pub(crate) mod topology;
pub(crate) mod vote;
pub(crate) mod watch;
pub(crate) mod writer;

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock; what a thread that panicked left behind is whole, since every change is one call of the machine.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same text for as long as the process lives. Names of logs and operations are few.
pub(crate) fn intern(text: &str) -> &'static str {
    static KNOWN: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut known = lock(&KNOWN);
    if let Some(&found) = known.get(text) {
        return found;
    }
    let kept: &'static str = Box::leak(text.to_owned().into_boxed_str());
    known.insert(kept);
    kept
}
