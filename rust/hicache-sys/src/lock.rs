//! Advisory locks that the kernel drops when a process dies.
//!
//! `flock`, not POSIX record locks: those vanish when any descriptor of the file closes.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::FlockOperation;

/// A held exclusive lock; dropped with the value, or with the process.
#[derive(Debug)]
pub struct FileLock {
    _file: File,
}

impl FileLock {
    /// Takes the lock on `path` (created if missing), or `None` when somebody else holds it.
    pub fn try_exclusive(path: &Path) -> io::Result<Option<FileLock>> {
        let file = crate::file::open_or_create(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(FileLock { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the lock on `path` (created if missing), waiting at most `patience`.
    pub fn exclusive_within(path: &Path, patience: std::time::Duration) -> io::Result<Option<FileLock>> {
        let deadline = std::time::Instant::now() + patience;
        loop {
            if let Some(lock) = FileLock::try_exclusive(path)? {
                return Ok(Some(lock));
            }
            if std::time::Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// Whether somebody holds the lock on `path`. A missing file is not locked. Nothing is created.
pub fn is_locked(path: &Path) -> io::Result<bool> {
    let file = match crate::file::open_read(path, crate::file::Access::Buffered) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    // Shared, so that two lookers do not see each other as the holder.
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_free_after_drop() {
        let path = std::env::temp_dir().join(format!("hicache-sys-lock-{}", std::process::id()));
        assert!(!is_locked(&path).unwrap());
        let held = FileLock::try_exclusive(&path).unwrap().expect("a free lock");
        assert!(FileLock::try_exclusive(&path).unwrap().is_none());
        assert!(is_locked(&path).unwrap());
        drop(held);
        assert!(!is_locked(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
    }
}
