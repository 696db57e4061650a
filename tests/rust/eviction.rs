//! A full root makes room for what is new: whole pages leave, ends of chains first, and everybody knows at once.

use std::path::Path;
use std::time::Duration;

use hicache_core::store::counters::Counter;
use hicache_core::{
    BackupOutcome, LayoutName, PageKey, RestoreOutcome, Store, StoreOptions, View, ViewOptions, ViewPool,
};

use crate::support::*;

const CAPACITY: u64 = 16 << 20;
const PAGE: usize = 128 << 10;

/// A deployment with pages of 128 KiB.
fn large() -> ViewPool {
    let pool = kv_pool("bfloat16", 4096);
    contiguous(ViewPool::new(pool, tile((0, 2), (0, 2)), LayoutName::PageFirst))
}

fn options() -> StoreOptions {
    StoreOptions { capacity_bytes: Some(CAPACITY), io_threads: Some(2), ..StoreOptions::default() }
}

fn view(store: &Store) -> View {
    store.view(namespace("r1"), vec![large()], ViewOptions::default()).unwrap()
}

/// Bytes of page `page` of a chain, a function of both.
fn bytes_of(chain: &str, page: usize) -> Vec<u8> {
    let seed = chain.bytes().fold(page as u64 + 1, |seed, byte| seed.wrapping_mul(131) + u64::from(byte));
    page_bytes(seed, PAGE)
}

fn store_pages(view: &View, chain: &str, pages: usize) -> Vec<BackupOutcome> {
    let bytes: Vec<u8> = (0..pages).flat_map(|page| bytes_of(chain, page)).collect();
    backup(view, &keys(chain, pages), &Memory::of(&bytes)).outcomes
}

/// How many leading pages come back, each of them exact.
fn restored(view: &View, chain: &str, pages: usize) -> usize {
    let memory = Memory::canary(pages * PAGE);
    let outcomes = restore(view, &keys(chain, pages), &memory).outcomes;
    for (page, bytes) in memory.bytes().chunks(PAGE).enumerate() {
        if outcomes[page] == RestoreOutcome::Restored {
            assert!(bytes == bytes_of(chain, page), "page {page} of {chain}");
        }
    }
    outcomes.iter().position(|&outcome| outcome != RestoreOutcome::Restored).unwrap_or(pages)
}

fn pages(view: &View, keys: &[PageKey]) -> usize {
    view.match_prefix(keys).unwrap().pages
}

#[test]
fn a_full_root_takes_new_pages_and_stays_within_its_capacity() {
    let root = fast_folder();
    let store = Store::open(root.path(), options()).unwrap();
    let view = view(&store);
    for number in 0..64 {
        let chain = format!("chain {number}");
        assert_eq!(store_pages(&view, &chain, 8), [BackupOutcome::Stored; 8], "{chain}");
        assert!(store.used_bytes() <= CAPACITY, "{} bytes after {chain}", store.used_bytes());
        assert_eq!(restored(&view, &chain, 8), 8);
        if number > 20 {
            assert!(store.used_bytes() >= CAPACITY * 8 / 10, "{} bytes after {chain}", store.used_bytes());
        }
    }
    assert!(counter(&store, Counter::EvictedObjects) >= 64 * 8 - CAPACITY / PAGE as u64);
    assert_eq!(restored(&view, "chain 0", 8), 0);
    assert_eq!(counter(&store, Counter::RestoreDamaged), 0);
}

#[test]
fn ends_of_chains_leave_before_what_they_continue() {
    let root = fast_folder();
    let store = Store::open(root.path(), options()).unwrap();
    let view = view(&store);
    store_pages(&view, "old", 80);
    store_pages(&view, "new", 60);
    // The whole chain was stored at once; what is left of it starts at its start.
    let (long, found) = (keys("old", 80), pages(&view, &keys("old", 80)));
    assert!((5..70).contains(&found), "{found} pages");
    for key in &long[found..] {
        assert_eq!(pages(&view, &[*key]), 0);
    }
    assert_eq!((restored(&view, "old", 80), restored(&view, "new", 60)), (found, 60));
}

#[test]
fn a_chain_in_use_stays_when_others_come_and_go() {
    let root = fast_folder();
    let store = Store::open(root.path(), options()).unwrap();
    let view = view(&store);
    store_pages(&view, "in use", 16);
    for number in 0..40 {
        assert_eq!(pages(&view, &keys("in use", 16)), 16, "after {number} others");
        store_pages(&view, &format!("other {number}"), 8);
    }
    assert_eq!(restored(&view, "in use", 16), 16);
}

#[test]
fn what_one_process_evicts_is_missing_for_all_at_once() {
    let root = fast_folder();
    let (here, there) =
        (Store::open(root.path(), options()).unwrap(), Store::open(root.path(), options()).unwrap());
    let (here, there) = (view(&here), view(&there));
    store_pages(&there, "first", 16);
    for number in 0..24 {
        store_pages(&here, &format!("chain {number}"), 8);
    }
    assert_eq!((pages(&there, &keys("first", 16)), pages(&here, &keys("first", 16))), (0, 0));
    for chain in (0..24).map(|number| format!("chain {number}")) {
        let found = pages(&here, &keys(&chain, 8));
        assert_eq!((pages(&there, &keys(&chain, 8)), restored(&there, &chain, 8)), (found, found), "{chain}");
    }
}

#[test]
fn pages_older_than_the_time_to_live_leave() {
    let root = fast_folder();
    let time_to_live = Some(Duration::from_secs(1));
    let store = Store::open(root.path(), StoreOptions { time_to_live, ..options() }).unwrap();
    let other = Store::open(root.path(), options()).unwrap();
    let (view, other) = (view(&store), view(&other));
    assert_eq!(store_pages(&view, "brief", 4), [BackupOutcome::Stored; 4]);
    let waiting = std::time::Instant::now();
    while pages(&other, &keys("brief", 4)) > 0 {
        assert!(waiting.elapsed() < Duration::from_secs(60), "pages never expired");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(counter(&store, Counter::ExpiredObjects), 4);
    assert_eq!(store_pages(&other, "brief", 4), [BackupOutcome::Stored; 4]);
}

#[test]
fn small_pages_of_sparse_segments_move_together() {
    let root = fast_folder();
    let store = Store::open(root.path(), options()).unwrap();
    let small = store.view(namespace("r1"), vec![tiny()], ViewOptions::default()).unwrap();
    let tiny_bytes = |number: u64| page_bytes(number, 512);
    // One page in sixteen is asked for again and again; the others fill the disk blocks around it.
    let chain = |number: u64| keys(&format!("small {number}"), 1);
    let mut number = 0;
    let waiting = std::time::Instant::now();
    while counter(&store, Counter::CompactedObjects) == 0 {
        assert!(waiting.elapsed() < Duration::from_secs(60), "nothing was ever moved");
        for _ in 0..500 {
            backup(&small, &chain(number), &Memory::of(&tiny_bytes(number)));
            number += 1;
        }
        for number in (0..number.min(8000)).step_by(16) {
            // One that had to leave before its use was known comes back.
            if small.match_prefix(&chain(number)).unwrap().pages == 0 {
                backup(&small, &chain(number), &Memory::of(&tiny_bytes(number)));
            }
        }
    }
    for number in (0..number).rev() {
        let memory = Memory::canary(512);
        if restore(&small, &chain(number), &memory).outcomes == [RestoreOutcome::Restored] {
            assert!(memory.bytes() == tiny_bytes(number), "page {number}");
        }
    }
    assert_eq!(counter(&store, Counter::RestoreDamaged), 0);
}

fn live_objects(root: &Path) -> usize {
    let scan = hicache_core::inspect::scan(root).unwrap();
    let live = hicache_core::inspect::ObjectState::Live;
    scan.namespaces
        .iter()
        .map(|namespace| namespace.objects().filter(|object| object.state == live).count())
        .sum()
}

#[test]
fn of_copies_that_two_processes_wrote_at_once_one_stays() {
    let root = fast_folder();
    let hold = std::sync::Arc::new(std::sync::Barrier::new(2));
    let stores = [0, 1].map(|_| {
        let hold = std::sync::Arc::clone(&hold);
        let first = std::sync::atomic::AtomicBool::new(true);
        // Both have looked for the pages before either has written one.
        let hook = hooked(move |call| {
            let is_segment = call.path.extension().is_some_and(|end| end == "seg");
            if call.is_write && is_segment && first.swap(false, std::sync::atomic::Ordering::Relaxed) {
                hold.wait();
            }
            Ok(())
        });
        Store::open(root.path(), hook).unwrap()
    });
    let views = [view(&stores[0]), view(&stores[1])];
    std::thread::scope(|scope| {
        for view in &views {
            scope.spawn(|| assert_eq!(store_pages(view, "both", 6), [BackupOutcome::Stored; 6]));
        }
    });
    let waiting = std::time::Instant::now();
    while live_objects(root.path()) > 6 {
        assert!(waiting.elapsed() < Duration::from_secs(60), "both copies stay");
        views.iter().for_each(|view| assert_eq!(restored(view, "both", 6), 6));
    }
    let removed: u64 = stores.iter().map(|store| counter(store, Counter::DuplicateObjects)).sum();
    assert_eq!((removed, live_objects(root.path())), (6, 6));
    views.iter().for_each(|view| assert_eq!(restored(view, "both", 6), 6));
    assert_eq!(stores.iter().map(|store| counter(store, Counter::Conflicts)).sum::<u64>(), 0);
}

#[test]
fn one_key_with_two_contents_is_told() {
    let root = fast_folder();
    let options = StoreOptions { detect_conflicts: true, ..options() };
    let store = Store::open(root.path(), options).unwrap();
    let view = view(&store);
    let (keys, bytes) = (keys("c", 3), [bytes_of("c", 0), bytes_of("c", 1), bytes_of("c", 2)].concat());
    backup(&view, &keys, &Memory::of(&bytes));
    assert_eq!(backup(&view, &keys, &Memory::of(&bytes)).outcomes, [BackupOutcome::Present; 3]);
    assert_eq!(counter(&store, Counter::Conflicts), 0);
    let mut other = bytes.clone();
    other[PAGE + 77] ^= 1;
    assert_eq!(backup(&view, &keys, &Memory::of(&other)).outcomes, [BackupOutcome::Present; 3]);
    assert_eq!(counter(&store, Counter::Conflicts), 1);
    assert!(warnings(&store).iter().any(|line| line.contains(&keys[1].to_string())));
    assert_eq!(restored(&view, "c", 3), 3, "the first copy stays");
}

#[test]
fn of_a_chain_that_no_root_could_hold_the_start_is_stored() {
    let root = fast_folder();
    let store = Store::open(root.path(), options()).unwrap();
    let view = view(&store);
    let outcomes = store_pages(&view, "endless", 200);
    let stored = outcomes.iter().take_while(|&&outcome| outcome == BackupOutcome::Stored).count();
    assert!((60..128).contains(&stored), "{stored} pages");
    assert!(outcomes[stored..].iter().all(|&outcome| outcome == BackupOutcome::Refused));
    let found = restored(&view, "endless", 200);
    assert!(found >= 50 && found <= stored, "{found} of {stored} pages");
    for key in &keys("endless", 200)[found..] {
        assert_eq!(pages(&view, &[*key]), 0, "a page that nobody can use");
    }
}

#[test]
fn a_view_that_is_opened_later_finds_what_its_process_stored_and_its_needless_copies() {
    let root = fast_folder();
    let (stores, store_both) = two_at_once(root.path());
    let views = [view(&stores[0]), view(&stores[1])];
    for number in 0..4 {
        let chain = format!("chain {number}");
        store_both(&views, &chain);
        // Another tile: the whole index is read anew.
        let late: Vec<View> = stores
            .iter()
            .map(|store| {
                let pool = ViewPool::new(
                    kv_pool("bfloat16", 4096),
                    tile((number, number + 2), (0, 2)),
                    LayoutName::PageFirst,
                );
                store.view(namespace("r1"), vec![contiguous(pool)], ViewOptions::default()).unwrap()
            })
            .collect();
        let waiting = std::time::Instant::now();
        while live_objects(root.path()) > number as usize + 1 {
            assert!(waiting.elapsed() < Duration::from_secs(60), "both copies stay");
            views.iter().for_each(|view| assert_eq!(restored(view, &chain, 1), 1));
        }
        late[0].refresh();
        assert_eq!(late[0].indexed_objects(), number as usize + 1);
        views.iter().for_each(|view| assert_eq!(restored(view, &chain, 1), 1));
    }
}

/// Two processes that both have looked for the pages of a chain before either has written one.
fn two_at_once(root: &Path) -> ([Store; 2], impl Fn(&[View; 2], &str)) {
    let hold = std::sync::Arc::new(std::sync::Barrier::new(2));
    let waiting = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let stores = [0, 1].map(|_| {
        let (hold, waiting) = (std::sync::Arc::clone(&hold), std::sync::Arc::clone(&waiting));
        let hook = hooked(move |call| {
            use std::sync::atomic::Ordering::SeqCst;
            let is_payload = call.is_write && call.path.extension().is_some_and(|end| end == "seg");
            if is_payload
                && call.len > 4096
                && waiting.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
            {
                hold.wait();
            }
            Ok(())
        });
        Store::open(root, StoreOptions { io_threads: Some(1), ..hook }).unwrap()
    });
    let store_both = move |views: &[View; 2], chain: &str| {
        waiting.store(2, std::sync::atomic::Ordering::SeqCst);
        std::thread::scope(|scope| {
            for view in views {
                scope.spawn(|| assert_eq!(store_pages(view, chain, 1), [BackupOutcome::Stored]));
            }
        });
    };
    (stores, store_both)
}

#[test]
fn a_page_that_moves_while_it_is_read_comes_from_its_new_place() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let root = fast_folder();
    let other = Store::open(root.path(), options()).unwrap();
    let writing = view(&other);
    assert_eq!(store_pages(&writing, "chain", 1), [BackupOutcome::Stored]);
    let has_moved = std::sync::Arc::new(AtomicBool::new(false));
    let hook = {
        let has_moved = std::sync::Arc::clone(&has_moved);
        hooked(move |call| {
            if !call.is_write && call.len > 4096 && !has_moved.swap(true, Ordering::SeqCst) {
                assert_eq!(other.prune_unused_for(Duration::ZERO).unwrap().objects, 1);
                assert_eq!(store_pages(&writing, "chain", 1), [BackupOutcome::Stored]);
            }
            Ok(())
        })
    };
    let reader = Store::open(root.path(), StoreOptions { keeps_no_house: true, ..hook }).unwrap();
    assert_eq!(restored(&view(&reader), "chain", 1), 1);
    assert!(has_moved.load(Ordering::SeqCst), "it was read where it had been");
}

#[test]
fn what_is_published_after_a_clear_by_another_stays() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let root = fast_folder();
    let (reached, cleared) =
        (std::sync::Arc::new(AtomicBool::new(false)), std::sync::Arc::new(AtomicBool::new(false)));
    let hook = {
        let (reached, cleared) = (std::sync::Arc::clone(&reached), std::sync::Arc::clone(&cleared));
        hooked(move |call| {
            let is_payload = call.is_write && call.path.extension().is_some_and(|end| end == "seg");
            if is_payload && call.len > 4096 && !reached.swap(true, Ordering::SeqCst) {
                while !cleared.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Ok(())
        })
    };
    let (writer, clearer) =
        (Store::open(root.path(), hook).unwrap(), Store::open(root.path(), options()).unwrap());
    let (writing, clearing) = (view(&writer), view(&clearer));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(store_pages(&writing, "late", 2), [BackupOutcome::Stored; 2]));
        while !reached.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        clearing.clear().unwrap();
        cleared.store(true, Ordering::SeqCst);
    });
    for view in [&writing, &clearing] {
        assert_eq!(restored(view, "late", 2), 2);
    }
}
