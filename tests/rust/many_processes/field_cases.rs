//! Faults that people met in stores shared by several processes, each with the input that reveals it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hicache_core::inspect::scan;
use hicache_core::store::counters::Counter;
use hicache_core::store::io::IoCall;
use hicache_core::{
    BackupOutcome, ChainStart, HitPolicy, LayoutName, PoolMemory, RestoreOutcome, Store, StoreOptions, View,
    ViewOptions, ViewPool,
};
use hicache_tests::deployment::{Deployment, Numbers, keys};

use super::driver::{Backed, Worker, sized, taken_bytes, value, wait_until};
use super::ledger::{live_copies, live_objects};
use super::mounted::{Mounted, skipped};
use crate::support::{
    Memory, backup, contiguous, counter, errno, fast_folder, files_ending, hooked, kv_pool, listing,
    namespace, page_bytes, restore, tile, tiny,
};

const CAPACITY: u64 = 16 << 20;
/// Pages of the cases about budgets.
const BIG: u32 = 128 << 10;
const ENOSPC: i32 = 28;

use BackupOutcome::{Refused, Stored};
use RestoreOutcome::Restored;

/// A deployment of big pages and its view of a store.
fn big(store: &Store) -> (Deployment, View) {
    let deployment = Deployment::whole(BIG);
    let view = deployment.view(store).unwrap();
    (deployment, view)
}

fn small_store(root: &Path) -> Store {
    Store::open(root, StoreOptions { capacity_bytes: Some(CAPACITY), ..StoreOptions::default() }).unwrap()
}

/// Backs up the first pages of a chain.
fn store_chain(view: &View, deployment: &Deployment, chain: u64, pages: usize) -> Vec<BackupOutcome> {
    let bytes: Vec<u8> = (0..pages as u64).flat_map(|page| deployment.page(chain, page)).collect();
    backup(view, &keys(chain, pages), &Memory::of(&bytes)).outcomes
}

/// Restores the first pages of a chain; those restored are exact.
fn restore_chain(view: &View, deployment: &Deployment, chain: u64, pages: usize) -> Vec<RestoreOutcome> {
    let target = Memory::canary(pages * deployment.page_bytes as usize);
    let outcomes = restore(view, &keys(chain, pages), &target).outcomes;
    let landed = target.bytes();
    for (page, (landed, outcome)) in landed.chunks(deployment.page_bytes as usize).zip(&outcomes).enumerate()
    {
        if *outcome == Restored {
            assert!(landed == deployment.page(chain, page as u64), "page {page} of chain {chain}");
        }
    }
    outcomes
}

fn temporary_files(root: &Path) -> Vec<PathBuf> {
    let names = listing(root).into_iter().map(|(path, ..)| path);
    names
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tmp-")))
        .collect()
}

#[test]
fn case_d07_files_that_go_while_they_are_read_give_exact_pages_or_none() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let options = format!("page={BIG} capacity={CAPACITY}");
    // Few segments held open, so that names that are gone are met.
    let mut reader = Worker::start(&root, &format!("{options} segments=2"));
    let mut writer = Worker::start(&root, &options);
    writer.backup(0, 0..8);
    reader.ask("work write=0 chains=16 length=8 tolerant=1", "working");
    writer.ask("work write=100 order=1 first=1 length=8 pages=1000 tolerant=1 seconds=600", "working");
    let mut numbers = Numbers(3);
    let mut unlinked = 0;
    let until = Instant::now() + Duration::from_secs(sized(3, 30));
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
        let files: Vec<PathBuf> = std::fs::read_dir(root.join("ns"))
            .unwrap()
            .flatten()
            .flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten().flatten())
            .map(|entry| entry.path())
            .chain(std::fs::read_dir(root.join("journal")).unwrap().flatten().map(|entry| entry.path()))
            .collect();
        if numbers.below(10) < 3
            && let Some(victim) = files.get(numbers.below(files.len() as u64) as usize)
        {
            unlinked += usize::from(std::fs::remove_file(victim).is_ok());
        }
        assert!(reader.ended().is_none() && writer.ended().is_none(), "no exception");
        reader.lines_by_now();
        writer.lines_by_now();
    }
    assert!(unlinked > 3, "{unlinked} files unlinked");
    reader.tell("halt");
    writer.tell("halt");
    let summary = std::iter::from_fn(|| reader.line()).find(|line| line.starts_with("worked")).unwrap();
    reader.answer("halted");
    assert_eq!(
        reader.counter("restore_restored_pages"),
        value(&summary, "restored"),
        "hits are pages delivered"
    );
    assert!(value(&summary, "restores") > 0);
    while writer.line().expect("a living writer") != "halted" {}
    // Nobody is confused for good: another process stores and serves.
    let mut late = Worker::start(&root, &options);
    late.backup(5_000_000, 0..8);
    late.restore(5_000_000, 0..8);
    late.close();
}

#[test]
fn case_d08_the_capacity_holds_at_all_times_and_the_latest_pages_stay() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let store = small_store(&root);
    let (deployment, view) = big(&store);
    let (done, most) = (AtomicBool::new(false), AtomicU64::new(0));
    // Without it, the last pages of a quick writer would be old when the others end.
    let step = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                most.fetch_max(taken_bytes(&root), Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        // 1,000 pages of 128 KiB: eight times the capacity.
        let writers: Vec<_> = (0..4)
            .map(|thread| {
                let (view, deployment, step) = (&view, &deployment, &step);
                scope.spawn(move || {
                    for number in 0..250 {
                        step.wait();
                        store_chain(view, deployment, thread * 1000 + number, 1);
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::SeqCst);
        watcher.join().unwrap();
    });
    let most = most.into_inner();
    assert!(most <= CAPACITY, "{most} bytes taken, of {CAPACITY}");
    for thread in 0..4 {
        for number in 240..250 {
            let outcomes = restore_chain(&view, &deployment, thread * 1000 + number, 1);
            assert_eq!(outcomes, [Restored], "page {number} of thread {thread} was stored last");
        }
    }
    assert!(view.match_prefix(&keys(0, 1)).unwrap().pages == 0, "the first page went");
    // Larger than all there may be.
    let huge = Deployment { revision: "huge".into(), ..Deployment::whole(32 << 20) };
    let view = huge.view(&store).unwrap();
    let report = backup(&view, &keys(1, 1), &Memory::of(&huge.page(1, 0)));
    assert_eq!(report.outcomes, [Refused]);
    assert!(report.reason.unwrap().contains("capacity"));
}

/// Removes everything in one of several ways.
fn remove_all(root: &Path, view: &View, way: u64) {
    match way {
        0 => {
            view.clear().unwrap();
        }
        _ => {
            for segment in files_ending(root, ".seg") {
                std::fs::remove_file(segment).unwrap();
            }
        }
    }
}

#[test]
fn case_d10_used_bytes_are_those_on_disk_after_any_removal() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let store = small_store(&root);
    let (deployment, view) = big(&store);
    for round in 0..20 {
        // Half of what fits.
        let chain = 100 + round;
        assert_eq!(store_chain(&view, &deployment, chain, 60), [Stored; 60], "round {round}");
        let used = store.used_bytes();
        assert!(used >= 60 * u64::from(BIG) && used <= CAPACITY, "{used} bytes used in round {round}");
        remove_all(&root, &view, round % 2);
        let used = store.used_bytes();
        assert!(used <= 2 << 20, "{used} bytes used after everything was removed in round {round}");
        // A process opened now sees none of it.
        let other = small_store(&root);
        assert_eq!(big(&other).1.match_prefix(&keys(chain, 60)).unwrap().pages, 0);
    }
    drop((view, store));
    // Killed with 30 pages on disk.
    view_after_a_kill(&root);
}

fn view_after_a_kill(root: &Path) {
    let mut worker = Worker::start(root, &format!("page={BIG}"));
    worker.ask("clear", "cleared");
    assert_eq!(worker.backup(7, 0..30), "s".repeat(30));
    let before = taken_bytes(root);
    worker.kill();
    let store = small_store(root);
    let (deployment, view) = big(&store);
    for _ in 0..3 {
        assert_eq!(live_objects(root), 30);
        let used = store.used_bytes();
        assert!(
            used >= 30 * u64::from(BIG) && used <= before + (1 << 20),
            "{used} bytes used, {before} before"
        );
        assert_eq!(scan(root).unwrap().used_bytes.div_ceil(1 << 20), taken_bytes(root).div_ceil(1 << 20));
    }
    assert_eq!(restore_chain(&view, &deployment, 7, 30), [Restored; 30]);
}

#[test]
fn case_d10_prune_gives_back_what_it_says() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let store = small_store(&root);
    let (deployment, view) = big(&store);
    for chain in 0..10 {
        assert_eq!(store_chain(&view, &deployment, chain, 60), [Stored; 60]);
        let arguments = ["hicache-store", "prune", "--to", "0", root.to_str().unwrap()].map(Into::into);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = hicache_cli::run(&arguments, &mut out, &mut err);
        assert_eq!(code, hicache_cli::FINE, "{}", String::from_utf8_lossy(&err));
        assert_eq!(live_objects(&root), 0);
        assert!(store.used_bytes() <= 2 << 20);
        assert_eq!(view.match_prefix(&keys(chain, 60)).unwrap().pages, 0);
    }
}

#[test]
fn case_d11_a_disk_smaller_than_the_capacity_refuses_and_serves_on() {
    for mounted in [Mounted::tmpfs(4, ""), Mounted::ext4(4)] {
        let mounted = match mounted {
            Ok(mounted) => mounted,
            Err(why) => {
                skipped(&why);
                continue;
            }
        };
        let root = mounted.root();
        let store = small_store(&root);
        let (deployment, view) = big(&store);
        let mut last_stored = None;
        for chain in 0..120 {
            match store_chain(&view, &deployment, chain, 1)[..] {
                [Stored] => last_stored = Some(chain),
                [Refused] => {}
                ref other => panic!("{}: {other:?}", mounted.kind),
            }
        }
        let last = last_stored.expect("a stored page");
        assert_eq!(restore_chain(&view, &deployment, last, 1), [Restored], "{}", mounted.kind);
        let exact =
            (0..120).filter(|&chain| restore_chain(&view, &deployment, chain, 1) == [Restored]).count();
        assert!(exact >= 16, "{}: {exact} pages of 128 KiB in 4 MiB", mounted.kind);
        assert_eq!(temporary_files(&root), Vec::<PathBuf>::new());
        // Making room needs room as well: somebody who fills the disk all the time gets a refusal.
        let filler = mounted.top().join("filler");
        std::fs::write(&filler, vec![0; 8 << 20]).unwrap_err();
        for chain in 200..300 {
            assert!(matches!(store_chain(&view, &deployment, chain, 1)[..], [Stored | Refused]));
        }
        std::fs::remove_file(filler).unwrap();
        assert_eq!(store_chain(&view, &deployment, 400, 1), [Stored]);
        assert_eq!(restore_chain(&view, &deployment, 400, 1), [Restored]);
    }
}

#[test]
fn case_d11_a_write_that_finds_the_disk_full_once_is_tried_again() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let payloads = AtomicU64::new(0);
    let hook = move |call: IoCall<'_>| {
        let is_payload = call.is_write && call.len == u64::from(BIG);
        let is_third = is_payload && payloads.fetch_add(1, Ordering::SeqCst) == 2;
        if is_third { Err(errno(ENOSPC)) } else { Ok(()) }
    };
    let store = Store::open(&root, StoreOptions { capacity_bytes: Some(CAPACITY), ..hooked(hook) }).unwrap();
    let (deployment, view) = big(&store);
    for chain in 0..6 {
        assert_eq!(store_chain(&view, &deployment, chain, 1), [Stored], "write {chain}");
    }
    for chain in 2..6 {
        assert_eq!(restore_chain(&view, &deployment, chain, 1), [Restored], "write {chain}");
    }
    assert_eq!(counter(&store, Counter::BackupStored), 6);
}

#[test]
fn case_d14_processes_with_one_rank_number_lose_nothing_to_each_other() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let start = |_| Worker::start(&root, &format!("page=4096 capacity={}", 64 << 20));
    let mut workers: Vec<Worker> = (0..8).map(start).collect();
    for life in 0..2 {
        for (worker, number) in workers.iter_mut().zip(0_u64..) {
            for part in 0..25 {
                worker.tell(&format!("backup {} 0 8", number * 1000 + life * 100 + part));
            }
        }
        for worker in &mut workers {
            for _ in 0..25 {
                assert_eq!(Backed::parse(&worker.answer("backed")).letters, "ssssssss");
            }
        }
        if life == 0 {
            workers.iter_mut().for_each(Worker::kill);
            workers = (0..8).map(start).collect();
        }
    }
    workers.iter_mut().for_each(Worker::kill);
    let mut late = start(0);
    for number in 0..8 {
        for chain in (0..2).flat_map(|life| (0..25).map(move |part| number * 1000 + life * 100 + part)) {
            assert_eq!(late.restore(chain, 0..8), "rrrrrrrr", "chain {chain}");
        }
    }
    // Other bytes under a key that is there: the first ones stay.
    let store = small_store(&root);
    let view = Deployment::whole(4096).view(&store).unwrap();
    let report = backup(&view, &keys(0, 1), &Memory::of(&page_bytes(99, 4096)));
    assert_eq!(report.outcomes, [BackupOutcome::Present]);
    assert_eq!(late.restore(0, 0..1), "r");
}

#[test]
fn case_d19_a_killed_process_leaves_hits_for_others_wherever_the_root_is() {
    let folder = fast_folder();
    let (root, moved) = (folder.path().join("root"), folder.path().join("moved"));
    let mut worker = Worker::start(&root, &format!("page={BIG} capacity={CAPACITY}"));
    assert_eq!(worker.backup(0, 0..8), "ssssssss");
    worker.kill();
    let mut next = Worker::start(&root, &format!("page={BIG}"));
    assert_eq!((next.matched(0, 8), next.restore(0, 0..8).as_str()), (8, "rrrrrrrr"));
    next.kill();
    std::fs::rename(&root, &moved).unwrap();
    let words = ["manifest.json", "root.json", ".idx", ".lock", "budget", "evict", "generation"];
    for end in words {
        let mut next = Worker::start(&moved, &format!("page={BIG}"));
        assert_eq!(next.matched(0, 8), 8, "before every {end} was deleted");
        assert_eq!(next.restore(0, 0..8), "rrrrrrrr", "before every {end} was deleted");
        next.kill();
        for path in files_ending(&moved, end) {
            std::fs::remove_file(path).unwrap();
        }
    }
    let mut last = Worker::start(&moved, &format!("page={BIG}"));
    assert_eq!(last.restore(0, 0..8), "rrrrrrrr");
    assert_eq!(last.backup(0, 0..8), "pppppppp");
}

#[test]
fn case_d23_failing_writes_are_told_and_end_with_the_fault() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let (is_ill, turn) = (std::sync::Arc::new(AtomicBool::new(true)), AtomicU64::new(0));
    let sick = is_ill.clone();
    let hook = move |call: IoCall<'_>| {
        let is_payload = call.is_write && call.len == u64::from(BIG);
        let is_odd = is_payload && turn.fetch_add(1, Ordering::SeqCst) % 2 == 1;
        if is_odd && sick.load(Ordering::SeqCst) { Err(errno(5)) } else { Ok(()) }
    };
    let store = Store::open(&root, StoreOptions { capacity_bytes: Some(CAPACITY), ..hooked(hook) }).unwrap();
    let (deployment, view) = big(&store);
    let (mut stored, mut failed) = (0, 0);
    for chain in 0..100 {
        let bytes = deployment.page(chain, 0);
        let report = backup(&view, &keys(chain, 1), &Memory::of(&bytes));
        match report.outcomes[..] {
            [Stored] => stored += 1,
            [BackupOutcome::Error] => {
                assert!(report.reason.unwrap().contains("os error 5"));
                failed += 1;
            }
            ref other => panic!("{other:?}"),
        }
    }
    assert_eq!((stored, failed), (50, 50));
    assert_eq!(counter(&store, Counter::BackupError), 50);
    is_ill.store(false, Ordering::SeqCst);
    for chain in 100..110 {
        assert_eq!(store_chain(&view, &deployment, chain, 1), [Stored]);
        assert_eq!(restore_chain(&view, &deployment, chain, 1), [Restored]);
    }
    for chain in 0..100 {
        let has = view.match_prefix(&keys(chain, 1)).unwrap().pages == 1;
        assert_eq!(has, chain % 2 == 0, "chain {chain}");
        assert_eq!(restore_chain(&view, &deployment, chain, 1) == [Restored], has);
    }
}

#[test]
fn case_d24_many_pages_are_few_files_in_every_folder() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let store = Store::open(&root, StoreOptions { capacity_bytes: Some(1 << 30), ..StoreOptions::default() })
        .unwrap();
    let deployment = Deployment::whole(16);
    let view = deployment.view(&store).unwrap();
    let chains = sized(200, 2000);
    let bytes: Vec<Vec<u8>> =
        (0..2).map(|chain| (0..100).flat_map(|page| deployment.page(chain, page)).collect()).collect();
    for chain in 0..chains {
        let outcomes = backup(&view, &keys(chain, 100), &Memory::of(&bytes[chain as usize % 2])).outcomes;
        assert_eq!(outcomes, [Stored; 100]);
    }
    let mut folders = std::collections::BTreeMap::new();
    for (path, ..) in listing(&root) {
        *folders.entry(path.parent().map(Path::to_owned)).or_insert(0_usize) += 1;
    }
    assert!(folders.values().all(|&entries| entries <= 100), "{folders:?}");
    assert_eq!(view.match_prefix(&keys(chains - 1, 100)).unwrap().pages, 100);
}

/// A file system without a free inode: what a refused backup gives as its reason. It heals when there are some.
fn refused_without_inodes() -> Option<String> {
    let mounted = Mounted::tmpfs(32, ",nr_inodes=24").inspect_err(|why| skipped(why)).ok()?;
    let root = mounted.root();
    let store = small_store(&root);
    let (deployment, view) = big(&store);
    let others: Vec<PathBuf> = (0..24).map(|number| mounted.top().join(format!("other-{number}"))).collect();
    assert!(!others.iter().all(|path| std::fs::write(path, b"").is_ok()), "an inode is left");
    let bytes = deployment.page(0, 0);
    let report = backup(&view, &keys(0, 1), &Memory::of(&bytes));
    assert_eq!(report.outcomes, [Refused], "{report:?}");
    assert_eq!(counter(&store, Counter::BackupRefusedNoSpace), 1);
    for path in others {
        // Those that could not be made are not there.
        let _ = std::fs::remove_file(path);
    }
    assert_eq!(store_chain(&view, &deployment, 0, 1), [Stored]);
    assert_eq!(restore_chain(&view, &deployment, 0, 1), [Restored]);
    report.reason
}

#[test]
fn case_d24_a_file_system_without_inodes_refuses_and_heals() {
    refused_without_inodes();
}

#[test]
fn case_d24_a_refusal_tells_missing_inodes_from_missing_space() {
    if let Some(reason) = refused_without_inodes() {
        assert!(reason.contains("inode"), "{reason}");
    }
}

/// A pool of which each rank has its own part.
fn state_pool(rank: u32) -> ViewPool {
    let component = hicache_core::Component { dtype: None, ..hicache_core::Component::per_token("x", 128) };
    let dtype = hicache_core::DType::parse("float16").unwrap();
    let pool =
        hicache_core::Pool::new("state", hicache_core::PoolKind::Indexer, dtype, None, vec![component])
            .unwrap();
    let mut pool = ViewPool::new(pool, tile((0, 2), (rank, rank + 1)), LayoutName::PageFirst);
    pool.policy = HitPolicy::AllPages;
    pool
}

#[test]
fn case_d26_a_replicated_pool_is_stored_once_and_a_local_one_by_each_rank() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let stores: Vec<Store> = (0..4).map(|_| small_store(&root)).collect();
    let latent =
        || contiguous(ViewPool::new(kv_pool("bfloat16", 16), tile((0, 2), (0, 1)), LayoutName::PageFirst));
    let views: Vec<View> = stores
        .iter()
        .zip(0..)
        .map(|(store, rank)| {
            let pools = vec![latent(), contiguous(state_pool(rank))];
            store.view(namespace("r1"), pools, ViewOptions::default()).unwrap()
        })
        .collect();
    let (latent_page, state_page) = (views[0].page_bytes(0), views[0].page_bytes(1));
    let key = &hicache_core::page_keys(&[1], 1, None)[..];
    let written = || stores.iter().map(|store| counter(store, Counter::BackupRawBytes)).sum::<u64>();
    let latent_bytes = Memory::of(&page_bytes(1, latent_page as usize));
    let states: Vec<Memory> =
        (0..4).map(|rank| Memory::of(&page_bytes(10 + rank, state_page as usize))).collect();
    let start = ChainStart { parent: None, depth: Some(0) };
    let lend = |rank: usize, latent: &'static [i64]| {
        vec![
            PoolMemory { regions: vec![&latent_bytes.region], slots: latent },
            PoolMemory { regions: vec![&states[rank].region], slots: &[0] },
        ]
    };
    // The elected writer of the latent pool gave nothing: no rank has the page.
    for (rank, view) in views.iter().enumerate() {
        assert_eq!(view.backup(key, lend(rank, &[-1]), start).unwrap().outcomes, [Stored]);
    }
    for view in &views {
        assert_eq!(view.match_prefix(key).unwrap().pages, 0);
    }
    assert_eq!(written(), 4 * state_page);
    for round in 0..2 {
        for (rank, view) in views.iter().enumerate() {
            view.backup(key, lend(rank, &[0]), start).unwrap();
        }
        assert_eq!(written(), latent_page + 4 * state_page, "round {round}");
        assert_eq!(live_objects(&root), 5);
    }
    for view in &views {
        assert_eq!(view.match_prefix(key).unwrap().pages, 1);
    }
}

#[test]
fn case_d29_processes_that_store_the_same_keys_at_once_all_succeed() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let deployment = Deployment::whole(512);
    let start = |_| Worker::start(&root, &format!("page=512 capacity={CAPACITY} threads=1"));
    let mut workers: Vec<Worker> = (0..8).map(start).collect();
    for round in 0..20 {
        for worker in &mut workers {
            for part in 0..4 {
                worker.tell(&format!("backup {} 0 50", round * 10 + part));
            }
        }
        for worker in &mut workers {
            for _ in 0..4 {
                let letters = Backed::parse(&worker.answer("backed")).letters;
                assert!(
                    letters.len() == 50 && letters.chars().all(|letter| "sp".contains(letter)),
                    "{letters}"
                );
            }
        }
        for part in 0..4 {
            assert_eq!(
                workers[round as usize % 8].restore(round * 10 + part, 0..50).replace('v', "r"),
                "r".repeat(50)
            );
        }
    }
    assert_eq!(temporary_files(&root), Vec::<PathBuf>::new());
    for chain in (0..20).flat_map(|round| (0..4).map(move |part| round * 10 + part)) {
        wait_until("one copy of each", || live_copies(&root, &deployment, chain, 50) == [1; 50]);
        assert_eq!(workers[0].restore(chain, 0..50), "r".repeat(50));
    }
}

#[test]
fn case_d30_killed_writers_leave_no_files_behind_and_a_slow_one_keeps_its_own() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let options = format!("page=16384 capacity={CAPACITY} threads=1");
    // A writer in the middle of a publication, for the whole test.
    let mut slow = Worker::start(&root, &options);
    slow.ask("arm frame stop", "armed");
    slow.tell("backup 1 0 4");
    slow.wait_until_stopped();
    let mut numbers = Numbers(9);
    for life in 0..sized(30, 100) {
        let mut worker = Worker::start(&root, &options);
        let point = ["header", "payload", "directory", "frame"][numbers.below(4) as usize];
        worker.ask(&format!("arm {point} {}", if life % 2 == 0 { "die" } else { "tear" }), "armed");
        worker.tell(&format!("backup {} 0 4", 100 + life));
        worker.wait_until_dead();
    }
    let mut last = Worker::start(&root, &options);
    last.backup(2, 0..1);
    let own = [&slow, &last].map(|worker| worker.process.clone());
    wait_until("the dead are gone", || {
        let locks = files_now(&root.join("journal"), ".lock");
        locks.iter().all(|name| own.iter().any(|process| name.contains(process)))
    });
    assert_eq!(temporary_files(&root), Vec::<PathBuf>::new());
    // A look by the tool leaves the slow one alone as well.
    let arguments = ["hicache-store", "stat", root.to_str().unwrap()].map(Into::into);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    assert_ne!(hicache_cli::run(&arguments, &mut out, &mut err), hicache_cli::FAILED);
    slow.go_on();
    assert_eq!(Backed::parse(&slow.answer("backed")).letters, "ssss");
    assert_eq!(last.restore(1, 0..4), "rrrr", "the slow write succeeded");
}

#[test]
fn case_d30_prune_leaves_a_slow_writers_files_alone() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let mut slow = Worker::start(&root, &format!("page=16384 capacity={CAPACITY}"));
    slow.ask("arm frame stop", "armed");
    slow.tell("backup 1 0 4");
    slow.wait_until_stopped();
    let arguments = ["hicache-store", "prune", "--to", "0", root.to_str().unwrap()].map(Into::into);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    assert_eq!(hicache_cli::run(&arguments, &mut out, &mut err), hicache_cli::FINE);
    slow.go_on();
    assert_eq!(Backed::parse(&slow.answer("backed")).letters, "ssss");
    assert_eq!(slow.restore(1, 0..4), "rrrr");
}

/// Names in a folder that end so.
fn files_now(folder: &Path, end: &str) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(end))
        .collect()
}

/// A root with one chain of 8 pages in each of so many segments.
fn many_segments(root: &Path, segments: u64) {
    for chain in 0..segments {
        let mut worker = Worker::start(root, &format!("page=4096 capacity={} threads=1", 64 << 20));
        assert_eq!(worker.backup(chain, 0..8), "ssssssss");
        worker.close();
    }
}

#[test]
fn case_d31_open_files_are_bounded_and_closed_again() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    many_segments(&root, 40);
    let mut worker = Worker::start_with_descriptors(&root, 64, "page=4096 segments=8");
    worker.backup(1_000_000, 0..1);
    let before = worker.descriptors();
    worker.ask("arm read 5*200 100", "armed");
    // 5,000 pages from 8 threads.
    let stormed = worker.ask("storm 8 625 8", "stormed");
    assert!(value(&stormed, "restored") >= 4000, "{stormed}");
    assert!(value(&stormed, "error") > 0, "{stormed}");
    worker.ask("disarm", "disarmed");
    let again = worker.ask("storm 8 625 8", "stormed");
    assert!(value(&again, "restored") >= 4000, "{again}");
    let after = worker.descriptors();
    // The open segments, through the page cache and past it, and a journal for each process that there was.
    assert!(after <= before + 2 * 8 + 2, "{before} descriptors before, {after} after");
    worker.close();
}

#[test]
fn case_d31_a_process_that_may_open_few_files_is_refused_and_never_dies() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    many_segments(&root, 40);
    // Enough for standard streams, lock, journal, a segment and a little; then less and less.
    for (most, chain) in [32, 24, 20, 18, 16, 14, 12, 11, 10].into_iter().zip((100_000..).step_by(1000)) {
        let mut worker = Worker::start_with_descriptors(&root, most, "page=4096");
        let outcomes: String = (0..40).map(|chain| worker.restore(chain, 0..8)).collect();
        let restored = outcomes.matches('r').count();
        println!("at most {most} descriptors: {restored} of 320 pages restored");
        assert!(restored > 0 || most < 16, "at most {most}: {outcomes}");
        worker.backup(chain, 0..8);
        worker.close();
    }
    // Nothing was given up for it.
    let mut other = Worker::start(&root, "page=4096");
    for chain in 0..40 {
        assert_eq!(other.restore(chain, 0..8), "rrrrrrrr", "chain {chain}");
    }
    assert_eq!(other.backup(5000, 0..8), "ssssssss");
}

#[test]
fn case_d32_clear_takes_one_namespace_and_nothing_else() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let start =
        |revision: &str| Worker::start(&root, &format!("page=4096 capacity={CAPACITY} revision={revision}"));
    let (mut llama, mut reader) = (start("llama"), start("llama"));
    let (mut second, mut third) = (start("llama-2"), start("org/llama"));
    for worker in [&mut llama, &mut second, &mut third] {
        for chain in 0..5 {
            assert_eq!(worker.backup(chain, 0..4), "ssss");
        }
    }
    let notes = root.join("notes.txt");
    std::fs::write(&notes, "do not touch").unwrap();
    reader.ask("work write=0 chains=5 length=4", "working");
    assert_eq!(llama.ask("clear", "cleared"), "20");
    reader.tell("halt");
    while reader.line().expect("misses, no errors") != "halted" {}
    for chain in 0..5 {
        assert_eq!(reader.matched(chain, 4), 0);
        assert_eq!(reader.restore(chain, 0..4), "aaaa");
        for other in [&mut second, &mut third] {
            assert_eq!((other.matched(chain, 4), other.restore(chain, 0..4).as_str()), (4, "rrrr"));
        }
    }
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "do not touch");
    // The tiny deployment of the other tests is a namespace like any other.
    let store = small_store(&root);
    let tiny = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
    assert_eq!(tiny.match_prefix(&keys(0, 4)).unwrap().pages, 0);
}
