//! File systems of their own, so that a test sees what a root really takes, and a full one.

use std::path::{Path, PathBuf};
use std::process::Command;

use hicache_sys::probe::file_system;
use tempfile::TempDir;

/// A mounted file system that goes with the test.
pub struct Mounted {
    /// `tmpfs` or `ext4`.
    pub kind: &'static str,
    empty_bytes: u64,
    point: PathBuf,
    _folder: TempDir,
}

impl Mounted {
    /// A memory file system of so many MiB, with more options of mount.
    pub fn tmpfs(mib: u64, options: &str) -> Result<Mounted, String> {
        let (folder, point) = folder()?;
        let options = format!("size={mib}m{options}");
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&point))?;
        Mounted::new("tmpfs", folder, point)
    }

    /// An ext4 file system of so many MiB in a file.
    pub fn ext4(mib: u64) -> Result<Mounted, String> {
        let (folder, point) = folder()?;
        let image = folder.path().join("image");
        let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
        file.set_len(mib << 20).map_err(|error| error.to_string())?;
        // Nothing that changes in the background, and nothing kept back for the administrator.
        let eager =
            ["-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-O", "^has_journal"];
        run(Command::new("mkfs.ext4").args(eager).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point))?;
        Mounted::new("ext4", folder, point)
    }

    fn new(kind: &'static str, folder: TempDir, point: PathBuf) -> Result<Mounted, String> {
        let mut mounted = Mounted { kind, empty_bytes: 0, point, _folder: folder };
        mounted.empty_bytes = taken(&mounted.point);
        Ok(mounted)
    }

    /// A folder for a root in it.
    pub fn root(&self) -> PathBuf {
        self.point.join("root")
    }

    /// Its top folder.
    pub fn top(&self) -> &Path {
        &self.point
    }

    /// Bytes taken beyond those of the empty file system; files that are deleted and still open count.
    pub fn used_bytes(&self) -> u64 {
        taken(&self.point).saturating_sub(self.empty_bytes)
    }

    /// Bytes still free.
    pub fn free_bytes(&self) -> u64 {
        file_system(&self.point).unwrap().available_bytes
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a process that the test left behind must not keep the mount in view.
        let _ = Command::new("umount").arg("-l").arg(&self.point).status();
    }
}

/// Runs a test on a tmpfs and on an ext4 of so many MiB; says which one could not be had.
pub fn on_each(mib: u64, test: impl Fn(&Mounted)) {
    for mounted in [Mounted::tmpfs(mib, ""), Mounted::ext4(mib)] {
        match mounted {
            Ok(mounted) => test(&mounted),
            Err(why) => skipped(&why),
        }
    }
}

/// Says that a part of a test did not run.
pub fn skipped(why: &str) {
    println!("SKIPPED: no file system of its own can be mounted here: {why}");
}

fn folder() -> Result<(TempDir, PathBuf), String> {
    let folder = crate::support::fast_folder();
    let point = folder.path().join("mounted");
    std::fs::create_dir(&point).map_err(|error| error.to_string())?;
    Ok((folder, point))
}

fn taken(point: &Path) -> u64 {
    let found = file_system(point).unwrap();
    found.total_bytes - found.available_bytes
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
