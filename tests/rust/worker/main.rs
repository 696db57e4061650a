//! A process that opens a root and does what its standard input says, a line each; answers are lines on standard
//! output. The tests start, stop and kill it.
//!
//! `worker ROOT [name=value]...`: capacity, page, rank, ranks, revision, threads, segments, arm (words joined by `:`).
//!
//! | line | answer |
//! | --- | --- |
//! | `backup CHAIN FROM TO` | `backed CHAIN FROM SEGMENT LETTERS REASON` |
//! | `match CHAIN PAGES` | `matched PAGES` |
//! | `restore CHAIN FROM TO` | `restored LETTERS` |
//! | `clear`, `used`, `counters` | `cleared OBJECTS`, `used BYTES`, `counters NAME=VALUE...` |
//! | `arm POINT ACTION [AFTER]` | `armed`, see [`faults`] |
//! | `disarm` | `disarmed` |
//! | `work name=value...` | `working`, then its lines, see [`work`] |
//! | `halt` | the rest of the work's lines, then `halted` |
//! | `storm THREADS CHAINS LENGTH` | `stormed name=value...` |
//! | `close` | `closed`, and the process ends |
//!
//! Wrong bytes, an error or a panic are told at once and end the process with a status other than 0.

mod faults;
mod pages;
mod work;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hicache_core::{Store, StoreOptions};
use hicache_tests::deployment::Deployment;

use crate::faults::Faults;
use crate::pages::Pages;

/// Something that must not be: it is told, and the process ends.
pub fn fail(message: &str) -> ! {
    say(&format!("FAILED {message}"));
    exit(3);
}

/// One line of an answer, at once.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Without a reader there is nobody to work for.
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        exit(0);
    }
}

/// `name=value` words.
pub fn values<'a>(words: &[&'a str]) -> HashMap<&'a str, &'a str> {
    let pair =
        |word: &'a str| word.split_once('=').unwrap_or_else(|| fail(&format!("not name=value: {word:?}")));
    words.iter().copied().map(pair).collect()
}

/// A number in words, or what stands for it.
pub fn number<N: std::str::FromStr>(values: &HashMap<&str, &str>, name: &str, otherwise: N) -> N {
    let parse = |text: &&str| text.parse().unwrap_or_else(|_| fail(&format!("{name} is {text:?}")));
    values.get(name).map_or(otherwise, parse)
}

fn main() {
    std::panic::set_hook(Box::new(|panic| {
        say(&format!("FAILED panic: {}", panic.to_string().replace('\n', " ")));
        exit(101);
    }));
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [root, options @ ..] = &arguments[..] else { fail("expected a root") };
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let options = values(&options);
    let deployment = Deployment {
        page_bytes: number(&options, "page", 65536),
        rank: number(&options, "rank", 0),
        ranks: number(&options, "ranks", 1),
        revision: options.get("revision").copied().unwrap_or("r1").to_owned(),
    };
    let faults = Arc::new(Faults::new(u64::from(deployment.page_bytes)));
    if let Some(words) = options.get("arm") {
        faults.arm(&words.split(':').collect::<Vec<_>>()).unwrap_or_else(|error| fail(&error));
    }
    let store_options = StoreOptions {
        capacity_bytes: Some(number(&options, "capacity", 16 << 20)),
        io_threads: Some(number(&options, "threads", 2)),
        max_open_segments: number(&options, "segments", 64),
        io_hook: Some(faults.clone()),
        ..StoreOptions::default()
    };
    let store = Store::open(Path::new(root), store_options).unwrap_or_else(|error| fail(&error.to_string()));
    let pages = Arc::new(Pages::new(&store, deployment).unwrap_or_else(|error| fail(&error.to_string())));
    say(&format!("opened {}", store.process()));
    serve(&store, &pages, &faults);
}

fn integer<N: std::str::FromStr>(word: &str) -> N {
    word.parse().unwrap_or_else(|_| fail(&format!("not a number: {word:?}")))
}

fn serve(store: &Store, pages: &Arc<Pages>, faults: &Faults) {
    let halted = Arc::new(AtomicBool::new(false));
    let mut work = None;
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["backup", chain, from, to] => {
                say(&pages.backup(integer(chain), integer(from)..integer(to)).line());
            }
            ["match", chain, count] => {
                say(&format!("matched {}", pages.matched(integer(chain), integer(count))));
            }
            ["restore", chain, from, to] => {
                say(&format!("restored {}", pages.restore(integer(chain), integer(from)..integer(to))));
            }
            ["clear"] => say(&format!("cleared {}", pages.clear())),
            ["used"] => say(&format!("used {}", store.used_bytes())),
            ["counters"] => {
                let counters = store.counters().into_iter();
                let shown: Vec<_> =
                    counters.map(|(counter, value)| format!("{}={value}", counter.name())).collect();
                say(&format!("counters {}", shown.join(" ")));
            }
            ["arm", ref fault @ ..] => {
                faults.arm(fault).unwrap_or_else(|error| fail(&error));
                say("armed");
            }
            ["disarm"] => {
                faults.disarm();
                say("disarmed");
            }
            ["work", ref spec @ ..] => {
                let spec = work::Spec::parse(&values(spec));
                let (pages, halted) = (Arc::clone(pages), Arc::clone(&halted));
                halted.store(false, Ordering::SeqCst);
                say("working");
                work = Some(std::thread::spawn(move || work::run(&pages, &spec, &halted)));
            }
            ["halt"] => {
                halted.store(true, Ordering::SeqCst);
                if let Some(thread) = work.take()
                    && thread.join().is_err()
                {
                    fail("the work panicked");
                }
                say("halted");
            }
            ["storm", threads, chains, length] => {
                say(&work::storm(pages, integer(threads), integer(chains), integer(length)));
            }
            ["close"] => break,
            _ => fail(&format!("not a command: {line:?}")),
        }
    }
    store.close();
    say("closed");
    // Work that nobody halted ends here.
    exit(0);
}
