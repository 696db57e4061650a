//! A view: the pools and tiles that one rank of one deployment stores and asks for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use hicache_sys::Region;

use crate::format::form::{BLOCK_BYTES, Codec, Form, MAX_PAGE_BYTES};
use crate::format::frame::short_key;
use crate::key::PageKey;
use crate::layout::{Layout, LayoutName};
use crate::namespace::{Fingerprint, Namespace};
use crate::pool::{HitPolicy, Pool};
use crate::store::coverage::Coverage;
use crate::store::index::{Index, Interest};
use crate::store::landing::Landing;
use crate::store::namespace_state::NamespaceState;
use crate::store::notices::Level;
use crate::store::{Handle, Inner};
use crate::tile::{Span, Tile};
use crate::{Error, Result};

/// How long a look-up waits for another thread that reads the journals: one that hangs in the device must not hold
/// all others, and what is not known is a miss.
const PATIENCE: Duration = Duration::from_secs(1);

/// One pool of a view.
#[derive(Debug, Clone)]
pub struct ViewPool {
    /// Identity of the pool.
    pub pool: Pool,
    /// The rectangle that this rank holds of each page.
    pub tile: Tile,
    /// Order of the rows in this rank's host memory.
    pub layout: LayoutName,
    /// The pool's pages as parts of host pages of other pools: first byte, and bytes of a whole host page.
    pub packed: Option<(u64, u64)>,
    /// Which pages must be there for a prefix to be usable.
    pub policy: HitPolicy,
    /// Whether a prefix without this pool is no hit.
    pub required: bool,
    /// Whether other processes of this host read the same pages at about the same time: these come through the page
    /// cache, once from the disk for all, unless the store is opened with `IoMode::Direct`.
    pub read_by_all: bool,
}

impl ViewPool {
    /// A required pool of which every page must be there.
    pub fn new(pool: Pool, tile: Tile, layout: LayoutName) -> Self {
        ViewPool {
            pool,
            tile,
            layout,
            packed: None,
            policy: HitPolicy::AllPages,
            required: true,
            read_by_all: false,
        }
    }
}

/// How a view writes.
#[derive(Debug, Clone, Copy, Default)]
pub struct ViewOptions {
    /// zstd level for new objects; `None` stores bytes as they are.
    pub zstd_level: Option<i32>,
}

/// Host memory of one pool for one call.
pub struct PoolMemory<'a> {
    /// The host pool's buffer, or one for each component.
    pub regions: Vec<&'a Region>,
    /// Slot of each page; -1 for a page of which this pool has, or wants, nothing.
    pub slots: &'a [i64],
}

/// A view of a namespace.
pub struct View {
    pub(crate) inner: Arc<Inner>,
    _handle: Arc<Handle>,
    pub(crate) state: Arc<NamespaceState>,
    pub(crate) pools: Arc<[PoolState]>,
    pub(crate) zstd_level: i32,
}

pub(crate) struct PoolState {
    pub(crate) spec: ViewPool,
    pub(crate) fingerprint: Fingerprint,
    /// Form of the objects that this view writes.
    pub(crate) form: Form,
    coverage: Mutex<Option<Arc<Coverage>>>,
    hosts: Mutex<HashMap<(u64, bool), Arc<Layout>>>,
    staging: OnceLock<Arc<Layout>>,
    landings: Mutex<HashMap<LandingKey, Arc<Landing>>>,
}

/// Bytes of one page that a read of some of its layers wants, and what it takes from the disk.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReadCost {
    pub(crate) wanted_bytes: u64,
    /// Whole checksum blocks.
    pub(crate) read_bytes: u64,
    /// Requests.
    pub(crate) ranges: u64,
}

/// Form, wanted part, slots, whether each component has a buffer of its own, and whether the memory is the store's.
type LandingKey = (Form, Tile, u64, bool, bool);

/// Pages that memory of the store may hold for one request; what it has is for the request to say.
const STAGING_SLOTS: u64 = 1 << 24;

/// Host memory of one pool, checked against the view.
pub(crate) struct BoundMemory<'a> {
    pub(crate) regions: Vec<&'a Region>,
    pub(crate) slots: &'a [i64],
    pub(crate) host: Arc<Layout>,
    /// Memory of the store, laid out as [`PoolState::staging`] says.
    pub(crate) is_staging: bool,
}

impl View {
    pub(crate) fn open(
        inner: Arc<Inner>,
        handle: Arc<Handle>,
        namespace: Namespace,
        pools: Vec<ViewPool>,
        options: ViewOptions,
    ) -> Result<View> {
        if pools.is_empty() {
            return Err(Error::config("expected at least one pool, found none"));
        }
        if let Some(level) = options.zstd_level.filter(|level| !(1..=22).contains(level)) {
            return Err(Error::config(format!("expected a zstd level of 1 to 22, found {level}")));
        }
        let pools = pools
            .into_iter()
            .map(|pool| PoolState::new(pool, namespace.page_size(), options.zstd_level.is_some()))
            .collect::<Result<Arc<[_]>>>()?;
        for (index, pool) in pools.iter().enumerate() {
            if pools[..index].iter().any(|earlier| earlier.spec.pool.name() == pool.spec.pool.name()) {
                return Err(Error::config(format!("pool {:?} is named twice", pool.spec.pool.name())));
            }
        }
        let state = inner.namespace(&namespace);
        if !inner.options.read_only {
            let described: Vec<&Pool> = pools.iter().map(|pool| &pool.spec.pool).collect();
            state.describe(inner.process, &described)?;
        }
        let interests: Vec<Interest> =
            pools.iter().map(|pool| Interest { pool: pool.fingerprint, tile: pool.spec.tile }).collect();
        state.add_interests(&interests, &inner.counters, &inner.notices);
        let view =
            View { inner, _handle: handle, state, pools, zstd_level: options.zstd_level.unwrap_or_default() };
        view.say_hello();
        Ok(view)
    }

    fn say_hello(&self) {
        let namespace = &self.state.namespace;
        self.inner.notices.push(Level::Info, "view", || {
            let pools: Vec<String> = self
                .pools
                .iter()
                .map(|pool| {
                    format!("{} {} {}", pool.spec.pool.name(), pool.spec.tile, pool.spec.layout.name())
                })
                .collect();
            format!(
                "namespace {} ({} at revision {}), {}, I/O {}, capacity {} bytes, {} objects known",
                self.state.fingerprint,
                namespace.model().escape_debug(),
                namespace.revision().escape_debug(),
                pools.join(", "),
                self.inner.engine.name(),
                self.inner.budget.capacity(),
                self.state.index().len()
            )
        });
        if namespace.is_unversioned() {
            self.inner.notices.push(Level::Warning, "unversioned", || {
                "the namespace has no weights revision: pages of other weights under the same name will be served".into()
            });
        }
    }

    /// The namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.state.namespace
    }

    /// Identity of the namespace.
    pub fn fingerprint(&self) -> Fingerprint {
        self.state.fingerprint
    }

    /// Names of the view's pools, in the order in which memory is given to the calls.
    pub fn pool_names(&self) -> Vec<&str> {
        self.pools.iter().map(|pool| pool.spec.pool.name()).collect()
    }

    /// Bytes of one page of pool `index`.
    pub fn page_bytes(&self, index: usize) -> u64 {
        self.pools[index].form.page_bytes
    }

    /// Objects that the index of this namespace holds.
    pub fn indexed_objects(&self) -> usize {
        self.state.index().len()
    }

    /// Takes in what other processes said, unless another thread is at it for long. The other calls do it themselves.
    pub fn refresh(&self) {
        self.state.refresh_within(&self.inner.counters, Some(PATIENCE));
    }

    /// Forgets everything stored in the namespace up to now, for all processes, and deletes what no live process
    /// writes. The number of objects that this view knew.
    ///
    /// # Errors
    /// `Closed`, `Unsupported` on a read-only store, `Io`.
    pub fn clear(&self) -> Result<usize> {
        crate::store::clear::clear(&self.inner, &self.state)
    }

    /// Host memory of pool `number` as this view lays it out, for `regions`.
    pub(crate) fn host_layout(&self, number: usize, regions: Vec<&Region>) -> Result<Arc<Layout>> {
        self.pools[number].host(&PoolMemory { regions, slots: &[] })
    }

    /// Checks the memory of each pool against `pages` keys.
    pub(crate) fn bind<'a>(
        &self,
        memory: Vec<PoolMemory<'a>>,
        pages: usize,
        writes_memory: bool,
    ) -> Result<Vec<BoundMemory<'a>>> {
        if memory.len() != self.pools.len() {
            return Err(Error::geometry(format!(
                "expected memory for {} pools ({}), found {}",
                self.pools.len(),
                self.pool_names().join(", "),
                memory.len()
            )));
        }
        memory
            .into_iter()
            .zip(&*self.pools)
            .map(|(memory, pool)| pool.bind(memory, pages, writes_memory))
            .collect()
    }
}

impl PoolState {
    fn new(spec: ViewPool, page_size: u32, compress: bool) -> Result<PoolState> {
        spec.tile.validate(page_size)?;
        spec.policy.validate()?;
        let page_bytes = spec.pool.page_bytes(&spec.tile)?;
        if page_bytes > MAX_PAGE_BYTES {
            return Err(Error::geometry(format!(
                "expected pages of at most {MAX_PAGE_BYTES} bytes, found {page_bytes} in pool {:?}",
                spec.pool.name()
            )));
        }
        if let Some((offset, host_page)) = spec.packed
            && offset.checked_add(page_bytes).is_none_or(|end| end > host_page)
        {
            return Err(Error::geometry(format!(
                "expected a part of {page_bytes} bytes inside host pages of {host_page} bytes, found it at offset {offset}"
            )));
        }
        let fingerprint = spec.pool.fingerprint();
        let components = 0..spec.pool.components().len();
        let is_16_bit =
            components.into_iter().all(|index| spec.pool.component_dtype(index).is_16_bit_float());
        let codec = match (compress, is_16_bit) {
            (false, _) => Codec::None,
            (true, false) => Codec::Zstd,
            (true, true) => Codec::ZstdPlanes,
        };
        let object = Layout::object(spec.layout, &spec.pool, &spec.tile)?;
        let form = Form {
            pool: fingerprint,
            tile: spec.tile,
            layout: spec.layout,
            codec,
            block_bytes: block_bytes(&object),
            page_bytes,
        };
        Ok(PoolState {
            spec,
            fingerprint,
            form,
            coverage: Mutex::default(),
            hosts: Mutex::default(),
            staging: OnceLock::new(),
            landings: Mutex::default(),
        })
    }

    /// Forms that serve this pool's tile, as of now.
    pub(crate) fn coverage(&self, index: &Index) -> Arc<Coverage> {
        let mut slot = self.coverage.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match &*slot {
            Some(coverage) if !coverage.is_stale(index) => Arc::clone(coverage),
            _ => {
                let coverage = Coverage::new(index, self.fingerprint, self.spec.tile, self.spec.layout);
                Arc::clone(slot.insert(Arc::new(coverage)))
            }
        }
    }

    /// How `piece` of an object of `form` lands in `memory`.
    pub(crate) fn landing(
        &self,
        form: &Form,
        piece: &Tile,
        memory: &BoundMemory<'_>,
    ) -> Result<Arc<Landing>> {
        let key = (*form, *piece, memory.host.slots, memory.regions.len() > 1, memory.is_staging);
        if let Some(landing) = lock(&self.landings).get(&key) {
            return Ok(Arc::clone(landing));
        }
        let object = Layout::object(form.layout, &self.spec.pool, &form.tile)?;
        let landing = Arc::new(Landing::new(form, &object, &memory.host, piece)?);
        lock(&self.landings).insert(key, Arc::clone(&landing));
        Ok(landing)
    }

    fn bind<'a>(&self, memory: PoolMemory<'a>, pages: usize, writes_memory: bool) -> Result<BoundMemory<'a>> {
        let name = self.spec.pool.name();
        if memory.slots.len() != pages {
            return Err(Error::geometry(format!(
                "expected {pages} slots, one for each key, found {} for pool {name:?}",
                memory.slots.len()
            )));
        }
        let components = self.spec.pool.components().len();
        if memory.regions.len() != 1 && memory.regions.len() != components {
            return Err(Error::geometry(format!(
                "expected one region, or one for each of the {components} components of pool {name:?}, found {}",
                memory.regions.len()
            )));
        }
        if writes_memory && memory.regions.iter().any(|region| !region.is_writable()) {
            return Err(Error::geometry(format!(
                "expected a writable region for pool {name:?}, found one that is read-only"
            )));
        }
        let host = self.host(&memory)?;
        for (index, (region, &needed)) in memory.regions.iter().zip(&host.buffer_bytes).enumerate() {
            if (region.len() as u64) < needed {
                return Err(Error::geometry(format!(
                    "expected {needed} bytes in region {index} of pool {name:?}, found {}",
                    region.len()
                )));
            }
        }
        let mut taken = vec![0_u64; (host.slots as usize).div_ceil(64)];
        for (page, &slot) in memory.slots.iter().enumerate().filter(|(_, slot)| **slot != -1) {
            let Some(slot) = u64::try_from(slot).ok().filter(|&slot| slot < host.slots) else {
                return Err(Error::geometry(format!(
                    "expected a slot from 0 to {}, or -1 for none, found {slot} for page {page} of pool {name:?}",
                    host.slots as i64 - 1
                )));
            };
            let (word, bit) = (slot as usize / 64, 1_u64 << (slot % 64));
            if taken[word] & bit != 0 {
                return Err(Error::geometry(format!(
                    "slot {slot} of pool {name:?} is named twice, again for page {page}"
                )));
            }
            taken[word] |= bit;
        }
        Ok(BoundMemory { regions: memory.regions, slots: memory.slots, host, is_staging: false })
    }

    /// Layout of the host memory: as many slots as fit in exactly.
    fn host(&self, memory: &PoolMemory<'_>) -> Result<Arc<Layout>> {
        let split = memory.regions.len() > 1;
        let total: u64 = memory.regions.iter().map(|region| region.len() as u64).sum();
        let page_bytes = self.spec.packed.map_or(self.form.page_bytes, |(_, host_page)| host_page);
        if !total.is_multiple_of(page_bytes) {
            return Err(Error::geometry(format!(
                "expected a whole number of pages of {page_bytes} bytes in the region of pool {:?}, found {total} bytes",
                self.spec.pool.name()
            )));
        }
        let slots = total / page_bytes;
        if let Some(host) = lock(&self.hosts).get(&(slots, split)) {
            return Ok(Arc::clone(host));
        }
        let spec = &self.spec;
        let host = match spec.packed {
            None => Layout::host(spec.layout, &spec.pool, &spec.tile, slots, split)?,
            Some((offset, host_page)) => {
                Layout::packed(spec.layout, &spec.pool, &spec.tile, slots, offset, host_page)?
            }
        };
        let host = Arc::new(host);
        lock(&self.hosts).insert((slots, split), Arc::clone(&host));
        Ok(host)
    }

    /// Layout of the store's own memory: pages one after the other, each like an object that is stored as it is.
    pub(crate) fn staging(&self) -> Result<Arc<Layout>> {
        if let Some(staging) = self.staging.get() {
            return Ok(Arc::clone(staging));
        }
        let (spec, page_bytes) = (&self.spec, self.form.page_bytes);
        let layout = Layout::packed(spec.layout, &spec.pool, &spec.tile, STAGING_SLOTS, 0, page_bytes)?;
        Ok(Arc::clone(self.staging.get_or_init(|| Arc::new(layout))))
    }

    /// How `piece` of a page of the store's own memory lies in the caller's.
    pub(crate) fn staging_landing(&self, memory: &BoundMemory<'_>, piece: &Tile) -> Result<Arc<Landing>> {
        self.landing(&Form { codec: Codec::None, ..self.form }, piece, memory)
    }

    /// What it costs to read `layers` of the page of `key` into `memory`, as the store holds it now; `None` where it
    /// does not hold it.
    pub(crate) fn read_cost(
        &self,
        index: &Index,
        key: &PageKey,
        layers: Span,
        memory: &BoundMemory<'_>,
    ) -> Result<Option<ReadCost>> {
        let found = self.coverage(index).find(index, &short_key(key));
        let mut cost = ReadCost::default();
        for (found, tile) in &found {
            let (form, Some(layers)) = (index.form(*found), tile.layers.intersect(&layers)) else { continue };
            let landing = self.landing(form, &Tile { layers, ..*tile }, memory)?;
            cost.wanted_bytes += landing.bytes;
            cost.ranges += landing.blocks.len() as u64;
            let blocks: u64 = landing.blocks.iter().map(|range| range.len() as u64).sum();
            cost.read_bytes += (blocks * u64::from(form.block_bytes)).min(form.page_bytes);
        }
        Ok((!found.is_empty()).then_some(cost))
    }

    /// Why a page of this pool cannot be had, in words.
    pub(crate) fn why_missing(&self, index: &Index, key: &PageKey) -> String {
        match index.quarantine_reason(&short_key(key)) {
            Some(reason) => format!("in quarantine ({})", reason.name()),
            None => "absent".into(),
        }
    }
}

/// Checksum block for objects of this layout: as much as one layer's rows, so that a reader of some layers reads
/// no more than it must, within the limits of the format.
fn block_bytes(object: &Layout) -> u32 {
    let longest = object.components.iter().map(|component| {
        let per_token = component.row_bytes * u64::from(component.heads_per_group);
        let tokens = u64::from(object.tile.tokens.count);
        // Rows of all tokens of a layer lie together only where a token's stride is its own rows.
        if component.token_stride == per_token { per_token * tokens } else { u64::from(*BLOCK_BYTES.end()) }
    });
    let wanted = longest.max().unwrap_or(u64::from(*BLOCK_BYTES.end()));
    let (smallest, largest) = (u64::from(*BLOCK_BYTES.start()), u64::from(*BLOCK_BYTES.end()));
    let power = wanted.clamp(smallest, largest);
    1 << power.ilog2()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
