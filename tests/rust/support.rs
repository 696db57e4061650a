//! What the store's tests share: a tiny deployment, pages whose bytes are told by their number, and a canary.

use std::sync::Arc;

use hicache_core::{
    BackupReport, ChainStart, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, PoolMemory,
    RestoreOptions, RestoreReport, Span, Store, StoreOptions, Tile, View, ViewOptions, ViewPool,
};
use hicache_sys::Region;

/// Fills memory that a restore must not touch.
pub const CANARY: u8 = 0xa5;

/// Pages of 4 tokens, as in the field cases: 2 layers, 2 heads, 8 elements, K and V, 16 bit: 512 bytes.
pub fn namespace(revision: &str) -> Namespace {
    Namespace::new("org/tiny", revision, 4, None).unwrap()
}

/// The `kv` pool of the tiny deployment, with rows of `row_bytes` per token, layer and head.
pub fn kv_pool(dtype: &str, row_bytes: u32) -> Pool {
    let components = ["k", "v"].map(|name| hicache_core::Component {
        dtype: None,
        ..hicache_core::Component::per_token(name, row_bytes)
    });
    Pool::new("kv", PoolKind::Kv, DType::parse(dtype).unwrap(), None, components.to_vec()).unwrap()
}

/// A rectangle of whole pages of 4 tokens.
pub fn tile(layers: (u32, u32), heads: (u32, u32)) -> Tile {
    let span = |(start, end)| Span { start, end };
    Tile::whole_page(span(layers), span(heads), 4).unwrap()
}

/// The tiny deployment's one pool.
pub fn tiny() -> ViewPool {
    ViewPool::new(kv_pool("bfloat16", 16), tile((0, 2), (0, 2)), LayoutName::PageFirst)
}

/// A store in a folder that goes with the test.
pub fn open(root: &std::path::Path) -> Store {
    Store::open(root, StoreOptions { capacity_bytes: Some(64 << 20), ..StoreOptions::default() }).unwrap()
}

/// A view of the tiny deployment at revision `r1`.
pub fn tiny_view(store: &Store) -> View {
    store.view(namespace("r1"), vec![tiny()], ViewOptions::default()).unwrap()
}

/// The first `count` keys of a chain; chains of different names share none.
pub fn keys(chain: &str, count: usize) -> Vec<PageKey> {
    let seed = hicache_core::chain_seed(Some(chain), None);
    let tokens: Vec<u64> = (0..count as u64).collect();
    hicache_core::page_keys(&tokens, 1, seed.as_ref())
}

/// Bytes of page `number`: random looking, the same on every run.
pub fn page_bytes(number: u64, len: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..len.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
    });
    words.take(len).collect()
}

/// Host memory of `slots` pages for a page-contiguous layout with one component after the other in each page.
pub struct Memory {
    /// The memory.
    pub region: Arc<Region>,
}

impl Memory {
    /// `bytes` of canary.
    pub fn canary(bytes: usize) -> Memory {
        let region = Region::owned(bytes);
        region.copy_in(0, &vec![CANARY; bytes]).unwrap();
        Memory { region: Arc::new(region) }
    }

    /// These bytes.
    pub fn of(bytes: &[u8]) -> Memory {
        let memory = Memory::canary(bytes.len());
        memory.region.copy_in(0, bytes).unwrap();
        memory
    }

    /// All bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.region.len()];
        self.region.copy_out(0, &mut out).unwrap();
        out
    }
}

/// One pool's memory for a call, page `i` in slot `i`.
pub fn lend<'a>(memory: &'a Memory, slots: &'a [i64]) -> Vec<PoolMemory<'a>> {
    vec![PoolMemory { regions: vec![&memory.region], slots }]
}

/// Backs up `keys` from slots 0, 1, ...
pub fn backup(view: &View, keys: &[PageKey], memory: &Memory) -> BackupReport {
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    view.backup(keys, lend(memory, &slots), ChainStart { parent: None, depth: Some(0) }).unwrap()
}

/// Restores `keys` to slots 0, 1, ...
pub fn restore(view: &View, keys: &[PageKey], memory: &Memory) -> RestoreReport {
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    view.restore(keys, lend(memory, &slots), RestoreOptions::default()).unwrap()
}
