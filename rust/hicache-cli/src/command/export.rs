//! `export`: a namespace into one file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use hicache_core::format::ProcessId;
use hicache_core::inspect::NamespaceScan;
use hicache_core::inspect::archive::{ExportReport, export_units};
use hicache_core::namespace::Fingerprint;
use hicache_core::{Namespace, Pool};
use serde_json::json;

use crate::command::archive::{self, End};
use crate::facts::Objects;
use crate::failure::{Done, Failure};
use crate::output::{Output, size};
use crate::values::{find, identity, scan_namespace};
use crate::{FINE, PROBLEMS};

/// Writes one namespace into a tar file, for `import` into another root. The root is only read.
///
/// Pages that do not verify are left out and counted, and the exit code is then 1.
#[derive(Args)]
pub struct Export {
    /// Folder of the store
    root: PathBuf,
    /// Fingerprint of the namespace
    #[arg(long, value_name = "FINGERPRINT")]
    namespace: Fingerprint,
    /// File to write; it appears when it is whole, and replaces an older one
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
}

impl Export {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let scan = scan_namespace(&self.root, &self.namespace)?;
        let found = find(&scan, &self.namespace)?;
        let identity = identity(found)?;
        let mut name = self.output.clone().into_os_string();
        name.push(format!(".tmp-{}", ProcessId::random()?));
        let temporary = PathBuf::from(name);
        let bar = output.progress(Objects::of(found).live_bytes, "bytes");
        let written = write(found, identity, &temporary, &|bytes| bar.inc(bytes))
            .and_then(|report| std::fs::rename(&temporary, &self.output).map(|()| report));
        bar.finish_and_clear();
        let report = written.map_err(|error| {
            let _ = std::fs::remove_file(&temporary); // the first error is the one to report
            Failure::io("cannot write", &self.output, &error)
        })?;
        self.say(&report, output);
        Ok(if report.damaged == 0 { FINE } else { PROBLEMS })
    }

    fn say(&self, report: &ExportReport, output: &mut Output<'_>) {
        if output.is_json() {
            let body = json!({
                "root": self.root.to_string_lossy(),
                "namespace": self.namespace.to_string(),
                "file": self.output.to_string_lossy(),
                "objects": report.objects,
                "stored_bytes": report.bytes,
                "damaged": report.damaged,
                "removed": report.removed,
            });
            return output.document("export", body);
        }
        output.line(&format!("{} objects exported, {}", report.objects, size(report.bytes)));
        if report.damaged > 0 {
            output.words(&format!("{} objects do not verify and were left out", report.damaged));
        }
        if report.removed > 0 {
            output.words(&format!("{} objects were removed meanwhile", report.removed));
        }
    }
}

fn write(
    found: &NamespaceScan,
    identity: &Namespace,
    path: &Path,
    progress: &dyn Fn(u64),
) -> io::Result<ExportReport> {
    let file = File::options().write(true).create_new(true).open(path)?;
    let mut tar = tar::Builder::new(BufWriter::with_capacity(1 << 20, file));
    add(&mut tar, archive::NAMESPACE_NAME, archive::namespace_json(identity).to_string().as_bytes())?;
    for (fingerprint, pool) in found.pools.iter().take(archive::MAX_POOLS) {
        add(&mut tar, &archive::pool_name(fingerprint), Pool::to_json(pool).to_string().as_bytes())?;
    }
    let mut units = 0;
    let report = export_units(found, &mut |unit| {
        add(&mut tar, &archive::unit_name(units), unit)?;
        units += 1;
        progress(unit.len() as u64);
        Ok(())
    })?;
    let end = End { units, objects: report.objects };
    add(&mut tar, archive::END_NAME, end.to_json().to_string().as_bytes())?;
    let mut buffered = tar.into_inner()?;
    buffered.flush()?;
    buffered.get_ref().sync_data()?;
    Ok(report)
}

fn add(tar: &mut tar::Builder<BufWriter<File>>, name: &str, bytes: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, name, bytes)
}
