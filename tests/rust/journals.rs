//! Journals get smaller and fewer, at any instruction of which a kill or a reader may come, without anybody's
//! seeing another set of objects.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use hicache_core::format::form::{Codec, Form};
use hicache_core::format::frame::{
    AddRun, AddUnit, Frame, FrameKind, Gone, Location, Reason, ShortKey, decode_add, decode_gone, encode_add,
    encode_counters, encode_gone, encode_touch,
};
use hicache_core::format::segment::{SEGMENT_HEADER_BYTES, SegmentHeader};
use hicache_core::format::setup::Setup;
use hicache_core::format::{ProcessId, SegmentId};
use hicache_core::store::counters::Counter;
use hicache_core::store::io::Transfers;
use hicache_core::store::repair::repair;
use hicache_core::store::testing::{
    AHEAD_BYTES, Finisher, Journal, Limits, Outcome, Paths, Tail, Voice, checkpoint, finish_dead, rewrite,
    transfers,
};
use hicache_core::{
    Fingerprint, LayoutName, Namespace, PageKey, RestoreOutcome, Store, StoreOptions, View, ViewOptions,
};
use proptest::prelude::*;

use crate::support::*;

/// Pages in each unit of the model.
const PAGES: u32 = 4;

/// What a process of the model leaves of its payload; nothing reads it.
fn form() -> Form {
    let tile = tile((0, 2), (0, 2));
    let pool = Fingerprint([7; 16]);
    Form { pool, tile, layout: LayoutName::PageFirst, codec: Codec::None, block_bytes: 8192, page_bytes: 512 }
}

fn model_namespace() -> Namespace {
    namespace("journals")
}

/// A process of the model: a journal, and segments that are headers only.
struct Writer {
    paths: Paths,
    id: ProcessId,
    journal: Option<Journal>,
    transfers: Transfers,
    segments: u32,
    units_in_segment: u64,
    counted: u64,
    /// Total of all processes of the model.
    total: Rc<Cell<u64>>,
}

/// What should be live: places of objects.
type Live = BTreeSet<(SegmentId, u64, u32)>;

impl Writer {
    fn start(root: &Path, name: u8) -> Writer {
        Writer::counting(root, name, Rc::default())
    }

    fn counting(root: &Path, name: u8, total: Rc<Cell<u64>>) -> Writer {
        let paths = Paths::new(root);
        let mut id = [name; 16];
        // Names in no order, so that a finisher's journals come before and after those of the dead.
        id[0] = name.wrapping_mul(97);
        let id = ProcessId(id);
        let journal = Some(Journal::create(&paths, id).unwrap());
        Writer {
            paths,
            id,
            journal,
            transfers: transfers(),
            segments: 0,
            units_in_segment: 0,
            counted: 0,
            total,
        }
    }

    fn say(&mut self, kind: FrameKind, records: u32, body: &[u8]) {
        let namespace = model_namespace().fingerprint();
        let journal = self.journal.as_mut().expect("a live process");
        journal.append(&self.transfers, kind, namespace, records, body).unwrap();
    }

    fn next_segment(&mut self) -> SegmentId {
        let segment = SegmentId { process: self.id, number: self.segments };
        (self.segments, self.units_in_segment) = (self.segments + 1, 0);
        let namespace = model_namespace();
        let path = self.paths.segment(&namespace.fingerprint(), segment);
        let header = SegmentHeader { segment, namespace, generation: 0, created_ns: 0 };
        std::fs::write(path, header.encode()).unwrap();
        segment
    }

    /// Tells a unit of `PAGES` pages at the end of its last segment.
    fn add(&mut self, live: &mut Live) {
        let folder = self.paths.namespace(&model_namespace().fingerprint());
        let last = SegmentId { process: self.id, number: self.segments.saturating_sub(1) };
        let is_over = self.units_in_segment == 6 || !folder.join(last.file_name()).exists();
        let segment = if is_over { self.next_segment() } else { last };
        let unit_offset = SEGMENT_HEADER_BYTES + self.units_in_segment * 4096;
        self.units_in_segment += 1;
        // The unit's bytes are there as a hole.
        let path = self.paths.segment(&model_namespace().fingerprint(), segment);
        std::fs::File::options().write(true).open(path).unwrap().set_len(unit_offset + 4096).unwrap();
        let unit = AddUnit {
            segment,
            generation: 0,
            unit_offset,
            unit_bytes: 4096,
            directory_offset: unit_offset + 2048,
            directory_bytes: 1024,
        };
        let keys: Vec<ShortKey> =
            (0..PAGES).map(|page| key_of(&(segment, unit_offset + 3000, page))).collect();
        let run = AddRun {
            form: form(),
            entries_offset: unit_offset + 3000,
            payload_offset: unit_offset,
            payload_bytes: 2048,
            parent: [0; 16],
            depth: 0,
            keys: keys.as_flattened(),
        };
        self.say(FrameKind::Add, 1, &encode_add(&unit, &[run]));
        live.extend((0..PAGES).map(|page| (segment, unit_offset + 3000, page)));
    }

    /// Removes objects, whoever wrote them.
    fn remove(&mut self, objects: &[(SegmentId, u64, u32)], live: &mut Live) {
        let records: Vec<Gone> = objects
            .iter()
            .map(|object| {
                let &(segment, entries_offset, ordinal) = object;
                let location = Location { segment, entries_offset, ordinal };
                Gone { location, key: key_of(object), objects: 1, reason: Reason::Evicted }
            })
            .collect();
        self.say(FrameKind::Remove, records.len() as u32, &encode_gone(&records));
        for object in objects {
            live.remove(object);
        }
    }

    fn count(&mut self, amount: u64) {
        self.counted += amount;
        self.total.set(self.total.get() + amount);
        let body = encode_counters(&[(Counter::BackupStored as u32, self.counted), (9999, 1)]);
        self.say(FrameKind::Counters, 2, &body);
    }

    fn touch(&mut self, page: u32) {
        let key = key_of(&(SegmentId { process: self.id, number: 0 }, 0, page));
        self.say(FrameKind::Touch, 1, &encode_touch(&[key]));
    }

    /// Writes the journal anew; `between` sees each step.
    fn checkpoint(&mut self, between: &mut dyn FnMut(&'static str)) -> bool {
        let journal = self.journal.as_mut().expect("a live process");
        match rewrite(&self.paths, journal.mark(), &mut |_| true, between).unwrap() {
            Outcome::Rewritten(rewritten) => {
                // Said while the new journal was being written.
                self.count(1);
                let journal = self.journal.as_mut().expect("a live process");
                journal.adopt(rewritten, between).unwrap();
                true
            }
            Outcome::Kept(_) => false,
            Outcome::NoRoom => unreachable!("there is room"),
        }
    }

    fn kill(&mut self) {
        // The lock file stays, unlocked, as after a kill.
        self.journal = None;
    }
}

impl Voice for Writer {
    fn process(&self) -> ProcessId {
        self.id
    }

    fn say(
        &mut self,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> std::io::Result<()> {
        let journal = self.journal.as_mut().expect("a live process");
        journal.append(&self.transfers, kind, namespace, records, body)
    }

    fn copy(&mut self, frame: &Frame<'_>) -> std::io::Result<()> {
        self.journal.as_mut().expect("a live process").append_copy(&self.transfers, frame)
    }

    fn sync(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn key_of(object: &(SegmentId, u64, u32)) -> ShortKey {
    let (segment, entries, ordinal) = object;
    let mut key = segment.process.0;
    key[4..8].copy_from_slice(&(segment.number + 1).to_le_bytes());
    key[8..12].copy_from_slice(&(*entries as u32).to_le_bytes());
    key[12..16].copy_from_slice(&ordinal.to_le_bytes());
    key
}

/// A reader as an index is one: adds, removes that are final, segments that are gone hold nothing.
struct Reader {
    paths: Paths,
    tail: Tail,
    added: Live,
    gone: Live,
    frames: u64,
}

impl Reader {
    fn new(root: &Path) -> Reader {
        let paths = Paths::new(root);
        let tail = Tail::new(paths.clone());
        Reader { paths, tail, added: Live::new(), gone: Live::new(), frames: 0 }
    }

    fn poll(&mut self) -> Live {
        let (added, gone) = (&mut self.added, &mut self.gone);
        let mut twice = Vec::new();
        let report = self.tail.poll(&mut |frame| match frame.kind {
            FrameKind::Add => {
                decode_add(frame.body, |unit, run| {
                    for ordinal in 0..run.pages() as u32 {
                        let object = (unit.segment, run.entries_offset, ordinal);
                        if !added.insert(object) {
                            twice.push(object);
                        }
                    }
                })
                .unwrap();
            }
            FrameKind::Remove | FrameKind::Quarantine => {
                for record in decode_gone(frame.body).unwrap() {
                    let Location { segment, entries_offset, ordinal } = record.location;
                    gone.extend((ordinal..ordinal + record.objects).map(|n| (segment, entries_offset, n)));
                }
            }
            _ => {}
        });
        assert!(report.complete, "{report:?}");
        assert_eq!(report.damaged_stretches, 0);
        assert!(twice.is_empty(), "told twice: {twice:?}");
        self.frames += report.frames;
        let folder = self.paths.namespace(&model_namespace().fingerprint());
        // What an index does when journals are gone.
        self.added.retain(|object| folder.join(object.0.file_name()).exists());
        self.added.difference(&self.gone).copied().collect()
    }
}

fn fresh(root: &Path) -> Live {
    Reader::new(root).poll()
}

fn model_root() -> tempfile::TempDir {
    let root = fast_folder();
    for folder in ["journal", "ns"] {
        std::fs::create_dir(root.path().join(folder)).unwrap();
    }
    let namespace = Paths::new(root.path()).namespace(&model_namespace().fingerprint());
    std::fs::create_dir(namespace).unwrap();
    root
}

/// Removes the segments in which nothing is live, as an evictor does after its removes.
fn unlink_dead_segments(root: &Path, live: &Live) {
    for path in files_ending(root, ".seg") {
        let id = SegmentId::from_file_name(path.file_name().unwrap().to_str().unwrap()).unwrap();
        if live.iter().all(|object| object.0 != id) {
            std::fs::remove_file(path).unwrap();
        }
    }
}

/// Total of `backup_stored_pages` over all processes, as the tools see it.
fn stored_total(root: &Path) -> u64 {
    let scan = hicache_core::inspect::scan(root).unwrap();
    scan.counters.get(&Counter::BackupStored).copied().unwrap_or_default()
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Add(u8),
    Remove(u8, u16, u8),
    Unlink,
    Count(u8),
    Touch(u8, u8),
    Checkpoint(u8),
    Kill(u8),
    Finish(u8),
    Poll,
    /// The next checkpoint or finishing goes as far as this step, and then its process is killed.
    StopAt(u8),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => any::<u8>().prop_map(Op::Add),
        5 => (any::<u8>(), any::<u16>(), 1..12_u8).prop_map(|(writer, which, count)| Op::Remove(writer, which, count)),
        2 => Just(Op::Unlink),
        1 => any::<u8>().prop_map(Op::Count),
        1 => (any::<u8>(), any::<u8>()).prop_map(|(writer, page)| Op::Touch(writer, page)),
        3 => any::<u8>().prop_map(Op::Checkpoint),
        2 => any::<u8>().prop_map(Op::Kill),
        2 => any::<u8>().prop_map(Op::Finish),
        3 => Just(Op::Poll),
        2 => (0..24_u8).prop_map(Op::StopAt),
    ];
    proptest::collection::vec(op, 1..60)
}

/// Stops a step that is under way, as a kill does: nothing after it happens.
struct Killed;

/// Runs `work`, whose steps are seen by `watch`, up to step `stop`; `false` when it was killed there.
fn until(stop: Option<u8>, watch: &mut dyn FnMut(), work: impl FnOnce(&mut dyn FnMut(&'static str))) -> bool {
    let mut step = 0;
    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        work(&mut |_| {
            watch();
            if stop == Some(step) {
                std::panic::resume_unwind(Box::new(Killed));
            }
            step += 1;
        });
    }));
    match ran {
        Ok(()) => true,
        Err(killed) if killed.is::<Killed>() => false,
        Err(other) => std::panic::resume_unwind(other),
    }
}

fn limits(most_journals: usize) -> Limits {
    Limits { most_journals, ..Limits::none() }
}

fn run_model(ops: &[Op]) {
    let root = model_root();
    let root = root.path();
    let mut live = Live::new();
    let mut names = 0_u8;
    let total = Rc::<Cell<u64>>::default();
    let mut start = || {
        names += 1;
        Writer::counting(root, names, Rc::clone(&total))
    };
    let mut writers: Vec<Writer> = (0..3).map(|_| start()).collect();
    let (mut reader, mut late_reader) = (Reader::new(root), Reader::new(root));
    let mut stop = None;
    for op in ops {
        match *op {
            Op::Add(writer) => writers[writer as usize % 3].add(&mut live),
            Op::Remove(writer, which, count) => {
                let objects: Vec<_> = live.iter().copied().collect();
                let start = which as usize % objects.len().max(1);
                let end = (start + count as usize).min(objects.len());
                if start < end {
                    writers[writer as usize % 3].remove(&objects[start..end], &mut live);
                }
            }
            Op::Unlink => unlink_dead_segments(root, &live),
            Op::Count(writer) => writers[writer as usize % 3].count(3),
            Op::Touch(writer, page) => writers[writer as usize % 3].touch(page.into()),
            Op::Kill(writer) => {
                writers[writer as usize % 3].kill();
                writers[writer as usize % 3] = start();
            }
            Op::StopAt(step) => stop = Some(step),
            Op::Poll => assert_eq!(reader.poll(), live, "a reader that follows"),
            Op::Checkpoint(writer) => {
                let writer = writer as usize % 3;
                let process = &mut writers[writer];
                let mut watch = || {
                    assert_eq!(reader.poll(), live, "a reader beside a checkpoint");
                    assert_eq!(fresh(root), live, "a new reader beside a checkpoint");
                };
                if !until(stop.take(), &mut watch, |between| {
                    process.checkpoint(between);
                }) {
                    writers[writer].kill();
                    writers[writer] = start();
                }
            }
            Op::Finish(writer) => {
                let writer = writer as usize % 3;
                let process = &mut writers[writer];
                let mut watch = || {
                    assert_eq!(reader.poll(), live, "a reader beside a finisher");
                    assert_eq!(fresh(root), live, "a new reader beside a finisher");
                };
                if !until(stop.take(), &mut watch, |between| {
                    let report =
                        Finisher::new(Paths::new(root)).finish_dead(process, limits(2), between).unwrap();
                    assert!(!report.unfinished, "{report:?}");
                }) {
                    writers[writer].kill();
                    writers[writer] = start();
                }
            }
        }
    }
    for (name, seen) in
        [("follows", reader.poll()), ("came late", late_reader.poll()), ("is new", fresh(root))]
    {
        assert_eq!(seen, live, "a reader that {name}");
    }
    assert_eq!(stored_total(root), total.get(), "totals");
    // All is brought to an end by one more process.
    writers.iter_mut().for_each(Writer::kill);
    let mut last = start();
    Finisher::new(Paths::new(root)).finish_dead(&mut last, limits(0), &mut |_| ()).unwrap();
    last.checkpoint(&mut |_| ());
    for (name, seen) in
        [("follows", reader.poll()), ("came late", late_reader.poll()), ("is new", fresh(root))]
    {
        assert_eq!(seen, live, "after all is merged, a reader that {name}");
    }
    assert_eq!(stored_total(root), total.get(), "totals after all is merged");
    assert_eq!(files_ending(root, ".lock").len(), 1);
    assert_eq!(files_ending(root, ".idx").len(), 1, "{:?}", files_ending(root, ""));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever processes say, remove, write anew, merge, and wherever they are killed.
    #[test]
    fn readers_see_the_model_at_every_step(ops in ops()) {
        run_model(&ops);
    }
}

#[test]
fn totals_of_the_dead_are_kept_when_their_journals_and_copies_go() {
    // Killed at each step of merging and of the checkpoint that folds the totals.
    for stop in 0.. {
        let root = model_root();
        let root = root.path();
        let mut live = Live::new();
        let total = Rc::<Cell<u64>>::default();
        let start = |name| Writer::counting(root, name, Rc::clone(&total));
        let mut dead: Vec<Writer> = (1..=5).map(start).collect();
        for writer in &mut dead {
            (0..8).for_each(|_| writer.add(&mut live));
            writer.count(7);
            let objects: Vec<_> =
                live.iter().copied().filter(|object| object.0.process == writer.id).collect();
            writer.remove(&objects[..30], &mut live);
            writer.count(4);
            writer.kill();
        }
        let mut last = start(6);
        last.count(1);
        // Enough of no use for a checkpoint.
        (0..36).for_each(|_| last.add(&mut live));
        let objects: Vec<_> = live.iter().copied().filter(|object| object.0.process == last.id).collect();
        last.remove(&objects, &mut live);
        unlink_dead_segments(root, &live);
        let mut watch = || assert_eq!(stored_total(root), total.get(), "at step {stop}");
        let finished = until(Some(stop), &mut watch, |between| {
            Finisher::new(Paths::new(root)).finish_dead(&mut last, limits(0), between).unwrap();
            assert!(last.checkpoint(between), "half of it is of no use");
        });
        assert_eq!((stored_total(root), fresh(root)), (total.get(), live.clone()), "killed at step {stop}");
        let mut heir = last;
        if !finished {
            heir.kill();
            heir = start(7);
            Finisher::new(Paths::new(root)).finish_dead(&mut heir, limits(0), &mut |_| ()).unwrap();
        }
        heir.checkpoint(&mut |_| ());
        assert_eq!((stored_total(root), fresh(root)), (total.get(), live), "after step {stop}");
        let scan = hicache_core::inspect::scan(root).unwrap();
        if finished {
            let inherited: Vec<_> =
                scan.processes.iter().filter(|found| !found.inherited.is_empty()).collect();
            assert_eq!(inherited.len(), 1);
            assert_eq!(inherited[0].inherited[&Counter::BackupStored], 55);
            assert!(stop > 20, "only {stop} steps");
            return;
        }
    }
}

#[test]
fn how_a_process_is_set_up_is_kept_in_its_journal_while_it_lives() {
    let root = model_root();
    let root = root.path();
    let set_up = |of: &Writer| {
        let scan = hicache_core::inspect::scan(root).unwrap();
        let process = scan.processes.into_iter().find(|process| process.process == of.id);
        process.and_then(|process| process.setup).and_then(|setup| setup.free_space_floor_bytes)
    };
    let frames = |of: &Writer| {
        let mut count = 0;
        let mut tail = Tail::new(Paths::new(root));
        tail.poll(&mut |frame| count += u64::from(frame.kind == FrameKind::Setup && frame.process == of.id));
        count
    };
    let mut writer = Writer::start(root, 1);
    for floor in [1, 2, 3] {
        let setup = Setup { free_space_floor_bytes: Some(floor), ..Setup::default() };
        writer.say(FrameKind::Setup, 1, &setup.encode());
        (0..20).for_each(|_| writer.count(1));
    }
    assert_eq!((set_up(&writer), frames(&writer)), (Some(3), 3));
    assert!(writer.checkpoint(&mut |_| ()));
    assert_eq!((set_up(&writer), frames(&writer)), (Some(3), 1));
    writer.kill();
    let mut heir = Writer::start(root, 2);
    Finisher::new(Paths::new(root)).finish_dead(&mut heir, limits(0), &mut |_| ()).unwrap();
    assert_eq!((set_up(&writer), frames(&writer)), (None, 0), "how a dead process was set up");
}

#[test]
fn a_journal_takes_disk_blocks_ahead_of_what_it_says() {
    let root = model_root();
    let mut writer = Writer::start(root.path(), 1);
    let mut live = Live::new();
    assert!(writer.journal.as_ref().unwrap().growth(100) >= AHEAD_BYTES);
    let path = Paths::new(root.path()).journal(writer.id, 0);
    for _ in 0..700 {
        writer.count(1);
        let metadata = std::fs::metadata(&path).unwrap();
        assert!(hicache_sys::file::allocated_bytes(&metadata) >= metadata.len() + AHEAD_BYTES);
    }
    writer.add(&mut live);
    writer.journal.take().unwrap().close();
    let metadata = std::fs::metadata(&path).unwrap();
    assert!(metadata.len() > AHEAD_BYTES);
    assert!(hicache_sys::file::allocated_bytes(&metadata) <= metadata.len().next_multiple_of(4096));
}

/// A store of the smallest capacity, with one thread.
fn small(root: &Path) -> Store {
    let (capacity_bytes, io_threads) = (Some(16 << 20), Some(1));
    let options =
        StoreOptions { capacity_bytes, io_threads, keeps_no_house: true, ..StoreOptions::default() };
    Store::open(root, options).unwrap()
}

/// The tiny deployment with each page in one piece.
fn packed_view(store: &Store) -> View {
    store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap()
}

/// Stores `count` pages of a chain of this name.
fn store_pages(store: &Store, chain: &str, count: usize) {
    let memory = Memory::of(&chain_bytes(chain, count));
    let report = backup(&packed_view(store), &keys(chain, count), &memory);
    assert!(report.reason.is_none(), "{:?}", report.reason);
}

fn chain_bytes(chain: &str, count: usize) -> Vec<u8> {
    let number = chain.bytes().fold(7, |sum, byte| sum * 31 + u64::from(byte));
    page_bytes(number, count * 512)
}

/// Which of the pages can be restored, each checked byte by byte.
fn restored(store: &Store, chain: &str, count: usize) -> Vec<bool> {
    let view = packed_view(store);
    let keys: Vec<PageKey> = keys(chain, count);
    let target = Memory::canary(count * 512);
    let report = restore(&view, &keys, &target);
    let (found, expected) = (target.bytes(), chain_bytes(chain, count));
    let is_there = |page: usize| report.outcomes[page] == RestoreOutcome::Restored;
    for page in (0..count).filter(|&page| is_there(page)) {
        let bytes = page * 512..(page + 1) * 512;
        assert!(found[bytes.clone()] == expected[bytes], "page {page} of {chain}");
    }
    (0..count).map(is_there).collect()
}

#[test]
fn a_reader_sees_what_is_stored_beside_a_checkpoint() {
    let root = fast_folder();
    let (writer, reader) = (small(root.path()), small(root.path()));
    let view = packed_view(&reader);
    store_pages(&writer, "old", 5000);
    assert_eq!(view.match_prefix(&keys("old", 5000)).unwrap().pages, 5000);
    packed_view(&writer).clear().unwrap();
    store_pages(&writer, "new", 300);
    let size =
        || files_ending(root.path(), ".idx").iter().map(|path| path.metadata().unwrap().len()).sum::<u64>();
    let before = size();
    assert!(checkpoint(&writer).unwrap());
    assert!(size() < before / 5 && files_ending(root.path(), ".idx").len() == 1, "{before} to {}", size());
    store_pages(&writer, "newer", 20);
    for reader in [&reader, &small(root.path())] {
        assert_eq!(restored(reader, "new", 300), [true; 300]);
        assert_eq!(restored(reader, "newer", 20), [true; 20]);
        assert_eq!(restored(reader, "old", 10), [false; 10]);
    }
    assert!(!checkpoint(&writer).unwrap(), "nothing more can go");
}

/// A root as after the death of processes that each stored one page; every second one said goodbye.
fn root_of_the_dead(count: usize) -> tempfile::TempDir {
    let (alive, dead) = (fast_folder(), fast_folder());
    let mut stores = Vec::new();
    for number in 0..count {
        let store = small(alive.path());
        store_pages(&store, &number.to_string(), 1);
        if number % 2 == 0 {
            store.close();
        }
        stores.push(store);
    }
    copy_tree(alive.path(), dead.path());
    dead
}

#[test]
fn journals_of_a_hundred_dead_processes_become_few() {
    let root = root_of_the_dead(100);
    let total = stored_total(root.path());
    assert!(total >= 50);
    let store = small(root.path());
    let report = finish_dead(&store, Limits::none(), &mut |_| ()).unwrap();
    assert_eq!((report.processes, report.unfinished), (100, false), "{report:?}");
    assert!(files_ending(root.path(), ".idx").len() <= 33, "{report:?}");
    assert_eq!(files_ending(root.path(), ".lock").len(), 1);
    for store in [&store, &small(root.path())] {
        assert!((0..100).all(|number| restored(store, &number.to_string(), 1) == [true]));
    }
    store.close();
    assert_eq!(stored_total(root.path()), total);
    let sealed = hicache_core::inspect::scan(root.path()).unwrap();
    assert!(sealed.namespaces[0].segments.iter().all(|segment| segment.is_sealed));
    assert_eq!(sealed.problems, []);
    let again = finish_dead(&small(root.path()), Limits::none(), &mut |_| ()).unwrap();
    assert_eq!((again.units_told, again.segments_sealed), (0, 0), "{again:?}");
}

/// Files of a process, with length and time of change.
fn files_of(root: &Path, process: ProcessId) -> Vec<(PathBuf, u64, std::time::SystemTime)> {
    let is_its = |path: &Path| path.to_string_lossy().contains(&process.to_string());
    listing(root).into_iter().filter(|(path, ..)| is_its(path)).collect()
}

#[test]
fn finishing_may_be_killed_between_any_two_steps() {
    // Three dead: whole, without its journal, and with leftovers of each kind.
    let (alive, root) = (fast_folder(), fast_folder());
    let stores: Vec<Store> = (0..3).map(|_| small(alive.path())).collect();
    for (number, store) in stores.iter().enumerate() {
        store_pages(store, &number.to_string(), 5);
        store_pages(store, &format!("{number} more"), 3);
    }
    copy_tree(alive.path(), root.path());
    let paths = Paths::new(root.path());
    std::fs::remove_file(paths.journal(stores[1].process(), 0)).unwrap();
    let leaver = stores[2].process();
    std::fs::write(Paths::temporary(&paths.journals(), leaver, 9), "half").unwrap();
    std::fs::write(
        paths.segment(&namespace("r1").fingerprint(), SegmentId { process: leaver, number: 7 }),
        "",
    )
    .unwrap();
    let torn = std::fs::File::options().append(true).open(paths.journal(leaver, 0)).unwrap();
    std::io::Write::write_all(&mut &torn, b"HICFRM01 and no more").unwrap();
    let bystander = small(root.path());
    store_pages(&bystander, "bystander", 2);
    let untouched = files_of(root.path(), bystander.process());

    let steps = fast_folder();
    let mut count = 0;
    let finisher = small(root.path());
    let few = Limits { most_journals: 0, ..Limits::none() };
    let report = finish_dead(&finisher, few, &mut |_| {
        copy_tree(root.path(), &steps.path().join(count.to_string()));
        count += 1;
    });
    let report = report.unwrap();
    assert_eq!((report.processes, report.units_told, report.temporaries_removed), (3, 2, 1), "{report:?}");
    assert_eq!((report.segments_removed, report.journals_merged), (1, 2), "{report:?}");
    assert!(count > 20, "only {count} steps");
    assert_eq!(files_of(root.path(), bystander.process()), untouched);
    copy_tree(root.path(), &steps.path().join(count.to_string()));
    for step in 0..=count {
        let root = steps.path().join(step.to_string());
        let store = small(&root);
        let report = finish_dead(&store, few, &mut |_| ()).unwrap();
        assert!(!report.unfinished, "step {step}: {report:?}");
        for number in 0..3 {
            assert_eq!(restored(&store, &number.to_string(), 5), [true; 5], "step {step}");
            assert_eq!(restored(&store, &format!("{number} more"), 3), [true; 3], "step {step}");
        }
        assert_eq!(restored(&store, "bystander", 2), [true; 2], "step {step}");
        let scan = hicache_core::inspect::scan(&root).unwrap();
        assert_eq!(scan.problems, [], "step {step}");
        let objects: Vec<_> = scan.namespaces[0].objects().map(|object| object.location()).collect();
        let once: std::collections::HashSet<_> = objects.iter().collect();
        assert_eq!((objects.len(), once.len()), (26, 26), "step {step}");
        assert_eq!(files_ending(&root, ".idx").len(), 1, "step {step}");
    }
}

#[test]
fn fifty_lives_and_deaths_leave_few_files() {
    let mut root = fast_folder();
    for cycle in 0..50 {
        let store = small(root.path());
        finish_dead(&store, Limits::within(std::time::Duration::from_secs(60), u64::MAX), &mut |_| ())
            .unwrap();
        store_pages(&store, &cycle.to_string(), 2);
        let next = fast_folder();
        copy_tree(root.path(), next.path());
        root = next;
    }
    let segments = files_ending(root.path(), ".seg").len();
    assert!(segments <= 50 && listing(root.path()).len() <= 200 + segments);
    assert!(files_ending(root.path(), ".idx").len() <= 34 && files_ending(root.path(), ".lock").len() == 1);
    let store = small(root.path());
    assert!((0..50).all(|cycle| restored(&store, &cycle.to_string(), 2) == [true; 2]));
}

#[test]
fn room_past_the_last_unit_of_a_dead_writer_is_given_back() {
    let root = root_of_the_dead(2);
    let unsealed = hicache_core::inspect::scan(root.path()).unwrap();
    let segments = &unsealed.namespaces[0].segments;
    let segment = segments.iter().find(|segment| !segment.is_sealed).expect("a segment of a killed process");
    let path = unsealed.namespaces[0].segment_path(segment.segment);
    let file = hicache_sys::file::open_write(&path, hicache_sys::file::Access::Buffered).unwrap();
    // A unit that was under way, and blocks taken ahead of it.
    hicache_sys::file::write_all(&file, &[9; 100_000], segment.file_bytes).unwrap();
    hicache_sys::file::preallocate(&file, segment.file_bytes, 4 << 20).unwrap();
    let store = small(root.path());
    let report = finish_dead(&store, Limits::none(), &mut |_| ()).unwrap();
    let metadata = file.metadata().unwrap();
    assert!(report.freed_bytes >= 4 << 20, "{report:?}");
    assert!(metadata.len() < segment.file_bytes + 256);
    assert!(hicache_sys::file::allocated_bytes(&metadata) <= metadata.len().next_multiple_of(4096));
    assert!((0..2).all(|number| restored(&store, &number.to_string(), 1) == [true]));
}

#[test]
fn repair_without_any_journal_brings_back_all_that_was_not_removed() {
    let (alive, root) = (fast_folder(), fast_folder());
    let stores: Vec<Store> = (0..3).map(|_| small(alive.path())).collect();
    for (number, store) in stores.iter().enumerate() {
        store_pages(store, &number.to_string(), 6);
    }
    stores[0].close();
    copy_tree(alive.path(), root.path());
    // Removed, and their bytes gone, before the journals that said so were lost.
    let removed = [keys("0", 6)[1], keys("2", 6)[5]];
    for key in &removed {
        let object = object(root.path(), key);
        let file =
            hicache_sys::file::open_write(&object.segment, hicache_sys::file::Access::Buffered).unwrap();
        let len = object.payload.end - object.payload.start;
        hicache_sys::file::punch_hole(&file, object.payload.start, len).unwrap();
    }
    for journal in files_ending(root.path(), ".idx") {
        std::fs::remove_file(journal).unwrap();
    }
    let live = small(root.path());
    store_pages(&live, "live", 2);
    let untouched = files_of(root.path(), live.process());
    let report = repair(root.path()).unwrap();
    assert_eq!((report.processes, report.units_told, report.unfinished), (3, 3, false), "{report:?}");
    assert_eq!(files_of(root.path(), live.process()), untouched);
    let journals = files_ending(root.path(), ".idx");
    let again = repair(root.path()).unwrap();
    assert_eq!((again.units_told, again.segments_sealed, again.journals_merged), (0, 0, 0), "{again:?}");
    assert_eq!(files_ending(root.path(), ".idx"), journals);
    for store in [&live, &small(root.path())] {
        // Asked before anything is read: what is gone is not promised.
        let view = packed_view(store);
        assert_eq!(view.match_prefix(&keys("0", 6)).unwrap().pages, 1);
        assert_eq!(view.match_prefix(&keys("2", 6)).unwrap().pages, 5);
        assert_eq!(restored(store, "0", 6), [true, false, true, true, true, true]);
        assert_eq!(restored(store, "1", 6), [true; 6]);
        assert_eq!(restored(store, "2", 6), [true, true, true, true, true, false]);
        assert_eq!(restored(store, "live", 2), [true; 2]);
    }
}

#[test]
fn repair_moves_what_is_whole_out_of_a_damaged_journal() {
    let (alive, root) = (fast_folder(), fast_folder());
    let store = small(alive.path());
    for chain in ["a", "b", "c"] {
        store_pages(&store, chain, 4);
    }
    copy_tree(alive.path(), root.path());
    let journal = files_ending(root.path(), ".idx").remove(0);
    flip(&journal, 120, 3);
    let report = repair(root.path()).unwrap();
    assert_eq!((report.units_told, report.journals_merged), (1, 1), "{report:?}");
    assert_eq!(hicache_core::inspect::scan(root.path()).unwrap().problems, []);
    let store = small(root.path());
    assert!(["a", "b", "c"].iter().all(|chain| restored(&store, chain, 4) == [true; 4]));
}

#[test]
fn a_journal_that_moves_in_the_middle_of_a_poll_is_not_missed() {
    // Merged, and written anew, when the reader has read the finisher's journal and not yet the dead one's.
    for (finisher, dead) in [(1_u8, 2_u8), (2, 1)] {
        for is_followed in [true, false] {
            let root = model_root();
            let root = root.path();
            let mut live = Live::new();
            let mut writers = [Writer::start(root, finisher), Writer::start(root, dead)];
            let mut reader = Reader::new(root);
            if is_followed {
                reader.poll();
            }
            writers.iter_mut().for_each(|writer| writer.add(&mut live));
            writers[1].add(&mut live);
            writers[1].kill();
            let mut seen = 0;
            let [finisher, _] = &mut writers;
            let report = reader.tail.poll(&mut |_| {
                if seen == 0 {
                    Finisher::new(Paths::new(root)).finish_dead(finisher, limits(0), &mut |_| ()).unwrap();
                }
                seen += 1;
            });
            assert!(report.complete && report.journals_gone, "{report:?}");
            assert_eq!(seen, 3, "followed before: {is_followed}");
        }
    }
}

#[test]
fn totals_that_two_journals_hold_count_once() {
    // The first finisher is killed while it merges; the second one merges the same, and lives on beside an heir.
    let root = model_root();
    let root = root.path();
    let total = Rc::<Cell<u64>>::default();
    let start = |name| Writer::counting(root, name, Rc::clone(&total));
    let mut live = Live::new();
    let mut dead = start(1);
    dead.count(100);
    dead.add(&mut live);
    dead.kill();
    let mut first = start(2);
    let copied = until(Some(6), &mut || (), |between| {
        Finisher::new(Paths::new(root)).finish_dead(&mut first, limits(0), between).unwrap();
    });
    assert!(!copied);
    let second = &mut start(3);
    // The first one's own journal is only finished, not merged; the dead one's is.
    first.count(1);
    let merge = |finisher: &mut Writer| {
        Finisher::new(Paths::new(root)).finish_dead(finisher, limits(0), &mut |_| ()).unwrap()
    };
    assert_eq!(merge(second).journals_merged, 1);
    for writer in [&mut first, second] {
        (0..30).for_each(|_| writer.add(&mut live));
        let objects: Vec<_> = live.iter().copied().filter(|object| object.0.process == writer.id).collect();
        writer.remove(&objects, &mut live);
        unlink_dead_segments(root, &live);
        assert!(writer.checkpoint(&mut |_| ()));
        assert_eq!(stored_total(root), total.get());
    }
    assert_eq!(fresh(root), live);
}
