//! What was read before what it is about: journals of different processes are read one after the other, so a remove or
//! a touch may come before its add.

use std::collections::HashMap;

use crate::format::SegmentId;
use crate::format::frame::ShortKey;

/// A run in a namespace.
type RunName = (u16, SegmentId, u64);

/// One look at the journals.
#[derive(Default)]
struct Look {
    /// First object and number of objects that are gone.
    gone: HashMap<RunName, Vec<(u32, u32)>>,
    touched: HashMap<(u16, ShortKey), u64>,
}

/// Waits through the look in which it came and the one after that.
#[derive(Default)]
pub(super) struct Pending {
    current: Look,
    previous: Look,
}

impl Pending {
    pub(super) fn insert_gone(&mut self, run: RunName, first: u32, count: u32) {
        self.current.gone.entry(run).or_default().push((first, count));
    }

    pub(super) fn insert_touch(&mut self, namespace: u16, key: &ShortKey, at_ns: u64) {
        let at = self.current.touched.entry((namespace, *key)).or_default();
        *at = (*at).max(at_ns);
    }

    /// What is gone of a run that has just come.
    pub(super) fn take_gone(&mut self, run: RunName) -> Vec<(u32, u32)> {
        let mut gone = Vec::new();
        for look in [&mut self.current, &mut self.previous] {
            gone.extend(look.gone.remove(&run).unwrap_or_default());
        }
        gone
    }

    /// The latest touch of a page that waits.
    pub(super) fn touched(&self, namespace: u16, key: &ShortKey) -> Option<u64> {
        let looks = [&self.current, &self.previous].into_iter();
        looks.filter_map(|look| look.touched.get(&(namespace, *key)).copied()).max()
    }

    pub(super) fn settle(&mut self) {
        self.previous = std::mem::take(&mut self.current);
    }

    pub(super) fn memory(&self) -> usize {
        let bytes = |look: &Look| {
            let records: usize = look.gone.values().map(|gone| 24 + gone.capacity() * 8).sum();
            records + look.gone.capacity() * 33 + look.touched.capacity() * 33
        };
        bytes(&self.current) + bytes(&self.previous)
    }
}
