//! The store tool: what it says, what it counts, what it leaves alone.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hicache_core::format::frame::{
    AddRun, AddUnit, Frame, FrameKind, Gone, Location, Reason, encode_add, encode_counters, encode_gone,
    short_key,
};
use hicache_core::format::ledger::Ledger;
use hicache_core::format::{ProcessId, SegmentId};
use hicache_core::inspect::{self, ObjectState};
use hicache_core::namespace::Fingerprint;
use hicache_core::{
    LayoutName, Namespace, PageKey, PoolPlacement, RestoreOutcome, Store, StoreOptions, View, ViewOptions,
    ViewPool,
};
use serde_json::{Value, json};

use crate::support::{
    Memory, backup, keys, kv_pool, namespace, open, page_bytes, restore, tile, tiny, tiny_view,
};

/// Bytes of a page of the tiny deployment.
const PAGE: usize = 512;
/// First payload byte of a segment.
const PAYLOAD: u64 = 4096;

struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }
}

fn run_answered(args: &[&str], answers: Option<&mut dyn BufRead>) -> Ran {
    let args: Vec<OsString> = ["hicache-store"].iter().chain(args).map(OsString::from).collect();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = hicache_cli::run_with_answers(&args, &mut out, &mut err, answers);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code, out: text(out), err: text(err) }
}

fn run(args: &[&str]) -> Ran {
    run_answered(args, None)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Stores `count` pages of `chain` in a namespace of one tiny pool.
fn fill(store: &Store, namespace: Namespace, chain: &str, count: usize) -> (View, Vec<PageKey>) {
    let view = store.view(namespace, vec![tiny()], ViewOptions::default()).unwrap();
    let keys = keys(chain, count);
    let report = backup(&view, &keys, &Memory::of(&page_bytes(7, count * PAGE)));
    assert_eq!(report.reason, None);
    (view, keys)
}

/// A root with `count` pages of the tiny namespace, closed.
fn tiny_root(count: usize) -> (tempfile::TempDir, Vec<PageKey>, String) {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let (view, keys) = fill(&store, namespace("r1"), "tool", count);
    let fingerprint = view.fingerprint().to_string();
    (root, keys, fingerprint)
}

/// A store that says nothing but what it is asked to.
fn quiet(root: &Path) -> Store {
    let options =
        StoreOptions { capacity_bytes: Some(64 << 20), keeps_no_house: true, ..StoreOptions::default() };
    Store::open(root, options).unwrap()
}

/// Keys and values of a page: `page_first` memory holds those of all pages in two stretches.
fn of_page(memory: &[u8], page: usize) -> [&[u8]; 2] {
    let (keys, values) = memory.split_at(memory.len() / 2);
    [keys, values].map(|half| &half[page * PAGE / 2..(page + 1) * PAGE / 2])
}

fn segments(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = snapshot(root).into_keys().collect();
    found.retain(|path| path.extension().is_some_and(|extension| extension == "seg"));
    found
}

fn flip(path: &Path, offset: u64) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[offset as usize] ^= 0x40;
    std::fs::write(path, bytes).unwrap();
}

/// Every path below `root` with its time and bytes.
fn snapshot(root: &Path) -> BTreeMap<PathBuf, (SystemTime, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let bytes = if metadata.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
            found.insert(path.clone(), (metadata.modified().unwrap(), bytes));
            if metadata.is_dir() {
                folders.push(path);
            }
        }
    }
    found
}

/// Leaves a journal of a process that has ended.
fn say(root: &Path, process: u8, namespace: Fingerprint, frames: &[(FrameKind, Vec<u8>)]) -> PathBuf {
    let process = ProcessId([process; 16]);
    let frame = |(sequence, (kind, body)): (usize, &(FrameKind, Vec<u8>))| {
        let (kind, sequence) = (*kind, sequence as u64);
        Frame { process, sequence, kind, records: 1, namespace, written_ns: u64::MAX, body }.encode()
    };
    let path = root.join("journal").join(format!("{process}-0.idx"));
    std::fs::write(&path, frames.iter().enumerate().flat_map(frame).collect::<Vec<u8>>()).unwrap();
    path
}

#[test]
fn ls_lists_namespaces_forms_and_objects() {
    let (root, keys, fingerprint) = tiny_root(3);
    {
        let store = open(root.path());
        let odd = Namespace::new("evil\u{1b}[31m\u{202e}\nmodel", "unversioned", 4, Some("salt")).unwrap();
        fill(&store, odd, "odd", 1);
    }
    let root = text(root.path());
    let ran = run(&["ls", root]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let line = ran.out.lines().find(|line| line.contains(&fingerprint)).unwrap();
    assert!(line.contains("org/tiny") && line.contains("r1") && line.contains("1.5 KiB"), "{line}");
    assert!(
        ran.out.contains("unversioned") && ran.out.contains("\\u{1b}[31m\\u{202e}\\nmodel"),
        "{}",
        ran.out
    );
    assert!(!ran.out.contains(['\u{1b}', '\u{202e}']) && ran.out.lines().count() == 3);

    let document = run(&["ls", root, "--json"]).json();
    assert_eq!((&document["schema"], &document["command"]), (&json!(1), &json!("ls")));
    let list = document["namespaces"].as_array().unwrap();
    let found = list.iter().find(|found| found["fingerprint"] == json!(fingerprint)).unwrap();
    assert_eq!(found["namespace"]["model"], "org/tiny");
    assert_eq!(
        (&found["objects"]["live"], &found["objects"]["live_stored_bytes"]),
        (&json!(3), &json!(1536))
    );
    assert_eq!(found["pools"][0]["pool"]["name"], "kv");
    assert!(list.iter().any(|found| found["is_unversioned"] == json!(true)));

    let forms = run(&["ls", root, "--namespace", &fingerprint]);
    assert!(
        forms.out.contains("layers 0..2 heads 0..2") && forms.out.contains("page_first"),
        "{}",
        forms.out
    );
    let objects = run(&["ls", root, "--namespace", &fingerprint, "--objects", "--limit", "2"]);
    assert!(objects.out.contains(&keys[0].to_string()) && objects.out.contains(&keys[1].to_string()));
    assert!(!objects.out.contains(&keys[2].to_string()) && objects.err.contains("2 of 3"), "{}", objects.err);
    let objects = run(&["ls", root, "--namespace", &fingerprint, "--objects", "--limit=0", "--json"]).json();
    let listed = objects["namespaces"][0]["objects_listed"].as_array().unwrap();
    assert_eq!(listed.len(), 3);
    assert_eq!(
        (&listed[2]["key"], &listed[2]["state"], &listed[2]["depth"]),
        (&json!(keys[2].to_string()), &json!("live"), &json!(2))
    );
}

#[test]
fn stat_counts_over_living_and_dead_processes() {
    let (root, ..) = tiny_root(3);
    let store = open(root.path());
    let (view, keys) = fill(&store, namespace("r1"), "tool", 5);
    restore(&view, &keys, &Memory::canary(5 * PAGE));
    let before = run(&["stat", text(root.path()), "--json"]).json();
    assert_eq!((&before["processes"]["alive"], &before["processes"]["dead"]), (&json!(1), &json!(1)));
    assert_eq!(before["objects"]["live"], 5);
    assert_eq!(before["capacity_bytes"], 64 << 20);
    assert!(before["used_bytes"].as_u64().unwrap() >= 5 * PAGE as u64);
    assert_eq!((&before["segments"]["count"], &before["segments"]["sealed"]), (&json!(2), &json!(1)));
    store.close();
    let ran = run(&["stat", text(root.path())]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(ran.out.contains("0 alive, 2 ended") && ran.out.contains("5 live (2.5 KiB)"), "{}", ran.out);
    let after = run(&["stat", text(root.path()), "--json"]).json();
    let counters = &after["counters"];
    assert_eq!((&counters["backup_stored_pages"], &counters["backup_present_pages"]), (&json!(5), &json!(3)));
    assert_eq!((&counters["restore_restored_pages"], &after["problems"]), (&json!(5), &json!([])));
}

#[test]
fn stat_says_what_is_granted_and_to_whom() {
    let (root, ..) = tiny_root(3);
    let store = quiet(root.path());
    fill(&store, namespace("r2"), "granted", 2);
    store.used_bytes(); // measures: what was written is no longer outstanding
    let document = run(&["stat", text(root.path()), "--json"]).json();
    let list = document["processes"]["list"].as_array().unwrap();
    assert_eq!(list.len(), 2);
    let of = |process: &Value, field: &str| process[field].as_u64();
    for process in list {
        let is_alive = process["is_alive"] == json!(true);
        assert_eq!(process["process"] == json!(store.process().to_string()), is_alive);
        assert_eq!(of(process, "segments"), Some(1), "{process}");
        assert!(of(process, "journal_bytes") > Some(0), "{process}");
        let disk_bytes = of(process, "disk_bytes");
        assert!(disk_bytes > Some(2 * PAGE as u64), "{process}");
        // Only who lives may take more.
        assert_eq!(of(process, "limit_bytes").is_some(), is_alive, "{process}");
        assert!(!is_alive || of(process, "limit_bytes") >= disk_bytes, "{process}");
        let (limit, outstanding) = (of(process, "limit_bytes"), of(process, "outstanding_bytes"));
        assert!(!is_alive || Some(0) < outstanding && outstanding < limit, "{process}");
    }
    let limits: u64 = list.iter().filter_map(|process| of(process, "limit_bytes")).sum();
    let outstanding: u64 = list.iter().filter_map(|process| of(process, "outstanding_bytes")).sum();
    let budget = &document["budget"];
    assert_eq!(of(budget, "granted_bytes"), of(budget, "nobody_bytes").map(|nobody| nobody + limits));
    assert_eq!(of(budget, "outstanding_bytes"), Some(outstanding));
    assert!(of(&document, "used_bytes") <= of(budget, "granted_bytes"));
    assert!(of(budget, "granted_bytes") <= of(&document, "capacity_bytes"));

    let said = run(&["stat", text(root.path())]).out;
    let row = said.lines().find(|line| line.starts_with(&store.process().to_string())).unwrap();
    assert!(row.contains("alive") && said.contains("granted"), "{said}");
    store.close();
    let document = run(&["stat", text(root.path()), "--json"]).json();
    let limits: Vec<&Value> = document["processes"]["list"]
        .as_array()
        .unwrap()
        .iter()
        .map(|process| &process["limit_bytes"])
        .collect();
    assert_eq!(limits, [&Value::Null, &Value::Null]);
}

#[test]
fn a_damaged_ledger_is_told_and_a_new_one_is_not() {
    let (root, ..) = tiny_root(1);
    let path = root.path().join("budget");
    let args = ["stat", text(root.path()), "--json"];
    let whole = run(&args);
    assert_eq!((whole.code, &whole.json()["budget"]["outstanding_bytes"]), (0, &json!(0)), "{}", whole.err);
    assert!(Ledger::decode(&std::fs::read(&path).unwrap()).is_ok());
    flip(&path, 40);
    let damaged = run(&args);
    let problem = damaged.json()["problems"][0].clone();
    assert_eq!((damaged.code, &problem["kind"], &problem["path"]), (1, &json!("damaged"), &json!("budget")));
    assert_eq!(damaged.json()["budget"], Value::Null);
    // A process that was killed between making the file and writing to it leaves zeros.
    std::fs::write(&path, vec![0; 16 << 10]).unwrap();
    assert_eq!((run(&args).code, &run(&args).json()["budget"]), (0, &Value::Null));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(run(&args).code, 0);
}

#[test]
fn what_left_is_counted_by_its_reason() {
    let (root, ..) = tiny_root(7);
    let scan = inspect::scan(root.path()).unwrap();
    let reasons = [Reason::Evicted, Reason::Expired, Reason::Expired, Reason::Duplicate, Reason::Other(99)];
    let gone: Vec<Gone> = scan.namespaces[0]
        .objects()
        .zip(reasons)
        .map(|(object, reason)| Gone { location: object.location(), key: object.key, objects: 1, reason })
        .collect();
    say(root.path(), 9, scan.namespaces[0].fingerprint, &[(FrameKind::Remove, encode_gone(&gone))]);
    let objects = run(&["stat", text(root.path()), "--json"]).json()["objects"].clone();
    let count = |state: &str| objects[state].as_u64().unwrap();
    assert_eq!(
        [count("live"), count("evicted"), count("expired"), count("duplicate"), count("other")],
        [2, 1, 2, 1, 1]
    );
    let said = run(&["stat", text(root.path())]).out;
    assert!(said.contains("1 evicted, 2 expired, 1 duplicate"), "{said}");
    assert_eq!(run(&["ls", text(root.path()), "--json"]).json()["namespaces"][0]["objects"]["expired"], 2);
}

#[test]
fn pages_that_go_during_a_check_or_an_export_are_no_findings() {
    let (root, ..) = tiny_root(3);
    let scan = inspect::scan(root.path()).unwrap();
    // Evicted with its whole segment, and the journals written anew: nothing tells of the pages any more.
    std::fs::remove_file(&segments(root.path())[0]).unwrap();
    for entry in std::fs::read_dir(root.path().join("journal")).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    say(root.path(), 9, Fingerprint([0; 16]), &[(FrameKind::Checkpoint, Vec::new())]);
    let (_, findings) = inspect::verify(&scan, None, &|_| ()).unwrap();
    assert_eq!(findings, []);
    let exported = inspect::archive::export_units(&scan.namespaces[0], &mut |_| Ok(())).unwrap();
    assert_eq!((exported.objects, exported.damaged, exported.removed), (0, 0, 3));
}

/// Names of the fields of a document, in order.
fn fields(document: &Value) -> Vec<&str> {
    document.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn prune_takes_pages_for_all_and_asks_before_it_takes_a_revision() {
    let root = tempfile::tempdir().unwrap();
    // It does not tell of uses, which would come later than the prune's moment.
    let store = quiet(root.path());
    let (first, first_keys) = fill(&store, namespace("r1"), "first", 4);
    let (second, second_keys) = fill(&store, namespace("r2"), "second", 3);
    let pages = |view: &View, keys: &[PageKey]| view.match_prefix(keys).unwrap().pages;
    let prune = |args: &[&str]| run(&[&["prune", text(root.path())], args].concat());

    let nothing = prune(&["--to", "1GiB", "--json"]);
    assert_eq!((nothing.code, nothing.err.as_str()), (0, ""));
    assert_eq!(
        fields(&nothing.json()),
        ["command", "objects", "root", "schema", "used_bytes", "used_bytes_before"]
    );
    assert_eq!(nothing.json()["objects"], 0);
    assert_eq!(prune(&["--older-than", "1h", "--json"]).json()["objects"], 0);

    let args = ["prune", text(root.path()), "--revision", "r2"];
    let refused = run(&args);
    assert!(refused.code == 2 && refused.err.contains("--yes"), "{}", refused.err);
    let no = run_answered(&args, Some(&mut &b"\n"[..]));
    assert!(no.code == 2 && no.err.contains("r2: 3 objects"), "{}", no.err);
    assert_eq!((pages(&first, &first_keys), pages(&second, &second_keys)), (4, 3));
    let yes = run_answered(&args, Some(&mut &b"yes\n"[..]));
    assert!(yes.code == 0 && yes.out.starts_with("3 objects removed"), "{}{}", yes.out, yes.err);
    assert_eq!((pages(&first, &first_keys), pages(&second, &second_keys)), (4, 0));

    let old = prune(&["--older-than", "0s", "--json"]);
    assert_eq!((old.code, &old.json()["objects"]), (0, &json!(4)), "{}", old.err);
    assert_eq!(pages(&first, &first_keys), 0);
    let (third, third_keys) = fill(&store, namespace("r3"), "third", 5);
    let all = prune(&["--to", "0B"]);
    assert!(all.code == 0 && all.out.starts_with("5 objects removed"), "{}{}", all.out, all.err);
    assert_eq!(pages(&third, &third_keys), 0);
    assert_eq!(fill(&store, namespace("r1"), "first", 4).0.match_prefix(&first_keys).unwrap().pages, 4);
}

#[test]
fn resize_counts_for_a_live_store_and_pages_leave_until_it_holds() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    // Pages of 512 KiB, 24 MiB of them.
    let pool = ViewPool::new(kv_pool("bfloat16", 16 << 10), tile((0, 2), (0, 2)), LayoutName::PageFirst);
    let view = store.view(namespace("r1"), vec![pool], ViewOptions::default()).unwrap();
    let keys = keys("large", 48);
    let page = view.page_bytes(0) as usize;
    assert_eq!(backup(&view, &keys, &Memory::of(&page_bytes(3, keys.len() * page))).reason, None);
    let resize = |size: &str| run(&["resize", text(root.path()), size, "--json"]);

    let larger = resize("128MiB");
    assert_eq!((larger.code, larger.err.as_str()), (0, ""));
    assert_eq!(
        fields(&larger.json()),
        ["capacity_bytes", "capacity_bytes_before", "command", "objects", "root", "schema", "used_bytes"]
    );
    assert_eq!(larger.json()["capacity_bytes_before"], 64 << 20);
    assert_eq!((larger.json()["objects"].clone(), view.match_prefix(&keys).unwrap().pages), (json!(0), 48));

    let smaller = resize("16MiB").json();
    let left = smaller["objects"].as_u64().unwrap() as usize;
    assert!(smaller["used_bytes"].as_u64().unwrap() <= 16 << 20, "{smaller}");
    // Some more may leave on the side, so that the next writes find room.
    let found = view.match_prefix(&keys).unwrap().pages;
    assert!(left > 0 && 0 < found && found <= 48 - left, "{smaller}: {found} pages left");
    store.used_bytes();
    assert_eq!(store.capacity_bytes(), 16 << 20);
    let refused = resize("15MiB");
    assert!(refused.code == 2 && refused.err.contains("16 MiB"), "{}", refused.err);
    let stat = run(&["stat", text(root.path()), "--json"]).json();
    assert_eq!((&stat["capacity_bytes"], &stat["problems"]), (&json!(16 << 20), &json!([])));
    let said = run(&["resize", text(root.path()), "64MiB"]).out;
    assert!(said.starts_with("capacity 64.0 MiB instead of 16.0 MiB; 0 objects removed"), "{said}");
}

#[test]
fn repair_ends_what_the_dead_began_and_leaves_the_living_alone() {
    let (root, keys, fingerprint) = tiny_root(2);
    let store = quiet(root.path());
    let (other, other_keys) = fill(&store, namespace("r2"), "live", 3);
    let folder = root.path().join("ns").join(&fingerprint);
    let dead = ProcessId([3; 16]);
    std::fs::write(folder.join(format!("tmp-{dead}-1")), b"half").unwrap();
    std::fs::write(folder.join(SegmentId { process: dead, number: 0 }.file_name()), b"").unwrap();
    let journal = say(root.path(), 3, fingerprint.parse().unwrap(), &[(FrameKind::Counters, Vec::new())]);
    let whole = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, [&whole[..], &whole[..50]].concat()).unwrap();
    let live = store.process().to_string();
    let of_live = || {
        let mut found = snapshot(root.path());
        found.retain(|path, _| path.to_string_lossy().contains(&live));
        found
    };
    let before = of_live();
    assert!(before.len() >= 3);

    let args = ["repair", text(root.path()), "--json"];
    let ran = run(&args);
    let document = ran.json();
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{document}");
    assert_eq!(
        fields(&document),
        [
            "command",
            "dead_processes",
            "freed_bytes",
            "is_unfinished",
            "journals_merged",
            "root",
            "schema",
            "segments_removed",
            "segments_sealed",
            "temporaries_removed",
            "units_told"
        ]
    );
    assert_eq!((&document["segments_removed"], &document["temporaries_removed"]), (&json!(1), &json!(1)));
    let verified = run(&["verify", text(root.path()), "--json"]).json();
    assert_eq!((&verified["problems"], &verified["objects"]), (&json!([]), &json!(5)));
    assert!(before == of_live(), "repair touched files of a live process");
    assert_eq!(other.match_prefix(&other_keys).unwrap().pages, 3);
    assert_eq!(tiny_view(&open(root.path())).match_prefix(&keys).unwrap().pages, 2);
    let again = run(&["repair", text(root.path())]);
    // The dead are looked through once more; nothing is found to do.
    let mut counted = again.out.lines().skip(1);
    assert!(again.code == 0 && again.out.lines().count() == 7, "{}{}", again.out, again.err);
    assert!(counted.all(|line| line.ends_with(" 0") || line.ends_with(" 0 B")), "{}", again.out);
}

#[test]
fn repair_tells_again_what_lost_journals_said() {
    let (root, keys, _) = tiny_root(4);
    for entry in std::fs::read_dir(root.path().join("journal")).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let document = run(&["repair", text(root.path()), "--json"]).json();
    assert_eq!(
        (&document["units_told"], &document["is_unfinished"]),
        (&json!(1), &json!(false)),
        "{document}"
    );
    let options = StoreOptions { read_only: true, ..StoreOptions::default() };
    let store = Store::open(root.path(), options).unwrap();
    assert_eq!(tiny_view(&store).match_prefix(&keys).unwrap().pages, 4);
}

/// What `stat` says in its JSON of each process that wrote to the root.
fn processes(root: &Path) -> BTreeMap<String, Value> {
    let document = run(&["stat", text(root), "--json"]).json();
    let list = document["processes"]["list"].as_array().unwrap().iter();
    list.map(|process| (process["process"].as_str().unwrap().to_owned(), process.clone())).collect()
}

#[test]
fn stat_says_what_free_space_each_live_process_leaves_to_others() {
    let (root, ..) = tiny_root(3);
    let store = |floor| {
        let free_space_floor_bytes = Some(floor);
        Store::open(root.path(), StoreOptions { free_space_floor_bytes, ..StoreOptions::default() }).unwrap()
    };
    let (one, other) = (store(3 << 20), store(5 << 20));
    fill(&one, namespace("r2"), "one", 2);
    assert!(
        run(&["stat", text(root.path())])
            .out
            .contains("floor         3.0 MiB of free space left to others, as 1 of 1 alive say")
    );
    fill(&other, namespace("r2"), "other", 2);
    let said = run(&["stat", text(root.path())]).out;
    assert!(
        said.contains("floor         3.0 MiB to 5.0 MiB of free space left to others, as 2 of 2 alive say")
    );
    let found = processes(root.path());
    assert_eq!(found.len(), 3);
    for (process, found) in found {
        let expected = [(&one, 3 << 20), (&other, 5 << 20)]
            .into_iter()
            .find(|(store, _)| store.process().to_string() == process)
            .map_or(Value::Null, |(_, floor)| json!(floor));
        assert_eq!(found["free_space_floor_bytes"], expected, "{found}");
    }
    drop((one, other));
    assert!(!run(&["stat", text(root.path())]).out.contains("floor"), "nobody lives");
}

#[test]
fn stat_says_where_the_pools_of_a_live_process_stand_and_why() {
    let (root, ..) = tiny_root(3);
    let store = quiet(root.path());
    let placed = |name: &str, reason: &str| PoolPlacement {
        name: name.into(),
        place: "sidecar".into(),
        reason: reason.into(),
    };
    // Before the process writes anything, and afterwards: the last word holds.
    store.note_pools(vec![placed("draft", "said too early")]).unwrap();
    fill(&store, namespace("r2"), "placed", 2);
    let pools = |store: &Store| processes(root.path())[&store.process().to_string()]["pools"].clone();
    assert_eq!(pools(&store)[0]["reason"], "said too early");
    store.note_pools(vec![placed("draft", "it has 2 slots\u{1b}[2J"), placed("state", "asked for")]).unwrap();
    let expected = json!([
        {"name": "draft", "place": "sidecar", "reason": "it has 2 slots\u{1b}[2J"},
        {"name": "state", "place": "sidecar", "reason": "asked for"},
    ]);
    assert_eq!(pools(&store), expected);
    let said = run(&["stat", text(root.path())]).out;
    assert!(said.contains("pool          state: sidecar, asked for (") && !said.contains('\u{1b}'), "{said}");
    assert!(store.note_pools(vec![PoolPlacement::default(); 65]).is_err());
    assert_eq!(pools(&store), expected, "what was refused changed nothing");
    store.close();
    assert!(!run(&["stat", text(root.path())]).out.contains("asked for"), "it has ended");
    assert!(store.note_pools(Vec::new()).is_err());
}

#[test]
fn stat_watches_with_rates() {
    let (root, ..) = tiny_root(1);
    let args = ["stat", text(root.path()), "--watch", "0.01", "--count", "3", "--json"];
    let ran = run(&args);
    let rounds: Vec<Value> = ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((ran.code, rounds.len()), (0, 3));
    assert!(rounds[0]["rates"].as_array().unwrap().is_empty());
    let rate = &rounds[2]["rates"][0];
    assert_eq!((&rate["counter"], &rate["per_second"]), (&json!("backup_stored_pages"), &json!(0.0)));
    assert_eq!(run(&["stat", text(root.path()), "--watch", "-1"]).code, 2);
    assert_eq!(run(&["stat", text(root.path()), "--watch", "nan"]).code, 2);
    let two = run(&["stat", text(root.path()), "--watch=0.01", "--count=2"]);
    assert_eq!(two.out.matches("file system").count(), 2);
}

#[test]
fn verify_names_a_flipped_page_until_it_is_healed() {
    let (root, keys, fingerprint) = tiny_root(4);
    let whole = run(&["verify", text(root.path())]);
    assert_eq!(whole.code, 0, "{}{}", whole.out, whole.err);
    assert!(whole.out.contains("4 objects read"), "{}", whole.out);

    flip(&segments(root.path())[0], PAYLOAD + 2 * PAGE as u64 + 17);
    let args = ["verify", text(root.path()), "--json"];
    let damaged = run(&args);
    let document = damaged.json();
    assert_eq!((damaged.code, &document["is_whole"]), (1, &json!(false)));
    let findings = document["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1);
    let finding = &findings[0];
    assert_eq!((&finding["kind"], &finding["key"]), (&json!("damaged"), &json!(keys[2].to_string())));
    assert_eq!((&finding["pool"], &finding["tile"]["layers"]), (&json!("kv"), &json!([0, 2])));
    assert_eq!(finding["namespace"], json!(fingerprint));
    let said = run(&["verify", text(root.path()), "--namespace", &fingerprint]);
    assert!(said.code == 1 && said.out.contains(&format!("damaged page {}", keys[2])), "{}", said.out);

    let store = open(root.path());
    let view = tiny_view(&store);
    let report = restore(&view, &keys, &Memory::canary(4 * PAGE));
    assert_eq!(report.outcomes[2], RestoreOutcome::Damaged);
    let quarantined = run(&args);
    assert_eq!((quarantined.code, &quarantined.json()["findings"][0]["kind"]), (1, &json!("quarantined")));
    assert_eq!(run(&["stat", text(root.path()), "--json"]).json()["objects"]["quarantined"], 1);

    backup(&view, &keys, &Memory::of(&page_bytes(7, 4 * PAGE)));
    let healed = run(&args);
    let document = healed.json();
    assert_eq!((healed.code, &document["is_whole"]), (0, &json!(true)));
    assert_eq!(document["findings"][0]["kind"], "healed");
    let stat = run(&["stat", text(root.path()), "--json"]).json();
    assert_eq!((&stat["objects"]["quarantined"], &stat["objects"]["healed"]), (&json!(0), &json!(1)));
}

#[test]
fn traces_of_a_killed_writer_are_told_and_do_no_harm() {
    let (root, _, fingerprint) = tiny_root(2);
    let folder = root.path().join("ns").join(&fingerprint);
    let dead = ProcessId([3; 16]);
    std::fs::write(folder.join(format!("tmp-{dead}-1")), b"half").unwrap();
    std::fs::write(root.path().join(format!("tmp-{dead}-0")), b"half").unwrap();
    std::fs::write(folder.join(SegmentId { process: dead, number: 0 }.file_name()), b"").unwrap();
    let journal = say(root.path(), 3, fingerprint.parse().unwrap(), &[(FrameKind::Counters, Vec::new())]);
    let whole = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, [&whole[..], &whole[..50]].concat()).unwrap();
    let ran = run(&["verify", text(root.path()), "--json"]);
    let document = ran.json();
    let problems = document["problems"].as_array().unwrap();
    assert_eq!(ran.code, 0, "{problems:?}");
    assert_eq!(problems.len(), 4, "{problems:?}");
    assert!(problems.iter().all(|problem| problem["kind"] == "left_behind"), "{problems:?}");
}

#[test]
fn explain_says_where_a_page_is_or_why_not() {
    let (root, stored, fingerprint) = tiny_root(4);
    let never = keys("never", 1)[0];
    flip(&segments(root.path())[0], PAYLOAD + 2 * PAGE as u64);
    restore(&tiny_view(&open(root.path())), &stored, &Memory::canary(4 * PAGE));
    let scan = inspect::scan(root.path()).unwrap();
    let last = scan.namespaces[0].objects().find(|object| object.key == short_key(&stored[3])).unwrap();
    let evicted = Gone { location: last.location(), key: last.key, objects: 1, reason: Reason::Evicted };
    say(root.path(), 9, scan.namespaces[0].fingerprint, &[(FrameKind::Remove, encode_gone(&[evicted]))]);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "{}\n{}\n\n{}\n{}", stored[1], stored[2], stored[3], never).unwrap();
    let first = stored[0].to_string();
    let args = ["explain", text(root.path()), "--namespace", &fingerprint, "--key", &first, "--keys-file"];
    let args = [&args[..], &[text(file.path())]].concat();
    let document = run(&[&args[..], &["--json"]].concat()).json();
    let status = |page: usize| document["pages"][page]["pools"][0]["status"].as_str().unwrap();
    assert_eq!(
        [status(0), status(1), status(2), status(3), status(4)],
        ["present", "present", "quarantined: damaged", "evicted", "never stored here"]
    );
    assert_eq!(document["prefixes"][0]["prefix_pages"], 2);
    assert_eq!(document["pages"][1]["pools"][0]["objects"][0]["depth"], 1);
    let said = run(&args);
    assert_eq!(said.code, 0);
    assert!(
        said.out.contains("2 of 5 leading pages") && said.out.contains("never stored here"),
        "{}",
        said.out
    );

    assert_eq!(run(&["clear", text(root.path()), "--namespace", &fingerprint, "--yes"]).code, 0);
    let document = run(&[&args[..], &["--json"]].concat()).json();
    assert_eq!(document["pages"][0]["pools"][0]["status"], "cleared");
    assert_eq!(document["prefixes"][0]["prefix_pages"], 0);
}

#[test]
fn explain_names_the_tiles_that_a_page_lacks() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let keys = keys("tiles", 2);
    let half = |heads: (u32, u32), keys: &[PageKey]| {
        let pool = ViewPool::new(kv_pool("bfloat16", 16), tile((0, 2), heads), LayoutName::PageFirst);
        let view = store.view(namespace("r1"), vec![pool], ViewOptions::default()).unwrap();
        backup(&view, keys, &Memory::of(&page_bytes(1, keys.len() * PAGE / 2)));
        view.fingerprint().to_string()
    };
    let fingerprint = half((0, 1), &keys);
    half((1, 2), &keys[..1]);
    let (first, second) = (keys[0].to_string(), keys[1].to_string());
    let args = ["explain", text(root.path()), "--namespace", &fingerprint, "--key", &first, "--key", &second];
    let document = run(&[&args[..], &["--json"]].concat()).json();
    let second = &document["pages"][1]["pools"][0];
    assert_eq!(
        (&second["status"], &second["missing_tiles"][0]["heads"]),
        (&json!("partial"), &json!([1, 2]))
    );
    assert_eq!(document["pages"][0]["pools"][0]["status"], "present");
    let said = run(&args).out;
    assert!(said.contains("not enough for layers 0..2 heads 1..2"), "{said}");
    assert!(said.contains("heads 0..1: 2 of 2") && said.contains("heads 1..2: 1 of 2"), "{said}");
}

#[test]
fn explain_names_the_fields_that_differ() {
    let (root, _, fingerprint) = tiny_root(1);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        let path = folder.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        text(&path).to_owned()
    };
    let pool = |row_bytes| kv_pool("bfloat16", row_bytes).to_json();
    let same = write("same", &json!({"namespace": namespace("r1").to_json(), "pools": [pool(16)]}));
    let other = write("other", &json!({"namespace": namespace("r2").to_json(), "pools": [pool(32)]}));
    let plain = write("plain", &namespace("r1").to_json());
    let stored = format!("{}:{fingerprint}", text(root.path()));
    for left in [&same, &plain] {
        let ran = run(&["explain", "--spec", left, "--spec", &stored]);
        assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    }
    assert_eq!(run(&["explain", text(root.path()), "--spec", &fingerprint, "--spec", &same]).code, 0);
    let ran = run(&["explain", "--spec", &stored, "--spec", &other, "--json"]);
    let document = ran.json();
    assert_eq!((ran.code, &document["is_equal"]), (1, &json!(false)));
    let differences = document["differences"].as_array().unwrap();
    let fields: Vec<&str> = differences.iter().map(|found| found["field"].as_str().unwrap()).collect();
    assert_eq!(
        fields,
        ["revision", "pool \"kv\": components[0].row_bytes", "pool \"kv\": components[1].row_bytes"]
    );
    assert!(run(&["explain", "--spec", &stored, "--spec", &other]).out.contains("revision: r1 is not r2"));
    let broken = write("broken", &json!({"model": 1}));
    for spec in [&broken, "/nonexistent"] {
        let ran = run(&["explain", "--spec", &stored, "--spec", spec]);
        assert!(ran.code == 2 && ran.err.starts_with("hicache-store: "), "{}", ran.err);
    }
}

#[test]
fn clear_takes_one_namespace_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let notes = root.path().join("notes.txt");
    let store = open(root.path());
    std::fs::write(&notes, "mine").unwrap();
    let of_model = |model: &str| Namespace::new(model, "r1", 4, None).unwrap();
    let (llama, first) = fill(&store, of_model("llama"), "llama", 3);
    let (llama_2, second) = fill(&store, of_model("llama-2"), "llama-2", 4);
    let (org_llama, third) = fill(&store, of_model("org/llama"), "org/llama", 5);
    let fingerprint = llama.fingerprint().to_string();
    let args = ["clear", text(root.path()), "--namespace", &fingerprint];

    let refused = run(&args);
    assert_eq!(refused.code, 2);
    assert!(refused.err.starts_with("hicache-store: ") && refused.err.contains("--yes"), "{}", refused.err);
    let no = run_answered(&args, Some(&mut &b"no\n"[..]));
    assert_eq!(no.code, 2);
    assert!(no.err.contains("llama at revision r1") && no.err.contains("3 objects"), "{}", no.err);
    assert_eq!(llama.match_prefix(&first).unwrap().pages, 3);

    let cleared = run(&[&args[..], &["--yes", "--json"]].concat());
    assert_eq!((cleared.code, &cleared.json()["objects"]), (0, &json!(3)), "{}", cleared.err);
    assert_eq!(llama.match_prefix(&first).unwrap().pages, 0);
    let report = restore(&llama, &first, &Memory::canary(3 * PAGE));
    assert_eq!(report.outcomes, [RestoreOutcome::Absent; 3]);
    assert_eq!(llama_2.match_prefix(&second).unwrap().pages, 4);
    assert_eq!(org_llama.match_prefix(&third).unwrap().pages, 5);
    assert_eq!(std::fs::read(&notes).unwrap(), b"mine");
    let again = run_answered(&args, Some(&mut &b"y\n"[..]));
    assert!(again.code == 0 && again.out.starts_with("0 objects cleared"), "{}{}", again.out, again.err);
    drop(store);
    let reopened = open(root.path());
    assert_eq!(fill(&reopened, of_model("llama-2"), "llama-2", 4).0.match_prefix(&second).unwrap().pages, 4);
}

#[test]
fn clear_explains_when_nothing_says_which_namespace_it_is() {
    let (root, _, fingerprint) = tiny_root(1);
    flip(&segments(root.path())[0], 40);
    std::fs::write(root.path().join("ns").join(&fingerprint).join("manifest.json"), "{}").unwrap();
    let before = snapshot(root.path());
    let ran = run(&["clear", text(root.path()), "--namespace", &fingerprint, "--yes"]);
    assert!(ran.code == 2 && ran.err.contains("manifest"), "{}", ran.err);
    assert!(before == snapshot(root.path()));
}

#[test]
fn a_troubled_root_is_shown_whole_and_left_as_it_is() {
    let (root, keys, fingerprint) = tiny_root(2);
    {
        let store = open(root.path());
        fill(&store, namespace("r2"), "other", 1);
    }
    std::fs::write(root.path().join("notes.txt"), "mine").unwrap();
    flip(&segments(root.path())[0], 40);
    std::fs::create_dir(root.path().join("journal").join(format!("{}-0.idx", ProcessId([5; 16])))).unwrap();
    let before = snapshot(root.path());
    let root_text = text(root.path());
    let ran = run(&["ls", root_text, "--json"]);
    let document = ran.json();
    assert_eq!(ran.code, 1);
    assert_eq!(document["namespaces"].as_array().unwrap().len(), 2);
    let mut kinds: Vec<&str> = document["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["kind"].as_str().unwrap())
        .collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["damaged", "foreign", "unreadable"]);
    let key = keys[0].to_string();
    let explain = ["explain", root_text, "--namespace", &fingerprint, "--key", &key];
    for args in [&["ls", root_text][..], &["stat", root_text], &["verify", root_text], &explain] {
        for json in [false, true] {
            let ran = run(&[args, if json { &["--json"] } else { &[] }].concat());
            assert_eq!(ran.code, i32::from(args[0] != "explain"), "{args:?}: {}", ran.err);
            if json {
                ran.json();
            } else {
                assert_eq!(ran.err.lines().count(), 3, "{args:?}: {}", ran.err);
                assert!(ran.err.contains("notes.txt"));
            }
        }
    }
    assert!(before == snapshot(root.path()), "a command that only looks has changed something");
}

#[test]
fn reading_commands_touch_nothing_beside_a_live_store() {
    let root = tempfile::tempdir().unwrap();
    let store = quiet(root.path());
    let (view, keys) = fill(&store, namespace("r1"), "live", 3);
    let before = snapshot(root.path());
    let (fingerprint, key) = (view.fingerprint().to_string(), keys[0].to_string());
    let archive = tempfile::tempdir().unwrap();
    let file = archive.path().join("a.tar");
    let root_text = text(root.path());
    for args in [
        &["ls", root_text][..],
        &["ls", root_text, "--objects"],
        &["stat", root_text],
        &["verify", root_text],
        &["explain", root_text, "--namespace", &fingerprint, "--key", &key],
        &["export", root_text, "--namespace", &fingerprint, "--output", text(&file)],
    ] {
        let ran = run(args);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{args:?}");
    }
    assert!(before == snapshot(root.path()), "a command that only looks has changed something");
}

fn export(root: &Path, fingerprint: &str, file: &Path) -> Ran {
    run(&["export", text(root), "--namespace", fingerprint, "--output", text(file), "--json"])
}

fn import(root: &Path, file: &Path) -> Ran {
    run(&["import", text(root), text(file), "--capacity", "64MiB", "--json"])
}

#[test]
fn a_namespace_is_carried_to_another_root() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let plain = ViewPool::new(kv_pool("bfloat16", 16), tile((0, 2), (0, 2)), LayoutName::PageFirst);
    let packed = ViewPool::new(
        hicache_core::Pool::new(
            "draft",
            hicache_core::PoolKind::Draft,
            hicache_core::DType::parse("bfloat16").unwrap(),
            None,
            vec![hicache_core::Component::per_token("k", 4096)],
        )
        .unwrap(),
        tile((0, 2), (0, 2)),
        LayoutName::PageFirst,
    );
    let view_of = |store: &Store, pool: &ViewPool, zstd_level| {
        store.view(namespace("r1"), vec![pool.clone()], ViewOptions { zstd_level }).unwrap()
    };
    let keys = keys("carried", 6);
    let large = 2 * 2 * 4 * 4096;
    // Compressible: the upper byte of each 16-bit number stays the same.
    let soft: Vec<u8> = page_bytes(2, 6 * large)
        .iter()
        .enumerate()
        .map(|(at, byte)| if at % 2 == 0 { *byte } else { 63 })
        .collect();
    let hard = page_bytes(1, 6 * PAGE);
    let fingerprint = {
        let store = open(from.path());
        let view = view_of(&store, &packed, Some(3));
        backup(&view, &keys, &Memory::of(&soft));
        backup(&view_of(&store, &plain, None), &keys, &Memory::of(&hard));
        view.fingerprint().to_string()
    };
    let file = from.path().with_extension("tar");
    let exported = export(from.path(), &fingerprint, &file);
    assert_eq!((exported.code, &exported.json()["objects"]), (0, &json!(12)), "{}", exported.err);
    assert!(exported.json()["stored_bytes"].as_u64().unwrap() < (soft.len() + hard.len()) as u64);

    let imported = import(to.path(), &file);
    let document = imported.json();
    assert_eq!((imported.code, imported.err.as_str()), (0, ""));
    assert_eq!(
        (&document["stored"], &document["present"], &document["damaged"]),
        (&json!(12), &json!(0), &json!(0))
    );
    let again = import(to.path(), &file).json();
    assert_eq!((&again["stored"], &again["present"]), (&json!(0), &json!(12)));
    let store = open(to.path());
    for (pool, bytes) in [(&packed, &soft), (&plain, &hard)] {
        let view = view_of(&store, pool, None);
        let target = Memory::canary(bytes.len());
        assert_eq!(restore(&view, &keys, &target).outcomes, [RestoreOutcome::Restored; 6]);
        assert!(target.bytes() == *bytes, "other bytes came back");
    }
    assert_eq!(run(&["verify", text(to.path())]).code, 0);
    // What a page's depth is survives the journey.
    let scan = inspect::scan(to.path()).unwrap();
    let mut depths: Vec<u64> = scan.namespaces[0].objects().filter_map(|object| object.depth()).collect();
    depths.sort_unstable();
    assert_eq!(depths, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn export_leaves_a_damaged_page_out_and_import_fills_the_hole() {
    let (root, keys, fingerprint) = tiny_root(5);
    let source = Memory::of(&page_bytes(7, 5 * PAGE));
    flip(&segments(root.path())[0], PAYLOAD + 2 * PAGE as u64 + 1);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.tar");
    let exported = export(root.path(), &fingerprint, &file);
    let document = exported.json();
    assert_eq!((exported.code, &document["objects"], &document["damaged"]), (1, &json!(4), &json!(1)));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "something was left behind");

    let to = tempfile::tempdir().unwrap();
    {
        let store = open(to.path());
        let view = tiny_view(&store);
        backup(&view, &keys[..1], &source);
    }
    let imported = import(to.path(), &file);
    let document = imported.json();
    assert_eq!((imported.code, &document["stored"], &document["present"]), (0, &json!(3), &json!(1)));
    let store = open(to.path());
    let view = tiny_view(&store);
    let target = Memory::canary(5 * PAGE);
    let outcomes = restore(&view, &keys, &target).outcomes;
    use RestoreOutcome::{Absent, Restored};
    assert_eq!(outcomes, [Restored, Restored, Absent, Restored, Restored]);
    let (restored, expected) = (target.bytes(), source.bytes());
    for page in [0, 1, 3, 4] {
        assert!(of_page(&restored, page) == of_page(&expected, page), "page {page}");
    }
    let scan = inspect::scan(to.path()).unwrap();
    let depth = |key: &PageKey| {
        let of_key = |object: &inspect::ObjectRef<'_>| {
            object.key == short_key(key) && object.state == ObjectState::Live
        };
        scan.namespaces[0].objects().find(of_key).and_then(|object| object.depth())
    };
    assert_eq!([depth(&keys[1]), depth(&keys[3]), depth(&keys[4])], [Some(1), Some(3), Some(4)]);
}

#[test]
fn export_needs_no_whole_directory_header() {
    let (root, _, fingerprint) = tiny_root(3);
    let segment = &segments(root.path())[0];
    let bytes = std::fs::read(segment).unwrap();
    let directory = bytes.windows(8).position(|window| window == b"HICDIR01").unwrap();
    flip(segment, directory as u64 + 20);
    assert_eq!(run(&["verify", text(root.path())]).code, 0, "its pages restore, so they are whole");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.tar");
    let exported = export(root.path(), &fingerprint, &file);
    assert_eq!((exported.code, &exported.json()["objects"]), (0, &json!(3)));
    let to = tempfile::tempdir().unwrap();
    assert_eq!(import(to.path(), &file).json()["stored"], 3);
}

#[test]
fn a_damaged_or_cut_archive_is_named_and_never_stores_a_wrong_page() {
    let (root, keys, fingerprint) = tiny_root(3);
    let source = page_bytes(7, 3 * PAGE);
    let folder = tempfile::tempdir().unwrap();
    let (file, bad) = (folder.path().join("a.tar"), folder.path().join("b.tar"));
    export(root.path(), &fingerprint, &file);
    let bytes = std::fs::read(&file).unwrap();
    let check = |what: &str, bytes: &[u8], may_be_fine: bool| {
        std::fs::write(&bad, bytes).unwrap();
        let to = tempfile::tempdir().unwrap();
        let ran = import(to.path(), &bad);
        assert!((0..=2).contains(&ran.code), "{what}");
        assert!(may_be_fine || ran.code != 0, "{what}: {}", ran.out);
        let document = ran.json();
        assert_eq!(ran.code == 2, document["error"].is_string(), "{what}");
        assert_eq!(ran.code == 2, ran.err.contains("hicache-store: "), "{what}: {}", ran.err);
        if document["stored"].as_u64().unwrap() > 0 {
            let store = open(to.path());
            let target = Memory::canary(3 * PAGE);
            let report = restore(&tiny_view(&store), &keys, &target);
            let restored = target.bytes();
            for page in 0..3 {
                if report.outcomes[page] == RestoreOutcome::Restored {
                    let is_exact = of_page(&restored, page) == of_page(&source, page);
                    assert!(is_exact, "{what}: a wrong page came back");
                }
            }
        } else {
            let made =
                to.path().join("ns").exists() && std::fs::read_dir(to.path().join("ns")).unwrap().count() > 0;
            assert!(!made || ran.code == 1 || document["error"].as_str().unwrap().contains("unit"), "{what}");
        }
        (ran.code, document)
    };
    let end = bytes.windows(8).position(|window| window == b"end.json").unwrap();
    for len in (0..end + 512).step_by(256).chain([end, end + 512, end + 513]) {
        let (code, document) = check(&format!("cut to {len}"), &bytes[..len], false);
        assert_eq!(code, 2, "cut to {len}");
        let error = document["error"].as_str().unwrap();
        assert!(error.contains(text(&bad)), "{error}");
    }
    let unit = bytes.windows(16).position(|window| window == b"units/000000.uni").unwrap() + 512;
    let (code, document) = check("a flipped page byte", &flipped(&bytes, unit + PAGE + 3), false);
    assert_eq!((code, &document["stored"], &document["damaged"]), (1, &json!(2), &json!(1)));
    let model = bytes.windows(8).position(|window| window == b"org/tiny").unwrap();
    let (code, document) = check("a flipped letter of the model", &flipped(&bytes, model + 5), false);
    assert_eq!(code, 2);
    assert!(document["error"].as_str().unwrap().contains("namespace.json: its fingerprint"), "{document}");
    let run_header = bytes.windows(4).position(|window| window == b"HRUN").unwrap();
    let (code, document) = check("a flipped run header", &flipped(&bytes, run_header + 8), false);
    assert_eq!((code, &document["damaged_runs"]), (1, &json!(1)), "{document}");
    // Every byte that says something is missed when it is flipped; tar's unused fields and padding say nothing.
    for at in (0..bytes.len()).step_by(37) {
        check(&format!("byte {at} flipped"), &flipped(&bytes, at), true);
    }
    let other = check("another file", b"not an archive at all", false).1;
    assert!(other["error"].as_str().unwrap().contains("b.tar"));
}

fn flipped(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 1;
    bytes
}

#[test]
fn an_archive_with_other_names_or_kinds_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hostile.tar");
    let first = json!({
        "archive": 1,
        "fingerprint": namespace("r1").fingerprint().to_string(),
        "namespace": namespace("r1").to_json(),
    });
    let entry = |name: &str, kind: tar::EntryType, size: u64, bytes: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_cksum();
        let padding = vec![0; bytes.len().next_multiple_of(512) - bytes.len()];
        [&header.as_bytes()[..], bytes, &padding].concat()
    };
    let regular = tar::EntryType::Regular;
    let first = first.to_string();
    let start = entry("namespace.json", regular, first.len() as u64, first.as_bytes());
    for (what, words, next) in [
        ("a path upwards", "expected units/000000.unit", entry("../../evil", regular, 4, b"evil")),
        ("an absolute path", "expected units/000000.unit", entry("/tmp/evil", regular, 4, b"evil")),
        ("a link", "regular file", entry("units/000000.unit", tar::EntryType::Symlink, 0, b"")),
        ("a huge size", "at most", entry("units/000000.unit", regular, 1 << 32, b"")),
        ("a size not there", "cut short", entry("units/000000.unit", regular, 1 << 30, b"short")),
        ("a unit out of turn", "expected units/000000.unit", entry("units/000001.unit", regular, 4, b"evil")),
        ("garbage for a unit", "unit", entry("units/000000.unit", regular, 4, b"evil")),
        ("a pool of another name", "pool", entry("pools/00.json", regular, 2, b"{}")),
        (
            "an end too early",
            "expected 1 units",
            entry("end.json", regular, 25, b"{\"units\":1,\"objects\":0}  "),
        ),
        ("a long name", "regular file", entry("././@LongLink", tar::EntryType::GNULongName, 4, b"evil")),
    ] {
        std::fs::write(&file, [&start[..], &next, &[0; 1024]].concat()).unwrap();
        let to = tempfile::tempdir().unwrap();
        let ran = import(to.path(), &file);
        assert_eq!(ran.code, 2, "{what}: {}", ran.out);
        let error = ran.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains("hostile.tar") && error.contains(words), "{what}: {error}");
    }
    assert!(!folder.path().join("evil").exists());
}

#[test]
fn probe_measures_suggests_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["probe", text(folder.path()), "--bytes", "4MiB"];
    let ran = run(&[&args[..], &["--json"]].concat());
    let document = ran.json();
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let speeds = document["speeds"].as_array().unwrap();
    assert!(
        speeds.len() >= 6 && speeds.iter().all(|speed| speed["bytes_per_second"].as_f64().unwrap() > 0.0)
    );
    assert!(document["suggestion"]["capacity_bytes"].as_u64().unwrap() > 0);
    assert!(document["cores"].as_u64().unwrap() >= 1);
    assert!(run(&args).out.contains("suggested: "));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let missing = run(&["probe", "/nonexistent"]);
    assert!(missing.code == 2 && missing.err.starts_with("hicache-store: "), "{}", missing.err);
}

#[test]
fn bad_arguments_are_one_line_and_exit_2() {
    let (root, key, fingerprint) = tiny_root(1);
    let (root, key) = (text(root.path()), key[0].to_string());
    let empty = tempfile::tempdir().unwrap();
    let absent = "00112233445566778899aabbccddeeff";
    for args in [
        &["ls", "/nonexistent"][..],
        &["ls", text(empty.path())],
        &["ls"],
        &["frobnicate"],
        &["ls", root, "--namespace", "xyz\u{1b}[2J"],
        &["ls", root, "--namespace", absent],
        &["verify", root, "--namespace", absent],
        &["explain", root, "--namespace", &fingerprint],
        &["explain", root, "--key", &key],
        &["explain", root, "--namespace", &fingerprint, "--key", "12"],
        &["explain", root, "--namespace", &fingerprint, "--keys-file", "/nonexistent"],
        &["explain", root, "--namespace", &fingerprint, "--keys-file", root],
        &["explain", "--spec", root],
        &["clear", root, "--namespace", absent, "--yes"],
        &["export", root, "--namespace", &fingerprint, "--output", "/nonexistent/a.tar"],
        &["export", root, "--namespace", absent, "--output", "a.tar"],
        &["import", root, "/nonexistent"],
        &["import", root, "/dev/null", "--capacity", "much"],
        &["probe", root, "--bytes", "-3"],
        &["prune", root],
        &["prune", root, "--to", "1GiB", "--older-than", "1h"],
        &["prune", root, "--to", "much"],
        &["prune", root, "--older-than", "soon"],
        &["prune", root, "--older-than=-3h"],
        &["prune", root, "--revision", "absent", "--yes"],
        &["prune", "/nonexistent", "--to", "1GiB"],
        &["prune", text(empty.path()), "--older-than", "1h"],
        &["resize", root],
        &["resize", root, "much"],
        &["resize", root, "1MiB"],
        &["resize", "/nonexistent", "1GiB"],
        &["resize", text(empty.path()), "1GiB"],
        &["repair", "/nonexistent"],
        &["repair", text(empty.path())],
    ] {
        let ran = run(args);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{args:?}");
        assert_eq!(ran.err.lines().count(), 1, "{args:?}: {}", ran.err);
        assert!(
            ran.err.starts_with("hicache-store: ") && !ran.err.contains('\u{1b}'),
            "{args:?}: {}",
            ran.err
        );
    }
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
    let version = run(&["--version"]);
    assert!(version.code == 0 && version.out.starts_with("hicache-store "), "{}", version.out);
    assert!(run(&["--help"]).out.contains("verify"));
}

/// Takes a few bytes, then fails.
struct Failing(usize, ErrorKind);

impl Write for Failing {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0 == 0 {
            return Err(self.1.into());
        }
        let taken = bytes.len().min(self.0);
        self.0 -= taken;
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure_and_a_full_disk_is() {
    let (root, ..) = tiny_root(2);
    for (command, kind, expected) in [
        ("ls", ErrorKind::BrokenPipe, 0),
        ("stat", ErrorKind::BrokenPipe, 0),
        ("ls", ErrorKind::StorageFull, 2),
    ] {
        let args: Vec<OsString> = ["hicache-store", command, text(root.path())].map(OsString::from).into();
        let mut err = Vec::new();
        let code = hicache_cli::run_with_answers(&args, &mut Failing(10, kind), &mut err, None);
        let err = String::from_utf8(err).unwrap();
        assert_eq!((code, err.is_empty()), (expected, expected == 0), "{command}: {err}");
    }
}

#[test]
fn no_bytes_in_a_root_make_the_tool_panic() {
    let (root, key, fingerprint) = tiny_root(3);
    let names = snapshot(root.path());
    let files: Vec<(&PathBuf, &Vec<u8>)> = names
        .iter()
        .filter(|(_, (_, bytes))| !bytes.is_empty())
        .map(|(path, (_, bytes))| (path, bytes))
        .collect();
    let archive = tempfile::tempdir().unwrap();
    let mut random = page_bytes(99, 8 * 4 * 120)
        .chunks(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
        .collect::<Vec<_>>();
    let mut next = |below: usize| (random.pop().unwrap_or(1) % below as u64) as usize;
    for _ in 0..120 {
        let (path, bytes) = files[next(files.len())];
        let mut damaged = bytes.clone();
        match next(4) {
            0 => damaged.truncate(next(bytes.len())),
            _ => damaged[next(bytes.len())] ^= 1 << next(8),
        }
        std::fs::write(path, damaged).unwrap();
        all_commands(root.path(), &fingerprint, &key[0], &archive.path().join("a.tar"));
        std::fs::write(path, bytes).unwrap();
    }
}

fn all_commands(root: &Path, fingerprint: &str, key: &PageKey, archive: &Path) {
    let (root, key) = (text(root), key.to_string());
    for args in [
        &["ls", root, "--json"][..],
        &["ls", root, "--objects"],
        &["stat", root],
        &["verify", root, "--json"],
        &["explain", root, "--namespace", fingerprint, "--key", &key],
        &["export", root, "--namespace", fingerprint, "--output", text(archive)],
    ] {
        let ran = run(args);
        assert!((0..=2).contains(&ran.code), "{args:?}");
        assert!(ran.code != 2 || ran.err.starts_with("hicache-store: "), "{args:?}: {}", ran.err);
    }
}

#[test]
fn journals_with_impossible_numbers_are_survived() {
    let (root, keys, fingerprint) = tiny_root(2);
    let scan = inspect::scan(root.path()).unwrap();
    let namespace = &scan.namespaces[0];
    let object = namespace.objects().next().unwrap();
    let key = short_key(&keys[0]);
    let segment = std::fs::read(&segments(root.path())[0]).unwrap();
    let directory = segment.windows(8).position(|window| window == b"HICDIR01").unwrap() as u64;
    let add_at = |directory_offset: u64, entries_offset: u64, unit_offset: u64, generation: u64| {
        let unit = AddUnit {
            segment: object.segment(),
            generation,
            unit_offset,
            unit_bytes: u64::MAX,
            directory_offset,
            directory_bytes: u64::MAX,
        };
        let run = AddRun {
            form: *object.form,
            entries_offset,
            payload_offset: u64::MAX,
            payload_bytes: u64::MAX,
            parent: [0; 16],
            depth: u32::MAX - 1,
            keys: &[key, key].concat(),
        };
        (FrameKind::Add, encode_add(&unit, &[run]))
    };
    let add = |entries_offset, unit_offset, generation| {
        add_at(u64::MAX - 3, entries_offset, unit_offset, generation)
    };
    let gone = Gone {
        objects: 1,
        location: Location { segment: object.segment(), entries_offset: u64::MAX, ordinal: u32::MAX },
        key,
        reason: Reason::Other(77),
    };
    let most = (FrameKind::Counters, encode_counters(&[(1, u64::MAX), (999, 1)]));
    let frames = [
        add(u64::MAX, u64::MAX, 0),
        add(0, 0, 0),
        add_at(directory, 0, 0, 0),
        add(object.entry_offset(), u64::MAX - 1, 0),
        (FrameKind::Remove, encode_gone(&[gone])),
        (FrameKind::Other(55), vec![1, 2, 3]),
        (FrameKind::Add, vec![0; 7]),
        (FrameKind::Remove, vec![0; 7]),
        most.clone(),
    ];
    say(root.path(), 1, namespace.fingerprint, &frames);
    say(root.path(), 2, namespace.fingerprint, &[most]);
    let archive = tempfile::tempdir().unwrap();
    all_commands(root.path(), &fingerprint, &keys[0], &archive.path().join("a.tar"));
    say(root.path(), 4, namespace.fingerprint, &[add(0, 0, u64::MAX)]);
    all_commands(root.path(), &fingerprint, &keys[0], &archive.path().join("a.tar"));
}

#[test]
fn a_missing_segment_is_told_with_what_was_in_it() {
    let (root, ..) = tiny_root(3);
    std::fs::remove_file(&segments(root.path())[0]).unwrap();
    let ran = run(&["verify", text(root.path()), "--json"]);
    let document = ran.json();
    assert_eq!((ran.code, document["findings"].as_array().unwrap().len()), (1, 3));
    let problem = &document["problems"][0];
    assert_eq!(problem["kind"], "missing");
    assert!(problem["message"].as_str().unwrap().contains("3 objects"), "{problem}");
}

#[test]
fn a_file_without_a_readable_name_is_told() {
    use std::os::unix::ffi::OsStrExt;
    let (root, ..) = tiny_root(1);
    let name = std::ffi::OsStr::from_bytes(b"\xff\x1b[2Jnotes");
    std::fs::write(root.path().join(name), "mine").unwrap();
    let ran = run(&["ls", text(root.path())]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("notes: not a file of the store") && !ran.err.contains('\u{1b}'), "{}", ran.err);
}

#[test]
fn a_read_only_store_is_cleared_by_nobody() {
    let (root, ..) = tiny_root(1);
    let store =
        Store::open(root.path(), StoreOptions { read_only: true, ..StoreOptions::default() }).unwrap();
    assert_eq!(
        store.clear_namespace(&namespace("r1")).unwrap_err().kind(),
        hicache_core::ErrorKind::Unsupported
    );
}
