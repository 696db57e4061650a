//! What must have happened before a layer is gathered, and before it is read.

use std::sync::Mutex;

use hicache_ranks::layer_gate::{Edge, LayerGate, Tenant};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::lock;

/// An event as Python sees it: its name, forward pass and layer.
type Event = (&'static str, u64, u32);

fn events(edges: &[Edge]) -> Vec<Event> {
    let event = |edge: &Edge| match *edge {
        Edge::Loaded(at) => ("loaded", at.epoch, at.layer),
        Edge::Gathered(at) => ("gathered", at.epoch, at.layer),
        Edge::ReadEnded(at) => ("read_ended", at.epoch, at.layer),
    };
    edges.iter().map(event).collect()
}

/// A gather that is to be issued.
#[pyclass(frozen, get_all, name = "Gather", module = "hicache_store.ranks")]
pub(crate) struct PyGather {
    /// Forward pass of the layer that is assembled.
    epoch: u64,
    /// The layer.
    layer: u32,
    /// In which slot.
    slot: usize,
    /// What it waits for.
    waits: Vec<Event>,
}

/// The two slots of one rank.
#[pyclass(frozen, name = "LayerGate", module = "hicache_store.ranks")]
pub(crate) struct PyLayerGate {
    inner: Mutex<LayerGate>,
}

#[pymethods]
impl PyLayerGate {
    #[new]
    fn new(layers: u32) -> Result<Self> {
        Ok(PyLayerGate { inner: Mutex::new(LayerGate::new(layers)?) })
    }

    /// Takes a slot for the next layer.
    fn gather(&self) -> PyGather {
        let gather = lock(&self.inner).gather();
        let Tenant { epoch, layer } = gather.tenant;
        PyGather { epoch, layer, slot: gather.slot, waits: events(&gather.waits) }
    }

    /// What the read of a layer waits for.
    fn read(&self, epoch: u64, layer: u32) -> Result<Vec<Event>> {
        Ok(events(&lock(&self.inner).read(Tenant { epoch, layer })?))
    }
}
