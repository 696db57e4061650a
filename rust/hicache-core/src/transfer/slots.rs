//! Which page of a batch is in which slot, on both sides.

use std::sync::Arc;

use crate::plan::Extent;
use crate::{Error, Result};

/// Slots of one pool: page `i` comes from `source[i]` and goes to `destination[i]`; -1 on either side leaves it out.
#[derive(Debug, Clone)]
pub struct PoolSlots {
    source: Arc<[i64]>,
    destination: Arc<[i64]>,
}

impl PoolSlots {
    /// Slots of as many pages on both sides.
    ///
    /// # Errors
    /// `Geometry` for slots outside an extent, for a destination slot named twice, and for lists of two lengths.
    pub fn new(source: &[i64], destination: &[i64], from: &Extent, to: &Extent) -> Result<PoolSlots> {
        if source.len() != destination.len() {
            let (source, destination) = (source.len(), destination.len());
            return Err(Error::geometry(format!(
                "expected as many source as destination slots, found {source} and {destination}"
            )));
        }
        check("source", source, from.slots)?;
        check("destination", destination, to.slots)?;
        let mut taken: Vec<i64> = destination.iter().copied().filter(|&slot| slot >= 0).collect();
        taken.sort_unstable();
        if let Some(pair) = taken.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::geometry(format!("destination slot {} is named twice", pair[0])));
        }
        Ok(PoolSlots { source: source.into(), destination: destination.into() })
    }

    /// Slots of the source.
    pub fn source(&self) -> &[i64] {
        &self.source
    }

    /// Slots of the destination.
    pub fn destination(&self) -> &[i64] {
        &self.destination
    }

    /// Source and destination slot of each page that has both.
    pub fn pairs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let both = self.source.iter().zip(&*self.destination);
        both.filter_map(|(&from, &to)| Some((u64::try_from(from).ok()?, u64::try_from(to).ok()?)))
    }
}

fn check(side: &str, slots: &[i64], limit: u64) -> Result<()> {
    match slots.iter().find(|&&slot| slot < -1 || (slot >= 0 && slot as u64 >= limit)) {
        None => Ok(()),
        Some(slot) => Err(Error::geometry(format!(
            "expected {side} slots from 0 to {}, or -1 for none, found {slot}",
            limit.saturating_sub(1)
        ))),
    }
}

/// Slots of every pool of a plan.
#[derive(Debug, Clone)]
pub struct Slots {
    /// By pool.
    pub pools: Vec<PoolSlots>,
}
