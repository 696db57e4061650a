//! Agreement of ranks as pure state machines: ownership, acknowledgements, minima, pp_sync, promises, audit.
//!
//! What the crate owns: the decisions. What it promises: equal inputs give equal answers on every rank, in
//! every process, whatever the order in which events arrive between two steps. What it must not know: files,
//! threads, clocks, sockets, torch. A machine that needs other ranks returns an [`Ask`] and is resumed with
//! an [`Answer`]; deadlines arrive as [`Answer::Expired`].
//!
//! `docs/ranks.md` has the protocols with drawings, who may block, and why it cannot deadlock. In reading
//! order: [`topology`], [`placement`], [`classed_pool`], [`chain`], [`gather`], [`writer`]; [`ask`], [`ack`],
//! [`pp_sync`], [`vote`], [`prefetch`], [`watch`]; [`layer_gate`], [`scratch`], [`restore`], [`ledger`];
//! [`audit`].
#![forbid(unsafe_code)]

pub mod ack;
pub mod ask;
pub mod audit;
pub mod chain;
pub mod classed_pool;
pub mod digest;
pub mod error;
pub mod gather;
pub mod layer_gate;
pub mod ledger;
pub mod placement;
pub mod pp_sync;
pub mod prefetch;
pub mod restore;
pub mod rules;
pub mod scratch;
#[cfg(any(test, feature = "simulator"))]
pub mod sim;
pub mod topology;
pub mod vote;
pub mod watch;
pub mod writer;

pub use ack::{Ack, AckLog, Finish, Outcome, Ticket};
pub use ask::{Answer, Ask, Lane, Operation, Reduce, ReduceOp};
pub use error::{RankError, RankErrorKind, Result};
pub use rules::Rules;
pub use topology::{Coordinates, CpKind, Rank, Scope, Topology};

#[cfg(test)]
mod tests;
