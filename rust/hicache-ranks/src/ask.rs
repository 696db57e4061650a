//! What a machine asks of the world: a reduction, a message, a local event.
//!
//! A machine returns an [`Ask`] and stops. Whoever drives it (a transport over process groups, a simulator)
//! carries it out and resumes the machine with an [`Answer`]. Count, kind and length of what a machine asks
//! follow from agreed state alone, so ranks in one group always ask for the same.

use crate::error::{RankError, RankErrorKind, Result};
use crate::topology::{Rank, Scope};
use std::fmt;

/// How the vectors of a reduction are combined, element by element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReduceOp {
    /// The minimum. Right for what is true of every shorter prefix too.
    Min,
    /// The bitwise and: the intersection of sets.
    And,
}

/// Which thread asks. Each lane needs a process group of its own, so that the collectives of two threads
/// never meet in one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The scheduler thread: pp_sync.
    Scheduler,
    /// The thread that looks up what the store holds.
    Query,
    /// The thread that agrees on the progress of storage reads.
    Progress,
    /// The thread that agrees on the outcome of copies that can fail on one rank.
    Outcome,
    /// The consensus checker.
    Audit,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Lane; 5] = [Lane::Scheduler, Lane::Query, Lane::Progress, Lane::Outcome, Lane::Audit];
}

/// What is being done, for errors and for the check that all ranks do the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Operation {
    /// A word for people.
    pub name: &'static str,
    /// Step, request or round.
    pub number: u64,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.number)
    }
}

/// A reduction over a group of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduce {
    /// Which ranks.
    pub scope: Scope,
    /// Which thread.
    pub lane: Lane,
    /// How elements are combined.
    pub op: ReduceOp,
    /// What for.
    pub operation: Operation,
    /// This rank's vector; the answer has the same length.
    pub values: Vec<i64>,
}

/// What a machine needs before it can go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    /// Reduce and answer [`Answer::Values`].
    Reduce(Reduce),
    /// Begin a reduction and answer [`Answer::Done`] at once; [`Ask::Collect`] asks for the result.
    Start(Reduce),
    /// The result of the reduction that was begun on this lane: [`Answer::Values`].
    Collect {
        /// Which thread.
        lane: Lane,
        /// What for.
        operation: Operation,
    },
    /// Hand a message over and answer [`Answer::Done`]. At most one message to a rank is on its way: the answer
    /// waits for the message before to be received, and for nothing else.
    Send {
        /// To whom.
        to: Rank,
        /// What for.
        operation: Operation,
        /// The message.
        values: Vec<i64>,
    },
    /// The next message from a rank: [`Answer::Values`].
    Receive {
        /// From whom.
        from: Rank,
        /// What for.
        operation: Operation,
        /// Its length.
        len: usize,
    },
    /// The oldest entry of a log to be there and finished on this rank: [`Answer::Done`].
    Wait {
        /// Which log.
        log: usize,
        /// What for.
        operation: Operation,
    },
}

impl Ask {
    /// What this is for.
    pub fn operation(&self) -> Operation {
        match self {
            Ask::Reduce(reduce) | Ask::Start(reduce) => reduce.operation,
            Ask::Collect { operation, .. }
            | Ask::Send { operation, .. }
            | Ask::Receive { operation, .. }
            | Ask::Wait { operation, .. } => *operation,
        }
    }
}

/// What a machine is resumed with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It has been done.
    Done,
    /// The result of a reduction, or a message.
    Values(Vec<i64>),
    /// The deadline passed. `culprit` is the rank that everyone waits for in the end, see
    /// [`watch`](crate::watch).
    Expired {
        /// Which rank did not come.
        culprit: Rank,
    },
}

impl Answer {
    /// The values, or the error that the answer stands for.
    pub(crate) fn values(self, operation: Operation, len: usize) -> Result<Vec<i64>> {
        match self {
            Answer::Values(values) if values.len() == len => Ok(values),
            Answer::Values(values) => {
                let found = values.len();
                let message = format!("{operation}: a vector of {found} words, expected {len}");
                Err(RankError::new(RankErrorKind::Shape, message))
            }
            Answer::Done => Err(RankError::state(format!("{operation}: resumed without values"))),
            Answer::Expired { culprit } => Err(RankError::stalled(operation, culprit)),
        }
    }

    /// Nothing, or the error that the answer stands for.
    pub(crate) fn done(self, operation: Operation) -> Result<()> {
        match self {
            Answer::Expired { culprit } => Err(RankError::stalled(operation, culprit)),
            Answer::Done | Answer::Values(_) => Ok(()),
        }
    }
}

/// A word and its opposite in one reduction prove that all ranks put the same in.
///
/// Under a minimum the opposite is the negation, under a bitwise and the complement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proof;

impl Proof {
    pub fn push(values: &mut Vec<i64>, op: ReduceOp, word: i64) {
        values.push(word);
        values.push(match op {
            ReduceOp::Min => -word,
            ReduceOp::And => !word,
        });
    }

    /// True where `pair`, reduced, shows that all ranks put `word` in.
    pub fn holds(pair: &[i64], op: ReduceOp, word: i64) -> bool {
        pair[0] == word
            && pair[1]
                == match op {
                    ReduceOp::Min => -word,
                    ReduceOp::And => !word,
                }
    }
}
