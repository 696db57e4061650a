//! Positioned reads and writes, whole or not at all, from buffers and from lent memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom};

use crate::Region;

/// Most pieces that one vectored call takes; the kernel's own limit (`IOV_MAX`).
pub const MAX_PIECES: usize = 1024;

/// A stretch of a region: one element of a vectored call.
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    /// The memory.
    pub region: &'a Region,
    /// First byte, from the region's start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// How a file is opened for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Through the page cache.
    Buffered,
    /// Past the page cache (`O_DIRECT`): addresses, offsets and lengths must be aligned.
    Direct,
}

/// Opens an existing regular file for reading; a symbolic link in the last component is refused (`ELOOP`).
pub fn open_read(path: &Path, access: Access) -> io::Result<File> {
    File::options().read(true).custom_flags(flags(access)).open(path).and_then(only_regular)
}

/// Opens an existing regular file for reading and writing; a symbolic link is refused.
pub fn open_write(path: &Path, access: Access) -> io::Result<File> {
    File::options().read(true).write(true).custom_flags(flags(access)).open(path).and_then(only_regular)
}

/// Creates a file that must not exist.
pub fn create_new(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o666)
        .custom_flags(flags(Access::Buffered))
        .open(path)
}

/// Opens or creates a file for locking; a symbolic link is refused.
pub fn open_or_create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o666);
    options.custom_flags(flags(Access::Buffered)).open(path).and_then(only_regular)
}

fn flags(access: Access) -> i32 {
    // O_NONBLOCK: opening a FIFO that somebody put into the folder must not wait for its other end.
    libc::O_NOFOLLOW | libc::O_NONBLOCK | if access == Access::Direct { libc::O_DIRECT } else { 0 }
}

fn only_regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("expected a regular file")) }
}

/// Fills `out` from `offset`; a file that ends earlier is `UnexpectedEof`.
pub fn read_exact(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(out, offset)
}

/// Writes all of `bytes` at `offset`.
pub fn write_all(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

/// Fills the pieces, one after the other, from `offset`; a file that ends earlier is `UnexpectedEof`.
///
/// # Errors
/// A piece outside its region, or into memory lent for reading only, is `InvalidInput`.
pub fn read_pieces(file: &File, pieces: &[Piece<'_>], offset: u64) -> io::Result<()> {
    if pieces.iter().any(|piece| !piece.region.is_writable()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a region lent for reading only"));
    }
    transfer(file, pieces, offset, Direction::Read)
}

/// Writes the pieces, one after the other, at `offset`.
///
/// # Errors
/// A piece outside its region is `InvalidInput`.
pub fn write_pieces(file: &File, pieces: &[Piece<'_>], offset: u64) -> io::Result<()> {
    transfer(file, pieces, offset, Direction::Write)
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Read,
    Write,
}

fn transfer(file: &File, pieces: &[Piece<'_>], mut offset: u64, direction: Direction) -> io::Result<()> {
    let mut vectors = Vec::with_capacity(pieces.len());
    for piece in pieces.iter().filter(|piece| piece.len > 0) {
        let base = piece
            .region
            .pointer(piece.offset, piece.len)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        vectors.push(libc::iovec { iov_base: base.cast(), iov_len: piece.len as usize });
    }
    let mut rest = &mut vectors[..];
    while !rest.is_empty() {
        let count = rest.len().min(MAX_PIECES);
        let moved = call(file, &rest[..count], offset, direction)?;
        offset += moved as u64;
        rest = advance(rest, moved);
    }
    Ok(())
}

/// One `preadv` or `pwritev`, repeated when a signal interrupts it. Never returns 0.
fn call(file: &File, vectors: &[libc::iovec], offset: u64, direction: Direction) -> io::Result<usize> {
    let offset = libc::off_t::try_from(offset)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "an offset past the largest file"))?;
    loop {
        let (fd, count) = (file.as_raw_fd(), vectors.len() as libc::c_int);
        let moved = match direction {
            // SAFETY: each vector lies inside a live region lent for writing (`Region::pointer`,
            // `read_pieces`), and the descriptor is open while `file` is borrowed.
            Direction::Read => unsafe { libc::preadv(fd, vectors.as_ptr(), count, offset) },
            // SAFETY: each vector lies inside a live region (`Region::pointer`), which is only read.
            Direction::Write => unsafe { libc::pwritev(fd, vectors.as_ptr(), count, offset) },
        };
        match moved {
            0 if direction == Direction::Read => return Err(io::ErrorKind::UnexpectedEof.into()),
            0 => return Err(io::ErrorKind::WriteZero.into()),
            1.. => return Ok(moved as usize),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Drops the first `moved` bytes from the vectors.
fn advance(vectors: &mut [libc::iovec], mut moved: usize) -> &mut [libc::iovec] {
    let mut done = 0;
    while done < vectors.len() && moved >= vectors[done].iov_len {
        moved -= vectors[done].iov_len;
        done += 1;
    }
    let rest = &mut vectors[done..];
    if let Some(first) = rest.first_mut() {
        first.iov_base = first.iov_base.cast::<u8>().wrapping_add(moved).cast();
        first.iov_len -= moved;
    }
    rest
}

/// Bytes that the file takes on disk, holes not counted (`st_blocks`).
pub fn allocated_bytes(metadata: &std::fs::Metadata) -> u64 {
    use std::os::unix::fs::MetadataExt;
    metadata.blocks() * 512
}

/// Length of an open file in bytes, for polling: a seek to the end costs half of an `fstat`. Moves the file's cursor,
/// which nothing here uses.
pub fn file_len(file: &File) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

/// Sets the length; blocks past a smaller one go back to the file system.
pub fn truncate(file: &File, len: u64) -> io::Result<()> {
    file.set_len(len)
}

/// Takes the blocks of `len` bytes at `offset` now; the file keeps its length. `false` where the file system cannot.
///
/// # Errors
/// `StorageFull` or `QuotaExceeded` where there is no room, and others of the system.
pub fn preallocate(file: &File, offset: u64, len: u64) -> io::Result<bool> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset, len) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// First byte from `offset` on that is not in a hole; `None` when there is none. A file system that does not tell
/// holes calls everything up to the end data. Moves the file's cursor, which nothing here uses.
pub fn data_start(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(start) => Ok(Some(start)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(rustix::io::Errno::INVAL) => Ok(Some(offset)),
        Err(error) => Err(error.into()),
    }
}

/// Whether `len` bytes at `start` are a hole from end to end; past the end of the file is one.
pub fn is_hole(file: &File, start: u64, len: u64) -> io::Result<bool> {
    Ok(data_start(file, start)?.is_none_or(|data| data >= start.saturating_add(len)))
}

/// Gives the blocks of `len` bytes at `offset` back to the file system; the file keeps its length.
pub fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
}

/// Publishes `bytes` as `path`, whole or not at all; an existing file stays as it is and `false` is returned.
///
/// The bytes go to a temporary name first and become visible by `link(2)`, which never replaces.
pub fn publish_new(path: &Path, temporary: &Path, bytes: &[u8]) -> io::Result<bool> {
    write_temporary(temporary, bytes)?;
    let linked = std::fs::hard_link(temporary, path);
    std::fs::remove_file(temporary)?;
    match linked {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Publishes `bytes` as `path`, replacing what is there, whole or not at all.
pub fn publish_replacing(path: &Path, temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    write_temporary(temporary, bytes)?;
    std::fs::rename(temporary, path)
}

fn write_temporary(temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = create_new(temporary)?;
    let written = file.write_all_at(bytes, 0).and_then(|()| file.sync_data());
    if written.is_err() {
        // The first error is the one to report; a temporary left behind is harmless.
        let _ = std::fs::remove_file(temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("hicache-sys-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn pieces_round_trip_past_the_vector_limit() {
        let path = scratch("pieces");
        let file = create_new(&path).unwrap();
        let count = 3 * MAX_PIECES as u64 + 7;
        let source = Region::owned(3 * count as usize);
        for index in 0..count {
            source.copy_in(3 * index, &[index as u8, (index >> 8) as u8, 9]).unwrap();
        }
        // Every second piece is reversed in order, so that pieces are not one contiguous range.
        let order: Vec<u64> =
            (0..count).map(|i| if i % 2 == 0 { i } else { count - 1 - (i - i % 2) }).collect();
        let pieces: Vec<_> =
            order.iter().map(|&i| Piece { region: &source, offset: 3 * i, len: 3 }).collect();
        write_pieces(&file, &pieces, 5).unwrap();
        let target = Region::owned(3 * count as usize);
        let pieces: Vec<_> = (0..count).map(|i| Piece { region: &target, offset: 3 * i, len: 3 }).collect();
        read_pieces(&file, &pieces, 5).unwrap();
        for (index, &from) in order.iter().enumerate() {
            let mut out = [0; 3];
            target.copy_out(3 * index as u64, &mut out).unwrap();
            assert_eq!(out, [from as u8, (from >> 8) as u8, 9]);
        }
        let error =
            read_pieces(&file, &[Piece { region: &target, offset: 0, len: 8 }], 3 * count).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn links_and_fifos_are_refused_without_waiting() {
        let (target, link) = (scratch("target"), scratch("link"));
        create_new(&target).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert_eq!(open_read(&link, Access::Buffered).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        std::fs::remove_file(&link).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &link, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(open_read(&link, Access::Buffered).unwrap_err().to_string().contains("regular file"));
        std::fs::remove_file(&link).unwrap();
        std::fs::remove_file(&target).unwrap();
    }

    #[test]
    fn room_is_taken_and_given_back_without_changing_the_length() {
        let path = scratch("room");
        let file = create_new(&path).unwrap();
        let allocated = || allocated_bytes(&file.metadata().unwrap());
        write_all(&file, b"start", 0).unwrap();
        let before = allocated();
        let could = preallocate(&file, 4096, 1 << 20).unwrap();
        assert_eq!(file_len(&file).unwrap(), 5);
        assert!(!could || allocated() >= before + (1 << 20));
        truncate(&file, 5).unwrap();
        assert!(allocated() < before + (1 << 20));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_hole_is_one_from_end_to_end() {
        let path = scratch("hole");
        let file = create_new(&path).unwrap();
        for block in [0, 1, 2, 3, 8] {
            write_all(&file, &[7; 65536], block * 65536).unwrap();
        }
        assert_eq!(data_start(&file, 5).unwrap(), Some(5));
        assert!(!is_hole(&file, 0, 65536).unwrap());
        punch_hole(&file, 65536, 131_072).unwrap();
        assert!(is_hole(&file, 65536, 131_072).unwrap());
        assert!(is_hole(&file, 70_000, 4096).unwrap());
        assert!(!is_hole(&file, 65536, 131_073).unwrap(), "the byte behind the hole is data");
        assert!(!is_hole(&file, 65535, 4096).unwrap(), "the byte before the hole is data");
        assert_eq!(data_start(&file, 65536).unwrap(), Some(3 * 65536));
        assert_eq!(data_start(&file, 4 * 65536).unwrap(), Some(8 * 65536));
        assert_eq!(data_start(&file, 9 * 65536).unwrap(), None);
        assert!(is_hole(&file, 9 * 65536, 1).unwrap());
        assert_eq!(file_len(&file).unwrap(), 9 * 65536);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn publish_new_never_replaces() {
        let (path, temporary) = (scratch("publish"), scratch("publish.tmp"));
        assert!(publish_new(&path, &temporary, b"first").unwrap());
        assert!(!publish_new(&path, &temporary, b"second").unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        assert!(!temporary.exists());
        std::fs::remove_file(&path).unwrap();
    }
}
