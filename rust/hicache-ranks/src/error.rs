//! One error type for the crate: a kind, a sentence, and named facts.
//!
//! What a rank may meet in normal work (a miss, a full pool, a duplicate completion) is a value, never an
//! error. An error means that this rank must not go on as it is: it was asked for something impossible, or
//! it can no longer know that it acts like the others.

use crate::topology::Rank;
use std::fmt;

/// Result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, RankError>;

/// What went wrong, in the words of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RankErrorKind {
    /// A bad size, an unclear layout, a rank outside of its topology.
    Config,
    /// A page, layer or copy that does not belong to the rank that asked.
    Ownership,
    /// An acknowledgement that is unknown, repeated or out of its order.
    AckOrder,
    /// Ranks differ in something that must be equal on all of them.
    Disagreement,
    /// A deadline passed while waiting for a rank; the fact `rank` names it.
    Stalled,
    /// A message or vector of the wrong operation, step or length.
    Shape,
    /// A call that the state of the machine does not allow.
    State,
    /// Bytes that must be whole are not.
    Corrupt,
    /// Written by a newer format than this build reads.
    UnsupportedVersion,
}

impl RankErrorKind {
    /// Every kind.
    pub const ALL: [RankErrorKind; 9] = [
        RankErrorKind::Config,
        RankErrorKind::Ownership,
        RankErrorKind::AckOrder,
        RankErrorKind::Disagreement,
        RankErrorKind::Stalled,
        RankErrorKind::Shape,
        RankErrorKind::State,
        RankErrorKind::Corrupt,
        RankErrorKind::UnsupportedVersion,
    ];

    /// Name used by the tools and by Python.
    pub fn name(self) -> &'static str {
        match self {
            RankErrorKind::Config => "config",
            RankErrorKind::Ownership => "ownership",
            RankErrorKind::AckOrder => "ack_order",
            RankErrorKind::Disagreement => "rank_disagreement",
            RankErrorKind::Stalled => "rank_stalled",
            RankErrorKind::Shape => "shape",
            RankErrorKind::State => "state",
            RankErrorKind::Corrupt => "corrupt",
            RankErrorKind::UnsupportedVersion => "unsupported_version",
        }
    }
}

/// An error: what kind, one sentence that says what was expected and what was found, and named facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankError {
    kind: RankErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    rank: Option<Rank>,
}

impl RankError {
    /// An error of `kind`; `message` is lower case, without a full stop.
    pub fn new(kind: RankErrorKind, message: impl Into<String>) -> RankError {
        RankError { kind, message: message.into(), context: Vec::new(), rank: None }
    }

    /// A bad size or an unclear layout.
    pub fn config(message: impl Into<String>) -> RankError {
        RankError::new(RankErrorKind::Config, message)
    }

    /// A call that the state of the machine does not allow.
    pub fn state(message: impl Into<String>) -> RankError {
        RankError::new(RankErrorKind::State, message)
    }

    /// A deadline that passed: what was waited for, and the rank that did not come.
    pub fn stalled(operation: impl fmt::Display, rank: Rank) -> RankError {
        let mut error =
            RankError::new(RankErrorKind::Stalled, format!("{operation}: no word from {rank} in time"))
                .with("operation", &operation);
        error.rank = Some(rank);
        error
    }

    /// Adds a named fact.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> RankError {
        self.context.push((name, value.to_string()));
        self
    }

    /// Says which rank is to blame.
    #[must_use]
    pub fn blaming(mut self, rank: Rank) -> RankError {
        self.rank = Some(rank);
        self
    }

    /// What kind of error this is.
    pub fn kind(&self) -> RankErrorKind {
        self.kind
    }

    /// The sentence, without the kind.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Named facts, for programs.
    pub fn context(&self) -> &[(&'static str, String)] {
        &self.context
    }

    /// The rank that is missing or differs, where one is known.
    pub fn rank(&self) -> Option<Rank> {
        self.rank
    }
}

impl fmt::Display for RankError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for RankError {}
