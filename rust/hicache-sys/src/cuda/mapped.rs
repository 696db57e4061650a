//! Small pieces of registered host memory of our own, which both sides reach: index vectors and error words.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::plan_device::{DeviceMemory, PlanDevice};
use crate::Region;
use crate::memory::{HostMemory, MemoryError, MemoryErrorKind, MemoryOptions, Wish};

/// Zeroed memory of the host that a device reads and writes. Its size is a multiple of 8 bytes.
pub struct MappedMemory {
    region: Arc<Region>,
    device: Arc<DeviceMemory>,
}

impl MappedMemory {
    /// Makes and registers at least `bytes` bytes for `device`.
    ///
    /// # Errors
    /// Where there is no such memory, or the driver does not register it.
    pub fn new(device: &PlanDevice, bytes: usize) -> Result<MappedMemory, MemoryError> {
        let options = MemoryOptions {
            huge_pages: Wish::Off,
            register: Wish::Require,
            touch_threads: 1,
            ..MemoryOptions::default()
        };
        let refused = |error: super::CudaError| MemoryError::new(MemoryErrorKind::Device, error.to_string());
        let entered = device.enter().map_err(refused)?;
        let memory = Arc::new(HostMemory::new(bytes.next_multiple_of(8).max(8), &options)?);
        let region = Arc::new(memory.region()?);
        drop(entered);
        let device = device.reach(Arc::clone(&region)).map_err(refused)?;
        Ok(MappedMemory { region, device })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Whether it has no bytes: only in a forked child.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory as the device sees it.
    pub fn device(&self) -> &Arc<DeviceMemory> {
        &self.device
    }

    /// The device's address of byte `offset`.
    pub fn address(&self, offset: usize) -> u64 {
        self.device.extent().base + offset as u64
    }

    /// The word at byte `offset`, which the device may write meanwhile; 0 in a forked child, which has none.
    ///
    /// # Panics
    /// Where there is no aligned word.
    pub fn word(&self, offset: usize) -> u32 {
        assert!(offset.is_multiple_of(4), "a word at an aligned offset");
        if self.is_empty() {
            return 0;
        }
        let place = self.region.pointer(offset as u64, 4).expect("a word inside").cast();
        // SAFETY: four aligned bytes of memory that lives as long as `self`; whoever else writes them, the device,
        // does so in one piece.
        let word = unsafe { AtomicU32::from_ptr(place) };
        word.load(Ordering::Acquire)
    }

    /// Puts integers at byte `offset`, of memory that no launch under way uses.
    ///
    /// # Panics
    /// Where they do not fit.
    pub fn put(&self, offset: usize, integers: &[i64]) {
        let bytes = size_of_val(integers) as u64;
        let place = self.region.pointer(offset as u64, bytes).expect("integers that fit");
        // SAFETY: `bytes` bytes of plain integers, to as many bytes in bounds of memory of our own.
        unsafe { std::ptr::copy_nonoverlapping(integers.as_ptr().cast(), place, bytes as usize) };
    }
}

impl fmt::Debug for MappedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedMemory({} bytes)", self.len())
    }
}

/// Blocks of mapped memory that are used again: once enough of them are there, none is made any more.
#[derive(Debug)]
pub struct MappedBlocks {
    free: Mutex<Vec<MappedMemory>>,
}

/// Least bytes of a block.
const LEAST_BLOCK: usize = 64 << 10;

impl MappedBlocks {
    /// Blocks for `device`, of which the first is made now.
    ///
    /// # Errors
    /// As [`MappedMemory::new`].
    pub fn new(device: &PlanDevice) -> Result<Arc<MappedBlocks>, MemoryError> {
        let first = MappedMemory::new(device, LEAST_BLOCK)?;
        Ok(Arc::new(MappedBlocks { free: Mutex::new(vec![first]) }))
    }

    /// A block of at least `bytes` bytes, whatever they hold; it comes back here when it is dropped. `device` is the
    /// one that the first block was made for: it holds blocks in use, so that they do not hold it.
    ///
    /// # Errors
    /// As [`MappedMemory::new`], where one has to be made.
    pub fn lease(self: &Arc<Self>, device: &PlanDevice, bytes: usize) -> Result<MappedBlock, MemoryError> {
        let mut free = self.free();
        let found = free.iter().position(|block| block.len() >= bytes);
        let block = found.map(|place| free.swap_remove(place));
        drop(free);
        let block = match block {
            Some(block) => block,
            None => MappedMemory::new(device, bytes.next_power_of_two().max(LEAST_BLOCK))?,
        };
        Ok(MappedBlock { block: Some(block), blocks: Arc::clone(self) })
    }

    /// Blocks that nobody uses now.
    pub fn idle(&self) -> usize {
        self.free().len()
    }

    fn free(&self) -> MutexGuard<'_, Vec<MappedMemory>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A block in use.
#[derive(Debug)]
pub struct MappedBlock {
    /// `None` only while it is dropped.
    block: Option<MappedMemory>,
    blocks: Arc<MappedBlocks>,
}

impl std::ops::Deref for MappedBlock {
    type Target = MappedMemory;

    fn deref(&self) -> &MappedMemory {
        self.block.as_ref().expect("a block in use")
    }
}

impl Drop for MappedBlock {
    fn drop(&mut self) {
        self.blocks.free().extend(self.block.take());
    }
}
