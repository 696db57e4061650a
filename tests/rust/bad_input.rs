//! What cannot be done as asked is refused with words that say why, and changes nothing.

use std::path::Path;

use hicache_core::{
    ChainStart, Component, DType, ErrorKind, LayoutName, PageKey, Pool, PoolKind, PoolMemory, RestoreOptions,
    Span, Store, StoreOptions, Tile, TokenLattice, ViewOptions, ViewPool,
};

use crate::support::{
    CANARY, Memory, backup, contiguous, keys, kv_pool, lend, listing, namespace, open, page_bytes, tile, tiny,
};

/// Runs `attempt` on `root`: an error of this kind with all of `words`, and no file made, changed or removed.
fn refused<T>(
    root: &Path,
    kind: ErrorKind,
    words: &[&str],
    attempt: impl FnOnce() -> hicache_core::Result<T>,
) {
    let before = listing(root);
    let Err(error) = attempt() else { panic!("expected an error that says {words:?}") };
    assert_eq!(error.kind(), kind, "{error}");
    for word in words {
        assert!(error.message().contains(word), "{word:?} is not in: {error}");
    }
    assert_eq!(listing(root), before, "{error}");
}

fn options() -> StoreOptions {
    StoreOptions { capacity_bytes: Some(64 << 20), ..StoreOptions::default() }
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let view = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
    let keys = keys("bad", 3);
    backup(&view, &keys[..1], &Memory::of(&page_bytes(1, 512)));
    let memory = Memory::canary(3 * 512);
    let uneven = Memory::canary(3 * 512 - 1);
    let empty = Memory::canary(0);
    let of = |memory: &'static [&'static str]| memory;
    let cases: Vec<(&[PageKey], Vec<PoolMemory<'_>>, &[&str])> = vec![
        (&keys, lend(&memory, &[0, 1]), of(&["expected 3 slots", "found 2"])),
        (&keys, lend(&memory, &[0, 1, 2, 0]), of(&["expected 3 slots", "found 4"])),
        (&keys, lend(&memory, &[0, 1, 3]), of(&["0 to 2", "found 3 for page 2"])),
        (&keys, lend(&memory, &[0, 1, -2]), of(&["0 to 2", "found -2"])),
        (&keys, lend(&memory, &[0, 1, i64::MAX]), of(&["0 to 2", "found 9223372036854775807"])),
        (&keys, lend(&memory, &[0, 1, i64::MIN]), of(&["0 to 2"])),
        (&keys, lend(&memory, &[2, 1, 2]), of(&["slot 2", "twice", "page 2"])),
        (&keys, lend(&uneven, &[0, 1, 2]), of(&["512 bytes", "found 1535"])),
        (&keys, lend(&empty, &[0, 1, 2]), of(&["0 slots"])),
        (&keys, vec![], of(&["1 pools (kv)", "found 0"])),
        (
            &keys,
            [lend(&memory, &[0, 1, 2]), lend(&memory, &[0, 1, 2])].into_iter().flatten().collect(),
            of(&["found 2"]),
        ),
        (
            &keys,
            vec![PoolMemory { regions: vec![&memory.region; 3], slots: &[0, 1, 2] }],
            of(&["2 components", "found 3"]),
        ),
        (&keys, vec![PoolMemory { regions: vec![], slots: &[0, 1, 2] }], of(&["found 0"])),
    ];
    for (keys, lent, words) in cases {
        let again =
            lent.iter().map(|one| PoolMemory { regions: one.regions.clone(), slots: one.slots }).collect();
        refused(root.path(), ErrorKind::Geometry, words, || {
            view.restore(keys, lent, RestoreOptions::default())
        });
        refused(root.path(), ErrorKind::Geometry, words, || view.backup(keys, again, ChainStart::default()));
    }
    assert!(memory.bytes().iter().all(|&byte| byte == CANARY));

    let repeated = [keys[0], keys[1], keys[0]];
    refused(root.path(), ErrorKind::Config, &["page 0", "page 2"], || {
        view.backup(&repeated, lend(&memory, &[0, 1, 2]), ChainStart::default())
    });
    refused(root.path(), ErrorKind::Config, &["no parent at depth 0"], || {
        let start = ChainStart { parent: Some(keys[2]), depth: Some(0) };
        view.backup(&keys[..1], lend(&memory, &[0]), start)
    });
    assert_eq!(view.match_prefix(&keys).unwrap().pages, 1);
}

#[test]
fn a_key_that_no_digest_has_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let view = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
    let mut key = PageKey([0; 32]);
    refused(root.path(), ErrorKind::Config, &["16 zero bytes"], || {
        view.backup(&[key], lend(&Memory::canary(512), &[0]), ChainStart::default())
    });
    key.0[15] = 1;
    backup(&view, &[key], &Memory::canary(512));
    assert_eq!(view.match_prefix(&[key]).unwrap().pages, 1);
}

#[test]
fn views_that_cannot_be_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let none = ViewOptions::default();
    let view =
        |pools: Vec<ViewPool>, options: ViewOptions| store.view(namespace("r1"), pools, options).map(|_| ());
    refused(root.path(), ErrorKind::Config, &["at least one pool", "none"], || view(vec![], none));
    refused(root.path(), ErrorKind::Config, &["\"kv\"", "twice"], || view(vec![tiny(), tiny()], none));
    for level in [0, 23, -1] {
        let words = &["1 to 22", &format!("found {level}")[..]];
        refused(root.path(), ErrorKind::Config, words, || {
            view(vec![tiny()], ViewOptions { zstd_level: Some(level) })
        });
    }
    // Tokens past the namespace's page of 4.
    let tokens = TokenLattice { first: 0, step: 1, count: 5 };
    let outside = ViewPool { tile: Tile { tokens, ..tiny().tile }, ..tiny() };
    refused(root.path(), ErrorKind::Geometry, &["count 5", "page of 4 tokens"], || view(vec![outside], none));
    let span = |start, end| Span { start, end };
    for layers in [span(2, 2), span(3, 1), span(0, u32::MAX)] {
        let pool = ViewPool { tile: Tile { layers, ..tiny().tile }, ..tiny() };
        refused(root.path(), ErrorKind::Geometry, &["start < end"], || view(vec![pool], none));
    }
    for (offset, page) in [(1, 512), (u64::MAX, 512), (0, 511), (512, 512)] {
        let pool = ViewPool { packed: Some((offset, page)), ..tiny() };
        let words = &["512 bytes", &format!("host pages of {page} bytes")[..]];
        refused(root.path(), ErrorKind::Geometry, words, || view(vec![pool], none));
    }
    let groups = ViewPool { layout: LayoutName::PageUnified { heads_per_group: 3 }, ..tiny() };
    refused(root.path(), ErrorKind::Geometry, &["groups of 3 heads", "2 heads"], || view(vec![groups], none));
    // More than 1 GiB, and more than 2^64 bytes.
    let huge = Pool::new("huge", PoolKind::Kv, DType::UInt8, None, vec![Component::per_token("x", u32::MAX)])
        .unwrap();
    let pool = ViewPool::new(huge.clone(), tile((0, 1), (0, 1)), LayoutName::PageFirst);
    refused(root.path(), ErrorKind::Geometry, &["at most 1073741824", "found 17179869180"], || {
        view(vec![pool], none)
    });
    let pool = ViewPool::new(huge, tile((0, 65_536), (0, 65_536)), LayoutName::PageFirst);
    refused(root.path(), ErrorKind::Geometry, &["2^64"], || view(vec![pool], none));
    assert!(Pool::new("kv", PoolKind::Kv, DType::UInt8, None, vec![Component::per_token("x", 0)]).is_err());
    assert_eq!(std::fs::read_dir(root.path().join("ns")).unwrap().count(), 0, "no view, no folder");
}

#[test]
fn options_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let base = options();
    let least = 16 << 20;
    let cases: Vec<(StoreOptions, &[&str])> = vec![
        (StoreOptions { capacity_bytes: Some(least - 1), ..base.clone() }, &["16777216", "found 16777215"]),
        (StoreOptions { capacity_bytes: Some(0), ..base.clone() }, &["16777216", "found 0"]),
        (StoreOptions { io_threads: Some(0), ..base.clone() }, &["1 to 256", "found 0"]),
        (StoreOptions { io_threads: Some(257), ..base.clone() }, &["1 to 256", "found 257"]),
        (StoreOptions { max_open_segments: 0, ..base.clone() }, &["at least one", "found 0"]),
    ];
    for (options, words) in cases {
        refused(folder.path(), ErrorKind::Config, words, || Store::open(&root, options));
    }
    let smallest = StoreOptions { capacity_bytes: Some(least), ..base.clone() };
    assert_eq!(Store::open(&root, smallest).unwrap().capacity_bytes(), least);
    // Another capacity for a root that has one is told, and changes nothing.
    let store = Store::open(&root, base).unwrap();
    assert_eq!(store.capacity_bytes(), least);
    assert!(
        crate::support::warnings(&store)
            .iter()
            .any(|line| line.contains("67108864 bytes asked for are ignored"))
    );
}

#[test]
fn places_that_hold_no_store_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("photos")).unwrap();
    std::fs::write(path("photos").join("cat.jpg"), "cat").unwrap();
    std::fs::write(path("file"), "text").unwrap();
    std::os::unix::fs::symlink(path("photos"), path("link")).unwrap();
    let read_only = || StoreOptions { read_only: true, ..options() };
    for both in [options(), read_only()] {
        let at = |name: &str| (path(name), both.clone());
        let open = |(path, options): (std::path::PathBuf, StoreOptions)| move || Store::open(&path, options);
        refused(
            folder.path(),
            ErrorKind::Config,
            &["empty folder", "1 other entries", "cat.jpg"],
            open(at("photos")),
        );
        refused(folder.path(), ErrorKind::Config, &["cat.jpg"], open(at("link")));
        refused(folder.path(), ErrorKind::Config, &["expected a folder, found a file"], open(at("file")));
        refused(folder.path(), ErrorKind::Io, &["Not a directory"], open(at("file/below")));
    }
    refused(folder.path(), ErrorKind::Config, &["expected a store", "found nothing"], || {
        Store::open(&path("missing"), read_only())
    });
    refused(folder.path(), ErrorKind::Config, &["expected the folder", "not made for"], || {
        Store::open(&path("missing/root"), options())
    });
    // What a new file system or a killed process leaves is not foreign.
    std::fs::create_dir_all(path("fresh").join("lost+found")).unwrap();
    std::fs::write(path("fresh").join(format!("tmp-{}-0", "00".repeat(16))), "").unwrap();
    Store::open(&path("fresh"), options()).unwrap();
}

#[test]
fn a_newer_root_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    drop(open(root.path()));
    let path = root.path().join("root.json");
    let mut words: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    words["format"] = 2.into();
    let map = words.as_object_mut().unwrap();
    map.remove("checksum");
    let sum = hicache_core::format::checksum(&serde_json::to_vec(&map).unwrap());
    map.insert("checksum".into(), format!("{sum:016x}").into());
    std::fs::write(&path, serde_json::to_vec(&words).unwrap()).unwrap();
    for options in [options(), StoreOptions { read_only: true, ..options() }] {
        refused(root.path(), ErrorKind::UnsupportedVersion, &["format 1", "format 2"], || {
            Store::open(root.path(), options)
        });
    }
}

#[test]
fn links_in_place_of_folders_are_refused() {
    let elsewhere = tempfile::tempdir().unwrap();
    for name in ["ns", "journal"] {
        for read_only in [false, true] {
            let root = tempfile::tempdir().unwrap();
            drop(open(root.path()));
            std::fs::remove_dir(root.path().join(name)).unwrap();
            std::os::unix::fs::symlink(elsewhere.path(), root.path().join(name)).unwrap();
            refused(root.path(), ErrorKind::Unsupported, &["expected a folder", "link", name], || {
                Store::open(root.path(), StoreOptions { read_only, ..options() })
            });
        }
    }
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let folder = namespace("r1").fingerprint().to_string();
    std::os::unix::fs::symlink(elsewhere.path(), root.path().join("ns").join(&folder)).unwrap();
    refused(root.path(), ErrorKind::Unsupported, &["expected a folder", "link", &folder], || {
        store.view(namespace("r1"), vec![tiny()], ViewOptions::default())
    });
    std::fs::write(root.path().join("ns").join(namespace("r2").fingerprint().to_string()), "").unwrap();
    refused(root.path(), ErrorKind::Unsupported, &["expected a folder"], || {
        store.view(namespace("r2"), vec![tiny()], ViewOptions::default())
    });
    assert!(listing(elsewhere.path()).is_empty(), "nothing was written through a link");
}

/// A segment or journal that is a link, a folder or a FIFO is not followed, and holds nobody up.
#[test]
fn odd_files_in_a_root_are_not_followed() {
    let root = tempfile::tempdir().unwrap();
    let keys = keys("odd", 1);
    let secret = root.path().join("secret");
    let bytes = page_bytes(1, 512);
    {
        let store = open(root.path());
        let view = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
        backup(&view, &keys, &Memory::of(&bytes));
    }
    let segment = crate::support::object(root.path(), &keys[0]).segment;
    std::fs::rename(&segment, &secret).unwrap();
    std::os::unix::fs::symlink(&secret, &segment).unwrap();
    std::fs::create_dir(root.path().join("journal").join(format!("{}-0.idx", "ab".repeat(16)))).unwrap();
    std::os::unix::fs::symlink(
        &secret,
        root.path().join("journal").join(format!("{}-0.idx", "cd".repeat(16))),
    )
    .unwrap();
    std::fs::create_dir(segment.with_file_name(format!("{}-7.seg", "ab".repeat(16)))).unwrap();
    let store = open(root.path());
    let view = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
    let target = Memory::canary(512);
    let outcomes = crate::support::restore(&view, &keys, &target).outcomes;
    assert_eq!(outcomes, [hicache_core::RestoreOutcome::Error]);
    assert!(target.bytes().iter().all(|&byte| byte == CANARY));
}

#[test]
fn a_store_for_reading_and_a_closed_one_write_nothing() {
    let root = tempfile::tempdir().unwrap();
    let keys = keys("readers", 2);
    let bytes = page_bytes(1, 2 * 512);
    {
        let store = open(root.path());
        let view = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
        backup(&view, &keys, &Memory::of(&bytes));
    }
    let before = listing(root.path());
    {
        let store = Store::open(root.path(), StoreOptions { read_only: true, ..options() }).unwrap();
        let view = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
        let target = Memory::canary(2 * 512);
        crate::support::restore(&view, &keys, &target);
        assert!(target.bytes() == bytes);
        let memory = Memory::of(&bytes);
        refused(root.path(), ErrorKind::Unsupported, &["reading only"], || {
            view.backup(&keys, lend(&memory, &[0, 1]), ChainStart::default())
        });
        refused(root.path(), ErrorKind::Unsupported, &["reading only"], || view.clear());
        // Another namespace and another pool, which nobody described.
        store.view(namespace("r9"), vec![tiny()], ViewOptions::default()).unwrap();
        let other = ViewPool::new(kv_pool("float16", 16), tile((0, 2), (0, 2)), LayoutName::PageHead);
        store.view(namespace("r1"), vec![other], ViewOptions::default()).unwrap();
    }
    assert_eq!(listing(root.path()), before);

    let store = open(root.path());
    let view = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
    store.close();
    store.close();
    let memory = Memory::of(&bytes);
    let words = &["closed"];
    refused(root.path(), ErrorKind::Closed, words, || view.match_prefix(&keys));
    refused(root.path(), ErrorKind::Closed, words, || view.clear());
    refused(root.path(), ErrorKind::Closed, words, || {
        store.view(namespace("r2"), vec![tiny()], ViewOptions::default())
    });
    refused(root.path(), ErrorKind::Closed, words, || {
        view.backup(&keys, lend(&memory, &[0, 1]), ChainStart::default())
    });
    refused(root.path(), ErrorKind::Closed, words, || {
        view.restore(&keys, lend(&memory, &[0, 1]), RestoreOptions::default())
    });
}
