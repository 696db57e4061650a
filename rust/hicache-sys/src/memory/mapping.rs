//! A mapping: asked for, advised, unmapped. It belongs to one process and does nothing in a forked child.

use std::io;
use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;

use super::error::MemoryError;

/// Where a mapping has its pages from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Backing<'a> {
    /// Memory of this process alone, of huge pages of so many bytes if there is a number.
    Private(Option<usize>),
    /// A file that lives in memory.
    Shared(BorrowedFd<'a>),
}

/// Memory from `mmap`, at a multiple of what was asked, between two pages that nobody may touch.
#[derive(Debug)]
pub(super) struct Mapping {
    base: usize,
    len: usize,
    guard: usize,
    process: u32,
}

impl Mapping {
    /// Maps `len` bytes, a multiple of the page size, at a multiple of `alignment`, a power of two.
    pub(super) fn new(len: usize, alignment: usize, backing: Backing<'_>) -> io::Result<Mapping> {
        let guard = page_bytes();
        let room = len.checked_add(alignment + 2 * guard).ok_or(io::ErrorKind::OutOfMemory)?;
        // The range is reserved first, so that the memory can stand at a multiple inside it.
        let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let start = map(0, room, libc::PROT_NONE, nothing, -1)?;
        let base = (start + guard).next_multiple_of(alignment);
        let (flags, descriptor) = match backing {
            Backing::Private(None) => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
            Backing::Private(Some(page)) => {
                let size = (page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
                (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size, -1)
            }
            Backing::Shared(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        };
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        if let Err(error) = map(base, len, rights, flags | libc::MAP_FIXED, descriptor) {
            unmap(start, room);
            return Err(error);
        }
        // What is left on both sides goes, but for a page each: overruns end there, and the kernel does not join
        // the mapping with a neighbour's.
        let (first, end) = (base - guard, base + len + guard);
        if first > start {
            unmap(start, first - start);
        }
        if start + room > end {
            unmap(end, start + room - end);
        }
        Ok(Mapping { base, len, guard, process: std::process::id() })
    }

    /// Address of the first byte.
    pub(super) fn base(&self) -> usize {
        self.base
    }

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether this is a forked child of the process that made the mapping, which has nothing at the address.
    pub(super) fn is_inherited(&self) -> bool {
        std::process::id() != self.process
    }

    /// Says something about the whole mapping that changes no bytes.
    pub(super) fn advise(&self, what: Advice) -> io::Result<()> {
        // SAFETY: the range is our own mapping; none of these advices changes or frees bytes in this process.
        let done = unsafe { libc::madvise(pointer(self.base), self.len, what as libc::c_int) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Locks every page into memory.
    pub(super) fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is our own mapping.
        let done = unsafe { libc::mlock(pointer(self.base), self.len) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives the mapping up without unmapping it: the driver still has it in its lists.
    pub(super) fn leak(self) {
        std::mem::forget(self);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a forked child there is nothing at the address, or something of the child's own.
        if !self.is_inherited() {
            unmap(self.base - self.guard, self.len + 2 * self.guard);
        }
    }
}

/// Advices that leave the bytes of this process alone.
#[derive(Debug, Clone, Copy)]
pub(super) enum Advice {
    HugePages = libc::MADV_HUGEPAGE as isize,
    OrdinaryPages = libc::MADV_NOHUGEPAGE as isize,
    NotInChildren = libc::MADV_DONTFORK as isize,
}

fn map(base: usize, len: usize, rights: i32, flags: i32, descriptor: i32) -> io::Result<usize> {
    // SAFETY: base 0 lets the kernel choose a free range; another base, with MAP_FIXED, replaces a part of a range
    // that `Mapping::new` has reserved for itself.
    let address = unsafe { libc::mmap(pointer(base), len, rights, flags, descriptor, 0) };
    if address == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(address.expose_provenance())
    }
}

fn unmap(base: usize, len: usize) {
    // SAFETY: a range that this module has mapped, and that nothing refers to any more.
    let done = unsafe { libc::munmap(pointer(base), len) };
    debug_assert_eq!(done, 0, "munmap of {len} bytes at {base:#x}");
}

pub(super) fn pointer(address: usize) -> *mut libc::c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

/// The system's page size in bytes: 4 KiB, or 16 or 64 KiB on some aarch64 kernels.
pub fn page_bytes() -> usize {
    // SAFETY: sysconf with a name that every Linux knows.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Bytes of one transparent huge page, if the kernel has them.
pub fn transparent_page_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?;
    text.trim().parse().ok().filter(|size: &usize| size.is_power_of_two())
}

/// Bytes of one page of the default hugetlb pool, if the kernel has one.
pub fn hugetlb_page_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024).filter(|size| size.is_power_of_two())
}

/// Bytes of the mapping at `base` that stand on huge pages now, as the kernel counts them.
pub(super) fn huge_bytes(base: usize, len: usize) -> Result<usize, MemoryError> {
    let text = std::fs::read_to_string("/proc/self/smaps")
        .map_err(|error| MemoryError::system("read /proc/self/smaps", error))?;
    let mut inside = false;
    let mut kib = 0;
    for line in text.lines() {
        let word = line.split(' ').next().unwrap_or_default();
        if let Some((start, end)) = word.split_once('-') {
            let range = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16));
            if let (Ok(start), Ok(end)) = range {
                inside = start >= base && end <= base + len;
            }
            continue;
        }
        let is_huge = ["AnonHugePages:", "ShmemPmdMapped:", "Private_Hugetlb:", "Shared_Hugetlb:"];
        if inside && is_huge.contains(&word) {
            let size = line[word.len()..].trim().trim_end_matches(" kB").trim();
            kib += size.parse::<usize>().unwrap_or(0);
        }
    }
    Ok(kib * 1024)
}
