//! This process's own journal: frames appended at a remembered place.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use hicache_sys::file;
use hicache_sys::lock::FileLock;

use crate::format::ProcessId;
use crate::format::frame::{self, FRAME_ALIGNMENT, FRAME_HEADER_BYTES, Frame, FrameKind};
use crate::namespace::Fingerprint;
use crate::store::checkpoint::{Mark, Rewritten};
use crate::store::io::Transfers;
use crate::store::news::Teller;
use crate::store::paths::Paths;
use crate::{Error, Result};

/// A journal that grew past this many bytes is followed by the next one.
const ROTATE_BYTES: u64 = 64 << 20;

/// Disk blocks are taken ahead in steps of this many bytes, one to two steps past the end, so that removes can be
/// told when the disk is full: an add needs room for its payload first.
pub const AHEAD_BYTES: u64 = 64 << 10;

/// A journal is written anew from this size on; in a small root from a share of its capacity on.
const CHECKPOINT_BYTES: std::ops::RangeInclusive<u64> = (64 << 10)..=(1 << 20);
const CHECKPOINT_SHARE: u64 = 256;

/// A journal beyond this share of the root's capacity is large.
const LARGE_SHARE: u64 = 64;

/// Writer of one process's journals; the process is alive for the others while this value is.
pub struct Journal {
    process: ProcessId,
    paths: Paths,
    /// The first journal that is not replaced by a later one.
    oldest: u32,
    number: u32,
    path: PathBuf,
    file: File,
    end: u64,
    /// Bytes for which disk blocks were asked for, from the start.
    allocated: u64,
    /// Bytes of the journals from `oldest` on before `number`.
    older_bytes: u64,
    /// Bytes that the last look at what could go left over.
    kept_bytes: u64,
    sequence: u64,
    news: Teller,
    _claim: FileLock,
}

impl Journal {
    /// Takes the process's lock and starts its first journal.
    pub fn create(paths: &Paths, process: ProcessId) -> Result<Self> {
        let lock_path = paths.process_lock(process);
        // Whoever looks at the process just now holds the lock for a moment.
        let claim = FileLock::exclusive_within(&lock_path, std::time::Duration::from_secs(1))
            .map_err(|error| Error::io("cannot lock", &lock_path, error))?
            .ok_or_else(|| Error::config(format!("process id {process} is in use")))?;
        let path = paths.journal(process, 0);
        let file =
            hicache_sys::file::create_new(&path).map_err(|error| Error::io("cannot create", &path, error))?;
        Ok(Journal {
            process,
            paths: paths.clone(),
            oldest: 0,
            number: 0,
            path,
            file,
            end: 0,
            allocated: 0,
            older_bytes: 0,
            kept_bytes: 0,
            sequence: 0,
            news: Teller::new(paths),
            _claim: claim,
        })
    }

    /// Bytes on disk that appending records of `body_bytes` adds, to be taken from the budget before.
    pub fn growth(&self, body_bytes: u64) -> u64 {
        let frame = FRAME_HEADER_BYTES as u64 + body_bytes;
        self.ahead_of(self.end + frame.next_multiple_of(FRAME_ALIGNMENT as u64))
            .saturating_sub(self.allocated)
    }

    /// Bytes of all journals of this process.
    pub fn bytes(&self) -> u64 {
        self.older_bytes + self.end
    }

    /// Appends a frame. After an error nothing was said: the next frame overwrites what was begun.
    pub fn append(
        &mut self,
        transfers: &Transfers,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> io::Result<()> {
        self.append_at(transfers, crate::store::now_ns(), kind, namespace, records, body)
    }

    /// Appends a frame of what became true at `written_ns`, ns since 1970.
    pub fn append_at(
        &mut self,
        transfers: &Transfers,
        written_ns: u64,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> io::Result<()> {
        let (process, sequence) = (self.process, self.sequence);
        self.write(transfers, &Frame { process, sequence, kind, records, namespace, written_ns, body })?;
        self.sequence += 1;
        Ok(())
    }

    /// Appends the frame of another process, which is dead, as that process wrote it.
    pub fn append_copy(&mut self, transfers: &Transfers, frame: &Frame<'_>) -> io::Result<()> {
        debug_assert_ne!(frame.process, self.process);
        self.write(transfers, frame)
    }

    fn write(&mut self, transfers: &Transfers, frame: &Frame<'_>) -> io::Result<()> {
        if frame.body.len() > frame::MAX_BODY_BYTES as usize {
            return Err(io::Error::other("a journal frame past its largest size"));
        }
        if self.end > ROTATE_BYTES {
            self.rotate()?;
        }
        let bytes = frame.encode();
        self.allocate_ahead(self.end + bytes.len() as u64);
        if let Err(error) = transfers.write_small(&self.path, &self.file, &bytes, self.end) {
            // A reader passes over what is no whole frame; without it, it need not look at it. The blocks ahead go
            // with it, and are taken again.
            if self.file.set_len(self.end).is_ok() {
                self.allocated = self.end;
                self.allocate_ahead(self.end);
            }
            return Err(error);
        }
        self.end += bytes.len() as u64;
        self.news.tell();
        Ok(())
    }

    fn ahead_of(&self, end: u64) -> u64 {
        end.next_multiple_of(AHEAD_BYTES) + AHEAD_BYTES
    }

    fn allocate_ahead(&mut self, end: u64) {
        let ahead = self.ahead_of(end);
        if ahead <= self.allocated {
            return;
        }
        match file::preallocate(&self.file, self.allocated, ahead - self.allocated) {
            // On a full disk, or over a quota, it is tried again with the next frame.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {}
            // A file system that cannot do it is not asked twice.
            Ok(_) | Err(_) => self.allocated = ahead,
        }
    }

    fn rotate(&mut self) -> io::Result<()> {
        let path = self.paths.journal(self.process, self.number + 1);
        let file = hicache_sys::file::create_new(&path)?;
        // Gives back what was taken ahead; a file system that keeps it does so until the file goes.
        let _ = self.file.set_len(self.end);
        self.older_bytes += self.end;
        (self.path, self.file, self.number, self.end, self.allocated) = (path, file, self.number + 1, 0, 0);
        Ok(())
    }

    /// Makes sure that what was said so far outlasts the machine's power.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Whether so much was written since the journal was last looked through that half of it may go.
    pub fn is_worth_checkpointing(&self, capacity_bytes: u64) -> bool {
        let (least, most) = (*CHECKPOINT_BYTES.start(), *CHECKPOINT_BYTES.end());
        let threshold = (capacity_bytes / CHECKPOINT_SHARE).clamp(least, most);
        self.bytes() > threshold.max(2 * self.kept_bytes)
    }

    /// Whether it is worth checkpointing at once, since it takes much of what the root can hold.
    pub fn is_large(&self, capacity_bytes: u64) -> bool {
        self.bytes() > capacity_bytes / LARGE_SHARE && self.is_worth_checkpointing(capacity_bytes)
    }

    /// Bytes to be kept so that this journal, when it has grown by `growth` bytes on disk, can be written anew in a
    /// root that is full: the new one takes up to half of the old one. A small one finds room by eviction.
    pub fn reserve(&self, growth: u64, capacity_bytes: u64) -> u64 {
        let bytes = self.older_bytes + self.allocated.max(self.end) + growth;
        if bytes > capacity_bytes / LARGE_SHARE { bytes / 2 + AHEAD_BYTES } else { 0 }
    }

    /// What is said by now, for [`crate::store::checkpoint::rewrite`].
    pub fn mark(&self) -> Mark {
        Mark { process: self.process, first: self.oldest, last: self.number, end: self.end }
    }

    /// Remembers that less than half could go, so that the next look is worth it.
    pub fn keep(&mut self, kept_bytes: u64) {
        self.kept_bytes = kept_bytes;
    }

    /// Goes on in the journal written anew, behind which it puts what was said since.
    ///
    /// # Errors
    /// What the system says; the present journal goes on then.
    pub fn adopt(&mut self, rewritten: Rewritten, between: &mut dyn FnMut(&'static str)) -> io::Result<()> {
        let temporary = rewritten.temporary.clone();
        let adopted = self.try_adopt(rewritten, between);
        if adopted.is_err() {
            // Whoever finishes this process removes it otherwise.
            let _ = std::fs::remove_file(temporary);
        }
        adopted
    }

    fn try_adopt(&mut self, rewritten: Rewritten, between: &mut dyn FnMut(&'static str)) -> io::Result<()> {
        let Rewritten { mark, temporary, file, mut end, inherited } = rewritten;
        let kept_bytes = end;
        for number in mark.last..=self.number {
            let start = if number == mark.last { mark.end } else { 0 };
            let old = hicache_sys::file::open_read(
                &self.paths.journal(self.process, number),
                hicache_sys::file::Access::Buffered,
            )?;
            let stop = if number == self.number { self.end } else { file::file_len(&old)? };
            end = copy(&old, start..stop, &file, end)?;
        }
        between("frames since copied");
        if let Some(body) = inherited {
            let (process, sequence) = (self.process, self.sequence);
            let (kind, records) = (FrameKind::Inherited, (body.len() / 12) as u32);
            let (namespace, written_ns) = (Fingerprint([0; 16]), crate::store::now_ns());
            let frame = Frame { process, sequence, kind, records, namespace, written_ns, body: &body };
            let bytes = frame.encode();
            hicache_sys::file::write_all(&file, &bytes, end)?;
            self.sequence += 1;
            end += bytes.len() as u64;
        }
        between("inherited written");
        let number = self.number + 1;
        let path = self.paths.journal(self.process, number);
        std::fs::hard_link(&temporary, &path)?;
        between("linked");
        // Both names are one file: the spare one is harmless, and goes with the process at the latest.
        let _ = std::fs::remove_file(&temporary);
        between("temporary removed");
        let old = self.oldest..=self.number;
        (self.path, self.file, self.end, self.number, self.oldest) = (path, file, end, number, number);
        (self.older_bytes, self.allocated, self.kept_bytes) = (0, end, kept_bytes);
        for number in old {
            // Nobody misses a journal that is left behind: the one that follows it replaces it for every reader.
            let _ = remove(&self.paths.journal(self.process, number), between);
        }
        Ok(())
    }

    /// Ends the process for the others. The lock file goes, so that nobody need look at it again.
    pub fn close(self) {
        // What was taken ahead goes back now, or when somebody finishes this process.
        let _ = self.file.set_len(self.end);
        // A lock file left behind is harmless: it is not locked.
        let _ = std::fs::remove_file(self.paths.process_lock(self.process));
    }

    /// [`Journal::close`], and a journal that says nothing goes.
    pub fn close_or_remove(self) {
        if self.bytes() == 0 {
            let _ = std::fs::remove_file(&self.path);
        }
        self.close();
    }
}

/// Removes a journal that says nothing which others do not say: first its blocks, since readers may still hold it
/// open, then its name. Bytes that this gave back.
pub(crate) fn remove(path: &Path, between: &mut dyn FnMut(&'static str)) -> io::Result<u64> {
    let file = hicache_sys::file::open_write(path, hicache_sys::file::Access::Buffered)?;
    let freed = hicache_sys::file::allocated_bytes(&file.metadata()?);
    file.set_len(0)?;
    between("journal cut");
    std::fs::remove_file(path)?;
    between("journal unlinked");
    Ok(freed)
}

/// Copies `range` of one file to another at `to`; the place behind it.
fn copy(from: &File, range: std::ops::Range<u64>, into: &File, mut to: u64) -> io::Result<u64> {
    let mut buffer = vec![0; (range.end - range.start).min(1 << 20) as usize];
    let mut position = range.start;
    while position < range.end {
        let len = (range.end - position).min(buffer.len() as u64) as usize;
        hicache_sys::file::read_exact(from, &mut buffer[..len], position)?;
        hicache_sys::file::write_all(into, &buffer[..len], to)?;
        position += len as u64;
        to += len as u64;
    }
    Ok(to)
}
