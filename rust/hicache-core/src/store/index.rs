//! The index of one namespace: which page is where, for the pools and tiles that views of this process use.
//!
//! 24 bytes an object and a table byte, at a load of 7/16 to 7/8; 24 bytes a run. The short key decides a
//! look-up; the full key is compared when the directory entry is read, before any byte is served.

use std::collections::HashMap;

use hashbrown::HashTable;

use crate::format::SegmentId;
use crate::format::form::Form;
use crate::format::frame::{AddRun, AddUnit, Gone, Location, Reason, ShortKey};
use crate::namespace::Fingerprint;
use crate::tile::Tile;

/// Number of a form in this index.
pub type FormId = u16;

/// Pages in the longest run: its ordinal takes two bytes in the index.
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

/// Where an object is, and in which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Form of the object.
    pub form: FormId,
    /// Run in this index.
    pub run: u32,
    /// Position in the run.
    pub ordinal: u16,
}

#[derive(Clone, Copy)]
struct Slot {
    key: [u64; 2],
    run: u32,
    ordinal: u16,
    form: FormId,
}

/// A run as the index keeps it.
#[derive(Debug, Clone, Copy)]
struct RunPlace {
    entries_offset: u64,
    unit_offset: u64,
    segment: u32,
}

/// Index of one namespace.
#[derive(Default)]
pub struct Index {
    table: HashTable<Slot>,
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
        let number = self.runs.len() as u32;
        let (entries_offset, unit_offset) = (run.entries_offset, unit.unit_offset);
        self.runs.push(RunPlace { entries_offset, unit_offset, segment });
        let (keys, _) = run.keys.as_chunks::<16>();
        for (ordinal, key) in keys.iter().enumerate().take(MAX_RUN_PAGES) {
            let location = Location { segment: unit.segment, entries_offset, ordinal: ordinal as u32 };
            if *key == UNNAMED {
                continue;
            }
            if !self.gone.is_empty()
                && let Some(&reason) = self.gone.get(&location)
            {
                if reason != Reason::Evicted {
                    self.quarantined.insert(*key, reason);
                }
                continue;
            }
            if !self.quarantined.is_empty() {
                self.quarantined.remove(key);
            }
            let slot = Slot { key: split(key), run: number, ordinal: ordinal as u16, form };
            self.table.insert_unique(hash(&slot.key, form), slot, |slot| hash(&slot.key, slot.form));
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
        let key = split(&record.key);
        let (runs, segments) = (&self.runs, &self.segments);
        for form in 0..self.forms.len() as FormId {
            let same = |slot: &Slot| {
                slot.key == key && slot.form == form && place(runs, segments, slot) == record.location
            };
            if let Ok(entry) = self.table.find_entry(hash(&key, form), same) {
                entry.remove();
                return true;
            }
        }
        false
    }

    /// Finds an object of this key and form.
    pub fn find(&self, key: &ShortKey, form: FormId) -> Option<Found> {
        let key = split(key);
        self.table.find(hash(&key, form), |slot| slot.key == key && slot.form == form).map(|slot| Found {
            form,
            run: slot.run,
            ordinal: slot.ordinal,
        })
    }

    /// Whether an object of this key and form is there.
    pub fn has_form(&self, key: &ShortKey, form: &Form) -> bool {
        self.form_numbers.get(form).is_some_and(|&number| self.find(key, number).is_some())
    }

    /// Whether the object at this place is still there, under whatever number.
    pub fn has_location(&self, key: &ShortKey, location: &Location) -> bool {
        let key = split(key);
        (0..self.forms.len() as FormId).any(|form| {
            let same = |slot: &Slot| {
                slot.key == key && slot.form == form && place(&self.runs, &self.segments, slot) == *location
            };
            self.table.find(hash(&key, form), same).is_some()
        })
    }

    /// Place of an object, for ever.
    pub fn location(&self, found: &Found) -> Location {
        let slot = Slot { key: [0; 2], run: found.run, ordinal: found.ordinal, form: found.form };
        place(&self.runs, &self.segments, &slot)
    }

    /// Offset in its segment of the unit that holds a run.
    pub fn unit_offset(&self, run: u32) -> u64 {
        self.runs[run as usize].unit_offset
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

fn place(runs: &[RunPlace], segments: &[SegmentId], slot: &Slot) -> Location {
    let run = &runs[slot.run as usize];
    Location {
        segment: segments[run.segment as usize],
        entries_offset: run.entries_offset,
        ordinal: u32::from(slot.ordinal),
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
