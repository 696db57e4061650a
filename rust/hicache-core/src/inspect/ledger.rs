//! The budget's ledger as it lies there: read without its lock, beside those who write it.

use std::time::Duration;

use crate::format::ledger::{LEDGER_BYTES, Ledger};
use crate::store::ledger_file::peek;
use crate::store::paths::Paths;
use crate::store::root::read_file;

/// A ledger that is being written looks damaged for a moment; so it is looked at this often.
const LOOKS: u32 = 3;

/// Between two looks: a write is one call of 16 KiB at most.
const BETWEEN: Duration = Duration::from_millis(2);

/// What was found in the place of the ledger.
pub(super) enum Found {
    /// A whole one.
    Whole(Ledger),
    /// None, or one that nobody wrote to yet.
    Nothing,
    /// One that says nothing any more.
    Damaged,
}

/// Reads the ledger of a root.
pub(super) fn read(paths: &Paths) -> Found {
    for look in 0..LOOKS {
        if look > 0 {
            std::thread::sleep(BETWEEN);
        }
        if let Some(ledger) = peek(paths) {
            return Found::Whole(ledger);
        }
        let is_new = |bytes: Vec<u8>| bytes.iter().all(|byte| *byte == 0);
        if read_file(&paths.budget(), LEDGER_BYTES).map_or(true, is_new) {
            return Found::Nothing;
        }
    }
    Found::Damaged
}
