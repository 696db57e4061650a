//! Repair of a root, beside whoever works in it.

use std::io;
use std::path::Path;

use crate::format::ProcessId;
use crate::format::frame::{Frame, FrameKind};
use crate::namespace::Fingerprint;
pub use crate::store::finish::FinishReport;
use crate::store::finish::{Finisher, Limits, Voice};
use crate::store::io::Transfers;
use crate::store::journal::Journal;
use crate::store::paths::Paths;
use crate::store::root;
use crate::{Error, Result};

/// Brings to an end what dead processes left in the root at `path`: tells what only directories tell, seals
/// segments, rewrites damaged journals, removes leftovers. Nothing that could be restored before is lost, live
/// processes are not disturbed, and a second repair finds nothing to do.
///
/// It writes a journal of its own where there is something to say.
///
/// # Errors
/// `Config` when there is no store at `path`, `UnsupportedVersion` for a newer format, `Io` when the system says
/// no.
pub fn repair(path: &Path) -> Result<FinishReport> {
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
    done.map_err(|error| Error::io("cannot repair", path, error))
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
