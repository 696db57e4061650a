//! A failing disk is reported page by page, and nothing half-written is ever seen.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use hicache_core::store::counters::Counter;
use hicache_core::store::io::IoCall;
use hicache_core::{
    BackupOutcome, Component, DType, IoMode, LayoutName, PageKey, Pool, PoolKind, RestoreOutcome, Store,
    StoreOptions, View, ViewOptions, ViewPool,
};

use crate::support::{
    CANARY, Memory, backup, contiguous, counter, errno, files_ending, hooked, keys, namespace, object,
    objects, open, page_bytes, restore, tile, tiny, warnings,
};

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

use BackupOutcome::{Refused, Stored};
use RestoreOutcome::{Absent, Error, Restored};

/// A view of contiguous pages of 512 bytes.
fn view(store: &Store) -> View {
    store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap()
}

fn is_segment(call: &IoCall<'_>) -> bool {
    call.path.extension().is_some_and(|end| end == "seg")
}

/// Which pages' bytes a failing disk refuses to read, and how often it was asked for them.
#[derive(Default)]
struct BadSectors {
    bytes: Mutex<Vec<std::ops::Range<u64>>>,
    /// Reads that still fail.
    failures: AtomicU32,
    seen: AtomicU32,
}

impl BadSectors {
    fn look(&self, call: IoCall<'_>) -> std::io::Result<()> {
        let range = call.offset..call.offset + call.len;
        let bad = self.bytes.lock().unwrap();
        let is_bad = bad.iter().any(|bad| bad.start < range.end && range.start < bad.end);
        if call.is_write || !is_segment(&call) || !is_bad {
            return Ok(());
        }
        self.seen.fetch_add(1, Ordering::SeqCst);
        let left = self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if left.is_ok() { Err(errno(EIO)) } else { Ok(()) }
    }
}

/// A store of four pages whose page 1 lies on bad sectors: `failures` reads of it fail.
fn four_pages(
    root: &Path,
    in_one_run: bool,
    failures: u32,
) -> (Store, Vec<PageKey>, Vec<u8>, Arc<BadSectors>) {
    let (keys, bytes) = (keys("sectors", 4), page_bytes(7, 4 * 512));
    {
        let store = open(root);
        let view = view(&store);
        let step = if in_one_run { 4 } else { 1 };
        for (keys, bytes) in keys.chunks(step).zip(bytes.chunks(512 * step)) {
            assert_eq!(backup(&view, keys, &Memory::of(bytes)).outcomes, vec![Stored; step]);
        }
    }
    let bad = Arc::new(BadSectors::default());
    bad.bytes.lock().unwrap().push(object(root, &keys[1]).payload);
    bad.failures.store(failures, Ordering::SeqCst);
    let hook = Arc::clone(&bad);
    let store = Store::open(root, hooked(move |call| hook.look(call))).unwrap();
    (store, keys, bytes, bad)
}

#[test]
fn case_d15_an_unreadable_page_is_an_error_and_its_neighbours_are_not() {
    for in_one_run in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let (store, keys, bytes, _) = four_pages(root.path(), in_one_run, u32::MAX);
        let view = view(&store);
        let target = Memory::canary(4 * 512);
        let report = restore(&view, &keys, &target);
        assert_eq!(report.outcomes, [Restored, Error, Restored, Restored], "in one run: {in_one_run}");
        assert_eq!(report.bytes, 3 * 512);
        let landed = target.bytes();
        for page in [0, 2, 3] {
            assert!(landed[512 * page..][..512] == bytes[512 * page..][..512], "page {page}");
        }
        assert!(landed[512..1024].iter().all(|&byte| byte == CANARY), "bytes in the slot of a page not read");
        assert_eq!(counter(&store, Counter::RestoreRestored), 3);
        assert_eq!(counter(&store, Counter::RestoreError), 1);
        assert_eq!(counter(&store, Counter::RestoreBytes), 3 * 512);
        assert_eq!(counter(&store, Counter::Quarantined), 1);
        assert!(warnings(&store).iter().any(|line| line.contains("os error 5")));

        // Given up from there on: by this store, and by one whose disk reads well.
        let healthy = open(root.path());
        for view in [&view, &self::view(&healthy)] {
            let found = view.match_prefix(&keys).unwrap();
            assert_eq!(found.pages, 1);
            assert_eq!(found.limited_by.unwrap(), "kv: page 1 in quarantine (unreadable)");
            assert_eq!(
                restore(view, &keys, &Memory::canary(4 * 512)).outcomes,
                [Restored, Absent, Restored, Restored]
            );
        }
    }
}

#[test]
fn a_read_that_fails_once_is_tried_again() {
    let root = tempfile::tempdir().unwrap();
    let (store, keys, bytes, bad) = four_pages(root.path(), true, 1);
    let view = view(&store);
    let target = Memory::canary(4 * 512);
    assert_eq!(restore(&view, &keys, &target).outcomes, [Restored; 4]);
    assert!(target.bytes() == bytes);
    assert_eq!(bad.seen.load(Ordering::SeqCst), 2);
    assert_eq!(counter(&store, Counter::Quarantined), 0);
    assert_eq!(view.match_prefix(&keys).unwrap().pages, 4);
}

/// A machine without memory or descriptors says nothing about the page.
#[test]
fn a_page_is_not_given_up_for_a_fault_of_the_machine() {
    for machine in [12, 23, 24] {
        let root = tempfile::tempdir().unwrap();
        let keys = keys("machine", 2);
        backup(&view(&open(root.path())), &keys, &Memory::of(&page_bytes(1, 1024)));
        let failing = Arc::new(AtomicBool::new(true));
        let hook = Arc::clone(&failing);
        let hook = move |call: IoCall<'_>| match hook.load(Ordering::SeqCst) && !call.is_write {
            true => Err(errno(machine)),
            false => Ok(()),
        };
        let store = Store::open(root.path(), hooked(hook)).unwrap();
        let view = view(&store);
        assert_eq!(restore(&view, &keys, &Memory::canary(1024)).outcomes, [Error; 2]);
        assert_eq!(view.match_prefix(&keys).unwrap().pages, 2, "errno {machine}");
        failing.store(false, Ordering::SeqCst);
        assert_eq!(restore(&view, &keys, &Memory::canary(1024)).outcomes, [Restored; 2]);
    }
}

/// The writes of one unit, in order: payload, directory, journal frame.
const STEPS: [&str; 3] = ["payload", "directory", "frame"];

/// Which step of the unit after the one at `offset` a write is; `None` for headers and other files.
fn step_of(call: &IoCall<'_>, frames_before: u64, payloads_end: u64) -> Option<usize> {
    if !call.is_write {
        return None;
    }
    match (is_segment(call), call.path.extension().is_some_and(|end| end == "idx")) {
        (true, _) if call.offset >= payloads_end => Some(1),
        (true, _) if call.offset >= 4096 => Some(0),
        (_, true) if call.offset >= frames_before => Some(2),
        _ => None,
    }
}

#[test]
fn case_d16_1_a_page_is_not_there_before_all_of_it_is_written() {
    for (step, name) in STEPS.iter().enumerate() {
        let root = tempfile::tempdir().unwrap();
        let (reached, go_on) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let hook = {
            let (reached, go_on) = (Arc::clone(&reached), Arc::clone(&go_on));
            let armed = AtomicBool::new(true);
            move |call: IoCall<'_>| {
                let is_step = step_of(&call, 0, 4096 + 4 * 512) == Some(step);
                if is_step && armed.swap(false, Ordering::SeqCst) {
                    reached.wait();
                    go_on.wait();
                }
                Ok(())
            }
        };
        let writer = Store::open(root.path(), hooked(hook)).unwrap();
        let writing = view(&writer);
        let other = open(root.path());
        let reading = view(&other);
        let keys = keys("slow", 4);
        let bytes = page_bytes(3, 4 * 512);
        std::thread::scope(|scope| {
            let backup = scope.spawn(|| backup(&writing, &keys, &Memory::of(&bytes)));
            reached.wait();
            // Looked at now and judged later, so that a wrong answer does not leave the writer waiting.
            let look = |view: &View| {
                let target = Memory::canary(4 * 512);
                let outcomes = restore(view, &keys, &target).outcomes;
                (view.match_prefix(&keys).unwrap().pages, outcomes, target.bytes())
            };
            // A store opened now sees the segment of a live writer, and leaves it alone.
            let late = open(root.path());
            let mut seen = vec![look(&reading), look(&view(&late))];
            if step < 2 {
                // The writer's own store answers too; what it has begun is not there for it either.
                seen.push(look(&writing));
            }
            go_on.wait();
            for (pages, outcomes, landed) in seen {
                assert_eq!(pages, 0, "while the {name} is written");
                assert_eq!(outcomes, [Absent; 4], "while the {name} is written");
                assert!(landed.iter().all(|&byte| byte == CANARY), "while the {name} is written");
            }
            assert_eq!(backup.join().unwrap().outcomes, [Stored; 4]);
        });
        for view in [&writing, &reading] {
            assert_eq!(view.match_prefix(&keys).unwrap().pages, 4);
            let target = Memory::canary(4 * 512);
            assert_eq!(restore(view, &keys, &target).outcomes, [Restored; 4]);
            assert!(target.bytes() == bytes);
        }
    }
}

#[test]
fn a_full_disk_refuses_pages_and_leaves_nothing_half_written() {
    for (step, name) in STEPS.iter().enumerate() {
        let root = tempfile::tempdir().unwrap();
        // Where the next unit's payload ends and its frame starts, once that is known; ENOSPC is given there
        // until the disk has room again.
        let next: Arc<Mutex<Option<(u64, u64)>>> = Arc::default();
        let hits = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let hook = {
            let (next, hits) = (Arc::clone(&next), Arc::clone(&hits));
            move |call: IoCall<'_>| {
                let next = next.lock().unwrap();
                let hit = next.is_some_and(|(frames, payload)| step_of(&call, frames, payload) == Some(step));
                if hit {
                    hits.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    return Err(errno(ENOSPC));
                }
                Ok(())
            }
        };
        let store = Store::open(root.path(), hooked(hook)).unwrap();
        let view = view(&store);
        let (first, second) = (keys("first", 2), keys("second", 4));
        let (first_bytes, second_bytes) = (page_bytes(1, 2 * 512), page_bytes(2, 4 * 512));
        assert_eq!(backup(&view, &first, &Memory::of(&first_bytes)).outcomes, [Stored; 2]);

        let lengths = || {
            let files = [files_ending(root.path(), ".seg"), files_ending(root.path(), ".idx")].concat();
            files.iter().map(|file| std::fs::metadata(file).unwrap().len()).collect::<Vec<_>>()
        };
        let before = lengths();
        let [segment, journal] = before[..] else { panic!("one segment and one journal") };
        *next.lock().unwrap() = Some((journal, segment + 4 * 512));
        let report = backup(&view, &second, &Memory::of(&second_bytes));
        assert_eq!(report.outcomes, [Refused; 4], "no room for the {name}");
        assert!(report.reason.unwrap().contains("os error 28"));
        assert_eq!((report.raw_bytes, report.stored_bytes), (0, 0));
        assert_eq!(counter(&store, Counter::BackupRefusedNoSpace), 4);
        assert_eq!(hits.load(std::sync::atomic::Ordering::Relaxed), 2, "the {name} is tried twice");
        *next.lock().unwrap() = None;
        assert_eq!(lengths(), before, "no room for the {name}");

        let other = open(root.path());
        for view in [&view, &self::view(&other)] {
            assert_eq!(view.match_prefix(&second).unwrap().pages, 0);
            assert_eq!(restore(view, &second, &Memory::canary(4 * 512)).outcomes, [Absent; 4]);
            let target = Memory::canary(2 * 512);
            assert_eq!(restore(view, &first, &target).outcomes, [Restored; 2]);
            assert!(target.bytes() == first_bytes);
        }
        assert_eq!(backup(&view, &second, &Memory::of(&second_bytes)).outcomes, [Stored; 4]);
        let target = Memory::canary(4 * 512);
        assert_eq!(restore(&self::view(&other), &second, &target).outcomes, [Restored; 4]);
        assert!(target.bytes() == second_bytes);
        // Its journal and its seal tell the same of it as of any other.
        drop((view, store));
        assert_eq!(objects(root.path()).len(), 6);
    }
}

/// A pool of one component with rows of `row_bytes` for each of 4 tokens, 2 layers and 1 head, in host pages
/// that are `shift` bytes longer and start `shift` bytes into them.
fn shifted(row_bytes: u32, shift: u64) -> ViewPool {
    let pool =
        Pool::new("kv", PoolKind::Latent, DType::UInt8, None, vec![Component::per_token("x", row_bytes)]);
    let mut pool = ViewPool::new(pool.unwrap(), tile((0, 2), (0, 1)), LayoutName::PageFirst);
    let page = u64::from(row_bytes) * 8;
    pool.packed = Some((shift, page + shift));
    pool
}

fn direct(options: StoreOptions) -> StoreOptions {
    StoreOptions { io_mode: IoMode::Direct, ..options }
}

#[test]
fn case_d20_any_size_and_address_round_trips_past_the_page_cache_or_says_that_it_does_not() {
    let mut folders = vec![tempfile::tempdir().unwrap()];
    if Path::new("/dev/shm").is_dir() {
        folders.push(tempfile::tempdir_in("/dev/shm").unwrap());
    }
    for folder in &folders {
        for row_bytes in [64, 82, 512, 8192] {
            for shift in [0, 1, 16, 511] {
                let root = folder.path().join(format!("{row_bytes}-{shift}"));
                let pool = shifted(row_bytes, shift);
                let page = row_bytes as usize * 8;
                let host_page = page + shift as usize;
                let (keys, pages) = (keys("direct", 5), 5);
                let bytes = page_bytes(u64::from(row_bytes), pages * host_page);
                let is_direct;
                {
                    let store = Store::open(&root, direct(hooked(|_| Ok(())))).unwrap();
                    is_direct = store.io_name().starts_with("direct");
                    let told = warnings(&store).iter().any(|line| line.contains("direct I/O does not work"));
                    assert!(is_direct != told, "{}: {}", root.display(), store.io_name());
                    let view =
                        store.view(namespace("r1"), vec![pool.clone()], ViewOptions::default()).unwrap();
                    // The first pages alone, so that the rest does not start at a multiple of the sector.
                    assert_eq!(
                        backup(&view, &keys[..2], &Memory::of(&bytes[..2 * host_page])).outcomes,
                        [Stored; 2]
                    );
                    assert_eq!(
                        backup(&view, &keys, &Memory::of(&bytes)).outcomes,
                        [BackupOutcome::Present, BackupOutcome::Present, Stored, Stored, Stored]
                    );
                    check_shifted(&view, &keys, &bytes, shift as usize);
                    assert_eq!(
                        store.io_name().starts_with("direct"),
                        is_direct,
                        "{:?}",
                        store.drain_notices()
                    );
                }
                let store = Store::open(&root, direct(hooked(|_| Ok(())))).unwrap();
                let view = store.view(namespace("r1"), vec![pool], ViewOptions::default()).unwrap();
                check_shifted(&view, &keys, &bytes, shift as usize);
                assert_eq!(store.io_name().starts_with("direct"), is_direct);
                assert_eq!(counter(&store, Counter::DirectFallbacks), 0);
            }
        }
    }
}

/// Everything comes back, and not a byte between the pages changes.
fn check_shifted(view: &View, keys: &[PageKey], bytes: &[u8], shift: usize) {
    let host_page = bytes.len() / keys.len();
    let target = Memory::canary(bytes.len());
    assert_eq!(restore(view, keys, &target).outcomes, vec![Restored; keys.len()]);
    for (landed, sent) in target.bytes().chunks(host_page).zip(bytes.chunks(host_page)) {
        assert!(landed[shift..] == sent[shift..]);
        assert!(landed[..shift].iter().all(|&byte| byte == CANARY));
    }
}

#[test]
fn case_d20_direct_io_that_is_refused_later_goes_on_through_the_page_cache() {
    for refused_write in [true, false] {
        let root = tempfile::tempdir().unwrap();
        let refusals = Arc::new(AtomicU32::new(0));
        let hook = {
            let refusals = Arc::clone(&refusals);
            move |call: IoCall<'_>| {
                if !call.is_direct || call.is_write != refused_write {
                    return Ok(());
                }
                refusals.fetch_add(1, Ordering::SeqCst);
                Err(errno(EINVAL))
            }
        };
        let store = Store::open(root.path(), direct(hooked(hook))).unwrap();
        if !store.io_name().starts_with("direct") {
            println!("skipped: no direct I/O in {}", root.path().display());
            return;
        }
        warnings(&store);
        let view = store.view(namespace("r1"), vec![shifted(512, 0)], ViewOptions::default()).unwrap();
        let keys = keys("refused", 4);
        let bytes = page_bytes(1, 4 * 4096);
        assert_eq!(backup(&view, &keys, &Memory::of(&bytes)).outcomes, [Stored; 4]);
        check_shifted(&view, &keys, &bytes, 0);
        assert_eq!(refusals.load(Ordering::SeqCst), 1, "a refused way is not tried again");
        assert_eq!(counter(&store, Counter::DirectFallbacks), 1);
        let told = warnings(&store);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].contains("os error 22"), "{told:?}");
        assert!(store.io_name().starts_with("buffered"));
    }
}

#[test]
fn case_d23_a_panic_in_a_transfer_costs_its_pages_and_nothing_else() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let root = tempfile::tempdir().unwrap();
    let panics = Arc::new(AtomicBool::new(false));
    let hook = {
        let panics = Arc::clone(&panics);
        move |call: IoCall<'_>| {
            let is_segment = call.path.extension().is_some_and(|end| end == "seg");
            assert!(!(is_segment && panics.load(Ordering::SeqCst)), "a fault of ours");
            Ok(())
        }
    };
    let store = Store::open(root.path(), hooked(hook)).unwrap();
    let view = view(&store);
    let (keys, bytes) = (keys("c", 3), page_bytes(5, 3 * 512));
    panics.store(true, Ordering::SeqCst);
    assert_eq!(backup(&view, &keys, &Memory::of(&bytes)).outcomes, [BackupOutcome::Error; 3]);
    panics.store(false, Ordering::SeqCst);
    assert_eq!(backup(&view, &keys, &Memory::of(&bytes)).outcomes, [Stored; 3]);
    panics.store(true, Ordering::SeqCst);
    assert_eq!(restore(&view, &keys, &Memory::canary(3 * 512)).outcomes, [RestoreOutcome::Error; 3]);
    panics.store(false, Ordering::SeqCst);
    // It says nothing about the pages: they are not given up.
    let target = Memory::canary(3 * 512);
    assert_eq!(restore(&view, &keys, &target).outcomes, [Restored; 3]);
    assert!(target.bytes() == bytes);
}
