//! Which reads go through the page cache where the store decides.

use std::path::Path;
use std::sync::{Arc, Mutex};

use hicache_core::store::io::IoCall;
use hicache_core::{
    BackupOutcome, Component, DType, IoMode, LayoutName, PageKey, Pool, PoolKind, RestoreOutcome, Store,
    StoreOptions, View, ViewOptions, ViewPool,
};

use crate::support::*;

const PAGES: usize = 16;
const PAGE_BYTES: usize = 64 << 10;

/// Pages of 64 KiB in a store of this mode, and how its payload was read last.
struct Bench {
    root: tempfile::TempDir,
    store: Store,
    view: View,
    keys: Vec<PageKey>,
    bytes: Vec<u8>,
    /// Past the page cache or not, for each read of payload since the last look.
    reads: Arc<Mutex<Vec<bool>>>,
}

impl Bench {
    /// `None` where the root's file system or kernel cannot tell or cannot read past the cache.
    fn new(io_mode: IoMode, read_by_all: bool) -> Option<Bench> {
        let root = tempfile::tempdir().unwrap();
        let reads = Arc::<Mutex<Vec<bool>>>::default();
        let seen = Arc::clone(&reads);
        let hook = move |call: IoCall<'_>| {
            if !call.is_write && call.len >= PAGE_BYTES as u64 {
                seen.lock().unwrap().push(call.is_direct);
            }
            Ok(())
        };
        let store = Store::open(root.path(), StoreOptions { io_mode, ..hooked(hook) }).unwrap();
        if !store.io_name().starts_with(io_mode.name()) {
            println!("skipped: {} in {}", store.io_name(), root.path().display());
            return None;
        }
        let rows = Component::per_token("x", PAGE_BYTES as u32 / 8);
        let pool = Pool::new("kv", PoolKind::Latent, DType::UInt8, None, vec![rows]).unwrap();
        let pool =
            ViewPool { read_by_all, ..ViewPool::new(pool, tile((0, 2), (0, 1)), LayoutName::PageFirst) };
        let view = store.view(namespace("r1"), vec![pool], ViewOptions::default()).unwrap();
        let (keys, bytes) = (keys("cached", PAGES), page_bytes(3, PAGES * PAGE_BYTES));
        assert_eq!(backup(&view, &keys, &Memory::of(&bytes)).outcomes, [BackupOutcome::Stored; PAGES]);
        Some(Bench { root, store, view, keys, bytes, reads })
    }

    /// Restores all pages, which must be exact: whether each read of payload went past the page cache.
    fn restore(&self) -> Vec<bool> {
        let target = Memory::canary(self.bytes.len());
        assert_eq!(restore(&self.view, &self.keys, &target).outcomes, [RestoreOutcome::Restored; PAGES]);
        assert!(target.bytes() == self.bytes);
        let reads = std::mem::take(&mut *self.reads.lock().unwrap());
        assert!(!reads.is_empty());
        reads
    }

    /// Writes everything back and drops it from the page cache.
    fn forget(&self) {
        fn visit(folder: &Path) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    visit(&path);
                } else if path.extension().is_some_and(|end| end == "seg") {
                    let file = std::fs::File::open(path).unwrap();
                    file.sync_all().unwrap();
                    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                }
            }
        }
        visit(self.root.path());
    }
}

#[test]
fn auto_reads_what_was_just_written_through_the_page_cache() {
    let Some(bench) = Bench::new(IoMode::Auto, false) else { return };
    assert!(bench.restore().iter().all(|is_direct| !is_direct));
}

#[test]
fn auto_reads_cold_pages_past_the_page_cache_once_and_then_fills_it() {
    let Some(bench) = Bench::new(IoMode::Auto, false) else { return };
    bench.forget();
    assert!(bench.restore().iter().all(|is_direct| *is_direct), "the first time");
    assert!(bench.restore().iter().all(|is_direct| !is_direct), "asked for again");
    bench.forget();
    // What is asked for often is kept for the others of its host, however the cache came to lose it.
    assert!(bench.restore().iter().all(|is_direct| !is_direct), "and again");
    assert!(bench.store.io_name().starts_with("auto"));
}

#[test]
fn auto_reads_pages_that_all_ranks_read_through_the_page_cache() {
    let Some(bench) = Bench::new(IoMode::Auto, true) else { return };
    bench.forget();
    assert!(bench.restore().iter().all(|is_direct| !is_direct));
}

#[test]
fn buffered_and_direct_do_what_they_say_whatever_is_cached() {
    for (mode, expected) in [(IoMode::Buffered, false), (IoMode::Direct, true)] {
        for read_by_all in [false, true] {
            let Some(bench) = Bench::new(mode, read_by_all) else { continue };
            assert!(bench.restore().iter().all(|&is_direct| is_direct == expected), "{mode:?}");
            bench.forget();
            assert!(bench.restore().iter().all(|&is_direct| is_direct == expected), "{mode:?}");
        }
    }
}
