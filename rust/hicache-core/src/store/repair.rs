//! Repair of a root, beside whoever works in it.

use std::io;
use std::path::Path;

use crate::format::ProcessId;
use crate::format::frame::{Frame, FrameKind};
use crate::namespace::Fingerprint;
use crate::store::finish::{Finisher, Limits, Voice};
use crate::store::io::Transfers;
use crate::store::journal::Journal;
use crate::store::paths::Paths;
use crate::store::root;
use crate::{Error, Result};

/// What a repair did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct RepairReport {
    /// Processes that were dead and are finished now.
    pub processes_finished: u64,
    /// Units that no journal told of, read from their directories and told again.
    pub units_told: u64,
    /// Segments that got their seal.
    pub segments_sealed: u64,
    /// Segments that held nothing any more, removed.
    pub segments_removed: u64,
    /// Journals that were damaged or too many, whose whole frames stand in another one now.
    pub journals_merged: u64,
    /// Temporary files removed.
    pub temporaries_removed: u64,
    /// Bytes on disk given back.
    pub freed_bytes: u64,
    /// Whether something could not be done: it is in use, or the system said no. Repair may be called again.
    pub is_unfinished: bool,
}

/// Brings to an end what dead processes left in the root at `path`: tells what only directories tell, seals
/// segments, rewrites damaged journals, removes leftovers. Nothing that could be restored before is lost, live
/// processes are not disturbed, and a second repair finds nothing to do.
///
/// It writes a journal of its own where there is something to say.
///
/// # Errors
/// `Config` when there is no store at `path`, `UnsupportedVersion` for a newer format, `Io` when the system says
/// no.
pub fn repair(path: &Path) -> Result<RepairReport> {
    let paths = Paths::new(path);
    if ![paths.description(), paths.namespaces(), paths.journals()].iter().any(|path| path.exists()) {
        return Err(Error::config(format!(
            "expected a store at {}, found neither root.json nor ns nor journal in it",
            path.display()
        )));
    }
    root::read_description(&paths)?;
    match std::fs::create_dir(paths.journals()) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io("cannot create", &paths.journals(), error));
        }
        _ => {}
    }
    let process = ProcessId::random()?;
    let mut voice =
        RepairVoice { journal: Journal::create(&paths, process)?, process, transfers: Transfers::plain() };
    let done = Finisher::new(paths.clone()).finish_dead(&mut voice, Limits::none(), &mut |_| ());
    voice.journal.close_or_remove();
    let done = done.map_err(|error| Error::io("cannot repair", path, error))?;
    Ok(RepairReport {
        processes_finished: done.processes,
        units_told: done.units_told,
        segments_sealed: done.segments_sealed,
        segments_removed: done.segments_removed,
        journals_merged: done.journals_merged,
        temporaries_removed: done.temporaries_removed,
        freed_bytes: done.freed_bytes,
        is_unfinished: done.unfinished,
    })
}

/// The repair speaks as a process of its own.
struct RepairVoice {
    journal: Journal,
    process: ProcessId,
    transfers: Transfers,
}

impl Voice for RepairVoice {
    fn process(&self) -> ProcessId {
        self.process
    }

    fn say(&mut self, kind: FrameKind, namespace: Fingerprint, records: u32, body: &[u8]) -> io::Result<()> {
        self.journal.append(&self.transfers, kind, namespace, records, body)
    }

    fn copy(&mut self, frame: &Frame<'_>) -> io::Result<()> {
        self.journal.append_copy(&self.transfers, frame)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.journal.sync()
    }
}
