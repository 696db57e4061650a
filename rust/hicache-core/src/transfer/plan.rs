//! Plans of whole batches: for each layer, how the pages of all pools come from one side to the other.

use std::sync::{Arc, OnceLock};

use hicache_sys::Region;
use hicache_sys::cuda::DeviceMemory;

use super::cpu::check_extent;
use super::slots::{PoolSlots, Slots};
use crate::layout::Layout;
use crate::plan::CopyPlan;
use crate::tile::{Span, Tile};
use crate::{Error, Result};

/// A buffer of a device. Its bytes are never touched by this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceBuffer {
    /// Address on the device.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Buffers of a device: lent, with what keeps them; or named by their addresses alone, which plans may be made of and
/// lowered for, but nothing is copied to.
#[derive(Debug, Clone)]
pub struct DeviceBuffers {
    buffers: Arc<[DeviceBuffer]>,
    lent: Option<Arc<[Arc<DeviceMemory>]>>,
}

impl DeviceBuffers {
    /// Buffers that were lent, each with its owner, which plans hold.
    pub fn lent(memory: Vec<Arc<DeviceMemory>>) -> DeviceBuffers {
        let buffer = |memory: &Arc<DeviceMemory>| {
            let extent = memory.extent();
            DeviceBuffer { address: extent.base, bytes: extent.len }
        };
        DeviceBuffers { buffers: memory.iter().map(buffer).collect(), lent: Some(memory.into()) }
    }

    /// The memory, where it was lent.
    pub fn memory(&self) -> Option<&[Arc<DeviceMemory>]> {
        self.lent.as_deref()
    }
}

impl From<Vec<DeviceBuffer>> for DeviceBuffers {
    fn from(buffers: Vec<DeviceBuffer>) -> DeviceBuffers {
        DeviceBuffers { buffers: buffers.into(), lent: None }
    }
}

/// Buffers of one side of a pool, as its layout numbers them.
#[derive(Debug, Clone)]
pub enum Memory {
    /// Of the host.
    Host(Arc<[Arc<Region>]>),
    /// Of a device.
    Device(DeviceBuffers),
}

impl Memory {
    fn lengths(&self) -> Vec<u64> {
        match self {
            Memory::Host(regions) => regions.iter().map(|region| region.len() as u64).collect(),
            Memory::Device(of_device) => of_device.buffers.iter().map(|buffer| buffer.bytes).collect(),
        }
    }

    /// Whether it is a device's.
    pub fn is_on_device(&self) -> bool {
        matches!(self, Memory::Device(_))
    }

    /// Address and bytes of a buffer.
    pub fn buffer(&self, number: usize) -> Option<DeviceBuffer> {
        match self {
            Memory::Host(regions) => {
                let region = regions.get(number)?;
                Some(DeviceBuffer { address: region.address() as u64, bytes: region.len() as u64 })
            }
            Memory::Device(of_device) => of_device.buffers.get(number).copied(),
        }
    }
}

/// A layout and the memory that is laid out so.
#[derive(Debug, Clone)]
pub struct Placed {
    /// Where the rows are.
    pub layout: Layout,
    /// In what.
    pub memory: Memory,
}

impl Placed {
    fn check(&self, what: &str) -> Result<()> {
        let extent =
            crate::plan::Extent { slots: self.layout.slots, buffer_bytes: self.layout.buffer_bytes.clone() };
        check_extent(what, &extent, self.memory.lengths().into_iter())
    }
}

/// One pool of a transfer: its pages on the host, and on the device.
#[derive(Debug, Clone)]
pub struct TransferPool {
    /// Name, as the store's view has it.
    pub name: String,
    /// The host pool.
    pub host: Placed,
    /// The device rows: one for all layers, or several that share them out, as where each layer is a tensor.
    pub device: Vec<Placed>,
    /// The step with which the pool's first layer goes; 0 where pools begin together.
    pub first_step: u32,
}

/// The pages of one pool in one step.
#[derive(Debug, Clone)]
pub struct Move {
    /// Position of the pool.
    pub pool: usize,
    /// How one page comes from one side to the other.
    pub plan: CopyPlan,
    /// Where the pages are.
    pub src: Memory,
    /// Where they go.
    pub dst: Memory,
}

/// What one launch moves: one layer of all pools that have it.
#[derive(Debug, Clone)]
pub struct LayerPlan {
    /// Position of the layer, from 0.
    pub step: u32,
    /// One for each pool that has a layer in this step.
    pub moves: Vec<Move>,
}

impl LayerPlan {
    /// Bytes of one page of all pools.
    pub fn page_bytes(&self) -> u64 {
        self.moves.iter().map(|one| one.plan.bytes()).sum()
    }
}

/// The plans of all layers of all pools, made once for their layouts and memory. A step is the position of a layer in
/// this rank's part of the model, from 0, whatever number the model gives it.
#[derive(Debug)]
pub struct TransferPlan {
    pools: Vec<TransferPool>,
    restore: Vec<Arc<LayerPlan>>,
    backup: OnceLock<Vec<Arc<LayerPlan>>>,
}

impl TransferPlan {
    /// Plans for `pools`, whose memory is checked against their layouts here and nowhere else.
    ///
    /// # Errors
    /// `Geometry` for memory that is too small, layers that the device does not hold, and layouts of different pools.
    pub fn new(pools: Vec<TransferPool>) -> Result<TransferPlan> {
        if pools.is_empty() {
            return Err(Error::config("expected at least one pool, found none"));
        }
        for pool in &pools {
            pool.host.check(&format!("host pool {:?}", pool.name))?;
            for device in &pool.device {
                device.check(&format!("device rows of pool {:?}", pool.name))?;
            }
            if let Some(first) = pool.device.first()
                && let Some(other) = pool.device.iter().find(|other| other.layout.slots != first.layout.slots)
            {
                return Err(Error::geometry(format!(
                    "expected {} slots in all device rows of pool {:?}, found {}",
                    first.layout.slots, pool.name, other.layout.slots
                )));
            }
        }
        let steps = pools.iter().map(|pool| pool.first_step + pool.host.layout.tile.layers.len()).max();
        let restore = (0..steps.unwrap_or(0))
            .map(|step| Ok(Arc::new(layer_plan(&pools, step)?)))
            .collect::<Result<Vec<_>>>()?;
        Ok(TransferPlan { pools, restore, backup: OnceLock::new() })
    }

    /// How many layers, over all pools.
    pub fn steps(&self) -> u32 {
        self.restore.len() as u32
    }

    /// The pools.
    pub fn pools(&self) -> &[TransferPool] {
        &self.pools
    }

    /// Whether any of its memory is a device's.
    pub fn is_on_device(&self) -> bool {
        self.memory().any(Memory::is_on_device)
    }

    /// The memory of all pools: of each the host's, then the device's.
    pub(super) fn memory(&self) -> impl Iterator<Item = &Memory> {
        self.placed().map(|(_, placed)| &placed.memory)
    }

    /// What is placed where, with the name of its pool.
    pub(super) fn placed(&self) -> impl Iterator<Item = (&str, &Placed)> {
        self.pools.iter().flat_map(|pool| {
            let placed = std::iter::once(&pool.host).chain(&pool.device);
            placed.map(|placed| (pool.name.as_str(), placed))
        })
    }

    /// From the host to the device, by step.
    pub fn restore(&self) -> &[Arc<LayerPlan>] {
        &self.restore
    }

    /// From the device to the host, by step: the same plans with their sides swapped.
    pub fn backup(&self) -> &[Arc<LayerPlan>] {
        self.backup.get_or_init(|| {
            let reversed = |one: &Move| Move {
                pool: one.pool,
                plan: one.plan.reversed(),
                src: one.dst.clone(),
                dst: one.src.clone(),
            };
            let plans = self.restore.iter().map(|plan| {
                Arc::new(LayerPlan { step: plan.step, moves: plan.moves.iter().map(reversed).collect() })
            });
            plans.collect()
        })
    }

    /// The layers of each pool that go with `steps`; a span without layers where a pool has none of them.
    pub(super) fn layers(&self, steps: &std::ops::Range<u32>) -> Vec<Span> {
        let of_pool = |pool: &TransferPool| {
            let layers = pool.host.layout.tile.layers;
            let at = |step: u32| layers.start + step.saturating_sub(pool.first_step).min(layers.len());
            Span { start: at(steps.start), end: at(steps.end) }
        };
        self.pools.iter().map(of_pool).collect()
    }

    /// Slots for a restore: of each pool the host slots, then the device slots.
    ///
    /// # Errors
    /// `Geometry` for slots that do not fit.
    pub fn restore_slots(&self, slots: &[(&[i64], &[i64])]) -> Result<Slots> {
        self.slots(slots, |host, device, pool| {
            PoolSlots::new(host, device, &host_extent(pool), &device_extent(pool))
        })
    }

    /// Slots for a backup: of each pool the host slots, then the device slots.
    ///
    /// # Errors
    /// `Geometry` for slots that do not fit.
    pub fn backup_slots(&self, slots: &[(&[i64], &[i64])]) -> Result<Slots> {
        self.slots(slots, |host, device, pool| {
            PoolSlots::new(device, host, &device_extent(pool), &host_extent(pool))
        })
    }

    fn slots(
        &self,
        slots: &[(&[i64], &[i64])],
        one: impl Fn(&[i64], &[i64], &TransferPool) -> Result<PoolSlots>,
    ) -> Result<Slots> {
        if slots.len() != self.pools.len() {
            return Err(Error::geometry(format!(
                "expected slots of {} pools, found those of {}",
                self.pools.len(),
                slots.len()
            )));
        }
        let pools = self.pools.iter().zip(slots).map(|(pool, (host, device))| {
            one(host, device, pool).map_err(|error| Error::geometry(format!("pool {:?}: {error}", pool.name)))
        });
        Ok(Slots { pools: pools.collect::<Result<_>>()? })
    }
}

fn host_extent(pool: &TransferPool) -> crate::plan::Extent {
    crate::plan::Extent { slots: pool.host.layout.slots, buffer_bytes: Vec::new() }
}

fn device_extent(pool: &TransferPool) -> crate::plan::Extent {
    let slots = pool.device.first().map_or(0, |device| device.layout.slots);
    crate::plan::Extent { slots, buffer_bytes: Vec::new() }
}

fn layer_plan(pools: &[TransferPool], step: u32) -> Result<LayerPlan> {
    let mut moves = Vec::with_capacity(pools.len());
    for (number, pool) in pools.iter().enumerate() {
        let tile = &pool.host.layout.tile;
        let Some(layer) = step.checked_sub(pool.first_step).map(|step| tile.layers.start + step) else {
            continue;
        };
        if layer >= tile.layers.end {
            continue;
        }
        let rect = Tile { layers: Span { start: layer, end: layer + 1 }, ..*tile };
        let Some(device) = pool.device.iter().find(|device| device.layout.tile.contains(&rect)) else {
            return Err(Error::geometry(format!(
                "expected device rows of pool {:?} for {rect}, found none that hold them",
                pool.name
            )));
        };
        moves.push(Move {
            pool: number,
            plan: CopyPlan::between(&pool.host.layout, &device.layout, &rect)?,
            src: pool.host.memory.clone(),
            dst: device.memory.clone(),
        });
    }
    Ok(LayerPlan { step, moves })
}
