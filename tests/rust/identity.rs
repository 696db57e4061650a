//! One namespace or pool never sees another: every field counts, and no two have the same bytes.

use hicache_core::{Component, DType, ErrorKind, HitPolicy, Namespace, Pool, PoolKind, RowUnit, Span, Tile};
use proptest::prelude::*;
use serde_json::{Value, json};

fn namespace() -> Namespace {
    Namespace::new("org/model", "sha256:abc", 64, Some("tenant-1")).unwrap()
}

fn kv() -> Pool {
    let components = vec![Component::per_token("k", 256), Component::per_token("v", 256)];
    Pool::new("kv", PoolKind::Kv, DType::BFloat16, None, components).unwrap()
}

fn tile(layers: u32, heads: u32, tokens: u32) -> Tile {
    Tile::whole_page(Span { start: 0, end: layers }, Span { start: 0, end: heads }, tokens).unwrap()
}

/// Short texts of few letters, so that fields run into each other wherever they can.
fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[ab]{1,3}", "[a-zéß盐]{1,8}"]
}

prop_compose! {
    fn any_namespace()(
        model in text(), revision in text(), page_size in 1..4u32, salt in prop::option::of(text()),
    ) -> Namespace {
        Namespace::new(&model, &revision, page_size, salt.as_deref()).unwrap()
    }
}

prop_compose! {
    fn any_component()(
        name in text(), row_bytes in 1..3u32, unit in prop::sample::select(vec![RowUnit::Token, RowUnit::Page]),
        dtype in prop::option::of(prop::sample::select(vec![DType::UInt8, DType::Int8])),
    ) -> Component {
        Component { name, row_bytes, unit, dtype }
    }
}

prop_compose! {
    fn any_pool()(
        name in text(), kind in prop::sample::select(PoolKind::ALL.to_vec()),
        dtype in prop::sample::select(vec![DType::UInt8, DType::Float8E5m2]),
        row_format in prop::option::of(text()), components in prop::collection::vec(any_component(), 1..4),
    ) -> Option<Pool> {
        // Names may repeat by chance; such a pool is refused.
        Pool::new(&name, kind, dtype, row_format.as_deref(), components).ok()
    }
}

proptest! {
    #[test]
    fn a_namespace_reads_back(one in any_namespace()) {
        prop_assert_eq!(&Namespace::from_canonical_bytes(&one.canonical_bytes()).unwrap(), &one);
        prop_assert_eq!(&Namespace::from_json(&one.to_json()).unwrap(), &one);
        prop_assert_eq!(one.fingerprint().to_string().parse::<hicache_core::Fingerprint>().unwrap(), one.fingerprint());
    }

    #[test]
    fn namespaces_are_equal_exactly_where_their_bytes_are(a in any_namespace(), b in any_namespace()) {
        prop_assert_eq!(a == b, a.canonical_bytes() == b.canonical_bytes());
        prop_assert_eq!(a == b, a.fingerprint() == b.fingerprint());
        prop_assert_eq!(a == b, a.differences(&b).is_empty());
    }

    #[test]
    fn a_pool_reads_back(one in any_pool()) {
        let Some(one) = one else { return Ok(()) };
        prop_assert_eq!(&Pool::from_canonical_bytes(&one.canonical_bytes()).unwrap(), &one);
        prop_assert_eq!(&Pool::from_json(&one.to_json()).unwrap(), &one);
    }

    #[test]
    fn pools_are_equal_exactly_where_their_bytes_are(a in any_pool(), b in any_pool()) {
        prop_assert_eq!(a == b, a.as_ref().map(Pool::canonical_bytes) == b.as_ref().map(Pool::canonical_bytes));
        if let (Some(a), Some(b)) = (a, b) {
            prop_assert_eq!(a == b, a.fingerprint() == b.fingerprint());
            prop_assert_eq!(a == b, a.differences(&b).is_empty());
        }
    }

    /// Whatever is read back from damaged bytes has exactly those bytes: nothing else passes.
    #[test]
    fn damaged_bytes_are_refused_or_mean_something_else(
        at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>(),
    ) {
        for (bytes, is_pool) in [(namespace().canonical_bytes(), false), (kv().canonical_bytes(), true)] {
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] = byte;
            for bytes in [&changed[..], &bytes[..cut.index(bytes.len())]] {
                let again = if is_pool {
                    Pool::from_canonical_bytes(bytes).map(|pool| pool.canonical_bytes())
                } else {
                    Namespace::from_canonical_bytes(bytes).map(|namespace| namespace.canonical_bytes())
                };
                match again {
                    Ok(again) => prop_assert_eq!(again, bytes),
                    Err(error) => prop_assert!(
                        matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::UnsupportedVersion), "{}", error
                    ),
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused(tail in prop::collection::vec(any::<u8>(), 0..80)) {
        for tag in ["", "hicache-namespace", "hicache-namespace\u{1}\0\0\0", "hicache-pool", "hicache-pool\u{1}\0\0\0"] {
            let bytes = [tag.as_bytes(), &tail].concat();
            if let Ok(namespace) = Namespace::from_canonical_bytes(&bytes) {
                prop_assert_eq!(namespace.canonical_bytes(), bytes.clone());
            }
            if let Ok(pool) = Pool::from_canonical_bytes(&bytes) {
                prop_assert_eq!(pool.canonical_bytes(), bytes);
            }
        }
    }
}

#[test]
fn the_canonical_bytes_are_these() {
    let mut expected = b"hicache-namespace".to_vec();
    expected.extend_from_slice(b"\x01\0\0\0\x09\0org/model\x0a\0sha256:abc\x40\0\0\0\x01\x08\0tenant-1");
    assert_eq!(namespace().canonical_bytes(), expected);

    let mut expected = b"hicache-pool".to_vec();
    expected.extend_from_slice(b"\x01\0\0\0\x02\0kv\x02\0kv\x08\0bfloat16\0\x02");
    expected.extend_from_slice(b"\x01\0k\0\x01\0\0\0\0\x01\0v\0\x01\0\0\0\0");
    assert_eq!(kv().canonical_bytes(), expected);

    // Computed apart with Python's hashlib over the bytes above.
    assert_eq!(namespace().fingerprint().to_string(), "33654d11f59488fdadacae61216beaeb");
    assert_eq!(kv().fingerprint().to_string(), "5ed03dbc73a1afe89d254eb15e6e0ac8");
}

#[test]
fn the_longest_identities_fit_one_header_page() {
    let model = "m".repeat(Namespace::MAX_MODEL_BYTES);
    let revision = "r".repeat(Namespace::MAX_REVISION_BYTES);
    let salt = "s".repeat(Namespace::MAX_SALT_BYTES);
    let namespace = Namespace::new(&model, &revision, 65_536, Some(&salt)).unwrap();
    let name = |i: usize| format!("{i:0>width$}", width = Pool::MAX_NAME_BYTES);
    let components = (0..Pool::MAX_COMPONENTS)
        .map(|i| Component {
            name: name(i),
            dtype: Some(DType::Float8E4m3fnuz),
            ..Component::per_token("", 8)
        })
        .collect();
    let pool = Pool::new(&name(0), PoolKind::DraftIndexer, DType::Float8E5m2fnuz, Some(&name(1)), components)
        .unwrap();
    assert!(namespace.canonical_bytes().len() <= 1600);
    assert!(pool.canonical_bytes().len() <= 2300);
}

#[test]
fn unusable_namespaces_are_refused() {
    let long = "x".repeat(1025);
    let cases = [
        (Namespace::new("", "r", 64, None), "model id is empty"),
        (Namespace::new("m\0", "r", 64, None), "NUL"),
        (Namespace::new(&long, "r", 64, None), "1025 bytes"),
        (Namespace::new("m", "", 64, None), "`unversioned`"),
        (Namespace::new("m", "r\0", 64, None), "NUL"),
        (Namespace::new("m", &long[..257], 64, None), "257 bytes"),
        (Namespace::new("m", "r", 0, None), "page_size is 0"),
        (Namespace::new("m", "r", 65_537, None), "page_size is 65537"),
        (Namespace::new("m", "r", 64, Some("")), "salt is empty"),
        (Namespace::new("m", "r", 64, Some("\0")), "NUL"),
        (Namespace::new("m", "r", 64, Some(&long[..257])), "257 bytes"),
    ];
    for (result, part) in cases {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Namespace);
        assert!(error.message().contains(part), "{error}");
    }
    let unversioned = Namespace::new("m", Namespace::UNVERSIONED, 64, None).unwrap();
    assert!(unversioned.is_unversioned() && !namespace().is_unversioned());
}

#[test]
fn differences_name_each_field_with_both_values() {
    let other = Namespace::new("org/other", "sha256:def", 32, None).unwrap();
    let text: Vec<String> = namespace().differences(&other).iter().map(ToString::to_string).collect();
    let expected = [
        "model: org/model is not org/other",
        "revision: sha256:abc is not sha256:def",
        "page_size: 64 is not 32",
        "salt: \"tenant-1\" is not absent",
    ];
    assert_eq!(text, expected);

    let components = vec![
        Component { name: "key".into(), unit: RowUnit::Page, dtype: Some(DType::UInt8), row_bytes: 128 },
        Component::per_token("v", 256),
        Component::per_token("scales", 8),
    ];
    let other = Pool::new("kv2", PoolKind::Swa, DType::Float16, Some("packed"), components).unwrap();
    let fields: Vec<String> = kv().differences(&other).into_iter().map(|one| one.field).collect();
    let expected = [
        "name",
        "kind",
        "dtype",
        "row_format",
        "components[0].name",
        "components[0].row_bytes",
        "components[0].unit",
        "components[0].dtype",
        "components[2]",
    ];
    assert_eq!(fields, expected);
}

/// One field changed alone is another identity, and the difference names that field and no other.
#[test]
fn each_field_counts_by_itself() {
    let change = |mut value: Value, path: &str, new: Value| {
        *value.pointer_mut(path).unwrap() = new;
        value
    };
    let one = namespace();
    for (field, new) in [
        ("model", json!("org/model2")),
        ("revision", json!("unversioned")),
        ("page_size", json!(128)),
        ("salt", json!("tenant-2")),
        ("salt", Value::Null),
    ] {
        let other = Namespace::from_json(&change(one.to_json(), &format!("/{field}"), new)).unwrap();
        assert_ne!(one.fingerprint(), other.fingerprint(), "{field}");
        let fields: Vec<String> = one.differences(&other).into_iter().map(|found| found.field).collect();
        assert_eq!(fields, [field]);
    }
    let one = kv();
    for (path, field, new) in [
        ("/name", "name", json!("kv2")),
        ("/kind", "kind", json!("draft")),
        ("/dtype", "dtype", json!("float16")),
        ("/row_format", "row_format", json!("packed")),
        ("/components/0/name", "components[0].name", json!("key")),
        ("/components/1/row_bytes", "components[1].row_bytes", json!(128)),
        ("/components/1/unit", "components[1].unit", json!("page")),
        ("/components/0/dtype", "components[0].dtype", json!("float16")),
    ] {
        let other = Pool::from_json(&change(one.to_json(), path, new)).unwrap();
        assert_ne!(one.fingerprint(), other.fingerprint(), "{field}");
        let fields: Vec<String> = one.differences(&other).into_iter().map(|found| found.field).collect();
        assert_eq!(fields, [field]);
    }
    let swapped = one.components().iter().rev().cloned().collect();
    let swapped = Pool::new("kv", PoolKind::Kv, DType::BFloat16, None, swapped).unwrap();
    assert_ne!(one.fingerprint(), swapped.fingerprint(), "the order of components is the order of bytes");
}

#[test]
fn text_is_not_normalised() {
    let composed = Namespace::new("gr\u{f6}\u{df}e", "r", 64, None).unwrap();
    let decomposed = Namespace::new("gro\u{308}\u{df}e", "r", 64, None).unwrap();
    assert_ne!(composed.fingerprint(), decomposed.fingerprint());
}

#[test]
fn json_errors_name_the_field() {
    let edit = |mut value: Value, field: &str, new: Option<Value>| {
        let map = value.as_object_mut().unwrap();
        match new {
            Some(new) => map.insert(field.to_owned(), new),
            None => map.remove(field),
        };
        value
    };
    for field in ["schema_version", "model", "revision", "page_size"] {
        let error = Namespace::from_json(&edit(namespace().to_json(), field, None)).unwrap_err();
        assert_eq!(error.message(), format!("namespace lacks the field \"{field}\""));
    }
    let unsalted = Namespace::from_json(&edit(namespace().to_json(), "salt", None)).unwrap();
    assert_eq!(unsalted.salt(), None);
    for (field, value, part) in [
        ("tp_size", json!(4), "unknown field \"tp_size\""),
        ("page_size", json!("64"), "\"page_size\" is text, expected an integer"),
        ("page_size", json!(-1), "\"page_size\" is -1"),
        ("page_size", json!(1.5), "\"page_size\" is 1.5"),
        ("page_size", json!(1u64 << 32), "\"page_size\" is 4294967296"),
        ("model", json!(7), "\"model\" is 7, expected text"),
        ("salt", json!([]), "\"salt\" is an array, expected text"),
    ] {
        let error = Namespace::from_json(&edit(namespace().to_json(), field, Some(value))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Namespace);
        assert!(error.message().contains(part), "{error}");
    }
    assert!(Namespace::from_json(&json!([1])).unwrap_err().message().contains("got an array"));
    for newer in [
        Namespace::from_json(&edit(namespace().to_json(), "schema_version", Some(json!(2)))).unwrap_err(),
        Pool::from_json(&edit(kv().to_json(), "schema_version", Some(json!(2)))).unwrap_err(),
    ] {
        assert_eq!(newer.kind(), ErrorKind::UnsupportedVersion);
    }

    for field in ["schema_version", "name", "kind", "dtype", "components"] {
        let error = Pool::from_json(&edit(kv().to_json(), field, None)).unwrap_err();
        assert_eq!(error.message(), format!("pool lacks the field \"{field}\""));
    }
    let mut bad = kv().to_json();
    bad["components"][1] = json!({"name": "v", "row_byte": 256});
    assert!(Pool::from_json(&bad).unwrap_err().message().contains("unknown field \"row_byte\""));
    bad["components"][1] = json!({"name": "v"});
    assert_eq!(Pool::from_json(&bad).unwrap_err().message(), "pool component lacks the field \"row_bytes\"");
    bad["components"][1] = json!({"name": "v", "row_bytes": 256});
    assert_eq!(Pool::from_json(&bad).unwrap(), kv());
}

#[test]
fn a_dtype_without_its_scales_is_refused() {
    let payload = || Component::per_token("payload", 64);
    for dtype in [DType::MxFp8, DType::MxFp4, DType::NvFp4, DType::Float4E2m1, DType::Fp4MxBlock16] {
        let error = Pool::new("kv", PoolKind::Kv, dtype, None, vec![payload()]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Namespace);
        assert!(error.message().contains("without its scales"), "{error}");
        // The type of a component counts as the pool's does.
        let own = Component { dtype: Some(dtype), ..payload() };
        assert!(Pool::new("kv", PoolKind::Kv, DType::BFloat16, None, vec![own]).is_err());
        let scales = Component::per_token("k_Scale", 4);
        Pool::new("kv", PoolKind::Kv, dtype, None, vec![payload(), scales]).unwrap();
    }
}

#[test]
fn page_bytes_are_the_sum_of_the_components() {
    let components = vec![Component::per_token("payload", 4), Component::per_page("scales", 16)];
    let pool = Pool::new("kv", PoolKind::Kv, DType::Float8E4m3fn, None, components).unwrap();
    assert_eq!(pool.page_bytes(&tile(1, 1, 64)).unwrap(), 64 * 4 + 16);
    assert_eq!(pool.page_bytes(&tile(3, 2, 64)).unwrap(), 3 * 2 * (64 * 4 + 16));
    assert_eq!(kv().page_bytes(&tile(16, 4, 64)).unwrap(), 2 * 256 * 16 * 4 * 64);

    let huge = vec![Component::per_token("k", u32::MAX)];
    let huge = Pool::new("kv", PoolKind::Kv, DType::UInt8, None, huge).unwrap();
    assert_eq!(huge.page_bytes(&tile(65_536, 65_536, 65_536)).unwrap_err().kind(), ErrorKind::Geometry);
    let empty = Tile { layers: Span { start: 1, end: 1 }, ..tile(1, 1, 1) };
    assert_eq!(huge.page_bytes(&empty).unwrap_err().kind(), ErrorKind::Geometry);
}

#[test]
fn unusable_pools_are_refused() {
    let k = || Component::per_token("k", 256);
    let named = |name: &str| Component { name: name.to_owned(), ..k() };
    let new = |name: &str, components| Pool::new(name, PoolKind::Kv, DType::BFloat16, None, components);
    let long = "x".repeat(101);
    let many = (0..17).map(|i| named(&i.to_string())).collect();
    let format = |text| Pool::new("kv", PoolKind::Kv, DType::BFloat16, Some(text), vec![k()]);
    let cases = [
        (new("", vec![k()]), ErrorKind::Namespace, "is empty"),
        (new("k\0", vec![k()]), ErrorKind::Namespace, "NUL"),
        (new(&long, vec![k()]), ErrorKind::Namespace, "101 bytes"),
        (new("kv", vec![]), ErrorKind::Namespace, "0 components"),
        (new("kv", many), ErrorKind::Namespace, "17 components"),
        (new("kv", vec![k(), k()]), ErrorKind::Namespace, "two components named \"k\""),
        (new("kv", vec![named("")]), ErrorKind::Namespace, "component 0 of pool \"kv\" is empty"),
        (new("kv", vec![named("a\0b")]), ErrorKind::Namespace, "NUL"),
        (new("kv", vec![named(&long)]), ErrorKind::Namespace, "101 bytes"),
        (new("kv", vec![Component::per_token("k", 0)]), ErrorKind::Geometry, "rows of 0 bytes"),
        (
            new("kv", vec![Component::per_token("k", 255)]),
            ErrorKind::Geometry,
            "not a whole number of bfloat16",
        ),
        (format(""), ErrorKind::Namespace, "row format"),
        (format(&long), ErrorKind::Namespace, "101 bytes"),
    ];
    for (result, kind, part) in cases {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(part), "{error}");
    }
}

/// Field cases D02 and D09: the same byte counts under another element type are another pool.
#[test]
fn equal_sizes_do_not_make_equal_pools() {
    let with = |dtype| {
        Pool::new("kv", PoolKind::Kv, dtype, None, vec![Component::per_token("k", 256)])
            .unwrap()
            .fingerprint()
    };
    let all =
        [DType::BFloat16, DType::Float16, DType::Float8E4m3fn, DType::Float8E4m3fnuz, DType::UInt8].map(with);
    for (i, one) in all.iter().enumerate() {
        assert!(!all[..i].contains(one));
    }
}

#[test]
fn an_element_type_named_twice_is_named_once() {
    let components = vec![Component { dtype: Some(DType::BFloat16), ..Component::per_token("k", 256) }];
    let twice = Pool::new("kv", PoolKind::Kv, DType::BFloat16, None, components).unwrap();
    let once = vec![Component::per_token("k", 256)];
    let once = Pool::new("kv", PoolKind::Kv, DType::BFloat16, None, once).unwrap();
    assert_eq!(twice, once);
    // And bytes that name it again, or by an alias, are not the canonical ones.
    let alias = once.canonical_bytes();
    let at = alias.windows(8).position(|part| part == b"bfloat16").unwrap();
    let alias = [&alias[..at - 2], b"\x04\0bf16", &alias[at + 8..]].concat();
    assert_eq!(Pool::from_canonical_bytes(&alias).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn hit_policies_count_at_least_one_page() {
    let block = |block_pages, group_pages| HitPolicy::BlockGroups { block_pages, group_pages };
    for good in [HitPolicy::AllPages, HitPolicy::TrailingPages(1), block(4, 1), block(4, 4)] {
        good.validate().unwrap();
    }
    for bad in [HitPolicy::TrailingPages(0), block(0, 1), block(1, 0), block(4, 5)] {
        assert_eq!(bad.validate().unwrap_err().kind(), ErrorKind::Config);
    }
}
