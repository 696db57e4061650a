//! `import`: an exported namespace into a root.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::PathBuf;

use clap::Args;
use hicache_core::store::import::{ImportReport, Importer};
use hicache_core::{Namespace, Store, StoreOptions};
use serde_json::json;

use crate::command::archive::{self, End};
use crate::failure::{Done, Failure};
use crate::output::Output;
use crate::values::parse_size;
use crate::{FAILED, FINE, PROBLEMS};

/// Stores the pages of an exported namespace that are whole and not there yet.
///
/// A damaged page is left out and counted, and the exit code is then 1. A damaged or cut archive stops the import:
/// what was stored before stays, and is told.
#[derive(Args)]
pub struct Import {
    /// Folder of the store; made if missing
    root: PathBuf,
    /// File that `export` wrote
    file: PathBuf,
    /// Capacity of a root that is made now
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    capacity: Option<u64>,
}

/// How far an import came.
#[derive(Default)]
struct Progress {
    namespace: Option<Namespace>,
    units: u64,
    report: ImportReport,
}

impl Import {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let file = File::open(&self.file).map_err(|error| Failure::io("cannot open", &self.file, &error))?;
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        let bar = output.progress(bytes, "bytes");
        let mut progress = Progress::default();
        let read = self.read(bar.wrap_read(BufReader::with_capacity(1 << 20, file)), &mut progress);
        bar.finish_and_clear();
        self.say(&progress, read.as_ref().err(), output);
        match read {
            Err(_) => Ok(FAILED),
            Ok(()) if progress.report.damaged + progress.report.damaged_runs > 0 => Ok(PROBLEMS),
            Ok(()) => Ok(FINE),
        }
    }

    fn read(&self, file: impl Read, progress: &mut Progress) -> Result<(), Failure> {
        let wrong = |message: String| Failure::new(format!("{}: {message}", self.file.display()));
        let mut tar = tar::Archive::new(file);
        // Raw: no extension of tar's that could rename or resize an entry.
        let entries = tar.entries().map_err(|error| wrong(error.to_string()))?.raw(true);
        let (mut pools, mut taking) = (Vec::new(), None);
        for entry in entries {
            let mut entry = entry.map_err(|error| wrong(format!("damaged archive: {error}")))?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            if progress.namespace.is_none() && name != archive::NAMESPACE_NAME {
                return Err(wrong(format!(
                    "expected {} as its first entry, found {name:?}: not an export of this tool",
                    archive::NAMESPACE_NAME
                )));
            }
            let is_unit = name == archive::unit_name(progress.units);
            let most = if is_unit { archive::MAX_UNIT_BYTES } else { archive::MAX_WORDS_BYTES };
            let bytes = contents(&mut entry, most).map_err(|why| wrong(format!("{name}: {why}")))?;
            let named = |why: String| wrong(format!("{name}: {why}"));
            if progress.namespace.is_none() {
                progress.namespace = Some(archive::read_namespace(&bytes).map_err(named)?);
            } else if is_unit {
                let taking = match &mut taking {
                    Some(taking) => taking,
                    None => taking.insert(Taking::start(self, progress.namespace.as_ref(), &pools)?),
                };
                let taken = taking.importer.unit(&bytes);
                progress.report = taking.importer.report();
                taken.map_err(|error| named(error.to_string()))?;
                progress.units += 1;
            } else if name == archive::END_NAME {
                return check_end(progress, &bytes).map_err(named);
            } else if name.starts_with("pools/") && taking.is_none() && pools.len() < archive::MAX_POOLS {
                pools.push(archive::read_pool(&name, &bytes).map_err(named)?);
            } else {
                return Err(wrong(format!(
                    "expected {}, found {name:?}",
                    archive::unit_name(progress.units)
                )));
            }
        }
        Err(wrong(format!(
            "the archive is cut short: it ends after {} units, without an end",
            progress.units
        )))
    }

    fn say(&self, progress: &Progress, failure: Option<&Failure>, output: &mut Output<'_>) {
        let ImportReport { stored, present, damaged, damaged_runs } = progress.report;
        if output.is_json() {
            let body = json!({
                "root": self.root.to_string_lossy(),
                "file": self.file.to_string_lossy(),
                "namespace": progress.namespace.as_ref().map(|found| found.fingerprint().to_string()),
                "is_complete": failure.is_none(),
                "stored": stored,
                "present": present,
                "damaged": damaged,
                "damaged_runs": damaged_runs,
                "error": failure.map(Failure::to_string),
            });
            output.document("import", body);
        } else {
            output
                .line(&format!("{stored} objects imported, {present} were there already, {damaged} damaged"));
            if damaged_runs > 0 {
                output.words(&format!("{damaged_runs} runs are damaged and were left out whole"));
            }
        }
        if let Some(failure) = failure {
            output.words(&format!("hicache-store: {failure}; what was imported before stays"));
        }
    }
}

/// A store with units on their way into it.
struct Taking {
    importer: Importer,
    // Closed when it is dropped, after the last unit.
    _store: Store,
}

impl Taking {
    fn start(
        import: &Import,
        namespace: Option<&Namespace>,
        pools: &[hicache_core::Pool],
    ) -> Result<Taking, Failure> {
        let namespace = namespace.ok_or_else(|| Failure::new("an archive without a namespace"))?;
        let options = StoreOptions { capacity_bytes: import.capacity, ..StoreOptions::default() };
        let store = Store::open(&import.root, options)?;
        Ok(Taking { importer: store.importer(namespace.clone(), pools)?, _store: store })
    }
}

/// The bytes of a regular file's entry, at most `most`.
fn contents(entry: &mut tar::Entry<'_, impl Read>, most: u64) -> Result<Vec<u8>, String> {
    if entry.header().entry_type() != tar::EntryType::Regular {
        return Err(format!("expected a regular file, found {:?}", entry.header().entry_type()));
    }
    let size = entry.size();
    if size > most {
        return Err(format!("expected at most {most} bytes, found {size}"));
    }
    // Grows with what is really there: a size alone allocates nothing.
    let mut bytes = Vec::new();
    entry.take(most).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 != size {
        return Err(format!("the archive is cut short: expected {size} bytes, found {}", bytes.len()));
    }
    Ok(bytes)
}

fn check_end(progress: &Progress, bytes: &[u8]) -> Result<(), String> {
    let end = End::read(bytes)?;
    let ImportReport { stored, present, damaged, damaged_runs } = progress.report;
    let found = End { units: progress.units, objects: stored + present + damaged };
    // The objects of a damaged run cannot be counted.
    if end.units != found.units || (end.objects != found.objects && damaged_runs == 0) {
        return Err(format!(
            "expected {} units with {} objects before it, found {} with {}",
            end.units, end.objects, found.units, found.objects
        ));
    }
    Ok(())
}
