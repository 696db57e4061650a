//! Reading a whole root.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use hicache_sys::file::{self, Access};

use crate::format::frame::{self, FRAME_HEADER_BYTES, Frame, FrameKind, Location};
use crate::format::root::{RootDescription, RootFile, decode_generation};
use crate::format::setup::Setup;
use crate::format::{ProcessId, SegmentId};
use crate::inspect::ProblemKind::{Damaged, Foreign, LeftBehind, Missing, Unreadable};
use crate::inspect::{
    NamespaceScan, Problem, ProblemKind, ProcessScan, RootScan, RunScan, SegmentScan, ledger,
};
use crate::namespace::{Fingerprint, Namespace};
use crate::pool::Pool;
use crate::store::counters::Counter;
use crate::store::paths::{NEWS, Paths, parse_journal_name};
use crate::store::recover::{self, KnownUnits};
use crate::store::root::read_file;
use crate::store::tail::{Sequences, is_alive, read_frames};
use crate::store::usage::Usage;
use crate::{Error, Result};

/// Longest small file that is read: a manifest, a description.
const MAX_WORDS_BYTES: u64 = 1 << 20;

/// Listings of the journals' folder, each but the first because journals came during the one before.
const LISTING_ROUNDS: u32 = 8;

/// Reads the root at `path`.
///
/// # Errors
/// `Config` when there is no store, `UnsupportedVersion` for a newer format. Everything else that is not as it
/// should be is a problem of the scan, not an error.
pub fn scan(path: &Path) -> Result<RootScan> {
    let mut collector = Collector::new(path)?;
    collector.read_description()?;
    collector.read_ledger();
    collector.read_namespaces();
    collector.read_journals();
    collector.read_silent_units();
    Ok(collector.finish())
}

struct Collector {
    paths: Paths,
    scan: RootScan,
    namespaces: BTreeMap<Fingerprint, NamespaceScan>,
    processes: BTreeMap<ProcessId, ProcessScan>,
    known: HashMap<Fingerprint, KnownUnits>,
    form_numbers: HashMap<(Fingerprint, crate::format::form::Form), u32>,
    sequences: Sequences,
    /// Runs that were told of, by their segment and first entry.
    told: HashSet<(SegmentId, u64)>,
    /// Whether a journal was written anew or merged, which leaves out what was removed together with its segment.
    is_rewritten: bool,
}

impl Collector {
    fn new(path: &Path) -> Result<Self> {
        let paths = Paths::new(path);
        if !path.is_dir() {
            return Err(Error::config(format!(
                "expected a store at {}, found no folder there",
                path.display()
            )));
        }
        if ![paths.description(), paths.namespaces(), paths.journals()].iter().any(|path| path.exists()) {
            return Err(Error::config(format!(
                "expected a store at {}, found neither root.json nor ns nor journal in it",
                path.display()
            )));
        }
        let scan = RootScan {
            root: path.to_owned(),
            description: None,
            used_bytes: 0,
            ledger: None,
            namespaces: Vec::new(),
            processes: Vec::new(),
            counters: BTreeMap::new(),
            problems: Vec::new(),
        };
        Ok(Collector {
            paths,
            scan,
            namespaces: BTreeMap::new(),
            processes: BTreeMap::new(),
            known: HashMap::new(),
            form_numbers: HashMap::new(),
            sequences: Sequences::default(),
            told: HashSet::new(),
            is_rewritten: false,
        })
    }

    fn problem(&mut self, kind: ProblemKind, path: &Path, message: impl Into<String>) {
        self.scan.problems.push(Problem { kind, path: path.to_owned(), message: message.into() });
    }

    fn unreadable(&mut self, path: &Path, what: &str, error: &std::io::Error) {
        let kind = if error.kind() == std::io::ErrorKind::NotFound { Missing } else { Unreadable };
        self.problem(kind, path, format!("{what}: {error}"));
    }

    /// A file under no name of the store: a temporary one of a process, or somebody else's.
    fn other(&mut self, path: &Path) {
        let name = path.file_name().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
        let owner = name.strip_prefix("tmp-").and_then(|rest| rest.split_once('-'));
        match owner.and_then(|(owner, _)| owner.parse::<ProcessId>().ok()) {
            Some(owner) if is_alive(&self.paths, owner) => {}
            Some(_) => self.problem(LeftBehind, path, "left behind by a process that was killed"),
            None => self.problem(Foreign, path, "not a file of the store"),
        }
    }

    /// Names in a folder, sorted, of whatever bytes; a problem when it cannot be read.
    fn list(&mut self, folder: &Path) -> Vec<std::ffi::OsString> {
        match std::fs::read_dir(folder) {
            Ok(entries) => {
                let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
                names.sort();
                names
            }
            Err(error) => {
                self.unreadable(folder, "cannot list", &error);
                Vec::new()
            }
        }
    }

    fn read_description(&mut self) -> Result<()> {
        let path = self.paths.description();
        match read_file(&path, MAX_WORDS_BYTES) {
            Ok(bytes) => match RootDescription::decode(&bytes)? {
                RootFile::Whole(description) => self.scan.description = Some(description),
                RootFile::Damaged(why) => self.problem(Damaged, &path, format!("damaged: {why}")),
            },
            Err(error) => self.unreadable(&path, "cannot read", &error),
        }
        for name in self.list(&self.paths.root.clone()) {
            if ["root.json", "budget", "evict", "ns", "journal", "lost+found"].iter().all(|own| name != *own)
            {
                self.other(&self.paths.root.join(&name));
            }
        }
        Ok(())
    }

    fn read_ledger(&mut self) {
        match ledger::read(&self.paths) {
            ledger::Found::Whole(ledger) => self.scan.ledger = Some(ledger),
            ledger::Found::Nothing => {}
            ledger::Found::Damaged => {
                self.problem(Damaged, &self.paths.budget(), "damaged; the next write measures anew");
            }
        }
    }

    fn read_namespaces(&mut self) {
        let folder = self.paths.namespaces();
        for name in self.list(&folder) {
            let path = folder.join(&name);
            let is_folder = std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_dir());
            match name.to_str().map(str::parse::<Fingerprint>) {
                Some(Ok(fingerprint)) if is_folder && name == *fingerprint.to_string() => {
                    let namespace = self.read_namespace(fingerprint, &path);
                    self.namespaces.insert(fingerprint, namespace);
                }
                _ => self.problem(Foreign, &path, "not a namespace folder"),
            }
        }
    }

    fn read_namespace(&mut self, fingerprint: Fingerprint, folder: &Path) -> NamespaceScan {
        let mut found = NamespaceScan::new(fingerprint, folder.to_owned());
        for name in self.list(folder) {
            let path = folder.join(&name);
            let name = name.to_str().unwrap_or_default();
            if let Some(segment) = SegmentId::from_file_name(name) {
                self.read_segment(&mut found, segment, &path);
            } else if name == "manifest.json" {
                match words(&path, Namespace::from_json) {
                    Ok(namespace) if namespace.fingerprint() == fingerprint => {
                        found.namespace = Some(namespace)
                    }
                    Ok(_) => self.problem(
                        Damaged,
                        &path,
                        "describes another namespace than its folder's name says",
                    ),
                    Err((kind, why)) => self.problem(kind, &path, why),
                }
            } else if let Some(pool) = name.strip_prefix("pool-").and_then(|name| name.strip_suffix(".json"))
            {
                match words(&path, Pool::from_json) {
                    Ok(found_pool) if found_pool.fingerprint().to_string() == pool => {
                        found.pools.insert(found_pool.fingerprint(), found_pool);
                    }
                    Ok(_) => self.problem(Damaged, &path, "describes another pool than its name says"),
                    Err((kind, why)) => self.problem(kind, &path, why),
                }
            } else if name == "generation" {
                match read_file(&path, MAX_WORDS_BYTES).ok().and_then(|bytes| decode_generation(&bytes)) {
                    Some(generation) => found.generation = generation,
                    None => self.problem(Damaged, &path, "damaged"),
                }
            } else if name != "generation.lock" {
                self.other(&path);
            }
        }
        // A folder without segments is being made, or its maker was killed on the way.
        if !folder.join("manifest.json").exists() && !found.segments.is_empty() {
            self.problem(Missing, &folder.join("manifest.json"), "missing; the segments say the same");
        }
        found
    }

    fn read_segment(&mut self, found: &mut NamespaceScan, segment: SegmentId, path: &Path) {
        let alive = is_alive(&self.paths, segment.process);
        self.process(segment.process, alive).segments += 1;
        let opened = file::open_read(path, Access::Buffered).and_then(|file| {
            let metadata = file.metadata()?;
            Ok((file, metadata))
        });
        let (file, metadata) = match opened {
            Ok(opened) => opened,
            // `clear` took it away since the folder was listed.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
            Err(error) => return self.unreadable(path, "cannot open", &error),
        };
        let header = recover::read_header(&file);
        match &header {
            Ok(header)
                if header.segment == segment && header.namespace.fingerprint() == found.fingerprint =>
            {
                found.namespace.get_or_insert_with(|| header.namespace.clone());
                found.generation = found.generation.max(header.generation);
            }
            Ok(header) => {
                let message = format!(
                    "its header says {} of namespace {}: the file was moved or renamed",
                    header.segment,
                    header.namespace.fingerprint()
                );
                self.problem(Damaged, path, message);
            }
            // The header is written after the file is made.
            Err(_) if metadata.len() == 0 && alive => {}
            Err(_) if metadata.len() == 0 => self.problem(LeftBehind, path, "empty: its writer was killed"),
            Err(damage) => self.problem(Damaged, path, damage.to_string()),
        }
        let seal = recover::read_seal(&file, metadata.len());
        found.segments.push(SegmentScan {
            segment,
            file_bytes: metadata.len(),
            allocated_bytes: file::allocated_bytes(&metadata),
            generation: header.ok().map(|header| header.generation),
            is_sealed: seal.is_ok_and(|(seal, _)| seal.segment == segment),
            is_alive: alive,
        });
    }

    fn process(&mut self, process: ProcessId, is_alive: bool) -> &mut ProcessScan {
        self.processes.entry(process).or_insert_with(|| ProcessScan {
            process,
            is_alive,
            journal_bytes: 0,
            segments: 0,
            disk_bytes: 0,
            last_frame_ns: 0,
            counters: BTreeMap::new(),
            inherited: BTreeMap::new(),
            setup: None,
        })
    }

    fn read_journals(&mut self) {
        let folder = self.paths.journals();
        let mut read = HashSet::new();
        // Journals are written anew and merged beside us: what one that went held is in one that came.
        for round in 0..LISTING_ROUNDS {
            let mut journals: BTreeMap<ProcessId, BTreeSet<u32>> = BTreeMap::new();
            for name in self.list(&folder) {
                let path = folder.join(&name);
                let name = name.to_str().unwrap_or_default();
                let is_lock = name.strip_suffix(".lock").is_some_and(|id| id.parse::<ProcessId>().is_ok());
                match parse_journal_name(name) {
                    Some(id) if read.insert(id) => {
                        journals.entry(id.0).or_default().insert(id.1);
                    }
                    None if round == 0 && !is_lock && name != NEWS => self.other(&path),
                    _ => {}
                }
            }
            if journals.is_empty() {
                break;
            }
            for (owner, numbers) in journals {
                self.read_journals_of(owner, &numbers);
            }
        }
    }

    /// Reads journals of one owner in their order: one that starts with a checkpoint replaces those before it.
    fn read_journals_of(&mut self, owner: ProcessId, numbers: &BTreeSet<u32>) {
        let alive = is_alive(&self.paths, owner);
        self.process(owner, alive);
        let mut open = Vec::new();
        for &number in numbers {
            let path = self.paths.journal(owner, number);
            let opened = file::open_read(&path, Access::Buffered).and_then(|file| {
                let len = file.metadata()?.len();
                Ok((path.clone(), starts_with_checkpoint(&file)?, len, file))
            });
            match opened {
                Ok(opened) => open.push(opened),
                // Replaced or merged since the folder was listed.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => self.unreadable(&path, "cannot read", &error),
            }
        }
        let first = open.iter().rposition(|(_, is_checkpoint, ..)| *is_checkpoint).unwrap_or(0);
        for (index, (path, _, len, file)) in open.iter().enumerate() {
            self.process(owner, alive).journal_bytes += len;
            if index >= first {
                self.read_journal(owner, path, file, *len);
            } else if !alive {
                self.problem(LeftBehind, path, "replaced by a later journal; its writer was killed");
            }
        }
    }

    fn read_journal(&mut self, owner: ProcessId, path: &Path, file: &std::fs::File, len: u64) {
        let alive = is_alive(&self.paths, owner);
        let read = match read_frames(file, 0, len, &mut Vec::new(), &mut |frame| {
            self.is_rewritten |= frame.kind == FrameKind::Checkpoint || frame.process != owner;
            self.take(frame);
        }) {
            Ok(read) => read,
            // Cut, since it was replaced or merged.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return,
            Err(error) => return self.unreadable(path, "cannot read", &error),
        };
        if read.damaged_stretches > 0 {
            let message = format!("{} damaged stretches, passed over", read.damaged_stretches);
            self.problem(Damaged, path, message);
        }
        if read.position < len && !alive {
            let rest = len - read.position;
            let message = format!("the last {rest} bytes are no whole frame: its writer was killed");
            self.problem(LeftBehind, path, message);
        }
    }

    fn take(&mut self, frame: &Frame<'_>) {
        if frame.kind == FrameKind::Checkpoint || !self.sequences.take(frame) {
            return;
        }
        let process = self.process(frame.process, false);
        process.last_frame_ns = process.last_frame_ns.max(frame.written_ns);
        match frame.kind {
            FrameKind::Counters => process.counters = named_counters(frame.body),
            FrameKind::Inherited => process.inherited = named_counters(frame.body),
            FrameKind::Setup => process.setup = Setup::decode(frame.body),
            _ => {}
        }
        let Some(namespace) = self.namespaces.get_mut(&frame.namespace) else { return };
        match frame.kind {
            FrameKind::Add => {
                let (numbers, told) = (&mut self.form_numbers, &mut self.told);
                let added = frame::decode_add(frame.body, |unit, run| {
                    if told.insert((unit.segment, run.entries_offset)) {
                        namespace.add_run(numbers, unit, &run, frame.written_ns);
                    }
                });
                if let Ok(unit) = added {
                    let known = self.known.entry(frame.namespace).or_default();
                    known.entry(unit.segment).or_default().push((unit.unit_offset, unit.unit_bytes));
                }
            }
            FrameKind::Remove | FrameKind::Quarantine => {
                if let Ok(records) = frame::decode_gone(frame.body) {
                    namespace.add_gone(records);
                }
            }
            _ => {}
        }
    }

    /// Units of dead writers that no journal told of.
    fn read_silent_units(&mut self) {
        let mut missing = Vec::new();
        for namespace in self.namespaces.values_mut() {
            let fingerprint = namespace.fingerprint;
            let mut known = self.known.remove(&fingerprint).unwrap_or_default();
            let segments: Vec<SegmentScan> = namespace.segments.clone();
            let there: HashSet<SegmentId> = segments.iter().map(|segment| segment.segment).collect();
            for id in known.keys().filter(|id| !there.contains(id)) {
                let path = namespace.segment_path(*id);
                // A live writer may have made it since the folder was listed.
                if std::fs::symlink_metadata(&path).is_ok() {
                    continue;
                }
                // The removes of a segment go with it where a journal was written anew: then nothing is amiss.
                match self.is_rewritten {
                    true => namespace.runs.retain(|run| run.segment != *id),
                    false => missing.push((path, namespace.runs_lost(*id))),
                }
            }
            for segment in segments {
                let known = known.entry(segment.segment).or_default();
                known.sort_unstable();
                let path = namespace.segment_path(segment.segment);
                if segment.is_alive {
                    continue;
                }
                let Ok(found) = recover::unknown_directories(&path, segment.segment, known) else { continue };
                for directory in found.iter().filter(|found| found.header.namespace == fingerprint) {
                    let written_ns = directory.header.written_ns;
                    recover::announce(directory, |unit, run| {
                        if self.told.insert((unit.segment, run.entries_offset)) {
                            namespace.add_run(&mut self.form_numbers, unit, run, written_ns);
                        }
                    });
                    for run in &directory.runs {
                        if let Ok(pool) = Pool::from_canonical_bytes(&run.run.pool_bytes) {
                            namespace.pools.entry(pool.fingerprint()).or_insert(pool);
                        }
                    }
                }
            }
        }
        for (path, pages) in missing.into_iter().filter(|(_, pages)| *pages > 0) {
            self.problem(Missing, &path, format!("missing, with {pages} objects that were stored in it"));
        }
    }

    fn finish(mut self) -> RootScan {
        let usage = Usage::measure(&self.paths);
        self.scan.used_bytes = usage.total;
        let mut processes: Vec<ProcessScan> = self.processes.into_values().collect();
        for process in &mut processes {
            process.disk_bytes = usage.of(process.process);
            for (&counter, value) in process.counters.iter().chain(&process.inherited) {
                let total = self.scan.counters.entry(counter).or_default();
                *total = total.saturating_add(*value);
            }
        }
        self.scan.processes = processes;
        self.scan.namespaces = self.namespaces.into_values().collect();
        self.scan
    }
}

impl NamespaceScan {
    fn add_run(
        &mut self,
        numbers: &mut HashMap<(Fingerprint, crate::format::form::Form), u32>,
        unit: &frame::AddUnit,
        run: &frame::AddRun<'_>,
        written_ns: u64,
    ) {
        let next = self.forms.len() as u32;
        let form = *numbers.entry((self.fingerprint, run.form)).or_insert_with(|| {
            self.forms.push(run.form);
            next
        });
        self.generation = self.generation.max(unit.generation);
        let (keys, _) = run.keys.as_chunks::<16>();
        self.runs.push(RunScan {
            form,
            segment: unit.segment,
            generation: unit.generation,
            unit_offset: unit.unit_offset,
            directory_offset: unit.directory_offset,
            entries_offset: run.entries_offset,
            payload_bytes: run.payload_bytes,
            depth: run.depth,
            written_ns,
            keys: keys.into(),
        });
    }

    /// Live objects in a segment.
    fn runs_lost(&self, segment: SegmentId) -> usize {
        let of_run = |run: &RunScan| {
            let ordinals = 0..run.keys.len() as u32;
            let location = |ordinal| Location { segment, entries_offset: run.entries_offset, ordinal };
            ordinals.filter(|&ordinal| !self.gone.contains_key(&location(ordinal))).count()
        };
        let runs = self.runs.iter().filter(|run| run.segment == segment && run.generation == self.generation);
        runs.map(of_run).sum()
    }
}

/// Whether the first frame of a journal says that it replaces those before it.
fn starts_with_checkpoint(file: &std::fs::File) -> std::io::Result<bool> {
    let mut bytes = [0; FRAME_HEADER_BYTES];
    match file::read_exact(file, &mut bytes, 0) {
        Ok(()) => Ok(Frame::decode(&bytes).is_ok_and(|(frame, _)| frame.kind == FrameKind::Checkpoint)),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// The counters in a frame's body that this version knows.
fn named_counters(body: &[u8]) -> BTreeMap<Counter, u64> {
    let named = |(number, value): (u32, u64)| {
        let counter = Counter::ALL.iter().find(|&&counter| counter as u32 == number)?;
        Some((*counter, value))
    };
    frame::decode_counters(body).unwrap_or_default().into_iter().filter_map(named).collect()
}

/// Reads a file in words.
fn words<T>(
    path: &Path,
    parse: impl Fn(&serde_json::Value) -> Result<T>,
) -> std::result::Result<T, (ProblemKind, String)> {
    let bytes =
        read_file(path, MAX_WORDS_BYTES).map_err(|error| (Unreadable, format!("cannot read: {error}")))?;
    let value = serde_json::from_slice(&bytes).map_err(|error| (Damaged, format!("damaged: {error}")))?;
    parse(&value).map_err(|error| (Damaged, format!("damaged: {error}")))
}
