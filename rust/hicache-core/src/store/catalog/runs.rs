//! Runs and the objects in them.
//!
//! Objects of a run have numbers that follow each other. A run whose objects are all gone is remembered for as long as
//! its segment, so that a frame which is read again brings nothing back; its objects' numbers are given anew.

use hashbrown::HashTable;

use super::pages::NONE;

/// 12 bytes.
pub(super) struct Object {
    /// [`NONE`] when the object is gone.
    pub(super) page: u32,
    /// The next object of the same page.
    pub(super) next: u32,
    pub(super) run: u32,
}

/// A run as told by its writer.
pub(super) struct Run {
    pub(super) written_ns: u64,
    pub(super) unit_offset: u64,
    pub(super) entries_offset: u64,
    pub(super) payload_offset: u64,
    pub(super) payload_bytes: u64,
    pub(super) segment: u32,
    pub(super) form: u32,
    pub(super) depth: u32,
    /// Pages as stored, gone ones included.
    pub(super) pages: u32,
    pub(super) live: u32,
    /// Number of its first object, as long as any is live.
    pub(super) first: u32,
}

impl Run {
    pub(super) fn payload_end(&self) -> u64 {
        self.payload_offset + self.payload_bytes
    }

    /// Where the object would start if all were of one length, as uncompressed ones are. The differences add up to
    /// the bytes of the run.
    pub(super) fn even_start(&self, ordinal: u32) -> u64 {
        let share = u128::from(self.payload_bytes) * u128::from(ordinal) / u128::from(self.pages);
        self.payload_offset + share as u64
    }

    /// Stored bytes of `count` objects: exact when uncompressed, else their share of the run.
    pub(super) fn bytes(&self, ordinal: u32, count: u32) -> u64 {
        self.even_start(ordinal + count) - self.even_start(ordinal)
    }
}

/// All runs of all segments.
#[derive(Default)]
pub(super) struct Runs {
    slots: Vec<Run>,
    vacant: Vec<u32>,
    table: HashTable<u32>,
    objects: Vec<Object>,
    /// Numbers of objects that no live run has.
    unowned: usize,
}

impl std::ops::Index<u32> for Runs {
    type Output = Run;

    fn index(&self, run: u32) -> &Run {
        &self.slots[run as usize]
    }
}

impl std::ops::IndexMut<u32> for Runs {
    fn index_mut(&mut self, run: u32) -> &mut Run {
        &mut self.slots[run as usize]
    }
}

impl Runs {
    pub(super) fn find(&self, segment: u32, entries_offset: u64) -> Option<u32> {
        let same = |&run: &u32| self[run].segment == segment && self[run].entries_offset == entries_offset;
        self.table.find(hash(segment, entries_offset), same).copied()
    }

    /// Takes in a run without live objects; `None` when there is no number left for it or its objects.
    pub(super) fn insert(&mut self, mut run: Run) -> Option<u32> {
        let first = u32::try_from(self.objects.len()).ok()?;
        first.checked_add(run.pages).filter(|&end| end != NONE)?;
        let number = match self.vacant.pop() {
            Some(number) => number,
            None => u32::try_from(self.slots.len()).ok().filter(|&number| number != NONE)?,
        };
        let key = hash(run.segment, run.entries_offset);
        (run.first, run.live) = (first, 0);
        super::reserve_lean(&mut self.objects, run.pages as usize);
        self.objects.extend((0..run.pages).map(|_| Object { page: NONE, next: NONE, run: number }));
        self.unowned += run.pages as usize;
        match self.slots.get_mut(number as usize) {
            Some(slot) => *slot = run,
            None => super::push_lean(&mut self.slots, run),
        }
        let slots = &self.slots;
        let hash_of = |&run: &u32| hash(slots[run as usize].segment, slots[run as usize].entries_offset);
        self.table.insert_unique(key, number, hash_of);
        Some(number)
    }

    /// Forgets a run without live objects.
    pub(super) fn remove(&mut self, run: u32) {
        let key = hash(self[run].segment, self[run].entries_offset);
        if let Ok(entry) = self.table.find_entry(key, |&number| number == run) {
            entry.remove();
        }
        self[run].first = NONE;
        self.vacant.push(run);
    }

    /// Number of an object, if its run has any live one.
    pub(super) fn object(&self, run: u32, ordinal: u32) -> Option<u32> {
        let run = &self[run];
        (run.live > 0 && ordinal < run.pages).then(|| run.first + ordinal)
    }

    pub(super) fn at(&self, object: u32) -> &Object {
        &self.objects[object as usize]
    }

    pub(super) fn at_mut(&mut self, object: u32) -> &mut Object {
        &mut self.objects[object as usize]
    }

    /// Run and place in it of an object.
    pub(super) fn place(&self, object: u32) -> (u32, u32) {
        let run = self.at(object).run;
        (run, object - self[run].first)
    }

    /// Makes an object of a run that is just being taken in live, first in the list of its page.
    pub(super) fn enliven(&mut self, run: u32, ordinal: u32, page: u32, next: u32) -> u32 {
        let object = self[run].first + ordinal;
        if self[run].live == 0 {
            self.unowned -= self[run].pages as usize;
        }
        self[run].live += 1;
        (self.at_mut(object).page, self.at_mut(object).next) = (page, next);
        object
    }

    /// The object is gone. True when it was the last one of its run.
    pub(super) fn bury(&mut self, object: u32) -> bool {
        let run = self.at(object).run;
        (self.at_mut(object).page, self.at_mut(object).next) = (NONE, NONE);
        self[run].live -= 1;
        let is_last = self[run].live == 0;
        if is_last {
            self.unowned += self[run].pages as usize;
        }
        is_last
    }

    /// Gives the numbers of gone runs back once they are many. `heads` are the first objects of all pages.
    pub(super) fn compact<'a>(&mut self, heads: impl Iterator<Item = &'a mut u32>) {
        if self.unowned < 4096 + self.objects.len() / 4 {
            return;
        }
        let mut live: Vec<u32> = (0..self.slots.len() as u32)
            .filter(|&run| self[run].first != NONE && self[run].live > 0)
            .collect();
        live.sort_unstable_by_key(|&run| self[run].first);
        // Where each run goes, by its number.
        let mut target = vec![NONE; self.slots.len()];
        let mut end = 0;
        for &run in &live {
            target[run as usize] = end;
            end += self[run].pages;
        }
        let moved = |object: u32| {
            let (run, ordinal) = self.place(object);
            target[run as usize] + ordinal
        };
        for head in heads {
            *head = moved(*head);
        }
        let links: Vec<u32> = self
            .objects
            .iter()
            .map(|object| if object.next == NONE { NONE } else { moved(object.next) })
            .collect();
        for (object, next) in self.objects.iter_mut().zip(links) {
            object.next = next;
        }
        for &run in &live {
            let (from, to) = (self[run].first, target[run as usize]);
            for ordinal in 0..self[run].pages {
                self.objects.swap((from + ordinal) as usize, (to + ordinal) as usize);
            }
            self[run].first = to;
        }
        self.objects.truncate(end as usize);
        self.objects.shrink_to_fit();
        self.unowned = 0;
    }

    pub(super) fn memory(&self) -> usize {
        self.slots.capacity() * size_of::<Run>()
            + self.table.allocation_size()
            + self.vacant.capacity() * size_of::<u32>()
            + self.objects.capacity() * size_of::<Object>()
    }
}

fn hash(segment: u32, entries_offset: u64) -> u64 {
    let mixed = (entries_offset ^ (u64::from(segment) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32)
}
