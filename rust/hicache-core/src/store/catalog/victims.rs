//! What leaves, as records: objects of one run that follow each other are one.

use std::collections::HashMap;

use crate::format::SegmentId;
use crate::format::form::Form;
use crate::format::frame::{Gone, Location, Reason, ShortKey};
use crate::namespace::Fingerprint;

/// Objects of one run, one after the other, that leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Victim {
    /// Their namespace.
    pub namespace: Fingerprint,
    /// Their segment.
    pub segment: SegmentId,
    /// First byte of their run's directory entries in the segment.
    pub entries_offset: u64,
    /// Position in the run of the first one.
    pub first: u32,
    /// How many, at least one.
    pub count: u32,
    /// Key of the first one.
    pub key: ShortKey,
    /// Form of all.
    pub form: Form,
    /// Stored bytes of all; of compressed ones their share of the run.
    pub bytes: u64,
}

impl Victim {
    /// The record that tells everybody.
    pub fn gone(&self, reason: Reason) -> Gone {
        let location =
            Location { segment: self.segment, entries_offset: self.entries_offset, ordinal: self.first };
        Gone { location, key: self.key, objects: self.count, reason }
    }
}

/// Collects victims, joining those that lie side by side.
#[derive(Default)]
pub(super) struct Victims {
    found: Vec<Victim>,
    /// The last victim of each run.
    last: HashMap<u32, usize>,
}

impl Victims {
    /// Adds one object of the run with this number.
    pub(super) fn push(&mut self, run: u32, object: Victim) {
        let last = self.last.get(&run).map(|&at| &mut self.found[at]);
        match last {
            Some(last) if object.first.checked_add(1) == Some(last.first) => {
                (last.first, last.key) = (object.first, object.key);
                (last.count, last.bytes) = (last.count + 1, last.bytes + object.bytes);
            }
            Some(last) if last.first + last.count == object.first => {
                (last.count, last.bytes) = (last.count + 1, last.bytes + object.bytes);
            }
            _ => {
                self.last.insert(run, self.found.len());
                self.found.push(object);
            }
        }
    }

    pub(super) fn finish(self) -> Vec<Victim> {
        self.found
    }
}
