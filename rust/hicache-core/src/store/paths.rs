//! Where things are in a root.

use std::path::{Path, PathBuf};

use crate::format::{ProcessId, SegmentId};
use crate::namespace::Fingerprint;

/// Names of the files and folders of one root.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The root itself.
    pub root: PathBuf,
}

impl Paths {
    /// Paths below `root`.
    pub fn new(root: &Path) -> Self {
        Paths { root: root.to_owned() }
    }

    /// `root.json`.
    pub fn description(&self) -> PathBuf {
        self.root.join("root.json")
    }

    /// The budget's ledger, changed under its lock.
    pub fn budget(&self) -> PathBuf {
        self.root.join("budget")
    }

    /// Lock of whoever makes room.
    pub fn evict(&self) -> PathBuf {
        self.root.join("evict")
    }

    /// Folder of the journals and process locks.
    pub fn journals(&self) -> PathBuf {
        self.root.join("journal")
    }

    /// Journal `number` of `process`.
    pub fn journal(&self, process: ProcessId, number: u32) -> PathBuf {
        self.journals().join(journal_name(process, number))
    }

    /// Lock that `process` holds while it lives.
    pub fn process_lock(&self, process: ProcessId) -> PathBuf {
        self.journals().join(format!("{process}.lock"))
    }

    /// Tells whether anybody said anything, see [`crate::store::news`].
    pub fn news(&self) -> PathBuf {
        self.journals().join(NEWS)
    }

    /// Folder of the namespaces.
    pub fn namespaces(&self) -> PathBuf {
        self.root.join("ns")
    }

    /// Folder of one namespace. Its name is the fingerprint, so that no name of a model becomes a path.
    pub fn namespace(&self, namespace: &Fingerprint) -> PathBuf {
        self.namespaces().join(namespace.to_string())
    }

    /// The namespace in words.
    pub fn manifest(&self, namespace: &Fingerprint) -> PathBuf {
        self.namespace(namespace).join("manifest.json")
    }

    /// A pool of the namespace in words.
    pub fn pool(&self, namespace: &Fingerprint, pool: &Fingerprint) -> PathBuf {
        self.namespace(namespace).join(format!("pool-{pool}.json"))
    }

    /// The namespace's generation, raised by `clear`.
    pub fn generation(&self, namespace: &Fingerprint) -> PathBuf {
        self.namespace(namespace).join("generation")
    }

    /// Lock under which the generation is raised.
    pub fn generation_lock(&self, namespace: &Fingerprint) -> PathBuf {
        self.namespace(namespace).join("generation.lock")
    }

    /// A segment of the namespace.
    pub fn segment(&self, namespace: &Fingerprint, segment: SegmentId) -> PathBuf {
        self.namespace(namespace).join(segment.file_name())
    }

    /// A short temporary name beside `path`'s siblings, that no other process uses.
    pub fn temporary(folder: &Path, owner: ProcessId, counter: u64) -> PathBuf {
        folder.join(format!("tmp-{owner}-{counter}"))
    }
}

/// Name of the file that tells whether anybody said anything.
pub const NEWS: &str = "news";

/// Name of journal `number` of `process`.
pub fn journal_name(process: ProcessId, number: u32) -> String {
    format!("{process}-{number}.idx")
}

/// The journal that a file of this name holds; `None` for any other name.
pub fn parse_journal_name(name: &str) -> Option<(ProcessId, u32)> {
    let (process, number) = name.strip_suffix(".idx")?.split_once('-')?;
    let (process, number) = (process.parse().ok()?, number.parse().ok()?);
    (journal_name(process, number) == name).then_some((process, number))
}

/// The process whose lock a file of this name is; `None` for any other name.
pub fn parse_lock_name(name: &str) -> Option<ProcessId> {
    name.strip_suffix(".lock")?.parse().ok()
}

/// The process whose temporary file has this name; `None` for any other name.
pub fn parse_temporary_name(name: &str) -> Option<ProcessId> {
    let (process, number) = name.strip_prefix("tmp-")?.split_once('-')?;
    number.parse::<u64>().ok()?;
    process.parse().ok()
}
