//! The kernels as seen from Rust: their source on the CPU beside the Rust walk of the same plans, and their loading and
//! launch against a stub of the driver that records every call.

#![expect(unsafe_code, reason = "loads libraries built here, and hands addresses to them")]

mod build;
mod image;
mod plan_stream;
mod shim;
mod stub;
