//! This process's own journal: frames appended at a remembered place.

use std::fs::File;
use std::path::PathBuf;

use hicache_sys::lock::FileLock;

use crate::format::frame::{Frame, FrameKind};
use crate::format::{ProcessId, frame};
use crate::namespace::Fingerprint;
use crate::store::io::Transfers;
use crate::store::paths::Paths;
use crate::{Error, Result};

/// A journal that grew past this many bytes is followed by the next one.
const ROTATE_BYTES: u64 = 64 << 20;

/// Writer of one process's journals; the process is alive for the others while this value is.
pub struct Journal {
    process: ProcessId,
    paths: Paths,
    number: u32,
    path: PathBuf,
    file: File,
    end: u64,
    sequence: u64,
    lock: FileLock,
}

impl Journal {
    /// Takes the process's lock and starts its first journal.
    pub fn create(paths: &Paths, process: ProcessId) -> Result<Self> {
        let lock_path = paths.process_lock(process);
        // Whoever looks at the process just now holds a shared lock for a moment.
        let lock = FileLock::exclusive_within(&lock_path, std::time::Duration::from_secs(1))
            .map_err(|error| Error::io("cannot lock", &lock_path, error))?
            .ok_or_else(|| Error::config(format!("process id {process} is in use")))?;
        let path = paths.journal(process, 0);
        let file =
            hicache_sys::file::create_new(&path).map_err(|error| Error::io("cannot create", &path, error))?;
        Ok(Journal { process, paths: paths.clone(), number: 0, path, file, end: 0, sequence: 0, lock })
    }

    /// Appends a frame. After an error nothing was said: the next frame overwrites what was begun.
    pub fn append(
        &mut self,
        transfers: &Transfers,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> std::io::Result<()> {
        if body.len() > frame::MAX_BODY_BYTES as usize {
            return Err(std::io::Error::other("a journal frame past its largest size"));
        }
        if self.end > ROTATE_BYTES {
            self.rotate()?;
        }
        let written_ns = crate::store::now_ns();
        let (process, sequence) = (self.process, self.sequence);
        let bytes = Frame { process, sequence, kind, records, namespace, written_ns, body }.encode();
        transfers.write_small(&self.path, &self.file, &bytes, self.end)?;
        self.end += bytes.len() as u64;
        self.sequence += 1;
        Ok(())
    }

    fn rotate(&mut self) -> std::io::Result<()> {
        let path = self.paths.journal(self.process, self.number + 1);
        self.file = hicache_sys::file::create_new(&path)?;
        (self.path, self.number, self.end) = (path, self.number + 1, 0);
        Ok(())
    }

    /// Ends the process for the others. The lock file goes, so that nobody need look at it again.
    pub fn close(self) {
        // A lock file left behind is harmless: it is not locked.
        let _ = std::fs::remove_file(self.paths.process_lock(self.process));
        drop(self.lock);
    }
}
