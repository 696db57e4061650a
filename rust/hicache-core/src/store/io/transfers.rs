//! Single transfers: through the page cache, or past it where that is asked for and possible.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use hicache_sys::file::{self, Access, Piece};
use hicache_sys::{AlignedBuffer, DIRECT_ALIGNMENT};
use twox_hash::XxHash3_64;

#[cfg(feature = "testing")]
use super::{IoCall, IoHook};
use super::{Read, ReadDone, SegmentFile, Way, Write, WritePrepare, guarded, late};
use crate::store::clock::Clock;
use crate::store::counters::{Counter, Counters};
use crate::store::device_health::DeviceHealth;
use crate::store::notices::{Level, Notices};
use crate::store::options::IoMode;
use crate::store::page_cache::PageCache;

/// Opens files and does single transfers, direct where asked for and possible, buffered otherwise.
pub struct Transfers {
    /// An [`IoMode`]; `Buffered` from the first refusal of direct I/O on.
    mode: AtomicU8,
    page_cache: Option<PageCache>,
    device: Arc<DeviceHealth>,
    counters: Arc<Counters>,
    notices: Arc<Notices>,
    #[cfg(feature = "testing")]
    hook: Option<Arc<dyn IoHook>>,
}

impl Transfers {
    pub(crate) fn new(
        mode: IoMode,
        device: Arc<DeviceHealth>,
        counters: Arc<Counters>,
        notices: Arc<Notices>,
        options: &crate::store::StoreOptions,
    ) -> Self {
        #[cfg(not(feature = "testing"))]
        let _ = options;
        Transfers {
            mode: AtomicU8::new(mode as u8),
            page_cache: (mode == IoMode::Auto).then(PageCache::new),
            device,
            counters,
            notices,
            #[cfg(feature = "testing")]
            hook: options.io_hook.clone(),
        }
    }

    /// How payload goes to and from the disk, as it turned out.
    pub fn mode(&self) -> IoMode {
        match self.mode.load(Ordering::Relaxed) {
            mode if mode == IoMode::Auto as u8 => IoMode::Auto,
            mode if mode == IoMode::Direct as u8 => IoMode::Direct,
            _ => IoMode::Buffered,
        }
    }

    /// The mode in words, for `stat` and the start-up line.
    pub(super) fn mode_name(&self) -> &'static str {
        match self.mode() {
            IoMode::Auto => "auto (reads direct where the page cache has nothing)",
            mode => mode.name(),
        }
    }

    /// Transfers of a tool: buffered, and nobody looks at how long they take.
    pub(crate) fn plain() -> Self {
        let (counters, notices) = (Arc::default(), Arc::default());
        let device = DeviceHealth::new(Clock::default(), Arc::clone(&counters), Arc::clone(&notices));
        Transfers::new(IoMode::Buffered, Arc::new(device), counters, notices, &Default::default())
    }

    fn clock(&self) -> &Clock {
        &self.device.clock
    }

    /// Opens an existing segment, for reading or for both.
    pub fn open(&self, path: &Path, write: bool) -> io::Result<SegmentFile> {
        let open = if write { file::open_write } else { file::open_read };
        let buffered = open(path, Access::Buffered)?;
        Ok(self.with_direct(path, buffered, write))
    }

    /// Creates a segment.
    pub fn create(&self, path: &Path) -> io::Result<SegmentFile> {
        let buffered = file::create_new(path)?;
        Ok(self.with_direct(path, buffered, true))
    }

    fn with_direct(&self, path: &Path, buffered: File, write: bool) -> SegmentFile {
        let open = if write { file::open_write } else { file::open_read };
        let direct = match self.mode() {
            IoMode::Buffered => None,
            IoMode::Auto | IoMode::Direct => self.fall_back_on_error(path, open(path, Access::Direct)),
        };
        let number = XxHash3_64::oneshot(path.as_os_str().as_encoded_bytes());
        SegmentFile { path: path.to_owned(), buffered, direct, number }
    }

    /// Writes small things (headers, directories, frames) through the page cache.
    pub fn write_small(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        guarded(|| {
            self.device.writes.watched(|| {
                self.hook(true, false, path, offset, bytes.len() as u64)?;
                file::write_all(file, bytes, offset)
            })
        })
    }

    /// Reads small things through the page cache.
    pub fn read_small(&self, path: &Path, file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
        guarded(|| {
            self.device.reads.watched(|| {
                self.hook(false, false, path, offset, out.len() as u64)?;
                file::read_exact(file, out, offset)
            })
        })
    }

    fn read_pieces(&self, read: &Read<'_>, direct: Option<&File>, pieces: &[Piece<'_>]) -> io::Result<()> {
        let Some(direct) = direct else {
            return self.device.reads.timed(|| {
                self.hook(false, false, &read.file.path, read.offset, read.len)?;
                file::read_pieces(&read.file.buffered, pieces, read.offset)
            });
        };
        if is_aligned(read.offset) && pieces.iter().all(|piece| piece_is_aligned(piece)) {
            return self.device.reads.timed(|| {
                let allowed = self.hook(false, true, &read.file.path, read.offset, read.len);
                match allowed.and_then(|()| file::read_pieces(direct, pieces, read.offset)) {
                    Err(error) if is_refusal(&error) => {
                        self.fall_back(&read.file.path, &error);
                        file::read_pieces(&read.file.buffered, pieces, read.offset)
                    }
                    done => done,
                }
            });
        }
        self.with_scratch(read, Some(direct), |bytes| scatter(bytes, pieces))?
    }

    /// The descriptor past the page cache, if this read is to take that way.
    fn direct_of<'a>(&self, read: &Read<'a>) -> Option<&'a File> {
        let SegmentFile { buffered, direct, number, .. } = read.file;
        let direct = direct.as_ref()?;
        let is_direct = match (self.mode(), read.way) {
            (IoMode::Buffered, _) | (_, Way::Cache) | (IoMode::Auto, Way::Shared) => false,
            (IoMode::Direct, _) => true,
            (IoMode::Auto, Way::Payload) => {
                let is_cached =
                    |cache: &PageCache| cache.is_used_by(*number, buffered, read.offset, read.len);
                !self.page_cache.as_ref().is_some_and(is_cached)
            }
        };
        is_direct.then_some(direct)
    }

    /// Reads into this thread's scratch buffer and hands the bytes to `take`.
    fn with_scratch<R>(
        &self,
        read: &Read<'_>,
        direct: Option<&File>,
        take: impl FnOnce(&[u8]) -> R,
    ) -> io::Result<R> {
        let start = read.offset - read.offset % DIRECT_ALIGNMENT as u64;
        let end = (read.offset + read.len).next_multiple_of(DIRECT_ALIGNMENT as u64);
        let (skip, len) = ((read.offset - start) as usize, read.len as usize);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.reserve_discarding((end - start) as usize);
            let done = self.device.reads.timed(|| match direct {
                Some(direct) => {
                    let allowed = self.hook(false, true, &read.file.path, start, end - start);
                    let out = &mut scratch[..(end - start) as usize];
                    match allowed.and_then(|()| read_aligned(direct, out, start, skip + len)) {
                        Err(error) if is_refusal(&error) => {
                            self.fall_back(&read.file.path, &error);
                            file::read_exact(&read.file.buffered, &mut scratch[skip..skip + len], read.offset)
                        }
                        done => done,
                    }
                }
                None => {
                    self.hook(false, false, &read.file.path, read.offset, read.len)?;
                    file::read_exact(&read.file.buffered, &mut scratch[skip..skip + len], read.offset)
                }
            });
            done.map(|()| take(&scratch[skip..skip + len]))
        })
    }

    fn write(&self, index: usize, write: &Write<'_>, prepare: WritePrepare<'_>) -> io::Result<()> {
        let direct = write.file.direct.as_ref().filter(|_| self.mode() == IoMode::Direct);
        // Neighbouring writes may share a sector when the length is not aligned: those go through the cache.
        let direct = direct.filter(|_| is_aligned(write.offset) && is_aligned(write.len));
        if let Some(pieces) = &write.from {
            prepare(index, &mut [])?;
            let Some(direct) = direct else {
                return self.device.writes.timed(|| {
                    self.hook(true, false, &write.file.path, write.offset, write.len)?;
                    file::write_pieces(&write.file.buffered, pieces, write.offset)
                });
            };
            if pieces.iter().all(|piece| piece_is_aligned(piece)) {
                return self.write_direct(
                    write,
                    || file::write_pieces(direct, pieces, write.offset),
                    || file::write_pieces(&write.file.buffered, pieces, write.offset),
                );
            }
        }
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.reserve_discarding(write.len as usize);
            let bytes = &mut scratch[..write.len as usize];
            match &write.from {
                Some(pieces) => gather(pieces, bytes)?,
                None => prepare(index, bytes)?,
            }
            let bytes = &*bytes;
            match direct {
                Some(direct) => self.write_direct(
                    write,
                    || file::write_all(direct, bytes, write.offset),
                    || file::write_all(&write.file.buffered, bytes, write.offset),
                ),
                None => self.device.writes.timed(|| {
                    self.hook(true, false, &write.file.path, write.offset, write.len)?;
                    file::write_all(&write.file.buffered, bytes, write.offset)
                }),
            }
        })
    }

    /// Whether one write would wait for the other: the kernel lets in one at a time to a file through the page cache, and
    /// has others spin on a core each.
    pub(super) fn excludes(&self, one: &Write<'_>, other: &Write<'_>) -> bool {
        std::ptr::eq(one.file, other.file) && (self.mode() != IoMode::Direct || one.file.direct.is_none())
    }

    fn write_direct(
        &self,
        write: &Write<'_>,
        direct: impl FnOnce() -> io::Result<()>,
        buffered: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.device.writes.timed(|| {
            let allowed = self.hook(true, true, &write.file.path, write.offset, write.len);
            match allowed.and_then(|()| direct()) {
                Err(error) if is_refusal(&error) => {
                    self.fall_back(&write.file.path, &error);
                    buffered()
                }
                done => done,
            }
        })
    }

    fn fall_back_on_error<T>(&self, path: &Path, tried: io::Result<T>) -> Option<T> {
        match tried {
            Ok(done) => Some(done),
            Err(error) => {
                self.fall_back(path, &error);
                None
            }
        }
    }

    fn fall_back(&self, path: &Path, error: &io::Error) {
        // In mode `Auto` nobody asked for direct I/O by name.
        let level = if self.mode() == IoMode::Direct { Level::Warning } else { Level::Info };
        // Want of descriptors or memory passes; a refusal does not.
        if is_refusal(error) {
            self.mode.store(IoMode::Buffered as u8, Ordering::Relaxed);
        }
        self.counters.add(Counter::DirectFallbacks, 1);
        self.notices.push(level, "direct-fallback", || {
            format!("direct I/O refused for {}: {error}; going on through the page cache", path.display())
        });
    }

    #[cfg(feature = "testing")]
    fn hook(&self, is_write: bool, is_direct: bool, path: &Path, offset: u64, len: u64) -> io::Result<()> {
        match &self.hook {
            Some(hook) => hook.before(IoCall { is_write, is_direct, path, offset, len }),
            None => Ok(()),
        }
    }

    #[cfg(not(feature = "testing"))]
    fn hook(
        &self,
        _is_write: bool,
        _is_direct: bool,
        _path: &Path,
        _offset: u64,
        _len: u64,
    ) -> io::Result<()> {
        Ok(())
    }
}

thread_local! {
    static SCRATCH: RefCell<AlignedBuffer> = RefCell::new(AlignedBuffer::zeroed(0));
}

fn is_aligned(value: u64) -> bool {
    value.is_multiple_of(DIRECT_ALIGNMENT as u64)
}

fn piece_is_aligned(piece: &Piece<'_>) -> bool {
    is_aligned(piece.region.address() as u64 + piece.offset) && is_aligned(piece.len)
}

/// The system takes direct I/O, but not this transfer.
fn is_refusal(error: &io::Error) -> bool {
    // EINVAL, and EOPNOTSUPP of some network file systems.
    matches!(error.raw_os_error(), Some(22 | 95))
}

/// Reads the aligned range until at least `needed` bytes are there: the last sector of a file may be short.
fn read_aligned(file: &File, out: &mut [u8], offset: u64, needed: usize) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut have = 0;
    while have < needed {
        match file.read_at(&mut out[have..], offset + have as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => have += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn scatter(mut bytes: &[u8], pieces: &[Piece<'_>]) -> io::Result<()> {
    for piece in pieces {
        let (head, rest) = bytes.split_at(piece.len as usize);
        piece.region.copy_in(piece.offset, head).map_err(invalid)?;
        bytes = rest;
    }
    Ok(())
}

/// Copies the pieces, one after the other, to `out`.
pub(crate) fn gather(pieces: &[Piece<'_>], mut out: &mut [u8]) -> io::Result<()> {
    for piece in pieces {
        let (head, rest) = out.split_at_mut(piece.len as usize);
        piece.region.copy_out(piece.offset, head).map_err(invalid)?;
        out = rest;
    }
    Ok(())
}

fn invalid(error: hicache_sys::OutOfBounds) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

impl Transfers {
    pub(super) fn carry_out_read(
        &self,
        index: usize,
        read: &Read<'_>,
        deadline: Option<Instant>,
        done: ReadDone<'_>,
    ) {
        let whole = guarded(|| {
            self.read(index, read, deadline, done);
            Ok(())
        });
        if let Err(error) = whole {
            done(index, Err(error));
        }
    }

    fn read(&self, index: usize, read: &Read<'_>, deadline: Option<Instant>, done: ReadDone<'_>) {
        if self.clock().is_past(deadline) {
            return done(index, Err(late()));
        }
        let direct = self.direct_of(read);
        let ended = match &read.into {
            Some(pieces) => self.read_pieces(read, direct, pieces).map(|()| done(index, Ok(&[]))),
            None => self.with_scratch(read, direct, |bytes| done(index, Ok(bytes))),
        };
        if let Err(error) = ended {
            done(index, Err(error));
        }
    }

    pub(super) fn carry_out_write(
        &self,
        index: usize,
        write: &Write<'_>,
        deadline: Option<Instant>,
        prepare: WritePrepare<'_>,
    ) -> io::Result<()> {
        if self.clock().is_past(deadline) {
            return Err(late());
        }
        guarded(|| self.write(index, write, prepare))
    }
}
