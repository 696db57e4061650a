//! How many tokens of real request traces does the store find again at a quarter of their pages' bytes, against an
//! exact leaf-first page LRU of that size? And what does a stream that nobody asks for again do to it?
//!
//! A request asks for its pages in order: the longest stored prefix is a hit and is used; what is missing is stored
//! behind it. The hit share is hit pages over asked pages.

use std::time::{Duration, Instant};

mod catalog;
mod oracle;
mod store;
mod traces;

use traces::Trace;

/// A stored page in the replays of the catalog, in bytes.
const PAGE_BYTES: u64 = 4096;
/// Pages of each chain of the scan.
const SCAN_CHAIN: usize = 100;

/// Something that holds pages and lets others go.
trait Cache {
    /// Asks for a chain of pages, leading ones first, and stores what is missing. Leading pages found.
    fn request(&mut self, pages: &[u32]) -> usize;
    /// Stored pages whose parent is not stored, and stored pages.
    fn orphans(&mut self) -> (usize, usize);
}

/// What a replay gives.
struct Outcome {
    asked: usize,
    hit: usize,
    asked_late: usize,
    hit_late: usize,
    most_orphans: f64,
}

impl Outcome {
    fn share(&self) -> f64 {
        self.hit as f64 / self.asked as f64
    }

    /// Of the requests after the middle.
    fn late_share(&self) -> f64 {
        self.hit_late as f64 / self.asked_late as f64
    }

    /// Share of the stored pages that had been stored before.
    fn stored_again(&self, unique: usize) -> f64 {
        let written = (self.asked - self.hit) as f64;
        (written - unique as f64) / written
    }
}

/// Replays a trace, with a scan of `scan` pages in its middle.
fn replay(trace: &Trace, cache: &mut dyn Cache, scan: usize) -> Outcome {
    let mut outcome = Outcome { asked: 0, hit: 0, asked_late: 0, hit_late: 0, most_orphans: 0.0 };
    let middle = trace.requests() / 2;
    trace.each(|number, pages| {
        if number == middle {
            for chain in 0..scan.div_ceil(SCAN_CHAIN) {
                let first = (trace.pages() + chain * SCAN_CHAIN) as u32;
                let pages: Vec<u32> = (first..first + SCAN_CHAIN as u32).collect();
                cache.request(&pages);
            }
        }
        let hit = cache.request(pages);
        (outcome.asked, outcome.hit) = (outcome.asked + pages.len(), outcome.hit + hit);
        if number >= middle {
            outcome.asked_late += pages.len();
            outcome.hit_late += hit;
        }
        if number % 500 == 499 {
            let (orphans, stored) = cache.orphans();
            outcome.most_orphans = outcome.most_orphans.max(orphans as f64 / stored.max(1) as f64);
        }
    });
    outcome
}

/// Through the catalog alone.
pub fn run_catalog() {
    for trace in traces::all() {
        let capacity = trace.pages() / 4;
        let most = trace.pages() + capacity + 2 * SCAN_CHAIN;
        let measure = |scan: usize| {
            let ours = replay(&trace, &mut catalog::Replay::new(most, capacity), scan);
            let lru = replay(&trace, &mut oracle::LeafLru::new(most, capacity), scan);
            (ours, lru)
        };
        let ((ours, lru), (ours_scanned, lru_scanned)) = (measure(0), measure(capacity));
        println!(
            "RESULT: replay, catalog: {}: hit {:.4}, exact leaf-first LRU {:.4} (bar: 0.02 less), orphans at most {:.4} (bar \
             0.01), {:.3} of each page written had been written before (LRU {:.3})",
            trace.name,
            ours.share(),
            lru.share(),
            ours.most_orphans,
            ours.stored_again(trace.pages()),
            lru.stored_again(trace.pages()),
        );
        println!(
            "RESULT: replay, catalog: {}: a scan of one capacity takes {:.4} of the hits behind it, of the LRU {:.4}",
            trace.name,
            ours.late_share() - ours_scanned.late_share(),
            lru.late_share() - lru_scanned.late_share(),
        );
    }
    catalog::measure_speed();
}

/// Through a store, as fast as it goes, or with each trace spread over so many seconds: what a store does on the side
/// has more time for each page then.
pub fn run_store(seconds: Option<u64>) {
    for trace in traces::all() {
        let mut store = store::Replay::new(&trace, seconds.map(Duration::from_secs));
        let started = Instant::now();
        let outcome = replay(&trace, &mut store, 0);
        let seconds = started.elapsed().as_secs_f64();
        let lru = replay(&trace, &mut oracle::LeafLru::new(trace.pages(), store.capacity_pages()), 0);
        println!(
            "RESULT: replay, store: {}: pages of {} bytes: hit {:.4}, exact leaf-first LRU of as many payload bytes {:.4} (bar: 0.02 \
             less), orphans at most {:.4} (bar 0.01), {:.4} copied of each page written (bar 0.1), {:.4} stored again after they \
             were evicted, {} refused, at most {:.3} of the capacity used, {seconds:.0} s",
            trace.name,
            store.page_bytes(),
            outcome.share(),
            lru.share(),
            outcome.most_orphans,
            store.copied(),
            store.stored_again(),
            store.refused(),
            store.most_used(),
        );
    }
}
