//! `verify`: every stored byte is read and checked.

use std::path::PathBuf;

use clap::Args;
use hicache_core::inspect::{self, Finding, FindingKind, VerifyProgress};
use hicache_core::namespace::Fingerprint;
use serde_json::{Value, json};

use crate::failure::Done;
use crate::output::{Output, size};
use crate::values::find;
use crate::{PROBLEMS, facts};

/// Reads and checks every stored byte of a root, also beside a live store. Reads only.
///
/// Healed objects are shown and are fine: a reader found one damaged, and a whole copy was stored since.
#[derive(Args)]
pub struct Verify {
    /// Folder of the store
    root: PathBuf,
    /// Fingerprint of the one namespace to check
    #[arg(long, value_name = "FINGERPRINT")]
    namespace: Option<Fingerprint>,
}

impl Verify {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let scan = inspect::scan(&self.root)?;
        if let Some(fingerprint) = &self.namespace {
            find(&scan, fingerprint)?;
        }
        let bar = output.progress(0, "objects");
        let tell = |progress: VerifyProgress| {
            bar.set_length(progress.of_objects);
            bar.set_position(progress.objects);
            bar.set_message(size(progress.bytes));
        };
        let verified = inspect::verify(&scan, self.namespace.as_ref(), &tell);
        bar.finish_and_clear();
        let (progress, findings) = verified?;
        let is_bad = |finding: &Finding| finding.kind != FindingKind::Healed;
        let code = if findings.iter().any(is_bad) { PROBLEMS } else { facts::verdict(&scan) };
        let pool = |finding: &Finding| {
            let namespace = scan.namespace(&finding.namespace);
            namespace.map_or_else(|| finding.pool.to_string(), |found| found.pool_name(&finding.pool))
        };
        if output.is_json() {
            let list: Vec<Value> =
                findings.iter().map(|finding| finding_json(finding, &pool(finding))).collect();
            let body = json!({
                "root": self.root.to_string_lossy(),
                "objects": progress.objects,
                "bytes": progress.bytes,
                "is_whole": code != PROBLEMS,
                "findings": list,
                "problems": facts::problems_json(&scan),
            });
            output.document("verify", body);
            return Ok(code);
        }
        for finding in &findings {
            let namespace = scan.namespace(&finding.namespace).and_then(|found| found.namespace.as_ref());
            let page_size = namespace.map(hicache_core::Namespace::page_size);
            let Finding { kind, key, tile, segment, entry_offset, message, .. } = finding;
            output.line(&format!("{} page {key}: {message}", kind.name()));
            let at = format!("ns/{}/{segment}, entry at {entry_offset}", finding.namespace);
            output.line(&format!("    pool {}, {}, {at}", pool(finding), facts::tile_text(tile, page_size)));
        }
        let count = |kind| findings.iter().filter(|finding| finding.kind == kind).count();
        output.line(&format!(
            "{} objects read, {}: {} damaged, {} quarantined, {} healed, {} problems in the root",
            progress.objects,
            size(progress.bytes),
            count(FindingKind::Damaged),
            count(FindingKind::Quarantined),
            count(FindingKind::Healed),
            scan.problems.len()
        ));
        facts::say_problems(&scan, output);
        Ok(code)
    }
}

fn finding_json(finding: &Finding, pool: &str) -> Value {
    json!({
        "kind": finding.kind.name(),
        "namespace": finding.namespace.to_string(),
        "key": finding.key,
        "pool": pool,
        "pool_fingerprint": finding.pool.to_string(),
        "tile": facts::tile_json(&finding.tile),
        "segment": finding.segment.to_string(),
        "entry_offset": finding.entry_offset,
        "message": finding.message,
    })
}
