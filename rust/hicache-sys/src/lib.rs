//! Everything unsafe below Python: memory lent by an engine or made for a pool, copies of strided runs, positioned
//! vectored file I/O, file locks, forks, the CUDA driver and its kernels.
//!
//! This crate owns the unsafe code of the workspace so that the crates above can forbid it. It knows
//! nothing of pages, keys or formats. Functions are safe to call, except where something of somebody else enters:
//! memory ([`Region::from_raw_parts`]), and what the CUDA driver is given ([`cuda`]).

#![expect(unsafe_code, reason = "the one crate of the workspace that may, see the crate documentation")]

mod aligned;
#[cfg(feature = "testing")]
pub mod allocations;
pub mod copy;
pub mod cuda;
pub mod file;
pub mod fork;
pub mod lock;
pub mod memory;
pub mod probe;
mod region;
pub mod segment_plan;

pub use aligned::AlignedBuffer;
pub use region::{OutOfBounds, Region};

/// Alignment of direct I/O and of large payloads, in bytes. The largest logical block size in use.
pub const DIRECT_ALIGNMENT: usize = 4096;

/// Number of this process, as the kernel knows it now: differs from a remembered one in a forked child.
pub fn process_number() -> u32 {
    std::process::id()
}
