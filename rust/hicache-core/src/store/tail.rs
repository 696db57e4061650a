//! Reading what other processes said: every journal of the root, whole frames only, each frame once.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

use hicache_sys::file::{self, Access};

use crate::format::ProcessId;
use crate::format::frame::{self, FRAME_HEADER_BYTES, Frame, MAX_BODY_BYTES, Step};
use crate::store::paths::{Paths, parse_journal_name};

/// Bytes read from a journal at once.
const CHUNK_BYTES: usize = 4 << 20;

/// A folder's time stamp is trusted once it is this old: files made within one tick share it.
const SETTLED: Duration = Duration::from_millis(100);

/// Follows the journals of a root, this process's own among them.
pub struct Tail {
    paths: Paths,
    journals: HashMap<(ProcessId, u32), Cursor>,
    listed_at: Option<SystemTime>,
}

struct Cursor {
    /// `None` once nothing more will come: its process is dead and all was read.
    file: Option<File>,
    /// Whether its process was dead before the file was opened.
    is_final: bool,
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
}

impl Tail {
    /// Follows all journals from their start.
    pub fn new(paths: Paths) -> Self {
        Tail { paths, journals: HashMap::new(), listed_at: None }
    }

    /// Hands every new whole frame to `take`.
    pub fn poll(&mut self, take: &mut dyn FnMut(&Frame<'_>)) -> TailReport {
        self.discover();
        let mut report = TailReport::default();
        for cursor in self.journals.values_mut() {
            cursor.poll(&mut report, take);
        }
        report
    }

    /// Finds journals that are new in the folder.
    fn discover(&mut self) {
        let folder = self.paths.journals();
        let Ok(changed) = std::fs::metadata(&folder).and_then(|metadata| metadata.modified()) else { return };
        if self.listed_at == Some(changed) {
            return;
        }
        let Ok(names) = std::fs::read_dir(&folder) else { return };
        for name in names.flatten() {
            let Some(id) = name.file_name().to_str().and_then(parse_journal_name) else { continue };
            if self.journals.contains_key(&id) {
                continue;
            }
            // Looked at before the file is opened: a process that is dead by then has written all it ever will.
            let is_final = !is_alive(&self.paths, id.0);
            // Gone again, or something else than a file: nothing to follow, and the next listing tries anew.
            let Ok(file) = file::open_read(&name.path(), Access::Buffered) else { continue };
            self.journals.insert(id, Cursor { file: Some(file), is_final, position: 0, seen_len: 0 });
        }
        let settled = SystemTime::now().duration_since(changed).is_ok_and(|age| age > SETTLED);
        self.listed_at = settled.then_some(changed);
    }
}

/// Whether a process may still write. An error of the look itself says nothing: such a process counts as alive.
pub(crate) fn is_alive(paths: &Paths, process: ProcessId) -> bool {
    hicache_sys::lock::is_locked(&paths.process_lock(process)).unwrap_or(true)
}

impl Cursor {
    fn poll(&mut self, report: &mut TailReport, take: &mut dyn FnMut(&Frame<'_>)) {
        let Some(file) = &self.file else { return };
        let Ok(len) = file.metadata().map(|metadata| metadata.len()) else { return };
        if len != self.seen_len && len > self.position {
            // After an error the same place is read again at the next call.
            let Ok(position) = read_frames(file, self.position, len, report, take) else { return };
            self.position = position;
        }
        self.seen_len = len;
        if self.is_final {
            self.file = None;
        }
    }
}

/// Hands the whole frames between `position` and `len` to `take`; the place up to which the file is understood.
pub(crate) fn read_frames(
    file: &File,
    mut position: u64,
    len: u64,
    report: &mut TailReport,
    take: &mut dyn FnMut(&Frame<'_>),
) -> io::Result<u64> {
    let mut buffer = Vec::new();
    let mut want = CHUNK_BYTES;
    while position < len {
        let chunk = want.min((len - position) as usize);
        buffer.resize(chunk, 0);
        file.read_exact_at(&mut buffer, position)?;
        let mut at = 0;
        loop {
            match frame::step(&buffer, at) {
                Step::Frame(frame, next) => {
                    report.frames += 1;
                    take(&frame);
                    at = next;
                }
                Step::Damaged(next) => {
                    report.damaged_stretches += 1;
                    at = next;
                }
                Step::Incomplete => break,
            }
        }
        let reaches_end = position + chunk as u64 == len;
        if at == 0 && reaches_end {
            break; // nothing whole in all that is left
        }
        if at == 0 {
            // A frame longer than the chunk, or damage: look at more at once, up to the longest frame twice.
            let most = 2 * (MAX_BODY_BYTES as usize + FRAME_HEADER_BYTES);
            if want >= most {
                report.damaged_stretches += 1;
                position += (chunk - MAX_BODY_BYTES as usize) as u64 & !7;
                continue;
            }
            want = (want * 4).min(most);
            continue;
        }
        want = CHUNK_BYTES;
        position += at as u64;
    }
    Ok(position)
}
