//! Payload I/O behind one small trait: batches of reads and writes, each finished where it lands.

mod engines;
mod transfers;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hicache_sys::file::Piece;

pub use engines::{InlineEngine, ThreadEngine};
pub use transfers::Transfers;
pub(crate) use transfers::gather;

/// A segment as it is read and written: through the page cache, and past it where that is asked for.
pub struct SegmentFile {
    path: PathBuf,
    buffered: File,
    direct: Option<File>,
    /// Tells the file from others in this process.
    number: u64,
}

impl SegmentFile {
    /// The descriptor that goes through the page cache.
    pub fn buffered(&self) -> &File {
        &self.buffered
    }

    /// Path at opening, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// One read of a batch.
pub struct Read<'a> {
    /// From where.
    pub file: &'a SegmentFile,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where the bytes land: pieces of that many bytes in all, or `None` for a scratch buffer.
    pub into: Option<Vec<Piece<'a>>>,
    /// Through the page cache, or past it.
    pub way: Way,
}

/// Through the page cache, or past it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Through it in any mode: small things, which are written through it.
    Cache,
    /// As the mode says; through it where that is left to the store: other processes of this host read the same.
    Shared,
    /// As the mode says.
    Payload,
}

/// One write of a batch.
pub struct Write<'a> {
    /// To where.
    pub file: &'a SegmentFile,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where the bytes are: pieces of that many bytes in all, or `None` for a scratch buffer that `prepare` fills.
    pub from: Option<Vec<Piece<'a>>>,
}

/// Called when a read has ended, on the thread that ended it, with the scratch bytes (none when they landed
/// in pieces).
pub type ReadDone<'a> = &'a (dyn Fn(usize, io::Result<&[u8]>) + Sync);

/// Called before a write, on the thread that will write, with the scratch bytes to fill (none when they come
/// from pieces).
pub type WritePrepare<'a> = &'a (dyn Fn(usize, &mut [u8]) -> io::Result<()> + Sync);

/// Carries out batches of payload I/O. A call returns when every request of it has ended: nothing is in flight
/// into or out of the caller's memory afterwards.
pub trait IoEngine: Send + Sync {
    /// What it is, for `stat` and the start-up line.
    fn name(&self) -> String;

    /// Carries out all reads, in any order. Those not started by `deadline` are [`late`].
    fn read_batch(&self, reads: &[Read<'_>], deadline: Option<Instant>, done: ReadDone<'_>);

    /// How many transfers it carries out at once.
    fn threads(&self) -> usize;

    /// Carries out all writes, in any order; the first error is returned after all that were begun have ended. Those not
    /// started by `deadline` are [`late`].
    fn write_batch(
        &self,
        writes: &[Write<'_>],
        deadline: Option<Instant>,
        prepare: WritePrepare<'_>,
    ) -> io::Result<()>;
}

/// What a fault hook may see and refuse.
#[cfg(feature = "testing")]
#[derive(Debug, Clone, Copy)]
pub struct IoCall<'a> {
    /// A write, else a read.
    pub is_write: bool,
    /// Past the page cache.
    pub is_direct: bool,
    /// The file.
    pub path: &'a Path,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Sees every payload, directory and journal transfer before it happens; an error is returned instead of it.
#[cfg(feature = "testing")]
pub trait IoHook: Send + Sync {
    /// Looks at a transfer; may block.
    fn before(&self, call: IoCall<'_>) -> io::Result<()>;
}

/// What was not started before its deadline.
#[derive(Debug)]
struct Late;

impl std::fmt::Display for Late {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the deadline had passed")
    }
}

impl std::error::Error for Late {}

/// The error of what was not started before its deadline. No device gives it.
pub(crate) fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, Late)
}

/// Whether this is [`late`].
pub(crate) fn is_late(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|source| source.is::<Late>())
}

/// A panic while a transfer was carried out: a fault of this program, which says nothing about the object.
#[derive(Debug)]
pub struct Panicked(String);

impl std::fmt::Display for Panicked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a transfer panicked: {}", self.0)
    }
}

impl std::error::Error for Panicked {}

/// A panic ends the one transfer that it came from; the thread and all other transfers go on.
pub(crate) fn guarded<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    // What a panic leaves behind is scratch memory and locks that are taken again when poisoned.
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    ended.unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Err(io::Error::other(Panicked(text.unwrap_or_else(|| "no message".into()))))
    })
}
