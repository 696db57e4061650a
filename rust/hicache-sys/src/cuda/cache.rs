//! The disk cache of what NVRTC compiled: an image a file, written whole or not at all, verified when read.
//!
//! It may be absent, damaged, full or read-only, and two processes may write at once: the worst is that kernels are
//! compiled once more, in memory.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::hash::{HASH_START, hash_more};
use super::image::{Entry, EntryKind, Image, source_hash, write_image};
use super::nvrtc::{Nvrtc, OPTIONS};
use crate::segment_plan;

/// A compiled image, and what became of the cache.
#[derive(Debug)]
pub(crate) struct Compiled {
    /// The image: one cubin.
    pub image: Vec<u8>,
    /// What happened, in words.
    pub note: String,
}

/// The image for `architecture` from the cache, or compiled and put there.
pub(crate) fn compiled(nvrtc: &Nvrtc, architecture: u32) -> Result<Compiled, String> {
    let (major, minor) = nvrtc.version;
    let compiler = format!("NVRTC {major}.{minor} of {}", nvrtc.path);
    let folder = folder();
    let name = format!("kernels-sm_{architecture}-{:016x}.image", key(nvrtc.version, architecture));
    let file = folder.as_ref().map(|folder| folder.join(&name));
    let mut note = String::new();
    if let Some(file) = &file {
        match fs::read(file) {
            Ok(image) => match Image::read(&image) {
                Ok(_) => {
                    let note = format!("read from {}", file.display());
                    return Ok(Compiled { image, note });
                }
                Err(error) => note = format!("{} is not used: {error}; ", file.display()),
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => note = format!("{} cannot be read: {error}; ", file.display()),
        }
    }
    let cubin = nvrtc.compile(architecture)?;
    let image = write_image(&[Entry { kind: EntryKind::Cubin, architecture, code: &cubin }]);
    note += &format!("compiled by {compiler}");
    note += &match (folder, file) {
        (Some(folder), Some(file)) => match store(&folder, &file, &image) {
            Ok(()) => format!(", kept in {}", file.display()),
            Err(error) => format!(", not kept: {}: {error}", folder.display()),
        },
        _ => ", not kept: neither HICACHE_CACHE_DIR nor XDG_CACHE_HOME nor HOME is set".to_owned(),
    };
    Ok(Compiled { image, note })
}

/// Everything that the cubin follows from.
fn key(version: (i32, i32), architecture: u32) -> u64 {
    let mut hash = hash_more(HASH_START, &source_hash().to_le_bytes());
    for number in [segment_plan::ABI, architecture, version.0 as u32, version.1 as u32] {
        hash = hash_more(hash, &number.to_le_bytes());
    }
    OPTIONS.iter().fold(hash, |hash, option| hash_more(hash, option.to_bytes_with_nul()))
}

fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HICACHE_CACHE_DIR")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("hicache_store")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/hicache_store")))
        .map(|folder| folder.join("kernels"))
}

/// Writes beside the place and moves there: a reader sees the whole file or none.
fn store(folder: &Path, file: &Path, image: &[u8]) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let temporary = folder.join(format!(".{}-{:?}.new", std::process::id(), std::thread::current().id()));
    let mut open = OpenOptions::new();
    let written = open
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut out| out.write_all(image))
        .and_then(|()| fs::rename(&temporary, file));
    if written.is_err() {
        // What cannot be written is not left behind; that it cannot be removed either is no second error.
        let _ = fs::remove_file(&temporary);
    }
    written
}
