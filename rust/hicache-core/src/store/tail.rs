//! Reading what other processes said: every journal of the root, whole frames only, each frame once.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use hicache_sys::file::{self, Access, file_len};

use crate::format::ProcessId;
use crate::format::frame::{self, FRAME_HEADER_BYTES, Frame, FrameKind, MAX_BODY_BYTES, Step};
use crate::store::paths::{Paths, parse_journal_name};

/// Bytes read from a journal at once.
const CHUNK_BYTES: usize = 1 << 20;

/// A buffer that one very long frame made larger than this is given back.
const MOST_KEPT_BYTES: usize = 4 << 20;

/// A folder's time stamp is trusted once it is this old: files made within one tick share it.
const SETTLED: Duration = Duration::from_millis(100);

/// Looks at the folder in one poll: each but the first because journals came or went during the one before.
const MAX_ROUNDS: u32 = 8;

/// An end that is no whole frame is read again at each poll up to this length, since its owner writes the next
/// frame over what a failed append left; a longer one only when the file has another length.
const TORN_BYTES: u64 = 64 << 10;

/// A journal: its owner and number.
pub type JournalId = (ProcessId, u32);

/// The last frame taken of each process.
///
/// A frame of a dead process may stand in several journals, copied, and one of a live process in two of its own.
/// It counts once: only if its sequence is higher than that of every frame of its process before it.
#[derive(Debug, Default)]
pub struct Sequences {
    last: HashMap<ProcessId, u64>,
}

impl Sequences {
    /// Whether `frame` is new; from now on it is not.
    pub fn take(&mut self, frame: &Frame<'_>) -> bool {
        match self.last.get_mut(&frame.process) {
            Some(last) if frame.sequence <= *last => false,
            Some(last) => {
                *last = frame.sequence;
                true
            }
            None => {
                self.last.insert(frame.process, frame.sequence);
                true
            }
        }
    }
}

/// Follows the journals of a root, this process's own among them.
pub struct Tail {
    paths: Paths,
    folder: PathBuf,
    /// Journals that may still bring something, sorted.
    open: Vec<Cursor>,
    /// Journals read to their end, and closed.
    finished: HashSet<JournalId>,
    sequences: Sequences,
    listed_at: Option<SystemTime>,
    buffer: Vec<u8>,
}

struct Cursor {
    id: JournalId,
    file: File,
    /// Nothing is appended any more: its owner was dead, or wrote to the next journal, before the file was looked
    /// at.
    is_final: bool,
    /// Whether the last listing showed it.
    is_listed: bool,
    position: u64,
    /// Length of the file when its rest was last looked at.
    seen_len: u64,
}

/// What a look at the journals brought.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct TailReport {
    /// Frames taken.
    pub frames: u64,
    /// Stretches that did not decode, passed over.
    pub damaged_stretches: u64,
    /// Nothing failed: all that was said before the call was taken.
    pub complete: bool,
    /// Journals were replaced or merged. What was removed together with its segment may not be told of any more:
    /// an index looks again which of its segments exist.
    pub journals_gone: bool,
}

/// What a listing of the folder showed.
struct Listing {
    journals: Vec<JournalId>,
    locks: HashSet<ProcessId>,
}

impl Tail {
    /// Follows all journals from their start.
    pub fn new(paths: Paths) -> Self {
        let folder = paths.journals();
        Tail {
            paths,
            folder,
            open: Vec::new(),
            finished: HashSet::new(),
            sequences: Sequences::default(),
            listed_at: None,
            buffer: Vec::new(),
        }
    }

    /// Hands every new whole frame to `take`, except what only orders journals ([`FrameKind::Checkpoint`]).
    pub fn poll(&mut self, take: &mut dyn FnMut(&Frame<'_>)) -> TailReport {
        let mut report = TailReport { complete: true, ..TailReport::default() };
        for round in 0.. {
            let listing_changed = self.discover(&mut report);
            let cut_short = self.read(&mut report, take);
            // What a journal held may have moved to one that was not there when the folder was listed. A journal
            // that is empty is so because it is new, which a second look shows.
            let look_again = listing_changed || (cut_short && round == 0);
            if !look_again {
                break;
            }
            if round == MAX_ROUNDS {
                report.complete = false;
                break;
            }
            if cut_short {
                self.listed_at = None;
            }
        }
        if self.buffer.capacity() > MOST_KEPT_BYTES {
            self.buffer = Vec::new();
        }
        report
    }

    /// Reads what is new in all journals; whether one is shorter than it was, or empty.
    fn read(&mut self, report: &mut TailReport, take: &mut dyn FnMut(&Frame<'_>)) -> bool {
        let mut cut_short = false;
        let (sequences, buffer, finished) = (&mut self.sequences, &mut self.buffer, &mut self.finished);
        self.open.retain_mut(|cursor| {
            let owner = cursor.id.0;
            let (frames, journals_gone) = (&mut report.frames, &mut report.journals_gone);
            let looked = cursor.poll(buffer, &mut |frame| {
                *journals_gone |= frame.kind == FrameKind::Checkpoint || frame.process != owner;
                if frame.kind != FrameKind::Checkpoint && sequences.take(frame) {
                    *frames += 1;
                    take(frame);
                }
            });
            match looked {
                Ok(look) => {
                    report.damaged_stretches += look.damaged_stretches;
                    cut_short |= look.cut_short;
                }
                // The same place is read again at the next call.
                Err(_) => {
                    report.complete = false;
                    return true;
                }
            }
            if cursor.is_final {
                finished.insert(cursor.id);
            }
            !cursor.is_final
        });
        cut_short
    }

    /// Finds journals that came or went; whether any did, so that another look is needed.
    fn discover(&mut self, report: &mut TailReport) -> bool {
        let changed = match std::fs::metadata(&self.folder).and_then(|metadata| metadata.modified()) {
            Ok(changed) => changed,
            Err(error) => {
                report.complete &= error.kind() == io::ErrorKind::NotFound;
                return false;
            }
        };
        if self.listed_at == Some(changed) {
            return false;
        }
        let Ok(listing) = Listing::read(&self.folder) else {
            report.complete = false;
            return false;
        };
        let settled = SystemTime::now().duration_since(changed).is_ok_and(|age| age > SETTLED);
        self.listed_at = settled.then_some(changed);
        let left = self.mark_final(&listing);
        report.journals_gone |= left;
        self.follow_new(&listing, report) || left
    }

    /// Finds out which followed journals get nothing more; whether one has left the folder.
    fn mark_final(&mut self, listing: &Listing) -> bool {
        let mut left = false;
        for cursor in &mut self.open {
            let (owner, number) = cursor.id;
            let is_listed = listing.journals.binary_search(&cursor.id).is_ok();
            left |= cursor.is_listed && !is_listed;
            cursor.is_listed = is_listed;
            // A journal removed under its live owner, by whomever, is followed as before.
            cursor.is_final |= listing.is_followed_by_another(owner, number)
                || (!listing.locks.contains(&owner) && !is_alive(&self.paths, owner));
        }
        let before = self.finished.len();
        self.finished.retain(|id| listing.journals.binary_search(id).is_ok());
        left || self.finished.len() < before
    }

    fn follow_new(&mut self, listing: &Listing, report: &mut TailReport) -> bool {
        let mut is_new = false;
        for &id in &listing.journals {
            if self.finished.contains(&id) || self.open.binary_search_by_key(&id, |cursor| cursor.id).is_ok()
            {
                continue;
            }
            let (owner, number) = id;
            // Looked at before the file is opened: a process that is dead by then has written all it ever will.
            let is_final = listing.is_followed_by_another(owner, number) || !is_alive(&self.paths, owner);
            match file::open_read(&self.paths.journal(owner, number), Access::Buffered) {
                Ok(file) => {
                    let at = self.open.partition_point(|cursor| cursor.id < id);
                    self.open
                        .insert(at, Cursor { id, file, is_final, is_listed: true, position: 0, seen_len: 0 });
                    is_new = true;
                }
                // Gone since the folder was listed: what it held is in another one by now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    report.journals_gone = true;
                    is_new = true;
                    self.listed_at = None;
                }
                Err(error) if is_no_file(&error) => {}
                Err(_) => {
                    report.complete = false;
                    self.listed_at = None;
                }
            }
        }
        is_new
    }
}

/// Whether an open failed because a link, folder or device stands under a journal's name.
fn is_no_file(error: &io::Error) -> bool {
    // ELOOP; `only_regular` has no number.
    matches!(error.raw_os_error(), None | Some(40)) || error.kind() == io::ErrorKind::IsADirectory
}

impl Listing {
    fn read(folder: &std::path::Path) -> io::Result<Listing> {
        let mut listing = Listing { journals: Vec::new(), locks: HashSet::new() };
        for entry in std::fs::read_dir(folder)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str() else { continue };
            if let Some(id) = parse_journal_name(name) {
                listing.journals.push(id);
            } else if let Some(Ok(owner)) = name.strip_suffix(".lock").map(str::parse) {
                listing.locks.insert(owner);
            }
        }
        listing.journals.sort_unstable();
        Ok(listing)
    }

    /// Whether the owner of this journal has a later one.
    fn is_followed_by_another(&self, owner: ProcessId, number: u32) -> bool {
        let next = self.journals.partition_point(|&id| id <= (owner, number));
        self.journals.get(next).is_some_and(|&(process, _)| process == owner)
    }
}

/// Whether a process may still write. An error of the look itself says nothing: such a process counts as alive.
pub(crate) fn is_alive(paths: &Paths, process: ProcessId) -> bool {
    hicache_sys::lock::is_locked(&paths.process_lock(process)).unwrap_or(true)
}

/// What a look at one journal showed.
struct Look {
    damaged_stretches: u64,
    cut_short: bool,
}

impl Cursor {
    fn poll(&mut self, buffer: &mut Vec<u8>, take: &mut dyn FnMut(&Frame<'_>)) -> io::Result<Look> {
        let mut look = Look { damaged_stretches: 0, cut_short: false };
        let len = file_len(&self.file)?;
        // Cut to nothing before it is unlinked, so that it takes no room while somebody holds it open.
        if len < self.position || len == 0 {
            look.cut_short = true;
        } else if len > self.position && (len != self.seen_len || len - self.position <= TORN_BYTES) {
            match read_frames(&self.file, self.position, len, buffer, take) {
                Ok(read) => {
                    self.position = read.position;
                    look.damaged_stretches = read.damaged_stretches;
                    self.seen_len = len;
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => look.cut_short = true,
                Err(error) => return Err(error),
            }
        }
        Ok(look)
    }
}

/// How far a journal was read.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadFrames {
    /// Place up to which the file is understood.
    pub(crate) position: u64,
    /// Stretches that did not decode, passed over.
    pub(crate) damaged_stretches: u64,
}

/// Hands the whole frames between `position` and `len` to `take`. `buffer` is room to work in.
pub(crate) fn read_frames(
    file: &File,
    position: u64,
    len: u64,
    buffer: &mut Vec<u8>,
    take: &mut dyn FnMut(&Frame<'_>),
) -> io::Result<ReadFrames> {
    let mut read = ReadFrames { position, damaged_stretches: 0 };
    let mut want = CHUNK_BYTES;
    while read.position < len {
        let chunk = want.min((len - read.position) as usize);
        if buffer.len() < chunk {
            buffer.resize(chunk, 0);
        }
        let bytes = &mut buffer[..chunk];
        file.read_exact_at(bytes, read.position)?;
        let mut at = 0;
        loop {
            match frame::step(bytes, at) {
                Step::Frame(frame, next) => {
                    take(&frame);
                    at = next;
                }
                Step::Damaged(next) => {
                    read.damaged_stretches += 1;
                    at = next;
                }
                Step::Incomplete => break,
            }
        }
        let reaches_end = read.position + chunk as u64 == len;
        if at == 0 && reaches_end {
            break; // nothing whole in all that is left
        }
        if at == 0 {
            // A frame longer than the chunk, or damage: look at more at once, up to the longest frame twice.
            let most = 2 * (MAX_BODY_BYTES as usize + FRAME_HEADER_BYTES);
            if want >= most {
                read.damaged_stretches += 1;
                read.position += (chunk - MAX_BODY_BYTES as usize) as u64 & !7;
                continue;
            }
            want = (want * 4).min(most);
            continue;
        }
        want = CHUNK_BYTES;
        read.position += at as u64;
    }
    Ok(read)
}
