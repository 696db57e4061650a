//! What must have happened before a layer is gathered, and before it is read.
//!
//! Two scratch slots alternate: a layer is assembled in one while the layer before is read from the other. Three edges keep the order, on every rank:
//!
//! ```text
//! load(l) ---------> gather(l) ---------> read(l)
//!                      ^
//! read of the slot's --+
//! tenant before
//! ```
//!
//! The gate names the edges as events to wait for; whoever owns the streams waits. It also knows each slot's
//! tenant, so that a read that would find another layer is refused instead of answered wrongly.

use crate::error::{RankError, RankErrorKind, Result};
use crate::rules::{Rule, Rules};

/// A layer of one forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant {
    /// The forward pass.
    pub epoch: u64,
    /// The layer.
    pub layer: u32,
}

/// An event that a stream waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Edge {
    /// The rank's own rows of the layer have landed on the device.
    Loaded(Tenant),
    /// The layer has been assembled in its slot.
    Gathered(Tenant),
    /// The attention that reads the layer has ended.
    ReadEnded(Tenant),
}

/// A gather that is to be issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gather {
    /// What is assembled.
    pub tenant: Tenant,
    /// In which slot.
    pub slot: usize,
    /// What it waits for.
    pub waits: Vec<Edge>,
}

/// The two slots of one rank.
#[derive(Debug, Clone)]
pub struct LayerGate {
    layers: u32,
    /// Tenants of the last two gathers, the older one first: they alternate, also where one pass ends and the
    /// next begins.
    live: [Option<Tenant>; 2],
    next: Tenant,
    gathers: usize,
    rules: Rules,
}

impl LayerGate {
    /// The gate of a model part with `layers` layers.
    ///
    /// # Errors
    ///
    /// `config` for no layers.
    pub fn new(layers: u32) -> Result<LayerGate> {
        if layers == 0 {
            return Err(RankError::config("a gate for 0 layers"));
        }
        let next = Tenant { epoch: 0, layer: 0 };
        Ok(LayerGate { layers, live: [None; 2], next, gathers: 0, rules: Rules::ALL })
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> LayerGate {
        self.rules = rules;
        self
    }

    /// Takes a slot for the next layer, and says what its gather waits for. Layers come in order, pass after
    /// pass, on all ranks alike.
    ///
    /// It is called in the order of issue, when the reads of the slot's tenant before have been issued.
    pub fn gather(&mut self) -> Gather {
        let tenant = self.next;
        let mut waits = Vec::with_capacity(2);
        if self.rules.hold(Rule::LoadBeforeGather) {
            waits.push(Edge::Loaded(tenant));
        }
        if let (Some(before), true) = (self.live[0], self.rules.hold(Rule::SlotReuseWaits)) {
            waits.push(Edge::ReadEnded(before));
        }
        let slot = if self.rules.hold(Rule::TwoSlots) { self.gathers % 2 } else { 0 };
        self.gathers += 1;
        self.live = [self.live[1], Some(tenant)];
        self.next = if tenant.layer + 1 < self.layers {
            Tenant { layer: tenant.layer + 1, ..tenant }
        } else {
            Tenant { epoch: tenant.epoch + 1, layer: 0 }
        };
        Gather { tenant, slot, waits }
    }

    /// What the read of a layer waits for.
    ///
    /// # Errors
    ///
    /// `ownership` where the layer is not one of the two that are live.
    pub fn read(&self, tenant: Tenant) -> Result<Vec<Edge>> {
        if !self.live.contains(&Some(tenant)) {
            let message = format!("a read of {tenant:?} while {:?} are live", self.live);
            return Err(RankError::new(RankErrorKind::Ownership, message));
        }
        Ok(if self.rules.hold(Rule::GatherBeforeRead) { vec![Edge::Gathered(tenant)] } else { Vec::new() })
    }
}
