//! What look-ups tell of chains: which page comes before the one that a later backup starts with.
//!
//! An engine that does not name the parent of what it stores has asked for the chain before, perhaps through another
//! view of the namespace.

use std::collections::{HashMap, VecDeque};

use crate::format::frame::{ShortKey, short_key};
use crate::key::PageKey;
use crate::store::backup::ChainStart;

/// Look-ups remembered.
const MOST: usize = 4096;

/// The first missing page of each of the latest look-ups, and where it stands in its chain.
#[derive(Default)]
pub(crate) struct Lookups {
    starts: HashMap<ShortKey, ChainStart>,
    order: VecDeque<ShortKey>,
}

impl Lookups {
    /// Takes note that of `keys`, one chain from its start, the first `pages` are there.
    pub(crate) fn note(&mut self, keys: &[PageKey], pages: usize) {
        let Some(missing) = keys.get(pages) else { return };
        let start = ChainStart {
            parent: pages.checked_sub(1).map(|before| keys[before]),
            depth: u32::try_from(pages).ok(),
        };
        let missing = short_key(missing);
        if self.starts.insert(missing, start).is_none() {
            self.order.push_back(missing);
        }
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.starts.remove(&oldest);
        }
    }

    /// Where a chain that starts with this page stands, if a look-up told.
    pub(crate) fn start(&self, first: &PageKey) -> Option<ChainStart> {
        self.starts.get(&short_key(first)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> PageKey {
        PageKey([number; 32])
    }

    #[test]
    fn a_look_up_tells_what_comes_before_its_first_missing_page() {
        let mut lookups = Lookups::default();
        lookups.note(&[key(1), key(2), key(3)], 2);
        lookups.note(&[key(8)], 0);
        lookups.note(&[key(9)], 1);
        assert_eq!(lookups.start(&key(3)), Some(ChainStart { parent: Some(key(2)), depth: Some(2) }));
        assert_eq!(lookups.start(&key(8)), Some(ChainStart { parent: None, depth: Some(0) }));
        assert_eq!((lookups.start(&key(2)), lookups.start(&key(9))), (None, None));
    }

    #[test]
    fn only_the_latest_look_ups_are_kept() {
        let mut lookups = Lookups::default();
        let numbered = |number: usize| {
            let mut key = PageKey([7; 32]);
            key.0[..8].copy_from_slice(&number.to_le_bytes());
            key
        };
        (0..MOST + 10).for_each(|number| lookups.note(&[numbered(number)], 0));
        assert_eq!((lookups.starts.len(), lookups.order.len()), (MOST, MOST));
        assert_eq!(lookups.start(&numbered(9)), None);
        assert!(lookups.start(&numbered(10)).is_some());
    }
}
