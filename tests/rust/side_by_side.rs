//! Much is written as several units side by side, each to a file of its own, and published in order.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use hicache_core::store::io::IoCall;
use hicache_core::{
    BackupOutcome, Component, DType, IoMode, LayoutName, PageKey, Pool, PoolKind, RestoreOutcome, Store,
    StoreOptions, View, ViewOptions, ViewPool,
};
use hicache_sys::file::allocated_bytes;

use crate::support::{
    Hook, Memory, backup, errno, files_ending, keys, namespace, objects, page_bytes, restore, tile,
};

const PAGE: usize = 256 << 10;
const LANES: usize = 4;

/// As much as four units side by side take at least.
const PAGES: usize = 64;

const EIO: i32 = 5;

/// A store of four threads that writes 32 MiB at a time at most.
fn open(root: &Path, hook: impl Fn(IoCall<'_>) -> io::Result<()> + Send + Sync + 'static) -> Store {
    let options = StoreOptions {
        capacity_bytes: Some(256 << 20),
        io_threads: Some(LANES),
        io_mode: IoMode::Buffered,
        io_hook: Some(Arc::new(Hook(hook))),
        ..StoreOptions::default()
    };
    Store::open(root, options).unwrap()
}

fn view(store: &Store) -> View {
    let rows = vec![Component::per_page("x", PAGE as u32)];
    let pool = Pool::new("kv", PoolKind::State, DType::UInt8, None, rows).unwrap();
    let pool = ViewPool::new(pool, tile((0, 1), (0, 1)), LayoutName::PageFirst);
    store.view(namespace("r1"), vec![pool], ViewOptions::default()).unwrap()
}

fn chain(name: &str, number: u64) -> (Vec<PageKey>, Vec<u8>) {
    (keys(name, PAGES), page_bytes(number, PAGES * PAGE))
}

fn is_segment(call: &IoCall<'_>) -> bool {
    call.is_write && call.path.extension().is_some_and(|end| end == "seg")
}

/// A write of pages, not of a header, a directory or a seal.
fn is_payload(call: &IoCall<'_>) -> bool {
    is_segment(call) && call.len >= PAGE as u64
}

fn blocks(root: &Path) -> u64 {
    files_ending(root, ".seg").iter().map(|path| allocated_bytes(&std::fs::metadata(path).unwrap())).sum()
}

#[test]
fn each_lane_has_one_segment_for_all_calls() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), |_| Ok(()));
    let view = view(&store);
    let chains = [chain("one", 1), chain("two", 2)];
    for (keys, bytes) in &chains {
        assert_eq!(backup(&view, keys, &Memory::of(bytes)).outcomes, [BackupOutcome::Stored; PAGES]);
    }
    let mut places = BTreeMap::<PathBuf, Vec<PageKey>>::new();
    for object in objects(root.path()) {
        places.entry(object.segment).or_default().push(object.key);
    }
    let mut expected: Vec<Vec<PageKey>> =
        (chains[0].0.chunks(16).zip(chains[1].0.chunks(16))).map(|(one, two)| [one, two].concat()).collect();
    let mut found: Vec<Vec<PageKey>> = places.into_values().collect();
    expected.sort();
    found.sort();
    assert!(found == expected, "expected a quarter of each chain in each segment");

    let other = open(root.path(), |_| Ok(()));
    for (keys, bytes) in &chains {
        let target = Memory::canary(PAGES * PAGE);
        assert_eq!(restore(&self::view(&other), keys, &target).outcomes, [RestoreOutcome::Restored; PAGES]);
        assert!(target.bytes() == *bytes);
    }
}

#[test]
fn segments_are_written_side_by_side() {
    let seen = Arc::new((Mutex::new(BTreeSet::<PathBuf>::new()), Condvar::new()));
    let hook = Arc::clone(&seen);
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), move |call| {
        if is_payload(&call) {
            let (paths, changed) = &*hook;
            let mut paths = paths.lock().unwrap();
            paths.insert(call.path.to_owned());
            changed.notify_all();
            // Nobody goes on before all have begun.
            let alone = |paths: &mut BTreeSet<PathBuf>| paths.len() < LANES;
            let (mut paths, waited) =
                changed.wait_timeout_while(paths, Duration::from_secs(60), alone).unwrap();
            if waited.timed_out() {
                // In vain: the others need not wait as long.
                paths.extend((0..LANES).map(|lane| PathBuf::from(lane.to_string())));
                return Err(errno(EIO));
            }
        }
        Ok(())
    });
    let (keys, bytes) = chain("beside", 3);
    assert_eq!(backup(&view(&store), &keys, &Memory::of(&bytes)).outcomes, [BackupOutcome::Stored; PAGES]);
}

#[test]
fn blocks_are_taken_before_pages_are_written() {
    let root = tempfile::tempdir().unwrap();
    let probe = hicache_sys::file::create_new(&root.path().join("probe")).unwrap();
    if !hicache_sys::file::preallocate(&probe, 0, 1 << 20).unwrap() {
        println!("this file system cannot take blocks ahead");
        return;
    }
    std::fs::remove_file(root.path().join("probe")).unwrap();
    let least = Arc::new(Mutex::new(u64::MAX));
    let hook = Arc::clone(&least);
    let store = open(root.path(), move |call| {
        if is_payload(&call) {
            let taken = allocated_bytes(&std::fs::metadata(call.path).unwrap());
            let mut least = hook.lock().unwrap();
            *least = taken.min(*least);
        }
        Ok(())
    });
    let (keys, bytes) = chain("ahead", 7);
    assert_eq!(backup(&view(&store), &keys, &Memory::of(&bytes)).outcomes, [BackupOutcome::Stored; PAGES]);
    let least = *least.lock().unwrap();
    assert!(
        least >= (PAGES / LANES * PAGE) as u64,
        "{least} bytes on disk when a page was about to be written"
    );
}

#[test]
fn a_segment_is_written_by_one_thread_at_a_time() {
    let under_way = Arc::new(Mutex::new((BTreeSet::<PathBuf>::new(), 0)));
    let hook = Arc::clone(&under_way);
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), move |call| {
        if is_payload(&call) {
            let is_alone = hook.lock().unwrap().0.insert(call.path.to_owned());
            std::thread::sleep(Duration::from_millis(2));
            let mut state = hook.lock().unwrap();
            state.0.remove(call.path);
            state.1 += u32::from(!is_alone);
        }
        Ok(())
    });
    let (keys, bytes) = chain("turns", 4);
    backup(&view(&store), &keys, &Memory::of(&bytes));
    assert_eq!(under_way.lock().unwrap().1, 0, "writes to a file that another thread was writing to");
}

/// A store whose `number`th segment to get pages refuses writes that `is_refused` names, as long as it is told to.
fn failing(root: &Path, number: usize, is_refused: fn(&IoCall<'_>) -> bool) -> (Store, Arc<Mutex<bool>>) {
    let is_failing = Arc::new(Mutex::new(true));
    let (hook, begun) = (Arc::clone(&is_failing), Mutex::new(Vec::<PathBuf>::new()));
    let store = open(root, move |call| {
        if is_segment(&call) {
            let mut begun = begun.lock().unwrap();
            // Headers come first, one lane after the other.
            if call.offset == 0 {
                begun.push(call.path.to_owned());
            }
            if *hook.lock().unwrap()
                && begun.get(number).is_some_and(|path| path == call.path)
                && is_refused(&call)
            {
                return Err(errno(EIO));
            }
        }
        Ok(())
    });
    (store, is_failing)
}

#[test]
fn pages_that_cannot_be_written_to_one_segment_are_published_in_none() {
    let root = tempfile::tempdir().unwrap();
    let (store, is_failing) = failing(root.path(), 2, is_payload);
    let view = view(&store);
    let (keys, bytes) = chain("pages", 5);
    let source = Memory::of(&bytes);
    let report = backup(&view, &keys, &source);
    assert_eq!(report.outcomes, [BackupOutcome::Error; PAGES]);
    assert_eq!((report.raw_bytes, report.stored_bytes), (0, 0));
    assert_eq!(view.match_prefix(&keys).unwrap().pages, 0);
    assert!(blocks(root.path()) < PAGE as u64, "given back is not what was written");
    *is_failing.lock().unwrap() = false;
    assert_eq!(backup(&view, &keys, &source).outcomes, [BackupOutcome::Stored; PAGES]);
}

#[test]
fn a_directory_that_cannot_be_written_ends_the_chain_there() {
    let root = tempfile::tempdir().unwrap();
    let is_directory = |call: &IoCall<'_>| !is_payload(call) && call.offset > 0;
    let (store, is_failing) = failing(root.path(), 2, is_directory);
    let view = view(&store);
    let (keys, bytes) = chain("directory", 6);
    let source = Memory::of(&bytes);
    let report = backup(&view, &keys, &source);
    assert_eq!(report.outcomes[..32], [BackupOutcome::Stored; 32]);
    assert_eq!(report.outcomes[32..], [BackupOutcome::Error; 32]);
    assert_eq!((report.raw_bytes as usize, report.leading()), (32 * PAGE, 32));
    assert!(report.stored_bytes > report.raw_bytes && report.stored_bytes < report.raw_bytes + PAGE as u64);
    assert_eq!(view.match_prefix(&keys).unwrap().pages, 32);
    assert!(
        blocks(root.path()) < report.stored_bytes + PAGE as u64,
        "given back is not what was not published"
    );
    *is_failing.lock().unwrap() = false;
    let again = backup(&view, &keys, &source);
    assert_eq!(again.outcomes[..32], [BackupOutcome::Present; 32]);
    assert_eq!(again.outcomes[32..], [BackupOutcome::Stored; 32]);
    let target = Memory::canary(PAGES * PAGE);
    assert_eq!(
        restore(&self::view(&open(root.path(), |_| Ok(()))), &keys, &target).outcomes,
        [RestoreOutcome::Restored; PAGES]
    );
    assert!(target.bytes() == bytes);
}
