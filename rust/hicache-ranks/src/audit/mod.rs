//! RankAudit, the rank consensus checker: finds the first decision in which ranks differ.
//!
//! A rank records what it decides: calls with their arguments, what they returned, and digests of the state
//! that decisions come from (locks, LRU order, free lists, chain bases). Locks differ long before an answer
//! does, so the record of a lock release names the cause where the later hang or shape error names a victim.
//!
//! Records are compared while the engine runs ([`live`]) or afterwards, from one log of each rank ([`log`],
//! [`diff`]). Each thread has a stream of its own: the order of records within a stream is the same on all
//! ranks, the order between threads is not.

pub mod diff;
pub mod live;
pub mod log;
pub mod record;
pub mod state;
mod wire;

pub use diff::{Difference, first_difference};
pub use live::{AuditStep, RankAudit, Verdict};
pub use log::{AuditLog, LogHeader, LogWriter};
pub use record::{Kind, Record, Value};
pub use state::StateDigest;
