//! The index of one namespace: which page is where, for the pools and tiles that views of this process use.
//!
//! 20 bytes an object, 5 in a hash table at a load of 7/16 to 7/8, and 32 a run. The short key decides a look-up;
//! the full key is compared when the directory entry is read, before any byte is served.

use std::collections::HashMap;

use hashbrown::HashTable;

use crate::format::SegmentId;
use crate::format::form::Form;
use crate::format::frame::{AddRun, AddUnit, Gone, Location, Reason, ShortKey};
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

/// A run as the index keeps it.
#[derive(Debug, Clone, Copy)]
struct RunPlace {
    entries_offset: u64,
    unit_offset: u64,
    segment: u32,
    /// Number of its first object; the others follow.
    first: u32,
    form: FormId,
}

/// Index of one namespace.
#[derive(Default)]
pub struct Index {
    /// Numbers of the objects that are there, by key and form.
    table: HashTable<u32>,
    /// Key of each object, those of a run one after the other: what follows a page in its chain is looked at first,
    /// and needs no look-up.
    keys: Vec<[u64; 2]>,
    /// Run of each object.
    run_of: Vec<u32>,
    /// A bit for each object that is not there any more.
    dead: Vec<u64>,
    runs: Vec<RunPlace>,
    segments: Vec<SegmentId>,
    segment_numbers: HashMap<SegmentId, u32>,
    forms: Vec<Form>,
    form_numbers: HashMap<Form, FormId>,
    interests: Vec<Interest>,
    generation: u64,
    /// Removes and quarantines, also of objects whose add has not been read yet: a remove is final.
    gone: HashMap<Location, Reason>,
    /// Keys put into quarantine and not stored again since.
    quarantined: HashMap<ShortKey, Reason>,
}

impl Index {
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
        }
        !known
    }

    /// Forgets all objects of generations before `generation`, which is every object when it is a newer one.
    pub fn raise_generation(&mut self, generation: u64) {
        if generation > self.generation {
            self.forget_objects();
            self.gone.clear();
            self.generation = generation;
        }
    }

    /// Forgets every object, to be read again from the journals.
    pub fn forget_objects(&mut self) {
        self.table = HashTable::new();
        self.keys = Vec::new();
        self.run_of = Vec::new();
        self.dead = Vec::new();
        self.runs = Vec::new();
        self.segments.clear();
        self.segment_numbers.clear();
        self.quarantined.clear();
    }

    /// Takes in a run of a published unit.
    pub fn add_run(&mut self, unit: &AddUnit, run: &AddRun<'_>) {
        self.raise_generation(unit.generation);
        let wanted = |interest: &Interest| {
            interest.pool == run.form.pool && interest.tile.intersect(&run.form.tile).is_some()
        };
        if unit.generation < self.generation || !self.interests.iter().any(wanted) {
            return;
        }
        let Some(form) = self.form_number(run.form) else { return };
        let segment = self.segment_number(unit.segment);
        let entries_offset = run.entries_offset;
        let (number, first) = (self.runs.len() as u32, self.keys.len());
        let (keys, _) = run.keys.as_chunks::<16>();
        let keys = &keys[..keys.len().min(MAX_RUN_PAGES)];
        let Ok(first_object) = u32::try_from(first + keys.len()).map(|end| end - keys.len() as u32) else {
            return;
        };
        let unit_offset = unit.unit_offset;
        self.runs.push(RunPlace { entries_offset, unit_offset, segment, first: first_object, form });
        self.keys.extend(keys.iter().map(split));
        self.run_of.resize(self.keys.len(), number);
        self.dead.resize(self.keys.len().div_ceil(64), 0);
        for (ordinal, key) in keys.iter().enumerate() {
            let object = first_object + ordinal as u32;
            let location = Location { segment: unit.segment, entries_offset, ordinal: ordinal as u32 };
            let reason = if self.gone.is_empty() { None } else { self.gone.get(&location).copied() };
            if *key == UNNAMED || reason.is_some() {
                self.bury(object);
                if let Some(reason) = reason.filter(|&reason| reason != Reason::Evicted) {
                    self.quarantined.insert(*key, reason);
                }
                continue;
            }
            if !self.quarantined.is_empty() {
                self.quarantined.remove(key);
            }
            let (keys, run_of, runs) = (&self.keys, &self.run_of, &self.runs);
            let hash_of =
                |&object: &u32| hash(&keys[object as usize], runs[run_of[object as usize] as usize].form);
            self.table.insert_unique(hash(&keys[object as usize], form), object, hash_of);
        }
    }

    /// Takes out removed or quarantined objects, now or when their add comes.
    pub fn apply_gone(&mut self, records: &[Gone]) {
        for record in records {
            self.gone.insert(record.location, record.reason);
            let removed = self.take_out(record);
            if removed && record.reason != Reason::Evicted {
                self.quarantined.insert(record.key, record.reason);
            }
        }
    }

    fn take_out(&mut self, record: &Gone) -> bool {
        let Some(object) = self.at(&record.key, &record.location) else { return false };
        let hash = hash(&self.keys[object.0 as usize], self.form_number_of(object));
        if let Ok(entry) = self.table.find_entry(hash, |&number| number == object.0) {
            entry.remove();
        }
        self.bury(object.0);
        true
    }

    fn bury(&mut self, object: u32) {
        self.dead[object as usize / 64] |= 1 << (object % 64);
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
            && self.dead[next / 64] >> (next % 64) & 1 == 0;
        is_there.then_some(ObjectId(next as u32))
    }

    /// Whether an object of this key and form is there.
    pub fn has_form(&self, key: &ShortKey, form: &Form) -> bool {
        self.form_numbers.get(form).is_some_and(|&number| self.find(key, number).is_some())
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
            segment: self.segments[run.segment as usize],
            entries_offset: run.entries_offset,
            ordinal: object.0 - run.first,
        }
    }

    /// Offset in its segment of the unit that holds an object.
    pub fn unit_offset(&self, object: ObjectId) -> u64 {
        self.run(object).unit_offset
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

    fn form_number(&mut self, form: Form) -> Option<FormId> {
        if let Some(&number) = self.form_numbers.get(&form) {
            return Some(number);
        }
        let number = FormId::try_from(self.forms.len()).ok()?;
        self.forms.push(form);
        self.form_numbers.insert(form, number);
        Some(number)
    }

    fn segment_number(&mut self, segment: SegmentId) -> u32 {
        let next = self.segments.len() as u32;
        *self.segment_numbers.entry(segment).or_insert_with(|| {
            self.segments.push(segment);
            next
        })
    }
}

fn split(key: &ShortKey) -> [u64; 2] {
    let (halves, _) = key.as_chunks::<8>();
    [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])]
}

/// Page keys are digests already: one half, spread by the form, is as good as any hash of them.
fn hash(key: &[u64; 2], form: FormId) -> u64 {
    key[0] ^ u64::from(form).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
