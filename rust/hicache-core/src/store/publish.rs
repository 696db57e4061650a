//! Publishing units: room first, then payload, directory and frame, in this order.

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

/// From so many bytes on, the blocks of a unit are taken before it is written: all together they cost less than one by one.
const AHEAD_BYTES: u64 = 1 << 20;

/// A unit is written again after each `clear` that takes it away while it is published, this often at most.
const MOST_CLEARS: u32 = 16;

/// A unit with a place for each of its parts.
pub(crate) struct UnitPlan {
    /// Its runs. What `payload_offset` of a run and of its entries says is from the start of the unit.
    pub(crate) runs: Vec<Run>,
    /// Bytes of the whole unit.
    pub(crate) bytes: u64,
    alignment: u64,
    directory_offset: u64,
}

/// A unit whose payload is to be written.
pub(crate) struct Payload<'a> {
    /// Its runs, of which what is learned about blocks is filled in.
    pub(crate) runs: &'a mut [Run],
    /// Where it goes.
    pub(crate) room: &'a Reservation,
}

/// Units whose payload is written side by side, and which are told of one after the other.
pub(crate) struct Publication {
    /// The units, in the order in which they are told of.
    pub(crate) units: Vec<UnitPlan>,
    /// When their pages were recorded, ns since 1970; `None`: now.
    pub(crate) written_ns: Option<u64>,
    /// The only generation that their pages may be published in; `None`: the present one, whichever that is.
    pub(crate) generation: Option<u64>,
    /// Nothing is published after this, nor room waited for.
    pub(crate) deadline: Option<Instant>,
}

/// Why not all units were published.
pub(crate) struct Unpublished {
    /// Units that were, from the first one on.
    pub(crate) published: usize,
    /// Why the next one was not.
    pub(crate) refused: Refused,
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
        UnitPlan { runs, bytes, alignment, directory_offset }
    }

    /// Runs of which nobody knows what comes before them.
    pub(crate) fn unknown_parents(&self) -> usize {
        self.runs.iter().filter(|run| run.parent == Parent::Unknown).count()
    }

    /// Bytes of the records of its frame.
    fn frame_bytes(&self) -> u64 {
        let of_run = |run: &Run| 16 * run.entries.len() as u64 + 56 + Form::ENCODED_BYTES as u64;
        64 + self.runs.iter().map(of_run).sum::<u64>()
    }
}

impl Publication {
    /// Units to be published now, as long as it takes.
    pub(crate) fn new(units: Vec<UnitPlan>) -> Publication {
        Publication { units, written_ns: None, generation: None, deadline: None }
    }

    /// Writes the units and tells everybody. `write_payload` writes the payload of all that it is given; it is called
    /// again when the disk was full and room was made. Nobody learns of a unit that failed, nor of those behind it, and
    /// their room goes back.
    pub(crate) fn publish(
        mut self,
        inner: &Inner,
        state: &NamespaceState,
        mut write_payload: impl FnMut(&mut [Payload<'_>]) -> io::Result<()>,
    ) -> Result<(), Unpublished> {
        let mut published = 0;
        for _ in 0..MOST_CLEARS {
            let generation = self
                .try_publish(inner, state, &mut published, &mut write_payload)
                .map_err(|refused| Unpublished { published, refused: refused.explained(&inner.paths) })?;
            if state.index().generation() == generation || self.generation.is_some() {
                return Ok(());
            }
            // A `clear` came between: it took the units with it, and what is stored after a clear stays.
            published = 0;
        }
        Err(Unpublished { published: 0, refused: Refused::Busy })
    }

    /// The generation in which the units were published. What it knows of the namespace is as of after that.
    fn try_publish(
        &mut self,
        inner: &Inner,
        state: &NamespaceState,
        published: &mut usize,
        write_payload: &mut impl FnMut(&mut [Payload<'_>]) -> io::Result<()>,
    ) -> Result<u64, Refused> {
        // Who takes room must be known as alive, so that nobody takes the room for a dead process's.
        inner.announce()?;
        let frames = inner.frame_room(self.units.iter().map(UnitPlan::frame_bytes).sum())?;
        let frames_bytes = frames.growth + frames.reserve;
        let charge =
            frames_bytes + self.units.iter().map(|unit| state.writer.most_growth(unit.bytes)).sum::<u64>();
        let mut room = room::take(inner, charge, self.deadline)?;
        let mut written = self.write(inner, state, frames_bytes, &mut room, published, write_payload);
        if let Err(error) = &written
            && room::is_no_space(error)
            && *published == 0
        {
            // The disk is fuller than its free space said.
            room.give_back();
            room::make(inner, charge, error);
            room = room::take(inner, charge, self.deadline)?;
            written = self.write(inner, state, frames_bytes, &mut room, published, write_payload);
        }
        inner.tell_sealed(state);
        let generation = match written {
            Ok(generation) => generation,
            Err(error) => {
                if *published == 0 {
                    room.give_back();
                }
                return Err(Refused::Io(error));
            }
        };
        if frames.reserve > 0 {
            inner.keep_reserve(room.split(frames.reserve));
        }
        drop(room);
        // It is published, whether this process learns of it now or with the next look.
        state.refresh_within(&inner.counters, inner.device.clock.left(self.deadline));
        Ok(generation)
    }

    fn write(
        &mut self,
        inner: &Inner,
        state: &NamespaceState,
        frames_bytes: u64,
        taken: &mut Room<'_>,
        published: &mut usize,
        write_payload: &mut impl FnMut(&mut [Payload<'_>]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let generation = state.index().generation();
        if self.generation.is_some_and(|only| only != generation) {
            return Err(io::Error::other("the namespace was cleared meanwhile"));
        }
        let mut rooms: Vec<Reservation> = Vec::with_capacity(self.units.len());
        let written = self
            .reserve(inner, state, generation, &mut rooms)
            .and_then(|()| {
                // Small units share blocks: what these do not need is for the next.
                let growth: u64 = rooms.iter().map(|room| room.growth).sum();
                taken.give_back_part(taken.bytes().saturating_sub(growth + frames_bytes));
                let mut payloads: Vec<Payload<'_>> = (self.units.iter_mut().zip(&rooms))
                    .map(|(unit, room)| Payload { runs: &mut unit.runs, room })
                    .collect();
                write_payload(&mut payloads)
            })
            .and_then(|()| {
                for (unit, room) in self.units.iter().zip(&rooms) {
                    self.tell(inner, state, unit, room, generation)?;
                    *published += 1;
                }
                Ok(generation)
            });
        for (number, (unit, room)) in self.units.iter().zip(&rooms).enumerate() {
            let directory = (number < *published).then_some(room.offset + unit.directory_offset);
            state.writer.finish(&inner.transfers, room, directory);
            if directory.is_some() {
                inner.files.insert(&state.fingerprint, room.segment, Arc::clone(&room.file));
            } else if *published > 0 {
                taken.give_back_part(room.growth);
            }
        }
        written
    }

    /// Takes a place for each unit, in a lane each. Those taken before an error are in `rooms`.
    fn reserve(
        &self,
        inner: &Inner,
        state: &NamespaceState,
        generation: u64,
        rooms: &mut Vec<Reservation>,
    ) -> io::Result<()> {
        for (lane, unit) in self.units.iter().enumerate() {
            let next_number = || inner.next_segment_number();
            let (bytes, alignment) = (unit.bytes, unit.alignment);
            let room =
                state.writer.reserve(&inner.transfers, lane, generation, bytes, alignment, next_number)?;
            rooms.push(room);
            let room = &rooms[lane];
            if room.len >= AHEAD_BYTES {
                match hicache_sys::file::preallocate(room.file.buffered(), room.offset, room.len) {
                    Err(error) if room::is_no_space(&error) => return Err(error),
                    // Where the file system cannot do it, blocks are taken as they are written.
                    Ok(_) | Err(_) => {}
                }
            }
        }
        Ok(())
    }

    fn check_deadline(&self, inner: &Inner) -> io::Result<()> {
        if inner.device.clock.is_past(self.deadline) { Err(late()) } else { Ok(()) }
    }

    /// Writes the directory behind the payload, and the frame.
    fn tell(
        &self,
        inner: &Inner,
        state: &NamespaceState,
        unit: &UnitPlan,
        room: &Reservation,
        generation: u64,
    ) -> io::Result<()> {
        self.check_deadline(inner)?;
        let directory_offset = room.offset + unit.directory_offset;
        let header = DirectoryHeader {
            namespace: state.fingerprint,
            segment: room.segment,
            generation,
            unit_offset: room.offset,
            directory_offset,
            directory_bytes: directory_bytes(&unit.runs),
            written_ns: self.written_ns.unwrap_or_else(crate::store::now_ns),
        };
        let mut directory = encode_directory(&header, &unit.runs);
        directory.resize((unit.bytes - unit.directory_offset) as usize, 0);
        inner.transfers.write_small(room.file.path(), room.file.buffered(), &directory, directory_offset)?;
        if inner.options.durable {
            room.file.buffered().sync_data()?;
        }
        // The last moment to take it back: the caller may not wait for it any more.
        self.check_deadline(inner)?;
        let add = AddUnit {
            segment: room.segment,
            generation,
            unit_offset: room.offset,
            unit_bytes: unit.bytes,
            directory_offset,
            directory_bytes: header.directory_bytes,
        };
        let keys: Vec<Vec<ShortKey>> = unit
            .runs
            .iter()
            .map(|run| run.entries.iter().map(|entry| short_key(&entry.key)).collect())
            .collect();
        let places = unit.runs.iter().zip(&keys).zip(entries_offsets(&unit.runs));
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
        let body = encode_add(&add, &runs);
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
