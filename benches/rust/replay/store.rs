//! The replay through a store with small pages.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use hicache_core::store::counters::Counter;
use hicache_core::{
    ChainStart, Component, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, PoolMemory, Span, Store,
    StoreOptions, Tile, View, ViewOptions, ViewPool,
};
use hicache_sys::Region;

use super::Cache;
use super::traces::Trace;
use crate::measure::folder;

/// Smallest page; traces of few pages get larger ones, so that a quarter of their bytes is a capacity at all.
const PAGE_BYTES: u64 = 4096;
/// A quarter of the trace's bytes is at least this.
const LEAST_CAPACITY: u64 = 32 << 20;
/// Pages stored with one call.
const BATCH: usize = 1024;

/// A store as a cache of a quarter of a trace's bytes.
pub struct Replay<'a> {
    trace: &'a Trace,
    /// Looks without being noted as a use.
    onlooker: View,
    view: View,
    store: Store,
    _folder: tempfile::TempDir,
    memory: Region,
    capacity_bytes: u64,
    page_bytes: u64,
    stored_once: HashSet<u32>,
    written: usize,
    stored_again: usize,
    refused: usize,
    most_used_bytes: u64,
    started: Instant,
    /// Time for each request.
    pace: Duration,
    requests: u32,
}

impl<'a> Replay<'a> {
    /// For this trace, spread over `time` if there is one.
    pub fn new(trace: &'a Trace, time: Option<Duration>) -> Replay<'a> {
        let quarter = trace.pages() as u64 / 4;
        let mut page_bytes = PAGE_BYTES;
        while quarter * page_bytes < LEAST_CAPACITY {
            page_bytes *= 2;
        }
        let folder = folder();
        let capacity_bytes = quarter * page_bytes;
        let options = StoreOptions { capacity_bytes: Some(capacity_bytes), ..StoreOptions::default() };
        let store = Store::open(folder.path(), options).expect("a store");
        let view = view_of_pages(&store, page_bytes);
        let options = StoreOptions { read_only: true, ..StoreOptions::default() };
        let onlooker =
            view_of_pages(&Store::open(folder.path(), options).expect("a second store"), page_bytes);
        Replay {
            trace,
            onlooker,
            view,
            store,
            _folder: folder,
            memory: Region::owned(page_bytes as usize * BATCH),
            capacity_bytes,
            page_bytes,
            stored_once: HashSet::new(),
            written: 0,
            stored_again: 0,
            refused: 0,
            most_used_bytes: 0,
            started: Instant::now(),
            pace: time.unwrap_or_default() / trace.requests() as u32,
            requests: 0,
        }
    }

    /// Pages whose payload alone would fill the capacity.
    pub fn capacity_pages(&self) -> usize {
        (self.capacity_bytes / self.page_bytes) as usize
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Share of the written pages that had been written before, and were asked for again after they were evicted.
    pub fn stored_again(&self) -> f64 {
        self.stored_again as f64 / self.written as f64
    }

    /// Pages copied out of sparse segments, for each page written.
    pub fn copied(&self) -> f64 {
        let counters = self.store.counters();
        let copied = counters.iter().find(|(counter, _)| *counter == Counter::CompactedObjects);
        copied.map_or(0, |(_, objects)| *objects) as f64 / self.written as f64
    }

    /// Pages for which there was no room.
    pub fn refused(&self) -> usize {
        self.refused
    }

    /// Most bytes on disk seen, as a share of the capacity.
    pub fn most_used(&self) -> f64 {
        self.most_used_bytes as f64 / self.capacity_bytes as f64
    }
}

fn view_of_pages(store: &Store, page_bytes: u64) -> View {
    let namespace = Namespace::new("bench/replay", "r1", 1, None).expect("a namespace");
    let half = (page_bytes / 2) as u32;
    let components = vec![Component::per_token("k", half), Component::per_token("v", half)];
    let dtype = DType::parse("bfloat16").expect("a type");
    let pool = Pool::new("kv", PoolKind::Kv, dtype, None, components).expect("a pool");
    let span = Span { start: 0, end: 1 };
    let tile = Tile::whole_page(span, span, 1).expect("a tile");
    let pools = vec![ViewPool::new(pool, tile, LayoutName::PageFirst)];
    store.view(namespace, pools, ViewOptions::default()).expect("a view")
}

impl Cache for Replay<'_> {
    fn request(&mut self, pages: &[u32]) -> usize {
        let due = self.pace * self.requests;
        self.requests += 1;
        std::thread::sleep(due.saturating_sub(self.started.elapsed()));
        let keys: Vec<PageKey> = pages.iter().map(|&page| key(page)).collect();
        let hit = self.view.match_prefix(&keys).expect("an answer").pages;
        let mut at = hit;
        while at < keys.len() {
            let end = (at + BATCH).min(keys.len());
            let slots: Vec<i64> = (0..(end - at) as i64).collect();
            let memory = vec![PoolMemory { regions: vec![&self.memory], slots: &slots }];
            let parent = at.checked_sub(1).map(|before| keys[before]);
            let start = ChainStart { parent, depth: Some(at as u32) };
            let report = self.view.backup(&keys[at..end], memory, start).expect("a backup");
            if report.reason.is_some() {
                self.refused += keys.len() - at;
                break;
            }
            self.written += end - at;
            self.stored_again +=
                pages[at..end].iter().filter(|&&page| !self.stored_once.insert(page)).count();
            at = end;
        }
        hit
    }

    /// What no request of the whole trace can reach.
    fn orphans(&mut self) -> (usize, usize) {
        self.most_used_bytes = self.most_used_bytes.max(self.store.used_bytes());
        let mut reached: HashSet<u32> = HashSet::new();
        self.trace.each(|_, pages| {
            let keys: Vec<PageKey> = pages.iter().map(|&page| key(page)).collect();
            let found = self.onlooker.match_prefix(&keys).expect("an answer");
            reached.extend(&pages[..found.pages]);
        });
        let stored = self.onlooker.indexed_objects();
        (stored.saturating_sub(reached.len()), stored)
    }
}

fn key(page: u32) -> PageKey {
    let mut key = [0; 32];
    for (lane, word) in (1u64..).zip(key.chunks_mut(8)) {
        let mixed = (u64::from(page + 1) << 3 | lane).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(mixed ^ mixed >> 29).to_le_bytes());
    }
    PageKey(key)
}
