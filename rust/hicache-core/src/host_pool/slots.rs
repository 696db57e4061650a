//! Which slots are free, and which are whose. Numbers only: no memory, no locks.

use crate::{Error, ErrorKind, Result};

/// A slot as it was leased: another lease of the same slot is another handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotHandle {
    /// Which pool of this process.
    pub(super) pool: u64,
    /// Which slot of it, from 0.
    pub(super) slot: u32,
    /// How often the slot had been leased before.
    pub(super) generation: u32,
}

impl SlotHandle {
    /// Number of the slot in its pool, from 0.
    pub fn slot(self) -> u32 {
        self.slot
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    generation: u32,
    is_leased: bool,
}

/// The slots of one pool.
#[derive(Debug)]
pub(super) struct SlotTable {
    pool: u64,
    slots: Vec<Slot>,
    /// Free slots; the next one to be leased last.
    free: Vec<u32>,
}

impl SlotTable {
    pub(super) fn new(pool: u64, slots: u32) -> SlotTable {
        SlotTable { pool, slots: vec![Slot::default(); slots as usize], free: (0..slots).rev().collect() }
    }

    pub(super) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(super) fn leased(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }

    /// Leases `count` slots, or none and `None`.
    pub(super) fn lease(&mut self, count: u32) -> Option<Vec<SlotHandle>> {
        let rest = self.free.len().checked_sub(count as usize)?;
        let taken = self.free.split_off(rest);
        let handles = taken.into_iter().rev().map(|number| {
            let slot = &mut self.slots[number as usize];
            slot.is_leased = true;
            SlotHandle { pool: self.pool, slot: number, generation: slot.generation }
        });
        Some(handles.collect())
    }

    /// Checks that each handle is of a lease that has not ended.
    pub(super) fn check(&self, handles: &[SlotHandle]) -> Result<()> {
        handles.iter().try_for_each(|handle| self.check_one(*handle))
    }

    fn check_one(&self, SlotHandle { pool, slot, generation }: SlotHandle) -> Result<()> {
        let refused = |message: String| Err(Error::new(ErrorKind::Lease, message).with("slot", slot));
        if pool != self.pool {
            return refused(format!("expected a slot of this pool, found slot {slot} of another one"));
        }
        let Some(now) = self.slots.get(slot as usize) else {
            return refused(format!("expected a slot below {}, found {slot}", self.slots.len()));
        };
        match now {
            Slot { is_leased: true, generation: of_now } if *of_now == generation => Ok(()),
            Slot { is_leased: true, .. } => {
                refused(format!("slot {slot} was released, and is leased to somebody else since"))
            }
            Slot { is_leased: false, .. } => refused(format!("slot {slot} was released already")),
        }
    }

    /// Releases all, or none where one is not leased, or named twice.
    pub(super) fn release(&mut self, handles: &[SlotHandle]) -> Result<()> {
        for (index, handle) in handles.iter().enumerate() {
            if let Err(error) = self.check_one(*handle) {
                // Those before it are leased again, as they were.
                for earlier in &handles[..index] {
                    let slot = &mut self.slots[earlier.slot as usize];
                    slot.is_leased = true;
                    slot.generation = earlier.generation;
                }
                return Err(error);
            }
            let slot = &mut self.slots[handle.slot as usize];
            slot.is_leased = false;
            slot.generation = slot.generation.wrapping_add(1);
        }
        self.free.extend(handles.iter().rev().map(|handle| handle.slot));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_none_is_leased() {
        let mut table = SlotTable::new(1, 3);
        let two = table.lease(2).unwrap();
        assert_eq!(two.iter().map(|handle| handle.slot).collect::<Vec<_>>(), [0, 1]);
        assert!(table.lease(2).is_none());
        assert_eq!((table.free(), table.leased()), (1, 2));
        assert_eq!(table.lease(0).unwrap(), []);
    }

    #[test]
    fn a_second_release_changes_nothing() {
        let mut table = SlotTable::new(1, 2);
        let held = table.lease(2).unwrap();
        table.release(&held[..1]).unwrap();
        let error = table.release(&[held[1], held[0]]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lease);
        assert!(error.message().contains("slot 0 was released already"), "{error}");
        assert_eq!((table.free(), table.leased()), (1, 1));
        table.check(&held[1..]).unwrap();
        let twice = table.release(&[held[1], held[1]]).unwrap_err();
        assert!(twice.message().contains("slot 1"), "{twice}");
        table.check(&held[1..]).unwrap();
        assert_eq!((table.free(), table.leased()), (1, 1));
    }

    #[test]
    fn a_handle_ends_with_its_lease_though_the_slot_is_leased_again() {
        let mut table = SlotTable::new(1, 1);
        let old = table.lease(1).unwrap();
        table.release(&old).unwrap();
        let new = table.lease(1).unwrap();
        assert_eq!((new[0].slot, old[0].slot), (0, 0));
        let error = table.release(&old).unwrap_err();
        assert!(error.message().contains("leased to somebody else"), "{error}");
        table.check(&new).unwrap();
    }

    #[test]
    fn a_slot_of_another_pool_is_refused() {
        let (mut one, mut other) = (SlotTable::new(1, 1), SlotTable::new(2, 1));
        let foreign = other.lease(1).unwrap();
        one.lease(1).unwrap();
        assert!(one.release(&foreign).unwrap_err().message().contains("another one"));
        let beyond = SlotHandle { pool: 1, slot: 9, generation: 0 };
        assert!(one.check(&[beyond]).unwrap_err().message().contains("below 1"));
    }
}
