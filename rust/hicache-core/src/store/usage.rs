//! What the files of a root take on disk, and whose they are.

use std::collections::HashMap;
use std::path::Path;

use crate::format::{ProcessId, SegmentId};
use crate::store::paths::{NEWS, Paths, parse_journal_name, parse_lock_name, parse_temporary_name};
use crate::store::root::list;

/// Bytes on disk (`st_blocks`, holes not counted) of our own files and folders below a root.
#[derive(Debug, Default)]
pub struct Usage {
    /// All of them.
    pub total: u64,
    by_process: HashMap<ProcessId, u64>,
}

impl Usage {
    /// Measures: each folder is listed once, each of our files looked at once. Other people's files do not count.
    pub fn measure(paths: &Paths) -> Usage {
        let mut usage = Usage::default();
        usage.add(&paths.root, None);
        usage.add_files(&paths.root, root_owner);
        usage.add(&paths.journals(), None);
        usage.add_files(&paths.journals(), journal_owner);
        usage.add(&paths.namespaces(), None);
        for name in list(&paths.namespaces()) {
            if name.parse::<ProcessId>().is_ok() {
                let folder = paths.namespaces().join(name);
                usage.add(&folder, None);
                usage.add_files(&folder, namespace_owner);
            }
        }
        usage
    }

    /// Bytes of the files that a process wrote: segments, journals, its lock, temporaries.
    pub fn of(&self, process: ProcessId) -> u64 {
        self.by_process.get(&process).copied().unwrap_or_default()
    }

    fn add_files(&mut self, folder: &Path, owner: impl Fn(&str) -> Option<Owner>) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if let Some(owner) = name.to_str().and_then(&owner)
                && let Ok(metadata) = entry.metadata()
                && metadata.is_file()
            {
                self.count(hicache_sys::file::allocated_bytes(&metadata), owner);
            }
        }
    }

    fn add(&mut self, folder: &Path, owner: Owner) {
        if let Ok(metadata) = std::fs::symlink_metadata(folder)
            && metadata.is_dir()
        {
            self.count(hicache_sys::file::allocated_bytes(&metadata), owner);
        }
    }

    fn count(&mut self, bytes: u64, owner: Owner) {
        self.total += bytes;
        if let Some(process) = owner {
            *self.by_process.entry(process).or_default() += bytes;
        }
    }
}

/// The process that a file belongs to, if it belongs to one.
type Owner = Option<ProcessId>;

fn root_owner(name: &str) -> Option<Owner> {
    let ours = ["root.json", "budget", "evict"].contains(&name);
    if ours { Some(None) } else { parse_temporary_name(name).map(Some) }
}

fn journal_owner(name: &str) -> Option<Owner> {
    if name == NEWS {
        return Some(None);
    }
    let process = parse_journal_name(name).map(|(process, _)| process);
    process.or_else(|| parse_lock_name(name)).or_else(|| parse_temporary_name(name)).map(Some)
}

fn namespace_owner(name: &str) -> Option<Owner> {
    let in_words = ["manifest.json", "generation", "generation.lock"].contains(&name)
        || (name.starts_with("pool-") && name.ends_with(".json"));
    if in_words {
        return Some(None);
    }
    let segment = SegmentId::from_file_name(name).map(|segment| segment.process);
    segment.or_else(|| parse_temporary_name(name)).map(Some)
}
