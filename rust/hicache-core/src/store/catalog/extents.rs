//! Byte ranges that do not overlap, joined where they meet, and which of them grew since they were last taken.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A set of bytes.
#[derive(Default)]
pub(super) struct Extents {
    /// Ends of the ranges, by their starts.
    ends: BTreeMap<u64, u64>,
    /// Starts of those that grew.
    grown: BTreeSet<u64>,
}

impl Extents {
    /// Puts bytes in. Ranges that touch them become one with them.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() || self.covers(&range) {
            return;
        }
        let Range { mut start, mut end } = range;
        while let Some((&before, &before_end)) = self.ends.range(..=end).next_back() {
            if before_end < start {
                break;
            }
            (start, end) = (start.min(before), end.max(before_end));
            self.ends.remove(&before);
            self.grown.remove(&before);
        }
        self.ends.insert(start, end);
        self.grown.insert(start);
    }

    /// Takes bytes out.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        while let Some((&start, &end)) = self.ends.range(..range.end).next_back() {
            if end <= range.start {
                break;
            }
            self.ends.remove(&start);
            let had_grown = self.grown.remove(&start);
            for rest in [start..range.start, range.end..end].into_iter().filter(|rest| !rest.is_empty()) {
                self.ends.insert(rest.start, rest.end);
                if had_grown {
                    self.grown.insert(rest.start);
                }
            }
        }
    }

    /// The ranges that grew since the last call, in order.
    pub(super) fn take_grown(&mut self) -> Vec<Range<u64>> {
        let grown = std::mem::take(&mut self.grown);
        grown.into_iter().filter_map(|start| Some(start..*self.ends.get(&start)?)).collect()
    }

    /// Ranges in the set.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    fn covers(&self, range: &Range<u64>) -> bool {
        self.ends.range(..=range.start).next_back().is_some_and(|(_, &end)| end >= range.end)
    }
}
