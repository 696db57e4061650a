//! Which reads go through the page cache where the store decides: those whose bytes are there, and those that
//! are asked for again.
//!
//! A page that is in the cache comes from it at the speed of memory. One that is not comes faster and with less
//! processor time past the cache, but is not there the next time: so the second read of the same bytes goes
//! through it and fills it (the idea of 2Q: Johnson and Shasha, 1994).

use std::fs::File;
use std::sync::atomic::{AtomicU32, Ordering};

use hicache_sys::probe::cached_bytes;
use twox_hash::XxHash3_64;

/// Bytes of one remembered place.
const GRANULE_BYTES: u64 = 64 << 10;

/// Places that are remembered: 16 GiB of them in 1 MiB of memory.
const PLACES: usize = 1 << 18;

/// What was read past the page cache lately.
pub(crate) struct PageCache {
    /// For each place a part of the hash of what was read there last; 0 for nothing. One that is overwritten is
    /// forgotten.
    read_once: Box<[AtomicU32]>,
}

impl PageCache {
    pub(crate) fn new() -> Self {
        PageCache { read_once: (0..PLACES).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Whether the page cache should serve, or be filled by, this read of the file numbered `file_number`; where not,
    /// the place is remembered.
    pub(crate) fn is_used_by(&self, file_number: u64, file: &File, offset: u64, len: u64) -> bool {
        // An error says that the kernel will not tell: nothing is known to be better than the cache then.
        let is_there = cached_bytes(file, offset, len).map_or(true, |cached| cached >= len / 2);
        is_there || self.is_read_again(file_number, offset, len)
    }

    /// Whether most of these bytes were asked for before; remembers that they were now.
    fn is_read_again(&self, file_number: u64, offset: u64, len: u64) -> bool {
        let granules = offset / GRANULE_BYTES..(offset + len.max(1)).div_ceil(GRANULE_BYTES);
        let count = granules.end - granules.start;
        let mut again = 0;
        for granule in granules {
            let hash = XxHash3_64::oneshot_with_seed(file_number, &granule.to_le_bytes());
            let (place, tag) = (hash as usize % PLACES, (hash >> 32) as u32 | 1);
            again += u64::from(self.read_once[place].swap(tag, Ordering::Relaxed) == tag);
        }
        2 * again > count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_read_of_the_same_bytes_is_known_and_others_are_not() {
        let cache = PageCache::new();
        assert!(!cache.is_read_again(1, 1 << 20, 256 << 10));
        assert!(!cache.is_read_again(2, 1 << 20, 256 << 10), "another file");
        assert!(!cache.is_read_again(1, 2 << 20, 256 << 10), "other bytes");
        assert!(cache.is_read_again(1, 1 << 20, 256 << 10));
        assert!(cache.is_read_again(1, (1 << 20) + 4096, 100), "a part of them");
    }

    #[test]
    fn a_read_that_shares_its_edge_with_another_is_not_its_second() {
        let cache = PageCache::new();
        assert!(!cache.is_read_again(1, 4096, 256 << 10));
        assert!(!cache.is_read_again(1, 4096 + (256 << 10), 256 << 10));
    }
}
