//! Why memory could not be had as asked.

use std::fmt;
use std::io;

use crate::cuda::CudaError;

/// Sorts of refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryErrorKind {
    /// Sizes or options that cannot be.
    Invalid,
    /// What was required is not to be had on this machine: huge pages, a NUMA node, a driver.
    Unsupported,
    /// A limit of the process, of its container or of the machine is too small; the sentence says where to raise it.
    Limit,
    /// The CUDA driver said no.
    Device,
    /// The system said no.
    System,
    /// The memory belongs to another process: this one is its forked child.
    Forked,
}

/// A refusal: its sort, one sentence, and the system's error where there was one.
#[derive(Debug)]
pub struct MemoryError {
    kind: MemoryErrorKind,
    message: String,
    source: Option<io::Error>,
}

impl MemoryError {
    pub(crate) fn new(kind: MemoryErrorKind, message: impl Into<String>) -> Self {
        MemoryError { kind, message: message.into(), source: None }
    }

    /// A failed system call; `what` says which, on how much.
    pub(crate) fn system(what: &str, source: io::Error) -> Self {
        let message = format!("{what}: {source}");
        MemoryError { kind: MemoryErrorKind::System, message, source: Some(source) }
    }

    pub(crate) fn device(error: &CudaError) -> Self {
        MemoryError::new(MemoryErrorKind::Device, error.to_string())
    }

    /// The sort.
    pub fn kind(&self) -> MemoryErrorKind {
        self.kind
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The system's error code, where a system call failed.
    pub fn errno(&self) -> Option<i32> {
        self.source.as_ref().and_then(io::Error::raw_os_error)
    }

    /// The system's error, where a system call failed.
    pub fn into_source(self) -> Option<io::Error> {
        self.source
    }
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for MemoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
