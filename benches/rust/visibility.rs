//! How long until another process knows: of a publication, a clear, a quarantine, an eviction?
//!
//! The other process asks every 100 us. Told are the times from the beginning and from the end of the call that made
//! the news to the end of the first `match` there that shows it. An answer before the call returned counts as 0.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hicache_core::format::frame::{FrameKind, Step, decode_gone, short_key, step};
use hicache_core::{
    ChainStart, Component, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, PoolMemory, RestoreOptions,
    Span, Store, StoreOptions, Tile, View, ViewOptions, ViewPool,
};
use hicache_sys::Region;

use crate::measure::folder;

/// Events of each kind.
const ROUNDS: u64 = 1_000;
/// Between two questions of the other process. One that asks all the time uses up its turn on the processor, and what is then
/// measured is how long other processes let it wait.
const ASKS_EVERY: Duration = Duration::from_micros(100);
/// Smallest capacity of a root, so that evictions come soon.
const CAPACITY: u64 = 16 << 20;
/// Bytes of a page where room is the matter.
const LARGE: u32 = 64 << 10;
/// Bytes of a page elsewhere.
const SMALL: u32 = 4 << 10;

/// Prints the latencies of each kind of news.
pub fn run() {
    let news: [(&str, u32, Deed); 3] = [
        ("publication", SMALL, |bench, round| {
            let before = bench.watch(round, 1);
            bench.backup(round);
            before
        }),
        ("clear", SMALL, |bench, round| {
            bench.backup(round);
            let before = bench.watch(round, 0);
            bench.view.clear().expect("a clear");
            before
        }),
        ("quarantine", SMALL, |bench, round| {
            bench.backup(round);
            bench.damage(round);
            let before = bench.watch(round, 0);
            bench.restore(round);
            before
        }),
    ];
    for (name, page_bytes, deed) in news {
        let folder = folder();
        let mut bench = Bench::new(folder.path(), page_bytes, "visibility-child");
        let (mut from_start, mut from_end) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let started = deed(&mut bench, round);
            let ended = now_ns();
            let seen = bench.seen();
            from_start.push(seen.saturating_sub(started) as f64 / 1e3);
            from_end.push(seen.saturating_sub(ended) as f64 / 1e3);
        }
        println!(
            "RESULT: visibility: {name} to match in another process: p50 {:.0}, p99 {:.0} us after the call \
             returned; p50 {:.0}, p99 {:.0} us after it began ({} events)",
            quantile(&mut from_end, 0.5),
            quantile(&mut from_end, 0.99),
            quantile(&mut from_start, 0.5),
            quantile(&mut from_start, 0.99),
            from_start.len()
        );
    }
    evictions();
}

/// Makes one piece of news in a round, just after its time of beginning.
type Deed = fn(&mut Bench, u64) -> u64;

struct Bench {
    root: PathBuf,
    page_bytes: u32,
    view: View,
    store: Store,
    child: Child,
    words: ChildStdin,
    answers: Receiver<String>,
}

impl Bench {
    fn new(root: &Path, page_bytes: u32, onlooker: &str) -> Bench {
        let (store, view) = open(root, page_bytes, false);
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program)
            .args([onlooker.as_ref(), root.as_os_str()])
            .arg(page_bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child process");
        let words = child.stdin.take().expect("its input");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let (send, answers) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
        Bench { root: root.to_owned(), page_bytes, view, store, child, words, answers }
    }

    /// Has the other process look for `pages` pages of a chain. Returns the time when it does so.
    fn watch(&mut self, chain: u64, pages: usize) -> u64 {
        writeln!(self.words, "{chain} {pages}").expect("a child that listens");
        assert_eq!(self.answer(), "watching");
        now_ns()
    }

    /// When the other process has seen it.
    fn seen(&self) -> u64 {
        self.answer().parse().expect("a time")
    }

    fn answer(&self) -> String {
        self.answers.recv().expect("a child that answers")
    }

    fn backup(&self, chain: u64) {
        let memory = Region::owned(self.page_bytes as usize);
        let mut bytes = vec![0; self.page_bytes as usize];
        bytes[..16].copy_from_slice(&mark(chain));
        memory.copy_in(0, &bytes).expect("room");
        let lent = vec![PoolMemory { regions: vec![&memory], slots: &[0] }];
        let start = ChainStart { parent: None, depth: Some(0) };
        let report = self.view.backup(&keys(chain), lent, start).expect("a backup");
        assert!(report.reason.is_none(), "{:?}", report.reason);
    }

    fn restore(&self, chain: u64) {
        let memory = Region::owned(self.page_bytes as usize);
        let lent = vec![PoolMemory { regions: vec![&memory], slots: &[0] }];
        self.view.restore(&keys(chain), lent, RestoreOptions::default()).expect("a restore");
    }

    /// Changes a stored page where it lies.
    fn damage(&self, chain: u64) {
        for namespace in std::fs::read_dir(self.root.join("ns")).expect("namespaces").flatten() {
            let files = std::fs::read_dir(namespace.path()).expect("a namespace").flatten();
            let newest =
                files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == "seg"));
            for path in newest {
                let file = std::fs::File::options().read(true).write(true).open(path).expect("a segment");
                let len = file.metadata().expect("its length").len();
                // The newest unit is at the end.
                let from = len.saturating_sub(64 << 10);
                let mut bytes = vec![0; (len - from) as usize];
                file.read_exact_at(&mut bytes, from).expect("its end");
                if let Some(at) = bytes.windows(16).position(|window| window == mark(chain)) {
                    return file.write_all_at(&[0xff], from + at as u64).expect("a damaged page");
                }
            }
        }
        panic!("page {chain} is not found");
    }

    /// When this process said that page `chain` is removed; `None` when its journal does not tell of it any more.
    fn removed_at(&self, chain: u64) -> Option<u64> {
        let key = short_key(&keys(chain)[0]);
        let journals = std::fs::read_dir(self.root.join("journal")).expect("journals").flatten();
        let own = self.store.process().to_string();
        let is_own = |path: &PathBuf| path.to_string_lossy().contains(&own);
        let mut removed_at = None;
        for path in journals.map(|entry| entry.path()).filter(is_own) {
            let bytes = std::fs::read(path).unwrap_or_default();
            let mut at = 0;
            while let Step::Frame(frame, next) = step(&bytes, at) {
                at = next;
                if frame.kind == FrameKind::Remove
                    && decode_gone(frame.body).expect("records").iter().any(|record| record.key == key)
                {
                    removed_at = Some(frame.written_ns);
                }
            }
        }
        removed_at
    }
}

/// Stores pages until the oldest one has to go, again and again. The onlooker's store is read-only: its questions must not
/// keep the page, as a use of it would.
fn evictions() {
    let folder = folder();
    let mut bench = Bench::new(folder.path(), LARGE, "visibility-onlooker");
    let (_store, own) = open(folder.path(), LARGE, true);
    let is_there = |chain: u64| own.match_prefix(&keys(chain)).expect("an answer").pages == 1;
    let (mut stored, mut oldest, mut latencies, mut untold) = (0, 0, Vec::new(), 0);
    for _ in 0..ROUNDS {
        while oldest < stored && !is_there(oldest) {
            oldest += 1;
        }
        if oldest == stored {
            bench.backup(stored);
            stored += 1;
        }
        bench.watch(oldest, 0);
        let seen = loop {
            if let Ok(answer) = bench.answers.try_recv() {
                break answer.parse::<u64>().expect("a time");
            }
            bench.backup(stored);
            stored += 1;
        };
        match bench.removed_at(oldest) {
            Some(removed) => latencies.push(seen.saturating_sub(removed) as f64 / 1e3),
            None => untold += 1,
        }
    }
    println!(
        "RESULT: visibility: eviction to match in another process: p50 {:.0}, p99 {:.0}, most {:.0} us after the time in the \
         remove frame ({} events; {untold} not in the journal any more)",
        quantile(&mut latencies, 0.5),
        quantile(&mut latencies, 0.99),
        quantile(&mut latencies, 1.0),
        latencies.len()
    );
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a process of its own: for each line `CHAIN PAGES`, asks until the answer is so, and tells when.
pub fn child(root: &str, page_bytes: u32, read_only: bool) {
    let (_store, view) = open(Path::new(root), page_bytes, read_only);
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let mut words = line.split_whitespace().map(|word| word.parse::<u64>().expect("a number"));
        let (chain, pages) = (words.next().expect("a chain"), words.next().expect("pages"));
        let keys = keys(chain);
        let is_so = || view.match_prefix(&keys).expect("an answer").pages as u64 == pages;
        is_so();
        writeln!(out, "watching").and_then(|()| out.flush()).expect("somebody who listens");
        while !is_so() {
            std::thread::sleep(ASKS_EVERY);
        }
        writeln!(out, "{}", now_ns()).and_then(|()| out.flush()).expect("somebody who listens");
    }
}

fn open(root: &Path, page_bytes: u32, read_only: bool) -> (Store, View) {
    let capacity_bytes = (!read_only).then_some(CAPACITY);
    let options = StoreOptions { capacity_bytes, io_threads: Some(1), read_only, ..StoreOptions::default() };
    let store = Store::open(root, options).expect("a store");
    let namespace = Namespace::new("bench/visibility", "r1", 1, None).expect("a namespace");
    let components = vec![Component::per_token("x", page_bytes)];
    let pool = Pool::new("kv", PoolKind::Latent, DType::UInt8, None, components).expect("a pool");
    let span = Span { start: 0, end: 1 };
    let tile = Tile::whole_page(span, span, 1).expect("a tile");
    let pools = vec![ViewPool::new(pool, tile, LayoutName::PageFirst)];
    let view = store.view(namespace, pools, ViewOptions::default()).expect("a view");
    (store, view)
}

/// The only key of a chain of one page.
fn keys(chain: u64) -> Vec<PageKey> {
    hicache_core::page_keys(&[chain], 1, None)
}

/// Tells a page's place in a segment.
fn mark(chain: u64) -> [u8; 16] {
    let mut mark = *b"page of chain   ";
    mark[8..].copy_from_slice(&(chain + 1).to_be_bytes());
    mark
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    since.as_nanos() as u64
}

fn quantile(figures: &mut [f64], share: f64) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[((figures.len() - 1) as f64 * share).round() as usize]
}
