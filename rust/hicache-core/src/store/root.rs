//! The root folder: made, checked, described, measured.

use std::io;
use std::path::Path;

use crate::format::ProcessId;
use crate::format::root::{RootDescription, RootFile};
use crate::store::notices::{Level, Notices};
use crate::store::options::{MIN_CAPACITY_BYTES, StoreOptions};
use crate::store::paths::Paths;
use crate::{Error, ErrorKind, Result};

/// Opens the root at `paths`, made now if the folder is missing or empty and `options` allow writing.
///
/// # Errors
/// `Config` for a folder with other things in it, `Unsupported` for a link in place of one of our folders or a
/// file system that several hosts may share, `UnsupportedVersion` for a newer format, `Io` otherwise.
pub fn open(
    paths: &Paths,
    options: &StoreOptions,
    process: ProcessId,
    notices: &Notices,
) -> Result<RootDescription> {
    let root = &paths.root;
    match std::fs::metadata(root) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(Error::config(format!("expected a folder, found a file at {}", root.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound && options.read_only => {
            return Err(Error::config(format!(
                "expected a store at {}, found nothing there",
                root.display()
            )));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_root(root)?;
        }
        Err(error) => return Err(Error::io("cannot open", root, error)),
    }
    refuse_foreign(paths)?;
    if options.read_only {
        return Ok(read_description(paths)?.unwrap_or_else(unknown_description));
    }
    refuse_shared_file_system(root)?;
    if let Some(found) = read_description(paths)? {
        make_folders(paths)?;
        if let Some(asked) = options.capacity_bytes.filter(|&asked| asked != found.capacity_bytes) {
            notices.push(Level::Warning, "capacity", || {
                format!(
                    "the root's capacity is {} bytes; {asked} bytes asked for are ignored",
                    found.capacity_bytes
                )
            });
        }
        return Ok(found);
    }
    let damaged = paths.description().exists();
    let description = new_description(root, options)?;
    let temporary = Paths::temporary(root, process, 0);
    let publish = if damaged {
        // Capacity and uuid are all it knew; segments and journals describe themselves.
        notices.push(Level::Warning, "root", || {
            format!("{} is damaged; written anew", paths.description().display())
        });
        hicache_sys::file::publish_replacing(&paths.description(), &temporary, &description.encode())
            .map(|()| true)
    } else {
        hicache_sys::file::publish_new(&paths.description(), &temporary, &description.encode())
    };
    let published = publish.map_err(|error| Error::io("cannot create", &paths.description(), error))?;
    make_folders(paths)?;
    if published {
        return Ok(description);
    }
    // Another process made the root at the same time: its description holds.
    read_description(paths)?.ok_or_else(|| {
        Error::corrupt(format!(
            "{} was made by another process and is damaged",
            paths.description().display()
        ))
    })
}

/// Makes the root's own folder, and no other: a mistyped path, or a disk that is not mounted, is no place for it.
fn make_root(root: &Path) -> Result<()> {
    match std::fs::create_dir(root) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = root.parent().unwrap_or(root);
            Err(Error::config(format!(
                "expected the folder {} to exist, found nothing there: it is not made for {}",
                parent.display(),
                root.display()
            )))
        }
        Err(error) => Err(Error::io("cannot create", root, error)),
    }
}

/// Reads `root.json`; `None` when it is missing or damaged.
pub fn read_description(paths: &Paths) -> Result<Option<RootDescription>> {
    let path = paths.description();
    let bytes = match read_file(&path, 1 << 20) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("cannot read", &path, error)),
    };
    match RootDescription::decode(&bytes).map_err(|error| error.with("path", path.display()))? {
        RootFile::Whole(description) => Ok(Some(description)),
        RootFile::Damaged(_) => Ok(None),
    }
}

/// Reads a small file, never more than `most` bytes, through no link.
pub fn read_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let file = hicache_sys::file::open_read(path, hicache_sys::file::Access::Buffered)?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Names in a folder, sorted; none when it cannot be read.
pub fn list(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn refuse_foreign(paths: &Paths) -> Result<()> {
    let entries =
        std::fs::read_dir(&paths.root).map_err(|error| Error::io("cannot list", &paths.root, error))?;
    let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    let ours = |name: &&std::ffi::OsString| ["root.json", "ns", "journal"].iter().any(|own| **name == **own);
    if names.iter().any(|name| ours(&name)) {
        for folder in [paths.namespaces(), paths.journals()] {
            if std::fs::symlink_metadata(&folder).is_ok_and(|metadata| !metadata.is_dir()) {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("expected a folder, found a link or file at {}", folder.display()),
                ));
            }
        }
        return Ok(());
    }
    let left_behind = |name: &&std::ffi::OsString| {
        name.to_str().is_some_and(|name| name.starts_with("tmp-") || ["budget", "evict"].contains(&name))
    };
    // A new file system has lost+found at its top.
    match names.iter().find(|name| !left_behind(name) && **name != *"lost+found") {
        None => Ok(()),
        Some(other) => Err(Error::config(format!(
            "expected a store or an empty folder at {}, found {} other entries, among them {:?}",
            paths.root.display(),
            names.len(),
            other
        ))),
    }
}

fn refuse_shared_file_system(root: &Path) -> Result<()> {
    let found =
        hicache_sys::probe::file_system(root).map_err(|error| Error::io("cannot look at", root, error))?;
    if found.is_local {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "expected a file system of one host (ext4, xfs, btrfs, tmpfs, overlay, zfs, f2fs), found {} at {}: locks \
             and caches of hosts that share it are not coherent",
            found.kind,
            root.display()
        ),
    ))
}

fn new_description(root: &Path, options: &StoreOptions) -> Result<RootDescription> {
    let capacity_bytes = match options.capacity_bytes {
        Some(capacity) => capacity,
        None => {
            let found = hicache_sys::probe::file_system(root)
                .map_err(|error| Error::io("cannot look at", root, error))?;
            (found.available_bytes / 2).max(MIN_CAPACITY_BYTES)
        }
    };
    let uuid = ProcessId::random()?.to_string();
    Ok(RootDescription { uuid, capacity_bytes, created_ns: crate::store::now_ns() })
}

/// Stands in for a description that cannot be read, in a root that is only looked at.
fn unknown_description() -> RootDescription {
    RootDescription { uuid: String::new(), capacity_bytes: 0, created_ns: 0 }
}

fn make_folders(paths: &Paths) -> Result<()> {
    for folder in [paths.namespaces(), paths.journals()] {
        match std::fs::create_dir(&folder) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::io("cannot create", &folder, error)),
        }
    }
    Ok(())
}
