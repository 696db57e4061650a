//! The eviction catalog: every object of a root, and who leaves when there is no room.
//!
//! It is built by the process that evicts, from the frames of all journals: all namespaces, pools, tiles and writers.
//! Frames of different processes may come in any order; those of one process come in theirs. It promises that no page
//! leaves before what continues it, that a page leaves as a whole, that no object is given out twice, and that no byte
//! of a live object is called free. It opens no file, reads no clock and takes no lock. It trusts no number in a
//! frame: a run whose numbers do not go together is not taken in, and nothing of it is given out.

mod extents;
mod pages;
mod pending;
mod policy;
mod queues;
mod runs;
mod segments;
mod victims;

use std::collections::HashMap;
use std::ops::Range;

pub use victims::Victim;

use crate::format::SegmentId;
use crate::format::form::Form;
use crate::format::frame::{AddRun, AddUnit, Gone, ShortKey};
use crate::namespace::Fingerprint;
use crate::store::index::UNNAMED;
use pages::{NONE, Pages, USED};
use pending::Pending;
use queues::Queues;
use runs::{Run, Runs};
use segments::{Segment, is_plausible};

/// A segment is sparse when less than this share of what was written is live.
const SPARSE_SHARE: u64 = 4;

/// Every object of a root. See the module.
#[derive(Default)]
pub struct Catalog {
    namespaces: Vec<NamespaceGeneration>,
    namespace_numbers: HashMap<Fingerprint, u16>,
    forms: Vec<Form>,
    form_numbers: HashMap<Form, u32>,
    segments: Vec<Option<Segment>>,
    vacant_segments: Vec<u32>,
    segment_numbers: HashMap<(u16, SegmentId), u32>,
    runs: Runs,
    pages: Pages,
    queues: Queues,
    pending: Pending,
    stored_pages: usize,
    objects: usize,
    live_bytes: u64,
    /// Of pages never used again.
    unused_bytes: u64,
}

struct NamespaceGeneration {
    fingerprint: Fingerprint,
    generation: u64,
}

/// A run as told in its add frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunPlace {
    /// Its segment.
    pub segment: SegmentId,
    /// First byte of its unit in the segment.
    pub unit_offset: u64,
    /// First byte of its directory entries in the segment.
    pub entries_offset: u64,
    /// First byte of its unit's directory in the segment.
    pub directory_offset: u64,
    /// First stored byte in the segment.
    pub payload_offset: u64,
    /// Stored bytes of all pages, gone ones included.
    pub payload_bytes: u64,
    /// Pages, gone ones included.
    pub pages: u32,
    /// Form of its objects.
    pub form: Form,
}

/// What is still live of a run: what a compaction copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveRun {
    /// The run.
    pub place: RunPlace,
    /// When it was written, ns since 1970; copies keep it, for their time to live.
    pub written_ns: u64,
    /// Its live objects, in the order of the run.
    pub stretches: Vec<LiveStretch>,
}

/// Live objects of a run that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveStretch {
    /// Position in the run of the first one.
    pub first: u32,
    /// Their keys.
    pub keys: Vec<ShortKey>,
    /// Key of the page before the first one; zeros when it is not known or there is none.
    pub parent: ShortKey,
    /// Pages before the first one, or [`UNKNOWN_DEPTH`](crate::format::directory::UNKNOWN_DEPTH).
    pub depth: u32,
}

/// Bytes of a segment that nobody needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeRanges {
    /// What may be punched, in order: everything that came free since the last call, joined with what was free
    /// before and touches it.
    pub ranges: Vec<Range<u64>>,
    /// Nothing that was told of is live in the whole segment. A live writer may have more in it that it has not told of.
    pub is_empty: bool,
}

/// A segment of which little is live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sparse {
    /// Its namespace.
    pub namespace: Fingerprint,
    /// The segment.
    pub segment: SegmentId,
    /// Stored bytes of its live objects.
    pub live_bytes: u64,
    /// Stored bytes of all objects that it ever held. Directories count in neither.
    pub written_bytes: u64,
}

/// Totals of a catalog.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Pages of which at least one object is live.
    pub pages: usize,
    /// Live objects.
    pub objects: usize,
    /// Stored bytes of live objects.
    pub live_bytes: u64,
    /// Those of pages that were never used again since they were stored.
    pub unused_bytes: u64,
    /// Pages whose parent is known and not stored: nobody can use them until it is stored again.
    pub orphans: usize,
    /// Bytes of memory that the catalog holds, about.
    pub memory_bytes: usize,
}

impl Catalog {
    /// Takes in a run of a published unit, written at `written_ns`. A run that is known already changes nothing, even if its
    /// objects are gone.
    pub fn add(&mut self, namespace: Fingerprint, unit: &AddUnit, run: &AddRun<'_>, written_ns: u64) {
        let Some(namespace) = self.namespace_number(namespace) else { return };
        self.raise(namespace, unit.generation);
        if !is_plausible(unit, run) {
            return;
        }
        let Some(segment) = self.segment_number(namespace, unit.segment) else { return };
        if self.runs.find(segment, run.entries_offset).is_some() {
            return;
        }
        let Some(form) = self.form_number(run.form) else { return };
        let Some(known) = self.segments[segment as usize].as_mut() else { return };
        if !known.take_unit(unit, run, &self.runs) {
            return;
        }
        let (keys, _) = run.keys.as_chunks::<16>();
        let number = self.runs.insert(Run {
            written_ns,
            unit_offset: unit.unit_offset,
            entries_offset: run.entries_offset,
            payload_offset: run.payload_offset,
            payload_bytes: run.payload_bytes,
            segment,
            form,
            depth: run.depth,
            pages: keys.len() as u32,
            live: 0,
            first: NONE,
        });
        let Some(number) = number else { return };
        known.runs.insert(run.payload_offset, number);
        known.written_bytes += run.payload_bytes;
        let is_over = unit.generation < self.namespaces[usize::from(namespace)].generation;
        let gone = self.pending.take_gone((namespace, unit.segment, run.entries_offset));
        let mut is_gone = vec![is_over; keys.len()];
        for (first, count) in gone {
            let first = (first as usize).min(keys.len());
            let end = first.saturating_add(count as usize).min(keys.len());
            is_gone[first..end].fill(true);
        }
        self.take_in(namespace, number, run.parent, keys, &is_gone);
        self.compact();
    }

    /// Takes in remove and quarantine frames. Both are final. What is not known yet waits for its add, until
    /// [`settle`](Self::settle).
    pub fn remove(&mut self, namespace: Fingerprint, records: &[Gone]) {
        let Some(namespace) = self.namespace_number(namespace) else { return };
        for record in records {
            let place = record.location;
            let segment = self.segment_numbers.get(&(namespace, place.segment));
            let run = segment.and_then(|&segment| self.runs.find(segment, place.entries_offset));
            let Some(run) = run else {
                let name = (namespace, place.segment, place.entries_offset);
                self.pending.insert_gone(name, place.ordinal, record.objects);
                continue;
            };
            let end = place.ordinal.saturating_add(record.objects).min(self.runs[run].pages);
            self.remove_objects(run, place.ordinal..end);
        }
        self.compact();
    }

    /// Takes in a touch frame written at `at_ns`: the last page of each prefix that was used, the latest use last. The
    /// pages before it count as used with it, and leave after it.
    pub fn touch(&mut self, namespace: Fingerprint, keys: &[ShortKey], at_ns: u64) {
        let Some(namespace) = self.namespace_number(namespace) else { return };
        for (later, key) in keys.iter().rev().enumerate() {
            // The order in the frame is kept by nanoseconds that nobody measured.
            let at_ns = at_ns.saturating_sub(later as u64);
            let page = self.pages.find(namespace, key).filter(|&page| self.pages[page].added < at_ns);
            match page {
                Some(page) if self.pages[page].is_stored() => self.use_again(page, at_ns),
                _ => self.pending.insert_touch(namespace, key, at_ns),
            }
        }
    }

    /// To be called after each complete look at the journals: removes and touches whose adds did not come in this look
    /// or the one before are forgotten.
    pub fn settle(&mut self) {
        self.pending.settle();
    }

    /// Everything of generations before `generation` is dead. An add of a newer generation says the same.
    pub fn raise_generation(&mut self, namespace: Fingerprint, generation: u64) {
        if let Some(namespace) = self.namespace_number(namespace) {
            self.raise(namespace, generation);
            self.compact();
        }
    }

    /// The file is gone, and with it all that was in it.
    pub fn forget_segment(&mut self, namespace: Fingerprint, segment: SegmentId) {
        let Some(&namespace) = self.namespace_numbers.get(&namespace) else { return };
        let Some(number) = self.segment_numbers.remove(&(namespace, segment)) else { return };
        for run in self.runs_of(number) {
            self.remove_objects(run, 0..self.runs[run].pages);
            self.runs.remove(run);
        }
        self.segments[number as usize] = None;
        self.vacant_segments.push(number);
        self.compact();
    }

    /// What may be punched in a segment since the last call.
    ///
    /// In a segment that is not finished, no byte outside the units that were told of is free. In a finished one, everything up
    /// to the last of these units is that is not live, except the segment's header. `entry_start` tells where the
    /// stored bytes of an object of a compressed run start in the segment; where it cannot, they come free with the
    /// last object of the run.
    pub fn free_ranges(
        &mut self,
        namespace: Fingerprint,
        segment: SegmentId,
        is_finished: bool,
        entry_start: &mut dyn FnMut(&RunPlace, u32) -> Option<u64>,
    ) -> FreeRanges {
        let Some(number) = self.known_segment(namespace, segment) else {
            return FreeRanges { ranges: Vec::new(), is_empty: true };
        };
        let Some(known) = self.segments[number as usize].as_mut() else {
            return FreeRanges { ranges: Vec::new(), is_empty: true };
        };
        let ranges = known.free_ranges(&self.runs, &self.forms, is_finished, entry_start);
        FreeRanges { ranges, is_empty: known.live_objects == 0 }
    }

    /// Segments in which something came free since the last [`free_ranges`](Self::free_ranges), or nothing is live.
    pub fn changed(&self) -> Vec<(Fingerprint, SegmentId)> {
        let changed = self.segments.iter().flatten().filter(|segment| segment.has_changed());
        changed.map(|segment| self.name(segment)).collect()
    }

    /// The segments of which something is known.
    pub fn segments(&self) -> Vec<(Fingerprint, SegmentId)> {
        self.segments.iter().flatten().map(|segment| self.name(segment)).collect()
    }

    fn name(&self, segment: &Segment) -> (Fingerprint, SegmentId) {
        (self.namespaces[usize::from(segment.namespace)].fingerprint, segment.id)
    }

    /// Segments of which something is live, but less than a quarter of what was written.
    pub fn sparse(&self) -> Vec<Sparse> {
        let segments = self.segments.iter().flatten();
        let sparse = segments.filter(|segment| {
            segment.live_objects > 0 && segment.live_bytes < segment.written_bytes / SPARSE_SHARE
        });
        let describe = |segment: &Segment| Sparse {
            namespace: self.namespaces[usize::from(segment.namespace)].fingerprint,
            segment: segment.id,
            live_bytes: segment.live_bytes,
            written_bytes: segment.written_bytes,
        };
        sparse.map(describe).collect()
    }

    /// What is live in a segment, in the order of its bytes.
    pub fn live_runs(&self, namespace: Fingerprint, segment: SegmentId) -> Vec<LiveRun> {
        let number = self.known_segment(namespace, segment);
        let known = number.and_then(|number| self.segments[number as usize].as_ref());
        let Some(known) = known else { return Vec::new() };
        let runs = known.runs.values().filter(|&&run| self.runs[run].live > 0);
        let describe = |&run: &u32| LiveRun {
            place: known.place(run, &self.runs, &self.forms),
            written_ns: self.runs[run].written_ns,
            stretches: self.live_stretches(run),
        };
        runs.map(describe).collect()
    }

    /// Totals. Looks at every page.
    pub fn totals(&self) -> Totals {
        let orphans = self
            .pages
            .iter()
            .filter(|page| page.is_stored() && page.parent != NONE && !self.pages[page.parent].is_stored());
        Totals {
            pages: self.stored_pages,
            objects: self.objects,
            live_bytes: self.live_bytes,
            unused_bytes: self.unused_bytes,
            orphans: orphans.count(),
            memory_bytes: self.memory(),
        }
    }

    /// Stored bytes of live objects, as in the [`totals`](Self::totals), without looking at any page.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    fn memory(&self) -> usize {
        let segments: usize = self.segments.iter().flatten().map(Segment::memory).sum();
        self.pages.memory()
            + self.runs.memory()
            + self.queues.memory()
            + self.pending.memory()
            + segments
            + self.segment_numbers.capacity() * 32
            + self.forms.capacity() * 3 * size_of::<Form>()
    }

    /// Puts the objects of a new run into their pages, and the pages behind each other.
    fn take_in(&mut self, namespace: u16, run: u32, parent: ShortKey, keys: &[ShortKey], is_gone: &[bool]) {
        let written_ns = self.runs[run].written_ns;
        let mut before = if parent == UNNAMED { None } else { self.pages.find_or_insert(namespace, &parent) };
        // Pages that were there already have their turn.
        let mut touched = Vec::with_capacity(keys.len() + 1);
        touched.extend(before);
        for (ordinal, key) in (0..).zip(keys) {
            let page = match *key == UNNAMED {
                true => None,
                false => self.pages.find_or_insert(namespace, key),
            };
            let Some(page) = page else {
                // Its bytes hold nothing that anybody could ask for.
                self.note_departed(run, ordinal);
                before = None;
                continue;
            };
            if let Some(parent) = before
                && self.pages.link(page, parent)
                && self.pages[page].has(USED)
            {
                self.mark_used(parent);
            }
            self.pages[page].recency = self.pages[page].recency.max(written_ns);
            if is_gone[ordinal as usize] {
                self.note_departed(run, ordinal);
            } else {
                self.enliven(run, ordinal, page);
            }
            touched.push(page);
            before = Some(page);
        }
        if let Some(segment) = self.segments[self.runs[run].segment as usize].as_mut()
            && self.runs[run].live > 0
        {
            segment.oldest_ns = segment.oldest_ns.min(written_ns);
            if let Some(unit) = segment.units.get_mut(&self.runs[run].unit_offset) {
                unit.live_runs += 1;
            }
        }
        // From the tail, so that a joint that nothing hangs on any more goes before the one above it.
        for page in touched.into_iter().rev() {
            if !self.pages[page].is_vacant() {
                self.release(page);
            }
        }
    }

    fn enliven(&mut self, run: u32, ordinal: u32, page: u32) {
        let next = self.pages[page].objects;
        let object = self.runs.enliven(run, ordinal, page, next);
        let bytes = self.runs[run].bytes(ordinal, 1);
        self.stored_pages += usize::from(next == NONE);
        self.objects += 1;
        self.live_bytes += bytes;
        if let Some(segment) = self.segments[self.runs[run].segment as usize].as_mut() {
            segment.live_objects += 1;
            segment.live_bytes += bytes;
        }
        let written_ns = self.runs[run].written_ns;
        let page_now = &mut self.pages[page];
        page_now.objects = object;
        page_now.added = page_now.added.min(written_ns);
        if !page_now.has(USED) {
            self.unused_bytes += bytes;
        }
        let (namespace, key) = (page_now.namespace, page_now.key);
        if let Some(at_ns) = self.pending.touched(namespace, &key)
            && at_ns > self.pages[page].added
        {
            self.use_again(page, at_ns);
        }
    }

    fn use_again(&mut self, page: u32, at_ns: u64) {
        let recency = &mut self.pages[page].recency;
        *recency = at_ns.max(*recency);
        self.mark_used(page);
    }

    /// Marks a page and all above it as used again. What is marked has only marked pages above it, so that each is
    /// met once.
    fn mark_used(&mut self, mut page: u32) {
        while page != NONE && !self.pages[page].has(USED) {
            self.pages[page].flags |= USED;
            let mut object = self.pages[page].objects;
            while object != NONE {
                let (run, ordinal) = self.runs.place(object);
                self.unused_bytes -= self.runs[run].bytes(ordinal, 1);
                object = self.runs.at(object).next;
            }
            self.queue(page);
            page = self.pages[page].parent;
        }
    }

    /// Lets a stored page that nothing continues wait for its turn.
    fn queue(&mut self, page: u32) {
        if self.pages[page].is_stored() && self.pages[page].is_leaf() {
            self.queues.push(&mut self.pages, page, self.stored_pages);
        }
    }

    /// Objects of a run are gone, whoever says so.
    fn remove_objects(&mut self, run: u32, ordinals: Range<u32>) {
        for ordinal in ordinals.rev() {
            let Some(object) = self.runs.object(run, ordinal) else { return };
            let page = self.runs.at(object).page;
            if page == NONE {
                continue;
            }
            let next = self.runs.at(object).next;
            let mut before = self.pages[page].objects;
            if before == object {
                self.pages[page].objects = next;
            } else {
                while self.runs.at(before).next != object {
                    before = self.runs.at(before).next;
                }
                self.runs.at_mut(before).next = next;
            }
            self.bury(object, self.pages[page].has(USED));
            if !self.pages[page].is_stored() {
                self.depart(page);
            }
        }
    }

    /// Takes an object, which its page does not list any more, out of all totals.
    fn bury(&mut self, object: u32, page_is_used: bool) {
        let (run, ordinal) = self.runs.place(object);
        let bytes = self.runs[run].bytes(ordinal, 1);
        let is_last = self.runs.bury(object);
        self.objects -= 1;
        self.live_bytes -= bytes;
        if !page_is_used {
            self.unused_bytes -= bytes;
        }
        let Some(segment) = self.segments[self.runs[run].segment as usize].as_mut() else { return };
        segment.live_objects -= 1;
        segment.live_bytes -= bytes;
        segment.note_departed(run, ordinal);
        if is_last && let Some(unit) = segment.units.get_mut(&self.runs[run].unit_offset) {
            unit.live_runs -= 1;
        }
    }

    fn note_departed(&mut self, run: u32, ordinal: u32) {
        if let Some(segment) = self.segments[self.runs[run].segment as usize].as_mut() {
            segment.note_departed(run, ordinal);
        }
    }

    /// The last object of a page is gone. The nearest page or joint above it that is still known.
    fn depart(&mut self, page: u32) -> u32 {
        self.stored_pages -= 1;
        self.pages[page].added = u64::MAX;
        self.release(page)
    }

    /// Forgets a page if nothing is stored of it or behind it, then those above it likewise; a page that thereby becomes
    /// a leaf waits for its turn, as recent as what continued it. The first one that stays.
    fn release(&mut self, mut page: u32) -> u32 {
        while page != NONE && !self.pages[page].is_stored() && self.pages[page].is_leaf() {
            let (parent, recency) = (self.pages[page].parent, self.pages[page].recency);
            self.pages.remove(page);
            page = parent;
            if page != NONE {
                self.pages[page].recency = self.pages[page].recency.max(recency);
            }
        }
        if page != NONE {
            self.queue(page);
        }
        page
    }

    fn raise(&mut self, namespace: u16, generation: u64) {
        let known = &mut self.namespaces[usize::from(namespace)].generation;
        if generation <= *known {
            return;
        }
        *known = generation;
        for number in 0..self.segments.len() as u32 {
            let is_ours = |segment: &Segment| segment.namespace == namespace;
            if !self.segments[number as usize].as_ref().is_some_and(is_ours) {
                continue;
            }
            for run in self.runs_of(number) {
                self.remove_objects(run, 0..self.runs[run].pages);
            }
            self.find_oldest(number);
        }
    }

    fn runs_of(&self, segment: u32) -> Vec<u32> {
        let segment = self.segments[segment as usize].as_ref();
        segment.map(|segment| segment.runs.values().copied().collect()).unwrap_or_default()
    }

    fn find_oldest(&mut self, segment: u32) {
        if let Some(segment) = self.segments[segment as usize].as_mut() {
            let live = segment.runs.values().map(|&run| &self.runs[run]).filter(|run| run.live > 0);
            segment.oldest_ns = live.map(|run| run.written_ns).min().unwrap_or(u64::MAX);
        }
    }

    fn live_stretches(&self, number: u32) -> Vec<LiveStretch> {
        let run = &self.runs[number];
        let mut stretches: Vec<LiveStretch> = Vec::new();
        for ordinal in 0..run.pages {
            let object = self.runs.object(number, ordinal).map(|object| self.runs.at(object).page);
            let Some(page) = object.filter(|&page| page != NONE).map(|page| &self.pages[page]) else {
                continue;
            };
            match stretches.last_mut() {
                Some(last) if last.first + last.keys.len() as u32 == ordinal => last.keys.push(page.key),
                _ => stretches.push(LiveStretch {
                    first: ordinal,
                    keys: vec![page.key],
                    parent: if page.parent == NONE { UNNAMED } else { self.pages[page.parent].key },
                    // All ones, which stand for an unknown depth, stay as they are.
                    depth: run.depth.saturating_add(ordinal),
                }),
            }
        }
        stretches
    }

    fn compact(&mut self) {
        self.runs.compact(self.pages.iter_mut().map(|page| &mut page.objects));
    }

    fn known_segment(&self, namespace: Fingerprint, segment: SegmentId) -> Option<u32> {
        let namespace = self.namespace_numbers.get(&namespace)?;
        self.segment_numbers.get(&(*namespace, segment)).copied()
    }

    fn namespace_number(&mut self, fingerprint: Fingerprint) -> Option<u16> {
        if let Some(&number) = self.namespace_numbers.get(&fingerprint) {
            return Some(number);
        }
        let number = u16::try_from(self.namespaces.len()).ok()?;
        self.namespaces.push(NamespaceGeneration { fingerprint, generation: 0 });
        self.namespace_numbers.insert(fingerprint, number);
        Some(number)
    }

    fn segment_number(&mut self, namespace: u16, id: SegmentId) -> Option<u32> {
        if let Some(&number) = self.segment_numbers.get(&(namespace, id)) {
            return Some(number);
        }
        let segment = Some(Segment::new(namespace, id));
        let number = match self.vacant_segments.pop() {
            Some(number) => {
                self.segments[number as usize] = segment;
                number
            }
            None => {
                let number = u32::try_from(self.segments.len()).ok()?;
                self.segments.push(segment);
                number
            }
        };
        self.segment_numbers.insert((namespace, id), number);
        Some(number)
    }

    fn form_number(&mut self, form: Form) -> Option<u32> {
        if let Some(&number) = self.form_numbers.get(&form) {
            return Some(number);
        }
        let number = u32::try_from(self.forms.len()).ok()?;
        self.forms.push(form);
        self.form_numbers.insert(form, number);
        Some(number)
    }
}

/// Makes room for more without doubling what is there: memory counts for more here than copying.
fn reserve_lean<T>(items: &mut Vec<T>, more: usize) {
    if items.capacity() - items.len() < more {
        items.reserve_exact(more.max(items.len() / 8 + 64));
    }
}

fn push_lean<T>(items: &mut Vec<T>, item: T) {
    reserve_lean(items, 1);
    items.push(item);
}
