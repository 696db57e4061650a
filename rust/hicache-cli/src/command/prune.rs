//! `prune`: pages leave before the root is full.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hicache_core::inspect::{self, NamespaceScan, RootScan};
use hicache_core::{Freed, Store, StoreOptions};
use serde_json::json;

use crate::FINE;
use crate::facts::Objects;
use crate::failure::{Done, Failure};
use crate::output::{Output, size};
use crate::values::{identity, parse_age, parse_size};

/// Removes pages for all processes: the least useful ones, those not used for long, or those of one weights revision.
///
/// The ends of chains leave first, all pools and tiles of a page together. Safe beside a live store.
#[derive(Args)]
pub struct Prune {
    /// Folder of the store
    root: PathBuf,
    #[command(flatten)]
    what: What,
    /// Do not ask (a revision is asked for)
    #[arg(long)]
    yes: bool,
}

/// Which pages leave.
#[derive(Args)]
#[group(required = true, multiple = false)]
struct What {
    /// The least useful pages, until the root takes at most this much on disk: 100GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    to: Option<u64>,
    /// Pages not used for this long: 36h, 7d
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    older_than: Option<Duration>,
    /// All namespaces of this weights revision
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
}

impl Prune {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        // Also finds out that there is a store, which opening one would make.
        let scan = inspect::scan(&self.root)?;
        let found = match &self.what.revision {
            Some(revision) => self.of_revision(&scan, revision, output)?,
            None => Vec::new(),
        };
        let store = Store::open(&self.root, StoreOptions::default())?;
        let before = store.used_bytes();
        let pruned = self.prune(&store, &found);
        let after = store.used_bytes();
        store.close();
        let freed = pruned?;
        match output.is_json() {
            true => output.document(
                "prune",
                json!({
                    "root": self.root.to_string_lossy(),
                    "objects": freed.objects,
                    "used_bytes_before": before,
                    "used_bytes": after,
                }),
            ),
            false => output.line(&format!(
                "{} objects removed; {} of {} in use now",
                freed.objects,
                size(after),
                size(before)
            )),
        }
        Ok(FINE)
    }

    fn prune(&self, store: &Store, found: &[&NamespaceScan]) -> Result<Freed, Failure> {
        if let Some(bytes) = self.what.to {
            return Ok(store.prune_to(bytes)?);
        }
        if let Some(age) = self.what.older_than {
            return Ok(store.prune_unused_for(age)?);
        }
        let mut freed = Freed::default();
        for namespace in found {
            store.clear_namespace(identity(namespace)?)?;
            freed.objects += Objects::of(namespace).live;
        }
        Ok(freed)
    }

    /// The namespaces of a revision, if the user agrees.
    fn of_revision<'a>(
        &self,
        scan: &'a RootScan,
        revision: &str,
        output: &mut Output<'_>,
    ) -> Result<Vec<&'a NamespaceScan>, Failure> {
        let has_it = |scan: &&NamespaceScan| {
            scan.namespace.as_ref().is_some_and(|namespace| namespace.revision() == revision)
        };
        let found: Vec<&NamespaceScan> = scan.namespaces.iter().filter(has_it).collect();
        if found.is_empty() {
            return Err(Failure::new(format!(
                "expected a namespace of revision {revision:?} in {}, found none",
                self.root.display()
            )));
        }
        if !self.yes {
            let objects: u64 = found.iter().map(|namespace| Objects::of(namespace).live).sum();
            let question =
                format!("remove {} namespaces of revision {revision}: {objects} objects?", found.len());
            match output.ask(&question) {
                Some(true) => {}
                Some(false) => return Err(Failure::new("nothing was removed")),
                None => {
                    return Err(Failure::new("expected --yes, or a terminal to ask on; nothing was removed"));
                }
            }
        }
        Ok(found)
    }
}
