//! pp_sync: stage 0 chooses how many acknowledgements are consumed in a step, every stage consumes as many.
//!
//! ```text
//! stage 0   ready counts -> minimum over the stage -> send down -> consume
//! stage k   receive -> send down -> consume, waiting for the chosen local transfers only
//! ```
//!
//! A stage that is ahead keeps its extra entries for later; a stage that is behind waits for what was chosen.
//! Nobody waits for the pipeline as a whole: stage 0 is never behind a later stage by more than the one
//! message that may be on its way. One reduction and one message a step, however many logs.
//!
//! In [`Mode::Lagged`] stage 0 uses the counts whose reduction began one step before, which takes the
//! reduction off the step's critical path.
//!
//! The vector of a step, equal in length on all ranks:
//!
//! ```text
//! tag -tag  step -step  digest -digest  -expired  through of log 0, 1, ...
//! ```
//!
//! A count travels as the ticket that it reaches through to: all ranks consumed the same so far, so it says the
//! same, and a count that is one step old does not choose an entry twice.
//!
//! `tag` stands for epoch and length. Each word beside its negation shows under a minimum whether all ranks
//! put the same in. `digest` is whatever the caller wants proved equal (locks, free lists). `expired` is a
//! verdict on timeouts: clocks differ, so stage 0 decides, by the maximum over its ranks.

use crate::ack::{Ack, AckLog, Feed};
use crate::ask::{Answer, Ask, Lane, Operation, Proof, Reduce, ReduceOp};
use crate::digest;
use crate::error::{RankError, RankErrorKind, Result};
use crate::rules::{Rule, Rules};
use crate::topology::{Coordinates, Rank, Scope, Topology};

/// When the counts of a step were reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// In the same step.
    Now,
    /// In the step before.
    Lagged,
}

/// What a rank brings to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepInput {
    /// Digest of the state that must be equal on all ranks before the step.
    pub digest: u64,
    /// Operations numbered below have run out of time by this rank's clock.
    pub expired: u64,
}

/// What a step leads to.
#[derive(Debug, PartialEq, Eq)]
pub enum SyncStep {
    /// Something is needed first; go on with [`PpSync::resume`].
    Ask(Ask),
    /// An entry is consumed: apply its effect, then go on with [`PpSync::next`].
    Apply {
        /// Which log.
        log: usize,
        /// The entry.
        ack: Ack,
    },
    /// The step is over.
    Done {
        /// Operations numbered below have run out of time, on all ranks alike.
        expired: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Reducing,
    Collecting,
    Starting,
    Receiving,
    Sending,
    Consuming,
    Failed,
}

const TAG: usize = 0;
const STEP: usize = 2;
const DIGEST: usize = 4;
const EXPIRED: usize = 6;
const COUNTS: usize = 7;

/// The machine of one rank's scheduler thread.
#[derive(Debug, Clone)]
pub struct PpSync {
    next_stage: Option<Rank>,
    previous_stage: Option<Rank>,
    own: Rank,
    stage_ranks: u32,
    mode: Mode,
    logs: usize,
    /// Epoch and number of logs, in one word.
    tag: i64,
    step: u64,
    state: State,
    input: StepInput,
    /// The vector of this step.
    values: Vec<i64>,
    /// In lagged mode: the vector of this rank for the next step, and what it will be compared with.
    lagged: Option<(Vec<i64>, i64)>,
    log: usize,
    rules: Rules,
}

impl PpSync {
    /// The machine of `rank` for steps over `logs` logs.
    ///
    /// # Errors
    ///
    /// `config` for a rank outside of the topology.
    pub fn new(topology: &Topology, rank: Rank, logs: usize, mode: Mode) -> Result<PpSync> {
        let at: Coordinates = topology.coordinates(rank)?;
        Ok(PpSync {
            next_stage: topology.next_stage(at),
            previous_stage: topology.previous_stage(at),
            own: rank,
            stage_ranks: topology.scope_size(Scope::Stage),
            mode,
            logs,
            tag: tag(0, logs),
            step: 0,
            state: State::Idle,
            input: StepInput::default(),
            values: Vec::with_capacity(COUNTS + logs),
            lagged: None,
            log: 0,
            rules: Rules::ALL,
        })
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> PpSync {
        self.rules = rules;
        if !rules.hold(Rule::ChainedCounts) {
            (self.next_stage, self.previous_stage) = (None, None);
        }
        self
    }

    /// Steps begun so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Begins again after a failure, on all ranks with the same new `epoch`, which messages carry. What was
    /// sent before is then recognised as old.
    pub fn restart(&mut self, epoch: u64) {
        self.tag = tag(epoch, self.logs);
        (self.step, self.state, self.lagged) = (0, State::Idle, None);
    }

    /// Begins a step. Every rank calls it for every step, also where all its logs are empty.
    ///
    /// # Errors
    ///
    /// `state` where a step is under way or the machine has failed; `config` for another number of logs.
    pub fn begin(&mut self, logs: &mut [AckLog], input: StepInput) -> Result<SyncStep> {
        if self.state != State::Idle {
            return Err(RankError::state(format!(
                "pp_sync step {}: begun while {:?}",
                self.step, self.state
            )));
        }
        if logs.len() != self.logs {
            let message = format!("pp_sync over {} logs was given {}", self.logs, logs.len());
            return Err(RankError::config(message));
        }
        self.input = input;
        self.step += 1;
        if !self.rules.hold(Rule::UnconditionalStep) && logs.iter().all(AckLog::is_empty) {
            return Ok(SyncStep::Done { expired: 0 });
        }
        if let Some(from) = self.previous_stage {
            self.state = State::Receiving;
            return Ok(self.receive(from));
        }
        self.fill(logs);
        match (self.mode, self.stage_ranks) {
            (Mode::Now, 1) => self.chosen(logs),
            (Mode::Now, _) => {
                self.state = State::Reducing;
                Ok(SyncStep::Ask(Ask::Reduce(self.reduction())))
            }
            (Mode::Lagged, 1) => self.lag(logs),
            (Mode::Lagged, _) if self.lagged.is_some() => {
                self.state = State::Collecting;
                Ok(SyncStep::Ask(Ask::Collect { lane: Lane::Scheduler, operation: self.operation("counts") }))
            }
            (Mode::Lagged, _) => {
                self.state = State::Starting;
                Ok(SyncStep::Ask(Ask::Start(self.reduction())))
            }
        }
    }

    /// Goes on with the answer to an [`Ask`].
    ///
    /// # Errors
    ///
    /// `rank_stalled` after a deadline; `rank_disagreement` and `shape` where ranks differ in what they put
    /// in; `ack_order` where a chosen entry was never submitted here. After an error the machine refuses work
    /// until [`PpSync::restart`].
    pub fn resume(&mut self, answer: Answer, logs: &mut [AckLog]) -> Result<SyncStep> {
        let step = self.advance(answer, logs);
        if step.is_err() {
            self.state = State::Failed;
        }
        step
    }

    /// Goes on after an entry has been applied.
    ///
    /// # Errors
    ///
    /// As [`PpSync::resume`].
    pub fn next(&mut self, logs: &mut [AckLog]) -> Result<SyncStep> {
        self.resume(Answer::Done, logs)
    }

    fn advance(&mut self, answer: Answer, logs: &mut [AckLog]) -> Result<SyncStep> {
        let len = COUNTS + self.logs;
        match self.state {
            State::Reducing => {
                let values = answer.values(self.operation("counts"), len)?;
                self.check_reduced(&values, self.step as i64, digest::word(self.input.digest))?;
                if self.rules.hold(Rule::StageMinimum) {
                    self.values = values;
                }
                self.chosen(logs)
            }
            State::Collecting => {
                let values = answer.values(self.operation("counts"), len)?;
                let digest = self.lagged.as_ref().map_or(0, |(_, digest)| *digest);
                self.check_reduced(&values, self.step as i64 - 1, digest)?;
                let mine = digest::word(self.input.digest);
                let own = std::mem::replace(&mut self.values, values);
                self.lagged = Some((own, mine));
                self.state = State::Starting;
                let next = self.lagged.as_ref().map(|(own, _)| own.clone()).unwrap_or_default();
                Ok(SyncStep::Ask(Ask::Start(Reduce { values: next, ..self.reduction_of(Vec::new()) })))
            }
            State::Starting => {
                answer.done(self.operation("counts"))?;
                if self.step == 1 {
                    self.lagged = Some((self.values.clone(), digest::word(self.input.digest)));
                    self.values[EXPIRED..].fill(0);
                }
                self.restamp();
                self.chosen(logs)
            }
            State::Receiving => {
                let from = self.previous_stage.unwrap_or(self.own);
                let values = answer.values(self.operation("counts from the stage before"), len)?;
                match self.check_received(&values, from)? {
                    Received::Stale => Ok(self.receive(from)),
                    Received::Current => {
                        self.values = values;
                        self.chosen(logs)
                    }
                }
            }
            State::Sending => {
                answer.done(self.operation("counts to the stage behind"))?;
                self.state = State::Consuming;
                self.consume(logs)
            }
            State::Consuming => {
                let name = logs.get(self.log).map_or("a chosen transfer", AckLog::name);
                answer.done(self.operation(name))?;
                self.consume(logs)
            }
            State::Idle | State::Failed => {
                Err(RankError::state(format!("pp_sync step {}: resumed while {:?}", self.step, self.state)))
            }
        }
    }

    /// Lagged mode in a stage of one rank: nothing to reduce, the counts wait one step all the same.
    fn lag(&mut self, logs: &mut [AckLog]) -> Result<SyncStep> {
        let fresh = (self.values.clone(), digest::word(self.input.digest));
        match self.lagged.replace(fresh) {
            Some((earlier, _)) => self.values = earlier,
            None => self.values[EXPIRED..].fill(0),
        }
        self.restamp();
        self.chosen(logs)
    }

    fn fill(&mut self, logs: &[AckLog]) {
        let (tag, step, digest) = (self.tag, self.step as i64, digest::word(self.input.digest));
        let expired = self.input.expired as i64;
        self.values.clear();
        self.values.extend([tag, -tag, step, -step, digest, -digest, -expired]);
        self.values.extend(logs.iter().map(|log| log.ready_through().0 as i64));
    }

    /// Messages speak of the step they are sent in, also where their counts are older.
    fn restamp(&mut self) {
        let (step, digest) = (self.step as i64, digest::word(self.input.digest));
        self.values[STEP..EXPIRED].copy_from_slice(&[step, -step, digest, -digest]);
    }

    fn reduction(&self) -> Reduce {
        self.reduction_of(self.values.clone())
    }

    fn reduction_of(&self, values: Vec<i64>) -> Reduce {
        let operation = self.operation("counts");
        Reduce { scope: Scope::Stage, lane: Lane::Scheduler, op: ReduceOp::Min, operation, values }
    }

    fn receive(&self, from: Rank) -> SyncStep {
        let operation = self.operation("counts from the stage before");
        SyncStep::Ask(Ask::Receive { from, operation, len: COUNTS + self.logs })
    }

    /// The counts of this step are known: pass them on, then consume.
    fn chosen(&mut self, logs: &mut [AckLog]) -> Result<SyncStep> {
        self.log = 0;
        let Some(to) = self.next_stage else {
            self.state = State::Consuming;
            return self.consume(logs);
        };
        self.state = State::Sending;
        let values = self.values.clone();
        if self.mode == Mode::Lagged && !self.rules.hold(Rule::LaggedForAll) && self.previous_stage.is_none()
        {
            for (count, log) in self.values[COUNTS..].iter_mut().zip(logs.iter()) {
                *count = log.ready_through().0 as i64;
            }
        }
        Ok(SyncStep::Ask(Ask::Send { to, operation: self.operation("counts to the stage behind"), values }))
    }

    fn consume(&mut self, logs: &mut [AckLog]) -> Result<SyncStep> {
        let chosen = &self.values[COUNTS + self.log..];
        for (log, through) in logs[self.log..].iter_mut().zip(chosen) {
            let left = through - log.front().0 as i64;
            if left <= 0 {
                self.log += 1;
                continue;
            }
            if log.is_empty() && log.feed() == Feed::Scheduler {
                return Err(RankError::new(
                    RankErrorKind::AckOrder,
                    format!(
                        "pp_sync step {}: {left} more entries of {} were chosen than were submitted here",
                        self.step,
                        log.name()
                    ),
                ));
            }
            let skip_wait = !self.rules.hold(Rule::WaitForLocal) || !self.rules.hold(Rule::LeadingRun);
            if !log.front_ready() && (log.is_empty() || !skip_wait) {
                let operation = Operation { name: log.name(), number: self.step };
                return Ok(SyncStep::Ask(Ask::Wait { log: self.log, operation }));
            }
            let ack = log.pop()?;
            return Ok(SyncStep::Apply { log: self.log, ack });
        }
        self.state = State::Idle;
        Ok(SyncStep::Done { expired: (-self.values[EXPIRED]).max(0) as u64 })
    }

    fn operation(&self, name: &'static str) -> Operation {
        Operation { name, number: self.step }
    }

    fn check_reduced(&self, values: &[i64], step: i64, digest: i64) -> Result<()> {
        let min = ReduceOp::Min;
        if !Proof::holds(&values[TAG..], min, self.tag) || !Proof::holds(&values[STEP..], min, step) {
            let message = format!("pp_sync step {}: ranks of the stage are in different steps", self.step);
            return Err(RankError::new(RankErrorKind::Shape, message));
        }
        if !Proof::holds(&values[DIGEST..], min, digest) {
            let message = format!("pp_sync step {}: ranks of the stage differ in their state", self.step);
            return Err(RankError::new(RankErrorKind::Disagreement, message));
        }
        Ok(())
    }

    fn check_received(&self, values: &[i64], from: Rank) -> Result<Received> {
        if self.rules.hold(Rule::MessageHeader) {
            let step = self.step as i64;
            if values[TAG] != self.tag || values[STEP] < step {
                // A second copy, or one from before a restart.
                return Ok(Received::Stale);
            }
            if values[STEP] > step {
                let message =
                    format!("pp_sync step {step}: {from} is in step {}, a message was lost", values[STEP]);
                return Err(RankError::new(RankErrorKind::Shape, message).blaming(from));
            }
        }
        let own = digest::word(self.input.digest);
        if values[DIGEST] != own && self.rules.hold(Rule::MessageHeader) {
            let message = format!("pp_sync step {}: state differs from that of {from}", self.step);
            return Err(RankError::new(RankErrorKind::Disagreement, message).blaming(from));
        }
        Ok(Received::Current)
    }
}

fn tag(epoch: u64, logs: usize) -> i64 {
    digest::word(digest::mix(digest::mix(0x7070, epoch), logs as u64))
}

enum Received {
    Current,
    Stale,
}
