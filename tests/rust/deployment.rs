//! A deployment whose pages are told by chain, number and rank, so that every restored byte can be checked by
//! any process that knows nothing else.

use hicache_core::{
    Component, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, Result, Span, Store, Tile, View,
    ViewOptions, ViewPool,
};

/// Layers of a page.
const LAYERS: u32 = 2;
/// Tokens of a page.
const TOKENS: u32 = 4;
/// Components of a page: K and V.
const COMPONENTS: [&str; 2] = ["k", "v"];

/// One rank of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deployment {
    /// Bytes of this rank's part of a page; a multiple of 16.
    pub page_bytes: u32,
    /// This rank.
    pub rank: u32,
    /// All ranks; each has one head.
    pub ranks: u32,
    /// Revision of the model: another one is another namespace.
    pub revision: String,
}

impl Deployment {
    /// One rank that holds whole pages of `page_bytes`.
    pub fn whole(page_bytes: u32) -> Self {
        Deployment { page_bytes, rank: 0, ranks: 1, revision: "r1".into() }
    }

    /// Its namespace.
    ///
    /// # Errors
    /// `Namespace` when the revision cannot be one.
    pub fn namespace(&self) -> Result<Namespace> {
        Namespace::new("org/many", &self.revision, TOKENS, None)
    }

    /// Its only pool, each page in one piece of host memory.
    ///
    /// # Errors
    /// `Geometry` for a size that cannot be.
    pub fn pool(&self) -> Result<ViewPool> {
        let row_bytes = self.page_bytes / (LAYERS * TOKENS * COMPONENTS.len() as u32);
        let components = COMPONENTS.map(|name| Component::per_token(name, row_bytes));
        let pool = Pool::new("kv", PoolKind::Kv, DType::UInt8, None, components.to_vec())?;
        let (layers, heads) = (Span { start: 0, end: LAYERS }, Span { start: self.rank, end: self.rank + 1 });
        let tile = Tile::whole_page(layers, heads, TOKENS)?;
        let page_bytes = pool.page_bytes(&tile)?;
        let mut pool = ViewPool::new(pool, tile, LayoutName::PageFirst);
        pool.packed = Some((0, page_bytes));
        Ok(pool)
    }

    /// Its view of a store.
    ///
    /// # Errors
    /// Those of [`Store::view`].
    pub fn view(&self, store: &Store) -> Result<View> {
        store.view(self.namespace()?, vec![self.pool()?], ViewOptions::default())
    }

    /// Bytes of a page.
    pub fn page(&self, chain: u64, number: u64) -> Vec<u8> {
        let seed = [chain, number, u64::from(self.rank)].into_iter().fold(1, |seed, part| mix(seed ^ part));
        let mut numbers = Numbers(seed);
        let words = (0..self.page_bytes.div_ceil(8)).flat_map(|_| numbers.next_fast().to_le_bytes());
        words.take(self.page_bytes as usize).collect()
    }
}

/// The first `pages` keys of a chain; chains share none.
pub fn keys(chain: u64, pages: usize) -> Vec<PageKey> {
    let seed = hicache_core::chain_seed(Some(&format!("chain {chain}")), None);
    let tokens: Vec<u64> = (0..pages as u64).collect();
    hicache_core::page_keys(&tokens, 1, seed.as_ref())
}

/// A small generator: the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct Numbers(pub u64);

impl Numbers {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// The next number below `limit`, of which 0 counts as 1.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit.max(1)
    }

    fn next_fast(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 ^ (self.0 >> 29)
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
