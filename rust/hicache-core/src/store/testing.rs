//! Parts of the store that tests drive one by one. Not in the wheel or the tool.

pub use crate::store::checkpoint::{Mark, Outcome, Rewritten, rewrite};
pub use crate::store::finish::{FinishReport, Finisher, Limits, Voice};
pub use crate::store::journal::{AHEAD_BYTES, Journal};
pub use crate::store::paths::Paths;
pub use crate::store::tail::{Tail, TailReport};

use std::io;

use crate::store::Store;
use crate::store::io::Transfers;

/// Transfers without faults.
pub fn transfers() -> Transfers {
    Transfers::plain()
}

/// Finishes dead processes in the name of an open store; `between` is told of each step.
///
/// # Errors
/// Those of [`Finisher::finish_dead`].
pub fn finish_dead(
    store: &Store,
    limits: Limits,
    between: &mut dyn FnMut(&'static str),
) -> io::Result<FinishReport> {
    store.inner.finish_dead(&mut Finisher::new(store.inner.paths.clone()), limits, between)
}

/// Writes the journal of an open store anew if it is worth it; whether it was.
///
/// # Errors
/// What the system says.
pub fn checkpoint(store: &Store) -> io::Result<bool> {
    store.inner.checkpoint_journal(&mut |_| true)
}

/// Writes the journal of an open store anew within the root's capacity, as its housekeeping does.
///
/// # Errors
/// What the system says.
pub fn keep_journal_small(store: &Store) -> io::Result<()> {
    store.inner.keep_journal_small()
}
