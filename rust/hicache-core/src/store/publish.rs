//! Publishing a unit: room first, then payload, directory and frame, in this order.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::format::directory::{
    DIRECTORY_ALIGNMENT, DirectoryHeader, Parent, Run, directory_bytes, encode as encode_directory,
    entries_offsets,
};
use crate::format::form::Codec;
use crate::format::frame::{AddRun, AddUnit, FrameKind, ShortKey, encode_add, short_key};
use crate::store::Inner;
use crate::store::namespace_state::NamespaceState;
use crate::store::segment_writer::Reservation;

/// Pages from this size on start at multiples of the direct I/O alignment.
const LARGE_PAGE_BYTES: u64 = hicache_sys::DIRECT_ALIGNMENT as u64;

/// A unit with a place for each of its parts.
pub(crate) struct UnitPlan {
    /// Its runs. What `payload_offset` of a run and of its entries says is from the start of the unit.
    pub(crate) runs: Vec<Run>,
    /// Bytes of the whole unit.
    pub(crate) bytes: u64,
    alignment: u64,
    directory_offset: u64,
}

/// Why a unit was not published.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The root's capacity is used up.
    Capacity(u64),
    /// The system said no.
    Io(io::Error),
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Io(error) => error,
            Refused::Capacity(bytes) => io::Error::new(
                io::ErrorKind::QuotaExceeded,
                format!("the root's capacity of {bytes} bytes is used up"),
            ),
        }
    }
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

    /// Writes the unit and tells everybody. `write_payload` writes the payload, and fills in what it learns about
    /// blocks on the way. On failure nobody learns of the unit, and its room goes back.
    pub(crate) fn publish(
        mut self,
        inner: &Inner,
        state: &NamespaceState,
        write_payload: impl FnOnce(&mut [Run], &Reservation) -> io::Result<()>,
    ) -> Result<(), Refused> {
        if !inner.budget.take(&inner.paths, self.bytes) {
            return Err(Refused::Capacity(inner.description.capacity_bytes));
        }
        let published = self.write(inner, state, write_payload);
        match published {
            Ok(()) => {
                state.refresh(&inner.counters);
                Ok(())
            }
            Err(error) => {
                inner.budget.give_back(self.bytes);
                Err(Refused::Io(error))
            }
        }
    }

    fn write(
        &mut self,
        inner: &Inner,
        state: &NamespaceState,
        write_payload: impl FnOnce(&mut [Run], &Reservation) -> io::Result<()>,
    ) -> io::Result<()> {
        inner.announce()?;
        let generation = state.index().generation();
        let next_number = || inner.next_segment_number();
        let (room, sealed) =
            state.writer.reserve(&inner.transfers, generation, self.bytes, self.alignment, next_number)?;
        if let Some(sealed) = sealed {
            inner.tell_sealed(state.fingerprint, &sealed);
        }
        let written =
            write_payload(&mut self.runs, &room).and_then(|()| self.tell(inner, state, &room, generation));
        state.writer.finish(&room, written.is_ok().then_some(room.offset + self.directory_offset));
        if written.is_ok() {
            inner.files.insert(&state.fingerprint, room.segment, Arc::clone(&room.file));
        }
        written
    }

    /// Writes the directory behind the payload, and the frame.
    fn tell(
        &self,
        inner: &Inner,
        state: &NamespaceState,
        room: &Reservation,
        generation: u64,
    ) -> io::Result<()> {
        let directory_offset = room.offset + self.directory_offset;
        let header = DirectoryHeader {
            namespace: state.fingerprint,
            segment: room.segment,
            generation,
            unit_offset: room.offset,
            directory_offset,
            directory_bytes: directory_bytes(&self.runs),
            written_ns: crate::store::now_ns(),
        };
        let mut directory = encode_directory(&header, &self.runs);
        directory.resize((self.bytes - self.directory_offset) as usize, 0);
        inner.transfers.write_small(room.file.path(), room.file.buffered(), &directory, directory_offset)?;
        if inner.options.durable {
            room.file.buffered().sync_data()?;
        }
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
        inner.say(FrameKind::Add, state.fingerprint, 1, &encode_add(&unit, &runs))
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
