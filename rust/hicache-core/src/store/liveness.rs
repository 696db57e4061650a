//! What of the things that were said still matters: the rule by which journals get smaller.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::ops::Range;

use hicache_sys::file::{self, Access};

use crate::format::frame::{
    self, AddRun, AddUnit, FRAME_ALIGNMENT, FRAME_HEADER_BYTES, Frame, FrameKind, Gone, ShortKey,
    encode_gone, encode_touch,
};
use crate::format::root::decode_generation;
use crate::format::{ProcessId, SegmentId};
use crate::namespace::Fingerprint;
use crate::store::index::UNNAMED;
use crate::store::paths::{Paths, parse_journal_name};
use crate::store::root;
use crate::store::tail::{JournalId, Sequences, read_frames};

/// Most keys of one namespace that are kept of what a process touched.
const MAX_TOUCHED_KEYS: usize = 1 << 16;

/// How often all journals are read until none goes meanwhile.
const MAX_CENSUSES: u32 = 8;

/// A unit as journals told of it.
#[derive(Debug, Clone)]
pub(crate) struct KnownUnit {
    /// Where it lies.
    pub(crate) unit: AddUnit,
    /// For each run the place of its first entry, and which ordinals have a key.
    pub(crate) runs: Vec<(u64, Vec<u32>)>,
}

impl KnownUnit {
    /// The unit without its runs.
    pub(crate) fn new(unit: AddUnit) -> Self {
        KnownUnit { unit, runs: Vec::new() }
    }

    /// Adds a run of it.
    pub(crate) fn add_run(&mut self, run: &AddRun<'_>) {
        let (keys, _) = run.keys.as_chunks::<16>();
        let named = keys.iter().enumerate().filter(|(_, key)| **key != UNNAMED);
        self.runs.push((run.entries_offset, named.map(|(ordinal, _)| ordinal as u32).collect()));
    }
}

/// A journal as a census found it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JournalSeen {
    /// Its length.
    pub(crate) bytes: u64,
    /// Up to where it is understood.
    pub(crate) whole_bytes: u64,
    /// Whether stretches of it do not decode.
    pub(crate) is_damaged: bool,
}

/// What all journals say, read once, about which objects are gone and who says what.
#[derive(Debug, Default)]
pub(crate) struct Census {
    /// Every journal there is.
    pub(crate) journals: HashMap<JournalId, JournalSeen>,
    /// Units of the segments asked for, by their offset.
    pub(crate) units: HashMap<SegmentId, BTreeMap<u64, KnownUnit>>,
    gone: HashMap<(SegmentId, u64), Vec<Range<u32>>>,
    /// Owners of the journals that hold totals of a process.
    totals_at: HashMap<ProcessId, HashSet<ProcessId>>,
}

impl Census {
    /// Reads all journals; of the adds, keeps those of segments that `wants`.
    ///
    /// # Errors
    /// What the system says: a census that misses a journal is none.
    pub(crate) fn read(paths: &Paths, wants: &dyn Fn(SegmentId) -> bool) -> io::Result<Census> {
        let mut empty_before = HashSet::new();
        for _ in 0..MAX_CENSUSES {
            let mut census = Census::default();
            let all_there = census.read_once(paths, wants)?;
            // An empty journal is new, or was cut because it goes, after what it held was said elsewhere: perhaps
            // behind what was read there. Those that were empty a whole reading ago are settled.
            let is_empty = census.journals.iter().filter(|(_, seen)| seen.bytes == 0);
            let empty: HashSet<JournalId> = is_empty.map(|(id, _)| *id).collect();
            if all_there && empty.is_subset(&empty_before) {
                return Ok(census);
            }
            empty_before = empty;
        }
        Err(io::Error::other("journals come and go faster than they are read"))
    }

    /// Reads all journals; `false` when one went meanwhile, so that what it held may stand where it was not yet
    /// when that was read.
    fn read_once(&mut self, paths: &Paths, wants: &dyn Fn(SegmentId) -> bool) -> io::Result<bool> {
        let mut buffer = Vec::new();
        let mut listed = list_journals(paths)?;
        loop {
            for &id in &listed {
                if !self.journals.contains_key(&id) && !self.read_journal(paths, id, &mut buffer, wants)? {
                    return Ok(false);
                }
            }
            let again = list_journals(paths)?;
            if self.journals.keys().any(|id| !again.contains(id)) {
                return Ok(false);
            }
            if again == listed {
                return Ok(true);
            }
            listed = again;
        }
    }

    /// Reads one journal; `false` when it is gone or going.
    fn read_journal(
        &mut self,
        paths: &Paths,
        id: JournalId,
        buffer: &mut Vec<u8>,
        wants: &dyn Fn(SegmentId) -> bool,
    ) -> io::Result<bool> {
        let file = match file::open_read(&paths.journal(id.0, id.1), Access::Buffered) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let len = file.metadata()?.len();
        let read = match read_frames(&file, 0, len, buffer, &mut |frame| self.take(id.0, frame, wants)) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(error) => return Err(error),
        };
        let seen =
            JournalSeen { bytes: len, whole_bytes: read.position, is_damaged: read.damaged_stretches > 0 };
        self.journals.insert(id, seen);
        Ok(true)
    }

    fn take(&mut self, owner: ProcessId, frame: &Frame<'_>, wants: &dyn Fn(SegmentId) -> bool) {
        match frame.kind {
            FrameKind::Add => {
                let mut known: Option<KnownUnit> = None;
                let decoded = frame::decode_add(frame.body, |unit, run| {
                    if wants(unit.segment) {
                        known.get_or_insert_with(|| KnownUnit::new(*unit)).add_run(&run);
                    }
                });
                if let (Ok(unit), Some(known)) = (decoded, known) {
                    self.units.entry(unit.segment).or_default().insert(unit.unit_offset, known);
                }
            }
            FrameKind::Remove | FrameKind::Quarantine => {
                for Gone { location, objects, .. } in frame::decode_gone(frame.body).unwrap_or_default() {
                    let range = location.ordinal..location.ordinal.saturating_add(objects);
                    self.gone.entry((location.segment, location.entries_offset)).or_default().push(range);
                }
            }
            FrameKind::Counters | FrameKind::Inherited => {
                self.totals_at.entry(frame.process).or_default().insert(owner);
            }
            _ => {}
        }
    }

    /// Whether an object was removed or put into quarantine.
    pub(crate) fn is_gone(&self, segment: SegmentId, entries_offset: u64, ordinal: u32) -> bool {
        self.gone
            .get(&(segment, entries_offset))
            .is_some_and(|ranges| ranges.iter().any(|range| range.contains(&ordinal)))
    }

    /// Whether nothing of a unit is left.
    pub(crate) fn is_unit_gone(&self, known: &KnownUnit) -> bool {
        let segment = known.unit.segment;
        let mut objects =
            known.runs.iter().flat_map(|(entries, named)| named.iter().map(move |n| (*entries, *n)));
        objects.all(|(entries, ordinal)| self.is_gone(segment, entries, ordinal))
    }

    /// Whether the totals of `process`, which is dead, stand in journals of `owner` alone, so that `owner` may add
    /// them to its own.
    fn totals_only_at(&self, process: ProcessId, owner: ProcessId) -> bool {
        let has_journal = self.journals.keys().any(|(journal_owner, _)| *journal_owner == process);
        let holders = self.totals_at.get(&process);
        !has_journal && holders.is_none_or(|holders| holders.iter().all(|holder| *holder == owner))
    }
}

/// Every journal in the folder.
///
/// # Errors
/// What the system says; a missing folder holds none.
pub(crate) fn list_journals(paths: &Paths) -> io::Result<HashSet<JournalId>> {
    Ok(names(&paths.journals())?.iter().filter_map(|name| parse_journal_name(name)).collect())
}

/// Names in a folder; a missing one has none.
pub(crate) fn names(folder: &std::path::Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string().ok());
    }
    Ok(names)
}

/// Which frames matter, by a census and by the segments that there are.
///
/// The segments of a namespace are listed when it is first asked for: after the frames in question were read, so
/// that one which is not listed is gone, and not yet to come.
pub(crate) struct Liveness<'a> {
    paths: &'a Paths,
    census: &'a Census,
    namespaces: HashMap<Fingerprint, NamespaceFiles>,
}

struct NamespaceFiles {
    /// `None`: they could not be listed, and each may be there.
    segments: Option<HashSet<SegmentId>>,
    generation: u64,
}

/// What is left of a frame.
enum Left {
    Nothing,
    Whole,
    Part(u32, Vec<u8>),
}

impl<'a> Liveness<'a> {
    /// Judges by `census`.
    pub(crate) fn new(paths: &'a Paths, census: &'a Census) -> Self {
        Liveness { paths, census, namespaces: HashMap::new() }
    }

    fn files(&mut self, namespace: &Fingerprint) -> &NamespaceFiles {
        self.namespaces.entry(*namespace).or_insert_with(|| {
            let listed = names(&self.paths.namespace(namespace)).ok();
            let segments =
                listed.map(|names| names.iter().filter_map(|name| SegmentId::from_file_name(name)).collect());
            NamespaceFiles { segments, generation: generation(self.paths, namespace) }
        })
    }

    fn exists(&mut self, namespace: &Fingerprint, segment: &SegmentId) -> bool {
        self.files(namespace).segments.as_ref().is_none_or(|segments| segments.contains(segment))
    }

    /// What of an add, remove or quarantine matters; frames that are not understood do.
    fn left_of(&mut self, frame: &KeptFrame) -> Left {
        match frame.kind {
            FrameKind::Add => {
                let mut known: Option<KnownUnit> = None;
                let decoded = frame::decode_add(&frame.body, |unit, run| {
                    known.get_or_insert_with(|| KnownUnit::new(*unit)).add_run(&run);
                });
                let Ok(unit) = decoded else { return Left::Whole };
                let is_over = unit.generation < self.files(&frame.namespace).generation;
                let is_gone = known.is_none_or(|known| self.census.is_unit_gone(&known));
                if is_over || is_gone || !self.exists(&frame.namespace, &unit.segment) {
                    Left::Nothing
                } else {
                    Left::Whole
                }
            }
            FrameKind::Remove | FrameKind::Quarantine => {
                let Ok(mut records) = frame::decode_gone(&frame.body) else { return Left::Whole };
                let all = records.len();
                records.retain(|record| self.exists(&frame.namespace, &record.location.segment));
                match records.len() {
                    0 => Left::Nothing,
                    some if some == all => Left::Whole,
                    some => Left::Part(some as u32, encode_gone(&records)),
                }
            }
            FrameKind::Seal | FrameKind::Checkpoint => Left::Nothing,
            _ => Left::Whole,
        }
    }
}

/// Generation of a namespace as its file says; 0 without one.
pub(crate) fn generation(paths: &Paths, namespace: &Fingerprint) -> u64 {
    let bytes = root::read_file(&paths.generation(namespace), 64).ok();
    bytes.and_then(|bytes| decode_generation(&bytes)).unwrap_or(0)
}

/// A frame kept from a journal.
#[derive(Debug, Clone)]
pub(crate) struct KeptFrame {
    process: ProcessId,
    sequence: u64,
    kind: FrameKind,
    records: u32,
    namespace: Fingerprint,
    written_ns: u64,
    body: Vec<u8>,
}

impl KeptFrame {
    /// The frame, to be written.
    pub(crate) fn as_frame(&self) -> Frame<'_> {
        let KeptFrame { process, sequence, kind, records, namespace, written_ns, ref body } = *self;
        Frame { process, sequence, kind, records, namespace, written_ns, body }
    }

    /// Bytes that it takes in a journal.
    pub(crate) fn encoded_bytes(&self) -> u64 {
        (FRAME_HEADER_BYTES + self.body.len()).next_multiple_of(FRAME_ALIGNMENT) as u64
    }
}

/// All frames of one owner's journals, each once.
#[derive(Default)]
pub(crate) struct Collected {
    frames: Vec<KeptFrame>,
    sequences: Sequences,
    /// Bytes read.
    pub(crate) bytes: u64,
}

impl Collected {
    /// Reads a journal up to `len`. Journals of one owner come in the order of their numbers; one that starts with a
    /// checkpoint frame replaces those before it.
    pub(crate) fn read(&mut self, file: &std::fs::File, len: u64) -> io::Result<()> {
        read_frames(file, 0, len, &mut Vec::new(), &mut |frame| match frame.kind {
            FrameKind::Checkpoint => {
                self.frames.clear();
                self.sequences = Sequences::default();
            }
            _ if self.sequences.take(frame) => {
                let Frame { process, sequence, kind, records, namespace, written_ns, body } = *frame;
                let body = body.to_vec();
                self.frames.push(KeptFrame { process, sequence, kind, records, namespace, written_ns, body });
            }
            _ => {}
        })?;
        self.bytes += len;
        Ok(())
    }

    /// Drops what does not matter any more and folds what can be said shorter. Every process's frames stay in
    /// their order. `alive` is the process that goes on, if one does.
    pub(crate) fn reduce(self, liveness: &mut Liveness<'_>, alive: Option<ProcessId>) -> Vec<KeptFrame> {
        let (mut totals, mut is_set_up) = (HashSet::new(), false);
        let mut touched: HashMap<(ProcessId, Fingerprint), Vec<ShortKey>> = HashMap::new();
        let mut seen: HashSet<(ProcessId, Fingerprint, ShortKey)> = HashSet::new();
        let mut kept = Vec::new();
        // From the last to the first: of totals the last ones hold, of touches the last ones count most.
        for mut frame in self.frames.into_iter().rev() {
            let (process, namespace) = (frame.process, frame.namespace);
            match frame.kind {
                FrameKind::Counters | FrameKind::Inherited => {
                    if !totals.insert((process, frame.kind == FrameKind::Inherited)) {
                        continue;
                    }
                }
                FrameKind::Setup => {
                    // How a dead process was set up matters to nobody.
                    if alive != Some(process) || std::mem::replace(&mut is_set_up, true) {
                        continue;
                    }
                }
                FrameKind::Touch => {
                    let is_last = !touched.contains_key(&(process, namespace));
                    let keys = touched.entry((process, namespace)).or_default();
                    for key in frame::decode_touch(&frame.body).unwrap_or_default().iter().rev() {
                        if keys.len() < MAX_TOUCHED_KEYS && seen.insert((process, namespace, *key)) {
                            keys.push(*key);
                        }
                    }
                    if !is_last {
                        continue;
                    }
                    frame.body.clear(); // written below, when all are known
                }
                _ => match liveness.left_of(&frame) {
                    Left::Nothing => continue,
                    Left::Whole => {}
                    Left::Part(records, body) => (frame.records, frame.body) = (records, body),
                },
            }
            kept.push(frame);
        }
        kept.reverse();
        for frame in kept.iter_mut().filter(|frame| frame.kind == FrameKind::Touch) {
            let mut keys = touched.remove(&(frame.process, frame.namespace)).unwrap_or_default();
            keys.reverse();
            (frame.records, frame.body) = (keys.len() as u32, encode_touch(&keys));
        }
        kept
    }
}

/// Takes the totals of dead processes that nobody but `owner` has out of `frames`; their sum with what `owner`
/// inherited before, as the body of an `Inherited` frame, or `None` when there were none.
pub(crate) fn fold_totals(frames: &mut Vec<KeptFrame>, owner: ProcessId, census: &Census) -> Option<Vec<u8>> {
    let is_total = |frame: &KeptFrame| matches!(frame.kind, FrameKind::Counters | FrameKind::Inherited);
    let folds = |frame: &KeptFrame| {
        is_total(frame) && frame.process != owner && census.totals_only_at(frame.process, owner)
    };
    if !frames.iter().any(folds) {
        return None;
    }
    let mut sum = BTreeMap::<u32, u64>::new();
    frames.retain(|frame| {
        let is_own = frame.process == owner && frame.kind == FrameKind::Inherited;
        // What does not decode is kept for a build that understands it.
        let values = if is_own || folds(frame) { frame::decode_counters(&frame.body).ok() } else { None };
        for (counter, value) in values.iter().flatten() {
            let total = sum.entry(*counter).or_default();
            *total = total.saturating_add(*value);
        }
        values.is_none()
    });
    Some(frame::encode_counters(&sum.into_iter().collect::<Vec<_>>()))
}
