//! One rank of the simulated engine: its threads, its logs, its memory.

use super::Violation;
use super::copies::{Copy, NODE_PAGES};
use super::engine_net::FIBERS;
use super::engine_node::{node_of, pages_of, tag};
use super::engine_tree::{Action, Tree};
use crate::ack::{Ack, AckLog, Feed, Outcome, Voting};
use crate::ask::{Answer, Ask};
use crate::error::RankError;
use crate::placement::Page;
use crate::pp_sync::PpSync;
use crate::prefetch::{Part, ProgressVote, Reading, Report};
use crate::rules::{Rule, Rules};
use crate::vote::{HitVote, OutcomeVote};
use std::collections::VecDeque;

/// The logs of a rank.
pub(super) const WRITE: usize = 0;
pub(super) const LOAD: usize = 1;
pub(super) const HIT: usize = 2;
pub(super) const REPORT: usize = 3;
pub(super) const LOGS: usize = 4;

/// What a thread is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fiber {
    /// It can run.
    Ready,
    /// It waits for an answer to what it asked.
    Blocked,
    /// An answer has arrived.
    Answered,
    /// It has nothing more to do.
    Finished,
}

/// A look-up that was submitted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query {
    pub operation: u64,
    /// Leading pages that the store has for this rank.
    pub local: u32,
    pub cancelled: bool,
}

/// A read under way.
#[derive(Debug, Clone)]
pub(super) struct Read {
    pub node: usize,
    pub operation: u64,
    pub reading: Reading,
    pub cancelled: bool,
}

#[derive(Debug, Clone)]
pub(super) struct SimRank {
    pub owner: u32,
    pub tree: Tree,
    pub sync: PpSync,
    pub logs: Vec<AckLog>,
    pub fibers: [Fiber; FIBERS],
    /// What blocked threads asked, and what others have been answered.
    asks: [Option<Ask>; FIBERS],
    answers: [Option<Answer>; FIBERS],
    pub step: u32,
    /// Which query, progress and outcome votes are under way.
    pub query_vote: Option<HitVote>,
    pub progress_vote: Option<ProgressVote>,
    pub outcome_vote: Option<(OutcomeVote, crate::ack::Ticket)>,
    pub queries: VecDeque<Query>,
    pub reads: VecDeque<Read>,
    pub reports: VecDeque<Report>,
    device_rows: Vec<u32>,
    host_rows: Vec<u32>,
    pub crashed: bool,
    pub error: Option<RankError>,
    pub late: u64,
    /// Digest of the state after the last step.
    pub digest: u64,
    owners: u32,
    pub rules: Rules,
}

impl SimRank {
    pub fn new(owner: u32, owners: u32, tree: Tree, sync: PpSync, voted: bool, rules: Rules) -> SimRank {
        let voting = if voted { Voting::Voted } else { Voting::Local };
        let log = |name, feed, voting| AckLog::new(name, feed, voting).with_rules(rules);
        let rows = |pages: u32| vec![0; (pages / owners) as usize];
        SimRank {
            owner,
            sync,
            logs: vec![
                log("backup", Feed::Scheduler, voting),
                log("load", Feed::Scheduler, Voting::Local),
                log("hit", Feed::Background, Voting::Local),
                log("report", Feed::Background, Voting::Local),
            ],
            fibers: [Fiber::Ready; FIBERS],
            asks: [const { None }; FIBERS],
            answers: [const { None }; FIBERS],
            step: 0,
            query_vote: None,
            progress_vote: None,
            outcome_vote: None,
            queries: VecDeque::new(),
            reads: VecDeque::new(),
            reports: VecDeque::new(),
            device_rows: rows(tree.device.total()),
            host_rows: rows(tree.host.total()),
            tree,
            crashed: false,
            error: None,
            late: 0,
            digest: 0,
            owners,
            rules,
        }
    }

    pub fn is_over(&self) -> bool {
        self.crashed || self.error.is_some() || self.fibers[0] == Fiber::Finished
    }

    /// What a thread waits for, where it does.
    pub fn blocked(&self, thread: usize) -> Option<&Ask> {
        if self.fibers[thread] == Fiber::Blocked { self.asks[thread].as_ref() } else { None }
    }

    pub fn blocked_mut(&mut self, thread: usize) -> Option<&mut Ask> {
        if self.fibers[thread] == Fiber::Blocked { self.asks[thread].as_mut() } else { None }
    }

    pub fn block(&mut self, thread: usize, ask: Ask) {
        self.fibers[thread] = Fiber::Blocked;
        self.asks[thread] = Some(ask);
    }

    pub fn answer(&mut self, thread: usize, answer: Answer) {
        self.fibers[thread] = Fiber::Answered;
        self.answers[thread] = Some(answer);
    }

    pub fn take_answer(&mut self, thread: usize) -> Option<Answer> {
        self.answers[thread].take()
    }

    /// The row of a page in the memory of its owner.
    fn row(&self, page: Page) -> usize {
        (if self.owners == 1 { page } else { page / self.owners }) as usize
    }

    fn owns(&self, page: Page) -> bool {
        self.owners == 1 || page % self.owners == self.owner
    }

    /// The own pages of a node hold what belongs there.
    pub fn check_content(&self, node: usize, device: bool, rank: usize) -> Result<(), Violation> {
        let entry = &self.tree.nodes[node];
        let (pages, rows) = if device {
            (entry.device_pages.list(), &self.device_rows)
        } else {
            (entry.host_pages.list(), &self.host_rows)
        };
        for (place, &page) in pages.iter().enumerate() {
            if !self.owns(page) {
                continue;
            }
            let (found, wanted) = (rows[self.row(page)], tag(node, place));
            if found != wanted {
                let tier = if device { "device" } else { "host" };
                let message = format!(
                    "rank {rank}: {tier} page {page} of node {node}, place {place}, holds {found}, not {wanted}"
                );
                return Err(Violation::new("I18", message));
            }
        }
        Ok(())
    }

    /// A page was computed or read from the store.
    pub fn fill(&mut self, node: usize, device: bool, from: usize, to: usize) {
        let entry = &self.tree.nodes[node];
        let pages = if device { entry.device_pages } else { entry.host_pages };
        for (place, &page) in pages.list().iter().enumerate().take(to).skip(from) {
            if self.owns(page) {
                let row = self.row(page);
                let rows = if device { &mut self.device_rows } else { &mut self.host_rows };
                rows[row] = tag(node, place);
            }
        }
    }

    /// Moves the bytes of a copy that finishes now.
    pub fn carry_out(&mut self, copy: &Copy) {
        for &(from, to) in &copy.pairs[..usize::from(copy.len)] {
            let (from, to) = (self.row(from), self.row(to));
            if copy.load {
                self.device_rows[to] = self.host_rows[from];
            } else {
                self.host_rows[to] = self.device_rows[from];
            }
        }
    }

    /// Submits a copy: an entry in the log, and the copy of the own share where there is one.
    pub fn submit(&mut self, rank: usize, action: Action, fails: bool) -> Result<Option<Copy>, Violation> {
        let (node, operation, load) = match action {
            Action::Write { node, operation } => (node, operation, false),
            Action::Load { node, operation } => (node, operation, true),
            _ => return Ok(None),
        };
        let log = if load { LOAD } else { WRITE };
        let entry = &self.tree.nodes[node];
        let (host, device) = (entry.host_pages, entry.device_pages);
        let (source, target) = if load { (host, device) } else { (device, host) };
        let share = self
            .tree
            .ownership
            .own_pairs(self.owner, source.list(), target.list())
            .map_err(|error| Violation::new("I3", error.to_string()))?;
        let mut pairs = [(0, 0); NODE_PAGES];
        let mut len = 0;
        for pair in share {
            pairs[len] = pair;
            len += 1;
        }
        if len == 0 || fails {
            let outcome = if len == 0 { Outcome::Done } else { Outcome::Failed };
            self.logs[log].append_finished(operation, outcome, 0);
            return Ok(None);
        }
        let ticket = self.logs[log].append(operation);
        Ok(Some(Copy {
            rank: rank as u8,
            log: log as u8,
            ticket,
            load,
            outcome: Outcome::Done,
            pairs,
            len: len as u8,
        }))
    }

    /// The effect of a consumed entry.
    pub fn apply(&mut self, rank: usize, log: usize, ack: Ack) -> Result<Option<Report>, Violation> {
        match log {
            WRITE => {
                if ack.outcome == Outcome::Done {
                    self.check_content(node_of(ack.operation), false, rank)?;
                }
                self.tree.written(ack.operation, ack.outcome)?;
            }
            LOAD => {
                self.check_content(node_of(ack.operation), true, rank)?;
                self.tree.loaded(ack.operation);
            }
            HIT if self.rules.hold(Rule::OrderedPublication) => self.apply_hit(ack.operation, ack.value)?,
            HIT => {}
            _ => {
                let report = unpack(ack.operation, ack.value);
                let node = node_of(report.operation);
                let done = self.tree.progress(report)?;
                if done.is_some() {
                    self.check_content(node, false, rank)?;
                    return Ok(Some(report));
                }
            }
        }
        Ok(None)
    }

    pub fn apply_hit(&mut self, operation: u64, pages: u64) -> Result<(), Violation> {
        if self.tree.hit(operation, pages as u32)? {
            let reading = Reading::new(operation, pages as u32, 1, true)
                .map_err(|error| Violation::new("I12", error.to_string()))?
                .with_rules(self.rules);
            let node = node_of(operation);
            self.reads.push_back(Read { node, operation, reading, cancelled: false });
        }
        Ok(())
    }

    /// Whether the outcome thread has something to vote on.
    pub fn next_outcome(&mut self) -> Option<Ask> {
        let (ticket, outcome) = self.logs[WRITE].next_vote()?;
        let vote = OutcomeVote::new(ticket, outcome);
        self.outcome_vote = Some((vote, ticket));
        Some(vote.ask())
    }

    /// The vote on the oldest look-up.
    pub fn next_query(&mut self) -> Option<Ask> {
        while let Some(query) = self.queries.pop_front() {
            let span = pages_of(node_of(query.operation));
            if query.cancelled && !self.rules.hold(Rule::CancelledTakesPart) {
                continue;
            }
            let vote = if query.cancelled {
                HitVote::nothing(query.operation, span, false, 1)
            } else {
                let votes = vec![crate::vote::PoolVote::AllPages(query.local)];
                HitVote::new(query.operation, span, false, votes)
            };
            let vote = vote.with_rules(self.rules);
            let ask = vote.ask();
            self.query_vote = Some(vote);
            return Some(ask);
        }
        None
    }

    /// The vote on the oldest report.
    pub fn next_report(&mut self) -> Option<Ask> {
        let vote = ProgressVote::new(self.reports.pop_front()?).with_rules(self.rules);
        self.progress_vote = Some(vote);
        Some(vote.ask())
    }
}

/// A report in the two numbers of an entry.
pub(super) fn pack(report: Report) -> u64 {
    u64::from(report.completed) | u64::from(report.index) << 16 | (report.part as u64) << 32
}

fn unpack(operation: u64, value: u64) -> Report {
    let part = match value >> 32 {
        0 => Part::Progress,
        1 => Part::SidePools,
        _ => Part::Done,
    };
    let (completed, index) = (value as u32 & 0xffff, (value >> 16) as u32 & 0xffff);
    Report { operation, index, part, completed }
}
