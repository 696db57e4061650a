//! The yardstick: an exact LRU of pages in which a request touches its pages from the last to the first, so that the page
//! longest not touched is always one that nothing continues. It shares no code with the store.

use super::Cache;

const NONE: u32 = u32::MAX;

/// A ring of pages from the latest touched to the one longest not touched.
pub struct LeafLru {
    /// Neighbours of each page, towards later and towards earlier ones. The last slot is the ring's seam.
    ring: Vec<(u32, u32)>,
    is_stored: Vec<bool>,
    parents: Vec<u32>,
    children: Vec<u32>,
    stored: usize,
    capacity: usize,
}

impl LeafLru {
    /// Of `capacity` pages, whose numbers are below `most`.
    pub fn new(most: usize, capacity: usize) -> Self {
        let mut ring = vec![(NONE, NONE); most + 1];
        ring[most] = (most as u32, most as u32);
        LeafLru {
            ring,
            is_stored: vec![false; most],
            parents: vec![NONE; most],
            children: vec![0; most],
            stored: 0,
            capacity,
        }
    }

    fn take_out(&mut self, page: u32) {
        let (later, earlier) = self.ring[page as usize];
        self.ring[later as usize].1 = earlier;
        self.ring[earlier as usize].0 = later;
    }

    fn put_first(&mut self, page: u32) {
        let seam = self.ring.len() as u32 - 1;
        let second = self.ring[seam as usize].1;
        self.ring[page as usize] = (seam, second);
        self.ring[second as usize].0 = page;
        self.ring[seam as usize].1 = page;
    }

    fn evict(&mut self) {
        let last = self.ring[self.ring.len() - 1].0;
        assert_eq!(self.children[last as usize], 0, "the page longest not touched is a leaf");
        self.take_out(last);
        self.is_stored[last as usize] = false;
        self.stored -= 1;
        let parent = self.parents[last as usize];
        if parent != NONE {
            self.children[parent as usize] -= 1;
        }
    }
}

impl Cache for LeafLru {
    fn request(&mut self, pages: &[u32]) -> usize {
        let hit = pages.iter().take_while(|&&page| self.is_stored[page as usize]).count();
        for &page in pages[..hit].iter().rev() {
            self.take_out(page);
            self.put_first(page);
        }
        while self.stored + pages.len() - hit > self.capacity {
            self.evict();
        }
        for at in (0..pages.len()).rev() {
            let page = pages[at];
            if at < hit {
                self.take_out(page);
            } else {
                self.is_stored[page as usize] = true;
                self.stored += 1;
                if at > 0 {
                    self.parents[page as usize] = pages[at - 1];
                    self.children[pages[at - 1] as usize] += 1;
                }
            }
            self.put_first(page);
        }
        hit
    }

    fn orphans(&mut self) -> (usize, usize) {
        (0, self.stored)
    }
}
