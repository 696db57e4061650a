//! Sets of pools, packed or side by side, from Python.

use hicache_core::{Error, MappingWish, MemberPlan, PoolMember, PoolPlacement, PoolSet};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::arguments::{to_u32, to_u64, type_name};
use crate::errors::Result;
use crate::pool::PyPool;
use crate::tile::PyTile;

/// One pool of a deployment, as one rank holds it.
#[pyclass(frozen, name = "PoolMember", module = "hicache_store")]
pub(crate) struct PyPoolMember {
    inner: PoolMember,
}

#[pymethods]
impl PyPoolMember {
    #[new]
    #[pyo3(signature = (pool, tile, slots, page_size, *, first_layer=None, mapping="auto"))]
    fn new(
        pool: &PyPool,
        tile: &PyTile,
        slots: i64,
        page_size: i64,
        first_layer: Option<i64>,
        mapping: &str,
    ) -> Result<Self> {
        let page_size = to_u32("page_size", page_size)?;
        let tile = tile.resolve(page_size)?;
        let wish = match mapping {
            "auto" => MappingWish::Auto,
            "packed" => MappingWish::Packed,
            "sidecar" => MappingWish::Sidecar,
            _ => {
                let message = format!("mapping: expected auto, packed or sidecar, found {mapping:?}");
                return Err(Error::config(message).into());
            }
        };
        let first_layer = match first_layer {
            Some(layer) => to_u32("first_layer", layer)?,
            None => tile.layers.start,
        };
        let slots = to_u64("slots", slots)?;
        Ok(PyPoolMember {
            inner: PoolMember { pool: pool.inner.clone(), tile, slots, page_size, first_layer, wish },
        })
    }

    /// Name of the pool.
    #[getter]
    fn name(&self) -> &str {
        self.inner.pool.name()
    }

    fn __repr__(&self) -> String {
        let PoolMember { pool, tile, slots, page_size, .. } = &self.inner;
        format!("<PoolMember {} {tile}, {slots} slots of {page_size} tokens>", pool.name())
    }
}

/// Where a member of a set stands, and why.
#[pyclass(frozen, name = "MemberPlan", module = "hicache_store")]
pub(crate) struct PyMemberPlan {
    inner: MemberPlan,
}

#[pymethods]
impl PyMemberPlan {
    /// Name of its pool.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// "target", "packed" or "sidecar".
    #[getter]
    fn mapping(&self) -> &'static str {
        self.inner.mapping.name()
    }

    /// One sentence.
    #[getter]
    fn reason(&self) -> &str {
        &self.inner.reason
    }

    /// Index of its host pool in `PoolSet.host_pools`.
    #[getter]
    fn host_pool(&self) -> usize {
        self.inner.host_pool
    }

    /// First byte of its part in a host page.
    #[getter]
    fn offset(&self) -> u64 {
        self.inner.offset
    }

    /// Bytes of its part.
    #[getter]
    fn part_bytes(&self) -> u64 {
        self.inner.part_bytes
    }

    /// Bytes of a whole host page.
    #[getter]
    fn host_page_bytes(&self) -> u64 {
        self.inner.host_page_bytes
    }

    fn __repr__(&self) -> String {
        let MemberPlan { name, mapping, reason, .. } = &self.inner;
        format!("<MemberPlan {name}: {}, {reason}>", mapping.name())
    }
}

/// The pools of a deployment on one rank, each with its place.
#[pyclass(frozen, name = "PoolSet", module = "hicache_store")]
pub(crate) struct PyPoolSet {
    inner: PoolSet,
}

impl PyPoolSet {
    /// Where the members stand, for the tools.
    pub(crate) fn placements(&self) -> Vec<PoolPlacement> {
        self.inner.placements()
    }
}

#[pymethods]
impl PyPoolSet {
    #[new]
    fn new(members: &Bound<'_, PyAny>) -> Result<Self> {
        let mut found = Vec::new();
        for (index, item) in members.try_iter()?.enumerate() {
            let item = item?;
            let Ok(member) = item.cast::<PyPoolMember>() else {
                let found = type_name(&item);
                let message = format!("members[{index}]: expected a PoolMember, found {found}");
                return Err(Error::config(message).into());
            };
            found.push(member.get().inner.clone());
        }
        Ok(PyPoolSet { inner: PoolSet::new(&found)? })
    }

    /// Every member with its place, the target first.
    #[getter]
    fn members(&self) -> Vec<PyMemberPlan> {
        self.inner.members().iter().map(|plan| PyMemberPlan { inner: plan.clone() }).collect()
    }

    /// Slots and bytes of one slot of each host pool; the target's is the first.
    #[getter]
    fn host_pools(&self) -> Vec<(u64, u64)> {
        self.inner.host_pools().to_vec()
    }

    /// Returns what `PoolView` takes as `packed` for a member.
    fn packed(&self, name: &str) -> Result<Option<(u64, u64)>> {
        Ok(self.inner.packed(name)?)
    }

    /// Returns a line for each member: name, mapping, place and reason.
    fn explain(&self) -> String {
        self.inner.explain()
    }

    /// Makes the host pools, all or none, with the keywords of `HostPool`.
    #[pyo3(signature = (**options))]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyList>> {
        let class = py.import("hicache_store")?.getattr("HostPool")?;
        let pools = PyList::empty(py);
        for &(slots, slot_bytes) in self.inner.host_pools() {
            pools.append(class.call((slots, slot_bytes), options)?)?;
        }
        Ok(pools)
    }

    fn __repr__(&self) -> String {
        let members = self.inner.members().iter();
        let members = members.map(|plan| format!("{} {}", plan.name, plan.mapping.name()));
        format!("<PoolSet: {}>", members.collect::<Vec<_>>().join(", "))
    }
}
