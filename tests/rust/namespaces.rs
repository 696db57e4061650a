//! What differs in name, weights or type shares nothing, and no name becomes a path.

use std::collections::BTreeSet;
use std::path::Path;

use hicache_core::{
    BackupOutcome, Component, DType, ErrorKind, LayoutName, Namespace, Pool, PoolKind, RestoreOutcome, Span,
    Store, Tile, View, ViewOptions, ViewPool,
};

use crate::support::{
    CANARY, Memory, backup, contiguous, keys, kv_pool, listing, namespace, open, page_bytes, restore, tile,
    tiny,
};

use RestoreOutcome::{Absent, Restored};

fn view(store: &Store, namespace: Namespace, pool: Pool) -> View {
    let pool = contiguous(ViewPool::new(pool, tile((0, 2), (0, 2)), LayoutName::PageFirst));
    store.view(namespace, vec![pool], ViewOptions::default()).unwrap()
}

/// Nothing of the first `pages` keys is there, and nothing lands.
fn assert_empty(view: &View, pages: usize) {
    let keys = keys("shared", pages);
    assert_eq!(view.match_prefix(&keys).unwrap().pages, 0);
    let target = Memory::canary(pages * view.page_bytes(0) as usize);
    assert_eq!(restore(view, &keys, &target).outcomes, vec![Absent; pages]);
    assert!(target.bytes().iter().all(|&byte| byte == CANARY));
}

fn assert_holds(view: &View, bytes: &[u8]) {
    let pages = bytes.len() / view.page_bytes(0) as usize;
    let keys = keys("shared", pages);
    assert_eq!(view.match_prefix(&keys).unwrap().pages, pages);
    let target = Memory::canary(bytes.len());
    assert_eq!(restore(view, &keys, &target).outcomes, vec![Restored; pages]);
    assert!(target.bytes() == bytes);
}

fn fill(view: &View, bytes: &[u8]) {
    let pages = bytes.len() / view.page_bytes(0) as usize;
    let report = backup(view, &keys("shared", pages), &Memory::of(bytes));
    assert_eq!(report.outcomes, vec![BackupOutcome::Stored; pages], "{:?}", report.reason);
}

#[test]
fn case_d02_another_dtype_is_another_pool() {
    let root = tempfile::tempdir().unwrap();
    let bytes = page_bytes(2, 4 * 512);
    fill(&view(&open(root.path()), namespace("r1"), kv_pool("bfloat16", 16)), &bytes);
    // The same 512 bytes as fp16, and half of them as fp8.
    for (dtype, row_bytes) in [("float16", 16), ("float8_e4m3fn", 8), ("uint8", 16)] {
        assert_empty(&view(&open(root.path()), namespace("r1"), kv_pool(dtype, row_bytes)), 4);
    }
    for dtype in ["auto", ""] {
        let error = DType::parse(dtype).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    // Both live side by side, and each keeps its own.
    let other_bytes = page_bytes(3, 4 * 512);
    fill(&view(&open(root.path()), namespace("r1"), kv_pool("float16", 16)), &other_bytes);
    assert_holds(&view(&open(root.path()), namespace("r1"), kv_pool("bfloat16", 16)), &bytes);
    assert_holds(&view(&open(root.path()), namespace("r1"), kv_pool("float16", 16)), &other_bytes);
}

#[test]
fn case_d03_other_weights_under_the_same_name_are_another_namespace() {
    let root = tempfile::tempdir().unwrap();
    let bytes = page_bytes(3, 4 * 512);
    fill(&view(&open(root.path()), namespace("r1"), kv_pool("bfloat16", 16)), &bytes);
    assert_empty(&view(&open(root.path()), namespace("r2"), kv_pool("bfloat16", 16)), 4);
    assert_holds(&view(&open(root.path()), namespace("r1"), kv_pool("bfloat16", 16)), &bytes);
    let manifests: BTreeSet<String> = crate::support::files_ending(root.path(), "manifest.json")
        .iter()
        .map(|path| std::fs::read_to_string(path).unwrap())
        .collect();
    assert_eq!(manifests.len(), 2);
    for revision in ["r1", "r2"] {
        assert!(manifests.iter().any(|text| text.contains(&format!("\"revision\": \"{revision}\""))));
    }

    // No revision at all is possible only by the word, and is said aloud.
    let error = Namespace::new("org/tiny", "", 4, None).unwrap_err();
    assert!(error.message().contains("unversioned"), "{error}");
    let store = open(root.path());
    view(&store, namespace(Namespace::UNVERSIONED), kv_pool("bfloat16", 16));
    assert!(crate::support::warnings(&store).iter().any(|line| line.contains("no weights revision")));
}

#[test]
fn case_d09_scales_come_back_with_their_pages() {
    let scaled = |scale_bytes| {
        let components = vec![
            Component::per_token("k", 8),
            Component::per_token("v", 8),
            Component { dtype: Some(DType::UInt8), ..Component::per_page("scales", scale_bytes) },
        ];
        Pool::new("kv", PoolKind::Kv, DType::MxFp8, None, components).unwrap()
    };
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let view = view(&store, namespace("r1"), scaled(4));
    assert_eq!(view.page_bytes(0), 256 + 16);
    let bytes = page_bytes(9, 3 * 272);
    fill(&view, &bytes);
    assert_holds(&view, &bytes);

    let payload = vec![Component::per_token("k", 8), Component::per_token("v", 8)];
    for dtype in [DType::MxFp8, DType::NvFp4, DType::Float4E2m1] {
        let error = Pool::new("kv", PoolKind::Kv, dtype, None, payload.clone()).unwrap_err();
        assert!(error.message().contains("without its scales"), "{error}");
    }
    // Memory without room for the scales is refused before a byte moves.
    let short = Memory::canary(3 * 256);
    let slots = [0, 1, 2];
    let lent = crate::support::lend(&short, &slots);
    let error = view.restore(&keys("shared", 3), lent, Default::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Geometry);
    assert!(error.message().contains("272") && error.message().contains("768"), "{error}");
    assert!(short.bytes().iter().all(|&byte| byte == CANARY));
    // A pool that describes other scales is another pool.
    assert_empty(&self::view(&store, namespace("r1"), scaled(8)), 3);
}

/// Every path of the root, with the length of its longest component in bytes.
fn longest_component(root: &Path) -> usize {
    let paths = listing(root).into_iter().map(|(path, ..)| path);
    paths.flat_map(|path| path.iter().map(|part| part.len()).collect::<Vec<_>>()).max().unwrap()
}

#[test]
fn case_d27_no_two_names_share_a_folder_and_none_leaves_the_root() {
    let outer = tempfile::tempdir().unwrap();
    let root = outer.path().join("a").join("root");
    std::fs::create_dir(outer.path().join("a")).unwrap();
    let names = [
        "a/b",
        "a-SEP-b",
        "a__b",
        "a b",
        "a%2Fb",
        "..",
        "../../outside",
        "/abs/m",
        ".",
        "CON",
        "a\nb",
        "mod\u{e8}le",
        "mode\u{300}le",
        "A/B",
        "a\\b",
        "\u{1f980}",
        "~",
        "-rf",
        "ns",
        "root.json",
        "*",
        "a/b/",
        "a//b",
        "\u{202e}gnp",
        "manifest.json",
    ];
    let store = open(&root);
    let views: Vec<View> = names
        .iter()
        .map(|name| view(&store, Namespace::new(name, "r1", 4, None).unwrap(), kv_pool("bfloat16", 16)))
        .collect();
    let page = |number: usize| page_bytes(100 + number as u64, 512);
    for (number, view) in views.iter().enumerate() {
        assert_empty(view, 1);
        fill(view, &page(number));
    }
    drop((views, store));
    // The same again as salts and revisions of one model.
    let store = open(&root);
    for (number, name) in names.iter().enumerate() {
        let own = Namespace::new(name, "r1", 4, None).unwrap();
        assert_holds(&view(&store, own.clone(), kv_pool("bfloat16", 16)), &page(number));
        for other in [Namespace::new("m", name, 4, None), Namespace::new("m", "r1", 4, Some(name))] {
            assert_empty(&view(&store, other.unwrap(), kv_pool("bfloat16", 16)), 1);
        }
        let manifest = root.join("ns").join(own.fingerprint().to_string()).join("manifest.json");
        let words: serde_json::Value = serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
        assert_eq!(words["model"], **name, "the name is told faithfully");
    }
    assert_eq!(std::fs::read_dir(root.join("ns")).unwrap().count(), 3 * names.len());
    let outside: Vec<_> = listing(outer.path())
        .into_iter()
        .filter(|(path, ..)| !path.starts_with("a/root") && *path != Path::new("a"))
        .collect();
    assert!(outside.is_empty(), "{outside:?}");
    for refused in ["", "a\0b", "\0"] {
        assert_eq!(Namespace::new(refused, "r1", 4, None).unwrap_err().kind(), ErrorKind::Namespace);
    }
}

#[test]
fn case_d28_long_names_make_no_long_file_names() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    for (number, model) in
        ["m".repeat(255), "m".repeat(256), "m".repeat(1000), "\u{e8}".repeat(500)].iter().enumerate()
    {
        let salt = "s".repeat(64);
        let namespace = Namespace::new(model, "r1", 4, Some(&salt)).unwrap();
        let name = "p".repeat(100);
        let pool =
            Pool::new(&name, PoolKind::Kv, DType::BFloat16, None, tiny().pool.components().to_vec()).unwrap();
        let view = view(&store, namespace, pool);
        let bytes = page_bytes(number as u64, 2 * 512);
        fill(&view, &bytes);
        assert_holds(&view, &bytes);
    }
    assert!(longest_component(root.path()) <= 255, "{}", longest_component(root.path()));
    assert_eq!(
        Namespace::new(&"m".repeat(1025), "r1", 4, None).unwrap_err().kind(),
        ErrorKind::Namespace,
        "a limit that is told at once"
    );
}

/// Page size, tile and pool name keep apart what the keys do not.
#[test]
fn equal_keys_of_other_page_sizes_and_pools_are_not_mixed() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let bytes = page_bytes(4, 2 * 512);
    fill(&view(&store, namespace("r1"), kv_pool("bfloat16", 16)), &bytes);
    // Pages of 8 tokens with rows half as long are 512 bytes too.
    let wide = Tile::whole_page(Span { start: 0, end: 2 }, Span { start: 0, end: 2 }, 8).unwrap();
    let pool = contiguous(ViewPool::new(kv_pool("bfloat16", 8), wide, LayoutName::PageFirst));
    let namespace = Namespace::new("org/tiny", "r1", 8, None).unwrap();
    assert_empty(&store.view(namespace, vec![pool], ViewOptions::default()).unwrap(), 2);
    let components = tiny().pool.components().to_vec();
    for (name, kind) in [("kv2", PoolKind::Kv), ("kv", PoolKind::Draft)] {
        let pool = Pool::new(name, kind, DType::BFloat16, None, components.clone()).unwrap();
        assert_empty(&view(&store, crate::support::namespace("r1"), pool), 2);
    }
}
