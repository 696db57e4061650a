//! One error type for the whole workspace: a kind, a sentence, and named facts.
//!
//! A miss is a value, never an error. An error means that the call as asked cannot be carried out, and
//! that nothing was changed.

use std::fmt;

/// Result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, in the words of the caller. `docs/errors.md` has one row for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A bad option: impossible size, unknown name, missing value.
    Config,
    /// A namespace or pool description is not usable, or differs from the one stored.
    Namespace,
    /// A length, slot, stride, rectangle or data type does not fit.
    Geometry,
    /// Bytes that must be whole are not: an archive, a manifest given by the caller.
    Corrupt,
    /// Written by a newer format than this build reads.
    UnsupportedVersion,
    /// The system said no; the raw code is kept in `errno`.
    Io,
    /// Used after `close`, or in a forked child.
    Closed,
    /// Not possible on this machine or file system, or not with this root.
    Unsupported,
    /// No slot of a host pool is free.
    PoolExhausted,
    /// A slot used after its release, released twice, or of another pool; a pool closed while somebody has a part of it.
    Lease,
    /// A limit of the process, its container or the machine is too small: locked memory, memory.
    Limit,
    /// The CUDA driver said no; its code and name are in the sentence.
    Device,
}

impl ErrorKind {
    /// Every kind, in the order of the table in `docs/errors.md`.
    pub const ALL: [ErrorKind; 12] = [
        ErrorKind::Config,
        ErrorKind::Namespace,
        ErrorKind::Geometry,
        ErrorKind::Corrupt,
        ErrorKind::UnsupportedVersion,
        ErrorKind::Io,
        ErrorKind::Closed,
        ErrorKind::Unsupported,
        ErrorKind::PoolExhausted,
        ErrorKind::Lease,
        ErrorKind::Limit,
        ErrorKind::Device,
    ];

    /// Name used by the tools and by Python.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Config => "config",
            ErrorKind::Namespace => "namespace",
            ErrorKind::Geometry => "geometry",
            ErrorKind::Corrupt => "corrupt",
            ErrorKind::UnsupportedVersion => "unsupported_version",
            ErrorKind::Io => "io",
            ErrorKind::Closed => "closed",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::PoolExhausted => "pool_exhausted",
            ErrorKind::Lease => "lease",
            ErrorKind::Limit => "limit",
            ErrorKind::Device => "device",
        }
    }
}

/// An error: what kind, one sentence that says what was expected and what was found, and named facts.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    source: Option<std::io::Error>,
}

impl Error {
    /// An error of `kind`; `message` is lower case, without a full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), context: Vec::new(), source: None }
    }

    /// A bad option or argument.
    pub fn config(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Config, message)
    }

    /// An unusable or differing namespace or pool.
    pub fn namespace(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Namespace, message)
    }

    /// A length, slot, stride or rectangle that does not fit.
    pub fn geometry(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Geometry, message)
    }

    /// Bytes that must be whole are not.
    pub fn corrupt(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Corrupt, message)
    }

    /// A failed system call: `operation` on `path`.
    pub fn io(operation: &str, path: &std::path::Path, source: std::io::Error) -> Self {
        let mut error = Error::new(ErrorKind::Io, format!("{operation} {}: {source}", path.display()))
            .with("path", path.display());
        error.source = Some(source);
        error
    }

    /// Keeps the system's error, where there was one.
    #[must_use]
    pub(crate) fn with_source(mut self, source: Option<std::io::Error>) -> Self {
        self.source = source;
        self
    }

    /// Adds a named fact.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.context.push((name, value.to_string()));
        self
    }

    /// What kind of error this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The sentence, without the kind.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Named facts, for programs.
    pub fn context(&self) -> &[(&'static str, String)] {
        &self.context
    }

    /// The system's error code, where a system call failed.
    pub fn errno(&self) -> Option<i32> {
        self.source.as_ref().and_then(std::io::Error::raw_os_error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
