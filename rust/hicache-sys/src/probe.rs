//! What the machine and a file system can do, found out by trying.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::file::{self, Access};
use crate::{AlignedBuffer, DIRECT_ALIGNMENT};

/// A file system, as `statfs` and `statvfs` describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// Name of its type, or the magic number in hex when it is not one we know.
    pub kind: String,
    /// Whether one host alone sees it, so that locks and page cache are shared by all that use it.
    pub is_local: bool,
    /// Capacity in bytes.
    pub total_bytes: u64,
    /// Bytes that an unprivileged user may still take.
    pub available_bytes: u64,
    /// Inodes in all; 0 where the file system makes them as needed.
    pub total_inodes: u64,
    /// Inodes still free.
    pub free_inodes: u64,
}

/// Describes the file system that holds `path`.
pub fn file_system(path: &Path) -> io::Result<FileSystem> {
    let kind = rustix::fs::statfs(path)?;
    let (name, is_local) = match kind.f_type as u32 {
        0xef53 => ("ext4", true),
        0x5846_5342 => ("xfs", true),
        0x9123_683e => ("btrfs", true),
        0x0102_1994 => ("tmpfs", true),
        0x794c_7630 => ("overlay", true),
        0x2fc1_2fc1 => ("zfs", true),
        0xf2f5_2010 => ("f2fs", true),
        0x6969 => ("nfs", false),
        0x6573_5546 => ("fuse", false),
        0x0102_1997 => ("9p", false),
        0x6a65_6a63 => ("virtiofs", false),
        0x0bd0_0bd0 => ("lustre", false),
        0x00c3_6400 => ("ceph", false),
        0xff53_4d42 | 0xfe53_4d42 => ("cifs", false),
        _ => ("", false),
    };
    let name = if name.is_empty() { format!("{:#x}", kind.f_type as u32) } else { name.to_owned() };
    let space = rustix::fs::statvfs(path)?;
    Ok(FileSystem {
        kind: name,
        is_local,
        total_bytes: space.f_blocks * space.f_frsize,
        available_bytes: space.f_bavail * space.f_frsize,
        total_inodes: space.f_files,
        free_inodes: space.f_favail,
    })
}

/// Tries a real aligned write and read past the page cache in a file made at `temporary` and removed again.
///
/// # Errors
/// The error of the step that failed: `EINVAL` at open (tmpfs of old) or at the first transfer (Lustre).
pub fn direct_io(temporary: &Path) -> io::Result<()> {
    let created = file::create_new(temporary)?;
    drop(created);
    let tried = try_direct(temporary);
    std::fs::remove_file(temporary)?;
    tried
}

fn try_direct(temporary: &Path) -> io::Result<()> {
    let file = file::open_write(temporary, Access::Direct)?;
    let mut buffer = AlignedBuffer::zeroed(DIRECT_ALIGNMENT);
    buffer.fill(0x5a);
    file::write_all(&file, &buffer, 0)?;
    let mut back = AlignedBuffer::zeroed(DIRECT_ALIGNMENT);
    file::read_exact(&file, &mut back, 0)?;
    if back[..] == buffer[..] { Ok(()) } else { Err(io::Error::other("read back other bytes than written")) }
}

/// Whether the kernel offers io_uring to this process.
///
/// # Errors
/// `ENOSYS` (an old kernel) or `EPERM` (switched off by `kernel.io_uring_disabled` or a sandbox).
pub fn io_uring() -> io::Result<()> {
    let mut parameters = [0_u8; 120]; // struct io_uring_params, all zero
    // SAFETY: `io_uring_setup` reads and writes one `io_uring_params` (120 bytes) at the given address.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    let fd = libc::c_int::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor just given to us, closed once.
    unsafe { libc::close(fd) };
    Ok(())
}

/// How many of the `len` bytes of `file` at `offset` are in the page cache (`cachestat`, Linux 6.5 and newer), whole
/// system pages counted.
///
/// # Errors
/// `ENOSYS` on an older kernel, `EPERM` for a file that this process may not write and does not own.
pub fn cached_bytes(file: &File, offset: u64, len: u64) -> io::Result<u64> {
    const SYS_CACHESTAT: libc::c_long = 451; // the same number on x86-64 and aarch64
    let range = [offset, len]; // struct cachestat_range { off, len }
    let mut counts = [0_u64; 5]; // struct cachestat { cache, dirty, writeback, evicted, recently_evicted }
    // SAFETY: the kernel reads `range` and writes `counts`, both of the sizes that its interface names.
    let done =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0_u32) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(counts[0] * system_page_size())
}

fn system_page_size() -> u64 {
    // SAFETY: sysconf with a name that every Linux knows.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_temporary_folder_is_described_and_left_clean() {
        let folder = std::env::temp_dir();
        let described = file_system(&folder).unwrap();
        assert!(described.total_bytes >= described.available_bytes && !described.kind.is_empty());
        let temporary = folder.join(format!("hicache-sys-probe-{}", std::process::id()));
        let _ = direct_io(&temporary);
        assert!(!temporary.exists());
    }
}
