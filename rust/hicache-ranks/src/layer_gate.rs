//! What must have happened before a layer is gathered, and before it is read.
//!
//! Two scratch slots alternate: layer `l` is assembled in slot `l mod 2` while layer `l - 1` is read from the
//! other. Three edges keep the order, on every rank:
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

/// The two slots of one rank.
#[derive(Debug, Clone)]
pub struct LayerGate {
    layers: u32,
    slots: [Option<Tenant>; 2],
    next: Tenant,
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
        Ok(LayerGate { layers, slots: [None; 2], next, rules: Rules::ALL })
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> LayerGate {
        self.rules = rules;
        self
    }

    /// The slot of a layer.
    pub fn slot(&self, tenant: Tenant) -> usize {
        if self.rules.hold(Rule::TwoSlots) { (tenant.layer % 2) as usize } else { 0 }
    }

    /// The layer that is gathered next: layers in order, forward pass after forward pass, on all ranks alike.
    pub fn next(&self) -> Tenant {
        self.next
    }

    /// Takes the slot for the next layer, and says what its gather waits for.
    ///
    /// It is called in the order of issue, when everything that reads the tenant before has been issued.
    pub fn gather(&mut self) -> (Tenant, Vec<Edge>) {
        let tenant = self.next;
        let slot = self.slot(tenant);
        let mut edges = Vec::with_capacity(2);
        if self.rules.hold(Rule::LoadBeforeGather) {
            edges.push(Edge::Loaded(tenant));
        }
        if let (Some(before), true) = (self.slots[slot], self.rules.hold(Rule::SlotReuseWaits)) {
            edges.push(Edge::ReadEnded(before));
        }
        self.slots[slot] = Some(tenant);
        self.next = if tenant.layer + 1 < self.layers {
            Tenant { layer: tenant.layer + 1, ..tenant }
        } else {
            Tenant { epoch: tenant.epoch + 1, layer: 0 }
        };
        (tenant, edges)
    }

    /// What the read of a layer waits for.
    ///
    /// # Errors
    ///
    /// `ownership` where the slot's tenant is another layer or pass.
    pub fn read(&self, tenant: Tenant) -> Result<Vec<Edge>> {
        let found = self.slots[self.slot(tenant)];
        if found != Some(tenant) {
            let message = format!("the slot of {tenant:?} holds {found:?}");
            return Err(RankError::new(RankErrorKind::Ownership, message));
        }
        Ok(if self.rules.hold(Rule::GatherBeforeRead) { vec![Edge::Gathered(tenant)] } else { Vec::new() })
    }
}
