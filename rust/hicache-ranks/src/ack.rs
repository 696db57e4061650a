//! The log of acknowledgements: ordered, gap-free, consumed from the front.
//!
//! An entry is appended for every operation, in the order in which the scheduler submits them, also where this
//! rank's share is empty and also where the operation failed. So the logs of all ranks hold the same entries
//! in the same order, and a count says which entries are meant. Entries finish in any order; only the leading
//! run of finished ones is ready.

use crate::digest;
use crate::error::{RankError, RankErrorKind, Result};
use crate::rules::{Rule, Rules};
use std::collections::VecDeque;

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// It failed; its effect must not be seen.
    Failed,
    /// It is complete.
    Done,
}

/// Place of an entry in its log: 0, 1, 2, ... without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Who appends, which decides what a missing entry means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Feed {
    /// The scheduler, before the step in which the entry can be chosen: an entry that is missing is an error.
    Scheduler,
    /// A background thread, after an agreement: an entry that is chosen may still be on its way.
    Background,
}

/// Whether ranks can differ in an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Voting {
    /// They cannot: an entry is ready when it has finished here.
    Local,
    /// They can: an entry is ready when its outcome has been agreed, see [`OutcomeVote`](crate::vote::OutcomeVote).
    Voted,
}

/// A consumed entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Its place in the log.
    pub ticket: Ticket,
    /// The operation, as named by whoever appended it.
    pub operation: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// A number that came with it: an agreed length, for instance.
    pub value: u64,
}

/// What became of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It was noted.
    Noted,
    /// The entry had finished before; nothing changed.
    Duplicate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Pending,
    /// Finished here; the outcome is still to be agreed.
    Local(Outcome),
    Ready(Outcome),
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    operation: u64,
    value: u64,
    state: State,
}

/// The acknowledgements of one kind of operation on one rank.
#[derive(Debug, Clone)]
pub struct AckLog {
    name: &'static str,
    feed: Feed,
    voting: Voting,
    /// Ticket of the front entry.
    front: u64,
    entries: VecDeque<Entry>,
    /// Length of the leading run of ready entries.
    ready: u64,
    /// Tickets below have been offered for a vote.
    offered: u64,
    digest: u64,
    rules: Rules,
}

impl AckLog {
    /// An empty log.
    pub fn new(name: &'static str, feed: Feed, voting: Voting) -> AckLog {
        AckLog {
            name,
            feed,
            voting,
            front: 0,
            entries: VecDeque::new(),
            ready: 0,
            offered: 0,
            digest: 0,
            rules: Rules::ALL,
        }
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> AckLog {
        self.rules = rules;
        self
    }

    /// Name for messages.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Who appends.
    pub fn feed(&self) -> Feed {
        self.feed
    }

    /// Appends a submitted operation that will finish later.
    pub fn append(&mut self, operation: u64) -> Ticket {
        self.push(operation, 0, State::Pending)
    }

    /// Appends an operation that needs no time: an empty share, a failure at submission, an agreed result.
    /// `None` only where a test took the rule away that demands the entry.
    pub fn append_finished(&mut self, operation: u64, outcome: Outcome, value: u64) -> Option<Ticket> {
        let rule = match outcome {
            Outcome::Failed => Rule::FailureAcks,
            Outcome::Done => Rule::EmptyShareAcks,
        };
        if self.feed == Feed::Scheduler && !self.rules.hold(rule) {
            return None;
        }
        let state = match self.voting {
            Voting::Voted if self.rules.hold(Rule::OutcomeVote) => State::Local(outcome),
            _ => State::Ready(outcome),
        };
        let ticket = self.push(operation, value, state);
        self.advance();
        Some(ticket)
    }

    fn push(&mut self, operation: u64, value: u64, state: State) -> Ticket {
        let ticket = self.front + self.entries.len() as u64;
        self.entries.push_back(Entry { operation, value, state });
        self.digest = digest::mix(self.digest, operation);
        Ticket(ticket)
    }

    /// Notes that an operation has finished on this rank.
    ///
    /// A second completion, also one that arrives after the entry was consumed, changes nothing.
    ///
    /// # Errors
    ///
    /// `ack_order` for a ticket that was never given out.
    pub fn finish(&mut self, ticket: Ticket, outcome: Outcome) -> Result<Finish> {
        let vote = self.voting == Voting::Voted && self.rules.hold(Rule::OutcomeVote);
        let state = if vote { State::Local(outcome) } else { State::Ready(outcome) };
        self.turn(ticket, State::Pending, state)
    }

    /// Notes the agreed outcome of an entry.
    ///
    /// # Errors
    ///
    /// `ack_order` for a ticket that was never given out, `state` where the entry has not finished here.
    pub fn decide(&mut self, ticket: Ticket, outcome: Outcome) -> Result<Finish> {
        if let Some(Entry { state: State::Pending, .. }) = self.entry(ticket)? {
            let message = format!("{}: entry {} is decided before it finished here", self.name, ticket.0);
            return Err(RankError::state(message));
        }
        self.turn(ticket, State::Local(outcome), State::Ready(outcome))
    }

    /// The next entry in order whose outcome this rank can vote on; each is offered once.
    pub fn next_vote(&mut self) -> Option<(Ticket, Outcome)> {
        let ticket = Ticket(self.offered.max(self.front));
        match self.entry(ticket).ok().flatten()?.state {
            State::Local(outcome) => {
                self.offered = ticket.0 + 1;
                Some((ticket, outcome))
            }
            State::Pending | State::Ready(_) => None,
        }
    }

    fn entry(&self, ticket: Ticket) -> Result<Option<&Entry>> {
        let end = self.front + self.entries.len() as u64;
        if ticket.0 >= end {
            return Err(RankError::new(
                RankErrorKind::AckOrder,
                format!("{}: entry {} of {end} was never appended", self.name, ticket.0),
            ));
        }
        Ok(ticket.0.checked_sub(self.front).and_then(|place| self.entries.get(place as usize)))
    }

    fn turn(&mut self, ticket: Ticket, from: State, to: State) -> Result<Finish> {
        self.entry(ticket)?;
        let mut place = ticket.0.checked_sub(self.front).map(|place| place as usize);
        let turns = |state: State| match from {
            State::Pending => state == State::Pending,
            // The agreed outcome may be worse than the local one.
            State::Local(_) | State::Ready(_) => matches!(state, State::Local(_)),
        };
        if !self.rules.hold(Rule::DuplicateIgnored) && !place.is_some_and(|at| turns(self.entries[at].state))
        {
            place = self.entries.iter().position(|entry| turns(entry.state));
        }
        let Some(place) = place else { return Ok(Finish::Duplicate) };
        let entry = &mut self.entries[place];
        if !turns(entry.state) {
            return Ok(Finish::Duplicate);
        }
        entry.state = to;
        self.advance();
        Ok(Finish::Noted)
    }

    fn advance(&mut self) {
        if !self.rules.hold(Rule::LeadingRun) {
            let finished = self.entries.iter().filter(|entry| matches!(entry.state, State::Ready(_)));
            self.ready = finished.count() as u64;
            return;
        }
        while let Some(Entry { state: State::Ready(_), .. }) = self.entries.get(self.ready as usize) {
            self.ready += 1;
        }
    }

    /// Entries that have been appended and not consumed.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True where everything has been consumed.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Length of the leading run of ready entries: what stage 0 may choose.
    pub fn ready(&self) -> u64 {
        self.ready
    }

    /// Ticket of the oldest entry that has not been consumed.
    pub fn front(&self) -> Ticket {
        Ticket(self.front)
    }

    /// The ticket behind the leading run of ready entries. As a ticket instead of a count it still means the
    /// same entries when others were consumed meanwhile.
    pub fn ready_through(&self) -> Ticket {
        Ticket(self.front + self.ready)
    }

    /// True where the front entry is there and ready on this rank.
    pub fn front_ready(&self) -> bool {
        matches!(self.entries.front(), Some(Entry { state: State::Ready(_), .. }))
    }

    /// Consumes the front entry.
    ///
    /// # Errors
    ///
    /// `ack_order` where there is none, or where it has not finished on this rank.
    pub fn pop(&mut self) -> Result<Ack> {
        let Some(&entry) = self.entries.front() else {
            return Err(self.out_of_order("is empty"));
        };
        let outcome = match entry.state {
            State::Ready(outcome) => outcome,
            _ if !self.rules.hold(Rule::WaitForLocal) || !self.rules.hold(Rule::LeadingRun) => Outcome::Done,
            _ => return Err(self.out_of_order("has not finished its front entry")),
        };
        self.entries.pop_front();
        let ticket = Ticket(self.front);
        self.front += 1;
        self.ready = self.ready.saturating_sub(1);
        self.advance();
        Ok(Ack { ticket, operation: entry.operation, outcome, value: entry.value })
    }

    fn out_of_order(&self, what: &str) -> RankError {
        let message = format!("{}: entry {} is consumed, but the log {what}", self.name, self.front);
        RankError::new(RankErrorKind::AckOrder, message)
    }

    /// Tickets given out so far.
    pub fn appended(&self) -> u64 {
        self.front + self.entries.len() as u64
    }

    /// Digest of the operations appended so far, in order.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}
