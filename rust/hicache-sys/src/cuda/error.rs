//! What the driver says when it says no.

use std::fmt;

/// Codes of the driver that this library acts upon.
pub mod code {
    /// Nothing went wrong.
    pub const SUCCESS: i32 = 0;
    /// An argument is out of range.
    pub const INVALID_VALUE: i32 = 1;
    /// The driver has been shut down, as happens when the process ends.
    pub const DEINITIALIZED: i32 = 4;
    /// No device that this process may use.
    pub const NO_DEVICE: i32 = 100;
    /// An image that is none, or is damaged.
    pub const INVALID_IMAGE: i32 = 200;
    /// An image without code for this device.
    pub const NO_BINARY_FOR_GPU: i32 = 209;
    /// PTX that is newer than the driver.
    pub const UNSUPPORTED_PTX_VERSION: i32 = 222;
    /// Work that was asked about is not done yet.
    pub const NOT_READY: i32 = 600;
    /// The context that a handle belonged to is gone.
    pub const CONTEXT_IS_DESTROYED: i32 = 709;
}

/// Why there is no CUDA in this process, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    pub(super) reason: String,
}

impl Unavailable {
    /// The sentence: what was tried and what came of it.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Unavailable {}

/// A driver call that did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver returned a code.
    Failed {
        /// Name of the call.
        call: &'static str,
        /// The raw code.
        code: i32,
        /// Its name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's own sentence, or nothing.
        text: String,
    },
    /// The driver is older than the call.
    Missing {
        /// Name of the call.
        call: &'static str,
        /// The driver's version, 1000 x major + 10 x minor.
        driver_version: i32,
    },
    /// Arguments that the driver is not asked about.
    Refused {
        /// Name of the call.
        call: &'static str,
        /// What was expected and what was found.
        why: String,
    },
}

impl CudaError {
    /// The driver's code, where it gave one.
    pub fn code(&self) -> Option<i32> {
        match self {
            CudaError::Failed { code, .. } => Some(*code),
            CudaError::Missing { .. } | CudaError::Refused { .. } => None,
        }
    }

    /// Whether the driver, or the context, has ended: what it held is gone, and there is nothing left to undo.
    pub fn is_gone(&self) -> bool {
        matches!(self.code(), Some(code::DEINITIALIZED | code::CONTEXT_IS_DESTROYED))
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaError::Failed { call, code, name, text } if text.is_empty() => {
                write!(f, "{call}: {name} ({code})")
            }
            CudaError::Failed { call, code, name, text } => write!(f, "{call}: {name} ({code}): {text}"),
            CudaError::Missing { call, driver_version } => write!(
                f,
                "{call}: expected a driver that has it, found one for CUDA {}.{}",
                driver_version / 1000,
                driver_version % 1000 / 10
            ),
            CudaError::Refused { call, why } => write!(f, "{call}: {why}"),
        }
    }
}

impl std::error::Error for CudaError {}
