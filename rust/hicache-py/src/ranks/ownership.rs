//! Which rank holds which page: arithmetic, the mirrored allocator, the rules of chains, the plan of a gather.

use std::sync::Mutex;

use hicache_ranks::RankError;
use hicache_ranks::chain::{Base, Ownership, Splice};
use hicache_ranks::classed_pool::{ClassedPool, Run};
use hicache_ranks::gather::GatherPlan;
use hicache_ranks::placement::Placement;
use pyo3::prelude::*;

use crate::arguments::to_u32;
use crate::errors::Result;
use crate::ranks::lock;

/// How logical token slots map to owners, pages and rows.
#[pyclass(frozen, eq, name = "Placement", module = "hicache_store.ranks")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PyPlacement {
    pub inner: Placement,
}

#[pymethods]
impl PyPlacement {
    #[new]
    fn new(owners: i64, page_tokens: i64) -> Result<Self> {
        let (owners, page_tokens) = (to_u32("owners", owners)?, to_u32("page_tokens", page_tokens)?);
        Ok(PyPlacement { inner: Placement::new(owners, page_tokens)? })
    }

    /// Number of owners.
    #[getter]
    fn owners(&self) -> u32 {
        self.inner.owners()
    }

    /// Tokens in a page.
    #[getter]
    fn page_tokens(&self) -> u32 {
        self.inner.page_tokens()
    }

    /// The page of a token slot.
    fn page(&self, loc: u64) -> u64 {
        self.inner.page(loc)
    }

    /// The owner of a page.
    fn owner(&self, page: u64) -> u32 {
        self.inner.owner(page)
    }

    /// The page's number among its owner's pages.
    fn local(&self, page: u64) -> u64 {
        self.inner.local(page)
    }

    /// The row of a token slot in its owner's memory.
    fn row(&self, loc: u64) -> u64 {
        self.inner.row(loc)
    }

    /// The token slot of a row of `owner`.
    fn loc(&self, owner: u32, row: u64) -> u64 {
        self.inner.loc(owner, row)
    }

    /// The token slots among `locs` that `owner` holds.
    fn owned(&self, locs: Vec<u64>, owner: u32) -> Vec<u64> {
        self.inner.owned(&locs, owner).collect()
    }

    fn __repr__(&self) -> String {
        format!("Placement(owners={}, page_tokens={})", self.owners(), self.page_tokens())
    }
}

/// The allocator of pages by owner class, mirrored on all ranks.
#[pyclass(frozen, name = "ClassedPool", module = "hicache_store.ranks")]
pub(crate) struct PyClassedPool {
    inner: Mutex<ClassedPool>,
}

#[pymethods]
impl PyClassedPool {
    #[new]
    fn new(placement: &PyPlacement, pages_per_class: i64) -> Result<Self> {
        let pages = to_u32("pages_per_class", pages_per_class)?;
        Ok(PyClassedPool { inner: Mutex::new(ClassedPool::new(placement.inner, pages)?) })
    }

    /// Pages of the pool, free or taken.
    #[getter]
    fn total(&self) -> u32 {
        lock(&self.inner).total()
    }

    /// Free pages of each class.
    #[getter]
    fn counts(&self) -> Vec<u32> {
        lock(&self.inner).counts().to_vec()
    }

    /// Free pages of all classes together.
    #[getter]
    fn free_pages(&self) -> u32 {
        lock(&self.inner).free_pages()
    }

    /// Pages that any cyclic run can count on.
    #[getter]
    fn floor(&self) -> u32 {
        lock(&self.inner).floor()
    }

    /// The class with most free pages, the lowest of equals.
    #[getter]
    fn least_full_class(&self) -> u32 {
        lock(&self.inner).least_full_class()
    }

    /// Whether a page is free.
    fn is_free(&self, page: u32) -> bool {
        lock(&self.inner).is_free(page)
    }

    /// Digest of the free lists.
    #[getter]
    fn digest(&self) -> u64 {
        lock(&self.inner).digest()
    }

    /// Takes pages of owners `start`, `start + 1`, ... in turn: all, or None.
    fn alloc_cyclic(&self, start: u32, pages: u32) -> Option<Vec<u32>> {
        lock(&self.inner).alloc_cyclic(start, pages)
    }

    /// Takes the pages of several runs: all, or None.
    fn alloc_batch(&self, runs: Vec<(u32, u32)>) -> Option<Vec<Vec<u32>>> {
        let runs: Vec<_> = runs.into_iter().map(|(start, pages)| Run { start, pages }).collect();
        lock(&self.inner).alloc_batch(&runs)
    }

    /// Gives pages back: all, or an error and none.
    fn free(&self, pages: Vec<u32>) -> Result<()> {
        Ok(lock(&self.inner).free(&pages)?)
    }
}

/// The rules of ownership along a chain.
#[pyclass(frozen, name = "Ownership", module = "hicache_store.ranks")]
pub(crate) struct PyOwnership {
    inner: Ownership,
    owners: u32,
}

#[pymethods]
impl PyOwnership {
    #[new]
    fn new(placement: &PyPlacement) -> Self {
        PyOwnership { inner: Ownership::new(placement.inner), owners: placement.inner.owners() }
    }

    /// Base of a chain that begins with nothing cached.
    fn new_chain(&self, pool: &PyClassedPool) -> u32 {
        self.inner.new_chain(&lock(&pool.inner)).0
    }

    /// Owner of position page `position` of a chain.
    fn owner_at(&self, base: u32, position: u32) -> u32 {
        Base(base).owner_at(position, self.owners)
    }

    /// Whether a chain of base `chain` may be inserted below a path of base `path`.
    fn may_splice(&self, path: u32, chain: u32) -> bool {
        self.inner.splice(Base(path), Base(chain)) == Splice::Accepted
    }

    /// Host pages for a backup of the device pages `source`, or None.
    fn allocate_backup(&self, host: &PyClassedPool, source: Vec<u32>) -> Option<Vec<u32>> {
        self.inner.allocate_backup(&mut lock(&host.inner), &source)
    }

    /// Device pages for a restore of the host pages `source`, or None.
    fn allocate_restore(&self, device: &PyClassedPool, source: Vec<u32>) -> Option<Vec<u32>> {
        self.inner.allocate_restore(&mut lock(&device.inner), &source)
    }

    /// The pairs of a copy that `owner` carries out.
    fn own_share(&self, owner: u32, source: Vec<u32>, target: Vec<u32>) -> Result<Vec<(u32, u32)>> {
        Ok(self.inner.own_share(owner, &source, &target)?)
    }

    /// The plan of a gather of cached prefixes.
    fn gather(&self, prefixes: Vec<Vec<u32>>) -> Result<PyGatherPlan> {
        let prefixes: Vec<&[u32]> = prefixes.iter().map(Vec::as_slice).collect();
        Ok(PyGatherPlan { inner: self.inner.gather(&prefixes)?, owners: self.owners })
    }
}

/// What every owner sends and where it lands.
#[pyclass(frozen, name = "GatherPlan", module = "hicache_store.ranks")]
pub(crate) struct PyGatherPlan {
    inner: GatherPlan,
    owners: u32,
}

#[pymethods]
impl PyGatherPlan {
    /// Pages in each owner's block.
    #[getter]
    fn block(&self) -> u32 {
        self.inner.block()
    }

    /// Pages of the assembled region, padding included.
    #[getter]
    fn scratch_pages(&self) -> u32 {
        self.inner.scratch_pages()
    }

    /// The block of an owner; None for padding.
    fn send(&self, owner: u32) -> Result<Vec<Option<u32>>> {
        if owner >= self.owners {
            return Err(RankError::config(format!("owner {owner} of {}", self.owners)).into());
        }
        Ok(self.inner.send(owner).collect())
    }

    /// Where a page lies in the assembled region; None for one that is not in the plan.
    fn scratch_page(&self, page: u32) -> Option<u32> {
        self.inner.scratch_page(page)
    }
}
