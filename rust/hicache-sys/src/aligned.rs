//! A byte buffer whose address and capacity suit direct I/O.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::DIRECT_ALIGNMENT;

/// A zero-initialised buffer at a multiple of [`DIRECT_ALIGNMENT`], its length rounded up to one.
pub struct AlignedBuffer {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory alone, as `Vec<u8>` does.
unsafe impl Send for AlignedBuffer {}
// SAFETY: shared access gives `&[u8]` only.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// A zeroed buffer of at least `len` bytes.
    pub fn zeroed(len: usize) -> Self {
        let len = len.max(1).next_multiple_of(DIRECT_ALIGNMENT);
        let layout = Self::layout(len);
        // SAFETY: the layout's size is at least DIRECT_ALIGNMENT, hence not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        AlignedBuffer { base, len }
    }

    /// Grows to at least `len` bytes; what was in it is lost.
    pub fn reserve_discarding(&mut self, len: usize) {
        if self.len < len {
            *self = AlignedBuffer::zeroed(len);
        }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, DIRECT_ALIGNMENT).expect("a buffer length below isize::MAX")
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `base` points to `len` initialised bytes that this value owns.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `base` points to `len` initialised bytes that this value owns, borrowed mutably here.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with the same layout, and freed only here.
        unsafe { dealloc(self.base.as_ptr(), Self::layout(self.len)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_and_length_suit_direct_io() {
        for len in [0, 1, 4095, 4096, 4097] {
            let buffer = AlignedBuffer::zeroed(len);
            assert_eq!(buffer.as_ptr() as usize % DIRECT_ALIGNMENT, 0);
            assert!(buffer.len() >= len.max(1) && buffer.len().is_multiple_of(DIRECT_ALIGNMENT));
            assert!(buffer.iter().all(|&byte| byte == 0));
        }
    }
}
