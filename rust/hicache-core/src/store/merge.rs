//! Merging journals of dead processes into the finisher's own, so that their number stays small.
//!
//! Frames are copied as they are, in their order, all that matter of one owner; then its journals go. A reader that
//! took a frame from one place does not take it from the other.

use std::io;

use hicache_sys::file::{self, Access};
use hicache_sys::lock::FileLock;

use crate::format::ProcessId;
use crate::store::finish::Round;
use crate::store::journal;
use crate::store::liveness::{Census, Collected, KeptFrame, Liveness};

/// Journals of one process of more bytes than this stay where they are unless half of them no longer matters: a
/// store of many objects would copy them again with each death.
const LARGE_BYTES: u64 = 1 << 20;

/// The journals of one dead process.
struct Owner {
    bytes: u64,
    /// Bytes that would be copied; of large journals all, unread.
    kept_bytes: u64,
    process: ProcessId,
    numbers: Vec<u32>,
    is_damaged: bool,
}

impl Round<'_> {
    /// Merges journals of `finished` processes where more are than may stay, or take more room: those of which most no
    /// longer matters, so that what is over does not pile up; then small ones, down to the number that may stay; and
    /// damaged ones if that is asked for.
    pub(crate) fn merge(&mut self, finished: &[ProcessId]) -> io::Result<()> {
        let census = Census::read(self.paths, &|_| false)?;
        let mut owners: Vec<Owner> = finished.iter().filter_map(|&process| owner(&census, process)).collect();
        let mut left: usize = owners.iter().map(|owner| owner.numbers.len()).sum();
        let is_many = left > self.limits.most_journals;
        let is_heavy = owners.iter().map(|owner| owner.bytes).sum::<u64>() > self.limits.most_journal_bytes;
        if is_many || is_heavy {
            for owner in owners.iter_mut().filter(|owner| owner.bytes <= LARGE_BYTES || is_heavy) {
                owner.kept_bytes = self.reduced(owner, &census)?.map_or(owner.bytes, |reduced| reduced.kept);
            }
        }
        owners.sort_unstable_by_key(|owner| (owner.kept_bytes, owner.process));
        for owner in owners {
            let is_damaged = self.limits.thorough && owner.is_damaged;
            let is_mostly_over = (is_many || is_heavy) && owner.kept_bytes <= owner.bytes / 2;
            if left <= self.limits.most_journals && !is_damaged && !is_mostly_over {
                continue;
            }
            if self.limits.is_over() {
                self.report.unfinished = true;
                break;
            }
            let may_stay = owner.bytes > LARGE_BYTES && !is_damaged;
            match self.merge_owner(&owner, &census, may_stay) {
                Ok(true) => left -= owner.numbers.len(),
                Ok(false) => {}
                Err(_) => self.report.unfinished = true,
            }
        }
        Ok(())
    }

    /// Merges the journals of one process; `false` when they stay.
    fn merge_owner(&mut self, owner: &Owner, census: &Census, may_stay: bool) -> io::Result<bool> {
        let lock = self.paths.process_lock(owner.process);
        let Some(_claim) = FileLock::try_exclusive(&lock)? else { return Ok(false) };
        let merged = self.merge_claimed(owner, census, may_stay);
        // The lock file was made for this, and is held: it goes, whatever came of it.
        std::fs::remove_file(&lock)?;
        (self.between)("lock removed");
        merged
    }

    /// Reads an owner's journals; `None` when another finisher was faster.
    fn reduced(&self, owner: &Owner, census: &Census) -> io::Result<Option<Reduced>> {
        let mut collected = Collected::default();
        for &number in &owner.numbers {
            match file::open_read(&self.paths.journal(owner.process, number), Access::Buffered) {
                Ok(file) => collected.read(&file, file.metadata()?.len())?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let all = collected.bytes;
        let frames = collected.reduce(&mut Liveness::new(self.paths, census), None);
        let kept = frames.iter().map(KeptFrame::encoded_bytes).sum();
        Ok(Some(Reduced { frames, kept, all }))
    }

    fn merge_claimed(&mut self, owner: &Owner, census: &Census, may_stay: bool) -> io::Result<bool> {
        let Some(reduced) = self.reduced(owner, census)? else { return Ok(false) };
        if may_stay && reduced.kept > reduced.all / 2 {
            return Ok(false);
        }
        for frame in &reduced.frames {
            self.voice.copy(&frame.as_frame())?;
            (self.between)("frame copied");
        }
        self.voice.sync()?;
        (self.between)("copies synced");
        // From the first on: a journal that a checkpoint replaced must not be the one that is left.
        for &number in &owner.numbers {
            self.report.freed_bytes +=
                journal::remove(&self.paths.journal(owner.process, number), self.between)?;
            self.report.journals_merged += 1;
        }
        Ok(true)
    }
}

/// What of an owner's journals matters.
struct Reduced {
    frames: Vec<KeptFrame>,
    /// Bytes of these frames, and of all that were read.
    kept: u64,
    all: u64,
}

fn owner(census: &Census, process: ProcessId) -> Option<Owner> {
    let journals = census.journals.iter().filter(|((owner, _), _)| *owner == process);
    let mut owner = Owner { bytes: 0, kept_bytes: 0, process, numbers: Vec::new(), is_damaged: false };
    for (&(_, number), journal) in journals {
        owner.bytes += journal.bytes;
        owner.is_damaged |= journal.is_damaged;
        owner.numbers.push(number);
    }
    owner.numbers.sort_unstable();
    owner.kept_bytes = owner.bytes;
    (!owner.numbers.is_empty()).then_some(owner)
}
