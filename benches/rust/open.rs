//! How long from nothing to the first right answer with a million objects, and how much memory is an object?

use std::process::Command;
use std::time::Instant;

use hicache_core::View;

use crate::measure::{Chain, Spread, chains, fill, fill_singly, folder, open, tiny_view};

const ROUNDS: usize = 5;

/// So many objects that the hash table has just doubled, when it takes most memory an object.
const SINGLE_OBJECTS: [usize; 2] = [230_000, 918_000];

/// Prints the time to open, and bytes per object as the slope between two sizes.
pub fn run() {
    measure("chains stored whole", [1_000_000, 4_000_000], fill);
    measure("every page a run of its own, the table as empty as it gets", SINGLE_OBJECTS, fill_singly);
}

fn measure(case: &str, sizes: [usize; 2], fill: fn(&View, &[Chain]) -> usize) {
    let mut memory = Vec::new();
    for objects in sizes {
        let folder = folder();
        let stored = {
            let store = open(folder.path());
            fill(&tiny_view(&store), &chains(objects))
        };
        let (mut seconds, mut resident) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let program = std::env::current_exe().expect("this program");
            let mut child = Command::new(program);
            child.arg("open-child").arg(folder.path()).arg(objects.to_string());
            let output = child.output().expect("a child process");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let words = String::from_utf8(output.stdout).expect("text");
            let mut words = words.split_whitespace().map(|word| word.parse::<f64>().expect("a figure"));
            seconds.push(words.next().expect("seconds"));
            resident.push(words.next().expect("bytes"));
        }
        println!(
            "RESULT: open: {stored} objects, {case}, to the first full-length match: {} s (bar 1 at 1 M)",
            Spread::of(seconds)
        );
        memory.push((stored as f64, Spread::of(resident).median));
    }
    let slope = (memory[1].1 - memory[0].1) / (memory[1].0 - memory[0].0);
    println!("RESULT: index: {slope:.1} bytes of resident memory an object, {case} (bar 64)");
}

/// In a process of its own: opens, matches one whole chain, prints seconds and grown resident bytes.
pub fn child(root: &str, objects: usize) {
    let chain =
        chains(objects).into_iter().find(|chain| chain.stored == chain.keys.len()).expect("a whole chain");
    let before = resident_bytes();
    let started = Instant::now();
    let store = open(std::path::Path::new(root));
    let view = tiny_view(&store);
    let found = view.match_prefix(&chain.keys).expect("an answer");
    let seconds = started.elapsed().as_secs_f64();
    assert_eq!(found.pages, chain.keys.len());
    println!("{seconds} {}", resident_bytes() - before);
}

fn resident_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("this process's status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("resident memory");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok()).expect("KiB") * 1024.0
}
