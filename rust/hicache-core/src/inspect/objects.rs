//! The objects of a namespace, one by one.

use std::fs::File;
use std::io;

use hicache_sys::file;

use crate::format::SegmentId;
use crate::format::block::block_checksum;
use crate::format::directory::{Entry, UNKNOWN_DEPTH};
use crate::format::form::Form;
use crate::format::frame::{Location, Reason, ShortKey};
use crate::inspect::{NamespaceScan, RunScan};
use crate::key::PageKey;

/// Whether an object can be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectState {
    /// It can, as far as the journals say.
    Live,
    /// A reader found it unusable, or it was removed.
    Gone(Reason),
    /// It belongs to a generation that was cleared.
    Cleared,
}

impl ObjectState {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            ObjectState::Live => "live",
            ObjectState::Gone(Reason::Evicted) => "evicted",
            ObjectState::Gone(Reason::Damaged) => "quarantined: damaged",
            ObjectState::Gone(Reason::Foreign) => "quarantined: foreign bytes",
            ObjectState::Gone(Reason::Unreadable) => "quarantined: unreadable",
            ObjectState::Gone(Reason::Duplicate) => "removed: another copy stays",
            ObjectState::Gone(Reason::Expired) => "expired",
            ObjectState::Gone(Reason::Other(_)) => "removed for a reason that this version does not know",
            ObjectState::Cleared => "cleared",
        }
    }

    /// Whether a reader gave it up because of its bytes.
    pub fn is_quarantined(self) -> bool {
        matches!(self, ObjectState::Gone(reason) if reason.is_quarantine())
    }
}

/// One object of a scan.
#[derive(Clone, Copy)]
pub struct ObjectRef<'a> {
    /// Leading bytes of its page key.
    pub key: ShortKey,
    /// Its form.
    pub form: &'a Form,
    /// Whether it can be restored.
    pub state: ObjectState,
    pub(super) run: &'a RunScan,
    pub(super) ordinal: u32,
}

/// An object read and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    /// Its full key.
    pub key: PageKey,
    /// Its directory entry.
    pub entry: Entry,
    /// Its bytes as stored.
    pub stored: Vec<u8>,
}

impl ObjectRef<'_> {
    /// Its place.
    pub fn location(&self) -> Location {
        let RunScan { segment, entries_offset, .. } = *self.run;
        Location { segment, entries_offset, ordinal: self.ordinal }
    }

    /// Its segment.
    pub fn segment(&self) -> SegmentId {
        self.run.segment
    }

    /// Offset of its directory entry in the segment.
    pub fn entry_offset(&self) -> u64 {
        self.run.entries_offset.saturating_add(u64::from(self.ordinal) * Entry::encoded_bytes(self.form))
    }

    /// Pages before it in its sequence, if the writer knew.
    pub fn depth(&self) -> Option<u64> {
        (self.run.depth != UNKNOWN_DEPTH).then(|| u64::from(self.run.depth) + u64::from(self.ordinal))
    }

    /// Wall clock of its publication, ns since 1970.
    pub fn written_ns(&self) -> u64 {
        self.run.written_ns
    }

    /// Stored bytes, averaged over its run.
    pub fn stored_bytes(&self) -> u64 {
        self.run.payload_bytes / (self.run.keys.len() as u64).max(1)
    }

    /// Reads its directory entry from its open segment.
    ///
    /// # Errors
    /// What the system says, or `InvalidData` when the entry does not verify.
    pub fn read_entry(&self, namespace: &NamespaceScan, segment: &File) -> io::Result<Entry> {
        let mut bytes = vec![0; Entry::encoded_bytes(self.form) as usize];
        file::read_exact(segment, &mut bytes, self.entry_offset())?;
        let entry = Entry::decode(self.form, &namespace.fingerprint, &bytes)
            .map_err(|damage| io::Error::new(io::ErrorKind::InvalidData, damage))?;
        if entry.key.0[..16] != self.key {
            let message =
                format!("expected page {}.., found the entry of page {}", hex::encode(self.key), entry.key);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(entry)
    }

    /// Reads and verifies the object from its open segment.
    ///
    /// # Errors
    /// What the system says, or `InvalidData` with the first block that does not verify.
    pub fn read(&self, namespace: &NamespaceScan, segment: &File) -> io::Result<StoredObject> {
        let entry = self.read_entry(namespace, segment)?;
        let offset = self.run.unit_offset.saturating_add(entry.payload_offset);
        // The entry verified, so its lengths are the writer's; the form bounds them all the same.
        let mut stored = vec![0; entry.stored_bytes() as usize];
        file::read_exact(segment, &mut stored, offset)?;
        let seed = self.form.seed(&namespace.fingerprint, &entry.key);
        let mut rest = &stored[..];
        for (index, block) in entry.blocks.iter().enumerate() {
            let (bytes, tail) = rest.split_at(block.stored_bytes as usize);
            rest = tail;
            if block_checksum(seed, index as u32, bytes) != block.checksum {
                let at = offset.saturating_add((stored.len() - tail.len() - bytes.len()) as u64);
                let message =
                    format!("block {index} of {}, at byte {at}, does not verify", entry.blocks.len());
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
        }
        Ok(StoredObject { key: entry.key, entry, stored })
    }
}

impl NamespaceScan {
    /// Every object that was ever told of, run by run; what can be restored is [`ObjectState::Live`].
    pub fn objects(&self) -> impl Iterator<Item = ObjectRef<'_>> {
        self.runs.iter().flat_map(|run| self.objects_of(run))
    }

    /// Objects by run, in the order of the disk: neighbours are read together.
    pub(crate) fn runs_in_disk_order(&self) -> Vec<Vec<ObjectRef<'_>>> {
        let mut runs: Vec<&RunScan> = self.runs.iter().collect();
        runs.sort_by_key(|run| (run.segment, run.entries_offset));
        runs.into_iter().map(|run| self.objects_of(run).collect()).collect()
    }

    fn objects_of<'a>(&'a self, run: &'a RunScan) -> impl Iterator<Item = ObjectRef<'a>> {
        let form = &self.forms[run.form as usize];
        let named = run.keys.iter().enumerate().filter(|(_, key)| **key != [0; 16]);
        named.map(move |(ordinal, &key)| {
            let ordinal = ordinal as u32;
            let location = Location { segment: run.segment, entries_offset: run.entries_offset, ordinal };
            let state = if run.generation < self.generation {
                ObjectState::Cleared
            } else {
                self.gone.get(&location).map_or(ObjectState::Live, |&reason| ObjectState::Gone(reason))
            };
            ObjectRef { key, form, state, run, ordinal }
        })
    }

    /// Opens a segment for [`ObjectRef::read`].
    pub fn open_segment(&self, segment: SegmentId) -> io::Result<File> {
        file::open_read(&self.segment_path(segment), file::Access::Buffered)
    }
}
