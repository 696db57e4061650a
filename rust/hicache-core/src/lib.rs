//! The store: identity, layouts, on-disk format, backup, match and restore of KV-cache pages.
#![forbid(unsafe_code)]

pub mod dtype;
pub mod error;
pub mod key;
pub mod tile;

pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use key::{PageKey, bigram_page_keys, chain_seed, page_keys};
pub use tile::{Piece, Span, Tile, TokenLattice, cover};
