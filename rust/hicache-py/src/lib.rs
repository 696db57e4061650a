//! The Python face of the store: one file for each concept, each a thin wrapper of what stands in `hicache_core`,
//! and under `ranks` of what stands in `hicache_ranks`.
//!
//! It turns Python objects into checked Rust values and back, and releases the interpreter lock once around
//! each batch. It decides nothing that the core does not decide, and never imports torch or sglang; numpy only
//! when memory or arrays are handed in.

mod arguments;
#[expect(unsafe_code, reason = "foreign memory enters here, and only here")]
mod buffers;
mod errors;
#[expect(unsafe_code, reason = "memory of our own leaves here, and only here")]
mod exports;
mod host_pool;
mod keys;
mod layout;
mod namespace;
mod notices;
mod pool;
mod pool_set;
mod ranks;
mod reports;
mod store;
mod tile;
mod tool;
mod transfer;
mod view;

/// The compiled part of the `hicache_store` package.
#[pyo3::pymodule]
mod _hicache_store {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::buffers::PyRegion;
    #[pymodule_export]
    use crate::errors::{error_kinds, rank_error_kinds};
    #[pymodule_export]
    use crate::host_pool::PySlotLease;
    #[pymodule_export]
    use crate::keys::{chain_seed, page_keys};
    #[pymodule_export]
    use crate::layout::PyLayout;
    #[pymodule_export]
    use crate::namespace::PyNamespace;
    #[pymodule_export]
    use crate::pool::{PyComponent, PyHitPolicy, PyPool};
    #[pymodule_export]
    use crate::pool_set::{PyMemberPlan, PyPoolMember, PyPoolSet};
    #[pymodule_export]
    use crate::ranks::ack::{PyAck, PyAckLog};
    #[pymodule_export]
    use crate::ranks::ask::{PyAsk, PyExpired};
    #[pymodule_export]
    use crate::ranks::audit::{PyAuditRecords, PyStateDigest, PyVerdict};
    #[pymodule_export]
    use crate::ranks::audited::PyAuditedFunction;
    #[pymodule_export]
    use crate::ranks::layer_gate::{PyGather, PyLayerGate};
    #[pymodule_export]
    use crate::ranks::ledger::PyTierLedger;
    #[pymodule_export]
    use crate::ranks::ownership::{PyClassedPool, PyGatherPlan, PyOwnership, PyPlacement};
    #[pymodule_export]
    use crate::ranks::pp_sync::{PyApply, PyPpSync, PyStepEnd};
    #[pymodule_export]
    use crate::ranks::prefetch::{PyPrefetch, PyProgressVote, PyPublication, PyReading, PyReport};
    #[pymodule_export]
    use crate::ranks::restore::PyRestoreSession;
    #[pymodule_export]
    use crate::ranks::scratch::{PyScratchBudget, PyScratchSize};
    #[pymodule_export]
    use crate::ranks::topology::{PyCoordinates, PyTopology};
    #[pymodule_export]
    use crate::ranks::vote::{PyCapacityVote, PyHit, PyHitVote, PyLengths, PyOutcomeVote};
    #[pymodule_export]
    use crate::ranks::watch::PyWatch;
    #[pymodule_export]
    use crate::ranks::writer::{PyHolding, PySpread};
    #[pymodule_export]
    use crate::reports::{PyBackupReport, PyMatch, PyRestoreReport};
    #[pymodule_export]
    use crate::store::PyStore;
    #[pymodule_export]
    use crate::tile::PyTile;
    #[pymodule_export]
    use crate::tool::{run_tool, sglang_options};
    #[pymodule_export]
    use crate::transfer::{
        PyBackupTicket, PyHostEvent, PyLayerTicket, PyLayerwiseRestore, PyTransferPlan, PyTransferPool,
    };
    #[pymodule_export]
    use crate::view::{PyPoolView, PyView};

    /// The class of host pools is put together here: see `exports`.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("HostPool", crate::exports::host_pool_class(module.py())?)
    }

    /// Version of the package and of the tool in it.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python packages use")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
