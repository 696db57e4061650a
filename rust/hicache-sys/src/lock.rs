//! Advisory locks that the kernel drops when a process dies.
//!
//! `flock`, not POSIX record locks: those vanish when any descriptor of the file closes.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use crate::file::{self, Access};
use crate::fork::Guarded;

/// A held exclusive lock; dropped with the value, or with the process. A forked child does not hold it.
#[derive(Debug)]
pub struct FileLock {
    file: Guarded,
}

impl FileLock {
    /// Takes the lock on `path` (created if missing), or `None` when somebody else holds it.
    ///
    /// # Errors
    /// Those of opening the file; `QuotaExceeded` when the process holds [`crate::fork::MAX_GUARDED`] locks.
    pub fn try_exclusive(path: &Path) -> io::Result<Option<FileLock>> {
        loop {
            match lock_file(|| file::open_or_create(path))? {
                // Somebody unlinked the file meanwhile: a lock on it is a lock on nothing.
                Some(lock) if !lock.is_at(path)? => {}
                locked => return Ok(locked),
            }
        }
    }

    /// Takes the lock on `path`, or `None` when there is no such file or somebody else holds it.
    pub fn try_existing(path: &Path) -> io::Result<Option<FileLock>> {
        match lock_file(|| file::open_write(path, Access::Buffered)) {
            Ok(Some(lock)) => Ok(lock.is_at(path)?.then_some(lock)),
            Ok(None) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the lock on `path` (created if missing), waiting at most `patience`.
    pub fn exclusive_within(path: &Path, patience: Duration) -> io::Result<Option<FileLock>> {
        let deadline = Instant::now() + patience;
        let mut pause = Duration::from_micros(50);
        loop {
            if let Some(lock) = FileLock::try_exclusive(path)? {
                return Ok(Some(lock));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(1));
        }
    }

    /// The locked file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether `path` still names the locked file.
    fn is_at(&self, path: &Path) -> io::Result<bool> {
        let here = self.file.metadata()?;
        match std::fs::symlink_metadata(path) {
            Ok(there) => Ok((here.dev(), here.ino()) == (there.dev(), there.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn lock_file(open: impl FnOnce() -> io::Result<File>) -> io::Result<Option<FileLock>> {
    let file = Guarded::open(open)?;
    match rustix::fs::flock(&*file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(FileLock { file })),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether somebody holds the lock on `path`. A missing file is not locked. Nothing is created.
pub fn is_locked(path: &Path) -> io::Result<bool> {
    // Guarded too: the look is a lock, for a moment.
    let file = match Guarded::open(|| file::open_read(path, Access::Buffered)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    // Shared, so that two lookers do not see each other as the holder.
    match rustix::fs::flock(&*file, FlockOperation::NonBlockingLockShared) {
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
        let _alone = crate::fork::ONE_AT_A_TIME.lock();
        let path = std::env::temp_dir().join(format!("hicache-sys-lock-{}", std::process::id()));
        assert!(!is_locked(&path).unwrap());
        let held = FileLock::try_exclusive(&path).unwrap().expect("a free lock");
        assert!(FileLock::try_exclusive(&path).unwrap().is_none());
        assert!(is_locked(&path).unwrap());
        drop(held);
        assert!(!is_locked(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_lock_is_on_the_file_that_the_path_names() {
        let _alone = crate::fork::ONE_AT_A_TIME.lock();
        let path = std::env::temp_dir().join(format!("hicache-sys-lock-gone-{}", std::process::id()));
        assert!(FileLock::try_existing(&path).unwrap().is_none());
        assert!(!path.exists(), "looking for a lock made its file");
        let gone = FileLock::try_exclusive(&path).unwrap().expect("a free lock");
        assert!(FileLock::try_existing(&path).unwrap().is_none());
        std::fs::remove_file(&path).unwrap();
        // Whoever had opened the old file before it went would get its lock now, beside the holder of the new one.
        let opened = Guarded::open(|| file::open_or_create(&path)).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!FileLock { file: opened }.is_at(&path).unwrap());
        let new = FileLock::try_exclusive(&path).unwrap().expect("a lock on the new file");
        assert!(new.is_at(&path).unwrap() && !gone.is_at(&path).unwrap());
        drop(new);
        assert!(FileLock::try_existing(&path).unwrap().is_some());
        std::fs::remove_file(&path).unwrap();
    }
}
