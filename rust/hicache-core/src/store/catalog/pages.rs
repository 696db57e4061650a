//! The forest of pages: which page continues which, in all namespaces.
//!
//! A page is kept while it is stored or while something stored continues it; in the second case it is only a joint.

use hashbrown::HashTable;

use crate::format::frame::ShortKey;

/// Stands for no page, object or run.
pub(super) const NONE: u32 = u32::MAX;

/// Steps up a chain that each new page pays for, to look for circles.
const STEPS_A_PAGE: u64 = 64;

/// A page was used again after it had been stored, or a continuation of it was.
pub(super) const USED: u8 = 1;
/// The page waits in the queue of pages never used again.
pub(super) const QUEUED_UNUSED: u8 = 2;
/// The page waits in the queue of used pages.
pub(super) const QUEUED_USED: u8 = 4;
/// The slot holds no page.
const VACANT: u8 = 8;

/// 56 bytes.
pub(super) struct Page {
    pub(super) key: ShortKey,
    /// The latest that is known of: written, touched, or a continuation that left was. A page that has continuations may
    /// be more recent than this, for they tell it when they leave.
    pub(super) recency: u64,
    /// When its oldest copy was written.
    pub(super) added: u64,
    pub(super) parent: u32,
    pub(super) first_child: u32,
    next_sibling: u32,
    previous_sibling: u32,
    /// The first of its objects; [`NONE`] when it is not stored.
    pub(super) objects: u32,
    pub(super) namespace: u16,
    pub(super) flags: u8,
}

impl Page {
    pub(super) fn is_stored(&self) -> bool {
        self.objects != NONE
    }

    /// Whether nothing that is stored continues it.
    pub(super) fn is_leaf(&self) -> bool {
        self.first_child == NONE
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn is_vacant(&self) -> bool {
        self.has(VACANT)
    }
}

/// All pages, by number and by key.
pub(super) struct Pages {
    slots: Vec<Page>,
    /// First vacant slot; the next one is where its next sibling would be.
    vacant: u32,
    table: HashTable<u32>,
    /// Steps that may still be spent on looking for circles.
    steps: u64,
}

impl Default for Pages {
    fn default() -> Self {
        Pages { slots: Vec::new(), vacant: NONE, table: HashTable::new(), steps: 1 << 20 }
    }
}

impl std::ops::Index<u32> for Pages {
    type Output = Page;

    fn index(&self, page: u32) -> &Page {
        &self.slots[page as usize]
    }
}

impl std::ops::IndexMut<u32> for Pages {
    fn index_mut(&mut self, page: u32) -> &mut Page {
        &mut self.slots[page as usize]
    }
}

impl Pages {
    pub(super) fn find(&self, namespace: u16, key: &ShortKey) -> Option<u32> {
        let same = |&page: &u32| self[page].key == *key && self[page].namespace == namespace;
        self.table.find(hash(namespace, key), same).copied()
    }

    /// The page of this key, made now if it was not there; `None` when there is no number left for it.
    pub(super) fn find_or_insert(&mut self, namespace: u16, key: &ShortKey) -> Option<u32> {
        if let Some(page) = self.find(namespace, key) {
            return Some(page);
        }
        let fresh = Page {
            key: *key,
            recency: 0,
            added: u64::MAX,
            parent: NONE,
            first_child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            objects: NONE,
            namespace,
            flags: 0,
        };
        let page = if self.vacant == NONE {
            let page = u32::try_from(self.slots.len()).ok().filter(|&page| page != NONE)?;
            super::push_lean(&mut self.slots, fresh);
            page
        } else {
            let page = self.vacant;
            self.vacant = self[page].next_sibling;
            self[page] = fresh;
            page
        };
        self.steps = self.steps.saturating_add(STEPS_A_PAGE);
        let slots = &self.slots;
        let hash_of = |&page: &u32| hash(slots[page as usize].namespace, &slots[page as usize].key);
        self.table.insert_unique(hash(namespace, key), page, hash_of);
        Some(page)
    }

    /// Notes that `child` continues `parent`, unless its parent is known already. Journals may say anything: what
    /// would close a circle is not taken, nor what cannot be looked through with reasonable effort. The page then
    /// counts as one of unknown parent.
    pub(super) fn link(&mut self, child: u32, parent: u32) -> bool {
        if child == parent || self[child].parent != NONE {
            return false;
        }
        // Only a page that has continuations can be above its own parent.
        if !self[child].is_leaf() {
            let mut above = parent;
            while above != NONE {
                if above == child || self.steps == 0 {
                    return false;
                }
                self.steps -= 1;
                above = self[above].parent;
            }
        }
        let first = self[parent].first_child;
        self[child].parent = parent;
        self[child].next_sibling = first;
        if first != NONE {
            self[first].previous_sibling = child;
        }
        self[parent].first_child = child;
        true
    }

    /// Forgets a page without objects and continuations.
    pub(super) fn remove(&mut self, page: u32) {
        let Page { namespace, key, parent, next_sibling, previous_sibling, .. } = self[page];
        if previous_sibling != NONE {
            self[previous_sibling].next_sibling = next_sibling;
        } else if parent != NONE {
            self[parent].first_child = next_sibling;
        }
        if next_sibling != NONE {
            self[next_sibling].previous_sibling = previous_sibling;
        }
        if let Ok(entry) = self.table.find_entry(hash(namespace, &key), |&number| number == page) {
            entry.remove();
        }
        let vacant = self.vacant;
        let slot = &mut self[page];
        (slot.flags, slot.objects, slot.next_sibling) = (VACANT, NONE, vacant);
        self.vacant = page;
    }

    /// All pages and joints.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Page> {
        self.slots.iter().filter(|page| !page.is_vacant())
    }

    /// Pages that are stored.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Page> {
        self.slots.iter_mut().filter(|page| page.is_stored())
    }

    pub(super) fn memory(&self) -> usize {
        self.slots.capacity() * size_of::<Page>() + self.table.allocation_size()
    }
}

/// Page keys are digests already; the namespace only keeps equal keys of two namespaces apart.
fn hash(namespace: u16, key: &ShortKey) -> u64 {
    let (halves, _) = key.as_chunks::<8>();
    u64::from_le_bytes(halves[0]) ^ u64::from(namespace).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
