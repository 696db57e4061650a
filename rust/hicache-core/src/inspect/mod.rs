//! Looking at a root from outside: everything that the tools show. Nothing is written, locked for long or trusted.
//!
//! A scan reads all journals and the directories of units that journals do not tell of, like the store does, but
//! of every namespace, pool and tile, and keeps what is no longer usable together with the reason.

pub mod archive;
mod collect;
mod ledger;
pub mod objects;
pub mod verify;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

pub use collect::scan;
pub use objects::{ObjectRef, ObjectState, StoredObject};
pub use verify::{Finding, FindingKind, VerifyProgress, verify};

use crate::format::form::Form;
use crate::format::frame::{Gone, Location, Reason, ShortKey};
use crate::format::ledger::{Ledger, LedgerEntry};
use crate::format::root::RootDescription;
use crate::format::setup::Setup;
use crate::format::{ProcessId, SegmentId};
use crate::namespace::{Fingerprint, Namespace};
use crate::pool::Pool;
use crate::store::counters::Counter;

/// What sort of thing is not as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProblemKind {
    /// Bytes that should be whole are not.
    Damaged,
    /// A file of the store is not there.
    Missing,
    /// The system could not read it.
    Unreadable,
    /// Not of the store; it is left alone.
    Foreign,
    /// The trace of a process that was killed. Nothing that was published is lost by it.
    LeftBehind,
}

impl ProblemKind {
    /// Name in the tools.
    pub fn name(self) -> &'static str {
        match self {
            ProblemKind::Damaged => "damaged",
            ProblemKind::Missing => "missing",
            ProblemKind::Unreadable => "unreadable",
            ProblemKind::Foreign => "foreign",
            ProblemKind::LeftBehind => "left_behind",
        }
    }

    /// Whether somebody should look at it: a killed process alone is no reason.
    pub fn is_alarming(self) -> bool {
        self != ProblemKind::LeftBehind
    }
}

/// Something in the root that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What sort of thing.
    pub kind: ProblemKind,
    /// The file or folder.
    pub path: PathBuf,
    /// What was expected and what was found.
    pub message: String,
}

/// A root as it was found.
#[derive(Debug)]
pub struct RootScan {
    /// The folder.
    pub root: PathBuf,
    /// `root.json`, where it is whole.
    pub description: Option<RootDescription>,
    /// Bytes that the files take on disk, holes not counted.
    pub used_bytes: u64,
    /// What each process may take on disk, as last written down; `None` where nobody wrote, or it is damaged.
    pub ledger: Option<Ledger>,
    /// The namespaces, by fingerprint.
    pub namespaces: Vec<NamespaceScan>,
    /// The processes that left a journal, a segment, or frames in another's journal.
    pub processes: Vec<ProcessScan>,
    /// Totals over all processes, the dead included.
    pub counters: BTreeMap<Counter, u64>,
    /// What is not as it should be.
    pub problems: Vec<Problem>,
}

/// One process that wrote to the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessScan {
    /// Its identity.
    pub process: ProcessId,
    /// Whether it holds its lock.
    pub is_alive: bool,
    /// Bytes of its journals.
    pub journal_bytes: u64,
    /// Its segment files.
    pub segments: usize,
    /// Bytes that all its files take on disk, holes not counted.
    pub disk_bytes: u64,
    /// Wall clock of its last frame, ns since 1970; 0 if it said nothing.
    pub last_frame_ns: u64,
    /// Its own totals, as last left.
    pub counters: BTreeMap<Counter, u64>,
    /// Totals of dead processes whose journals it merged into its own, as far as they are summed up.
    pub inherited: BTreeMap<Counter, u64>,
    /// How it is set up, where it said so.
    pub setup: Option<Setup>,
}

impl RootScan {
    /// What the budget's ledger says of a process. Entries of dead ones stay until the next measurement.
    pub fn granted(&self, process: ProcessId) -> Option<&LedgerEntry> {
        self.ledger.as_ref().and_then(|ledger| ledger.entry(process))
    }
}

/// One namespace as it was found.
#[derive(Debug)]
pub struct NamespaceScan {
    /// Its identity: the name of its folder.
    pub fingerprint: Fingerprint,
    /// The namespace, from its manifest or a segment; `None` if neither is whole.
    pub namespace: Option<Namespace>,
    /// Its pools, from their descriptions or a directory.
    pub pools: BTreeMap<Fingerprint, Pool>,
    /// Raised by every `clear`.
    pub generation: u64,
    /// Its segment files.
    pub segments: Vec<SegmentScan>,
    folder: PathBuf,
    forms: Vec<Form>,
    runs: Vec<RunScan>,
    gone: HashMap<Location, Reason>,
}

/// One segment file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentScan {
    /// Which one.
    pub segment: SegmentId,
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes that it takes on disk.
    pub allocated_bytes: u64,
    /// Generation of all its units; `None` when the header is damaged.
    pub generation: Option<u64>,
    /// Whether its end says that it is complete.
    pub is_sealed: bool,
    /// Whether its writer lives.
    pub is_alive: bool,
}

/// A run as told by a journal or found in a directory.
#[derive(Debug, Clone)]
struct RunScan {
    form: u32,
    segment: SegmentId,
    generation: u64,
    unit_offset: u64,
    directory_offset: u64,
    entries_offset: u64,
    payload_bytes: u64,
    depth: u32,
    written_ns: u64,
    keys: Box<[ShortKey]>,
}

impl RootScan {
    /// The namespace with this fingerprint.
    pub fn namespace(&self, fingerprint: &Fingerprint) -> Option<&NamespaceScan> {
        self.namespaces.iter().find(|namespace| namespace.fingerprint == *fingerprint)
    }

    /// Path of a file in the root, as shown to people: relative to it.
    pub fn relative<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.root).unwrap_or(path)
    }
}

impl NamespaceScan {
    fn new(fingerprint: Fingerprint, folder: PathBuf) -> Self {
        NamespaceScan {
            fingerprint,
            namespace: None,
            pools: BTreeMap::new(),
            generation: 0,
            segments: Vec::new(),
            folder,
            forms: Vec::new(),
            runs: Vec::new(),
            gone: HashMap::new(),
        }
    }

    /// Name of a pool, or its fingerprint when no description of it is whole.
    pub fn pool_name(&self, pool: &Fingerprint) -> String {
        self.pools.get(pool).map_or_else(|| format!("pool {pool}"), |pool| pool.name().to_owned())
    }

    /// Path of a segment.
    pub fn segment_path(&self, segment: SegmentId) -> PathBuf {
        self.folder.join(segment.file_name())
    }

    fn add_gone(&mut self, records: Vec<Gone>) {
        for record in records {
            let ordinals = (record.location.ordinal..u32::MAX).take(record.objects as usize);
            let places = ordinals.map(|ordinal| Location { ordinal, ..record.location });
            self.gone.extend(places.map(|location| (location, record.reason)));
        }
    }
}
