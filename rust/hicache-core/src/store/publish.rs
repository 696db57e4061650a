//! Publishing a unit: room first, then payload, directory and frame, in this order.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::format::directory::{
    DIRECTORY_ALIGNMENT, DirectoryHeader, Parent, Run, directory_bytes, encode as encode_directory,
    entries_offsets,
};
use crate::format::form::{Codec, Form};
use crate::format::frame::{AddRun, AddUnit, FrameKind, ShortKey, encode_add, short_key};
use crate::store::Inner;
use crate::store::budget::Room;
use crate::store::io::late;
use crate::store::namespace_state::NamespaceState;
use crate::store::room::{self, Refused};
use crate::store::segment_writer::Reservation;

/// Pages from this size on start at multiples of the direct I/O alignment.
const LARGE_PAGE_BYTES: u64 = hicache_sys::DIRECT_ALIGNMENT as u64;

/// A unit is written again after each `clear` that takes it away while it is published, this often at most.
const MOST_CLEARS: u32 = 16;

/// A unit with a place for each of its parts.
pub(crate) struct UnitPlan {
    /// Its runs. What `payload_offset` of a run and of its entries says is from the start of the unit.
    pub(crate) runs: Vec<Run>,
    /// Bytes of the whole unit.
    pub(crate) bytes: u64,
    /// When its pages were recorded, ns since 1970; `None`: now.
    pub(crate) written_ns: Option<u64>,
    /// The only generation that its pages may be published in; `None`: the present one, whichever that is.
    pub(crate) generation: Option<u64>,
    /// It is not published after this, nor room waited for.
    pub(crate) deadline: Option<Instant>,
    alignment: u64,
    directory_offset: u64,
}

impl UnitPlan {
    /// Gives each run its place; so far, entries are placed from the start of their run.
    pub(crate) fn new(mut runs: Vec<Run>) -> UnitPlan {
        let (mut position, mut alignment) = (0_u64, DIRECTORY_ALIGNMENT);
        for run in &mut runs {
            let is_large = run.form.codec == Codec::None && run.form.page_bytes >= LARGE_PAGE_BYTES;
            let run_alignment = if is_large { LARGE_PAGE_BYTES } else { DIRECTORY_ALIGNMENT };
            alignment = alignment.max(run_alignment);
            position = position.next_multiple_of(run_alignment);
            run.payload_offset = position;
            for entry in &mut run.entries {
                entry.payload_offset += position;
            }
            position += run.payload_bytes;
        }
        let directory_offset = position.next_multiple_of(DIRECTORY_ALIGNMENT);
        let bytes = (directory_offset + directory_bytes(&runs)).next_multiple_of(alignment);
        UnitPlan {
            runs,
            bytes,
            written_ns: None,
            generation: None,
            deadline: None,
            alignment,
            directory_offset,
        }
    }

    /// Writes the unit and tells everybody. `write_payload` writes the payload, and fills in what it learns about
    /// blocks on the way; it is called again when the disk was full and room was made. On failure nobody learns of
    /// the unit, and its room goes back.
    pub(crate) fn publish(
        self,
        inner: &Inner,
        state: &NamespaceState,
        write_payload: impl FnMut(&mut [Run], &Reservation) -> io::Result<()>,
    ) -> Result<(), Refused> {
        let mut unit = self;
        let mut write_payload = write_payload;
        for _ in 0..MOST_CLEARS {
            let published = unit.try_publish(inner, state, &mut write_payload);
            let generation = published.map_err(|refused| refused.explained(&inner.paths))?;
            if state.index().generation() == generation || unit.generation.is_some() {
                return Ok(());
            }
            // A `clear` came between: it took the unit with it, and what is stored after a clear stays.
        }
        Err(Refused::Busy)
    }

    /// The generation in which the unit was published. What it knows of the namespace is as of after that.
    fn try_publish(
        &mut self,
        inner: &Inner,
        state: &NamespaceState,
        write_payload: &mut impl FnMut(&mut [Run], &Reservation) -> io::Result<()>,
    ) -> Result<u64, Refused> {
        // Who takes room must be known as alive, so that nobody takes the room for a dead process's.
        inner.announce()?;
        let frame_bytes = inner.journal_growth(self.frame_bytes())?;
        let charge = state.writer.most_growth(self.bytes) + frame_bytes;
        let mut room = room::take(inner, charge, self.deadline)?;
        let mut published = self.write(inner, state, frame_bytes, &mut room, write_payload);
        if let Err(error) = &published
            && room::is_no_space(error)
        {
            // The disk is fuller than its free space said.
            room.give_back();
            room::make(inner, charge, error);
            room = room::take(inner, charge, self.deadline)?;
            published = self.write(inner, state, frame_bytes, &mut room, write_payload);
        }
        inner.tell_sealed(state);
        match published {
            Ok(generation) => {
                drop(room);
                // It is published, whether this process learns of it now or with the next look.
                state.refresh_within(&inner.counters, inner.device.clock.left(self.deadline));
                Ok(generation)
            }
            Err(error) => {
                room.give_back();
                Err(Refused::Io(error))
            }
        }
    }

    /// Bytes of the records of its frame.
    fn frame_bytes(&self) -> u64 {
        let of_run = |run: &Run| 16 * run.entries.len() as u64 + 56 + Form::ENCODED_BYTES as u64;
        64 + self.runs.iter().map(of_run).sum::<u64>()
    }

    fn write(
        &mut self,
        inner: &Inner,
        state: &NamespaceState,
        frame_bytes: u64,
        taken: &mut Room<'_>,
        write_payload: &mut impl FnMut(&mut [Run], &Reservation) -> io::Result<()>,
    ) -> io::Result<u64> {
        let generation = state.index().generation();
        if self.generation.is_some_and(|only| only != generation) {
            return Err(io::Error::other("the namespace was cleared meanwhile"));
        }
        let next_number = || inner.next_segment_number();
        let room =
            state.writer.reserve(&inner.transfers, generation, self.bytes, self.alignment, next_number)?;
        // Small units share blocks: what this one does not need is for the next.
        taken.give_back_part(taken.bytes().saturating_sub(room.growth + frame_bytes));
        let written =
            write_payload(&mut self.runs, &room).and_then(|()| self.tell(inner, state, &room, generation));
        let directory = written.is_ok().then_some(room.offset + self.directory_offset);
        state.writer.finish(&inner.transfers, &room, directory);
        if written.is_ok() {
            inner.files.insert(&state.fingerprint, room.segment, Arc::clone(&room.file));
        }
        written.map(|()| generation)
    }

    fn check_deadline(&self, inner: &Inner) -> io::Result<()> {
        if inner.device.clock.is_past(self.deadline) { Err(late()) } else { Ok(()) }
    }

    /// Writes the directory behind the payload, and the frame.
    fn tell(
        &self,
        inner: &Inner,
        state: &NamespaceState,
        room: &Reservation,
        generation: u64,
    ) -> io::Result<()> {
        self.check_deadline(inner)?;
        let directory_offset = room.offset + self.directory_offset;
        let header = DirectoryHeader {
            namespace: state.fingerprint,
            segment: room.segment,
            generation,
            unit_offset: room.offset,
            directory_offset,
            directory_bytes: directory_bytes(&self.runs),
            written_ns: self.written_ns.unwrap_or_else(crate::store::now_ns),
        };
        let mut directory = encode_directory(&header, &self.runs);
        directory.resize((self.bytes - self.directory_offset) as usize, 0);
        inner.transfers.write_small(room.file.path(), room.file.buffered(), &directory, directory_offset)?;
        if inner.options.durable {
            room.file.buffered().sync_data()?;
        }
        // The last moment to take it back: the caller may not wait for it any more.
        self.check_deadline(inner)?;
        let unit = AddUnit {
            segment: room.segment,
            generation,
            unit_offset: room.offset,
            unit_bytes: self.bytes,
            directory_offset,
            directory_bytes: header.directory_bytes,
        };
        let keys: Vec<Vec<ShortKey>> = self
            .runs
            .iter()
            .map(|run| run.entries.iter().map(|entry| short_key(&entry.key)).collect())
            .collect();
        let places = self.runs.iter().zip(&keys).zip(entries_offsets(&self.runs));
        let runs: Vec<AddRun<'_>> = places
            .map(|((run, keys), entries)| AddRun {
                form: run.form,
                entries_offset: directory_offset + entries,
                payload_offset: room.offset + run.payload_offset,
                payload_bytes: run.payload_bytes,
                parent: if let Parent::Page(key) = run.parent { short_key(&key) } else { [0; 16] },
                depth: run.depth,
                keys: keys.as_flattened(),
            })
            .collect();
        let body = encode_add(&unit, &runs);
        inner.say_at(header.written_ns, FrameKind::Add, state.fingerprint, 1, &body)
    }
}

/// Stretches of `true` within `pages`.
pub(crate) fn consecutive(wanted: &[bool], pages: Range<usize>) -> Vec<Range<usize>> {
    let mut stretches: Vec<Range<usize>> = Vec::new();
    for page in pages.filter(|&page| wanted[page]) {
        match stretches.last_mut() {
            Some(last) if last.end == page => last.end = page + 1,
            _ => stretches.push(page..page + 1),
        }
    }
    stretches
}
