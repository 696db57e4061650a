//! How long until all ranks of an engine answer, when eight processes open a root with eight million objects at once?
//!
//! Each rank stored a million objects of its own tile, all under the same keys. Told is the time from the word to open
//! to the answer of the slowest rank, which must find the newest whole chain: once behind ranks that were killed, and
//! again behind ranks that closed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use hicache_core::Store;

use crate::measure::{Chain, Spread, chains, fill, folder, open, view_of_head};

const RANKS: u32 = 8;
const OBJECTS: usize = 1_000_000;
const ROUNDS: usize = 5;

/// Prints the seconds until the slowest rank answers.
pub fn run() {
    let folder = folder();
    let mut filling: Vec<Rank> =
        (0..RANKS).map(|rank| Rank::start("ranks-fill-child", folder.path(), rank)).collect();
    let stored: usize =
        filling.iter_mut().map(|rank| rank.answer().parse::<usize>().expect("a number")).sum();
    for rank in &mut filling {
        rank.child.kill().expect("a child that still runs");
        rank.child.wait().expect("its end");
    }
    let mut seconds: Vec<f64> = (0..=ROUNDS).map(|_| open_all(folder.path())).collect();
    let first = seconds.remove(0);
    println!(
        "RESULT: ranks-open: {stored} objects of {RANKS} ranks, {RANKS} processes open at once, slowest to match its newest chain: \
         {first:.3} s behind ranks that were killed, {} s behind ranks that closed (bar 2)",
        Spread::of(seconds)
    );
}

fn open_all(root: &Path) -> f64 {
    let mut ranks: Vec<Rank> = (0..RANKS).map(|rank| Rank::start("ranks-open-child", root, rank)).collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.answer(), "ready"));
    let started = Instant::now();
    ranks.iter_mut().for_each(Rank::go_on);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.answer(), "found"));
    let seconds = started.elapsed().as_secs_f64();
    ranks.iter_mut().for_each(Rank::go_on);
    for rank in &mut ranks {
        assert!(rank.child.wait().expect("its end").success());
    }
    seconds
}

/// A process that does as it is told, line by line.
struct Rank {
    child: Child,
    words: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Rank {
    fn start(what: &str, root: &Path, rank: u32) -> Rank {
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program)
            .arg(what)
            .arg(root)
            .arg(rank.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child process");
        let words = child.stdin.take().expect("its input");
        let answers = BufReader::new(child.stdout.take().expect("its output"));
        Rank { child, words, answers }
    }

    fn go_on(&mut self) {
        writeln!(self.words, "go on").expect("a child that listens");
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("a child that answers");
        line.trim().to_owned()
    }
}

/// In a process of its own: stores the chains, says how many objects those are, and waits to be killed.
pub fn fill_child(root: &str, rank: u32) {
    let store = open(Path::new(root));
    let stored = fill(&view_of_head(&store, rank), &chains(OBJECTS));
    say(&stored.to_string());
    wait();
}

/// In a process of its own: opens when told to, finds the newest chain, and closes when told to.
pub fn open_child(root: &str, rank: u32) {
    let newest = newest_whole(chains(OBJECTS));
    say("ready");
    wait();
    let store: Store = open(Path::new(root));
    let view = view_of_head(&store, rank);
    assert_eq!(view.match_prefix(&newest.keys).expect("an answer").pages, newest.keys.len());
    say("found");
    wait();
}

fn newest_whole(chains: Vec<Chain>) -> Chain {
    chains.into_iter().rfind(|chain| chain.stored == chain.keys.len()).expect("a whole chain")
}

fn say(word: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{word}").and_then(|()| out.flush()).expect("somebody who listens");
}

fn wait() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a word");
}
