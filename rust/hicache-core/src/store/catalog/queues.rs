//! Whose turn it is to leave: pages that nothing continues, by recency, those used again apart from the others.
//!
//! The queues are lazy. An entry may be out of date: its page was used since, got a continuation, or is gone. That
//! shows when it comes to the front; so a use costs nothing here.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::pages::{Page, Pages, QUEUED_UNUSED, QUEUED_USED, USED};

/// A page in its turn: recency, bytes of its key (so that equal recency has an order that does not depend on who
/// spoke first), number.
type Entry = Reverse<(u64, u32, u32)>;

/// Entries that a queue may have before it is looked through for those that are out of date.
const ENTRIES_AT_LEAST: usize = 1024;

/// The two queues.
#[derive(Default)]
pub(super) struct Queues {
    unused: BinaryHeap<Entry>,
    used: BinaryHeap<Entry>,
}

impl Queues {
    /// Lets a leaf wait for its turn. `stored_pages` is how many pages there are in all.
    pub(super) fn push(&mut self, pages: &mut Pages, number: u32, stored_pages: usize) {
        let page = &mut pages[number];
        let (queue, flag) = match page.has(USED) {
            true => (&mut self.used, QUEUED_USED),
            false => (&mut self.unused, QUEUED_UNUSED),
        };
        if page.has(flag) {
            return;
        }
        page.flags |= flag;
        queue.push(entry(page, number));
        if queue.len() > ENTRIES_AT_LEAST + 2 * stored_pages {
            tidy(queue, pages, flag);
        }
    }

    /// The page longest not in use, among those used again or among the others.
    pub(super) fn front(&mut self, pages: &mut Pages, used: bool) -> Option<(u64, u32)> {
        let (queue, flag) = match used {
            true => (&mut self.used, QUEUED_USED),
            false => (&mut self.unused, QUEUED_UNUSED),
        };
        while let Some(Reverse((recency, tie, number))) = queue.peek().copied() {
            let page = &mut pages[number];
            if !is_current(page, tie, flag) {
                queue.pop();
                continue;
            }
            let is_its_queue = page.has(USED) == used;
            if !is_its_queue || !page.is_stored() || !page.is_leaf() {
                page.flags &= !flag;
                queue.pop();
            } else if page.recency != recency {
                let entry = entry(page, number);
                queue.pop();
                queue.push(entry);
            } else {
                return Some((recency, number));
            }
        }
        None
    }

    pub(super) fn memory(&self) -> usize {
        (self.unused.capacity() + self.used.capacity()) * size_of::<Entry>()
    }
}

/// Keeps one entry for each page that waits.
fn tidy(queue: &mut BinaryHeap<Entry>, pages: &mut Pages, flag: u8) {
    let mut kept = Vec::new();
    for Reverse((_, tie, number)) in queue.drain() {
        let page = &mut pages[number];
        if is_current(page, tie, flag) {
            page.flags &= !flag;
            let is_its_queue = page.has(USED) == (flag == QUEUED_USED);
            if is_its_queue && page.is_stored() && page.is_leaf() {
                kept.push(entry(page, number));
            }
        }
    }
    for Reverse((.., number)) in &kept {
        pages[*number].flags |= flag;
    }
    *queue = kept.into();
}

fn entry(page: &Page, number: u32) -> Entry {
    Reverse((page.recency, tie(page), number))
}

/// Whether the slot still holds the page that was put into this queue.
fn is_current(page: &Page, tie_then: u32, flag: u8) -> bool {
    page.has(flag) && tie(page) == tie_then
}

fn tie(page: &Page) -> u32 {
    u32::from_be_bytes([page.key[0], page.key[1], page.key[2], page.key[3]])
}
