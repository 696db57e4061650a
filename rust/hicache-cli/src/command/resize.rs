//! `resize`: another capacity for a root, at once and for all processes.

use std::path::PathBuf;

use clap::Args;
use hicache_core::{Store, StoreOptions, inspect};
use serde_json::json;

use crate::FINE;
use crate::failure::Done;
use crate::output::{Output, size};
use crate::values::parse_size;

/// Changes the capacity of a root, for all processes that use it; when it gets smaller, pages leave until it holds.
#[derive(Args)]
pub struct Resize {
    /// Folder of the store
    root: PathBuf,
    /// The new capacity: 500GiB
    #[arg(value_parser = parse_size)]
    capacity: u64,
}

impl Resize {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        // Also finds out that there is a store, which opening one would make.
        inspect::scan(&self.root)?;
        let store = Store::open(&self.root, StoreOptions::default())?;
        let before = store.capacity_bytes();
        let resized = store.resize(self.capacity);
        let used = store.used_bytes();
        store.close();
        let freed = resized?;
        match output.is_json() {
            true => output.document(
                "resize",
                json!({
                    "root": self.root.to_string_lossy(),
                    "capacity_bytes_before": before,
                    "capacity_bytes": self.capacity,
                    "used_bytes": used,
                    "objects": freed.objects,
                }),
            ),
            false => output.line(&format!(
                "capacity {} instead of {}; {} objects removed, {} in use",
                size(self.capacity),
                size(before),
                freed.objects,
                size(used)
            )),
        }
        Ok(FINE)
    }
}
