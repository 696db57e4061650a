//! The index of one namespace: which page is where, for the pools and tiles that views of this process use.
//!
//! 20 bytes an object, 5 in a hash table at a load of 7/16 to 7/8 (7/20 where objects came and went), and 28 a run. The short key decides a look-up;
//! the full key is compared when the directory entry is read, before any byte is served.

use std::collections::HashMap;
use std::ops::Range;

use hashbrown::HashTable;

use crate::format::directory::DIRECTORY_ALIGNMENT;
use crate::format::form::Form;
use crate::format::frame::{AddRun, AddUnit, Gone, Location, Reason, ShortKey};
use crate::format::{ProcessId, SegmentId};
use crate::namespace::Fingerprint;
use crate::tile::Tile;

/// Number of a form in this index.
pub type FormId = u16;

/// Pages in the longest run.
pub const MAX_RUN_PAGES: usize = 1 << 16;

/// Stands in a run for a page whose directory entry is damaged; no digest starts like this.
pub const UNNAMED: ShortKey = [0; 16];

/// A pool and tile that some view of this process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Identity of the pool.
    pub pool: Fingerprint,
    /// The rectangle wanted.
    pub tile: Tile,
}

/// An object of this index. Good for as long as the index is not read anew: places are what lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectId(u32);

/// A copy of an object that another copy makes needless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duplicate {
    /// The copy that goes.
    pub goes: Location,
    /// The copy that stays.
    pub stays: Location,
    /// Key of both.
    pub key: ShortKey,
    /// Form of both.
    pub form: FormId,
}

/// A run as the index keeps it.
#[derive(Debug, Clone, Copy)]
struct RunPlace {
    entries_offset: u64,
    /// In multiples of [`DIRECTORY_ALIGNMENT`].
    unit: u32,
    segment: u32,
    /// Number of its first object; the others follow.
    first: u32,
    form: FormId,
}

/// A segment as the index keeps it.
#[derive(Debug)]
struct SegmentPlace {
    id: SegmentId,
    /// Its file is gone, and with it everything it held.
    is_gone: bool,
    /// Its runs, by the place of their entries.
    runs: Vec<u32>,
}

/// Fewer dead objects than this are not worth a rebuild.
const REBUILD_OBJECTS: usize = 1 << 14;

/// Objects that are put in order before they go into a table.
const SORTED_AT_ONCE: usize = 1 << 18;

/// Index of one namespace.
pub struct Index {
    /// This process.
    process: ProcessId,
    /// Numbers of the objects that are there, by key and form.
    table: HashTable<u32>,
    /// Key of each object, those of a run one after the other: what follows a page in its chain is looked at first,
    /// and needs no look-up.
    keys: Vec<[u64; 2]>,
    /// Run of each object.
    run_of: Vec<u32>,
    /// A bit for each object that is not there any more.
    dead: Vec<u64>,
    dead_objects: usize,
    runs: Vec<RunPlace>,
    segments: Vec<SegmentPlace>,
    segment_numbers: HashMap<SegmentId, u32>,
    /// Whether one of the segments is this process's own.
    has_own: bool,
    forms: Vec<Form>,
    form_numbers: HashMap<Form, FormId>,
    /// The form of the run before, and its number if it is of interest: the next one mostly has the same.
    last_form: Option<(Form, Option<FormId>)>,
    interests: Vec<Interest>,
    generation: u64,
    /// Keys put into quarantine and not stored again since.
    quarantined: HashMap<ShortKey, Reason>,
    /// Copies of this process's own that are to go.
    duplicates: Vec<Duplicate>,
    /// Between [`Index::start_loading`] and [`Index::finish_loading`]: the table is empty.
    is_loading: bool,
}

impl Index {
    /// An empty index of a process.
    pub fn new(process: ProcessId) -> Self {
        Index {
            process,
            table: HashTable::new(),
            keys: Vec::new(),
            run_of: Vec::new(),
            dead: Vec::new(),
            dead_objects: 0,
            runs: Vec::new(),
            segments: Vec::new(),
            segment_numbers: HashMap::new(),
            has_own: false,
            forms: Vec::new(),
            form_numbers: HashMap::new(),
            last_form: None,
            interests: Vec::new(),
            generation: 0,
            quarantined: HashMap::new(),
            duplicates: Vec::new(),
            is_loading: false,
        }
    }

    /// Objects in the index.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Generation of the namespace that the objects belong to.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Adds an interest; `true` when objects that were skipped before may be wanted now.
    pub fn add_interest(&mut self, interest: Interest) -> bool {
        let known = self
            .interests
            .iter()
            .any(|have| have.pool == interest.pool && have.tile.contains(&interest.tile));
        if !known {
            self.interests.push(interest);
            self.last_form = None;
        }
        !known
    }

    /// Forgets all objects of generations before `generation`, which is every object when it is a newer one.
    pub fn raise_generation(&mut self, generation: u64) {
        if generation > self.generation {
            self.forget_objects();
            self.generation = generation;
        }
    }

    /// Forgets every object, to be read again from the journals.
    pub fn forget_objects(&mut self) {
        self.table = HashTable::new();
        self.keys = Vec::new();
        self.run_of = Vec::new();
        self.dead = Vec::new();
        self.dead_objects = 0;
        self.runs = Vec::new();
        self.segments.clear();
        self.segment_numbers.clear();
        self.has_own = false;
        self.quarantined.clear();
        self.duplicates.clear();
    }

    /// Takes in a run of a published unit, unless it is known. `is_there` says whether a segment's file exists; it is
    /// asked once for each segment: a segment without a file has nothing.
    pub fn add_run(&mut self, unit: &AddUnit, run: &AddRun<'_>, is_there: &mut dyn FnMut(SegmentId) -> bool) {
        self.raise_generation(unit.generation);
        if unit.generation < self.generation {
            return;
        }
        let Some(form) = self.wanted_form(run.form) else { return };
        // No writer puts a unit anywhere else.
        let Ok(unit_place) = u32::try_from(unit.unit_offset / DIRECTORY_ALIGNMENT) else { return };
        let segment = self.segment_number(unit.segment, is_there);
        let place = &self.segments[segment as usize];
        if place.is_gone {
            return;
        }
        let entries_offset = run.entries_offset;
        let Err(position) = self.position(place, entries_offset) else { return };
        let (number, first) = (self.runs.len() as u32, self.keys.len());
        let (keys, _) = run.keys.as_chunks::<16>();
        let keys = &keys[..keys.len().min(MAX_RUN_PAGES)];
        let Ok(first) = u32::try_from(first + keys.len()).map(|end| end - keys.len() as u32) else { return };
        self.segments[segment as usize].runs.insert(position, number);
        self.runs.push(RunPlace { entries_offset, unit: unit_place, segment, first, form });
        self.keys.extend(keys.iter().map(split));
        self.run_of.resize(self.keys.len(), number);
        self.dead.resize(self.keys.len().div_ceil(64), 0);
        for (object, key) in (first..).zip(keys) {
            if *key == UNNAMED {
                self.bury(object);
                continue;
            }
            if !self.quarantined.is_empty() {
                self.quarantined.remove(key);
            }
            if !self.is_loading {
                self.note_duplicate(object, key, form);
                self.insert(object, form);
            }
        }
    }

    fn insert(&mut self, object: u32, form: FormId) {
        if self.table.len() == self.table.capacity() {
            self.grow(object);
        }
        let (keys, run_of, runs) = (&self.keys, &self.run_of, &self.runs);
        let hash_of =
            |&object: &u32| hash(&keys[object as usize], runs[run_of[object as usize] as usize].form);
        self.table.insert_unique(hash(&keys[object as usize], form), object, hash_of);
    }

    /// Makes a larger table of the objects before `end`.
    fn grow(&mut self, end: u32) {
        // Beyond what is there, so that a table whose objects come and go is not made anew all the time.
        let objects = self.table.len();
        self.table = self.table_of(end, objects + objects / 4 + 1);
        debug_assert_eq!(self.table.len(), objects, "the table has the objects that are there");
    }

    /// A table of the objects before `end`, with room for `capacity`. Some at a time are put into the order of their places in
    /// it: in the order in which they are stored, each would bring a part of the table from memory.
    fn table_of(&self, end: u32, capacity: usize) -> HashTable<u32> {
        let mut table = HashTable::with_capacity(capacity);
        let places = table.num_buckets().max(1) as u64 - 1;
        let mut waiting: Vec<(u64, u32)> = Vec::with_capacity(capacity.min(SORTED_AT_ONCE));
        let mut put = |waiting: &mut Vec<(u64, u32)>| {
            waiting.sort_unstable_by_key(|(hash, _)| hash & places);
            for (hash, object) in waiting.drain(..) {
                // There is room: nothing is hashed again.
                table.insert_unique(hash, object, |_| hash);
            }
        };
        for (number, run) in (0..).zip(&self.runs) {
            for object in self.objects_of(number).take_while(|&object| object < end) {
                if !self.is_dead(object) {
                    waiting.push((hash(&self.keys[object as usize], run.form), object));
                }
                if waiting.len() == SORTED_AT_ONCE {
                    put(&mut waiting);
                }
            }
        }
        put(&mut waiting);
        table
    }

    /// Forgets every object; those that come until [`Index::finish_loading`] are found only from then on.
    pub fn start_loading(&mut self) {
        self.forget_objects();
        self.is_loading = true;
    }

    /// Makes the table of all objects at once, which takes a fraction of the time of putting in each as it comes.
    pub fn finish_loading(&mut self) {
        self.is_loading = false;
        let end = self.keys.len() as u32;
        if !self.has_own {
            self.table = self.table_of(end, end as usize - self.dead_objects);
            return;
        }
        self.table.reserve(end as usize - self.dead_objects, |_| 0);
        for object in (0..end).filter(|&object| !self.is_dead(object)).collect::<Vec<_>>() {
            let (key, form) = (join(&self.keys[object as usize]), self.form_number_of(ObjectId(object)));
            self.note_duplicate(object, &key, form);
            self.insert(object, form);
        }
    }

    /// Copies have a total order, by place. The owner of every one but the first takes it away; this process sees to
    /// its own.
    fn note_duplicate(&mut self, object: u32, key: &ShortKey, form: FormId) {
        if !self.has_own {
            return;
        }
        let words = split(key);
        let is_copy = |&&other: &&u32| {
            self.keys[other as usize] == words && self.form_number_of(ObjectId(other)) == form
        };
        let copies = self.table.iter_hash(hash(&words, form)).filter(is_copy);
        let mut places: Vec<Location> = copies.map(|&other| self.location(ObjectId(other))).collect();
        if places.is_empty() {
            return;
        }
        places.push(self.location(ObjectId(object)));
        let Some(stays) = places.iter().copied().min_by_key(order) else { return };
        let goes =
            places.into_iter().filter(|place| place.segment.process == self.process && *place != stays);
        self.duplicates.extend(goes.map(|goes| Duplicate { goes, stays, key: *key, form }));
    }

    /// Copies of this process's own that became known as needless since the last call.
    pub fn take_duplicates(&mut self) -> Vec<Duplicate> {
        std::mem::take(&mut self.duplicates)
    }

    /// Whether there is something to take by [`Index::take_duplicates`].
    pub fn has_duplicates(&self) -> bool {
        !self.duplicates.is_empty()
    }

    /// Takes out the objects of a record. `false`: their run is not known here, or not yet.
    pub fn apply_gone(&mut self, record: &Gone) -> bool {
        let Location { segment, entries_offset, ordinal } = record.location;
        let Some(&number) = self.segment_numbers.get(&segment) else { return false };
        let place = &self.segments[number as usize];
        if place.is_gone {
            return true;
        }
        let Ok(position) = self.position(place, entries_offset) else { return false };
        let objects = self.objects_of(place.runs[position]);
        let first = objects.start.saturating_add(ordinal).min(objects.end);
        let end = first.saturating_add(record.objects).min(objects.end);
        for object in (first..end).filter(|&object| !self.is_dead(object)).collect::<Vec<_>>() {
            self.take_out(object);
            if record.reason.is_quarantine() {
                self.quarantined.insert(join(&self.keys[object as usize]), record.reason);
            }
        }
        true
    }

    /// Takes out everything of segments that are not there any more.
    pub fn retain_segments(&mut self, is_there: &mut dyn FnMut(SegmentId) -> bool) {
        for number in 0..self.segments.len() {
            if !self.segments[number].is_gone && !is_there(self.segments[number].id) {
                self.forget_segment_number(number);
            }
        }
    }

    /// Takes out everything of a segment whose file is gone.
    pub fn forget_segment(&mut self, segment: SegmentId) {
        if let Some(&number) = self.segment_numbers.get(&segment) {
            self.forget_segment_number(number as usize);
        }
    }

    fn forget_segment_number(&mut self, number: usize) {
        let place = &mut self.segments[number];
        place.is_gone = true;
        for run in std::mem::take(&mut place.runs) {
            let objects = self.objects_of(run);
            for object in objects.filter(|&object| !self.is_dead(object)).collect::<Vec<_>>() {
                self.take_out(object);
            }
        }
    }

    fn take_out(&mut self, object: u32) {
        let hash = hash(&self.keys[object as usize], self.form_number_of(ObjectId(object)));
        if let Ok(entry) = self.table.find_entry(hash, |&number| number == object) {
            entry.remove();
        }
        self.bury(object);
    }

    fn bury(&mut self, object: u32) {
        self.dead[object as usize / 64] |= 1 << (object % 64);
        self.dead_objects += 1;
    }

    fn is_dead(&self, object: u32) -> bool {
        self.dead[object as usize / 64] >> (object % 64) & 1 == 1
    }

    /// Gives the memory of objects back that are not there any more, once they are the greater part.
    pub fn rebuild_if_sparse(&mut self) {
        if self.dead_objects < REBUILD_OBJECTS || self.dead_objects < self.table.len() {
            return;
        }
        let old = std::mem::replace(self, Index::new(self.process));
        self.forms = old.forms.clone();
        self.form_numbers = old.form_numbers.clone();
        self.interests = old.interests.clone();
        self.generation = old.generation;
        self.table.reserve(old.table.len(), |_| 0);
        for place in &old.segments {
            if place.is_gone || place.runs.is_empty() {
                continue;
            }
            let segment = self.segment_number(place.id, &mut |_| true);
            for &run in &place.runs {
                let objects = old.objects_of(run);
                // Tails of runs leave first, so that what is behind the last object need not be kept.
                let Some(last) = objects.clone().rev().find(|&object| !old.is_dead(object)) else { continue };
                let (number, first) = (self.runs.len() as u32, self.keys.len() as u32);
                let run = old.runs[run as usize];
                self.runs.push(RunPlace { segment, first, ..run });
                self.segments[segment as usize].runs.push(number);
                self.keys.extend_from_slice(&old.keys[objects.start as usize..=last as usize]);
                self.run_of.resize(self.keys.len(), number);
                self.dead.resize(self.keys.len().div_ceil(64), 0);
                for (object, before) in (first..).zip(objects.start..=last) {
                    if old.is_dead(before) { self.bury(object) } else { self.insert(object, run.form) }
                }
            }
        }
        self.quarantined = old.quarantined;
        self.duplicates = old.duplicates;
    }

    /// Numbers of the objects of a run.
    fn objects_of(&self, run: u32) -> Range<u32> {
        let first = self.runs[run as usize].first;
        let end = self.runs.get(run as usize + 1).map_or(self.keys.len() as u32, |next| next.first);
        first..end
    }

    /// Where in its segment's list the run with these entries stands, or would stand.
    fn position(&self, place: &SegmentPlace, entries_offset: u64) -> Result<usize, usize> {
        let offset_of = |&run: &u32| self.runs[run as usize].entries_offset;
        // Units are told in the order of their places, most of the time.
        match place.runs.last() {
            Some(last) if offset_of(last) < entries_offset => Err(place.runs.len()),
            None => Err(0),
            Some(_) => place.runs.binary_search_by_key(&entries_offset, offset_of),
        }
    }

    /// Finds an object of this key and form.
    pub fn find(&self, key: &ShortKey, form: FormId) -> Option<ObjectId> {
        let key = split(key);
        let same = |&object: &u32| {
            self.keys[object as usize] == key && self.form_number_of(ObjectId(object)) == form
        };
        self.table.find(hash(&key, form), same).map(|&object| ObjectId(object))
    }

    /// The object right behind another in its run, if it has this key and is there.
    pub fn find_behind(&self, before: ObjectId, key: &ShortKey) -> Option<ObjectId> {
        let next = before.0 as usize + 1;
        let is_there = self.keys.get(next) == Some(&split(key))
            && self.run_of[next] == self.run_of[next - 1]
            && !self.is_dead(next as u32);
        is_there.then_some(ObjectId(next as u32))
    }

    /// Whether an object of this key and form is there.
    pub fn has_form(&self, key: &ShortKey, form: &Form) -> bool {
        self.form_numbers.get(form).is_some_and(|&number| self.find(key, number).is_some())
    }

    /// Place of an object of this key and form.
    pub fn place(&self, key: &ShortKey, form: &Form) -> Option<Location> {
        self.find(key, *self.form_numbers.get(form)?).map(|object| self.location(object))
    }

    /// Whether the object at this place is still there.
    pub fn has_location(&self, key: &ShortKey, location: &Location) -> bool {
        self.at(key, location).is_some()
    }

    fn at(&self, key: &ShortKey, location: &Location) -> Option<ObjectId> {
        let key = split(key);
        (0..self.forms.len() as FormId).find_map(|form| {
            let same = |&object: &u32| {
                self.keys[object as usize] == key && self.location(ObjectId(object)) == *location
            };
            self.table.find(hash(&key, form), same).map(|&object| ObjectId(object))
        })
    }

    /// Place of an object, for ever.
    pub fn location(&self, object: ObjectId) -> Location {
        let run = self.run(object);
        Location {
            segment: self.segments[run.segment as usize].id,
            entries_offset: run.entries_offset,
            ordinal: object.0 - run.first,
        }
    }

    /// Offset in its segment of the unit that holds an object.
    pub fn unit_offset(&self, object: ObjectId) -> u64 {
        u64::from(self.run(object).unit) * DIRECTORY_ALIGNMENT
    }

    /// Form of an object.
    pub fn form(&self, object: ObjectId) -> &Form {
        &self.forms[usize::from(self.form_number_of(object))]
    }

    fn form_number_of(&self, object: ObjectId) -> FormId {
        self.run(object).form
    }

    fn run(&self, object: ObjectId) -> &RunPlace {
        &self.runs[self.run_of[object.0 as usize] as usize]
    }

    /// Why a key was put into quarantine, if it was and has not been stored again.
    pub fn quarantine_reason(&self, key: &ShortKey) -> Option<Reason> {
        self.quarantined.get(key).copied()
    }

    /// All forms seen, in the order of their numbers; numbers are never given anew.
    pub fn forms(&self) -> &[Form] {
        &self.forms
    }

    /// Number of a form that serves an interest; `None` for others.
    fn wanted_form(&mut self, form: Form) -> Option<FormId> {
        if let Some((last, number)) = self.last_form
            && last == form
        {
            return number;
        }
        let wanted =
            |interest: &Interest| interest.pool == form.pool && interest.tile.intersect(&form.tile).is_some();
        let number = if self.interests.iter().any(wanted) { self.form_number(form) } else { None };
        self.last_form = Some((form, number));
        number
    }

    fn form_number(&mut self, form: Form) -> Option<FormId> {
        if let Some(&number) = self.form_numbers.get(&form) {
            return Some(number);
        }
        let number = FormId::try_from(self.forms.len()).ok()?;
        self.forms.push(form);
        self.form_numbers.insert(form, number);
        Some(number)
    }

    fn segment_number(&mut self, segment: SegmentId, is_there: &mut dyn FnMut(SegmentId) -> bool) -> u32 {
        if let Some(&number) = self.segment_numbers.get(&segment) {
            return number;
        }
        let number = self.segments.len() as u32;
        self.segments.push(SegmentPlace { id: segment, is_gone: !is_there(segment), runs: Vec::new() });
        self.segment_numbers.insert(segment, number);
        self.has_own |= segment.process == self.process;
        number
    }
}

/// Order of copies of one object: the same for every process, told by no clock.
fn order(location: &Location) -> ([u8; 16], u32, u64, u32) {
    let Location { segment, entries_offset, ordinal } = location;
    (segment.process.0, segment.number, *entries_offset, *ordinal)
}

fn join(key: &[u64; 2]) -> ShortKey {
    let mut short = [0; 16];
    short[..8].copy_from_slice(&key[0].to_le_bytes());
    short[8..].copy_from_slice(&key[1].to_le_bytes());
    short
}

fn split(key: &ShortKey) -> [u64; 2] {
    let (halves, _) = key.as_chunks::<8>();
    [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])]
}

/// Page keys are digests already: one half, spread by the form, is as good as any hash of them.
fn hash(key: &[u64; 2], form: FormId) -> u64 {
    key[0] ^ u64::from(form).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
