//! Who is to blame for a wait that passed its deadline.

use std::sync::Mutex;

use hicache_ranks::Rank;
use hicache_ranks::watch::{Beat, Watch};
use pyo3::prelude::*;

use crate::ranks::lock;

/// The last words of all ranks.
#[pyclass(frozen, name = "Watch", module = "hicache_store.ranks")]
#[derive(Default)]
pub(crate) struct PyWatch {
    inner: Mutex<Watch>,
}

fn ranks(list: Vec<u32>) -> Vec<Rank> {
    list.into_iter().map(Rank).collect()
}

#[pymethods]
impl PyWatch {
    #[new]
    fn new() -> Self {
        PyWatch::default()
    }

    /// Notes a heartbeat.
    fn beat(&self, rank: u32, progress: u64, missing: Vec<u32>) {
        lock(&self.inner).beat(Rank(rank), Beat { progress, missing: ranks(missing) });
    }

    /// Notes that a rank's heartbeat stayed away for longer than its deadline.
    fn silence(&self, rank: u32) {
        lock(&self.inner).silence(Rank(rank));
    }

    /// The rank that a wait for `missing` comes down to.
    fn culprit(&self, missing: Vec<u32>) -> Option<u32> {
        lock(&self.inner).culprit(&ranks(missing)).map(|rank| rank.0)
    }
}
