//! Memory that other processes map too, as a file without a name.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::error::{MemoryError, MemoryErrorKind};
use crate::fork::Guarded;

const NAME: &CStr = c"hicache-pool";

/// Nobody may make the file shorter, or longer: what is mapped stays behind its addresses.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Makes a file of `len` bytes in memory, of huge pages of so many bytes if there is a number.
pub(super) fn create(len: usize, huge_page: Option<usize>) -> io::Result<Guarded> {
    let size =
        huge_page.map_or(0, |page| libc::MFD_HUGETLB | (page.trailing_zeros() << libc::MAP_HUGE_SHIFT));
    let file = Guarded::open(|| {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | size;
        // SAFETY: a constant, terminated name.
        let descriptor = unsafe { libc::memfd_create(NAME.as_ptr(), flags) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor just given to us, owned by nobody else.
        Ok(unsafe { File::from_raw_fd(descriptor) })
    })?;
    file.set_len(len as u64)?;
    // SAFETY: adds seals to our own file.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Takes a descriptor of its own of memory that [`create`] made in another process.
pub(super) fn attach(descriptor: BorrowedFd<'_>) -> Result<Guarded, MemoryError> {
    let file = Guarded::open(|| descriptor.try_clone_to_owned().map(File::from))
        .map_err(|error| MemoryError::system("duplicate a descriptor of shared memory", error))?;
    // SAFETY: asks for the seals of a descriptor.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err(MemoryError::new(
            MemoryErrorKind::Invalid,
            "expected the descriptor of a shared host pool, found a file that could become shorter while it is mapped",
        ));
    }
    Ok(file)
}

/// A descriptor of our own of the file that number `descriptor` of this process stands for.
///
/// # Errors
/// `EBADF` where it stands for none.
pub fn duplicate(descriptor: i32) -> io::Result<OwnedFd> {
    // SAFETY: asks for another number of what the first one stands for, if it does.
    let copied = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
    if copied < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor just given to us, owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(copied) })
}

/// Bytes of one page of the file where it stands on hugetlb pages.
pub(super) fn huge_page_bytes(file: &File) -> io::Result<Option<usize>> {
    const HUGETLBFS: u32 = 0x9584_58f6;
    let kind = rustix::fs::fstatfs(file)?;
    let is_huge = kind.f_type as u32 == HUGETLBFS;
    Ok(is_huge.then(|| usize::try_from(kind.f_bsize).ok()).flatten())
}
