//! The options of the SGLang storage backend: what is accepted, what is filled in, what is said about the rest.

use std::ffi::OsString;

use hicache_cli::sglang_options::{advice, parse};
use serde_json::{Value, json};

const LEAST: &str = r#"{"path": "/srv/cache"}"#;

/// Exit code and standard output of `sglang-config`.
fn tool(args: &[&str]) -> (i32, String) {
    let args: Vec<OsString> =
        ["hicache-store", "sglang-config"].iter().chain(args).map(OsString::from).collect();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = hicache_cli::run_with_answers(&args, &mut out, &mut err, None);
    (code, String::from_utf8([out, err].concat()).unwrap())
}

fn with(name: &str, value: Value) -> String {
    json!({ "path": "/srv/cache", name: value }).to_string()
}

#[test]
fn what_is_not_given_has_its_default() {
    let options = parse(LEAST).unwrap();
    let expected = json!({
        "path": "/srv/cache", "capacity": null, "free_space_floor": null, "time_to_live": null, "model": null,
        "revision": null, "salt": null, "model_path": null, "total_layers": null, "total_kv_heads": null,
        "cp_kind": null, "codec": "none", "durable": false, "verify": true, "io_mode": "auto", "io_threads": null,
        "deadline": 5.0, "bounce": "auto", "detect_conflicts": false, "metrics": null, "interface_v1": false,
    });
    assert_eq!(Value::Object(options), expected);
}

#[test]
fn what_is_given_is_kept_as_it_is() {
    for (name, value) in [
        ("capacity", json!("500GiB")),
        ("capacity", json!(16 << 20)),
        ("free_space_floor", json!(0)),
        ("time_to_live", json!(3600)),
        ("revision", json!("unversioned")),
        ("total_layers", json!(61)),
        ("total_kv_heads", json!(8)),
        ("cp_kind", json!("replicated")),
        ("codec", json!("zstd:22")),
        ("durable", json!(true)),
        ("io_mode", json!("direct")),
        ("io_threads", json!(256)),
        ("deadline", json!(0.1)),
        ("deadline", json!(9)),
        ("bounce", json!("never")),
        ("metrics", json!({"textfile": "/run/hicache.prom"})),
        ("metrics", json!({"port": 9400, "host": "::1"})),
    ] {
        assert_eq!(parse(&with(name, value.clone())).unwrap()[name], value, "{name}");
    }
    assert_eq!(parse(&with("interface_v1", json!(1))).unwrap()["interface_v1"], json!(true));
}

#[test]
fn what_cannot_be_is_refused_with_what_was_expected() {
    for (name, value) in [
        ("path", json!("")),
        ("path", json!(7)),
        ("capacity", json!("15MiB")),
        ("capacity", json!("much")),
        ("capacity", json!(-1)),
        ("time_to_live", json!(0)),
        ("total_layers", json!(0)),
        ("total_kv_heads", json!(1.5)),
        ("cp_kind", json!("both")),
        ("codec", json!("zstd:23")),
        ("codec", json!("lz4")),
        ("durable", json!(1)),
        ("io_mode", json!("mmap")),
        ("io_threads", json!(257)),
        ("deadline", json!(9.5)),
        ("deadline", json!("5")),
        ("bounce", json!(true)),
        ("metrics", json!({})),
        ("metrics", json!({"textfile": "/a", "port": 1})),
        ("metrics", json!({"port": 0})),
        ("metrics", json!({"port": 9400, "host": "0.0.0.0"})),
        ("metrics", json!({"textfile": "/a", "hots": "x"})),
    ] {
        let message = parse(&with(name, value.clone())).unwrap_err();
        let names_all = ["expected ", name, &value.to_string()].iter().all(|part| message.contains(part));
        assert!(names_all, "{name}: {message}");
    }
    for text in ["", "[]", "{", "7", "{}", r#"{"path": null}"#] {
        assert!(parse(text).unwrap_err().starts_with("expected "), "{text}");
    }
}

#[test]
fn an_unknown_option_is_refused_with_the_nearest_known_one() {
    for (wrong, nearest) in [
        ("capcity", "capacity"),
        ("dead_line", "deadline"),
        ("interfacev1", "interface_v1"),
        ("hicache_storage_pass_prefix_key", "hicache_storage_pass_prefix_keys"),
        ("total_heads", "total_kv_heads"),
    ] {
        let message = parse(&with(wrong, json!(1))).unwrap_err();
        assert!(message.contains(&format!("{wrong:?}; did you mean {nearest:?}?")), "{message}");
    }
}

#[test]
fn options_of_the_engine_are_passed_over() {
    for name in [
        "backend_name",
        "module_path",
        "class_name",
        "allocator",
        "tp_lcm_size",
        "file_storage_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    ] {
        assert!(!parse(&with(name, json!("any"))).unwrap().contains_key(name), "{name}");
    }
}

#[test]
fn the_printed_string_is_fine_and_loads_the_backend() {
    let (code, text) = tool(&[
        "--path",
        "/srv/cache",
        "--capacity",
        "1TiB",
        "--option",
        "deadline=2.5",
        "--option",
        "salt=a",
    ]);
    assert_eq!(code, 0, "{text}");
    let options: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(options["module_path"], "hicache_store.sglang");
    assert_eq!(options["class_name"], "HiCacheStoreBackend");
    assert_eq!((&options["deadline"], &options["salt"]), (&json!(2.5), &json!("a")));
    assert_eq!(advice(&text).unwrap(), Vec::<String>::new());
    assert_eq!(tool(&["--check", &text]), (0, "fine\n".into()));
    let (code, text) = tool(&["--path", "/srv/cache", "--option", "deadlin=2"]);
    assert!(code == 2 && text.contains("did you mean \"deadline\"?"), "{code} {text}");
}

#[test]
fn a_string_that_the_engine_makes_little_of_is_told_what_to_add() {
    let (code, text) = tool(&["--check", LEAST]);
    assert_eq!(code, 1);
    for missing in
        ["backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys"]
    {
        assert!(text.contains(&format!("without {missing:?}")), "{missing}: {text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("options.json");
    std::fs::write(&path, with("codec", json!("lz4"))).unwrap();
    let (code, text) = tool(&["--check", &format!("@{}", path.display())]);
    assert!(code == 1 && text.contains("expected \"none\", \"zstd\""), "{code} {text}");
    let (code, text) = tool(&["--check", "@/nowhere/options.json"]);
    assert!(code == 2 && text.contains("/nowhere/options.json"), "{code} {text}");
}
