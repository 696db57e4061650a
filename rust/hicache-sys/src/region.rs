//! Memory lent by the caller: the one place where an address enters.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

/// A range that leaves a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfBounds {
    /// First byte asked for, from the region's start.
    pub offset: u64,
    /// Bytes asked for.
    pub len: u64,
    /// Bytes the region has.
    pub region_bytes: u64,
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected a range inside {} bytes, found {} bytes at offset {}",
            self.region_bytes, self.len, self.offset
        )
    }
}

impl std::error::Error for OutOfBounds {}

/// A byte range of memory that somebody else owns, with a token that keeps the owner alive.
///
/// Every access is bounds-checked. The bytes are reached through raw pointers and short-lived slices: the
/// lender may look at them at any time, but promises not to change them during a call that uses them.
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    /// Number of the process that has the memory, where its forked children have not.
    generation: Option<u32>,
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: the lender's promise in `from_raw_parts` covers use from any thread, and the owner token is Send.
unsafe impl Send for Region {}
// SAFETY: as above; concurrent writers touch disjoint ranges, which the store checks (no slot twice).
unsafe impl Sync for Region {}

impl Region {
    /// Lends `len` bytes at `base`.
    ///
    /// # Safety
    /// Until the region is dropped, `base` must stay valid for reads of `len` bytes (and for writes, if
    /// `writable`), from any thread; `owner` keeps it so. While a call uses the region, nobody else may
    /// change the bytes of the slots that the call names, nor read those it writes.
    pub unsafe fn from_raw_parts(
        base: *mut u8,
        len: usize,
        writable: bool,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        let base = NonNull::new(base).unwrap_or(NonNull::dangling());
        Region { base, len, writable, generation: None, _owner: owner }
    }

    /// Leaves a forked child without bytes: it does not have the memory, and whatever asks for it is refused.
    /// `generation` is [`crate::fork::generation`] of the process that has it.
    pub(crate) fn of_generation(self, generation: u32) -> Self {
        Region { generation: Some(generation), ..self }
    }

    /// A zeroed, page-aligned region of its own. `len` bytes.
    pub fn owned(len: usize) -> Self {
        let mut buffer = crate::AlignedBuffer::zeroed(len);
        let base = buffer.as_mut_ptr();
        // SAFETY: the buffer is moved into the owner token (its heap memory does not move) and is reached
        // through this region only.
        unsafe { Region::from_raw_parts(base, len, true, Some(Box::new(buffer))) }
    }

    /// Length in bytes; 0 in a forked child that does not have the memory.
    pub fn len(&self) -> usize {
        let is_elsewhere = |generation| generation != crate::fork::current_generation();
        if self.generation.is_some_and(is_elsewhere) { 0 } else { self.len }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a restore may write into it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Address of the first byte, for alignment decisions and reports.
    pub fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Checks that `len` bytes at `offset` lie inside.
    pub fn check(&self, offset: u64, len: u64) -> Result<(), OutOfBounds> {
        let region_bytes = self.len() as u64;
        match offset.checked_add(len) {
            Some(end) if end <= region_bytes => Ok(()),
            _ => Err(OutOfBounds { offset, len, region_bytes }),
        }
    }

    /// Looks at `len` bytes at `offset`.
    pub fn with_bytes<R>(
        &self,
        offset: u64,
        len: u64,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, OutOfBounds> {
        let base = self.pointer(offset, len)?;
        // SAFETY: in bounds (checked above) of memory valid for reads; the lender does not change it now.
        let bytes = unsafe { std::slice::from_raw_parts(base, len as usize) };
        Ok(look(bytes))
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Panics
    /// If the region was lent for reading only: callers check [`Region::is_writable`] first.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        assert!(self.writable, "a region lent for reading only");
        let base = self.pointer(offset, bytes.len() as u64)?;
        // SAFETY: in bounds (checked above) of memory valid for writes; `bytes` is a Rust slice, which a
        // lent region never overlaps.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base, bytes.len()) };
        Ok(())
    }

    /// Copies the bytes at `offset` into `out`.
    pub fn copy_out(&self, offset: u64, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.with_bytes(offset, out.len() as u64, |bytes| out.copy_from_slice(bytes))
    }

    /// Pointer to `offset`, with `len` bytes in bounds behind it.
    pub(crate) fn pointer(&self, offset: u64, len: u64) -> Result<*mut u8, OutOfBounds> {
        self.check(offset, len)?;
        // SAFETY: `offset` is at most `self.len`, so the result stays inside, or one past, the same memory.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes at {:#x}, writable {})", self.len(), self.address(), self.writable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_are_refused() {
        let region = Region::owned(16);
        assert!(region.copy_in(8, &[1; 8]).is_ok());
        for (offset, len) in [(9, 8), (17, 0), (u64::MAX, 2), (0, 17)] {
            let error = region.with_bytes(offset, len, |_| ()).unwrap_err();
            assert_eq!(error, OutOfBounds { offset, len, region_bytes: 16 });
        }
    }

    #[test]
    fn bytes_come_back() {
        let region = Region::owned(10);
        region.copy_in(3, b"abc").unwrap();
        let mut out = [0; 5];
        region.copy_out(2, &mut out).unwrap();
        assert_eq!(&out, b"\0abc\0");
    }
}
