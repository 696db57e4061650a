//! Copies of pages that have been submitted and not finished.

use crate::ack::{Outcome, Ticket};
use crate::placement::Page;

/// Most pages of a node.
pub(super) const NODE_PAGES: usize = 3;

/// A few pages, without an allocation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Pages {
    pages: [Page; NODE_PAGES],
    len: u8,
}

impl Pages {
    pub fn of(pages: &[Page]) -> Pages {
        let mut small = Pages::default();
        small.pages[..pages.len()].copy_from_slice(pages);
        small.len = pages.len() as u8;
        small
    }

    pub fn list(&self) -> &[Page] {
        &self.pages[..usize::from(self.len)]
    }

    pub fn clear(&mut self) {
        self.len = 0;
    }

    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len as u8);
    }
}

/// A copy under way on one rank: its own share, read when it finishes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy {
    pub rank: u8,
    pub log: u8,
    pub ticket: Ticket,
    /// Host to device.
    pub load: bool,
    pub outcome: Outcome,
    pub pairs: [(Page, Page); NODE_PAGES],
    pub len: u8,
}
