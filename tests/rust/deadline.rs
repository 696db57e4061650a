//! Calls end by their deadline, whatever the device does, and the caller's memory is left alone afterwards.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use hicache_core::store::clock::Clock;
use hicache_core::store::counters::Counter;
use hicache_core::store::io::IoCall;
use hicache_core::{
    BackupOptions, BackupOutcome, BackupReport, Bounce, BreakerState, ChainStart, Component, DType,
    LayoutName, PageKey, Pool, PoolKind, PoolMemory, RestoreOptions, RestoreOutcome, RestoreReport, Store,
    StoreOptions, View, ViewOptions, ViewPool,
};

use hicache_sys::file::allocated_bytes;

use crate::support::{
    CANARY, Memory, backup, counter, files_ending, hooked, keys, kv_pool, lend, namespace, open, page_bytes,
    restore, tile, warnings,
};

use BackupOutcome::Stored;
use RestoreOutcome::{Late, Restored};

/// Size of a page: one write moves four of them, one read as many, or fewer where there are threads without one.
const PAGE: usize = 256 << 10;

/// Long enough for what is not held to be done, on a busy machine.
const SHORT: Duration = Duration::from_millis(400);
const HOUR: Duration = Duration::from_secs(3600);

/// A file layer that holds payload transfers until it is told to let go.
#[derive(Default)]
struct Held {
    state: Mutex<HeldState>,
    changed: Condvar,
}

#[derive(Default)]
struct HeldState {
    /// Transfers that pass before others are held.
    passing: usize,
    /// Transfers that are held from then on.
    armed: usize,
    held: usize,
    seen: usize,
}

impl Held {
    fn look(&self, call: IoCall<'_>, is_write: bool) -> io::Result<()> {
        if call.is_write != is_write || call.len < PAGE as u64 {
            return Ok(());
        }
        let mut state = self.state.lock().unwrap();
        state.seen += 1;
        if state.passing > 0 {
            state.passing -= 1;
        } else if state.armed > 0 {
            state.armed -= 1;
            state.held += 1;
            self.changed.notify_all();
            while state.held > 0 {
                state = self.changed.wait(state).unwrap();
            }
        }
        Ok(())
    }

    fn arm(&self, passing: usize, armed: usize) {
        let mut state = self.state.lock().unwrap();
        (state.passing, state.armed) = (passing, armed);
    }

    fn wait_for(&self, held: usize) {
        let mut state = self.state.lock().unwrap();
        while state.held < held {
            state = self.changed.wait(state).unwrap();
        }
    }

    fn held(&self) -> usize {
        self.state.lock().unwrap().held
    }

    fn seen(&self) -> usize {
        self.state.lock().unwrap().seen
    }

    fn let_go(&self) {
        let mut state = self.state.lock().unwrap();
        (state.held, state.armed) = (0, 0);
        self.changed.notify_all();
    }
}

/// A store whose payload reads, or writes, can be held, and the clock it goes by.
fn held_store(root: &std::path::Path, is_write: bool) -> (Store, Arc<Held>, Clock) {
    let held = Arc::<Held>::default();
    let (hook, clock) = (Arc::clone(&held), Clock::default());
    let options = StoreOptions { clock: clock.clone(), ..hooked(move |call| hook.look(call, is_write)) };
    (Store::open(root, options).unwrap(), held, clock)
}

/// A view of pages of [`PAGE`] bytes, each in one piece.
fn view(store: &Store) -> View {
    let pool =
        Pool::new("kv", PoolKind::State, DType::UInt8, None, vec![Component::per_page("x", PAGE as u32)]);
    let pool = ViewPool::new(pool.unwrap(), tile((0, 1), (0, 1)), LayoutName::PageFirst);
    store.view(namespace("r1"), vec![pool], ViewOptions::default()).unwrap()
}

fn restore_by(
    view: &View,
    keys: &[PageKey],
    target: &Memory,
    deadline: Instant,
    bounce: Bounce,
) -> RestoreReport {
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    view.restore(keys, lend(target, &slots), RestoreOptions { deadline: Some(deadline), bounce }).unwrap()
}

fn backup_by(
    view: &View,
    keys: &[PageKey],
    source: &Memory,
    deadline: Instant,
    bounce: Bounce,
) -> BackupReport {
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    let start = ChainStart { parent: None, depth: Some(0) };
    let options = BackupOptions { deadline: Some(deadline), bounce };
    view.backup_with(keys, lend(source, &slots), start, options).unwrap()
}

/// A root with a chain of so many pages, and what is in them.
fn stored(root: &std::path::Path, pages: usize) -> (Vec<PageKey>, Vec<u8>) {
    let (keys, bytes) = (keys("deadline", pages), page_bytes(3, pages * PAGE));
    let store = open(root);
    assert_eq!(backup(&view(&store), &keys, &Memory::of(&bytes)).outcomes, vec![Stored; pages]);
    (keys, bytes)
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_for_abandoned(store: &Store) {
    wait_until("requests left behind end", || store.device().abandoned == 0);
}

fn is_canary(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == CANARY)
}

#[test]
fn a_bounced_restore_leaves_a_hanging_read_behind() {
    let root = tempfile::tempdir().unwrap();
    // A request brings 16 pages.
    let (keys, bytes) = stored(root.path(), 32);
    let (store, held, _) = held_store(root.path(), false);
    let view = view(&store);
    let target = Memory::canary(32 * PAGE);
    held.arm(0, 1);
    let report = restore_by(&view, &keys, &target, Instant::now() + SHORT, Bounce::Always);
    assert_eq!(held.held(), 1, "the call waited for the read");
    let late = report.outcomes.iter().filter(|&&outcome| outcome == Late).count();
    assert_eq!((late, report.bytes as usize), (16, 16 * PAGE), "{report:?}");
    assert_eq!(store.device().abandoned, 1);
    let landed = target.bytes();
    let check = |landed: &[u8]| {
        for (page, &outcome) in report.outcomes.iter().enumerate() {
            let (landed, stored) = (&landed[page * PAGE..][..PAGE], &bytes[page * PAGE..][..PAGE]);
            match outcome {
                Restored => assert!(landed == stored, "page {page}"),
                _ => assert!(is_canary(landed), "page {page} was late and was written to"),
            }
        }
    };
    check(&landed);
    held.let_go();
    wait_for_abandoned(&store);
    check(&target.bytes());
    assert_eq!(store.device().bounce_bytes, 0);
    for (of, expected) in [
        (Counter::RestoreLate, 16),
        (Counter::RestoreRestored, 16),
        (Counter::BouncedReads, 16),
        (Counter::AbandonedRequests, 1),
        (Counter::CallsPastDeadline, 0),
        (Counter::Quarantined, 0),
    ] {
        assert_eq!(counter(&store, of), expected, "{}", of.name());
    }
    let report = restore_by(&view, &keys, &target, Instant::now() + HOUR, Bounce::Always);
    assert_eq!(report.outcomes, [Restored; 32]);
    assert!(target.bytes() == bytes);
}

#[test]
fn a_restore_into_the_callers_memory_returns_when_its_reads_have_ended() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = stored(root.path(), 8);
    let (store, held, clock) = held_store(root.path(), false);
    let view = view(&store);
    let target = Memory::canary(8 * PAGE);
    held.arm(0, 2);
    let deadline = clock.now() + HOUR;
    let report = std::thread::scope(|scope| {
        let call = scope.spawn(|| restore_by(&view, &keys, &target, deadline, Bounce::Never));
        // Both threads hang in a read, of two pages each.
        held.wait_for(2);
        clock.advance(2 * HOUR);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!call.is_finished(), "two reads are in flight into the caller's memory");
        held.let_go();
        call.join().unwrap()
    });
    let late = report.outcomes.iter().filter(|&&outcome| outcome == Late).count();
    assert_eq!(late, 4, "what was in flight landed, and nothing was begun after the deadline: {report:?}");
    assert_eq!(held.seen(), 2);
    let landed = target.bytes();
    for (page, &outcome) in report.outcomes.iter().enumerate() {
        let landed = &landed[page * PAGE..][..PAGE];
        assert!(if outcome == Restored {
            landed == &bytes[page * PAGE..][..PAGE]
        } else {
            is_canary(landed)
        });
    }
    assert_eq!(counter(&store, Counter::CallsPastDeadline), 1);
    assert_eq!(counter(&store, Counter::AbandonedRequests), 0);
    assert_eq!(restore(&view, &keys, &target).outcomes, [Restored; 8]);
}

#[test]
fn a_bounced_backup_leaves_a_hanging_write_behind_and_publishes_nothing_of_it() {
    let root = tempfile::tempdir().unwrap();
    let (store, held, _) = held_store(root.path(), true);
    let view = view(&store);
    let (keys, bytes) = (keys("hanging", 8), page_bytes(5, 8 * PAGE));
    let mut used = Vec::new();
    for _ in 0..2 {
        let source = Memory::of(&bytes);
        held.arm(1, 1);
        let report = backup_by(&view, &keys, &source, Instant::now() + SHORT, Bounce::Always);
        assert_eq!(held.held(), 1, "the call waited for the write");
        assert_eq!(report.outcomes, [BackupOutcome::Late; 8]);
        assert_eq!((report.raw_bytes, report.leading()), (0, 0));
        assert_eq!(report.reason.as_deref(), Some("the deadline had passed"));
        // The memory is the caller's again.
        source.region.copy_in(0, &vec![CANARY; 8 * PAGE]).unwrap();
        held.let_go();
        wait_for_abandoned(&store);
        assert_eq!(view.match_prefix(&keys).unwrap().pages, 0);
        let segments = files_ending(root.path(), ".seg");
        let blocks = segments.iter().map(|path| allocated_bytes(&std::fs::metadata(path).unwrap()));
        used.push(blocks.sum::<u64>());
    }
    assert!(
        used[0] == used[1] && used[0] < PAGE as u64,
        "given back is not the room of late units: {used:?}"
    );
    assert_eq!(counter(&store, Counter::BackupLate), 16);
    assert_eq!(counter(&store, Counter::AbandonedRequests), 2);
    let source = Memory::of(&bytes);
    let report = backup_by(&view, &keys, &source, Instant::now() + HOUR, Bounce::Always);
    assert_eq!(report.outcomes, [Stored; 8]);
    assert_eq!(counter(&store, Counter::BouncedWrites), 8);
    let target = Memory::canary(8 * PAGE);
    assert_eq!(restore(&self::view(&open(root.path())), &keys, &target).outcomes, [Restored; 8]);
    assert!(target.bytes() == bytes);
}

#[test]
fn a_backup_ends_with_the_units_that_its_deadline_meets() {
    let root = tempfile::tempdir().unwrap();
    let (store, held, clock) = held_store(root.path(), true);
    let view = view(&store);
    // An eighth of the capacity is written at a time, 8 MiB or 32 pages: side by side by both threads, to a file each.
    let (keys, bytes) = (keys("units", 64), page_bytes(6, 64 * PAGE));
    let source = Memory::of(&bytes);
    held.arm(8, 2);
    let deadline = clock.now() + HOUR;
    let report = std::thread::scope(|scope| {
        let call = scope.spawn(|| backup_by(&view, &keys, &source, deadline, Bounce::Never));
        held.wait_for(2);
        clock.advance(2 * HOUR);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!call.is_finished(), "two writes from the caller's memory are in flight");
        held.let_go();
        call.join().unwrap()
    });
    assert_eq!(held.seen(), 10, "nothing is begun after the deadline");
    assert_eq!(report.leading(), 32);
    assert_eq!(report.outcomes[32..], [BackupOutcome::Late; 32]);
    let other = open(root.path());
    let reading = self::view(&other);
    assert_eq!(reading.match_prefix(&keys).unwrap().pages, 32);
    let again = backup_by(&view, &keys, &source, clock.now() + HOUR, Bounce::Never);
    assert_eq!(again.outcomes[..32], [BackupOutcome::Present; 32]);
    assert_eq!(again.outcomes[32..], [Stored; 32]);
    let target = Memory::canary(64 * PAGE);
    assert_eq!(restore(&reading, &keys, &target).outcomes, [Restored; 64]);
    assert!(target.bytes() == bytes);
}

#[test]
fn nothing_is_done_when_the_deadline_has_passed_before_the_call() {
    let root = tempfile::tempdir().unwrap();
    let (keys, _) = stored(root.path(), 4);
    let store = open(root.path());
    let view = view(&store);
    let (target, past) = (Memory::canary(4 * PAGE), Instant::now());
    for bounce in [Bounce::Never, Bounce::Auto, Bounce::Always] {
        assert_eq!(restore_by(&view, &keys, &target, past, bounce).outcomes, [Late; 4], "{bounce:?}");
        let other = crate::support::keys(bounce.name(), 4);
        assert_eq!(backup_by(&view, &other, &target, past, bounce).outcomes, [BackupOutcome::Late; 4]);
    }
    assert!(is_canary(&target.bytes()));
    // A caller without time says nothing of the device.
    assert_eq!(store.device().breaker, BreakerState::Closed);
    assert_eq!(counter(&store, Counter::CallsPastDeadline), 0);
}

#[test]
fn the_breaker_refuses_at_once_finds_out_and_closes() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = stored(root.path(), 4);
    let (store, held, clock) = held_store(root.path(), false);
    let view = view(&store);
    let target = Memory::canary(4 * PAGE);
    held.arm(0, 3);
    for call in 1..=3 {
        assert_eq!(store.device().breaker, BreakerState::Closed, "call {call}");
        let report = restore_by(&view, &keys, &target, clock.now() + SHORT, Bounce::Always);
        assert_eq!((held.held(), report.outcomes), (call, vec![Late; 4]));
    }
    assert_eq!(store.device().breaker, BreakerState::Open);
    assert!(store.device().is_slow && warnings(&store).iter().any(|line| line.contains("too slow")));

    // Refused at once, with an hour to go, and without a look at the device; a look-up promises nothing.
    let seen = held.seen();
    for bounce in [Bounce::Never, Bounce::Auto, Bounce::Always] {
        let report = restore_by(&view, &keys, &target, clock.now() + HOUR, bounce);
        assert_eq!(report.outcomes, [Late; 4]);
        let other = crate::support::keys("other", 4);
        let report = backup_by(&view, &other, &target, clock.now() + HOUR, bounce);
        assert_eq!(report.outcomes, [BackupOutcome::Late; 4]);
    }
    let found = view.match_prefix(&keys).unwrap();
    assert_eq!((found.pages, found.legal()), (0, vec![]));
    assert_eq!(found.limited_by.as_deref(), Some("device: too slow"));
    assert_eq!(held.seen(), seen);
    assert_eq!(counter(&store, Counter::BreakerRefused), 6);

    // Calls without a deadline go on.
    let slots = [0, 1, 2, 3];
    assert_eq!(restore(&view, &keys, &target).outcomes, [Restored; 4]);
    let patient = RestoreOptions { deadline: None, bounce: Bounce::Always };
    assert_eq!(view.restore(&keys, lend(&target, &slots), patient).unwrap().outcomes, [Restored; 4]);
    assert_eq!(store.device().breaker, BreakerState::Open);

    // After a second the next one finds out: still too slow, then well again.
    clock.advance(Duration::from_secs(1));
    assert_eq!(store.device().breaker, BreakerState::HalfOpen);
    assert_eq!(view.match_prefix(&keys).unwrap().pages, 4, "so that somebody comes to find out");
    held.arm(0, 1);
    assert_eq!(restore_by(&view, &keys, &target, clock.now() + SHORT, Bounce::Auto).outcomes, [Late; 4]);
    assert_eq!(counter(&store, Counter::BreakerOpenings), 2);
    clock.advance(Duration::from_secs(1));
    assert_eq!(store.device().breaker, BreakerState::Open, "two seconds this time");
    held.let_go();
    wait_for_abandoned(&store);
    clock.advance(Duration::from_secs(1));
    let target = Memory::canary(4 * PAGE);
    assert_eq!(restore_by(&view, &keys, &target, clock.now() + HOUR, Bounce::Auto).outcomes, [Restored; 4]);
    assert!(target.bytes() == bytes);
    assert_eq!(store.device().breaker, BreakerState::Closed);
    assert_eq!(view.match_prefix(&keys).unwrap().pages, 4);
}

#[test]
fn when_every_thread_hangs_bounced_calls_are_late_at_once() {
    let root = tempfile::tempdir().unwrap();
    // More requests than threads.
    let (keys, bytes) = stored(root.path(), 96);
    let (store, held, clock) = held_store(root.path(), false);
    let view = view(&store);
    let target = Memory::canary(96 * PAGE);
    held.arm(0, usize::MAX);
    let report = restore_by(&view, &keys, &target, clock.now() + SHORT, Bounce::Always);
    assert_eq!(report.outcomes, [Late; 96]);
    let hanging = store.device().abandoned;
    assert_eq!((hanging, held.held()), (4, 4));
    let report = restore_by(&view, &keys, &target, clock.now() + HOUR, Bounce::Always);
    assert_eq!(report.outcomes, [Late; 96]);
    assert_eq!(counter(&store, Counter::BounceStuck), 1);
    assert_eq!(store.device().breaker, BreakerState::Open);
    held.let_go();
    wait_for_abandoned(&store);
    assert!(is_canary(&target.bytes()));
    clock.advance(Duration::from_secs(1));
    let report = restore_by(&view, &keys, &target, clock.now() + HOUR, Bounce::Always);
    assert_eq!(report.outcomes, [Restored; 96]);
    assert!(target.bytes() == bytes);
}

#[test]
fn pages_bounce_when_the_device_is_slow_for_the_deadline() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = stored(root.path(), 4);
    let (clock, slowness) = (Clock::default(), Arc::new(AtomicU64::new(2)));
    let hook = {
        let (clock, slowness) = (clock.clone(), Arc::clone(&slowness));
        move |call: IoCall<'_>| {
            if !call.is_write && call.len >= PAGE as u64 {
                clock.advance(Duration::from_secs(slowness.load(Ordering::SeqCst)));
            }
            Ok(())
        }
    };
    let store = Store::open(root.path(), StoreOptions { clock: clock.clone(), ..hooked(hook) }).unwrap();
    let view = view(&store);
    let target = Memory::canary(4 * PAGE);
    let bounced = |seconds: u64| {
        let before = counter(&store, Counter::BouncedReads);
        let deadline = clock.now() + Duration::from_secs(seconds);
        let report = restore_by(&view, &keys, &target, deadline, Bounce::Auto);
        assert!(report.leading() > 0, "{report:?}");
        counter(&store, Counter::BouncedReads) - before
    };
    assert_eq!(bounced(100), 0, "nothing is known of the device");
    slowness.store(0, Ordering::SeqCst);
    let device = store.device();
    assert!(device.p99_read >= Duration::from_secs(2) && device.p99_write.is_zero(), "{device:?}");
    assert_eq!((bounced(100), store.device().is_slow), (0, false));
    assert_eq!((bounced(6), store.device().is_slow), (4, true));
    assert!(target.bytes() == bytes);
    clock.advance(Duration::from_secs(11));
    assert_eq!((bounced(6), store.device().is_slow), (0, false), "long ago");
}

#[test]
fn a_store_closes_while_a_request_hangs_and_ends_with_it() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = stored(root.path(), 4);
    for is_write in [false, true] {
        let (store, held, _) = held_store(root.path(), is_write);
        let view = view(&store);
        let other = crate::support::keys("closing", 4);
        assert_eq!(backup(&view, &crate::support::keys("small", 1), &Memory::canary(PAGE)).leading(), 1);
        held.arm(0, 1);
        let target = Memory::canary(4 * PAGE);
        if is_write {
            let report = backup_by(&view, &other, &target, Instant::now() + SHORT, Bounce::Always);
            assert_eq!(report.outcomes, [BackupOutcome::Late; 4]);
        } else {
            let report = restore_by(&view, &keys, &target, Instant::now() + SHORT, Bounce::Always);
            assert_eq!(report.outcomes, [Late; 4]);
        }
        store.close();
        assert_eq!(held.held(), 1, "closing waited for the request");
        drop((view, store));
        // For the others the process lives until its last request has ended.
        let locks = || files_ending(root.path(), ".lock").iter().filter(|path| is_process_lock(path)).count();
        assert_eq!(locks(), 1);
        held.let_go();
        wait_until("the process ends", || locks() == 0);
        let store = open(root.path());
        let view = self::view(&store);
        assert_eq!(restore(&view, &keys, &target).outcomes, [Restored; 4]);
        assert!(target.bytes() == bytes);
        assert_eq!(view.match_prefix(&other).unwrap().pages, 0, "a write that was given up");
    }
}

fn is_process_lock(path: &std::path::Path) -> bool {
    path.parent().is_some_and(|folder| folder.ends_with("journal"))
}

/// Backs up and restores three pages of two pools, one slot of each missing, by way of the store's memory or not.
fn round_trip(layout: LayoutName, level: Option<i32>, there: Bounce, back: Bounce) {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let kv = ViewPool::new(kv_pool("bfloat16", 16), tile((0, 2), (0, 2)), layout);
    let blob = Pool::new("state", PoolKind::State, DType::UInt8, None, vec![Component::per_page("x", 96)]);
    let blob = ViewPool::new(blob.unwrap(), tile((0, 1), (0, 1)), LayoutName::PageFirst);
    let view = store.view(namespace("r1"), vec![kv, blob], ViewOptions { zstd_level: level }).unwrap();
    let keys = keys("round trip", 3);
    let sizes = [0, 1].map(|pool| view.page_bytes(pool) as usize);
    let sources = sizes.map(|page| Memory::of(&page_bytes(page as u64, 5 * page)));
    let (kv_slots, blob_slots): ([i64; 3], [i64; 3]) = ([4, 0, 2], [-1, 3, 1]);
    let options = BackupOptions { deadline: None, bounce: there };
    let memory = vec![
        PoolMemory { regions: vec![&sources[0].region], slots: &kv_slots },
        PoolMemory { regions: vec![&sources[1].region], slots: &blob_slots },
    ];
    let report = view.backup_with(&keys, memory, ChainStart::default(), options).unwrap();
    assert_eq!(report.outcomes, [Stored; 3], "{layout:?} {level:?} {there:?}");
    let targets = sizes.map(|page| Memory::canary(5 * page));
    let memory = vec![
        PoolMemory { regions: vec![&targets[0].region], slots: &kv_slots },
        PoolMemory { regions: vec![&targets[1].region], slots: &blob_slots },
    ];
    let options = RestoreOptions { deadline: None, bounce: back };
    let report = view.restore(&keys, memory, options).unwrap();
    assert_eq!(report.outcomes, [Restored; 3], "{layout:?} {level:?} {back:?}");
    assert_eq!(report.bytes as usize, 3 * sizes[0] + 2 * sizes[1]);
    // The same slots, in the same layout, from memory that is all canary elsewhere.
    let plain = sizes.map(|page| Memory::canary(5 * page));
    let memory = vec![
        PoolMemory { regions: vec![&plain[0].region], slots: &kv_slots },
        PoolMemory { regions: vec![&plain[1].region], slots: &blob_slots },
    ];
    view.restore(&keys, memory, RestoreOptions::default()).unwrap();
    for pool in [0, 1] {
        assert!(targets[pool].bytes() == plain[pool].bytes(), "{layout:?} {level:?} {there:?} {back:?}");
        let (landed, source) = (targets[pool].bytes(), sources[pool].bytes());
        let moved = landed.iter().zip(&source).filter(|(landed, source)| landed == source).count();
        assert!(moved >= [3, 2][pool] * sizes[pool], "{layout:?}: {moved} bytes are as they were");
    }
}

#[test]
fn bounced_pages_are_the_same_in_every_layout() {
    for name in ["layer_first", "page_first", "page_first_direct", "page_head", "page_unified(2)"] {
        let layout = LayoutName::parse(name).unwrap();
        for level in [None, Some(1)] {
            round_trip(layout, level, Bounce::Always, Bounce::Never);
            round_trip(layout, level, Bounce::Never, Bounce::Always);
        }
    }
}

#[test]
fn bounced_calls_of_many_threads_share_the_threads_and_memory() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = stored(root.path(), 96);
    let store = open(root.path());
    let most = AtomicU64::new(0);
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let (view, target) = (view(&store), Memory::canary(96 * PAGE));
                    let report = restore_by(&view, &keys, &target, Instant::now() + HOUR, Bounce::Always);
                    assert_eq!(report.outcomes, [Restored; 96]);
                    assert!(target.bytes() == bytes);
                })
            })
            .collect();
        scope.spawn(|| {
            while !is_done.load(Ordering::SeqCst) {
                most.fetch_max(store.device().bounce_bytes, Ordering::SeqCst);
                std::thread::yield_now();
            }
        });
        calls.into_iter().for_each(|call| call.join().unwrap());
        is_done.store(true, Ordering::SeqCst);
    });
    let most = most.load(Ordering::SeqCst);
    assert!(most > 4 << 20 && most <= 64 << 20, "{most} bytes");
    assert_eq!(store.device().bounce_bytes, 0);
}
