//! The log of acknowledgements, shared between the thread that consumes it and those that finish its entries.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hicache_ranks::ack::{Feed, Voting};
use hicache_ranks::{Ack, AckLog, Finish, Outcome, RankError, Ticket};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::{intern, lock};

/// A log, and word of every change.
#[derive(Debug)]
pub(crate) struct SharedLog {
    pub log: Mutex<AckLog>,
    changed: Condvar,
}

impl SharedLog {
    /// Waits until the front entry is there and finished, for `time` at most; whether it is.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let until = Instant::now().checked_add(time);
        let mut log = lock(&self.log);
        while !log.front_ready() {
            let Some(until) = until else {
                log = self.changed.wait(log).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            log = self.changed.wait_timeout(log, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn change<T>(&self, change: impl FnOnce(&mut AckLog) -> T) -> T {
        let done = change(&mut lock(&self.log));
        self.changed.notify_all();
        done
    }
}

fn outcome(complete: bool) -> Outcome {
    if complete { Outcome::Done } else { Outcome::Failed }
}

/// The acknowledgements of one kind of operation on one rank.
#[pyclass(frozen, name = "AckLog", module = "hicache_store.ranks")]
pub(crate) struct PyAckLog {
    pub shared: Arc<SharedLog>,
}

#[pymethods]
impl PyAckLog {
    #[new]
    #[pyo3(signature = (name, *, background=false, voted=false))]
    fn new(name: &str, background: bool, voted: bool) -> Self {
        let feed = if background { Feed::Background } else { Feed::Scheduler };
        let voting = if voted { Voting::Voted } else { Voting::Local };
        let log = Mutex::new(AckLog::new(intern(name), feed, voting));
        PyAckLog { shared: Arc::new(SharedLog { log, changed: Condvar::new() }) }
    }

    /// Name for messages.
    #[getter]
    fn name(&self) -> &'static str {
        lock(&self.shared.log).name()
    }

    /// Appends a submitted operation that will finish later; its ticket.
    fn append(&self, operation: u64) -> u64 {
        self.shared.change(|log| log.append(operation)).0
    }

    /// Appends an operation that needs no time; its ticket.
    #[pyo3(signature = (operation, complete=true, value=0))]
    fn append_finished(&self, operation: u64, complete: bool, value: u64) -> u64 {
        let ticket = self.shared.change(|log| log.append_finished(operation, outcome(complete), value));
        ticket.unwrap_or(Ticket(0)).0
    }

    /// Notes that an operation has finished on this rank; False where it had before.
    #[pyo3(signature = (ticket, complete=true))]
    fn finish(&self, ticket: u64, complete: bool) -> Result<bool> {
        let noted = self.shared.change(|log| log.finish(Ticket(ticket), outcome(complete)))?;
        Ok(noted == Finish::Noted)
    }

    /// Notes the agreed outcome of an entry; False where it was known.
    fn decide(&self, ticket: u64, complete: bool) -> Result<bool> {
        let noted = self.shared.change(|log| log.decide(Ticket(ticket), outcome(complete)))?;
        Ok(noted == Finish::Noted)
    }

    /// The next entry whose outcome can be voted on: its ticket, and how it ended here.
    fn next_vote(&self) -> Option<(u64, bool)> {
        let vote = lock(&self.shared.log).next_vote();
        vote.map(|(ticket, outcome)| (ticket.0, outcome == Outcome::Done))
    }

    /// Length of the leading run of ready entries.
    #[getter]
    fn ready(&self) -> u64 {
        lock(&self.shared.log).ready()
    }

    /// Ticket of the oldest entry that has not been consumed.
    #[getter]
    fn front(&self) -> u64 {
        lock(&self.shared.log).front().0
    }

    /// Digest of the operations appended so far, in order.
    #[getter]
    fn digest(&self) -> u64 {
        lock(&self.shared.log).digest()
    }

    fn __len__(&self) -> usize {
        lock(&self.shared.log).len()
    }

    fn __repr__(&self) -> String {
        let log = lock(&self.shared.log);
        format!("<AckLog {:?}: {} entries, {} ready>", log.name(), log.len(), log.ready())
    }
}

/// A consumed entry.
#[pyclass(frozen, eq, hash, get_all, name = "Ack", module = "hicache_store.ranks")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyAck {
    /// Its place in the log.
    ticket: u64,
    /// The operation.
    operation: u64,
    /// Whether it succeeded.
    complete: bool,
    /// A number that came with it.
    value: u64,
}

impl From<Ack> for PyAck {
    fn from(ack: Ack) -> Self {
        let Ack { ticket, operation, outcome, value } = ack;
        PyAck { ticket: ticket.0, operation, complete: outcome == Outcome::Done, value }
    }
}

#[pymethods]
impl PyAck {
    fn __repr__(&self) -> String {
        let PyAck { ticket, operation, complete, value } = self;
        let complete = if *complete { "True" } else { "False" };
        format!("Ack(ticket={ticket}, operation={operation}, complete={complete}, value={value})")
    }
}

/// Refuses logs that are named twice: they would be consumed twice.
pub(crate) fn distinct(logs: &[Arc<SharedLog>]) -> Result<()> {
    for (place, log) in logs.iter().enumerate() {
        if logs[..place].iter().any(|other| Arc::ptr_eq(other, log)) {
            return Err(RankError::config(format!("log {place} is named twice")).into());
        }
    }
    Ok(())
}
