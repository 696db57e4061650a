//! Copying stored pages as they are: checksums are bound to identity, not to place.

use std::ops::Range;

use crate::format::block::block_checksum;
use crate::format::directory::{Entry, Parent, ReadRun, Run, UNKNOWN_DEPTH};
use crate::namespace::Fingerprint;
use crate::store::Inner;
use crate::store::namespace_state::NamespaceState;
use crate::store::publish::{Payload, Publication, UnitPlan};
use crate::store::room::Refused;

/// Whether every block of `stored`, the bytes of an entry, verifies.
pub(crate) fn is_whole(namespace: &Fingerprint, run: &Run, entry: &Entry, stored: &[u8]) -> bool {
    let seed = run.form.seed(namespace, &entry.key);
    let mut rest = stored;
    for (index, block) in (0..).zip(&entry.blocks) {
        let Some((bytes, tail)) = rest.split_at_checked(block.stored_bytes as usize) else { return false };
        if block_checksum(seed, index, bytes) != block.checksum {
            return false;
        }
        rest = tail;
    }
    rest.is_empty()
}

/// Pages of a run that follow each other, to be published anew.
pub(crate) struct Stretch {
    run: Run,
    payload: Vec<u8>,
}

impl Stretch {
    /// The pages `pages` of a run as read, with their stored bytes one after the other in `payload`.
    pub(crate) fn new(read: &ReadRun, pages: Range<usize>, payload: Vec<u8>) -> Self {
        let mut entries = Vec::with_capacity(pages.len());
        let mut payload_offset = 0;
        for entry in read.entries[pages.clone()].iter().flatten() {
            entries.push(Entry { payload_offset, ..entry.clone() });
            payload_offset += entry.stored_bytes();
        }
        let parent = match pages.start.checked_sub(1).map(|before| read.entries[before].as_ref()) {
            None => read.run.parent,
            Some(Some(entry)) => Parent::Page(entry.key),
            Some(None) => Parent::Unknown,
        };
        let depth = match read.run.depth {
            UNKNOWN_DEPTH => UNKNOWN_DEPTH,
            depth => depth.saturating_add(pages.start as u32),
        };
        let payload_bytes = payload.len() as u64;
        let run = Run { payload_offset: 0, payload_bytes, parent, depth, entries, ..read.run.clone() };
        Stretch { run, payload }
    }

    /// Bytes of the pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.payload.len() as u64
    }
}

/// Where copies come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    /// When they were recorded, ns since 1970.
    pub(crate) written_ns: u64,
    /// Generation that they belong to: a `clear` takes copies that are under way as well.
    pub(crate) generation: u64,
}

/// Publishes stretches as one unit of this process: as new pages, or as copies of pages of this root.
pub(crate) fn publish(
    inner: &Inner,
    state: &NamespaceState,
    stretches: Vec<Stretch>,
    origin: Option<Origin>,
) -> Result<(), Refused> {
    let (runs, payloads): (Vec<Run>, Vec<Vec<u8>>) =
        stretches.into_iter().map(|stretch| (stretch.run, stretch.payload)).unzip();
    let mut publication = Publication::new(vec![UnitPlan::new(runs)]);
    publication.written_ns = origin.map(|origin| origin.written_ns);
    publication.generation = origin.map(|origin| origin.generation);
    let write_payload = |units: &mut [Payload<'_>]| {
        for Payload { runs, room } in units {
            for (run, payload) in runs.iter().zip(&payloads) {
                let offset = room.offset + run.payload_offset;
                inner.transfers.write_small(room.file.path(), room.file.buffered(), payload, offset)?;
            }
        }
        Ok(())
    };
    publication.publish(inner, state, write_payload).map_err(|unpublished| unpublished.refused)
}
