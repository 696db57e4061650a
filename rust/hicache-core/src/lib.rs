//! The store: identity, layouts, on-disk format, backup, match and restore of KV-cache pages.
#![forbid(unsafe_code)]

pub mod error;

pub use error::{Error, ErrorKind, Result};
