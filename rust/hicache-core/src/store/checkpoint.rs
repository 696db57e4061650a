//! Writing this process's journal anew without what no longer matters.
//!
//! The new journal gets the next number and starts with a frame that says so; only then do the old ones go. A
//! reader that follows the old ones has taken every frame of the new one that stood there, and takes the rest; a
//! reader that comes new starts with whichever is there. Frames keep their sequence, so none counts twice. A kill
//! at any instruction leaves the old journals, or both, or the new one.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use hicache_sys::file::{self, Access};

use crate::format::ProcessId;
use crate::format::frame::{Frame, FrameKind};
use crate::namespace::Fingerprint;
use crate::store::Inner;
use crate::store::liveness::{Census, Collected, Liveness, fold_totals};
use crate::store::paths::Paths;

/// A place in a process's own journals: all before it is looked through without holding up whoever appends.
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    pub(crate) process: ProcessId,
    pub(crate) first: u32,
    pub(crate) last: u32,
    pub(crate) end: u64,
}

/// A journal written anew up to a mark, under a temporary name.
pub struct Rewritten {
    pub(crate) mark: Mark,
    pub(crate) temporary: PathBuf,
    pub(crate) file: File,
    pub(crate) end: u64,
    /// Body of the frame with the totals of the dead, to be said when the journal is adopted.
    pub(crate) inherited: Option<Vec<u8>>,
}

/// What a look at the journal came to.
pub enum Outcome {
    /// Too much of it matters: so many bytes.
    Kept(u64),
    /// There is no room for the new journal beside the old one.
    NoRoom,
    /// It is written anew, to be given to [`crate::store::journal::Journal::adopt`].
    Rewritten(Rewritten),
}

/// Writes what matters of a journal up to `mark` to a temporary file, if that is at most half of it.
///
/// `room` is asked for the bytes of the new file before it is made. `between` is told of each step.
///
/// # Errors
/// What the system says; the journal is as it was.
pub fn rewrite(
    paths: &Paths,
    mark: Mark,
    room: &mut dyn FnMut(u64) -> bool,
    between: &mut dyn FnMut(&'static str),
) -> io::Result<Outcome> {
    let mut collected = Collected::default();
    for number in mark.first..=mark.last {
        let file = file::open_read(&paths.journal(mark.process, number), Access::Buffered)?;
        let len = if number == mark.last { mark.end } else { file.metadata()?.len() };
        collected.read(&file, len)?;
    }
    let all_bytes = collected.bytes;
    between("own frames read");
    let census = Census::read(paths, &|_| false)?;
    between("census read");
    let mut frames = collected.reduce(&mut Liveness::new(paths, &census), Some(mark.process));
    let inherited = fold_totals(&mut frames, mark.process, &census);
    let first = Frame {
        process: mark.process,
        sequence: 0,
        kind: FrameKind::Checkpoint,
        records: 0,
        namespace: Fingerprint([0; 16]),
        written_ns: crate::store::now_ns(),
        body: &[],
    };
    let kept: u64 = frames.iter().map(|frame| frame.encoded_bytes()).sum();
    if kept > all_bytes / 2 {
        return Ok(Outcome::Kept(kept));
    }
    if !room(kept + crate::store::journal::AHEAD_BYTES) {
        return Ok(Outcome::NoRoom);
    }
    let mut bytes = first.encode();
    for frame in &frames {
        bytes.extend_from_slice(&frame.as_frame().encode());
    }
    let temporary = Paths::temporary(&paths.journals(), mark.process, crate::store::next_temporary());
    let file = file::create_new(&temporary)?;
    // Written out before its name appears and the old ones go: else a loss of power could take both.
    let written = file::write_all(&file, &bytes, 0).and_then(|()| file.sync_data());
    if let Err(error) = written {
        let _ = std::fs::remove_file(&temporary); // the first error is the one to report
        return Err(error);
    }
    between("temporary written");
    Ok(Outcome::Rewritten(Rewritten { mark, temporary, file, end: bytes.len() as u64, inherited }))
}

impl Inner {
    /// Writes this process's journal anew when enough of it no longer matters; whether it did. Called from one
    /// thread. `room` is asked for disk space, see [`rewrite`].
    ///
    /// # Errors
    /// What the system says; the journal is as it was.
    pub(crate) fn checkpoint_journal(&self, room: &mut dyn FnMut(u64) -> bool) -> io::Result<bool> {
        let capacity = self.budget.capacity();
        let mark = {
            let state = self.lock_journal();
            match &state.journal {
                Some(journal) if journal.is_worth_checkpointing(capacity) => journal.mark(),
                _ => return Ok(false),
            }
        };
        let outcome = rewrite(&self.paths, mark, room, &mut |_| ())?;
        let mut state = self.lock_journal();
        let Some(journal) = &mut state.journal else {
            // Closed meanwhile; whoever finishes this process would remove it otherwise.
            if let Outcome::Rewritten(rewritten) = outcome {
                let _ = std::fs::remove_file(rewritten.temporary);
            }
            return Ok(false);
        };
        match outcome {
            Outcome::Kept(bytes) => journal.keep(bytes),
            Outcome::NoRoom => {}
            Outcome::Rewritten(rewritten) => {
                journal.adopt(rewritten, &mut |_| ())?;
                return Ok(true);
            }
        }
        Ok(false)
    }
}
