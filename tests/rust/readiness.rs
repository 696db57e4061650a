//! What `match` promises, `restore` delivers; what failed is missing until it is stored again; a root needs no
//! file but its segments.

use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hicache_core::store::counters::Counter;
use hicache_core::store::io::IoCall;
use hicache_core::{
    BackupOutcome, ChainStart, Component, DType, ErrorKind, HitPolicy, LayoutName, Match, PageKey, Pool,
    PoolKind, PoolMemory, RestoreOptions, RestoreOutcome, Store, View, ViewOptions, ViewPool,
};

use crate::support::{
    CANARY, Memory, backup, contiguous, counter, errno, files_ending, flip, hooked, keys, lend, namespace,
    object, open, page_bytes, restore, tile, tiny,
};

use BackupOutcome::{Present, Refused, Stored};
use RestoreOutcome::{Absent, Damaged, Error, Evicted, Foreign, Late, Restored};

fn view(store: &Store) -> View {
    store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap()
}

/// A closed root that holds `count` pages, with their keys and bytes.
fn filled(root: &Path, count: usize) -> (Vec<PageKey>, Vec<u8>) {
    let (keys, bytes) = (keys("filled", count), page_bytes(8, count * 512));
    assert_eq!(backup(&view(&open(root)), &keys, &Memory::of(&bytes)).outcomes, vec![Stored; count]);
    (keys, bytes)
}

/// Outcomes of a restore whose restored pages are exact, and whose absent pages are untouched.
fn outcomes(view: &View, keys: &[PageKey], bytes: &[u8]) -> Vec<RestoreOutcome> {
    let target = Memory::canary(bytes.len());
    let outcomes = restore(view, keys, &target).outcomes;
    for ((landed, page), outcome) in target.bytes().chunks(512).zip(bytes.chunks(512)).zip(&outcomes) {
        match outcome {
            Restored => assert!(landed == page, "a restored page is exact"),
            Absent => assert!(landed.iter().all(|&byte| byte == CANARY)),
            _ => {}
        }
    }
    outcomes
}

fn pages(view: &View, keys: &[PageKey]) -> usize {
    view.match_prefix(keys).unwrap().pages
}

#[test]
fn case_d12_a_page_that_failed_is_missing_until_it_is_stored_again() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = filled(root.path(), 4);
    let third = object(root.path(), &keys[2]);
    flip(&third.segment, third.payload.start + 100, 0);
    let (store, other) = (open(root.path()), open(root.path()));
    let (here, there) = (view(&store), view(&other));
    assert_eq!((pages(&here, &keys), pages(&there, &keys)), (4, 4));
    assert_eq!(outcomes(&here, &keys, &bytes), [Restored, Restored, Damaged, Restored]);
    for _ in 0..10 {
        assert_eq!((pages(&here, &keys), pages(&there, &keys)), (2, 2));
    }
    assert_eq!(here.match_prefix(&keys).unwrap().limited_by.unwrap(), "kv: page 2 in quarantine (damaged)");
    let late = open(root.path());
    assert_eq!(pages(&view(&late), &keys), 2);
    assert_eq!(outcomes(&there, &keys, &bytes), [Restored, Restored, Absent, Restored]);
    // Stored again: there for all, whoever asked when.
    assert_eq!(backup(&there, &keys, &Memory::of(&bytes)).outcomes, [Present, Present, Stored, Present]);
    for view in [&here, &there, &view(&late), &view(&open(root.path()))] {
        assert_eq!(pages(view, &keys), 4);
        assert_eq!(outcomes(view, &keys, &bytes), [Restored; 4]);
    }
}

#[test]
fn case_d12_pages_of_a_deleted_segment_are_missing_until_they_are_stored_again() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = filled(root.path(), 4);
    let (store, other) = (open(root.path()), open(root.path()));
    let (here, there) = (view(&store), view(&other));
    std::fs::remove_file(object(root.path(), &keys[0]).segment).unwrap();
    assert_eq!(outcomes(&here, &keys, &bytes), [Error; 4]);
    assert_eq!(outcomes(&view(&open(root.path())), &keys, &bytes), [Absent; 4]);
    for _ in 0..10 {
        assert_eq!((pages(&here, &keys), pages(&there, &keys)), (0, 0));
    }
    assert_eq!(backup(&here, &keys, &Memory::of(&bytes)).outcomes, [Stored; 4]);
    for view in [&here, &there, &view(&open(root.path()))] {
        assert_eq!(pages(view, &keys), 4);
        assert_eq!(outcomes(view, &keys, &bytes), [Restored; 4]);
    }
}

#[test]
fn case_d16_3_a_segment_of_another_length_gives_no_wrong_page() {
    let page_end = 4096 + 512;
    for (len, expected) in [
        (0, [Damaged; 2]),
        (1, [Damaged; 2]),
        (511, [Damaged; 2]),
        (4096, [Damaged; 2]),
        (page_end - 1, [Damaged; 2]),
        // The directory comes behind the pages: without it no page can be told.
        (page_end + 512, [Damaged; 2]),
        (1 << 20, [Restored; 2]),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (keys, bytes) = filled(root.path(), 2);
        let segment = object(root.path(), &keys[0]).segment;
        let file = std::fs::File::options().write(true).open(&segment).unwrap();
        file.set_len(len).unwrap();
        let store = open(root.path());
        let view = view(&store);
        assert_eq!(outcomes(&view, &keys, &bytes), expected, "{len} bytes");
        let left = expected.iter().filter(|&&outcome| outcome == Restored).count();
        assert_eq!(pages(&view, &keys), left);
        backup(&view, &keys, &Memory::of(&bytes));
        assert_eq!(outcomes(&view, &keys, &bytes), [Restored; 2], "healed after {len} bytes");
    }
}

/// A cut behind the entry of the first page costs the second one only.
#[test]
fn case_d16_3_a_cut_directory_costs_the_entries_behind_the_cut() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = filled(root.path(), 3);
    let first = object(root.path(), &keys[0]);
    std::fs::File::options().write(true).open(&first.segment).unwrap().set_len(first.entry.end).unwrap();
    let store = open(root.path());
    assert_eq!(outcomes(&view(&store), &keys, &bytes), [Restored, Damaged, Damaged]);
}

#[test]
fn case_d17_a_flipped_bit_costs_its_page() {
    for verify_in in
        ["payload start", "payload middle", "payload end", "entry start", "entry middle", "entry end"]
    {
        let root = tempfile::tempdir().unwrap();
        let (keys, bytes) = filled(root.path(), 3);
        let second = object(root.path(), &keys[1]);
        let range = if verify_in.starts_with("payload") { &second.payload } else { &second.entry };
        let at = match verify_in.split(' ').nth(1) {
            Some("start") => range.start,
            Some("middle") => range.start + (range.end - range.start) / 2,
            _ => range.end - 1,
        };
        flip(&second.segment, at, 0);
        let store = open(root.path());
        let view = view(&store);
        assert_eq!(outcomes(&view, &keys, &bytes), [Restored, Damaged, Restored], "{verify_in}");
        assert_eq!(counter(&store, Counter::RestoreDamaged), 1);
        assert_eq!(counter(&store, Counter::Quarantined), 1);
    }
}

#[test]
fn case_d17_swapped_segments_of_equal_shape_are_both_refused() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (keys("one", 2), keys("two", 2));
    let bytes = page_bytes(1, 2 * 512);
    for keys in [&one, &two] {
        assert_eq!(backup(&view(&open(root.path())), keys, &Memory::of(&bytes)).outcomes, [Stored; 2]);
    }
    let (first, second) = (object(root.path(), &one[0]).segment, object(root.path(), &two[0]).segment);
    assert_eq!(std::fs::metadata(&first).unwrap().len(), std::fs::metadata(&second).unwrap().len());
    let aside = root.path().join("aside");
    std::fs::rename(&first, &aside).unwrap();
    std::fs::rename(&second, &first).unwrap();
    std::fs::rename(&aside, &second).unwrap();
    let store = open(root.path());
    let view = view(&store);
    // The bytes are even the same ones, and their checksums right: for other keys.
    for keys in [&one, &two] {
        assert_eq!(outcomes(&view, keys, &bytes), [Foreign; 2]);
        assert_eq!(pages(&view, keys), 0);
    }
    assert_eq!(counter(&store, Counter::RestoreForeign), 4);
}

/// Without journals, a segment under another segment's name gives nothing either.
#[test]
fn case_d17_a_renamed_segment_is_not_taken_for_the_other() {
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = filled(root.path(), 2);
    let segment = object(root.path(), &keys[0]).segment;
    std::fs::rename(&segment, segment.with_file_name(format!("{}-0.seg", "ab".repeat(16)))).unwrap();
    files_ending(root.path(), ".idx").into_iter().for_each(|journal| std::fs::remove_file(journal).unwrap());
    assert_eq!(outcomes(&view(&open(root.path())), &keys, &bytes), [Absent; 2]);
}

#[test]
fn case_d19_a_root_needs_nothing_but_its_segments() {
    let names = [".idx", ".lock", "manifest.json", ".json", "root.json"];
    for lost in names.iter().map(|name| vec![*name]).chain([names.to_vec()]) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let (keys, bytes) = filled(&root, 8);
        for end in &lost {
            files_ending(&root, end).into_iter().for_each(|file| std::fs::remove_file(file).unwrap());
        }
        // In another place, opened by another process identity.
        let moved = folder.path().join("moved");
        std::fs::rename(&root, &moved).unwrap();
        let read_only = hicache_core::StoreOptions { read_only: true, ..Default::default() };
        let looked_at = Store::open(&moved, read_only).unwrap();
        assert_eq!(pages(&view(&looked_at), &keys), 8, "read only, without {lost:?}");
        drop(looked_at);
        let store = open(&moved);
        let view = view(&store);
        assert_eq!(pages(&view, &keys), 8, "without {lost:?}");
        assert_eq!(outcomes(&view, &keys, &bytes), [Restored; 8], "without {lost:?}");
        assert_eq!(counter(&store, Counter::SegmentsRebuilt), u64::from(lost.contains(&".idx")));
        assert_eq!(backup(&view, &keys, &Memory::of(&bytes)).outcomes, [Present; 8]);
    }
}

/// A killed writer seals nothing, and its journal may be gone as well.
#[test]
fn case_d19_what_a_killed_writer_published_is_found_again() {
    for lose_journal in [false, true] {
        let (root, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = open(root.path());
        let (keys, bytes) = (keys("killed", 8), page_bytes(1, 8 * 512));
        for (keys, bytes) in keys.chunks(3).zip(bytes.chunks(3 * 512)) {
            backup(&view(&store), keys, &Memory::of(bytes));
        }
        crate::support::copy_tree(root.path(), copy.path());
        if lose_journal {
            files_ending(copy.path(), ".idx")
                .into_iter()
                .for_each(|file| std::fs::remove_file(file).unwrap());
        }
        assert_eq!(outcomes(&view(&open(copy.path())), &keys, &bytes), [Restored; 8]);
    }
}

/// One of each outcome, caused on purpose.
#[test]
fn case_d33_each_outcome_has_a_counter_of_its_own() {
    const NOTHING: u8 = 0;
    const EIO: u8 = 1;
    const CLEAR: u8 = 2;
    let root = tempfile::tempdir().unwrap();
    let (keys, bytes) = filled(root.path(), 5);
    let [damaged, other_key, unreadable] = [1, 2, 3].map(|page: usize| object(root.path(), &keys[page]));
    flip(&damaged.segment, damaged.payload.end - 1, 7);
    {
        // The entry of page 4 in the place of page 2's: whole, and of another key.
        use std::os::unix::fs::FileExt;
        let last = object(root.path(), &keys[4]);
        let file = std::fs::File::options().read(true).write(true).open(&last.segment).unwrap();
        let mut entry = vec![0; (last.entry.end - last.entry.start) as usize];
        file.read_exact_at(&mut entry, last.entry.start).unwrap();
        file.write_all_at(&entry, other_key.entry.start).unwrap();
    }
    // A second namespace, to be cleared while it is read.
    let cleared = |store: &Store| {
        store.view(namespace("cleared"), vec![contiguous(tiny())], ViewOptions::default()).unwrap()
    };
    let clearing = open(root.path());
    let clearing_view = Arc::new(cleared(&clearing));
    let one_page = page_bytes(1, 512);
    assert_eq!(backup(&clearing_view, &keys[..1], &Memory::of(&one_page)).outcomes, [Stored]);

    let mode = Arc::new(AtomicU8::new(NOTHING));
    let hook = {
        let (mode, clearing_view) = (Arc::clone(&mode), Mutex::new(Arc::clone(&clearing_view)));
        move |call: IoCall<'_>| match mode.load(Ordering::SeqCst) {
            EIO if !call.is_write && call.offset == unreadable.payload.start => Err(errno(5)),
            CLEAR if !call.is_write => {
                mode.store(NOTHING, Ordering::SeqCst);
                clearing_view.lock().unwrap().clear().unwrap();
                Ok(())
            }
            _ => Ok(()),
        }
    };
    let store = Store::open(root.path(), hooked(hook)).unwrap();
    let view = view(&store);
    let one = |page: usize| outcomes(&view, &keys[page..page + 1], &bytes[page * 512..][..512]);
    assert_eq!(one(0), [Restored]);
    assert_eq!(one(1), [Damaged]);
    assert_eq!(one(2), [Foreign]);
    mode.store(EIO, Ordering::SeqCst);
    assert_eq!(one(3), [Error]);
    mode.store(CLEAR, Ordering::SeqCst);
    assert_eq!(outcomes(&cleared(&store), &keys[..1], &one_page), [Evicted]);
    assert_eq!(mode.load(Ordering::SeqCst), NOTHING, "cleared while it was read");
    assert_eq!(outcomes(&view, &crate::support::keys("never stored", 1), &one_page), [Absent]);
    let past = Instant::now().checked_sub(Duration::from_secs(1));
    let past = RestoreOptions { deadline: past, ..RestoreOptions::default() };
    let late = view.restore(&keys[..1], lend(&Memory::canary(512), &[0]), past).unwrap();
    assert_eq!(late.outcomes, [Late]);
    // One page larger than the root's capacity of 64 MiB.
    let pool =
        Pool::new("huge", PoolKind::State, DType::UInt8, None, vec![Component::per_page("x", 65 << 20)]);
    let huge = ViewPool::new(pool.unwrap(), tile((0, 1), (0, 1)), LayoutName::PageFirst);
    let huge = store.view(namespace("r1"), vec![huge], ViewOptions::default()).unwrap();
    let refused = backup(&huge, &keys[..1], &Memory::canary(65 << 20));
    assert_eq!(refused.outcomes, [Refused]);
    assert!(refused.reason.unwrap().contains("capacity of 67108864 bytes"));

    let ones = [
        Counter::RestoreDamaged,
        Counter::RestoreForeign,
        Counter::RestoreError,
        Counter::RestoreEvicted,
        Counter::RestoreAbsent,
        Counter::RestoreLate,
        Counter::BackupRefusedCapacity,
    ];
    let check = |restored: u64| {
        for of in ones {
            assert_eq!(counter(&store, of), 1, "{}", of.name());
        }
        assert_eq!(counter(&store, Counter::RestoreRestored), restored);
        assert_eq!(counter(&store, Counter::RestoreBytes), 512 * restored);
        assert_eq!(counter(&store, Counter::Quarantined), 3);
    };
    check(1);
    for _ in 0..100 {
        assert_eq!(one(0), [Restored]);
    }
    check(101);
}

/// A pool of one blob for each page.
fn blob(name: &str, policy: HitPolicy, required: bool) -> ViewPool {
    let pool =
        Pool::new(name, PoolKind::State, DType::UInt8, None, vec![Component::per_page("x", 32)]).unwrap();
    let pool = ViewPool::new(pool, tile((0, 1), (0, 1)), LayoutName::PageFirst);
    ViewPool { policy, required, ..pool }
}

/// Stores page `i` of pool `number` for each `(number, pages)`, all under the same keys.
fn store_some(view: &View, keys: &[PageKey], held: &[&[usize]]) {
    let memory: Vec<Memory> = (0..held.len())
        .map(|pool| Memory::of(&page_bytes(pool as u64, keys.len() * view.page_bytes(pool) as usize)))
        .collect();
    let slots: Vec<Vec<i64>> = held
        .iter()
        .map(|held| (0..keys.len()).map(|page| if held.contains(&page) { page as i64 } else { -1 }).collect())
        .collect();
    let lent = memory
        .iter()
        .zip(&slots)
        .map(|(memory, slots)| PoolMemory { regions: vec![&memory.region], slots })
        .collect();
    view.backup(keys, lent, Default::default()).unwrap();
}

fn state(name: &str) -> ViewPool {
    blob(name, HitPolicy::TrailingPages(1), true)
}

fn verdicts(found: &Match) -> Vec<(&str, usize)> {
    found.pools.iter().map(|pool| (pool.name.as_str(), pool.pages)).collect()
}

#[test]
fn case_d01_a_prefix_ends_where_every_required_pool_can_be_restored() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let keys = keys("hybrid", 6);
    let pools = || vec![contiguous(tiny()), state("state"), state("idx")];
    let view = store.view(namespace("r1"), pools(), ViewOptions::default()).unwrap();
    // Legal lengths: all of kv, 2 and 5 of state, 2 and 4 of idx.
    store_some(&view, &keys, &[&[0, 1, 2, 3, 4, 5], &[1, 4], &[1, 3]]);
    let found = view.match_prefix(&keys).unwrap();
    assert_eq!(found.pages, 2);
    assert_eq!(found.legal(), [2]);
    assert_eq!(found.limited_by.as_deref(), Some("idx: no longer prefix has its last 1 pages"));
    assert_eq!(verdicts(&found), [("kv", 6), ("state", 5), ("idx", 4)]);

    // Any two of the pools alone reach further.
    for (pools, expected) in [
        (vec![contiguous(tiny())], 6),
        (vec![contiguous(tiny()), state("state")], 5),
        (vec![contiguous(tiny()), state("idx")], 4),
        (vec![contiguous(tiny()), state("state"), ViewPool { required: false, ..state("idx") }], 5),
    ] {
        let view = store.view(namespace("r1"), pools, ViewOptions::default()).unwrap();
        assert_eq!(view.match_prefix(&keys).unwrap().pages, expected);
    }

    // The idx page goes between match and restore: its page is missing as a whole.
    let idx = crate::support::objects(root.path())
        .into_iter()
        .find(|object| object.key == keys[1] && object.form.pool == state("idx").pool.fingerprint());
    let idx = idx.unwrap();
    flip(&idx.segment, idx.payload.start, 0);
    let memory = [512, 32, 32].map(|bytes| Memory::canary(2 * bytes));
    let slots: [&[i64]; 3] = [&[0, 1], &[-1, 1], &[-1, 1]];
    let lent =
        memory.iter().zip(slots).map(|(memory, slots)| PoolMemory { regions: vec![&memory.region], slots });
    let report = view.restore(&keys[..2], lent.collect(), RestoreOptions::default()).unwrap();
    assert_eq!(report.outcomes, [Restored, Damaged]);
    assert_eq!(report.bytes, 512);
    assert!(memory[1].bytes()[..32].iter().all(|&byte| byte == CANARY), "a slot that was not asked for");
    let found = view.match_prefix(&keys).unwrap();
    assert_eq!((found.pages, found.legal()), (0, vec![]));
    // A page that one pool lacks is not read in the others either.
    let kv = Memory::canary(2 * 512);
    let rest = [32, 32].map(|bytes| Memory::canary(2 * bytes));
    let lent = [&kv, &rest[0], &rest[1]]
        .into_iter()
        .zip(slots)
        .map(|(memory, slots)| PoolMemory { regions: vec![&memory.region], slots });
    let report = view.restore(&keys[..2], lent.collect(), RestoreOptions::default()).unwrap();
    assert_eq!(report.outcomes, [Restored, Absent]);
    assert!(kv.bytes()[512..].iter().all(|&byte| byte == CANARY));
}

#[test]
fn a_window_needs_its_last_pages_only() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let keys = keys("window", 8);
    let window = |pages| blob("swa", HitPolicy::TrailingPages(pages), true);
    let with = |pages| {
        store.view(namespace("r1"), vec![contiguous(tiny()), window(pages)], ViewOptions::default()).unwrap()
    };
    store_some(&with(2), &keys, &[&[0, 1, 2, 3, 4, 5, 6], &[0, 2, 3, 4, 7]]);
    for (pages, legal) in [
        (1, vec![1, 3, 4, 5]),
        // A prefix shorter than the window needs all of what there is.
        (2, vec![1, 4, 5]),
        (3, vec![1, 5]),
        (4, vec![1]),
        (100, vec![1]),
    ] {
        let found = with(pages).match_prefix(&keys).unwrap();
        assert_eq!(found.legal(), legal, "a window of {pages}");
        assert_eq!(found.pages, *legal.last().unwrap() as usize);
        let expected = format!("swa: no longer prefix has its last {pages} pages");
        assert_eq!(found.limited_by, Some(expected));
    }
    // Where every page of the bound is legal, the pool that set the bound is named.
    let kv = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
    assert_eq!(kv.match_prefix(&keys).unwrap().limited_by.as_deref(), Some("kv: page 7 absent"));
    assert_eq!(kv.match_prefix(&keys[..7]).unwrap().limited_by, None);
    assert_eq!(kv.match_prefix(&[]).unwrap().pages, 0);
}

#[test]
fn groups_count_whole_or_not_at_all() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let keys = keys("groups", 9);
    let groups = |block_pages, group_pages, required| {
        let pool = blob("blocks", HitPolicy::BlockGroups { block_pages, group_pages }, required);
        store.view(namespace("r1"), vec![contiguous(tiny()), pool], ViewOptions::default())
    };
    // Blocks of three pages, the last two of each are the group: the third group lacks a page.
    store_some(&groups(3, 2, true).unwrap(), &keys, &[&[0, 1, 2, 3, 4, 5, 6, 7, 8], &[1, 2, 4, 5, 7]]);
    let found = groups(3, 2, true).unwrap().match_prefix(&keys).unwrap();
    assert_eq!((found.pages, found.legal()), (8, (1..=8).collect()));
    assert_eq!(found.limited_by.as_deref(), Some("blocks: the block after page 6 lacks its group"));
    assert_eq!(groups(3, 3, true).unwrap().match_prefix(&keys).unwrap().pages, 2);
    let optional = groups(3, 3, false).unwrap().match_prefix(&keys).unwrap();
    assert_eq!((optional.pages, optional.limited_by.as_deref()), (9, None));
    assert_eq!(verdicts(&optional), [("kv", 9), ("blocks", 0)]);
    for (block_pages, group_pages) in [(2, 3), (0, 1), (1, 0)] {
        let error = groups(block_pages, group_pages, true).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
}

#[test]
fn optional_pools_never_limit_a_prefix() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let keys = keys("optional", 4);
    let optional = [
        HitPolicy::AllPages,
        HitPolicy::TrailingPages(2),
        HitPolicy::BlockGroups { block_pages: 1, group_pages: 1 },
    ];
    for policy in optional {
        let pools = vec![contiguous(tiny()), blob("extra", policy, false)];
        let view = store.view(namespace("r1"), pools, ViewOptions::default()).unwrap();
        store_some(&view, &keys, &[&[0, 1, 2, 3], &[]]);
        let found = view.match_prefix(&keys).unwrap();
        assert_eq!((found.pages, found.limited_by.as_deref()), (4, None), "{policy}");
        assert_eq!(verdicts(&found), [("kv", 4), ("extra", 0)]);
        assert_eq!(found.legal(), [1, 2, 3, 4]);
    }
}

/// A page of which a call gives or wants nothing is neither there nor missing.
#[test]
fn a_page_without_a_slot_is_skipped() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let view = view(&store);
    let (keys, bytes) = (keys("skipped", 3), page_bytes(1, 3 * 512));
    let source = Memory::of(&bytes);
    let start = ChainStart { parent: None, depth: Some(0) };
    let report = view.backup(&keys, lend(&source, &[0, -1, 2]), start).unwrap();
    assert_eq!(report.outcomes, [Stored, BackupOutcome::Skipped, Stored]);
    assert_eq!(pages(&view, &keys), 1);
    let target = Memory::canary(3 * 512);
    let report = view.restore(&keys, lend(&target, &[-1, -1, 2]), RestoreOptions::default()).unwrap();
    assert_eq!(report.outcomes, [RestoreOutcome::Skipped, RestoreOutcome::Skipped, Restored]);
    assert_eq!(report.bytes, 512);
    let landed = target.bytes();
    assert!(landed[..1024].iter().all(|&byte| byte == CANARY) && landed[1024..] == bytes[1024..]);
    assert_eq!(counter(&store, Counter::BackupStored), 2);
    assert_eq!(counter(&store, Counter::RestoreRestored), 1);
    assert_eq!(counter(&store, Counter::RestoreAbsent), 0);
}
