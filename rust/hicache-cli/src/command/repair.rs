//! `repair`: what dead processes left is brought to an end, what journals lost is told again.

use std::path::PathBuf;

use clap::Args;
use hicache_core::store::repair::{FinishReport, repair};
use serde_json::json;

use crate::failure::Done;
use crate::output::{Output, size};
use crate::{FINE, PROBLEMS};

/// Finishes what killed processes left, tells again what lost or damaged journals said, and removes leftovers.
///
/// Safe beside a live store: files of live processes are not touched. No page that can be restored is lost.
#[derive(Args)]
pub struct Repair {
    /// Folder of the store
    root: PathBuf,
}

impl Repair {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let report = repair(&self.root)?;
        match output.is_json() {
            true => output.document("repair", self.document(&report)),
            false => say(&report, output),
        }
        Ok(if report.unfinished { PROBLEMS } else { FINE })
    }

    fn document(&self, report: &FinishReport) -> serde_json::Value {
        json!({
            "root": self.root.to_string_lossy(),
            "dead_processes": report.processes,
            "units_told": report.units_told,
            "segments_sealed": report.segments_sealed,
            "segments_removed": report.segments_removed,
            "journals_merged": report.journals_merged,
            "temporaries_removed": report.temporaries_removed,
            "freed_bytes": report.freed_bytes,
            "is_unfinished": report.unfinished,
        })
    }
}

fn say(report: &FinishReport, output: &mut Output<'_>) {
    let counts = [
        ("dead processes seen to", report.processes),
        ("units told again", report.units_told),
        ("segments sealed", report.segments_sealed),
        ("empty segments removed", report.segments_removed),
        ("journals merged", report.journals_merged),
        ("leftovers removed", report.temporaries_removed),
    ];
    for (what, count) in counts {
        output.line(&format!("{what:<24} {count}"));
    }
    output.line(&format!("{:<24} {}", "given back", size(report.freed_bytes)));
    if report.unfinished {
        output.words("some of it could not be done, or is in use by another process: try again");
    }
}
