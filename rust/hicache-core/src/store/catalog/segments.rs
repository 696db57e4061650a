//! What a segment holds: units, the runs in them, and which bytes nobody needs any more.

use std::collections::BTreeMap;
use std::ops::Range;

use super::extents::Extents;
use super::runs::Runs;
use super::{RunPlace, SegmentId};
use crate::format::form::{Codec, Form};
use crate::format::frame::{AddRun, AddUnit};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::store::index::MAX_RUN_PAGES;

/// A unit that a journal told of.
pub(super) struct Unit {
    end: u64,
    directory_offset: u64,
    pub(super) generation: u64,
    pub(super) live_runs: u32,
}

/// Objects of a run that left, one after the other.
struct Departed {
    run: u32,
    first: u32,
    count: u32,
}

/// A segment of which something is known.
pub(super) struct Segment {
    pub(super) namespace: u16,
    pub(super) id: SegmentId,
    pub(super) units: BTreeMap<u64, Unit>,
    /// Runs by their first stored byte.
    pub(super) runs: BTreeMap<u64, u32>,
    pub(super) live_objects: u64,
    pub(super) live_bytes: u64,
    pub(super) written_bytes: u64,
    /// No live object was written before this.
    pub(super) oldest_ns: u64,
    departed: Vec<Departed>,
    dead: Extents,
    /// Units at the last look for gaps between them.
    units_looked_at: usize,
}

/// Whether the numbers of a run and its unit go together. Everything later counts on it.
pub(super) fn is_plausible(unit: &AddUnit, run: &AddRun<'_>) -> bool {
    let ends = || {
        let unit_end = unit.unit_offset.checked_add(unit.unit_bytes)?;
        let directory_end = unit.directory_offset.checked_add(unit.directory_bytes)?;
        let payload_end = run.payload_offset.checked_add(run.payload_bytes)?;
        Some((unit_end, directory_end, payload_end))
    };
    let Some((unit_end, directory_end, payload_end)) = ends() else { return false };
    let (pages, rest) = run.keys.as_chunks::<16>();
    let is_whole = match run.form.codec {
        Codec::None => (pages.len() as u64).checked_mul(run.form.page_bytes) == Some(run.payload_bytes),
        Codec::Zstd | Codec::ZstdPlanes => true,
    };
    unit.unit_offset >= SEGMENT_HEADER_BYTES
        && (unit.unit_offset..=unit_end).contains(&unit.directory_offset)
        && directory_end <= unit_end
        && (unit.directory_offset..directory_end).contains(&run.entries_offset)
        && run.payload_offset >= unit.unit_offset
        && payload_end <= unit.directory_offset
        && run.payload_bytes > 0
        && (1..=MAX_RUN_PAGES).contains(&pages.len())
        && rest.is_empty()
        && is_whole
}

impl Segment {
    pub(super) fn new(namespace: u16, id: SegmentId) -> Self {
        Segment {
            namespace,
            id,
            units: BTreeMap::new(),
            runs: BTreeMap::new(),
            live_objects: 0,
            live_bytes: 0,
            written_bytes: 0,
            oldest_ns: u64::MAX,
            departed: Vec::new(),
            dead: Extents::default(),
            units_looked_at: 0,
        }
    }

    /// Takes in the unit and says whether it has room for the run: published places are never used twice, so what
    /// overlaps is not true.
    pub(super) fn take_unit(&mut self, unit: &AddUnit, run: &AddRun<'_>, runs: &Runs) -> bool {
        let payload = run.payload_offset..run.payload_offset + run.payload_bytes;
        if let Some((_, &before)) = self.runs.range(..payload.end).next_back()
            && runs[before].payload_end() > payload.start
        {
            return false;
        }
        let end = unit.unit_offset + unit.unit_bytes;
        match self.units.range(..end).next_back() {
            Some((&start, have)) if start == unit.unit_offset => {
                let said = (end, unit.directory_offset, unit.generation);
                said == (have.end, have.directory_offset, have.generation)
            }
            Some((_, before)) if before.end > unit.unit_offset => false,
            _ => {
                self.dead.remove(unit.unit_offset..end);
                let (directory_offset, generation) = (unit.directory_offset, unit.generation);
                let unit_now = Unit { end, directory_offset, generation, live_runs: 0 };
                self.units.insert(unit.unit_offset, unit_now);
                true
            }
        }
    }

    /// Whether there may be bytes to give back.
    pub(super) fn has_changed(&self) -> bool {
        !self.departed.is_empty() || self.live_objects == 0
    }

    /// Notes that an object left.
    pub(super) fn note_departed(&mut self, run: u32, ordinal: u32) {
        if let Some(last) = self.departed.last_mut()
            && last.run == run
        {
            if last.first.checked_sub(1) == Some(ordinal) {
                (last.first, last.count) = (ordinal, last.count + 1);
                return;
            }
            if last.first + last.count == ordinal {
                last.count += 1;
                return;
            }
        }
        self.departed.push(Departed { run, first: ordinal, count: 1 });
    }

    /// The bytes that came free since the last call, joined with all free ones that they touch.
    pub(super) fn free_ranges(
        &mut self,
        runs: &Runs,
        forms: &[Form],
        is_finished: bool,
        entry_start: &mut dyn FnMut(&RunPlace, u32) -> Option<u64>,
    ) -> Vec<Range<u64>> {
        // Objects of several pools leave in turn; those of one run are asked for together.
        let mut left = std::mem::take(&mut self.departed);
        left.sort_unstable_by_key(|departed| (departed.run, departed.first));
        left.dedup_by(|next, before| {
            let is_next = before.run == next.run && before.first + before.count == next.first;
            before.count += if is_next { next.count } else { 0 };
            is_next
        });
        for departed in left {
            if let Some(range) = self.bytes_of(&departed, runs, forms, entry_start) {
                self.dead.insert(range);
            }
        }
        if is_finished && self.units_looked_at != self.units.len() {
            self.units_looked_at = self.units.len();
            let mut position = SEGMENT_HEADER_BYTES;
            for (&start, unit) in &self.units {
                self.dead.insert(position..start);
                position = unit.end;
            }
        }
        self.dead.take_grown()
    }

    /// Where departed objects lay, and what nobody else needs around them. A run without live objects counts as
    /// a whole, and so does a unit.
    fn bytes_of(
        &self,
        departed: &Departed,
        runs: &Runs,
        forms: &[Form],
        entry_start: &mut dyn FnMut(&RunPlace, u32) -> Option<u64>,
    ) -> Option<Range<u64>> {
        let run = &runs[departed.run];
        let unit = self.units.get(&run.unit_offset)?;
        if unit.live_runs == 0 {
            return Some(run.unit_offset..unit.end);
        }
        let whole = self.room_of(run.payload_offset, unit, run.unit_offset);
        if run.live == 0 {
            return Some(whole);
        }
        let place = self.place(departed.run, runs, forms);
        let is_even = place.form.codec == Codec::None;
        let mut start_of = |ordinal: u32| match ordinal {
            0 => Some(whole.start),
            _ if ordinal == run.pages => Some(whole.end),
            _ if is_even => Some(run.even_start(ordinal)),
            _ => entry_start(&place, ordinal)
                .filter(|start| (run.payload_offset..=run.payload_end()).contains(start)),
        };
        let range = start_of(departed.first)?..start_of(departed.first + departed.count)?;
        (range.start <= range.end).then_some(range)
    }

    /// The payload of a run with the padding around it.
    fn room_of(&self, payload_offset: u64, unit: &Unit, unit_offset: u64) -> Range<u64> {
        let is_first = self.runs.range(unit_offset..payload_offset).next().is_none();
        let start = if is_first { unit_offset } else { payload_offset };
        let next = self.runs.range(payload_offset + 1..).next();
        let end = next.map_or(unit.directory_offset, |(&start, _)| start.min(unit.directory_offset));
        start..end
    }

    pub(super) fn place(&self, number: u32, runs: &Runs, forms: &[Form]) -> RunPlace {
        let run = &runs[number];
        RunPlace {
            segment: self.id,
            unit_offset: run.unit_offset,
            entries_offset: run.entries_offset,
            directory_offset: self.units.get(&run.unit_offset).map_or(0, |unit| unit.directory_offset),
            payload_offset: run.payload_offset,
            payload_bytes: run.payload_bytes,
            pages: run.pages,
            form: forms[run.form as usize],
        }
    }

    pub(super) fn memory(&self) -> usize {
        // A B-tree node is two thirds full on average, and has some room for its links.
        let entries =
            self.units.len() * (8 + size_of::<Unit>()) + self.runs.len() * 12 + self.dead.len() * 24;
        size_of::<Segment>() + entries * 3 / 2 + self.departed.capacity() * size_of::<Departed>()
    }
}
