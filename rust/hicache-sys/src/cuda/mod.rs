//! The CUDA driver, found at run time.
//!
//! Nothing here is linked and nothing happens at import. [`Driver::get`] opens `libcuda.so.1` and calls `cuInit`
//! at its first use; where there is no driver, no device, or no right to use one, it says so in words and the rest
//! of the library goes on without. No call panics for want of a driver, of a symbol or of a device.
//!
//! Streams and events of an engine are handles that it owns: they enter as integers, through an unsafe function,
//! as memory does.

mod cache;
mod choose;
mod copies;
mod driver;
mod error;
mod event;
mod functions;
mod hash;
mod image;
mod index_check;
mod kernels;
mod launch;
mod mapped;
mod nvrtc;
mod plan_device;
mod plan_stream;
mod primary;
mod symbols;

pub use choose::{BATCH_RUN_BYTES, Choice, Facts, Way, Wishes, choose};
pub use copies::{Copy3, SourceOrder};
pub use driver::{Driver, attribute, function_attribute};
pub use error::{CudaError, Unavailable, code};
pub use event::{Event, Stream};
pub use functions::{Function, Library};
pub use image::{EMBEDDED, Entry, EntryKind, Image, ImageError, SOURCES, source_hash, write_image};
pub use kernels::{Kernels, Loaded, Report, Source, WIDTHS, Wanted};
pub use launch::IndexReport;
pub use mapped::{MappedBlock, MappedBlocks, MappedMemory};
pub use plan_device::{DeviceMemory, PlanDevice, PlanEvent, Touched};
pub use plan_stream::{IndexPlace, PlanStream, SubmitError};
pub use primary::{Entered, Primary};
