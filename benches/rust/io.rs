//! Backup and restore of large pages, verified, against plain `pwritev` and `preadv` loops over the same bytes.

use std::path::Path;
use std::time::Instant;

use hicache_core::{
    ChainStart, Component, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, PoolMemory, RestoreOptions,
    RestoreOutcome, Span, Tile, View, ViewOptions, ViewPool,
};
use hicache_sys::Region;
use hicache_sys::file::{self, Access, Piece};

use crate::measure::{Numbers, Spread, folder, open};

const PAGES: usize = 64;
/// 36 layers, 4 heads of 128 elements, 64 tokens, K and V, 16 bit: 4,718,592 bytes.
const PAGE_BYTES: u64 = 36 * 4 * 128 * 64 * 2 * 2;
const ROUNDS: usize = 7;

/// Prints GB/s of both, and the ratio round by round.
pub fn run() {
    let folder = folder();
    let (source, target) =
        (Region::owned(PAGES * PAGE_BYTES as usize), Region::owned(PAGES * PAGE_BYTES as usize));
    let mut numbers = Numbers(7);
    for offset in (0..source.len() as u64).step_by(8) {
        source.copy_in(offset, &numbers.next().to_le_bytes()).expect("inside");
    }
    target.copy_in(0, &vec![1; target.len()]).expect("inside");
    let store = open(&folder.path().join("store"));
    let view = large_view(&store);
    let (mut writes, mut reads, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (mut plain_writes, mut plain_reads) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let (plain_write, plain_read) = plain(&folder.path().join("plain"), &source, &target);
        let (write, read) = stored(&view, round as u64, &source, &target);
        if round == 0 {
            continue; // warms the page cache's own allocations
        }
        let rate = |seconds: f64| (PAGES as u64 * PAGE_BYTES) as f64 / seconds / 1e9;
        plain_writes.push(rate(plain_write));
        plain_reads.push(rate(plain_read));
        writes.push(rate(write));
        reads.push(rate(read));
        ratios.push((plain_write + plain_read) / (write + read));
    }
    let pages = format!("{PAGES} pages of {PAGE_BYTES} bytes, warm page cache, codec none");
    println!("RESULT: io: {pages}");
    println!(
        "RESULT: io: plain pwritev {} GB/s, preadv {} GB/s",
        Spread::of(plain_writes),
        Spread::of(plain_reads)
    );
    println!("RESULT: io: backup {} GB/s, verified restore {} GB/s", Spread::of(writes), Spread::of(reads));
    println!("RESULT: io: backup + restore against the plain loops: {} x (bar 0.7)", Spread::of(ratios));
}

fn large_view(store: &hicache_core::Store) -> View {
    let namespace = Namespace::new("bench/io", "r1", 64, None).expect("a namespace");
    let components = vec![Component::per_token("k", 256), Component::per_token("v", 256)];
    let pool = Pool::new("kv", PoolKind::Kv, DType::parse("bfloat16").expect("a type"), None, components)
        .expect("a pool");
    let tile = Tile::whole_page(Span { start: 0, end: 36 }, Span { start: 0, end: 4 }, 64).expect("a tile");
    let pools = vec![ViewPool::new(pool, tile, LayoutName::PageFirst)];
    let view = store.view(namespace, pools, ViewOptions::default()).expect("a view");
    assert_eq!(view.page_bytes(0), PAGE_BYTES);
    view
}

/// Seconds to write all pages to a new file and to read them back: K and V of a page in one vectored call each.
fn plain(path: &Path, source: &Region, target: &Region) -> (f64, f64) {
    let pieces = |region, page: usize| {
        let half = PAGE_BYTES / 2;
        let k = page as u64 * half;
        let v = PAGES as u64 * half + k;
        [k, v].map(|offset| Piece { region, offset, len: half })
    };
    let started = Instant::now();
    let out = file::create_new(path).expect("a new file");
    for page in 0..PAGES {
        file::write_pieces(&out, &pieces(source, page), page as u64 * PAGE_BYTES).expect("a write");
    }
    let write = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let back = file::open_read(path, Access::Buffered).expect("the file");
    for page in 0..PAGES {
        file::read_pieces(&back, &pieces(target, page), page as u64 * PAGE_BYTES).expect("a read");
    }
    let read = started.elapsed().as_secs_f64();
    std::fs::remove_file(path).expect("removed");
    (write, read)
}

fn stored(view: &View, round: u64, source: &Region, target: &Region) -> (f64, f64) {
    let mut numbers = Numbers(round + 100);
    let key = |_| {
        let mut key = [0; 32];
        key.chunks_mut(8).for_each(|word| word.copy_from_slice(&numbers.next().to_le_bytes()));
        PageKey(key)
    };
    let keys: Vec<PageKey> = (0..PAGES).map(key).collect();
    let slots: Vec<i64> = (0..PAGES as i64).collect();
    let lend = |region| vec![PoolMemory { regions: vec![region], slots: &slots }];
    let started = Instant::now();
    let report = view.backup(&keys, lend(source), ChainStart::default()).expect("a backup");
    let write = started.elapsed().as_secs_f64();
    assert!(report.reason.is_none(), "{:?}", report.reason);
    target.copy_in(0, &[0]).expect("inside");
    let started = Instant::now();
    let report = view.restore(&keys, lend(target), RestoreOptions::default()).expect("a restore");
    let read = started.elapsed().as_secs_f64();
    assert!(report.outcomes.iter().all(|&outcome| outcome == RestoreOutcome::Restored));
    let same = |offset| {
        let bytes = |region: &Region| region.with_bytes(offset, PAGE_BYTES, <[u8]>::to_vec).expect("inside");
        bytes(source) == bytes(target)
    };
    assert!((0..PAGES as u64).all(|page| same(page * PAGE_BYTES)));
    view.clear().expect("cleared");
    (write, read)
}
