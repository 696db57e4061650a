//! A small engine on every rank, with tree, copies, look-ups and reads, under faults.
//!
//! The oracle is simple: after each step the mirrored state of a rank must have the digest that the first rank
//! to come there had; every page that is used must hold what belongs there; what is published must be what all
//! ranks have; at rest nothing is locked and no page is lost; and nobody hangs.

use super::copies::Copy;
use super::engine_net::{FIBERS, Net, OUTCOME, PROGRESS, Posted, QUERY, SCHEDULER, fiber};
use super::engine_rank::{Fiber, HIT, LOAD, LOGS, Query, REPORT, SimRank, WRITE, pack};
use super::engine_tree::{Action, NODES, Tree, node_of, pages_of};
use super::{Choices, Run, Violation, World};
use crate::ack::{AckLog, Outcome};
use crate::ask::{Answer, Ask, Lane, Reduce};
use crate::audit::Record;
use crate::error::{RankError, RankErrorKind};
use crate::pp_sync::{Mode, PpSync, StepInput, SyncStep};
use crate::prefetch::Part;
use crate::rules::{Rule, Rules};
use crate::topology::{Rank, Scope, Topology};
use crate::vote::{CapacityVote, minima};
use crate::watch::{Beat, Watch};

/// Steps a world may take to come to rest after its last request.
const REST: u32 = 400;

/// Of so many steps and one for each request, the first bring no request: most steps of an engine do not, and logs
/// run empty in between.
const IDLE: usize = 2 * NODES;

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
struct Truth {
    hit: u32,
    completed: u32,
}

/// The engine world.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    ranks: Vec<SimRank>,
    net: Net,
    copies: Vec<Copy>,
    /// Threads that can run, and ranks with a read under way.
    runnable: u64,
    reading: u64,
    /// Reductions begun and not collected: the result, once it is there.
    collected: Vec<Option<Answer>>,
    script: Vec<u32>,
    digests: Vec<u64>,
    truths: Vec<Truth>,
    events: u32,
    resting: u64,
    /// Ranks whose scheduler has waited long enough for operations under way.
    parked: u64,
    slow: Option<usize>,
    paused: Option<(usize, u32)>,
    crash: Option<(usize, u32)>,
    drop: Option<u32>,
    sent: u32,
    /// A fault after which ranks may end with an error; of those, a lost message.
    struck: bool,
    lost: bool,
    paths: Vec<(Option<usize>, Option<usize>)>,
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

    fn reset(&mut self, choices: &mut Choices) -> Run {
        let config = self.config;
        let (topology, rules) = (config.topology, config.rules);
        let ranks = topology.ranks() as usize;
        let stage = (topology.cp() * topology.tp()) as usize;
        self.net = Net::new(topology.pp() as usize, stage, !rules.hold(Rule::SeparateLanes));
        self.copies.clear();
        self.collected.clear();
        self.collected.resize(ranks, None);
        (self.runnable, self.reading, self.resting, self.parked) = (0, 0, 0, 0);
        (self.events, self.sent, self.struck, self.lost) = (0, 0, false, false);
        self.script.clear();
        self.digests.clear();
        self.truths.clear();
        self.ranks.clear();
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
            self.ranks.push(SimRank::new(owner, owners, tree, sync, config.voted, rules));
            self.runnable |= 1 << fiber(number, SCHEDULER);
        }
        // The requests stand first in the schedule, so that leaving one out does not move the others.
        self.script.extend((0..config.steps).map(|_| choices.below((IDLE + 2 * NODES) as u32)));
        let faults = config.faults;
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

    fn wake_outcome(&mut self, rank: usize) {
        if self.config.voted && self.ranks[rank].fibers[OUTCOME] == Fiber::Ready {
            self.runnable |= 1 << fiber(rank, OUTCOME);
        }
    }

    fn wake_wait(&mut self, rank: usize) {
        let entry = &self.ranks[rank];
        if let Some(&Ask::Wait { log, .. }) = entry.blocked(SCHEDULER)
            && entry.logs[log].front_ready()
        {
            self.answer(rank, SCHEDULER, Answer::Done);
        }
    }

    fn answer(&mut self, rank: usize, thread: usize, answer: Answer) {
        if self.ranks[rank].error.is_none() && !self.ranks[rank].crashed {
            self.ranks[rank].answer(thread, answer);
            self.runnable |= 1 << fiber(rank, thread);
        }
    }

    // --- threads ---------------------------------------------------------------------------------------

    fn run_thread(&mut self, rank: usize, thread: usize, choices: &mut Choices) -> Run {
        let entry = &mut self.ranks[rank];
        let answer = match entry.fibers[thread] {
            Fiber::Ready => None,
            Fiber::Answered => entry.take_answer(thread),
            Fiber::Blocked | Fiber::Finished => {
                self.runnable &= !(1 << fiber(rank, thread));
                return Ok(());
            }
        };
        entry.fibers[thread] = Fiber::Ready;
        if thread == SCHEDULER {
            return self.run_scheduler(rank, answer, choices);
        }
        let ask = match answer {
            Some(answer) => return self.background_answer(rank, thread, answer),
            None => match thread {
                QUERY => self.ranks[rank].next_query(),
                PROGRESS => self.ranks[rank].next_report(),
                _ => self.ranks[rank].next_outcome(),
            },
        };
        match ask {
            Some(ask) => {
                if let Some(answer) = self.ask(rank, thread, ask, choices)? {
                    return self.background_answer(rank, thread, answer);
                }
            }
            None => self.runnable &= !(1 << fiber(rank, thread)),
        }
        Ok(())
    }

    fn background_answer(&mut self, rank: usize, thread: usize, answer: Answer) -> Run {
        let entry = &mut self.ranks[rank];
        let result = match thread {
            QUERY => match entry.query_vote.take() {
                Some(vote) => match vote.resume(answer) {
                    Ok(hit) => return self.hit_agreed(rank, vote.number(), hit.pages),
                    Err(error) => Err(error),
                },
                None => Ok(()),
            },
            PROGRESS => match entry.progress_vote.take() {
                Some(vote) => vote.resume(answer).map(|report| {
                    entry.logs[REPORT].append_finished(report.operation, Outcome::Done, pack(report));
                }),
                None => Ok(()),
            },
            _ => match entry.outcome_vote.take() {
                Some((vote, ticket)) => vote
                    .resume(answer)
                    .and_then(|outcome| entry.logs[WRITE].decide(ticket, outcome))
                    .map(|_| ()),
                None => Ok(()),
            },
        };
        if let Err(error) = result {
            return self.failed(rank, error);
        }
        self.runnable |= 1 << fiber(rank, thread);
        self.wake_wait(rank);
        Ok(())
    }

    fn hit_agreed(&mut self, rank: usize, operation: u64, pages: u32) -> Run {
        let truth = self.truth(operation);
        if pages != truth.hit {
            let message = format!("rank {rank}: hit of {pages} pages, all ranks have {}", truth.hit);
            return Err(Violation::new("I12", message));
        }
        let entry = &mut self.ranks[rank];
        if !self.config.rules.hold(Rule::OrderedPublication) {
            entry.apply_hit(operation, u64::from(pages))?;
            if !entry.reads.is_empty() {
                self.reading |= 1 << rank;
            }
        }
        self.ranks[rank].logs[HIT].append_finished(operation, Outcome::Done, u64::from(pages));
        self.runnable |= 1 << fiber(rank, QUERY);
        self.wake_wait(rank);
        Ok(())
    }

    fn truth(&mut self, operation: u64) -> &mut Truth {
        let place = (operation >> 8) as usize;
        if self.truths.len() <= place {
            self.truths.resize(place + 1, Truth { hit: u32::MAX, completed: u32::MAX });
        }
        &mut self.truths[place]
    }

    fn run_scheduler(&mut self, rank: usize, answer: Option<Answer>, choices: &mut Choices) -> Run {
        let entry = &mut self.ranks[rank];
        let digest = if self.config.proof { entry.digest } else { 0 };
        let input = StepInput { digest, expired: entry.late };
        let mut step = match answer {
            None => entry.sync.begin(&mut entry.logs, input),
            Some(answer) => entry.sync.resume(answer, &mut entry.logs),
        };
        loop {
            match step {
                Err(error) => return self.failed(rank, error),
                Ok(SyncStep::Done { expired }) => return self.after_step(rank, expired, choices),
                Ok(SyncStep::Ask(ask)) => {
                    let Some(answer) = self.ask(rank, SCHEDULER, ask, choices)? else { return Ok(()) };
                    let entry = &mut self.ranks[rank];
                    step = entry.sync.resume(answer, &mut entry.logs);
                }
                Ok(SyncStep::Apply { log, ack }) => {
                    let entry = &mut self.ranks[rank];
                    if let Some(done) = entry.apply(rank, log, ack)? {
                        self.check_published(rank, done.operation)?;
                    }
                    let entry = &mut self.ranks[rank];
                    if !entry.reads.is_empty() {
                        self.reading |= 1 << rank;
                    }
                    step = entry.sync.next(&mut entry.logs);
                }
            }
        }
    }

    fn check_published(&mut self, rank: usize, operation: u64) -> Run {
        let node = node_of(operation);
        let published = self.ranks[rank].tree.nodes[node].host_pages.list().len() as u32;
        let truth = *self.truth(operation);
        if published != truth.completed.min(truth.hit) {
            return Err(Violation::new(
                "I12",
                format!("rank {rank}: {published} pages published, all ranks have {}", truth.completed),
            ));
        }
        Ok(())
    }

    fn after_step(&mut self, rank: usize, expired: u64, choices: &mut Choices) -> Run {
        let config = &self.config;
        let timeouts = config.faults.timeouts;
        let number = self.ranks[rank].step;
        let word = self.script.get(number as usize).map_or(0, |&word| word as usize);
        let entry = &mut self.ranks[rank];
        entry.tree.step = u64::from(number);
        let verdict = if config.rules.hold(Rule::AgreedTimeout) { expired } else { entry.late };
        if verdict > 0 {
            entry.tree.terminate(verdict);
            for read in &mut entry.reads {
                read.cancelled |= entry.tree.nodes[read.node].terminated;
            }
        }
        let (steps, trace) = (config.steps, config.trace);
        if let Some(request) = word.checked_sub(IDLE) {
            entry.tree.request(request % NODES, config.storage && request >= NODES)?;
            self.carry_out(rank, choices)?;
        }
        let entry = &mut self.ranks[rank];
        if timeouts && choices.one_in(16) {
            entry.late = entry.tree.sequence() + 1;
        }
        let digest = entry.tree.digest();
        entry.digest = digest;
        match self.digests.get(number as usize) {
            None => self.digests.push(digest),
            Some(&first) if first != digest && !trace => {
                return Err(Violation::new("I4", format!("rank {rank} differs after step {number}")));
            }
            Some(_) => {}
        }
        entry.step += 1;
        if entry.step >= steps {
            self.resting |= 1 << fiber(rank, SCHEDULER);
            if entry.tree.in_flight == 0 {
                entry.fibers[SCHEDULER] = Fiber::Finished;
                self.runnable &= !(1 << fiber(rank, SCHEDULER));
            } else if entry.step > steps + REST && self.struck {
                // What it waits for is lost; its own deadline for operations under way will tell.
                self.runnable &= !(1 << fiber(rank, SCHEDULER));
                self.parked |= 1 << rank;
            } else if entry.step > steps + REST {
                return Err(Violation::new("I14", format!("rank {rank} does not come to rest")));
            }
        }
        Ok(())
    }

    /// Carries out what the tree decided.
    fn carry_out(&mut self, rank: usize, choices: &mut Choices) -> Run {
        let faults = self.config.faults;
        let mut actions = std::mem::take(&mut self.ranks[rank].tree.actions);
        for action in actions.drain(..) {
            match action {
                Action::Compute { node } => self.ranks[rank].fill(node, true, 0, pages_of(node) as usize),
                Action::Read { node } => self.ranks[rank].check_content(node, true, rank)?,
                Action::Query { node, operation } => {
                    let span = pages_of(node);
                    let local = if choices.below(3) == 0 { choices.below(span + 1) } else { span };
                    let cancelled = (faults.timeouts || faults.exceptions) && choices.one_in(8);
                    let truth = self.truth(operation);
                    truth.hit = truth.hit.min(if cancelled { 0 } else { local });
                    self.ranks[rank].queries.push_back(Query { operation, local, cancelled });
                    if self.ranks[rank].fibers[QUERY] == Fiber::Ready {
                        self.runnable |= 1 << fiber(rank, QUERY);
                    }
                }
                Action::Write { .. } | Action::Load { .. } => {
                    let may_fail = faults.failures && self.config.voted;
                    let fails = may_fail && matches!(action, Action::Write { .. }) && choices.one_in(8);
                    if let Some(copy) = self.ranks[rank].submit(rank, action, fails)? {
                        self.copies.push(copy);
                    } else {
                        self.wake_outcome(rank);
                    }
                }
            }
        }
        self.ranks[rank].tree.actions = actions;
        Ok(())
    }

    /// The reading thread of a rank tries the next part of its oldest read.
    fn read(&mut self, rank: usize, choices: &mut Choices) -> Run {
        let faults = self.config.faults;
        let entry = &mut self.ranks[rank];
        let Some(read) = entry.reads.front_mut() else {
            self.reading &= !(1 << rank);
            return Ok(());
        };
        let (node, operation) = (read.node, read.operation);
        let raises = faults.exceptions && choices.one_in(10);
        let short = faults.failures && choices.one_in(8);
        let part = read.reading.next_part();
        let (start, end) = read.reading.next_batch();
        let hit = entry.tree.nodes[node].prefetch_hit();
        if raises && !self.config.rules.hold(Rule::DoneAlways) {
            // The thread that reads has gone, and with it the reports that others wait for.
            entry.reads.pop_front();
            return Ok(());
        }
        let failed = raises || short || read.cancelled;
        let pages = match part {
            // A backend may read ahead and say so.
            Some(Part::Progress) if !failed && faults.failures && choices.one_in(8) => end - start + 1,
            Some(Part::Progress) if !failed => end - start,
            Some(Part::SidePools) if !failed => hit,
            // One page less than everything beside.
            Some(Part::SidePools) if short => hit.saturating_sub(1),
            _ => 0,
        };
        let report = read.reading.report(pages).map_err(|error| Violation::new("I14", error.to_string()))?;
        let over = read.reading.next_part().is_none();
        entry.reports.push_back(report);
        if entry.fibers[PROGRESS] == Fiber::Ready {
            self.runnable |= 1 << fiber(rank, PROGRESS);
        }
        if over {
            entry.reads.pop_front();
        }
        match part {
            Some(Part::Progress) => {
                entry.fill(node, false, start as usize, (start + pages).min(end) as usize);
                if pages < end - start {
                    let truth = self.truth(operation);
                    truth.completed = truth.completed.min(start);
                }
            }
            Some(Part::SidePools) => {
                let truth = self.truth(operation);
                truth.completed = truth.completed.min(pages);
            }
            Some(Part::Done) | None => {}
        }
        Ok(())
    }

    // --- asking ----------------------------------------------------------------------------------------

    fn ask(
        &mut self,
        rank: usize,
        thread: usize,
        ask: Ask,
        choices: &mut Choices,
    ) -> Result<Option<Answer>, Violation> {
        match ask {
            Ask::Reduce(ref reduce) => {
                if let Some(answer) = self.reduce(rank, thread, reduce)? {
                    return Ok(Some(answer));
                }
            }
            Ask::Start(ref reduce) => {
                if let Some(answer) = self.reduce(rank, thread, reduce)? {
                    self.collected[rank] = Some(answer);
                }
                return Ok(Some(Answer::Done));
            }
            Ask::Collect { .. } => {
                if let Some(answer) = self.collected[rank].take() {
                    return Ok(Some(answer));
                }
            }
            Ask::Send { values, .. } if self.net.can_send(rank) => {
                self.deliver(rank, values, choices);
                return Ok(Some(Answer::Done));
            }
            Ask::Send { .. } => {}
            Ask::Receive { .. } => {
                if let Some(from) = self.paths[rank].0
                    && let Some(values) = self.net.receive(from)
                {
                    self.sender_goes_on(from, choices);
                    return Ok(Some(Answer::Values(values)));
                }
            }
            Ask::Wait { log, .. } => {
                if self.ranks[rank].logs[log].front_ready() {
                    return Ok(Some(Answer::Done));
                }
            }
        }
        self.ranks[rank].block(thread, ask);
        self.runnable &= !(1 << fiber(rank, thread));
        Ok(None)
    }

    fn is_lost(&mut self) -> bool {
        self.sent += 1;
        let lost = self.drop == Some(self.sent);
        self.struck |= lost;
        self.lost |= lost;
        lost
    }

    fn deliver(&mut self, rank: usize, values: Vec<i64>, choices: &mut Choices) {
        if self.is_lost() {
            return;
        }
        let twice = self.config.faults.duplicate && choices.one_in(8);
        self.net.send(rank, values, twice);
        let Some(to) = self.paths[rank].1 else { return };
        if matches!(self.ranks[to].blocked(SCHEDULER), Some(Ask::Receive { .. }))
            && let Some(values) = self.net.receive(rank)
        {
            self.answer(to, SCHEDULER, Answer::Values(values));
        }
    }

    fn sender_goes_on(&mut self, from: usize, choices: &mut Choices) {
        if !self.net.can_send(from) || self.ranks[from].is_over() {
            return;
        }
        if let Some(Ask::Send { values, .. }) = self.ranks[from].blocked_mut(SCHEDULER) {
            let values = std::mem::take(values);
            self.answer(from, SCHEDULER, Answer::Done);
            self.deliver(from, values, choices);
        }
    }

    fn reduce(&mut self, rank: usize, thread: usize, reduce: &Reduce) -> Result<Option<Answer>, Violation> {
        let lost = self.is_lost();
        let Posted::Complete(arrived) = self.net.post(rank, thread, reduce, lost)? else { return Ok(None) };
        let answer = self.net.result(rank, reduce);
        let mut others = arrived & !(1 << fiber(rank, thread));
        while others != 0 {
            let bit = others.trailing_zeros() as usize;
            others &= others - 1;
            let (other, thread) = (bit / FIBERS, bit % FIBERS);
            match self.ranks[other].blocked(thread) {
                Some(Ask::Reduce(_) | Ask::Collect { .. }) => {
                    self.answer(other, thread, answer.clone());
                }
                // Begun and not yet collected.
                _ => self.collected[other] = Some(answer.clone()),
            }
        }
        Ok(Some(answer))
    }

    // --- failures --------------------------------------------------------------------------------------

    fn failed(&mut self, rank: usize, error: RankError) -> Run {
        if !self.struck {
            let invariant = match error.kind() {
                RankErrorKind::AckOrder => "I9",
                RankErrorKind::Disagreement => "I4",
                _ => "I10",
            };
            return Err(Violation::new(invariant, format!("rank {rank}: {error}")));
        }
        self.ranks[rank].error = Some(error);
        self.stop(rank);
        Ok(())
    }

    /// Nothing of a rank runs any more.
    fn stop(&mut self, rank: usize) {
        self.runnable &= !(0xf << (rank * FIBERS));
        self.reading &= !(1 << rank);
        self.copies.retain(|copy| usize::from(copy.rank) != rank);
    }

    /// Whom a blocked thread misses.
    fn missing(&self, rank: usize, ask: &Ask) -> Vec<usize> {
        match ask {
            Ask::Reduce(reduce) | Ask::Start(reduce) => self.net.missing(rank, reduce.scope, reduce.lane),
            Ask::Collect { lane, .. } => self.net.missing(rank, Scope::Stage, *lane),
            Ask::Send { .. } => self.paths[rank].1.into_iter().collect(),
            Ask::Receive { .. } => self.paths[rank].0.into_iter().collect(),
            // The log is filled by a thread of this rank, which may itself wait.
            Ask::Wait { log, .. } => {
                let thread = match *log {
                    WRITE | LOAD => OUTCOME,
                    HIT => QUERY,
                    _ => PROGRESS,
                };
                match self.ranks[rank].blocked(thread) {
                    Some(ask) => self.missing(rank, ask),
                    None => {
                        let lane = match thread {
                            OUTCOME => Lane::Outcome,
                            QUERY => Lane::Query,
                            _ => Lane::Progress,
                        };
                        self.net.missing(rank, Scope::Replica, lane)
                    }
                }
            }
        }
    }

    /// Every deadline passes: nothing can happen any more.
    fn expire(&mut self) -> Run {
        let mut watch = Watch::new();
        for (number, rank) in self.ranks.iter().enumerate() {
            if rank.crashed || rank.error.is_some() {
                watch.silence(Rank(number as u32));
                continue;
            }
            let mut missing = Vec::new();
            for thread in 0..FIBERS {
                if let Some(ask) = rank.blocked(thread) {
                    missing.extend(self.missing(number, ask).iter().map(|&rank| Rank(rank as u32)));
                }
            }
            missing.retain(|&other| other != Rank(number as u32));
            watch.beat(Rank(number as u32), Beat { progress: u64::from(rank.step), missing });
        }
        let mut woken = false;
        for rank in 0..self.ranks.len() {
            for thread in 0..FIBERS {
                let Some(ask) = self.ranks[rank].blocked(thread) else { continue };
                if self.ranks[rank].is_over() {
                    continue;
                }
                if !self.config.rules.hold(Rule::DeadlineEnds) {
                    let operation = ask.operation();
                    return Err(Violation::new("I25", format!("rank {rank} waits for ever: {operation}")));
                }
                let missing: Vec<Rank> =
                    self.missing(rank, ask).into_iter().map(|rank| Rank(rank as u32)).collect();
                let culprit = watch.culprit(&missing).unwrap_or(Rank(rank as u32));
                self.answer(rank, thread, Answer::Expired { culprit });
                woken = true;
                break;
            }
        }
        let everybody: Vec<Rank> = (0..self.ranks.len() as u32).map(Rank).collect();
        for rank in 0..self.ranks.len() {
            let waits = self.ranks[rank].fibers.iter().any(|&state| state != Fiber::Ready);
            if self.parked >> rank & 1 == 1 && !waits && !self.ranks[rank].is_over() {
                let culprit = watch.culprit(&everybody).unwrap_or(Rank(rank as u32));
                self.failed(rank, RankError::stalled("operations under way", culprit))?;
                woken = true;
            }
        }
        if !woken {
            return Err(Violation::new("I25", "a survivor neither works nor waits"));
        }
        Ok(())
    }

    fn check_deadlock(&self) -> Run {
        if self.struck {
            return Ok(());
        }
        let waits = self.ranks.iter().enumerate().flat_map(|(rank, entry)| {
            (0..FIBERS)
                .filter_map(|thread| entry.blocked(thread))
                .map(move |ask| format!("rank {rank}: {}", ask.operation()))
        });
        let waits: Vec<String> = waits.collect();
        Err(Violation::new("I10", format!("deadlock: {}", waits.join(", "))))
    }

    fn check_end(&mut self) -> Run {
        let crashed = self.ranks.iter().position(|rank| rank.crashed);
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            if rank.crashed {
                continue;
            }
            if let Some(error) = &rank.error {
                let named = error.rank();
                if crashed.is_some() && !self.lost && named != crashed.map(|rank| Rank(rank as u32)) {
                    let message = format!("rank {number} blames {named:?}, {crashed:?} died: {error}");
                    return Err(Violation::new("I25", message));
                }
                rank.tree.abandon()?;
            } else if let Some(log) = rank.logs.iter().find(|log| !log.is_empty()) {
                let message = format!("rank {number}: {} entries of {} are left", log.len(), log.name());
                return Err(Violation::new("I14", message));
            }
            rank.tree.check_conservation(true)?;
        }
        if !self.struck {
            for log in [WRITE, LOAD, HIT, REPORT] {
                let digest = |rank: &SimRank| (rank.logs[log].digest(), rank.logs[log].appended());
                if self.ranks.iter().any(|rank| digest(rank) != digest(&self.ranks[0])) {
                    let name = AckLog::name(&self.ranks[0].logs[log]);
                    return Err(Violation::new("I8", format!("ranks appended differently to {name}")));
                }
            }
        }
        Ok(())
    }
}

/// Position of the `n`-th set bit.
fn nth_bit(mut bits: u64, n: u32) -> usize {
    for _ in 0..n {
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
