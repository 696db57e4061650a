//! Where a rank stands, and with whom it agrees.

use hicache_ranks::{Coordinates, CpKind, Rank, RankError, Scope, Topology};
use pyo3::prelude::*;

use crate::arguments::to_u32;
use crate::errors::Result;

/// Names of the kinds of context parallelism.
const CP_KINDS: [(&str, CpKind); 5] = [
    ("none", CpKind::None),
    ("page", CpKind::Page),
    ("layer", CpKind::Layer),
    ("token", CpKind::Token),
    ("replicated", CpKind::Replicated),
];

/// A scope by its name.
pub(crate) fn to_scope(name: &str) -> Result<Scope> {
    match name {
        "stage" => Ok(Scope::Stage),
        "replica" => Ok(Scope::Replica),
        _ => Err(RankError::config(format!("scope {name:?}: expected stage or replica")).into()),
    }
}

/// Name of a scope.
pub(crate) fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Stage => "stage",
        Scope::Replica => "replica",
    }
}

/// Position on each axis.
#[pyclass(frozen, eq, hash, get_all, name = "Coordinates", module = "hicache_store.ranks")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyCoordinates {
    /// Data parallel replica.
    dp: u32,
    /// Pipeline stage.
    pp: u32,
    /// Context parallel rank.
    cp: u32,
    /// Tensor parallel rank of attention.
    tp: u32,
    /// Decode context parallel rank.
    dcp: u32,
}

#[pymethods]
impl PyCoordinates {
    fn __repr__(&self) -> String {
        let PyCoordinates { dp, pp, cp, tp, dcp } = self;
        format!("Coordinates(dp={dp}, pp={pp}, cp={cp}, tp={tp}, dcp={dcp})")
    }
}

/// Sizes of the axes.
#[pyclass(frozen, eq, hash, name = "Topology", module = "hicache_store.ranks")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyTopology {
    pub inner: Topology,
}

#[pymethods]
impl PyTopology {
    #[new]
    #[pyo3(signature = (pp=1, cp=1, tp=1, *, cp_kind="none", dp=1, dcp=1))]
    fn new(pp: i64, cp: i64, tp: i64, cp_kind: &str, dp: i64, dcp: i64) -> Result<Self> {
        let kind = CP_KINDS.iter().find(|(name, _)| *name == cp_kind).ok_or_else(|| {
            let known = CP_KINDS.map(|(name, _)| name).join(", ");
            RankError::config(format!("cp_kind {cp_kind:?}: expected one of {known}"))
        })?;
        let topology = Topology::new(to_u32("pp", pp)?, to_u32("cp", cp)?, to_u32("tp", tp)?, kind.1)?;
        let inner = topology.with_dp(to_u32("dp", dp)?)?.with_dcp(to_u32("dcp", dcp)?)?;
        Ok(PyTopology { inner })
    }

    /// Pipeline stages.
    #[getter]
    fn pp(&self) -> u32 {
        self.inner.pp()
    }

    /// Context parallel ranks.
    #[getter]
    fn cp(&self) -> u32 {
        self.inner.cp()
    }

    /// Tensor parallel ranks.
    #[getter]
    fn tp(&self) -> u32 {
        self.inner.tp()
    }

    /// Data parallel replicas.
    #[getter]
    fn dp(&self) -> u32 {
        self.inner.dp()
    }

    /// Ranks of a decode context parallel group.
    #[getter]
    fn dcp(&self) -> u32 {
        self.inner.dcp()
    }

    /// What context parallel ranks hold.
    #[getter]
    fn cp_kind(&self) -> &'static str {
        CP_KINDS.iter().find(|(_, kind)| *kind == self.inner.cp_kind()).map_or("none", |(name, _)| name)
    }

    /// Ranks that pages are dealt out over.
    #[getter]
    fn owners(&self) -> u32 {
        self.inner.owners()
    }

    /// Number of ranks.
    #[getter]
    fn ranks(&self) -> u32 {
        self.inner.ranks()
    }

    /// Where a rank stands.
    fn coordinates(&self, rank: u32) -> Result<PyCoordinates> {
        let Coordinates { dp, pp, cp, tp, dcp } = self.inner.coordinates(Rank(rank))?;
        Ok(PyCoordinates { dp, pp, cp, tp, dcp })
    }

    /// The rank at a position.
    #[pyo3(signature = (*, pp=0, cp=0, tp=0, dp=0))]
    fn rank(&self, pp: u32, cp: u32, tp: u32, dp: u32) -> u32 {
        self.inner.rank(Coordinates { dp, pp, cp, tp, dcp: 0 }).0
    }

    /// Ranks that a rank reduces with.
    #[pyo3(signature = (rank, scope="replica"))]
    fn members(&self, rank: u32, scope: &str) -> Result<Vec<u32>> {
        let members = self.inner.members(Rank(rank), to_scope(scope)?)?;
        Ok(members.into_iter().map(|member| member.0).collect())
    }

    /// The same position one stage earlier.
    fn previous_stage(&self, rank: u32) -> Result<Option<u32>> {
        let at = self.inner.coordinates(Rank(rank))?;
        Ok(self.inner.previous_stage(at).map(|rank| rank.0))
    }

    /// The same position one stage later.
    fn next_stage(&self, rank: u32) -> Result<Option<u32>> {
        let at = self.inner.coordinates(Rank(rank))?;
        Ok(self.inner.next_stage(at).map(|rank| rank.0))
    }

    fn __repr__(&self) -> String {
        let (pp, cp, tp) = (self.pp(), self.cp(), self.tp());
        let (kind, dp, dcp) = (self.cp_kind(), self.dp(), self.dcp());
        format!("Topology(pp={pp}, cp={cp}, tp={tp}, cp_kind='{kind}', dp={dp}, dcp={dcp})")
    }
}
