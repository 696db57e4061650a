//! One root, many processes: real ones, that are stopped, killed and started again.
//!
//! `HICACHE_FULL_SIZE=1` runs the long versions, as `tests/full.py` does.

mod capacity;
mod clearing;
mod containers;
mod driver;
mod field_cases;
mod full_disk;
mod harness;
mod kills;
mod ledger;
mod mounted;
mod ranks;
mod reopening;
mod same_chain;
mod visibility;
