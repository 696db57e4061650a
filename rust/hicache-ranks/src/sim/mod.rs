//! The deterministic simulator: worlds of ranks, schedules drawn from a seed, replayed and shrunk.
//!
//! A world runs once per schedule. Whatever could happen in several ways (who runs next, which transfer
//! finishes, what a rank finds in the store, when a fault strikes) is a [choice](Choices); the list of choices
//! taken is the schedule. A failing schedule is printed as that list, replayed from it and shrunk by leaving
//! choices out: a choice that is left out is the first of its alternatives, which is always the harmless one.

mod audit;
mod choices;
mod copies;
mod engine;
mod engine_asks;
mod engine_effects;
mod engine_end;
mod engine_net;
mod engine_node;
mod engine_rank;
mod engine_room;
mod engine_tree;
mod engine_turns;
mod gate;
mod mixed;
mod ownership;
mod promise;
mod scratch;
mod streams;
mod votes;
mod writers;

pub use audit::AuditWorld;
pub use choices::Choices;
pub use engine::{Engine, EngineConfig, Faults};
pub use gate::{GateResult, mutation_gate, worlds_against};
pub use mixed::{MixedWorld, SHAPES};
pub use ownership::OwnershipWorld;
pub use promise::PromiseWorld;
pub use scratch::ScratchWorld;
pub use streams::StreamWorld;
pub use votes::VoteWorld;
pub use writers::WriterWorld;

use std::fmt;

/// What went wrong in a schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The invariant of the specification: `I9`.
    pub invariant: &'static str,
    /// What was seen.
    pub message: String,
}

impl Violation {
    pub(crate) fn new(invariant: &'static str, message: impl Into<String>) -> Violation {
        Violation { invariant, message: message.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.message)
    }
}

/// Result of one schedule.
pub type Run = Result<(), Violation>;

/// Something that runs from a list of choices.
pub trait World {
    /// A name for reports.
    fn name(&self) -> String;

    /// Runs one schedule.
    ///
    /// # Errors
    ///
    /// The first invariant that does not hold.
    fn run(&mut self, choices: &mut Choices) -> Run;
}

/// A schedule that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The world.
    pub world: String,
    /// The seed that drew it.
    pub seed: u64,
    /// The choices that were taken.
    pub choices: Vec<u32>,
    /// What went wrong.
    pub violation: Violation,
}

/// Longest list of choices that is printed.
const PRINTED: usize = 400;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.world, self.violation)?;
        write!(f, "seed {}, {} choices", self.seed, self.choices.len())?;
        // A long list is drawn again from its seed; a shrunk one is all there is.
        if self.choices.len() <= PRINTED { write!(f, ": {:?}", self.choices) } else { Ok(()) }
    }
}

/// Runs the schedules of seeds `first..first + count`.
///
/// # Errors
///
/// The first schedule that fails.
pub fn explore(world: &mut dyn World, first: u64, count: u64) -> Result<(), Box<Failure>> {
    let mut choices = Choices::from_seed(0);
    for seed in first..first + count {
        choices.reseed(seed);
        if let Err(violation) = world.run(&mut choices) {
            let (world, choices) = (world.name(), choices.taken().to_vec());
            return Err(Box::new(Failure { world, seed, choices, violation }));
        }
    }
    Ok(())
}

/// Runs a schedule again.
///
/// # Errors
///
/// What went wrong.
pub fn replay(world: &mut dyn World, schedule: &[u32]) -> Run {
    world.run(&mut Choices::from_list(schedule.to_vec()))
}

/// Leaves out choices while the same invariant still fails, for at most `budget` runs.
pub fn shrink(world: &mut dyn World, failure: &Failure, budget: u32) -> Failure {
    let mut best = failure.clone();
    let mut left = budget;
    let mut attempt = |best: &mut Failure, candidate: Vec<u32>| -> bool {
        if left == 0 || candidate == best.choices {
            return false;
        }
        left -= 1;
        match replay(world, &candidate) {
            Err(violation) if violation.invariant == best.violation.invariant => {
                (best.choices, best.violation) = (candidate, violation);
                true
            }
            _ => false,
        }
    };
    // What happens last matters least: cut the end, make blocks and single choices harmless, leave blocks out.
    let mut keep = best.choices.len() / 2;
    while keep > 0 {
        let shorter = best.choices.len().saturating_sub(keep);
        let candidate = best.choices[..shorter].to_vec();
        if !attempt(&mut best, candidate) {
            keep /= 2;
        }
    }
    let mut block = best.choices.len() / 2;
    while block > 0 {
        for at in (0..best.choices.len()).step_by(block) {
            let mut candidate = best.choices.clone();
            candidate.iter_mut().skip(at).take(block).for_each(|choice| *choice = 0);
            attempt(&mut best, candidate);
        }
        block /= 2;
    }
    let mut block = best.choices.len() / 2;
    while block > 0 {
        let mut at = 0;
        while at + block <= best.choices.len() {
            let mut candidate = best.choices.clone();
            candidate.drain(at..at + block);
            if !attempt(&mut best, candidate) {
                at += block;
            }
        }
        block /= 2;
    }
    for at in 0..best.choices.len() {
        if best.choices.get(at).is_some_and(|&choice| choice > 1) {
            let mut candidate = best.choices.clone();
            candidate[at] = 1;
            attempt(&mut best, candidate);
        }
    }
    while best.choices.last() == Some(&0) {
        best.choices.pop();
    }
    best
}
