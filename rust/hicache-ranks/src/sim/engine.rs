//! A small engine on every rank, with tree, copies, look-ups and reads, under faults.
//!
//! The oracle is simple: after each step the mirrored state of a rank must have the digest that the first rank
//! to come there had; every page that is used must hold what belongs there; what is published must be what all
//! ranks have; at rest nothing is locked and no page is lost; and nobody hangs.

use super::copies::Copy;
use super::engine_net::{FIBERS, Net, OUTCOME, SCHEDULER, fiber};
use super::engine_node::NODES;
use super::engine_rank::{Fiber, LOGS, SimRank};
use super::engine_tree::Tree;
use super::{Choices, Run, Violation, World};
use crate::ask::{Answer, Ask};
use crate::audit::Record;
use crate::error::RankError;
use crate::pp_sync::{Mode, PpSync};
use crate::rules::{Rule, Rules};
use crate::topology::{Rank, Topology};
use crate::vote::{CapacityVote, minima};

/// Steps a world may take to come to rest after its last request.
pub(super) const REST: u32 = 400;

/// Of so many steps and one for each request, the first bring no request: most steps of an engine do not, and logs
/// run empty in between.
pub(super) const IDLE: usize = 2 * NODES;

/// What may go wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// One rank gets a quarter of its turns.
    pub slow: bool,
    /// One rank gets no turn for a while.
    pub pause: bool,
    /// Completions and messages come twice.
    pub duplicate: bool,
    /// A copy cannot be started on one rank, a read finds less than was promised.
    pub failures: bool,
    /// A callback raises: a look-up or a read ends in an exception.
    pub exceptions: bool,
    /// Clocks differ about what has run out of time; requests are cancelled.
    pub timeouts: bool,
    /// One rank dies.
    pub crash: bool,
    /// One message or contribution is lost.
    pub drop: bool,
}

impl Faults {
    /// Everything after which all ranks must come to the same end.
    pub const SURVIVABLE: Faults = Faults {
        slow: true,
        pause: true,
        duplicate: true,
        failures: true,
        exceptions: true,
        timeouts: true,
        crash: false,
        drop: false,
    };
}

/// Which engine, and what may go wrong.
#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// Ranks.
    pub topology: Topology,
    /// Steps with requests.
    pub steps: u32,
    /// When counts are reduced.
    pub mode: Mode,
    /// What may go wrong.
    pub faults: Faults,
    /// Whether requests ask the store.
    pub storage: bool,
    /// Whether the outcome of a backup is voted on.
    pub voted: bool,
    /// Which rules hold.
    pub rules: Rules,
    /// Whether the state is proved equal within pp_sync itself. Off, divergence goes on until an oracle sees it.
    pub proof: bool,
    /// Whether records for the checker are kept. Then differing states do not end the run.
    pub trace: bool,
}

impl EngineConfig {
    /// An engine without faults, 60 steps.
    pub fn new(topology: Topology) -> EngineConfig {
        EngineConfig {
            topology,
            steps: 60,
            mode: Mode::Now,
            faults: Faults::default(),
            storage: true,
            voted: false,
            rules: Rules::ALL,
            proof: true,
            trace: false,
        }
    }
}

/// What all ranks found of one operation, for the oracle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Truth {
    pub hit: u32,
    pub completed: u32,
}

/// The engine world.
#[derive(Debug)]
pub struct Engine {
    pub(super) config: EngineConfig,
    /// Ranks before the first step, which every schedule begins with.
    fresh: Vec<SimRank>,
    pub(super) ranks: Vec<SimRank>,
    pub(super) net: Net,
    pub(super) copies: Vec<Copy>,
    /// Threads that can run, and ranks with a read under way.
    pub(super) runnable: u64,
    pub(super) reading: u64,
    /// Reductions begun and not collected: the result, once it is there.
    pub(super) collected: Vec<Option<Answer>>,
    pub(super) script: Vec<u32>,
    pub(super) digests: Vec<u64>,
    pub(super) truths: Vec<Truth>,
    pub(super) events: u32,
    pub(super) resting: u64,
    /// Ranks whose scheduler has waited long enough for operations under way.
    pub(super) parked: u64,
    pub(super) slow: Option<usize>,
    pub(super) paused: Option<(usize, u32)>,
    pub(super) crash: Option<(usize, u32)>,
    pub(super) drop: Option<u32>,
    pub(super) sent: u32,
    /// A fault after which ranks may end with an error; of those, a lost message.
    pub(super) struck: bool,
    pub(super) lost: bool,
    pub(super) paths: Vec<(Option<usize>, Option<usize>)>,
}

impl Engine {
    /// A world; at most 16 ranks.
    pub fn new(config: EngineConfig) -> Engine {
        let topology = config.topology;
        let stage = (topology.cp() * topology.tp()) as usize;
        let ranks = topology.ranks() as usize;
        assert!(ranks * FIBERS <= 64, "threads are bits of a word");
        let path = |rank: usize| {
            let pp = rank / stage;
            (rank.checked_sub(stage), (pp + 1 < topology.pp() as usize).then_some(rank + stage))
        };
        Engine {
            config,
            fresh: Vec::new(),
            ranks: Vec::new(),
            net: Net::new(topology.pp() as usize, stage, false),
            copies: Vec::new(),
            runnable: 0,
            reading: 0,
            collected: Vec::new(),
            script: Vec::new(),
            digests: Vec::new(),
            truths: Vec::new(),
            events: 0,
            resting: 0,
            parked: 0,
            slow: None,
            paused: None,
            crash: None,
            drop: None,
            sent: 0,
            struck: false,
            lost: false,
            paths: (0..ranks).map(path).collect(),
        }
    }

    /// The records that each rank kept for the checker.
    pub fn traces(&self) -> Vec<Vec<Record>> {
        self.ranks.iter().map(|rank| rank.tree.trace.clone().unwrap_or_default()).collect()
    }

    /// The error each rank ended with, where it did.
    pub fn errors(&self) -> Vec<Option<RankError>> {
        self.ranks.iter().map(|rank| rank.error.clone()).collect()
    }

    /// Turns, completions and reads of the last schedule.
    pub fn events(&self) -> u32 {
        self.events
    }

    /// Steps each rank has taken.
    pub fn steps(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.step).collect()
    }

    /// Ranks as they are before the first step. They do not depend on the schedule.
    fn build(&mut self) -> Run {
        let config = self.config;
        let (topology, rules) = (config.topology, config.rules);
        let ranks = topology.ranks() as usize;
        let stage = (topology.cp() * topology.tp()) as usize;
        self.net = Net::new(topology.pp() as usize, stage, !rules.hold(Rule::SeparateLanes));
        // Stages with other layers have room for other numbers of pages.
        let own = |rank: usize| vec![14 + 2 * (rank / stage) as u64 % 4, 18];
        let mut agreed = own(0);
        for rank in 0..ranks {
            let Ask::Reduce(reduce) = CapacityVote::new(own(rank)).ask() else { continue };
            let mut values: Vec<i64> = agreed.iter().map(|&pages| pages as i64).collect();
            minima(&mut values, &reduce.values).map_err(|error| Violation::new("I10", error.to_string()))?;
            agreed = values.iter().map(|&pages| pages as u64).collect();
        }
        for number in 0..ranks {
            let fail = |error: RankError| Violation::new("I10", error.to_string());
            let rank = Rank(number as u32);
            let at = topology.coordinates(rank).map_err(fail)?;
            let owners = topology.owners();
            let capacity = if rules.hold(Rule::AgreedCapacity) { agreed.clone() } else { own(number) };
            let round = |pages: u64| (pages as u32).next_multiple_of(owners);
            let mut tree = Tree::new(owners, round(capacity[0]), round(capacity[1]), rules, number % 2 == 1)?;
            tree.trace = config.trace.then(Vec::new);
            let sync = PpSync::new(&topology, rank, LOGS, config.mode).map_err(fail)?.with_rules(rules);
            let owner = if owners > 1 { at.cp } else { 0 };
            self.fresh.push(SimRank::new(owner, owners, tree, sync, config.voted, rules));
        }
        Ok(())
    }

    fn reset(&mut self, choices: &mut Choices) -> Run {
        if self.fresh.is_empty() {
            self.build()?;
        }
        let ranks = self.fresh.len();
        self.net.clear();
        self.ranks.clone_from(&self.fresh);
        self.copies.clear();
        self.collected.clear();
        self.collected.resize(ranks, None);
        self.runnable = (0..ranks).fold(0, |threads, rank| threads | 1 << fiber(rank, SCHEDULER));
        (self.reading, self.resting, self.parked) = (0, 0, 0);
        (self.events, self.sent, self.struck, self.lost) = (0, 0, false, false);
        self.script.clear();
        self.digests.clear();
        self.truths.clear();
        // The requests stand first in the schedule, so that leaving one out does not move the others.
        self.script.extend((0..self.config.steps).map(|_| choices.below((IDLE + 2 * NODES) as u32)));
        let faults = self.config.faults;
        let victim = |choices: &mut Choices| choices.below(ranks as u32) as usize;
        self.slow = (faults.slow && choices.one_in(2)).then(|| victim(choices));
        self.paused = (faults.pause && choices.one_in(2)).then(|| {
            let until = 20 + choices.below(300);
            (victim(choices), until)
        });
        self.crash = (faults.crash && choices.one_in(2)).then(|| (victim(choices), choices.below(400)));
        self.drop = (faults.drop && choices.one_in(2)).then(|| choices.below(80));
        Ok(())
    }

    // --- what happens next -----------------------------------------------------------------------------

    fn next_event(&mut self, choices: &mut Choices) -> Result<bool, Violation> {
        let mut threads = self.runnable;
        let (mut reading, mut copies) = (self.reading, self.copies.len() as u32);
        if let Some((rank, until)) = self.paused {
            let rest = threads & !(0xf << (rank * FIBERS));
            if self.events < until && rest & !self.resting != 0 {
                (threads, reading) = (rest, reading & !(1 << rank));
            } else {
                self.paused = None;
            }
        }
        // A scheduler that only waits for the end is asked when nothing else can happen.
        let busy = threads & !self.resting;
        if busy != 0 || reading != 0 || copies > 0 {
            threads = busy;
        } else {
            copies = 0;
        }
        let (runs, reads) = (threads.count_ones(), if reading == 0 { 0 } else { reading.count_ones() });
        let total = runs + reads + copies;
        if total == 0 {
            return Ok(false);
        }
        let mut pick = choices.below(total);
        if let Some(slow) = self.slow
            && self.rank_of(pick, threads, reading) == slow
            && choices.below(4) != 0
        {
            pick = choices.below(total);
        }
        if pick < runs {
            let bit = nth_bit(threads, pick);
            self.run_thread(bit / FIBERS, bit % FIBERS, choices)?;
        } else if pick < runs + reads {
            self.read(nth_bit(reading, pick - runs), choices)?;
        } else {
            self.finish_copy((pick - runs - reads) as usize, choices)?;
        }
        Ok(true)
    }

    fn rank_of(&self, pick: u32, threads: u64, reading: u64) -> usize {
        if pick < threads.count_ones() {
            return nth_bit(threads, pick) / FIBERS;
        }
        let pick = pick - threads.count_ones();
        if pick < reading.count_ones() {
            return nth_bit(reading, pick);
        }
        usize::from(self.copies[(pick - reading.count_ones()) as usize].rank)
    }

    fn finish_copy(&mut self, place: usize, choices: &mut Choices) -> Run {
        let copy = self.copies.swap_remove(place);
        let rank = usize::from(copy.rank);
        self.ranks[rank].carry_out(&copy);
        let times = 1 + u32::from(self.config.faults.duplicate && choices.one_in(6));
        for _ in 0..times {
            self.ranks[rank].logs[usize::from(copy.log)]
                .finish(copy.ticket, copy.outcome)
                .map_err(|error| Violation::new("I8", error.to_string()))?;
        }
        self.wake_wait(rank);
        self.wake_outcome(rank);
        Ok(())
    }

    pub(super) fn wake_outcome(&mut self, rank: usize) {
        if self.config.voted && self.ranks[rank].fibers[OUTCOME] == Fiber::Ready {
            self.runnable |= 1 << fiber(rank, OUTCOME);
        }
    }

    pub(super) fn wake_wait(&mut self, rank: usize) {
        let entry = &self.ranks[rank];
        if let Some(&Ask::Wait { log, .. }) = entry.blocked(SCHEDULER)
            && entry.logs[log].front_ready()
        {
            self.answer(rank, SCHEDULER, Answer::Done);
        }
    }

    pub(super) fn answer(&mut self, rank: usize, thread: usize, answer: Answer) {
        if self.ranks[rank].error.is_none() && !self.ranks[rank].crashed {
            self.ranks[rank].answer(thread, answer);
            self.runnable |= 1 << fiber(rank, thread);
        }
    }
}

/// Position of the `n`-th set bit.
fn nth_bit(mut bits: u64, n: u32) -> usize {
    // Mostly one of the first few, and which is anybody's guess: no branch for those.
    for step in 0..3 {
        bits = if step < n { bits & bits.wrapping_sub(1) } else { bits };
    }
    for _ in 3..n {
        bits &= bits - 1;
    }
    bits.trailing_zeros() as usize
}

impl World for Engine {
    fn name(&self) -> String {
        let (topology, faults) = (self.config.topology, self.config.faults);
        format!(
            "engine pp{} cp{} tp{} {:?} {}{}{}",
            topology.pp(),
            topology.cp(),
            topology.tp(),
            self.config.mode,
            if self.config.voted { "voted " } else { "" },
            if faults == Faults::default() { "" } else { "faults " },
            if faults.crash || faults.drop { "fatal" } else { "" }
        )
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        self.reset(choices)?;
        loop {
            if let Some((rank, _)) = self.crash.filter(|&(_, at)| at == self.events) {
                self.struck = true;
                self.ranks[rank].crashed = true;
                self.stop(rank);
            }
            self.events += 1;
            if !self.next_event(choices)? {
                if self.ranks.iter().all(SimRank::is_over) {
                    break;
                }
                self.check_deadlock()?;
                self.expire()?;
            }
        }
        self.check_end()
    }
}
