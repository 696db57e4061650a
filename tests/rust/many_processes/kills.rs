//! Killed at any instruction, writers lose nothing that was published, and nobody ever reads a wrong byte.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use hicache_tests::deployment::{Deployment, Numbers};

use super::driver::{PATIENCE, Worker, sized, taken_bytes};
use super::ledger::Ledger;
use crate::support::fast_folder;

const CAPACITY: u64 = 16 << 20;
const PAGE: u32 = 64 << 10;
/// 128 chains of 8 pages: four times the capacity.
const CHAINS: u64 = 4 * CAPACITY / (8 * PAGE as u64);
const WRITERS: usize = 4;
const PROCESSES: usize = 8;

/// Where a writer dies between the payload of a unit and its publication.
const UNPUBLISHED: [&str; 3] = ["directory die", "frame die", "frame tear"];

/// The processes, and who of them is to die next.
struct Fleet<'a> {
    root: &'a Path,
    workers: Vec<Worker>,
    ledger: Ledger,
    numbers: Numbers,
    /// A writer with a fault that waits for its point.
    armed: Option<usize>,
    at_fault: u64,
    at_random: u64,
}

impl Fleet<'_> {
    fn new(root: &Path) -> Fleet<'_> {
        let workers = (0..PROCESSES).map(|number| start(root, number, number as u64)).collect();
        let ledger = Ledger::default();
        Fleet { root, workers, ledger, numbers: Numbers(11), armed: None, at_fault: 0, at_random: 0 }
    }

    /// Takes what was said by now; a writer that met its fault is started again.
    fn look(&mut self) {
        for worker in &mut self.workers {
            self.ledger.take(worker.lines_by_now());
        }
        let Some(number) = self.armed else { return };
        if let Some(status) = self.workers[number].ended() {
            assert_eq!(status.signal(), Some(9), "a writer ends by its fault");
            self.at_fault += 1;
            self.start_again(number);
        }
    }

    /// Kills one, or arms a fault for it: every other one dies between payload and publication. A fault that was
    /// not met since the last kill ends by an ordinary one.
    fn kill(&mut self) {
        if self.armed.is_none() && self.at_fault <= self.at_random {
            let victim = self.numbers.below(WRITERS as u64) as usize;
            let fault = UNPUBLISHED[self.numbers.below(3) as usize];
            let after = self.numbers.below(3);
            self.workers[victim].tell(&format!("arm {fault} {after}"));
            self.armed = Some(victim);
            return;
        }
        let number = self.armed.unwrap_or_else(|| self.numbers.below(PROCESSES as u64) as usize);
        if self.workers[number].ended().is_some() {
            return self.look();
        }
        self.workers[number].kill();
        self.at_random += 1;
        self.start_again(number);
    }

    /// Whether four times the capacity was stored, and a third of the kills at least struck at a fault.
    fn has_enough(&self) -> bool {
        self.ledger.reports as u64 * u64::from(PAGE) >= 4 * CAPACITY
            && self.at_fault * 3 >= self.at_fault + self.at_random
    }

    fn start_again(&mut self, number: usize) {
        self.ledger.take(std::iter::from_fn(|| self.workers[number].line()));
        self.workers[number] = start(self.root, number, 1000 + self.at_fault + self.at_random);
        self.armed = None;
    }

    fn halt(mut self) -> Self {
        // A fault that is met while it halts is a death like any other.
        for worker in &mut self.workers {
            worker.tell("disarm");
            worker.tell("halt");
        }
        for worker in &mut self.workers {
            let rest = std::iter::from_fn(|| worker.line()).take_while(|line| line != "halted");
            self.ledger.take(rest);
        }
        self.workers.clear();
        self
    }
}

fn start(root: &Path, number: usize, seed: u64) -> Worker {
    let mut worker = Worker::start(root, &format!("page={PAGE} capacity={CAPACITY}"));
    let write = if number < WRITERS { 90 } else { 0 };
    worker.ask(&format!("work seed={seed} write={write} chains={CHAINS} length=8"), "working");
    worker
}

#[test]
fn killed_writers_lose_nothing_that_was_published() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let mut fleet = Fleet::new(&root);
    let (mut has_filled, mut least_used) = (false, u64::MAX);
    let started = Instant::now();
    for look in 1.. {
        // At least so long, and on a slow machine until there is enough to judge by.
        let is_enough = fleet.has_enough();
        if (look > 20 * sized(10, 60) && is_enough) || started.elapsed() > 10 * PATIENCE {
            break;
        }
        let next = started + look * Duration::from_millis(50);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        fleet.look();
        let used = taken_bytes(&root);
        has_filled |= used >= CAPACITY * 9 / 10;
        if has_filled {
            least_used = least_used.min(used);
        }
        // One a second dies: armed in the middle of the second, killed at its end.
        if look % 10 == 0 {
            fleet.kill();
        }
    }
    let Fleet { ledger, at_fault, at_random, .. } = fleet.halt();
    let verdict = ledger.settle(&root, &Deployment::whole(PAGE), &format!("page={PAGE}"));
    println!(
        "RESULT: {at_fault} kills between payload and publication, {at_random} at random: {verdict:?}, {} backups \
         refused, never less than {:.0} % of the capacity in use after the first fill",
        ledger.refusals,
        least_used as f64 / CAPACITY as f64 * 100.0
    );
    assert!(at_fault * 3 >= at_random + at_fault, "{at_fault} of the kills at faults, {at_random} at random");
    assert!(has_filled, "the root was never full");
    assert!(ledger.reports as u64 * u64::from(PAGE) >= 4 * CAPACITY, "{} pages stored", ledger.reports);
    assert!(least_used >= CAPACITY * 8 / 10, "{least_used} bytes in use of {CAPACITY}");
    let held = verdict.exact as u64 * u64::from(PAGE);
    assert!(held >= CAPACITY * 6 / 10, "{held} bytes of pages can be had, of {CAPACITY}");
}
