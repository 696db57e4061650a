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
    pub const NONE: Pages = Pages { pages: [0; NODE_PAGES], len: 0 };

    /// Room for `len` pages.
    pub fn of(len: u32) -> Pages {
        assert!(len as usize <= NODE_PAGES, "{len} pages of a node");
        Pages { len: len as u8, ..Pages::NONE }
    }

    pub fn len(&self) -> u32 {
        u32::from(self.len)
    }

    pub fn list_mut(&mut self) -> &mut [Page] {
        &mut self.pages[..usize::from(self.len)]
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
