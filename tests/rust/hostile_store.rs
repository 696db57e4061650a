//! Damage of a store never gives a wrong byte and never a panic, and costs no more than what it touched.
//!
//! `HICACHE_HOSTILE_CASES` sets how many damages are tried, `HICACHE_HOSTILE_SEED` which ones, and
//! `HICACHE_HOSTILE_CASE` runs a single one of them.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use hicache_core::format::directory::{self, Directory, DirectoryHeader, Entry, Parent, Run};
use hicache_core::format::form::{Codec, Form};
use hicache_core::format::frame::{
    self, AddRun, AddUnit, Frame, FrameKind, Gone, Location, Reason, Step, short_key,
};
use hicache_core::format::root::{RootDescription, decode_generation, encode_generation};
use hicache_core::format::segment::{Seal, SegmentHeader};
use hicache_core::format::{Encoder, ProcessId, SegmentId, checksum};
use hicache_core::{
    BackupOutcome, ChainStart, Component, DType, LayoutName, PageKey, Pool, PoolKind, PoolMemory,
    RestoreOptions, RestoreOutcome, Store, StoreOptions, View, ViewOptions, ViewPool,
};
use proptest::prelude::*;

use crate::support::{
    CANARY, Memory, contiguous, copy_tree, fast_folder, flip, keys, listing, namespace, object, objects,
    page_bytes, tile, tiny,
};

/// A small generator: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

fn number_from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}")))
}

/// Pages of three checksum blocks of 8 KiB.
fn big() -> ViewPool {
    let pool = Pool::new("big", PoolKind::Indexer, DType::UInt8, None, vec![Component::per_token("x", 2048)]);
    ViewPool::new(pool.unwrap(), tile((0, 3), (0, 1)), LayoutName::PageFirstDirect)
}

/// One object of the template that must come back unless it was touched.
struct Page {
    /// Which of [`views`] has it.
    view: usize,
    key: PageKey,
    bytes: Vec<u8>,
    segment: PathBuf,
    entry: Range<u64>,
    payload: Range<u64>,
}

/// A store as several killed processes left it, in memory.
struct Template {
    files: Vec<(PathBuf, Vec<u8>)>,
    pages: Vec<Page>,
    /// For each view: keys that must never come back (cleared, or in quarantine).
    gone: [Vec<PageKey>; 3],
}

/// The views of one store: the small pool, the big pool, and another namespace with the keys of the first.
fn views(store: &Store, zstd_level: Option<i32>) -> [View; 3] {
    let options = ViewOptions { zstd_level };
    [("r1", tiny()), ("r1", big()), ("r2", tiny())]
        .map(|(revision, pool)| store.view(namespace(revision), vec![contiguous(pool)], options).unwrap())
}

fn options(read_only: bool) -> StoreOptions {
    StoreOptions { capacity_bytes: Some(64 << 20), io_threads: Some(1), read_only, ..StoreOptions::default() }
}

/// Bytes of page `number` that do not all shrink the same way.
fn mixed_bytes(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = page_bytes(number, len);
    if number.is_multiple_of(3) {
        bytes.iter_mut().for_each(|byte| *byte &= 3);
    }
    bytes
}

fn store_pages(view: &View, keys: &[PageKey], pages: &[Vec<u8>], start: ChainStart) -> Vec<BackupOutcome> {
    let memory = Memory::of(&pages.concat());
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    let lent = vec![PoolMemory { regions: vec![&memory.region], slots: &slots }];
    view.backup(keys, lent, start).unwrap().outcomes
}

impl Template {
    fn make() -> Template {
        let folder = fast_folder();
        let root = folder.path();
        // What a process does on the side would depend on how long this takes.
        let open = || Store::open(root, StoreOptions { keeps_no_house: true, ..options(false) }).unwrap();
        let (first, second, third) = (open(), open(), open());
        let mut stored: Vec<(usize, PageKey, Vec<u8>)> = Vec::new();
        let mut put = |views: &[View; 3], view: usize, keys: &[PageKey], chain: &[PageKey]| {
            let depth = chain.iter().position(|key| *key == keys[0]).unwrap();
            let parent = depth.checked_sub(1).map(|before| chain[before]);
            let start = ChainStart { parent, depth: Some(depth as u32) };
            let pages: Vec<Vec<u8>> = keys
                .iter()
                .map(|key| {
                    let number = u64::from_le_bytes(key.0[..8].try_into().unwrap()) ^ view as u64;
                    mixed_bytes(number, views[view].page_bytes(0) as usize)
                })
                .collect();
            assert_eq!(
                store_pages(&views[view], keys, &pages, start),
                vec![BackupOutcome::Stored; keys.len()]
            );
            stored.extend(keys.iter().zip(pages).map(|(key, bytes)| (view, *key, bytes)));
        };

        // A writer that lived through a clear, and left a segment that is not sealed.
        let cleared = keys("cleared", 3);
        let first_views = views(&first, None);
        put(&first_views, 0, &cleared, &cleared);
        let second_views = views(&second, None);
        assert_eq!(second_views[0].clear().unwrap(), 3);
        // A writer that closed, so that its segments are sealed.
        let (one, two) = (keys("one", 12), keys("two", 10));
        put(&second_views, 0, &one[..5], &one);
        put(&second_views, 1, &one[..3], &one);
        put(&second_views, 0, &one[5..9], &one);
        put(&second_views, 0, &one[9..], &one);
        put(&second_views, 2, &one[..4], &one);
        second.close();
        // A writer that compresses, finds a damaged page, and is killed.
        let third_views = views(&third, Some(1));
        put(&third_views, 0, &two[..6], &two);
        put(&third_views, 1, &two[..3], &two);
        put(&third_views, 0, &two[6..], &two);
        let lost = two[9];
        let lost_object = object(root, &lost);
        flip(&lost_object.segment, lost_object.payload.start, 3);
        let outcomes = restore_pages(&third_views[0], &[lost]).0;
        assert_eq!(outcomes, [RestoreOutcome::Damaged]);

        let objects = objects(root);
        let copy = fast_folder();
        copy_tree(root, copy.path());
        let gone = [[&cleared[..], &[lost]].concat(), Vec::new(), Vec::new()];
        let view_of = |object: &crate::support::Object| {
            let fingerprint = &second_views[2].fingerprint().to_string();
            match (object.segment.to_string_lossy().contains(fingerprint), object.form.page_bytes) {
                (true, _) => 2,
                (false, 512) => 0,
                (false, _) => 1,
            }
        };
        let pages = stored
            .into_iter()
            .filter(|(view, key, _)| !gone[*view].contains(key))
            .map(|(view, key, bytes)| {
                let found: Vec<_> =
                    objects.iter().filter(|object| object.key == key && view_of(object) == view).collect();
                let [object] = found[..] else { panic!("{} objects of {key}", found.len()) };
                let segment = object.segment.strip_prefix(root).unwrap().to_owned();
                Page {
                    view,
                    key,
                    bytes,
                    segment,
                    entry: object.entry.clone(),
                    payload: object.payload.clone(),
                }
            })
            .collect();
        let files = listing(copy.path())
            .into_iter()
            .filter(|(path, ..)| copy.path().join(path).is_file())
            .map(|(path, ..)| (path.clone(), std::fs::read(copy.path().join(&path)).unwrap()))
            .collect();
        Template { files, pages, gone }
    }

    /// Writes the whole store to `root` anew.
    fn write(&self, root: &Path) {
        let _ = std::fs::remove_dir_all(root);
        for (path, bytes) in &self.files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
    }

    /// Keys asked of view `number`: those that live, then those that must not.
    fn keys(&self, number: usize) -> Vec<PageKey> {
        let living = self.pages.iter().filter(|page| page.view == number).map(|page| page.key);
        living.chain(self.gone[number].iter().copied()).collect()
    }
}

/// Outcome of each page, and the memory afterwards.
fn restore_pages(view: &View, keys: &[PageKey]) -> (Vec<RestoreOutcome>, Vec<u8>) {
    let memory = Memory::canary(keys.len() * view.page_bytes(0) as usize);
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    let lent = vec![PoolMemory { regions: vec![&memory.region], slots: &slots }];
    let report = view.restore(keys, lent, RestoreOptions::default()).unwrap();
    (report.outcomes, memory.bytes())
}

/// One change of one file.
#[derive(Debug)]
struct Damage {
    file: PathBuf,
    what: String,
    /// Bytes of the file that no longer are what was written; the length of the file for those behind its end.
    touched: Range<u64>,
    /// What the file holds now; `None` when it is gone.
    bytes: Option<Vec<u8>>,
}

impl Damage {
    fn choose(template: &Template, random: &mut Random) -> Damage {
        // Half in segments, a third in journals, the rest in the small files.
        let end = match random.below(6) {
            0..3 => ".seg",
            3..5 => ".idx",
            _ => "",
        };
        let is_small = |path: &Path| !path.extension().is_some_and(|end| end == "seg" || end == "idx");
        let files: Vec<_> = template
            .files
            .iter()
            .filter(|(path, _)| match end {
                "" => is_small(path),
                end => path.to_string_lossy().ends_with(end),
            })
            .collect();
        let (file, old) = files[random.below(files.len() as u64) as usize];
        let len = old.len() as u64;
        let mut at = random.below(len);
        // Segments are mostly header padding and payload: half of the time take a byte of a directory.
        let entries: Vec<_> = template.pages.iter().filter(|page| page.segment == *file).collect();
        if !entries.is_empty() && random.below(2) == 0 {
            let entry = &entries[random.below(entries.len() as u64) as usize].entry;
            at = (entry.start + random.below(entry.end - entry.start + 256)).saturating_sub(192).min(len - 1);
        }
        let mut bytes = old.clone();
        let (what, touched) = match random.below(16) {
            // An empty file has no byte to change.
            _ if len == 0 => {
                bytes = page_bytes(random.next(), 100);
                ("100 bytes added to nothing".to_owned(), 0..0)
            }
            0..6 => {
                let bit = random.below(8);
                bytes[at as usize] ^= 1 << bit;
                (format!("bit {bit} of byte {at} flipped"), at..at + 1)
            }
            6..9 => {
                let value = [0, 0xff, random.next() as u8][random.below(3) as usize];
                bytes[at as usize] = value;
                (format!("byte {at} set to {value}"), at..at + 1)
            }
            9..11 => {
                let stop = (at + 64).min(len);
                bytes[at as usize..stop as usize].fill(0);
                (format!("64 bytes from {at} zeroed"), at..stop)
            }
            11..14 => {
                let cut = [at, at, 0, 1.min(len), 511.min(len), len - 1][random.below(6) as usize];
                bytes.truncate(cut as usize);
                (format!("cut from {len} to {cut} bytes"), cut..len)
            }
            14 => {
                let more = 1 + random.below(9000) as usize;
                bytes.extend(if random.below(2) == 0 {
                    vec![0; more]
                } else {
                    page_bytes(random.next(), more)
                });
                (format!("{more} bytes added"), len..len)
            }
            _ => {
                let what = "deleted".to_owned();
                return Damage { file: file.clone(), what, touched: 0..len, bytes: None };
            }
        };
        Damage { file: file.clone(), what, touched, bytes: Some(bytes) }
    }

    fn apply(&self, root: &Path) {
        let path = root.join(&self.file);
        match &self.bytes {
            Some(bytes) => std::fs::write(path, bytes).unwrap(),
            None => std::fs::remove_file(path).unwrap(),
        }
    }

    fn undo(&self, root: &Path, template: &Template) {
        let (_, bytes) = template.files.iter().find(|(path, _)| *path == self.file).unwrap();
        std::fs::write(root.join(&self.file), bytes).unwrap();
    }

    /// Whether this damage may cost `page`: only through a byte of its own.
    fn may_cost(&self, page: &Page) -> bool {
        let meets = |range: &Range<u64>| range.start < self.touched.end && self.touched.start < range.end;
        self.file == page.segment && (meets(&page.entry) || meets(&page.payload))
    }
}

/// Says which case it was when a check of it fails or panics.
struct Case<'a> {
    number: u64,
    seed: u64,
    read_only: bool,
    damage: &'a Damage,
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "HICACHE_HOSTILE_SEED={} HICACHE_HOSTILE_CASE={}: {}, {}; read only: {}",
                self.seed,
                self.number,
                self.damage.file.display(),
                self.damage.what,
                self.read_only
            );
        }
    }
}

fn run_case(template: &Template, root: &Path, seed: u64, number: u64) {
    let mut random = Random(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
    let damage = Damage::choose(template, &mut random);
    let read_only = random.below(4) != 0;
    let _case = Case { number, seed, read_only, damage: &damage };
    damage.apply(root);
    let mut lost = 0;
    {
        let store = Store::open(root, options(read_only)).unwrap();
        let views = views(&store, [None, Some(1)][random.below(2) as usize]);
        for (number, view) in views.iter().enumerate() {
            let keys = template.keys(number);
            let living: Vec<&Page> = template.pages.iter().filter(|page| page.view == number).collect();
            let (outcomes, memory) = restore_pages(view, &keys);
            let page_bytes = view.page_bytes(0) as usize;
            for (page, key) in keys.iter().enumerate() {
                let landed = &memory[page * page_bytes..][..page_bytes];
                match (outcomes[page], living.get(page)) {
                    (RestoreOutcome::Restored, Some(expected)) => {
                        assert!(landed == expected.bytes, "wrong bytes of {key}");
                    }
                    (RestoreOutcome::Restored, None) => panic!("{key} came back"),
                    (outcome, Some(expected)) => {
                        assert!(damage.may_cost(expected), "{key} of view {number} was lost: {outcome:?}");
                        lost += 1;
                    }
                    (RestoreOutcome::Absent, None) => {
                        assert!(landed.iter().all(|&byte| byte == CANARY), "bytes of an absent page");
                    }
                    (_, None) => {}
                }
            }
            // What failed is missing from now on, and what did not is still there.
            for chain in ["one", "two"] {
                let chain = crate::support::keys(chain, 12);
                let there = |key: &PageKey| {
                    keys.iter()
                        .zip(&outcomes)
                        .any(|(have, outcome)| have == key && *outcome == RestoreOutcome::Restored)
                };
                let expected = chain.iter().take_while(|key| there(key)).count();
                assert_eq!(view.match_prefix(&chain).unwrap().pages, expected, "view {number}");
            }
        }
        if !read_only {
            heal(template, &views);
        }
    }
    if read_only {
        damage.undo(root, template);
    } else {
        if lost > 0 {
            let store = Store::open(root, options(true)).unwrap();
            for (number, view) in views(&store, None).iter().enumerate() {
                check_whole(template, view, number);
            }
        }
        template.write(root);
    }
}

/// Another backup of everything puts back what was lost, and nothing else.
fn heal(template: &Template, views: &[View; 3]) {
    for (number, view) in views.iter().enumerate() {
        let pages: Vec<&Page> = template.pages.iter().filter(|page| page.view == number).collect();
        let keys: Vec<PageKey> = pages.iter().map(|page| page.key).collect();
        let bytes: Vec<Vec<u8>> = pages.iter().map(|page| page.bytes.clone()).collect();
        let outcomes = store_pages(view, &keys, &bytes, ChainStart::default());
        assert!(
            outcomes.iter().all(|outcome| matches!(outcome, BackupOutcome::Stored | BackupOutcome::Present)),
            "{outcomes:?}"
        );
        check_whole(template, view, number);
    }
}

fn check_whole(template: &Template, view: &View, number: usize) {
    let pages: Vec<&Page> = template.pages.iter().filter(|page| page.view == number).collect();
    let keys: Vec<PageKey> = pages.iter().map(|page| page.key).collect();
    let (outcomes, memory) = restore_pages(view, &keys);
    assert_eq!(outcomes, vec![RestoreOutcome::Restored; keys.len()], "view {number} after healing");
    for (page, landed) in pages.iter().zip(memory.chunks(view.page_bytes(0) as usize)) {
        assert!(landed == page.bytes, "wrong bytes of {} after healing", page.key);
    }
}

#[test]
fn damaged_stores_give_right_bytes_or_none() {
    let cases = number_from_environment("HICACHE_HOSTILE_CASES").unwrap_or(10_000);
    let seed = number_from_environment("HICACHE_HOSTILE_SEED").unwrap_or(1);
    let numbers = match number_from_environment("HICACHE_HOSTILE_CASE") {
        Some(number) => number..number + 1,
        None => 0..cases,
    };
    println!("HICACHE_HOSTILE_SEED={seed}, {cases} cases");
    let template = Template::make();
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(8);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (template, numbers) = (&template, numbers.clone());
            scope.spawn(move || {
                let folder = fast_folder();
                let root = folder.path().join("root");
                template.write(&root);
                for number in numbers.skip(thread).step_by(threads) {
                    run_case(template, &root, seed, number);
                }
            });
        }
    });
    println!(
        "RESULT: {cases} damaged stores (seed {seed}): right bytes or none, nothing else lost, no panic"
    );
}

/// The template is what the cases take it for: without damage all pages come back and the gone ones do not.
#[test]
fn the_undamaged_template_is_whole() {
    let template = Template::make();
    let folder = fast_folder();
    let root = folder.path().join("root");
    template.write(&root);
    let count =
        |end: &str| template.files.iter().filter(|(path, _)| path.to_string_lossy().ends_with(end)).count();
    assert_eq!((count(".seg"), count(".idx"), count("generation")), (4, 3, 1));
    let kept = |number| template.pages.iter().filter(|page| page.view == number).count();
    assert_eq!((kept(0), kept(1), kept(2)), (21, 6, 4));
    let store = Store::open(&root, options(true)).unwrap();
    let compressed = template.pages.iter().any(|page| {
        page.payload.end - page.payload.start < page.bytes.len() as u64 && page.bytes.len() > 8192
    });
    assert!(compressed, "some pages of several blocks shrink");
    for (number, view) in views(&store, None).iter().enumerate() {
        check_whole(&template, view, number);
        if !template.gone[number].is_empty() {
            let outcomes = restore_pages(view, &template.gone[number]).0;
            assert_eq!(outcomes, vec![RestoreOutcome::Absent; template.gone[number].len()]);
        }
    }
    let touched: BTreeSet<_> = listing(&root).into_iter().map(|(path, ..)| path).collect();
    assert!(template.files.iter().all(|(path, _)| touched.contains(path)));
}

fn form(blocks: u64) -> Form {
    Form {
        pool: tiny().pool.fingerprint(),
        tile: tile((0, 2), (0, 2)),
        layout: LayoutName::PageFirst,
        codec: Codec::Zstd,
        block_bytes: 8192,
        page_bytes: 8192 * blocks,
    }
}

fn segment() -> SegmentId {
    SegmentId { process: ProcessId([7; 16]), number: 3 }
}

/// A directory of two runs.
fn a_directory() -> Vec<u8> {
    let namespace = namespace("r1").fingerprint();
    let run = |blocks, count| {
        let block = directory::Block { stored_bytes: 100, checksum: 5 };
        let entry = |key: PageKey| Entry { key, payload_offset: 64, blocks: vec![block; blocks as usize] };
        Run {
            form: form(blocks),
            pool_bytes: tiny().pool.canonical_bytes(),
            payload_offset: 0,
            payload_bytes: 4096,
            parent: Parent::Root,
            depth: 0,
            entries: keys("directory", count).into_iter().map(entry).collect(),
        }
    };
    let header = DirectoryHeader {
        namespace,
        segment: segment(),
        generation: 1,
        unit_offset: 4096,
        directory_offset: 8192,
        directory_bytes: 0,
        written_ns: 9,
    };
    directory::encode(&header, &[run(1, 5), run(3, 2)])
}

/// Every decoder on the same bytes: each answers, and with no more than the bytes can hold.
fn decode_all(bytes: &[u8]) {
    let _ = SegmentHeader::decode(bytes);
    let _ = Seal::locate(bytes);
    if let Ok(seal) = Seal::decode(bytes) {
        assert!(seal.directories.len() * 8 <= bytes.len());
    }
    let _ = directory::announced_bytes(bytes);
    let _ = directory::decode_header(bytes);
    if let Ok(directory) = directory::decode(bytes) {
        check_directory(&directory, bytes.len());
    }
    for blocks in [1, 3] {
        let _ = Entry::decode(&form(blocks), &namespace("r1").fingerprint(), bytes);
    }
    let mut at = 0;
    while let Step::Frame(_, next) | Step::Damaged(next) = frame::step(bytes, at) {
        assert!(next > at && next <= bytes.len());
        at = next;
    }
    let mut keys = 0;
    let _ = frame::decode_add(bytes, |_, run| keys += run.keys.len());
    assert!(keys <= bytes.len());
    let _ = frame::decode_gone(bytes).map(|records| assert!(records.len() * 56 <= bytes.len()));
    let _ = frame::decode_counters(bytes).map(|records| assert!(records.len() * 12 <= bytes.len()));
    let _ = frame::decode_seal(bytes);
    let _ = RootDescription::decode(bytes);
    let _ = decode_generation(bytes);
}

fn check_directory(directory: &Directory, bytes: usize) {
    let entries: usize = directory.runs.iter().map(|run| run.entries.len()).sum();
    assert!(entries * 60 <= bytes, "{entries} entries from {bytes} bytes");
    let pools: usize = directory.runs.iter().map(|run| run.run.pool_bytes.len()).sum();
    assert!(pools <= bytes, "{pools} bytes of pools from {bytes} bytes");
    assert!((directory.runs.len() + directory.damaged_runs as usize) * 8 <= bytes);
}

/// One whole encoding of each structure.
fn encodings() -> Vec<Vec<u8>> {
    let namespace = namespace("r1");
    let fingerprint = namespace.fingerprint();
    let header = SegmentHeader { segment: segment(), namespace, generation: 1, created_ns: 4 };
    let unit = AddUnit {
        segment: segment(),
        generation: 1,
        unit_offset: 4096,
        unit_bytes: 8192,
        directory_offset: 8192,
        directory_bytes: 500,
    };
    let short: Vec<_> = keys("frame", 4).iter().map(short_key).collect();
    let run = AddRun {
        form: form(1),
        entries_offset: 9000,
        payload_offset: 4096,
        payload_bytes: 2048,
        parent: [0; 16],
        depth: 0,
        keys: short.as_flattened(),
    };
    let location = Location { segment: segment(), entries_offset: 9000, ordinal: 1 };
    let gone =
        frame::encode_gone(&[Gone { location, key: short[1], objects: 1, reason: Reason::Damaged }; 3]);
    let add = frame::encode_add(&unit, &[run, run]);
    let counters = frame::encode_counters(&[(1, 5), (20, 7)]);
    let seal = frame::encode_seal(segment(), 20_000);
    let framed = |kind, body: &[u8]| {
        let (process, namespace) = (segment().process, fingerprint);
        Frame { process, sequence: 0, kind, records: 1, namespace, written_ns: 3, body }.encode()
    };
    let frames =
        [framed(FrameKind::Add, &add), framed(FrameKind::Quarantine, &gone), framed(FrameKind::Seal, &seal)]
            .concat();
    let root = RootDescription { uuid: "00".repeat(16), capacity_bytes: 1 << 30, created_ns: 5 };
    let entry = {
        let mut out = Encoder::default();
        let block = directory::Block { stored_bytes: 100, checksum: 5 };
        let entry = Entry { key: keys("entry", 1)[0], payload_offset: 0, blocks: vec![block; 3] };
        entry.encode(&form(3), &fingerprint, &mut out);
        out.bytes
    };
    vec![
        header.encode(),
        Seal { segment: segment(), directories: vec![64, 128, 4096] }.encode(8192),
        a_directory(),
        entry,
        frames,
        add,
        gone,
        counters,
        seal,
        root.encode(),
        encode_generation(12),
    ]
}

/// Bytes of a number that is easy to get wrong.
fn tricky() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(u64::from(u32::MAX)),
        Just(1 << 62),
        0..10_000u64,
        any::<u64>()
    ]
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_harm_a_decoder(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        decode_all(&bytes);
    }

    #[test]
    fn changed_encodings_do_not_harm_a_decoder(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), tricky(), 0..9usize), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let all = encodings();
        let mut bytes = all[which.index(all.len())].clone();
        for (at, value, len) in edits {
            let at = at.index(bytes.len());
            let end = (at + len).min(bytes.len());
            bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        decode_all(&bytes);
    }

    /// Lengths, counts and offsets that a checksum vouches for are not trusted either.
    #[test]
    fn a_directory_with_right_checksums_and_wrong_numbers_does_no_harm(
        edits in prop::collection::vec((any::<prop::sample::Index>(), tricky(), 1..9usize), 1..4),
        same_run in any::<bool>(),
    ) {
        let mut bytes = a_directory();
        let (_, offsets) = directory::decode_header(&bytes).unwrap();
        if same_run {
            let first: [u8; 8] = bytes[104..112].try_into().unwrap();
            bytes[112..120].copy_from_slice(&first);
        }
        for (at, value, len) in edits {
            let at = at.index(bytes.len());
            let end = (at + len).min(bytes.len());
            bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        for &offset in &offsets {
            let end = offset as usize + 64 + 72 + tiny().pool.canonical_bytes().len();
            let sum = checksum(&bytes[offset as usize..end]);
            bytes[end..end + 8].copy_from_slice(&sum.to_le_bytes());
        }
        let runs = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
        let end = 104usize.saturating_add(runs.saturating_mul(8));
        if end + 8 <= bytes.len() {
            let sum = checksum(&bytes[..end]);
            bytes[end..end + 8].copy_from_slice(&sum.to_le_bytes());
        }
        decode_all(&bytes);
    }
}

/// A directory whose table names one run many times would be as large as the table times the run.
#[test]
fn a_run_counts_once_however_often_the_table_names_it() {
    let one = a_directory();
    let (_, offsets) = directory::decode_header(&one).unwrap();
    let (times, head) = (200, 104);
    let run = &one[offsets[0] as usize..offsets[1] as usize];
    let start = head + 8 * times + 8;
    let total = (start + run.len()) as u64;
    for other in [start as u64, total, 0, u64::MAX] {
        let mut bytes = one[..head].to_vec();
        bytes[12..16].copy_from_slice(&(times as u32).to_le_bytes());
        bytes[80..88].copy_from_slice(&total.to_le_bytes());
        bytes.extend((0..times / 2).flat_map(|_| [start as u64, other]).flat_map(u64::to_le_bytes));
        let sum = checksum(&bytes);
        bytes.extend(sum.to_le_bytes());
        bytes.extend(run);
        let directory = directory::decode(&bytes).unwrap();
        check_directory(&directory, bytes.len());
        assert!(directory.runs.len() <= 1);
    }
}
