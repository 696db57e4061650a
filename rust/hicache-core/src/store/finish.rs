//! Finishing dead processes: what they began is brought to an end, what they left behind goes.
//!
//! A process is dead when its lock can be had. Whoever has it is the one writer of the dead one's files, and may be
//! killed like everybody else: each step leaves a root that reads the same, and that the next one finishes.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use hicache_sys::file::{self, Access, allocated_bytes};
use hicache_sys::lock::FileLock;

use crate::format::frame::{AddUnit, Frame, FrameKind, encode_add};
use crate::format::segment::{SEGMENT_HEADER_BYTES, Seal};
use crate::format::{ProcessId, SegmentId};
use crate::namespace::Fingerprint;
use crate::store::Inner;
use crate::store::liveness::{Census, KnownUnit, generation, names};
use crate::store::paths::{Paths, parse_journal_name};
use crate::store::recover;
use crate::store::tail::is_alive;

/// Journals of dead processes that may stay; those beyond are merged into the finisher's own.
pub const MAX_FINISHED_JOURNALS: usize = 32;

/// The dead's journals together may take one part in so many of the capacity before they are looked through for what no
/// longer matters.
const FINISHED_JOURNALS_SHARE: u64 = 32;

/// Processes whose locks are held at once: each takes a descriptor.
const CLAIMED_AT_ONCE: usize = 32;

/// When more journals stay than should, since they are large and matter, it is looked again after this time.
const MERGE_AGAIN: Duration = Duration::from_secs(60);

/// A temporary file of a process that left nothing else, and may not have taken its lock yet, is left behind when
/// it is this old.
const TEMPORARY_AGE: Duration = Duration::from_secs(600);

/// How the finisher speaks: in its own journal.
pub trait Voice {
    /// The finisher's own process.
    fn process(&self) -> ProcessId;

    /// Appends a frame of the finisher.
    fn say(&mut self, kind: FrameKind, namespace: Fingerprint, records: u32, body: &[u8]) -> io::Result<()>;

    /// Appends a frame of a dead process as it is.
    fn copy(&mut self, frame: &Frame<'_>) -> io::Result<()>;

    /// Makes sure that what was said outlasts the machine's power.
    fn sync(&mut self) -> io::Result<()>;
}

/// How much is done in one call.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// No process or segment is begun after this time; the rest is for the next call.
    pub deadline: Option<Instant>,
    /// Journals of dead processes that may stay.
    pub most_journals: usize,
    /// Bytes of such journals beyond which those of which most no longer matters are merged, whatever their number.
    pub most_journal_bytes: u64,
    /// Processes that ended by themselves are looked through as well, and damaged journals are merged whatever their
    /// number.
    pub thorough: bool,
}

impl Limits {
    /// What a housekeeping thread does at once in a root of this capacity in bytes.
    pub fn within(time: Duration, capacity_bytes: u64) -> Self {
        Limits {
            deadline: Some(Instant::now() + time),
            most_journals: MAX_FINISHED_JOURNALS,
            most_journal_bytes: capacity_bytes / FINISHED_JOURNALS_SHARE,
            thorough: false,
        }
    }

    /// Everything.
    pub fn none() -> Self {
        Limits { deadline: None, most_journals: MAX_FINISHED_JOURNALS, most_journal_bytes: 0, thorough: true }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// What was done for the dead, by housekeeping or a repair.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FinishReport {
    /// Processes that were dead and are finished now.
    pub processes: u64,
    /// Units that only their directories told of, now told by a journal.
    pub units_told: u64,
    /// Segments that got their seal.
    pub segments_sealed: u64,
    /// Segments that held nothing any more, removed.
    pub segments_removed: u64,
    /// Journals whose frames the finisher's own holds now, removed.
    pub journals_merged: u64,
    /// Temporary files removed.
    pub temporaries_removed: u64,
    /// Bytes on disk given back, all of dead processes.
    pub freed_bytes: u64,
    /// Whether time ran out or something failed, so that there is more to do.
    pub unfinished: bool,
}

/// Finishes dead processes of a root, and remembers which ones are.
pub struct Finisher {
    paths: Paths,
    finished: HashSet<ProcessId>,
    merge_after: Option<Instant>,
}

/// What processes left in the root.
#[derive(Default)]
struct Survey {
    journals: BTreeMap<ProcessId, BTreeSet<u32>>,
    locks: BTreeSet<ProcessId>,
    segments: BTreeMap<ProcessId, Vec<(Fingerprint, SegmentId)>>,
    temporaries: BTreeMap<ProcessId, Vec<PathBuf>>,
}

/// One call: who speaks, how far it goes, what was done.
pub(crate) struct Round<'a> {
    pub(crate) paths: &'a Paths,
    pub(crate) voice: &'a mut dyn Voice,
    pub(crate) limits: Limits,
    pub(crate) report: FinishReport,
    /// Told of each step.
    pub(crate) between: &'a mut dyn FnMut(&'static str),
}

impl Finisher {
    /// Finishes the dead of the root at `paths`.
    pub fn new(paths: Paths) -> Self {
        Finisher { paths, finished: HashSet::new(), merge_after: None }
    }

    /// Finishes dead processes, as far as `limits` go. Files of live processes are not touched.
    ///
    /// `between` is told of each step.
    ///
    /// # Errors
    /// What the system says when the root cannot be looked through. What fails for one process is left for a
    /// later call.
    pub fn finish_dead(
        &mut self,
        voice: &mut dyn Voice,
        limits: Limits,
        between: &mut dyn FnMut(&'static str),
    ) -> io::Result<FinishReport> {
        let own = voice.process();
        let survey = Survey::of(&self.paths)?;
        let known = survey.processes();
        let dead: Vec<ProcessId> =
            known.iter().copied().filter(|&id| id != own && !is_alive(&self.paths, id)).collect();
        // A process that ended by itself took its lock away, and left nothing to finish.
        let has_work =
            |id: &&ProcessId| survey.locks.contains(id) || (limits.thorough && !self.finished.contains(id));
        let unfinished: Vec<ProcessId> = dead.iter().filter(has_work).copied().collect();
        let paths = self.paths.clone();
        let mut round = Round { paths: &paths, voice, limits, report: FinishReport::default(), between };
        for some in unfinished.chunks(CLAIMED_AT_ONCE) {
            if limits.is_over() {
                round.report.unfinished = true;
                break;
            }
            self.finish_some(&mut round, &survey, some)?;
        }
        let is_due = survey.has_too_many_journals(&self.paths, &dead, &limits);
        let is_time = self.merge_after.is_none_or(|after| Instant::now() >= after);
        if (is_due && is_time) || (limits.thorough && !dead.is_empty()) {
            // Those whose own finishing is still to come keep their journals until then.
            let is_finished = |id: &&ProcessId| self.finished.contains(id) || !survey.locks.contains(id);
            let finished: Vec<ProcessId> = dead.iter().filter(is_finished).copied().collect();
            round.merge(&finished)?;
            let stay = survey.has_too_many_journals(&self.paths, &dead, &limits) && !round.report.unfinished;
            self.merge_after = stay.then(|| Instant::now() + MERGE_AGAIN);
        }
        round.remove_old_temporaries(&survey, &known);
        Ok(round.report)
    }

    fn finish_some(&mut self, round: &mut Round<'_>, survey: &Survey, some: &[ProcessId]) -> io::Result<()> {
        let mut claims: Vec<(ProcessId, FileLock)> = Vec::new();
        for &id in some {
            match FileLock::try_exclusive(&self.paths.process_lock(id)) {
                Ok(Some(claim)) => claims.push((id, claim)),
                // Another finisher has it, or somebody looks at it just now, or the lock cannot be made.
                Ok(None) | Err(_) => round.report.unfinished = true,
            }
        }
        let claimed: HashSet<ProcessId> = claims.iter().map(|(id, _)| *id).collect();
        // Read while the locks are held: nothing of these processes is said or moved meanwhile.
        let census = Census::read(&self.paths, &|segment| claimed.contains(&segment.process))?;
        (round.between)("census read");
        for (id, _claim) in claims {
            match round.finish_process(id, survey, &census) {
                Ok(true) => {
                    // Last, with the lock held: whoever takes it from now on finds nothing to do.
                    let removed = std::fs::remove_file(self.paths.process_lock(id));
                    round.report.unfinished |= removed.is_err();
                    round.report.processes += 1;
                    self.finished.insert(id);
                    (round.between)("lock removed");
                }
                Ok(false) | Err(_) => round.report.unfinished = true,
            }
        }
        Ok(())
    }
}

impl Round<'_> {
    /// Finishes one process whose lock is held; `false` when time ran out.
    fn finish_process(&mut self, id: ProcessId, survey: &Survey, census: &Census) -> io::Result<bool> {
        for &(namespace, segment) in survey.segments.get(&id).into_iter().flatten() {
            if self.limits.is_over() {
                return Ok(false);
            }
            self.finish_segment(namespace, segment, census)?;
        }
        for path in survey.temporaries.get(&id).into_iter().flatten() {
            self.remove_temporary(path)?;
        }
        for &number in survey.journals.get(&id).into_iter().flatten() {
            let whole_bytes = census.journals.get(&(id, number)).map_or(0, |journal| journal.whole_bytes);
            self.trim_journal(&self.paths.journal(id, number), whole_bytes)?;
        }
        Ok(true)
    }

    fn finish_segment(
        &mut self,
        namespace: Fingerprint,
        segment: SegmentId,
        census: &Census,
    ) -> io::Result<()> {
        let path = self.paths.segment(&namespace, segment);
        let file = match file::open_write(&path, Access::Buffered) {
            Ok(file) => file,
            // Removed meanwhile, with all that was in it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let before = file.metadata()?;
        if before.len() == 0 {
            return self.remove_segment(&file, &path);
        }
        // A segment whose header does not verify, or is another's, is for `verify` to report.
        let Ok(header) = recover::read_header(&file) else { return Ok(()) };
        if header.segment != segment || header.namespace.fingerprint() != namespace {
            return Ok(());
        }
        if header.generation < generation(self.paths, &namespace) {
            return self.remove_segment(&file, &path);
        }
        let none = BTreeMap::new();
        let known = census.units.get(&segment).unwrap_or(&none);
        let places: Vec<(u64, u64)> =
            known.values().map(|known| (known.unit.unit_offset, known.unit.unit_bytes)).collect();
        let unknown = recover::unknown_units(&file, segment, &places)?;
        let mut units: Vec<AddUnit> = known.values().map(|known| known.unit).collect();
        let mut has_live = known.values().any(|known| !census.is_unit_gone(known));
        for directory in unknown.directories.iter().filter(|found| found.header.namespace == namespace) {
            let unit = recover::unit_of(directory);
            units.push(unit);
            let mut told = KnownUnit::new(unit);
            recover::announce(directory, |_, run| told.add_run(run));
            if census.is_unit_gone(&told) {
                continue;
            }
            has_live = true;
            let body = recover::with_runs(directory, |runs| encode_add(&unit, runs));
            self.voice.say(FrameKind::Add, namespace, 1, &body)?;
            self.report.units_told += 1;
            (self.between)("unit told");
        }
        // Removed only if every object is known to be: one that does not verify is for `verify` to report.
        if !has_live && unknown.damaged == 0 {
            return self.remove_segment(&file, &path);
        }
        if !unknown.is_sealed {
            self.seal(&file, segment, units)?;
        }
        let after = file.metadata()?;
        self.report.freed_bytes += allocated_bytes(&before).saturating_sub(allocated_bytes(&after));
        Ok(())
    }

    /// Cuts off what lies past the last unit, and seals.
    fn seal(&mut self, file: &std::fs::File, segment: SegmentId, mut units: Vec<AddUnit>) -> io::Result<()> {
        units.sort_unstable_by_key(|unit| unit.unit_offset);
        let end_of = |unit: &AddUnit| unit.unit_offset.saturating_add(unit.unit_bytes);
        let end = units.iter().map(end_of).max().unwrap_or(SEGMENT_HEADER_BYTES);
        // A directory's own length leaves out the zeros behind it, which may end the file.
        let len = file.metadata()?.len();
        if end > len {
            return Ok(()); // cut by somebody: what is left of it can be read without a seal
        }
        file.set_len(end)?;
        (self.between)("segment cut");
        let directories = units.iter().map(|unit| unit.directory_offset).collect();
        let seal = Seal { segment, directories }.encode(end);
        file::write_all(file, &seal, end)?;
        (self.between)("seal written");
        // To its own length: gives back blocks past it.
        file.set_len(end + seal.len() as u64)?;
        self.report.segments_sealed += 1;
        (self.between)("segment sealed");
        Ok(())
    }

    /// First the blocks, then the name: readers may hold the file open.
    fn remove_segment(&mut self, file: &std::fs::File, path: &Path) -> io::Result<()> {
        let freed = allocated_bytes(&file.metadata()?);
        file.set_len(0)?;
        self.report.freed_bytes += freed;
        (self.between)("segment emptied");
        remove_if_there(path)?;
        self.report.segments_removed += 1;
        (self.between)("segment removed");
        Ok(())
    }

    fn remove_temporary(&mut self, path: &Path) -> io::Result<()> {
        let freed = std::fs::symlink_metadata(path).map_or(0, |metadata| allocated_bytes(&metadata));
        remove_if_there(path)?;
        self.report.freed_bytes += freed;
        self.report.temporaries_removed += 1;
        (self.between)("temporary removed");
        Ok(())
    }

    /// Gives back what a journal took ahead, and the beginning of a frame that was never said; one that says
    /// nothing goes.
    fn trim_journal(&mut self, path: &Path, whole_bytes: u64) -> io::Result<()> {
        let file = match file::open_write(path, Access::Buffered) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let before = file.metadata()?;
        file.set_len(whole_bytes.min(before.len()))?;
        (self.between)("journal trimmed");
        if whole_bytes == 0 {
            remove_if_there(path)?;
            (self.between)("journal unlinked");
        }
        let after = file.metadata()?;
        self.report.freed_bytes += allocated_bytes(&before).saturating_sub(allocated_bytes(&after));
        Ok(())
    }

    /// Removes temporary files of processes that left nothing else and may be alive without a lock yet.
    fn remove_old_temporaries(&mut self, survey: &Survey, known: &BTreeSet<ProcessId>) {
        let own = self.voice.process();
        let unknown = survey.temporaries.iter().filter(|(id, _)| **id != own && !known.contains(id));
        for path in unknown.flat_map(|(_, paths)| paths) {
            let modified = std::fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
            let age = modified.ok().and_then(|modified| SystemTime::now().duration_since(modified).ok());
            if age.is_some_and(|age| age > TEMPORARY_AGE) {
                self.report.unfinished |= self.remove_temporary(path).is_err();
            }
        }
    }
}

impl Survey {
    fn of(paths: &Paths) -> io::Result<Survey> {
        let mut survey = Survey::default();
        for name in names(&paths.journals())? {
            if let Some((owner, number)) = parse_journal_name(&name) {
                survey.journals.entry(owner).or_default().insert(number);
            } else if let Some(Ok(owner)) = name.strip_suffix(".lock").map(str::parse) {
                survey.locks.insert(owner);
            } else {
                survey.other(paths.journals().join(&name), &name);
            }
        }
        for name in names(&paths.root)? {
            survey.other(paths.root.join(&name), &name);
        }
        for folder in names(&paths.namespaces())? {
            let Some(namespace) = folder.parse::<Fingerprint>().ok().filter(|id| id.to_string() == folder)
            else {
                continue;
            };
            for name in names(&paths.namespace(&namespace))? {
                match SegmentId::from_file_name(&name) {
                    Some(segment) => {
                        survey.segments.entry(segment.process).or_default().push((namespace, segment));
                    }
                    None => survey.other(paths.namespace(&namespace).join(&name), &name),
                }
            }
        }
        Ok(survey)
    }

    /// Whether the journals of `dead` processes, as they are now, are more than may stay, or take more room.
    fn has_too_many_journals(&self, paths: &Paths, dead: &[ProcessId], limits: &Limits) -> bool {
        let (mut journals, mut bytes) = (0, 0);
        for (&process, numbers) in self.journals.iter().filter(|(process, _)| dead.contains(process)) {
            let found = numbers.iter().filter_map(|&number| paths.journal(process, number).metadata().ok());
            for journal in found {
                journals += 1;
                bytes += allocated_bytes(&journal);
            }
        }
        journals > limits.most_journals || bytes > limits.most_journal_bytes
    }

    fn other(&mut self, path: PathBuf, name: &str) {
        let owner = name.strip_prefix("tmp-").and_then(|rest| rest.split_once('-'));
        if let Some(owner) = owner.and_then(|(owner, _)| owner.parse().ok()) {
            self.temporaries.entry(owner).or_default().push(path);
        }
    }

    /// Processes that were known as alive once.
    fn processes(&self) -> BTreeSet<ProcessId> {
        let owners = self.journals.keys().chain(self.segments.keys());
        owners.chain(&self.locks).copied().collect()
    }
}

/// Removes a file; one that is gone is as good.
fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The store's own voice.
struct StoreVoice<'a>(&'a Inner);

impl Voice for StoreVoice<'_> {
    fn process(&self) -> ProcessId {
        self.0.process
    }

    fn say(&mut self, kind: FrameKind, namespace: Fingerprint, records: u32, body: &[u8]) -> io::Result<()> {
        self.0.say(kind, namespace, records, body)
    }

    fn copy(&mut self, frame: &Frame<'_>) -> io::Result<()> {
        self.0.say_copy(frame)
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.0.lock_journal();
        self.0.started(&mut state)?.sync()
    }
}

impl Inner {
    /// Finishes dead processes, see [`Finisher::finish_dead`].
    pub(crate) fn finish_dead(
        &self,
        finisher: &mut Finisher,
        limits: Limits,
        between: &mut dyn FnMut(&'static str),
    ) -> io::Result<FinishReport> {
        finisher.finish_dead(&mut StoreVoice(self), limits, between)
    }
}
