//! One budget for all processes: files never take more than the limits, and the limits never more than the capacity.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hicache_core::format::ledger::Ledger;
use hicache_core::format::root::{RootDescription, RootFile};
use hicache_core::format::{ProcessId, SegmentId};
use hicache_core::store::budget::{Budget, NoRoom};
use hicache_core::store::paths::Paths;
use hicache_core::{ErrorKind, Store, StoreOptions};
use hicache_sys::file::{allocated_bytes, create_new, preallocate, punch_hole};
use hicache_sys::lock::FileLock;

use crate::support::{fast_folder, flip};

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 16 * MIB;

/// Root and mode of a worker process, see `worker`.
const WORKER: &str = "HICACHE_BUDGET_WORKER";

/// A new root of the smallest capacity, with one namespace's folder.
fn new_root(root: &Path) -> Paths {
    let options = StoreOptions { capacity_bytes: Some(CAPACITY), ..StoreOptions::default() };
    Store::open(root, options).unwrap().close();
    std::fs::create_dir(root.join("ns").join("ab".repeat(16))).unwrap();
    Paths::new(root)
}

fn open_budget(paths: &Paths, process: ProcessId, floor: Option<u64>, read_only: bool) -> Budget {
    let bytes = std::fs::read(paths.description()).unwrap();
    let RootFile::Whole(description) = RootDescription::decode(&bytes).unwrap() else {
        panic!("a damaged root")
    };
    Budget::open(paths.clone(), process, &description, floor, read_only).unwrap()
}

/// What a process that writes has: its lock, its share of the budget, and a segment.
struct Writer {
    process: ProcessId,
    budget: Budget,
    file: File,
    path: PathBuf,
    end: u64,
    _lock: FileLock,
}

impl Writer {
    fn new(paths: &Paths) -> Writer {
        Writer::with_floor(paths, Some(0))
    }

    fn with_floor(paths: &Paths, floor: Option<u64>) -> Writer {
        let process = ProcessId::random().unwrap();
        let lock = FileLock::try_exclusive(&paths.process_lock(process)).unwrap().unwrap();
        let segment = SegmentId { process, number: 0 }.file_name();
        let path = paths.namespaces().join("ab".repeat(16)).join(segment);
        let file = create_new(&path).unwrap();
        let budget = open_budget(paths, process, floor, false);
        Writer { process, budget, file, path, end: 0, _lock: lock }
    }

    /// Takes room and allocates it.
    fn write(&mut self, bytes: u64) -> Result<(), NoRoom> {
        let room = self.budget.take(bytes)?;
        assert!(preallocate(&self.file, self.end, bytes).unwrap());
        drop(room);
        self.end += bytes;
        Ok(())
    }

    /// Frees the first `bytes` of the segment.
    fn free(&mut self, bytes: u64) {
        let before = self.budget.before_freeing();
        let blocks = || allocated_bytes(&self.file.metadata().unwrap());
        let had = blocks();
        punch_hole(&self.file, 0, bytes).unwrap();
        self.budget.freed(before, &[(self.process, had.saturating_sub(blocks()))]);
    }

    /// Takes room as soon as there is some.
    fn wait_for(&self, bytes: u64) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while let Err(error) = self.budget.take(bytes).map(|room| room.give_back()) {
            assert!(Instant::now() < deadline, "{error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn is_full(result: Result<(), NoRoom>) -> bool {
    matches!(result, Err(NoRoom::Full { short_by }) if short_by > 0)
}

fn read_ledger(paths: &Paths) -> Ledger {
    Ledger::decode(&std::fs::read(paths.budget()).unwrap()).unwrap()
}

/// Bytes that everything below the root takes, folders included.
fn disk_usage(root: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(root) else { return 0 };
    let own = std::fs::symlink_metadata(root).map_or(0, |found| allocated_bytes(&found));
    own + entries
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => disk_usage(&entry.path()),
            _ => entry.metadata().map_or(0, |found| allocated_bytes(&found)),
        })
        .sum::<u64>()
}

/// What must hold at every moment; the ledger stands still meanwhile.
fn check(paths: &Paths) -> (u64, u64) {
    let lock = FileLock::exclusive_within(&paths.budget(), Duration::from_secs(20)).unwrap().unwrap();
    let ledger = read_ledger(paths);
    let used = disk_usage(&paths.root);
    drop(lock);
    assert!(used <= ledger.sum(), "{used} bytes used, limits of {} bytes: {ledger:?}", ledger.sum());
    assert!(ledger.sum() <= CAPACITY, "limits of {} bytes: {ledger:?}", ledger.sum());
    (used, ledger.sum())
}

fn start_worker(paths: &Paths, mode: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "budget::worker", "--ignored", "--nocapture"])
        .env(WORKER, format!("{mode}:{}", paths.root.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
#[ignore = "a process that other tests start and kill"]
fn worker() {
    let Ok(job) = std::env::var(WORKER) else { return };
    let (mode, root) = job.split_once(':').unwrap();
    let mut writer = Writer::new(&Paths::new(Path::new(root)));
    if mode == "hog" {
        let room = writer.budget.take(12 * MIB).unwrap();
        println!("ready {}", room.bytes());
        std::thread::sleep(Duration::from_secs(600));
    }
    let mut state = u64::from_le_bytes(writer.process.0[..8].try_into().unwrap()) | 1;
    loop {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match writer.write((1 + state % 128) * 4096) {
            Ok(()) | Err(NoRoom::Busy) => {}
            Err(NoRoom::Full { .. }) => {
                let end = writer.end.max(4096);
                writer.free((end * (1 + state % 4) / 4).next_multiple_of(4096));
            }
            Err(error) => panic!("{error}"),
        }
        if state % 50 == 0 {
            writer.budget.measure();
        }
    }
}

fn keep_within_limits(root: &Path) {
    let paths = new_root(root);
    let mut workers: Vec<Child> = (0..3).map(|_| start_worker(&paths, "churn")).collect();
    let mut most = 0;
    for round in 0..60 {
        std::thread::sleep(Duration::from_millis(10));
        most = most.max(check(&paths).0);
        if round % 12 == 11 {
            kill(workers.remove(0));
            check(&paths);
            // What the dead leave goes some time; here it is removed as others would see it: without a word.
            for path in crate::support::files_ending(&paths.root, ".seg") {
                let process =
                    SegmentId::from_file_name(path.file_name().unwrap().to_str().unwrap()).unwrap().process;
                if !hicache_sys::lock::is_locked(&paths.process_lock(process)).unwrap() {
                    std::fs::remove_file(path).unwrap();
                }
            }
            workers.push(start_worker(&paths, "churn"));
        }
    }
    workers.into_iter().for_each(kill);
    assert!(most > CAPACITY / 2, "the workers used {most} bytes at most: the test says nothing");
}

#[test]
fn files_take_no_more_than_limits_and_limits_no_more_than_the_capacity() {
    keep_within_limits(fast_folder().path());
    keep_within_limits(tempfile::tempdir().unwrap().path());
}

#[test]
fn a_killed_process_gives_its_grant_back() {
    let root = fast_folder();
    let paths = new_root(root.path());
    let mut hog = start_worker(&paths, "hog");
    let mut lines = BufReader::new(hog.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready 12582912")));
    let mut writer = Writer::new(&paths);
    assert!(is_full(writer.write(8 * MIB)));
    kill(hog);
    writer.wait_for(8 * MIB);
    check(&paths);
}

#[test]
fn case_d10_the_count_equals_what_is_on_disk() {
    let root = tempfile::tempdir().unwrap();
    let paths = new_root(root.path());
    let mut gone = Writer::new(&paths);
    gone.write(12 * MIB).unwrap();
    let path = gone.path.clone();
    let used = gone.budget.measure();
    assert_eq!(used, disk_usage(root.path()));
    gone.budget.release();
    assert!(read_ledger(&paths).entry(gone.process).is_none());
    assert!(gone.budget.take(4096).is_err(), "room after the end");
    drop(gone);
    // A restart counts what is there, once, however often it looks.
    let mut writer = Writer::new(&paths);
    for _ in 0..3 {
        assert_eq!(writer.budget.measure(), disk_usage(root.path()));
    }
    assert!(is_full(writer.write(8 * MIB)));
    writer.write(MIB).unwrap();
    // Removed by somebody who does not know of budgets: noticed before the root is called full.
    std::fs::remove_file(path).unwrap();
    writer.wait_for(12 * MIB);
    assert!(writer.budget.measure() < 2 * MIB);
    check(&paths);
    std::fs::write(root.path().join("notes.txt"), vec![1; 3 << 20]).unwrap();
    let before = writer.budget.measure();
    assert_eq!(
        before + allocated_bytes(&root.path().join("notes.txt").metadata().unwrap()),
        disk_usage(root.path())
    );
    let temporary = Paths::temporary(&paths.root, writer.process, 7);
    std::fs::write(&temporary, vec![1; 1 << 20]).unwrap();
    assert!(writer.budget.measure() >= before + MIB);
}

#[test]
fn a_damaged_ledger_is_measured_anew() {
    let root = fast_folder();
    let paths = new_root(root.path());
    let (mut one, mut other) = (Writer::new(&paths), Writer::new(&paths));
    one.write(6 * MIB).unwrap();
    other.write(6 * MIB).unwrap();
    let damages: [&dyn Fn(); 4] = [
        &|| flip(&paths.budget(), 60, 3),
        &|| std::fs::write(paths.budget(), b"short").unwrap(),
        &|| std::fs::remove_file(paths.budget()).unwrap(),
        &|| std::fs::write(paths.budget(), vec![0xff; 16 << 10]).unwrap(),
    ];
    for damage in damages {
        damage();
        assert!(is_full(one.write(5 * MIB)), "room that is not there, after the ledger was lost");
        check(&paths);
        damage();
        one.write(64 << 10).unwrap();
        other.write(64 << 10).unwrap();
        other.budget.measure(); // both wrote from what was left, without a look at the ledger
        let (used, sum) = check(&paths);
        assert!(used > 12 * MIB && sum >= used);
    }
}

#[test]
fn what_was_freed_is_not_counted_twice() {
    let root = fast_folder();
    let paths = new_root(root.path());
    let (mut one, other) = (Writer::new(&paths), Writer::new(&paths));
    one.write(8 * MIB).unwrap();
    other.budget.take(4096).unwrap().give_back();
    let limit = |process| read_ledger(&paths).entry(process).unwrap().limit;
    let before = limit(one.process);
    one.free(2 * MIB);
    assert_eq!(limit(one.process), before - 2 * MIB, "freed room goes back at once");
    // Somebody measures between the punch and the word of it.
    let mark = other.budget.before_freeing();
    punch_hole(&one.file, 2 * MIB, 2 * MIB).unwrap();
    one.budget.measure();
    let measured = limit(one.process);
    other.budget.freed(mark, &[(one.process, 2 * MIB)]);
    assert_eq!(limit(one.process), measured);
    check(&paths);
    // Of a process that is not there: nobody's.
    let nobody = read_ledger(&paths).nobody;
    let mark = other.budget.before_freeing();
    other.budget.freed(mark, &[(ProcessId([9; 16]), 4096)]);
    assert_eq!(read_ledger(&paths).nobody, nobody - 4096);
}

#[test]
fn a_grant_counts_until_it_is_known_to_be_used() {
    let root = fast_folder();
    let paths = new_root(root.path());
    let (one, other) = (Writer::new(&paths), Writer::new(&paths));
    // Taken and not written yet, in two steps: the second grant must not hide the first.
    let large = one.budget.take(6 * MIB).unwrap();
    let small = one.budget.take(MIB).unwrap();
    assert!(other.budget.measure() < MIB);
    let entry = *read_ledger(&paths).entry(one.process).unwrap();
    assert!(entry.limit >= 7 * MIB && entry.outstanding >= 7 * MIB, "{entry:?}");
    small.give_back();
    drop(large);
    one.budget.measure();
    assert!(read_ledger(&paths).entry(one.process).unwrap().limit <= 2 * MIB);
}

#[test]
fn a_new_capacity_is_seen_at_the_next_visit() {
    let root = fast_folder();
    let paths = new_root(root.path());
    let (mut one, mut other) = (Writer::new(&paths), Writer::new(&paths));
    assert!(matches!(one.write(17 * MIB), Err(NoRoom::TooLarge)));
    let uuid = |paths: &Paths| match RootDescription::decode(&std::fs::read(paths.description()).unwrap()) {
        Ok(RootFile::Whole(description)) => (description.uuid, description.created_ns),
        other => panic!("{other:?}"),
    };
    let was = uuid(&paths);
    other.budget.resize(64 * MIB).unwrap();
    one.write(40 * MIB).unwrap();
    assert_eq!((one.budget.capacity(), uuid(&paths)), (64 * MIB, was));
    other.budget.resize(16 * MIB).unwrap();
    assert!(is_full(other.write(4096)));
    one.budget.measure();
    assert!(is_full(one.write(4096)));
    let end = one.end;
    one.free(end);
    other.wait_for(8 * MIB);
    check(&paths);
    assert_eq!(other.budget.resize(MIB).unwrap_err().kind(), ErrorKind::Config);
    let looker = open_budget(&paths, ProcessId([1; 16]), None, true);
    assert_eq!(looker.capacity(), 16 * MIB);
    assert_eq!(looker.resize(64 * MIB).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(looker.take(4096).is_err());
}

#[test]
fn a_held_ledger_refuses_and_what_is_left_is_given_without_it() {
    let root = fast_folder();
    let paths = new_root(root.path());
    let mut writer = Writer::new(&paths);
    writer.write(4096).unwrap();
    let held = FileLock::try_exclusive(&paths.budget()).unwrap().unwrap();
    writer.write(4096).unwrap();
    assert!(matches!(writer.write(8 * MIB), Err(NoRoom::Busy)));
    assert_eq!(writer.budget.measure(), disk_usage(root.path()));
    drop(held);
    writer.write(8 * MIB).unwrap();
    check(&paths);
}

#[test]
fn room_is_for_processes_that_others_see_alive() {
    let root = fast_folder();
    let paths = new_root(root.path());
    let budget = open_budget(&paths, ProcessId([3; 16]), Some(0), false);
    let error = budget.take(4096).map(|room| room.give_back()).unwrap_err();
    assert!(error.to_string().contains("lock"), "{error}");
}

#[test]
fn the_file_system_keeps_its_floor() {
    let root = tempfile::tempdir().unwrap();
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=12m", "tmpfs"]).arg(root.path()).status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("skipped: this user may not mount a file system of its own");
        return;
    }
    let paths = new_root(root.path());
    let mut writer = Writer::with_floor(&paths, Some(4 * MIB));
    let refused = loop {
        match writer.write(64 << 10) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    let left = hicache_sys::probe::file_system(root.path()).unwrap().available_bytes;
    let status = writer.budget.status();
    drop(writer);
    assert!(Command::new("umount").arg("-l").arg(root.path()).status().unwrap().success());
    assert!(matches!(refused, NoRoom::Floor { short_by } if short_by <= 64 << 10), "{refused}");
    assert!((4 * MIB..5 * MIB).contains(&left), "{left} bytes left");
    assert_eq!((status.free_space_floor, status.available), (4 * MIB, left));
}

#[test]
fn a_time_to_live_below_a_second_is_refused() {
    let root = fast_folder();
    let open = |millis| {
        let time_to_live = Some(Duration::from_millis(millis));
        Store::open(root.path(), StoreOptions { time_to_live, ..StoreOptions::default() })
    };
    let error = open(999).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.message().contains("999ms"), "{error}");
    open(1000).unwrap();
}
