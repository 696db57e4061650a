//! The ledger's file: read and written in place, under the lock on it.

use std::io;
use std::time::Duration;

use hicache_sys::file;
use hicache_sys::lock::FileLock;

use crate::format::ledger::{LEDGER_BYTES, Ledger};
use crate::store::paths::Paths;
use crate::store::root::read_file;

/// The ledger, locked until the value is dropped.
pub struct LockedLedger(FileLock);

impl LockedLedger {
    /// Locks the ledger, made now if it is missing. `None` when others held it for all of `patience`.
    pub fn lock(paths: &Paths, patience: Duration) -> io::Result<Option<LockedLedger>> {
        let Some(lock) = FileLock::exclusive_within(&paths.budget(), patience)? else { return Ok(None) };
        if file::file_len(lock.file())? < LEDGER_BYTES {
            // With all its blocks, so that a disk that is full later on cannot stop the ledger.
            file::write_all(lock.file(), &vec![0; LEDGER_BYTES as usize], 0)?;
        }
        Ok(Some(LockedLedger(lock)))
    }

    /// What it says; `None` when that is damaged, or was never written.
    pub fn read(&self) -> io::Result<Option<Ledger>> {
        let mut bytes = vec![0; LEDGER_BYTES as usize];
        file::read_exact(self.0.file(), &mut bytes, 0)?;
        Ok(Ledger::decode(&bytes).ok())
    }

    /// Replaces what it says. A kill may leave the half of a write of more than a page: that is damage, and seen.
    pub fn write(&self, ledger: &Ledger) -> io::Result<()> {
        file::write_all(self.0.file(), &ledger.encode(), 0)
    }
}

/// What the ledger says, without its lock; `None` when it is missing, damaged, or written just now.
pub fn peek(paths: &Paths) -> Option<Ledger> {
    read_file(&paths.budget(), LEDGER_BYTES).ok().and_then(|bytes| Ledger::decode(&bytes).ok())
}
