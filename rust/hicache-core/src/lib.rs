//! The store: identity, layouts, on-disk format, backup, match and restore of KV-cache pages.
#![forbid(unsafe_code)]

mod canonical;
pub mod dtype;
pub mod error;
pub mod format;
pub mod host_pool;
pub mod inspect;
pub mod key;
pub mod layout;
pub mod namespace;
pub mod plan;
pub mod pool;
pub mod store;
pub mod tile;
pub mod transfer;

pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use host_pool::{
    HostPool, Lease, Mapping, MappingWish, MemberPlan, PoolMember, PoolPlacement, PoolSet, PoolUsage,
    SlotHandle,
};
pub use key::{PageKey, bigram_page_keys, chain_seed, page_keys};
pub use layout::{ComponentLayout, Layout, LayoutName};
pub use namespace::{Difference, Fingerprint, Namespace};
pub use plan::{CopyPlan, CopyRun, Extent, Grid, Place, Strip, cover_source};
pub use pool::{Component, HitPolicy, Pool, PoolKind, RowUnit};
pub use store::{
    BackupOptions, BackupOutcome, BackupReport, Bounce, BreakerState, ChainStart, DeviceReport, Freed,
    IoMode, Match, PoolHit, PoolMemory, RestoreOptions, RestoreOutcome, RestoreReport, Store, StoreOptions,
    View, ViewOptions, ViewPool,
};
pub use tile::{Piece, Span, Tile, TokenLattice, cover};
