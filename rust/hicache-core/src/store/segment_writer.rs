//! This process's segments of one namespace: room is given out in order, units are written outside the lock. Units that
//! are written side by side go to a segment each, one for each lane: a file takes one write at a time.

use std::io;
use std::sync::{Arc, Mutex};

use crate::format::directory::DIRECTORY_ALIGNMENT;
use crate::format::segment::{SEGMENT_HEADER_BYTES, Seal, SegmentHeader};
use crate::format::{ProcessId, SegmentId};
use crate::namespace::Namespace;
use crate::store::budget::BLOCK_BYTES;
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
    /// Bytes on disk by which the file grows with it: whole blocks, with the header and seal of a segment begun for it.
    pub growth: u64,
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
    /// Segments that take units, by lane.
    active: Vec<Active>,
    /// Segments that take no more units, with some still being written.
    retiring: Vec<Active>,
    /// Segments that were sealed and not told of yet.
    sealed: Vec<Sealed>,
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

    /// Most bytes on disk by which a unit of `len` bytes makes files grow, wherever it is put.
    pub fn most_growth(&self, len: u64) -> u64 {
        len.next_multiple_of(BLOCK_BYTES) + SEGMENT_HEADER_BYTES + 2 * BLOCK_BYTES
    }

    /// Room for a unit of `generation` in the segment of a lane: `len` bytes at a multiple of `alignment`, which both are
    /// multiples of [`DIRECTORY_ALIGNMENT`]. A lane past those in use begins the next one. Segments of this process are
    /// numbered by `next_number`.
    pub fn reserve(
        &self,
        transfers: &Transfers,
        lane: usize,
        generation: u64,
        len: u64,
        alignment: u64,
        next_number: impl FnOnce() -> u32,
    ) -> io::Result<Reservation> {
        debug_assert!(len.is_multiple_of(alignment) && alignment.is_multiple_of(DIRECTORY_ALIGNMENT));
        let mut state = self.lock();
        let lane = lane.min(state.active.len());
        let is_over = |active: &Active| {
            let is_full = active.end + len > self.segment_bytes && active.end > SEGMENT_HEADER_BYTES;
            is_full || active.generation != generation
        };
        let mut growth = 0;
        if state.active.get(lane).is_none_or(is_over) {
            let begun = self.create(transfers, generation, next_number())?;
            growth = SEGMENT_HEADER_BYTES + BLOCK_BYTES;
            state.active.push(begun);
            if lane + 1 < state.active.len() {
                let over = state.active.swap_remove(lane);
                state.retire(transfers, [over]);
            }
        }
        let active = &mut state.active[lane];
        let offset = active.end.next_multiple_of(alignment);
        growth += (offset + len).next_multiple_of(BLOCK_BYTES) - active.end.next_multiple_of(BLOCK_BYTES);
        let reservation =
            Reservation { segment: active.id, file: Arc::clone(&active.file), offset, len, growth };
        active.end = offset + len;
        active.in_flight += 1;
        Ok(reservation)
    }

    /// Ends a reservation whose directory is at this offset, or that came to nothing (`None`): its room is given
    /// back to the file system, and to the next unit when it was the last.
    pub fn finish(&self, transfers: &Transfers, reservation: &Reservation, directory: Option<u64>) {
        let mut state = self.lock();
        let end = reservation.offset + reservation.len;
        let State { active, retiring, .. } = &mut *state;
        let own = active.iter_mut().chain(retiring).find(|active| active.id == reservation.segment);
        let mut is_last = false;
        if let Some(own) = own {
            own.in_flight -= 1;
            is_last = own.end == end;
            match directory {
                Some(offset) => own.directories.push(offset),
                None if is_last => own.end = reservation.offset,
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
        state.seal_retired(transfers);
    }

    /// Ends the active segments that are of a generation before `generation`: nothing more goes there.
    pub fn retire_before(&self, transfers: &Transfers, generation: u64) {
        let mut state = self.lock();
        let over: Vec<Active> =
            state.active.extract_if(.., |active| active.generation < generation).collect();
        state.retire(transfers, over);
    }

    /// Ends the active segments.
    pub fn close(&self, transfers: &Transfers) {
        let mut state = self.lock();
        let over = std::mem::take(&mut state.active);
        state.retire(transfers, over);
    }

    /// Segments that were sealed since the last call, to be told to all.
    pub fn take_sealed(&self) -> Vec<Sealed> {
        std::mem::take(&mut self.lock().sealed)
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

impl State {
    fn retire(&mut self, transfers: &Transfers, over: impl IntoIterator<Item = Active>) {
        self.retiring.extend(over);
        self.seal_retired(transfers);
    }

    fn seal_retired(&mut self, transfers: &Transfers) {
        for mut active in self.retiring.extract_if(.., |active| active.in_flight == 0) {
            // A segment that cannot be sealed is as good as a dead writer's: it costs a scan later.
            self.sealed.extend(seal(transfers, &mut active));
        }
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
