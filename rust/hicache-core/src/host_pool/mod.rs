//! Host pools: memory in slots of one size, each slot leased to one holder at a time.
//!
//! A pool that is closed while views of its memory or leases of its slots are alive refuses and stays open. A view
//! keeps the memory, whatever becomes of the pool. A forked child has no part in its parent's pools: every call is
//! refused there, and nothing is undone.

mod lease;
mod pool_set;
mod slots;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hicache_sys::Region;
use hicache_sys::memory::{HostMemory, MemoryError, MemoryErrorKind, MemoryOptions, MemoryReport};

pub use lease::Lease;
pub use pool_set::{Mapping, MappingWish, MemberPlan, PoolMember, PoolPlacement, PoolSet};
pub use slots::SlotHandle;

use crate::{Error, ErrorKind, Result};
use slots::SlotTable;

/// Memory in slots.
#[derive(Debug)]
pub struct HostPool {
    shared: Arc<Shared>,
}

/// What a pool and its leases share.
#[derive(Debug)]
struct Shared {
    slots: u32,
    slot_bytes: usize,
    process: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once closed.
    memory: Option<Arc<HostMemory>>,
    /// `None` where another process leases the slots.
    table: Option<SlotTable>,
    leases: u64,
}

/// How full a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUsage {
    /// Slots that nobody has.
    pub free_slots: u32,
    /// Slots that somebody has.
    pub leased_slots: u32,
    /// Leases that have not ended.
    pub leases: u64,
    /// Views of the memory that are alive: regions, buffers, tensors.
    pub views: u64,
}

impl HostPool {
    /// A pool of `slots` slots of `slot_bytes` zeroed bytes each, one after the other.
    ///
    /// # Errors
    /// `Geometry` for impossible sizes; `Config`, `Unsupported`, `Limit`, `Device` or `Io` where what is required
    /// cannot be had.
    pub fn new(slots: u64, slot_bytes: u64, options: &MemoryOptions) -> Result<HostPool> {
        let len = checked_bytes(slots, slot_bytes)?;
        let options = MemoryOptions { copy_page_bytes: slot_bytes as usize, ..options.clone() };
        let memory = HostMemory::new(len, &options)?;
        Ok(HostPool::over(memory, slots as u32, slot_bytes as usize, true))
    }

    /// A pool over memory that another process shares, by a descriptor of [`HostPool::descriptor`] that it sent.
    /// Its slots are leased there, and only there.
    ///
    /// # Errors
    /// As [`HostPool::new`]; `Config` for a descriptor of anything else, or of less memory.
    pub fn attach(
        descriptor: BorrowedFd<'_>,
        slots: u64,
        slot_bytes: u64,
        options: &MemoryOptions,
    ) -> Result<HostPool> {
        let len = checked_bytes(slots, slot_bytes)?;
        let options = MemoryOptions { copy_page_bytes: slot_bytes as usize, ..options.clone() };
        let memory = HostMemory::attach(descriptor, len, &options)?;
        Ok(HostPool::over(memory, slots as u32, slot_bytes as usize, false))
    }

    fn over(memory: HostMemory, slots: u32, slot_bytes: usize, leases_here: bool) -> HostPool {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let state = State {
            memory: Some(Arc::new(memory)),
            table: leases_here.then(|| SlotTable::new(number, slots)),
            leases: 0,
        };
        let process = hicache_sys::process_number();
        HostPool { shared: Arc::new(Shared { slots, slot_bytes, process, state: Mutex::new(state) }) }
    }

    /// Number of slots.
    pub fn slots(&self) -> u64 {
        u64::from(self.shared.slots)
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> u64 {
        self.shared.slot_bytes as u64
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.slots() * self.slot_bytes()
    }

    /// Leases `count` slots to the caller.
    ///
    /// # Errors
    /// `PoolExhausted` where fewer are free, and none is leased; `Unsupported` in a pool that was attached; `Closed`.
    pub fn lease(&self, count: u64) -> Result<Lease> {
        if let Some(lease) = self.try_lease(count)? {
            return Ok(lease);
        }
        let PoolUsage { free_slots, leased_slots, leases, .. } = self.usage()?;
        let message = format!(
            "expected {count} free slots, found {free_slots} of {} ({leased_slots} in {leases} leases)",
            self.slots()
        );
        let error = Error::new(ErrorKind::PoolExhausted, message);
        Err(error.with("wanted", count).with("free", free_slots).with("slots", self.slots()))
    }

    /// As [`HostPool::lease`], but a pool with too few free slots is a value.
    ///
    /// # Errors
    /// As [`HostPool::lease`], without `PoolExhausted`.
    pub fn try_lease(&self, count: u64) -> Result<Option<Lease>> {
        let mut state = self.shared.open_state()?;
        let Some(table) = &mut state.table else { return Err(leased_elsewhere()) };
        let Some(handles) = u32::try_from(count).ok().and_then(|count| table.lease(count)) else {
            return Ok(None);
        };
        state.leases += 1;
        Ok(Some(Lease::new(Arc::clone(&self.shared), handles)))
    }

    /// Ends a lease of this pool.
    ///
    /// # Errors
    /// `Lease` for one of another pool, or that has ended; `Closed` in a forked child.
    pub fn release(&self, lease: &Lease) -> Result<()> {
        self.shared.check_process()?;
        if !lease.is_of(&self.shared) {
            return Err(Error::new(
                ErrorKind::Lease,
                "expected a lease of this pool, found one of another pool",
            ));
        }
        lease.release()
    }

    /// Checks that each handle is of a slot whose lease has not ended.
    ///
    /// # Errors
    /// `Lease` naming the first that is not; `Closed`.
    pub fn check(&self, handles: &[SlotHandle]) -> Result<()> {
        let state = self.shared.open_state()?;
        state.table.as_ref().ok_or_else(leased_elsewhere)?.check(handles)
    }

    /// A view of the whole memory that keeps it, as the calls of a [`crate::View`] take it.
    ///
    /// # Errors
    /// `Closed`.
    pub fn region(&self) -> Result<Region> {
        let state = self.shared.open_state()?;
        Ok(open(&state)?.region()?)
    }

    /// What was got of what was wished for.
    ///
    /// # Errors
    /// `Closed`.
    pub fn report(&self) -> Result<MemoryReport> {
        let state = self.shared.open_state()?;
        Ok(open(&state)?.report().clone())
    }

    /// Address of the memory as devices see it; `None` where it is not registered.
    ///
    /// # Errors
    /// `Closed`, `Device`.
    pub fn device_address(&self) -> Result<Option<u64>> {
        let state = self.shared.open_state()?;
        let memory = Arc::clone(open(&state)?);
        drop(state);
        Ok(memory.device_address()?)
    }

    /// A descriptor by which other processes attach; `None` where the memory is not shared.
    ///
    /// # Errors
    /// `Closed`, `Io`.
    pub fn descriptor(&self) -> Result<Option<OwnedFd>> {
        let state = self.shared.open_state()?;
        Ok(open(&state)?.descriptor()?)
    }

    /// How full it is.
    ///
    /// # Errors
    /// `Closed`.
    pub fn usage(&self) -> Result<PoolUsage> {
        let state = self.shared.open_state()?;
        let views = Arc::strong_count(open(&state)?) as u64 - 1;
        let (free_slots, leased_slots) =
            state.table.as_ref().map_or((0, 0), |table| (table.free(), table.leased()));
        Ok(PoolUsage { free_slots, leased_slots, leases: state.leases, views })
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        !self.shared.is_inherited() && self.shared.state().memory.is_none()
    }

    /// Unregisters and unmaps the memory. Closing again does nothing.
    ///
    /// # Errors
    /// `Lease` while leases or views are alive: end them first; the pool stays open. `Device` where the driver
    /// refuses to let go: the pool is closed then, and its memory is never unmapped. `Closed` in a forked child.
    pub fn close(&self) -> Result<()> {
        self.shared.check_process()?;
        let mut state = self.shared.state();
        if state.leases > 0 && state.memory.is_some() {
            let leases = state.leases;
            let message =
                format!("expected no leases when a pool is closed, found {leases}: release them first");
            return Err(Error::new(ErrorKind::Lease, message).with("leases", leases));
        }
        let Some(memory) = state.memory.take() else { return Ok(()) };
        match Arc::try_unwrap(memory) {
            Ok(memory) => {
                // The driver waits for the device, which is no reason for others to wait for the lock.
                drop(state);
                Ok(memory.close()?)
            }
            Err(memory) => {
                let views = Arc::strong_count(&memory) - 1;
                state.memory = Some(memory);
                let message = format!(
                    "expected no views of the memory when a pool is closed, found {views}: drop buffers, arrays and tensors first"
                );
                Err(Error::new(ErrorKind::Lease, message).with("views", views))
            }
        }
    }
}

impl Shared {
    fn is_inherited(&self) -> bool {
        hicache_sys::process_number() != self.process
    }

    fn check_process(&self) -> Result<()> {
        if self.is_inherited() {
            let message =
                "pool belongs to another process: a forked child has no part in it, start children by spawn";
            return Err(Error::new(ErrorKind::Closed, message).with("process", self.process));
        }
        Ok(())
    }

    /// The lock, in the process that made the pool: a forked child may not wait for it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        self.check_process()?;
        let state = self.state();
        open(&state)?;
        Ok(state)
    }

    fn release_slots(&self, handles: &[SlotHandle]) -> Result<()> {
        let mut state = self.state();
        state.table.as_mut().ok_or_else(leased_elsewhere)?.release(handles)
    }

    fn end_lease(&self, handles: &[SlotHandle]) -> Result<()> {
        let mut state = self.state();
        state.leases = state.leases.saturating_sub(1);
        state.table.as_mut().ok_or_else(leased_elsewhere)?.release(handles)
    }
}

fn open(state: &State) -> Result<&Arc<HostMemory>> {
    state.memory.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "the pool was closed"))
}

fn leased_elsewhere() -> Error {
    let message = "the slots of an attached pool are leased in the process that made it";
    Error::new(ErrorKind::Unsupported, message)
}

fn checked_bytes(slots: u64, slot_bytes: u64) -> Result<usize> {
    if slots == 0 || slots > 1 << 31 || slot_bytes == 0 {
        return Err(Error::geometry(format!(
            "expected 1 to 2^31 slots of at least 1 byte, found {slots} of {slot_bytes} bytes"
        )));
    }
    let bytes = slots.checked_mul(slot_bytes).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| {
        Error::geometry(format!("{slots} slots of {slot_bytes} bytes are more than there can be"))
    })
}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Self {
        let kind = match error.kind() {
            MemoryErrorKind::Invalid => ErrorKind::Config,
            MemoryErrorKind::Unsupported => ErrorKind::Unsupported,
            MemoryErrorKind::Limit => ErrorKind::Limit,
            MemoryErrorKind::Device => ErrorKind::Device,
            MemoryErrorKind::Forked => ErrorKind::Closed,
            _ => ErrorKind::Io,
        };
        let message = error.message().to_owned();
        Error::new(kind, message).with_source(error.into_source())
    }
}
