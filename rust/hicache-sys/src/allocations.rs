//! An allocator that counts, for tests which show that something takes no memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Without a destructor and made before it is used: reading it takes no memory.
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator; it counts for each thread how often memory is taken or made larger.
#[derive(Debug)]
pub struct CountingAllocator;

/// How often this thread took memory so far, where [`CountingAllocator`] is the program's allocator; else 0.
pub fn allocations() -> u64 {
    TAKEN.get()
}

fn count() {
    TAKEN.set(TAKEN.get() + 1);
}

// SAFETY: every call goes to the system's allocator as it is; the count takes no memory and cannot panic before 2^64.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise; the memory is the system allocator's, as all of it is.
        unsafe { System.realloc(memory, layout, new_size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise; the memory is the system allocator's, as all of it is.
        unsafe { System.dealloc(memory, layout) }
    }
}
