//! All ranks clear at once: it is one clear, and nothing published after it is lost.

use std::time::Duration;

use hicache_core::inspect::scan;
use hicache_sys::lock::FileLock;
use hicache_tests::deployment::Deployment;

use super::driver::{Worker, sized, wait_until};
use crate::support::fast_folder;

const PROCESSES: u64 = 8;
const PAGE: u32 = 4096;

/// How often the worker's first thread waited so far.
fn waits(worker: &Worker) -> u64 {
    let number = worker.number();
    let status = std::fs::read_to_string(format!("/proc/{number}/task/{number}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn all_processes_that_clear_at_once_clear_once() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let start = |_| Worker::start(&root, &format!("page={PAGE} capacity={} threads=1", 16 << 20));
    let mut workers: Vec<Worker> = (0..PROCESSES).map(start).collect();
    let fingerprint = Deployment::whole(PAGE).namespace().unwrap().fingerprint();
    let lock = root.join("ns").join(fingerprint.to_string()).join("generation.lock");
    let generation = || scan(&root).unwrap().namespace(&fingerprint).unwrap().generation;
    for round in 0..sized(5, 100) {
        let first = round * PROCESSES;
        let before = generation();
        let held = FileLock::exclusive_within(&lock, Duration::from_secs(10)).unwrap().expect("a free lock");
        let waited: Vec<u64> = workers.iter().map(waits).collect();
        for (worker, chain) in workers.iter_mut().zip(first..) {
            worker.tell("clear");
            worker.tell(&format!("backup {chain} 0 4"));
        }
        // Each has read the generation and asks for the lock again and again.
        wait_until("all want to clear", || {
            workers.iter().zip(&waited).all(|(worker, &before)| waits(worker) > before + 20)
        });
        drop(held);
        for worker in &mut workers {
            worker.answer("cleared");
            assert!(worker.answer("backed").contains("ssss"));
        }
        assert_eq!(generation(), before + 1, "round {round}");
        for worker in &mut workers {
            for chain in first..first + PROCESSES {
                assert_eq!(worker.matched(chain, 4), 4, "chain {chain} was published after the clear");
                assert_eq!(worker.restore(chain, 0..4), "rrrr");
            }
            if round > 0 {
                assert_eq!(worker.matched(first - 1, 4), 0, "it was cleared");
            }
        }
    }
}

#[test]
fn pages_published_by_others_after_a_clear_stay() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let start = |_| Worker::start(&root, &format!("page={PAGE} capacity={} threads=1", 16 << 20));
    let mut workers: Vec<Worker> = (0..4).map(start).collect();
    // Writers that never stop, while one of the others clears.
    for (number, writer) in workers.iter_mut().take(3).enumerate() {
        writer.ask(&format!("work write=50 seed={number} chains=50 length=4"), "working");
    }
    for chain in 1000..1000 + sized(20, 200) {
        workers[3].ask("clear", "cleared");
        assert_eq!(workers[3].backup(chain, 0..4), "ssss");
        assert_eq!(workers[3].restore(chain, 0..4), "rrrr");
        assert_eq!(workers[3].matched(chain - 1, 4), 0);
    }
    for writer in &mut workers[..3] {
        writer.tell("halt");
        while writer.line().expect("a living writer") != "halted" {}
    }
}
