//! One identity, two contents: a sign that a deployment's namespace or tile does not say all that it should.
//!
//! The first copy stays in any case. Copies that are about to be removed are compared always; what a backup finds
//! present is compared if [`StoreOptions::detect_conflicts`](crate::StoreOptions) asks for it.

use std::time::Instant;

use crate::format::directory::{Block, Entry};
use crate::format::form::{Codec, Form};
use crate::format::frame::{Location, short_key};
use crate::key::PageKey;
use crate::store::Inner;
use crate::store::chunk::pieces_checksum;
use crate::store::counters::Counter;
use crate::store::index::Duplicate;
use crate::store::namespace_state::NamespaceState;
use crate::store::notices::Level;
use crate::store::view::{BoundMemory, PoolState, View};

/// Compares two copies by the checksums in their directory entries.
pub(crate) fn compare_copies(inner: &Inner, state: &NamespaceState, duplicate: &Duplicate) {
    let Some(form) = state.index().forms().get(usize::from(duplicate.form)).copied() else { return };
    let goes = entry(inner, state, &form, &duplicate.goes);
    let stays = entry(inner, state, &form, &duplicate.stays);
    let (Some(goes), Some(stays)) = (goes, stays) else { return };
    // Compressed blocks of equal bytes differ when their writers' levels do.
    let is_comparable = goes.blocks.iter().zip(&stays.blocks).all(|(a, b)| a.stored_bytes == b.stored_bytes);
    if goes.key == stays.key && is_comparable && goes.blocks != stays.blocks {
        note(inner, &goes.key, &duplicate.stays);
    }
}

impl View {
    /// Compares the pages of a backup that are there already with what is stored, as far as its time goes.
    pub(crate) fn compare_present(
        &self,
        keys: &[PageKey],
        memory: &[BoundMemory<'_>],
        missing: &[Vec<bool>],
        deadline: Option<Instant>,
    ) {
        for ((pool, memory), missing) in self.pools.iter().zip(memory).zip(missing) {
            for (page, key) in keys.iter().enumerate() {
                if self.inner.device.clock.is_past(deadline) {
                    return;
                }
                if memory.slots[page] >= 0
                    && !missing[page]
                    && let Some((place, false)) = self.equals_stored(pool, memory, page, key)
                {
                    note(&self.inner, key, &place);
                }
            }
        }
    }

    /// Place of the stored copy of this page in just this form, and whether it has the bytes in `memory`. `None`
    /// when there is none to compare with.
    fn equals_stored(
        &self,
        pool: &PoolState,
        memory: &BoundMemory<'_>,
        page: usize,
        key: &PageKey,
    ) -> Option<(Location, bool)> {
        let form = &pool.form;
        if form.codec != Codec::None {
            return None;
        }
        let place = self.state.index().place(&short_key(key), form)?;
        let entry = entry(&self.inner, &self.state, form, &place).filter(|entry| entry.key == *key)?;
        let landing = pool.landing(form, &pool.spec.tile, memory).ok()?;
        let seed = form.seed(&self.state.fingerprint, key);
        let slot = u64::try_from(memory.slots[page]).ok()?;
        let mut pieces = Vec::new();
        let mut at = 0;
        for (block, stored) in (0..).zip(&entry.blocks) {
            let end = at + u64::from(form.block_raw_bytes(block));
            pieces.clear();
            landing.pieces(at..end, slot, &memory.regions, &mut pieces);
            let checksum = pieces_checksum(seed, block, &pieces).ok()?;
            if (Block { checksum, ..*stored }) != *stored {
                return Some((place, false));
            }
            at = end;
        }
        Some((place, true))
    }
}

fn note(inner: &Inner, key: &PageKey, stays: &Location) {
    inner.counters.add(Counter::Conflicts, 1);
    inner.notices.push(Level::Warning, "conflict", || {
        format!(
            "page {key} was stored again with other bytes under the same namespace, pool and tile; the copy in {} stays",
            stays.segment
        )
    });
}

fn entry(inner: &Inner, state: &NamespaceState, form: &Form, place: &Location) -> Option<Entry> {
    let bytes = Entry::encoded_bytes(form);
    let file = inner.files.get(&state.fingerprint, place.segment).ok()?;
    let mut out = vec![0; usize::try_from(bytes).ok()?];
    let offset = u64::from(place.ordinal).checked_mul(bytes)?.checked_add(place.entries_offset)?;
    inner.transfers.read_small(file.path(), file.buffered(), &mut out, offset).ok()?;
    Entry::decode(form, &state.fingerprint, &out).ok()
}
