//! The capacity holds at all times, for all processes together, also while one of them stands still.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::driver::{Backed, Worker, value, wait_until};
use super::mounted::{Mounted, on_each};

const CAPACITY: u64 = 16 << 20;
const PAGE: u64 = 64 << 10;
const WRITERS: u64 = 4;
/// Pages that each writer stores: four times the capacity in all.
const PAGES_EACH: u64 = 4 * CAPACITY / PAGE / WRITERS;

/// Looks at what the file system says every 10 ms while `work` goes on; most bytes, and how often it looked.
fn watched<R>(mounted: &Mounted, work: impl FnOnce() -> R) -> (R, u64, u64) {
    let (done, most, looks) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    // Also when the work panics, or the other thread would look for ever.
    struct Ended<'a>(&'a AtomicBool);
    impl Drop for Ended<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                most.fetch_max(mounted.used_bytes(), Ordering::SeqCst);
                looks.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let _ended = Ended(&done);
        work()
    });
    (result, most.into_inner(), looks.into_inner())
}

/// Four writers store four times the capacity; before, `stopped` is stopped.
fn overfill(mounted: &Mounted, what: &str, stop: impl Fn(&mut Vec<Worker>, &mut Worker)) {
    let root = mounted.root();
    let options = format!("page={PAGE} capacity={CAPACITY}");
    let ((), most, looks) = watched(mounted, || {
        let mut other = Worker::start(&root, &options);
        let mut writers: Vec<Worker> = (0..WRITERS).map(|_| Worker::start(&root, &options)).collect();
        for (number, writer) in writers.iter_mut().enumerate() {
            let first = number * 10_000;
            let spec = format!("work write=100 order=1 length=8 first={first} pages={PAGES_EACH} seconds=40");
            writer.ask(&spec, "working");
        }
        stop(&mut writers, &mut other);
        for (number, writer) in writers.iter_mut().enumerate() {
            let (mut stored, mut refused) = (0, 0);
            let summary = loop {
                let line = writer.line().expect("a living writer");
                if let Some(backed) = Backed::of_line(&line) {
                    stored += backed.stored().count() as u64;
                    refused += backed.letters.matches('r').count();
                } else if line.starts_with("worked") {
                    break line;
                }
            };
            assert!(value(&summary, "backups") > 0);
            assert!(stored >= PAGES_EACH, "{what}: writer {number} stored {stored} pages, {refused} refused");
        }
        assert!(other.is_stopped(), "{what}: it stood still all the time");
        other.go_on();
        other.tell("halt");
        while other.line().expect("it goes on") != "halted" {}
        other.close();
    });
    println!("{}: {what}: {most} bytes at most in {looks} looks, of {CAPACITY}", mounted.kind);
    assert!(most <= CAPACITY, "{}: {what}: {most} bytes in use, of {CAPACITY}", mounted.kind);
    assert!(most >= CAPACITY / 2, "{}: {what}: only {most} bytes in use, of {CAPACITY}", mounted.kind);
}

#[test]
fn the_capacity_holds_while_a_stopped_reader_has_segments_open() {
    on_each(64, |mounted| {
        overfill(mounted, "a reader stands still", |writers, reader| {
            reader.ask("work write=0 chains=16 length=8", "working");
            let root = mounted.root();
            let namespaces = root.join("ns");
            wait_until("the reader has a segment open", || {
                assert!(writers[0].ended().is_none());
                let folders = std::fs::read_dir(&namespaces).into_iter().flatten().flatten();
                let files = folders.flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten());
                let mut segments = files.flatten().map(|entry| entry.path());
                segments
                    .any(|path| path.extension().is_some_and(|end| end == "seg") && reader.has_open(&path))
            });
            reader.stop();
        });
    });
}

#[test]
fn the_capacity_holds_while_a_writer_stands_still_before_it_publishes() {
    on_each(64, |mounted| {
        overfill(mounted, "a writer stands still", |_, writer| {
            writer.ask("arm frame stop 2", "armed");
            writer.ask("work write=100 order=1 length=8 first=900000 pages=64", "working");
            writer.wait_until_stopped();
        });
    });
}
