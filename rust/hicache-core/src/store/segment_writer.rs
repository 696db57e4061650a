//! This process's segments of one namespace: room is given out in order, units are written outside the lock.

use std::io;
use std::sync::{Arc, Mutex};

use crate::format::directory::DIRECTORY_ALIGNMENT;
use crate::format::segment::{SEGMENT_HEADER_BYTES, Seal, SegmentHeader};
use crate::format::{ProcessId, SegmentId};
use crate::namespace::Namespace;
use crate::store::io::{SegmentFile, Transfers};
use crate::store::paths::Paths;

/// Room in a segment, given to one unit.
pub struct Reservation {
    /// The segment.
    pub segment: SegmentId,
    /// Its file.
    pub file: Arc<SegmentFile>,
    /// First byte of the unit.
    pub offset: u64,
    /// Bytes of the unit.
    pub len: u64,
}

/// A segment that is complete: to be told in the journal.
pub struct Sealed {
    /// The segment.
    pub segment: SegmentId,
    /// Its length in bytes.
    pub file_bytes: u64,
}

/// Gives out room in this process's segments of one namespace.
pub struct SegmentWriter {
    paths: Paths,
    namespace: Namespace,
    process: ProcessId,
    segment_bytes: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    active: Option<Active>,
}

struct Active {
    id: SegmentId,
    file: Arc<SegmentFile>,
    generation: u64,
    end: u64,
    in_flight: u32,
    directories: Vec<u64>,
}

impl SegmentWriter {
    /// Writes segments of about `segment_bytes`.
    pub fn new(paths: Paths, namespace: Namespace, process: ProcessId, segment_bytes: u64) -> Self {
        SegmentWriter { paths, namespace, process, segment_bytes, state: Mutex::default() }
    }

    /// Room for a unit of `generation`: `len` bytes at a multiple of `alignment`, which both are multiples of
    /// [`DIRECTORY_ALIGNMENT`]. Segments of this process are numbered by `next_number`.
    pub fn reserve(
        &self,
        transfers: &Transfers,
        generation: u64,
        len: u64,
        alignment: u64,
        next_number: impl FnOnce() -> u32,
    ) -> io::Result<(Reservation, Option<Sealed>)> {
        debug_assert!(len.is_multiple_of(alignment) && alignment.is_multiple_of(DIRECTORY_ALIGNMENT));
        let mut state = self.lock();
        let mut sealed = None;
        if let Some(active) = &mut state.active {
            let is_over = active.end + len > self.segment_bytes && active.end > SEGMENT_HEADER_BYTES;
            if is_over || active.generation != generation {
                if active.in_flight == 0 {
                    // A segment that cannot be sealed is as good as a dead writer's: it costs a scan later.
                    sealed = seal(transfers, active).ok();
                }
                state.active = None; // units still in flight are published all the same
            }
        }
        if state.active.is_none() {
            state.active = Some(self.create(transfers, generation, next_number())?);
        }
        let Some(active) = &mut state.active else { unreachable!("filled above") };
        let offset = active.end.next_multiple_of(alignment);
        let reservation = Reservation { segment: active.id, file: Arc::clone(&active.file), offset, len };
        active.end = offset + len;
        active.in_flight += 1;
        Ok((reservation, sealed))
    }

    /// Ends a reservation whose directory is at this offset, or that came to nothing (`None`): its room is given
    /// back to the file system, and to the next unit when it was the last.
    pub fn finish(&self, reservation: &Reservation, directory: Option<u64>) {
        let mut state = self.lock();
        let end = reservation.offset + reservation.len;
        let active = state.active.as_mut().filter(|active| active.id == reservation.segment);
        let is_last = active.as_ref().is_some_and(|active| active.end == end);
        if let Some(active) = active {
            active.in_flight -= 1;
            match directory {
                Some(offset) => active.directories.push(offset),
                None if is_last => active.end = reservation.offset,
                None => {}
            }
        }
        if directory.is_none() {
            let file = reservation.file.buffered();
            // Whether the blocks come back is for the file system to say; nobody was told of the unit.
            let _ = match is_last {
                true => file.set_len(reservation.offset),
                false => hicache_sys::file::punch_hole(file, reservation.offset, reservation.len),
            };
        }
    }

    /// Seals the active segment, if there is one with nothing in flight.
    pub fn close(&self, transfers: &Transfers) -> io::Result<Option<Sealed>> {
        match self.lock().active.take() {
            Some(mut active) if active.in_flight == 0 => seal(transfers, &mut active).map(Some),
            _ => Ok(None),
        }
    }

    fn create(&self, transfers: &Transfers, generation: u64, number: u32) -> io::Result<Active> {
        let id = SegmentId { process: self.process, number };
        let path = self.paths.segment(&self.namespace.fingerprint(), id);
        let file = transfers.create(&path)?;
        let namespace = self.namespace.clone();
        let header = SegmentHeader { segment: id, namespace, generation, created_ns: crate::store::now_ns() };
        if let Err(error) = transfers.write_small(&path, file.buffered(), &header.encode(), 0) {
            let _ = std::fs::remove_file(&path); // the first error is the one to report
            return Err(error);
        }
        let (end, directories) = (SEGMENT_HEADER_BYTES, Vec::new());
        Ok(Active { id, file: Arc::new(file), generation, end, in_flight: 0, directories })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn seal(transfers: &Transfers, active: &mut Active) -> io::Result<Sealed> {
    let directories = std::mem::take(&mut active.directories);
    let bytes = Seal { segment: active.id, directories }.encode(active.end);
    transfers.write_small(active.file.path(), active.file.buffered(), &bytes, active.end)?;
    let file_bytes = active.end + bytes.len() as u64;
    active.file.buffered().set_len(file_bytes)?;
    Ok(Sealed { segment: active.id, file_bytes })
}
