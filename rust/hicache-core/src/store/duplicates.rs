//! One copy of each object: of two that several writers wrote at the same time, the later one goes.
//!
//! Which one is later is told by their places, the same for everybody, and by no clock. Only its owner removes it,
//! and only after it saw the other one live: several writers leave one copy, and never none.

use crate::format::frame::{FrameKind, Gone, Location, Reason, encode_gone};
use crate::store::counters::Counter;
use crate::store::namespace_state::NamespaceState;
use crate::store::{Inner, conflicts};

/// Removes needless copies of this process's own; whether there were any. Called by the housekeeping alone, like compaction, which makes
/// copies for a moment.
pub(crate) fn remove(inner: &Inner, state: &NamespaceState) -> bool {
    let found = state.take_duplicates();
    let mut gone: Vec<Gone> = Vec::new();
    for duplicate in found {
        let is_live = {
            let index = state.index();
            index.has_location(&duplicate.key, &duplicate.stays)
                && index.has_location(&duplicate.key, &duplicate.goes)
        };
        if !is_live {
            continue;
        }
        conflicts::compare_copies(inner, state, &duplicate);
        match gone.last_mut() {
            Some(last) if continues(last, &duplicate.goes) => last.objects += 1,
            _ => gone.push(Gone {
                location: duplicate.goes,
                key: duplicate.key,
                objects: 1,
                reason: Reason::Duplicate,
            }),
        }
    }
    if gone.is_empty() {
        return false;
    }
    let objects: u64 = gone.iter().map(|record| u64::from(record.objects)).sum();
    let said = inner.say(FrameKind::Remove, state.fingerprint, gone.len() as u32, &encode_gone(&gone));
    // If it cannot be said, the copies stay: they cost room, nothing else. Their blocks go back with the next round
    // of eviction, which knows them as dead.
    if said.is_ok() {
        state.apply_gone(&gone);
        inner.counters.add(Counter::DuplicateObjects, objects);
    }
    said.is_ok()
}

fn continues(record: &Gone, location: &Location) -> bool {
    record.location.segment == location.segment
        && record.location.entries_offset == location.entries_offset
        && record.location.ordinal + record.objects == location.ordinal
}
