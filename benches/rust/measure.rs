//! Median and spread, and the tiny deployment that the index benches fill.

use hicache_core::{
    ChainStart, Component, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, PoolMemory, Span, Store,
    StoreOptions, Tile, View, ViewOptions, ViewPool,
};
use hicache_sys::Region;

/// Pages in the longest chain.
pub const LONGEST: usize = 2_000;

/// Median, smallest and largest of some figures.
pub struct Spread {
    /// The middle one.
    pub median: f64,
    smallest: f64,
    largest: f64,
}

impl Spread {
    /// Of `figures`, of which there is at least one.
    pub fn of(mut figures: Vec<f64>) -> Spread {
        figures.sort_by(f64::total_cmp);
        let last = figures.len() - 1;
        Spread { median: figures[figures.len() / 2], smallest: figures[0], largest: figures[last] }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} ({:.3} to {:.3})", self.median, self.smallest, self.largest)
    }
}

/// A small generator of the same numbers on every run.
pub struct Numbers(pub u64);

impl Numbers {
    /// The next one.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// The next one below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// One chain: its keys, and how many leading pages are stored.
pub struct Chain {
    /// Keys of its pages.
    pub keys: Vec<PageKey>,
    /// The right answer of `match`.
    pub stored: usize,
}

/// Chains of `objects` pages in all, the same on every run: random lengths up to [`LONGEST`], every tenth one with
/// a hole at a random place.
pub fn chains(objects: usize) -> Vec<Chain> {
    let mut numbers = Numbers(88_172_645_463_325_252);
    let mut chains = Vec::new();
    let mut total = 0;
    while total < objects {
        let length = (1 + numbers.below(LONGEST)).min(objects - total);
        total += length;
        let keys = (0..length)
            .map(|_| {
                let mut key = [0; 32];
                key.chunks_mut(8).for_each(|word| word.copy_from_slice(&numbers.next().to_le_bytes()));
                PageKey(key)
            })
            .collect();
        let has_hole = chains.len() % 10 == 9;
        let stored = if has_hole { numbers.below(length) } else { length };
        chains.push(Chain { keys, stored });
    }
    chains
}

/// The view that the index benches use: pages of 16 bytes.
pub fn tiny_view(store: &Store) -> View {
    view_of_head(store, 0)
}

/// The same with pages of some head.
pub fn view_of_head(store: &Store, head: u32) -> View {
    let namespace = Namespace::new("bench/index", "r1", 1, None).expect("a namespace");
    let components = vec![Component::per_token("k", 8), Component::per_token("v", 8)];
    let pool = Pool::new("kv", PoolKind::Kv, DType::parse("bfloat16").expect("a type"), None, components)
        .expect("a pool");
    let (layers, heads) = (Span { start: 0, end: 1 }, Span { start: head, end: head + 1 });
    let tile = Tile::whole_page(layers, heads, 1).expect("a tile");
    let pools = vec![ViewPool::new(pool, tile, LayoutName::PageFirst)];
    store.view(namespace, pools, ViewOptions::default()).expect("a view")
}

/// Opens a store for the benches.
pub fn open(root: &std::path::Path) -> Store {
    let options = StoreOptions { capacity_bytes: Some(8 << 30), ..StoreOptions::default() };
    Store::open(root, options).expect("a store")
}

/// Stores the chains, holes left out. Objects stored.
pub fn fill(view: &View, chains: &[Chain]) -> usize {
    let memory = Region::owned(16 * LONGEST);
    let mut objects = 0;
    for chain in chains {
        let slot = |page: usize| if page == chain.stored { -1 } else { page as i64 };
        let slots: Vec<i64> = (0..chain.keys.len()).map(slot).collect();
        let memory = vec![PoolMemory { regions: vec![&memory], slots: &slots }];
        let start = ChainStart { parent: None, depth: Some(0) };
        let report = view.backup(&chain.keys, memory, start).expect("a backup");
        assert!(report.reason.is_none(), "{:?}", report.reason);
        objects += slots.iter().filter(|&&slot| slot >= 0).count();
    }
    objects
}

/// Stores every page with a call of its own, chains mixed, as a decoding engine does. Objects stored.
pub fn fill_singly(view: &View, chains: &[Chain]) -> usize {
    let memory = Region::owned(16);
    let mut objects = 0;
    for page in 0..LONGEST {
        for chain in chains.iter().filter(|chain| page < chain.keys.len() && page != chain.stored) {
            let start =
                ChainStart { parent: page.checked_sub(1).map(|before| chain.keys[before]), depth: None };
            let memory = vec![PoolMemory { regions: vec![&memory], slots: &[0] }];
            let report = view.backup(&chain.keys[page..=page], memory, start).expect("a backup");
            assert!(report.reason.is_none(), "{:?}", report.reason);
            objects += 1;
        }
    }
    objects
}

/// A folder for a bench, on the disk of the working folder's `target`, or where `HICACHE_BENCH_DIR` says.
pub fn folder() -> tempfile::TempDir {
    match std::env::var_os("HICACHE_BENCH_DIR") {
        Some(parent) => tempfile::tempdir_in(parent),
        None => tempfile::tempdir(),
    }
    .expect("a temporary folder")
}
