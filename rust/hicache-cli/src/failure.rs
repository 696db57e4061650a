//! Why a command could not be carried out.

use std::fmt;
use std::path::Path;

/// One sentence about it.
#[derive(Debug)]
pub struct Failure(String);

/// Exit code of a command that was carried out.
pub type Done = Result<i32, Failure>;

impl Failure {
    /// A failure in these words.
    pub fn new(message: impl Into<String>) -> Self {
        Failure(message.into())
    }

    /// A failed system call: `operation` on `path`.
    pub fn io(operation: &str, path: &Path, error: &std::io::Error) -> Self {
        Failure(format!("{operation} {}: {error}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<hicache_core::Error> for Failure {
    fn from(error: hicache_core::Error) -> Self {
        Failure(error.to_string())
    }
}

impl From<clap::Error> for Failure {
    /// The first paragraph of what clap says, on one line.
    fn from(error: clap::Error) -> Self {
        let text = error.to_string();
        let lines = text.lines().map(str::trim);
        let first: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
        let first = first.join(" ");
        let sentence = first.strip_prefix("error: ").unwrap_or(&first);
        Failure(format!("{sentence} (see hicache-store --help)"))
    }
}
