//! `clear`: one namespace is forgotten, by all processes.

use std::path::PathBuf;

use clap::Args;
use hicache_core::namespace::Fingerprint;
use hicache_core::{Store, StoreOptions};
use serde_json::json;

use crate::FINE;
use crate::facts::Objects;
use crate::failure::{Done, Failure};
use crate::output::{Output, size};
use crate::values::{find, identity, scan_namespace};

/// Forgets everything stored in one namespace, for all processes, and deletes what no live process writes.
///
/// Other namespaces and files that are not the store's stay as they are.
#[derive(Args)]
pub struct Clear {
    /// Folder of the store
    root: PathBuf,
    /// Fingerprint of the namespace
    #[arg(long, value_name = "FINGERPRINT")]
    namespace: Fingerprint,
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

impl Clear {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let scan = scan_namespace(&self.root, &self.namespace)?;
        let found = find(&scan, &self.namespace)?;
        let namespace = identity(found)?;
        let objects = Objects::of(found);
        if !self.yes {
            let question = format!(
                "clear namespace {} ({} at revision {}): {} objects, {}?",
                self.namespace,
                namespace.model(),
                namespace.revision(),
                objects.live,
                size(objects.live_bytes)
            );
            match output.ask(&question) {
                Some(true) => {}
                Some(false) => return Err(Failure::new("nothing was cleared")),
                None => {
                    return Err(Failure::new("expected --yes, or a terminal to ask on; nothing was cleared"));
                }
            }
        }
        let store = Store::open(&self.root, StoreOptions::default())?;
        let cleared = store.clear_namespace(namespace);
        store.close();
        cleared?;
        match output.is_json() {
            true => {
                let body = json!({
                    "root": self.root.to_string_lossy(),
                    "namespace": self.namespace.to_string(),
                    "objects": objects.live,
                    "stored_bytes": objects.live_bytes,
                });
                output.document("clear", body);
            }
            false => output.line(&format!("{} objects cleared, {}", objects.live, size(objects.live_bytes))),
        }
        Ok(FINE)
    }
}
