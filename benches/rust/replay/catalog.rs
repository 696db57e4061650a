//! The replay through the catalog alone: frames as a store would write them, and no bytes.

use std::collections::HashMap;
use std::time::Instant;

use hicache_core::format::directory::UNKNOWN_DEPTH;
use hicache_core::format::form::{Codec, Form};
use hicache_core::format::frame::{AddRun, AddUnit, ShortKey};
use hicache_core::format::{ProcessId, SegmentId};
use hicache_core::store::catalog::Catalog;
use hicache_core::{Fingerprint, LayoutName, Span, Tile};

use super::{Cache, PAGE_BYTES};

const NAMESPACE: Fingerprint = Fingerprint([1; 16]);
/// Between two requests; the catalog puts the keys of one touch frame nanoseconds apart.
const REQUEST_NS: u64 = 1_000_000;
/// Of the speed measurement.
const RUN_PAGES: u32 = 64;

/// Writes frames to a catalog.
struct Frames {
    catalog: Catalog,
    form: Form,
    end: u64,
    now_ns: u64,
}

impl Frames {
    fn new() -> Frames {
        let span = Span { start: 0, end: 1 };
        let form = Form {
            pool: Fingerprint([2; 16]),
            tile: Tile::whole_page(span, span, 1).expect("a tile"),
            layout: LayoutName::PageFirst,
            codec: Codec::None,
            block_bytes: 8 << 10,
            page_bytes: PAGE_BYTES,
        };
        Frames { catalog: Catalog::default(), form, end: PAGE_BYTES, now_ns: 0 }
    }

    /// Stores pages behind `parent` and gives the run's name.
    fn add(&mut self, parent: Option<u32>, pages: &[u32], pool: u8) -> u64 {
        let form = Form { pool: Fingerprint([pool; 16]), ..self.form };
        let keys: Vec<ShortKey> = pages.iter().map(|&page| key(page)).collect();
        let payload_bytes = pages.len() as u64 * PAGE_BYTES;
        let directory_offset = self.end + payload_bytes;
        let directory_bytes = (pages.len() as u64 * 52).next_multiple_of(PAGE_BYTES);
        let unit = AddUnit {
            segment: SegmentId { process: ProcessId([3; 16]), number: (self.end >> 30) as u32 },
            generation: 0,
            unit_offset: self.end,
            unit_bytes: payload_bytes + directory_bytes,
            directory_offset,
            directory_bytes,
        };
        let run = AddRun {
            form,
            entries_offset: directory_offset,
            payload_offset: self.end,
            payload_bytes,
            parent: parent.map_or([0; 16], key),
            depth: UNKNOWN_DEPTH,
            keys: keys.as_flattened(),
        };
        self.catalog.add(NAMESPACE, &unit, &run, self.now_ns);
        self.end += unit.unit_bytes;
        directory_offset
    }
}

fn key(page: u32) -> ShortKey {
    let mixed = u64::from(page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut key = [0; 16];
    key[..8].copy_from_slice(&mixed.to_le_bytes());
    key[8..].copy_from_slice(&mixed.rotate_left(29).to_le_bytes());
    key
}

/// A catalog as a cache of so many pages.
pub struct Replay {
    frames: Frames,
    capacity_bytes: u64,
    is_stored: Vec<bool>,
    /// Pages of each run.
    runs: HashMap<u64, Vec<u32>>,
}

impl Replay {
    /// Of `capacity` pages, whose numbers are below `most`.
    pub fn new(most: usize, capacity: usize) -> Replay {
        let capacity_bytes = capacity as u64 * PAGE_BYTES;
        Replay { frames: Frames::new(), capacity_bytes, is_stored: vec![false; most], runs: HashMap::new() }
    }
}

impl Cache for Replay {
    fn request(&mut self, pages: &[u32]) -> usize {
        self.frames.now_ns += REQUEST_NS;
        let hit = pages.iter().take_while(|&&page| self.is_stored[page as usize]).count();
        let (used, missing) = pages.split_at(hit);
        if let Some(&last) = used.last() {
            self.frames.catalog.touch(NAMESPACE, &[key(last)], self.frames.now_ns);
        }
        let wanted = self.frames.catalog.live_bytes() + missing.len() as u64 * PAGE_BYTES;
        for victim in self.frames.catalog.choose(wanted.saturating_sub(self.capacity_bytes)) {
            let run = &self.runs[&victim.entries_offset];
            for &page in &run[victim.first as usize..][..victim.count as usize] {
                assert!(std::mem::take(&mut self.is_stored[page as usize]), "a victim is stored");
            }
        }
        if !missing.is_empty() {
            missing.iter().for_each(|&page| self.is_stored[page as usize] = true);
            let run = self.frames.add(used.last().copied(), missing, 0);
            self.runs.insert(run, missing.to_vec());
        }
        hit
    }

    fn orphans(&mut self) -> (usize, usize) {
        let totals = self.frames.catalog.totals();
        (totals.orphans, totals.pages)
    }
}

/// Memory, and how long adding and choosing take.
pub fn measure_speed() {
    const PAGES: u32 = 2_000_000;
    let memory = [1, 5].map(|pools| {
        let mut frames = Frames::new();
        let started = Instant::now();
        for first in (0..PAGES).step_by(RUN_PAGES as usize) {
            frames.now_ns += REQUEST_NS;
            let pages: Vec<u32> = (first..first + RUN_PAGES).collect();
            // Chains of 16 runs.
            let parent = (!first.is_multiple_of(16 * RUN_PAGES)).then(|| first - 1);
            for pool in 0..pools {
                frames.add(parent, &pages, pool);
            }
        }
        let adding = started.elapsed().as_secs_f64() / f64::from(PAGES) / f64::from(pools) * 1e9;
        let memory = frames.catalog.totals().memory_bytes as f64 / f64::from(PAGES);
        let started = Instant::now();
        let victims = frames.catalog.choose(100_000 * u64::from(pools) * PAGE_BYTES);
        let chosen: u32 = victims.iter().map(|victim| victim.count).sum();
        println!(
            "RESULT: catalog: {PAGES} pages of {pools} objects: {memory:.1} bytes a page, {adding:.0} ns to take in an object, {chosen} \
             objects of 100,000 pages chosen in {:.3} s",
            started.elapsed().as_secs_f64()
        );
        memory
    });
    println!("RESULT: catalog: {:.1} bytes for each further object of a page", (memory[1] - memory[0]) / 4.0);
}
