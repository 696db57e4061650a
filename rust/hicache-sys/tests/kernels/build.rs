//! Libraries compiled by the tests.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the kernels' sources.
pub fn cuda() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cuda")
}

/// A fresh folder of this test, under cargo's own folder for them.
pub fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compiles a shared library; false, with a line that says so, where there is no such compiler.
pub fn shared_library(compiler: &str, flags: &[&str], sources: &[PathBuf], out: &Path) -> bool {
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1"]).args(flags).args(sources).arg("-o").arg(out);
    match command.output() {
        Ok(run) => {
            assert!(run.status.success(), "{command:?}: {}", String::from_utf8_lossy(&run.stderr));
            true
        }
        Err(error) => {
            eprintln!("left out: {compiler}: {error}");
            false
        }
    }
}
