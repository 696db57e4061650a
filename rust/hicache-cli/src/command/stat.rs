//! `stat`: how full a root is, who holds its room, what happened.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use hicache_core::PoolPlacement;
use hicache_core::format::setup::Setup;
use hicache_core::inspect::{self, ProcessScan, RootScan};
use serde_json::{Value, json};

use crate::facts::{self, Objects};
use crate::failure::{Done, Failure};
use crate::output::{Output, size, time};

/// Ended processes that are listed in words, those with the most on disk.
const MOST_ENDED: usize = 16;

/// Shows capacity, grants, processes, segments, objects and counters of a root. Reads only.
///
/// Safe beside a live store.
#[derive(Args)]
pub struct Stat {
    /// Folder of the store
    root: PathBuf,
    /// Again every so many seconds, with rates, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    watch: Option<f64>,
    /// With --watch: stop after so many rounds
    #[arg(long, value_name = "N", requires = "watch")]
    count: Option<u64>,
}

impl Stat {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let Some(seconds) = self.watch else {
            let scan = inspect::scan(&self.root)?;
            match output.is_json() {
                true => output.document("stat", document(&scan)),
                false => say(&scan, output),
            }
            return Ok(facts::verdict(&scan));
        };
        let pause = Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|pause| (Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(pause))
            .ok_or_else(|| {
                Failure::new(format!("expected --watch of 0.001 to 86400 seconds, found {seconds}"))
            })?;
        self.watch(pause, output)
    }

    fn watch(&self, pause: Duration, output: &mut Output<'_>) -> Done {
        let mut before: Option<(RootScan, Instant)> = None;
        let mut round = 0;
        loop {
            let (scan, now) = (inspect::scan(&self.root)?, Instant::now());
            let rates = before.as_ref().map(|(before, then)| rates(before, &scan, now - *then));
            if output.is_json() {
                let mut body = document(&scan);
                body["rates"] = rates.iter().flatten().map(rate_json).collect();
                output.document_line("stat", body);
            } else {
                say(&scan, output);
                for rate in rates.iter().flatten().filter(|rate| rate.per_second > 0.0) {
                    output.field("rate", &format!("{:<36} {:>14.1}/s", rate.name, rate.per_second));
                }
            }
            round += 1;
            if output.is_closed() || self.count.is_some_and(|count| round >= count) {
                return Ok(facts::verdict(&scan));
            }
            output.text(if output.is_json() { "" } else { "\n" });
            before = Some((scan, now));
            std::thread::sleep(pause);
        }
    }
}

/// How fast a counter grows.
struct Rate {
    name: &'static str,
    per_second: f64,
}

fn rate_json(rate: &Rate) -> Value {
    json!({"counter": rate.name, "per_second": rate.per_second})
}

fn rates(before: &RootScan, now: &RootScan, elapsed: Duration) -> Vec<Rate> {
    let rate = |(counter, &value): (&hicache_core::store::counters::Counter, &u64)| {
        let grown = value.saturating_sub(before.counters.get(counter).copied().unwrap_or_default());
        Rate { name: counter.name(), per_second: grown as f64 / elapsed.as_secs_f64().max(1e-9) }
    };
    now.counters.iter().map(rate).collect()
}

/// What is counted for the whole root.
struct Totals {
    objects: Objects,
    segments: usize,
    sealed: usize,
    file_bytes: u64,
    allocated_bytes: u64,
    alive: usize,
    dead: usize,
}

impl Totals {
    fn of(scan: &RootScan) -> Totals {
        let mut objects = Objects::default();
        scan.namespaces.iter().for_each(|namespace| objects.add(&Objects::of(namespace)));
        let segments = || scan.namespaces.iter().flat_map(|namespace| &namespace.segments);
        let alive = scan.processes.iter().filter(|process| process.is_alive).count();
        Totals {
            objects,
            segments: segments().count(),
            sealed: segments().filter(|segment| segment.is_sealed).count(),
            file_bytes: segments().fold(0, |sum, segment| sum.saturating_add(segment.file_bytes)),
            allocated_bytes: segments().fold(0, |sum, segment| sum.saturating_add(segment.allocated_bytes)),
            alive,
            dead: scan.processes.len() - alive,
        }
    }
}

fn document(scan: &RootScan) -> Value {
    let totals = Totals::of(scan);
    let description = scan.description.as_ref();
    let file_system = hicache_sys::probe::file_system(&scan.root).ok().map(|found| {
        json!({
            "kind": found.kind,
            "is_local": found.is_local,
            "total_bytes": found.total_bytes,
            "available_bytes": found.available_bytes,
            "total_inodes": found.total_inodes,
            "free_inodes": found.free_inodes,
        })
    });
    let processes: Vec<Value> = scan.processes.iter().map(|process| process_json(scan, process)).collect();
    let budget = scan.ledger.as_ref().map(|ledger| {
        json!({
            "granted_bytes": ledger.sum(),
            "nobody_bytes": ledger.nobody,
            "outstanding_bytes": outstanding(scan),
            "measured_bytes": ledger.measured_bytes,
            "measured_ns": ledger.measured_ns,
        })
    });
    json!({
        "root": scan.root.to_string_lossy(),
        "uuid": description.map(|found| found.uuid.clone()),
        "created_ns": description.map(|found| found.created_ns),
        "capacity_bytes": description.map(|found| found.capacity_bytes),
        "used_bytes": scan.used_bytes,
        "budget": budget,
        "file_system": file_system,
        "namespaces": scan.namespaces.len(),
        "processes": {"alive": totals.alive, "dead": totals.dead, "list": processes},
        "segments": {
            "count": totals.segments,
            "sealed": totals.sealed,
            "file_bytes": totals.file_bytes,
            "allocated_bytes": totals.allocated_bytes,
        },
        "objects": totals.objects.to_json(),
        "counters": facts::counters_json(scan),
        "problems": facts::problems_json(scan),
    })
}

fn say(scan: &RootScan, output: &mut Output<'_>) {
    let totals = Totals::of(scan);
    output.field("root", &scan.root.to_string_lossy());
    match &scan.description {
        Some(found) => {
            output.field("uuid", &format!("{}, made {}", found.uuid, time(found.created_ns)));
            let percent = 100.0 * scan.used_bytes as f64 / found.capacity_bytes.max(1) as f64;
            let (used, capacity) = (size(scan.used_bytes), size(found.capacity_bytes));
            output.field("used", &format!("{used} of {capacity} ({percent:.1} %)"));
        }
        None => output.field("used", &format!("{} of an unknown capacity", size(scan.used_bytes))),
    }
    if let Some(ledger) = &scan.ledger {
        let (granted, nobody) = (size(ledger.sum()), size(ledger.nobody));
        let not_written = size(outstanding(scan));
        output.field(
            "granted",
            &format!("{granted}, {not_written} of it not written yet, {nobody} to nobody alive"),
        );
    }
    if let Ok(found) = hicache_sys::probe::file_system(&scan.root) {
        let shared = if found.is_local { "" } else { ", shared by hosts: not usable for a store" };
        let (free, all) = (size(found.available_bytes), size(found.total_bytes));
        output.field("file system", &format!("{}, {free} of {all} free{shared}", found.kind));
    }
    if let Some((least, most, count)) = floors(scan) {
        let kept = if least == most { size(least) } else { format!("{} to {}", size(least), size(most)) };
        let alive = totals.alive;
        output
            .field("floor", &format!("{kept} of free space left to others, as {count} of {alive} alive say"));
    }
    output.field("processes", &format!("{} alive, {} ended", totals.alive, totals.dead));
    output.field(
        "segments",
        &format!(
            "{}, {} of them sealed, {} on disk",
            totals.segments,
            totals.sealed,
            size(totals.allocated_bytes)
        ),
    );
    let objects = totals.objects;
    output.field(
        "objects",
        &format!(
            "{} live ({}), {} quarantined, {} healed, {} evicted, {} expired, {} duplicate, {} cleared",
            objects.live,
            size(objects.live_bytes),
            objects.quarantined,
            objects.healed,
            objects.evicted,
            objects.expired,
            objects.duplicate,
            objects.cleared
        ),
    );
    output.field("namespaces", &scan.namespaces.len().to_string());
    output.field("problems", &scan.problems.len().to_string());
    say_processes(scan, output);
    for (process, setup) in setups(scan) {
        for PoolPlacement { name, place, reason } in &setup.pools {
            output.field("pool", &format!("{name}: {place}, {reason} ({})", process.process));
        }
    }
    for (counter, value) in &scan.counters {
        output.field("counter", &format!("{:<36} {value:>16}", counter.name()));
    }
    facts::say_problems(scan, output);
}

/// Bytes that were granted and are not in files yet, as each process last said.
fn outstanding(scan: &RootScan) -> u64 {
    let entries = scan.ledger.iter().flat_map(|ledger| &ledger.entries);
    entries.fold(0, |sum, entry| sum.saturating_add(entry.outstanding))
}

fn process_json(scan: &RootScan, process: &ProcessScan) -> Value {
    let granted = scan.granted(process.process);
    let setup = process.setup.as_ref().filter(|_| process.is_alive);
    json!({
        "process": process.process.to_string(),
        "is_alive": process.is_alive,
        "segments": process.segments,
        "disk_bytes": process.disk_bytes,
        "journal_bytes": process.journal_bytes,
        "limit_bytes": granted.map(|entry| entry.limit),
        "outstanding_bytes": granted.map(|entry| entry.outstanding),
        "last_frame_ns": process.last_frame_ns,
        "free_space_floor_bytes": setup.and_then(|setup| setup.free_space_floor_bytes),
        "pools": setup.map(|setup| setup.pools.iter().map(pool_json).collect::<Vec<_>>()),
    })
}

fn pool_json(pool: &PoolPlacement) -> Value {
    json!({"name": pool.name, "place": pool.place, "reason": pool.reason})
}

/// What live processes said of themselves, with each of them.
fn setups(scan: &RootScan) -> impl Iterator<Item = (&ProcessScan, &Setup)> {
    let alive = scan.processes.iter().filter(|process| process.is_alive);
    alive.filter_map(|process| Some((process, process.setup.as_ref()?)))
}

/// Smallest and largest floor that live processes keep, and how many said so.
fn floors(scan: &RootScan) -> Option<(u64, u64, usize)> {
    let floors: Vec<u64> = setups(scan).filter_map(|(_, setup)| setup.free_space_floor_bytes).collect();
    Some((*floors.iter().min()?, *floors.iter().max()?, floors.len()))
}

/// A row for each process that lives or has something on disk.
fn say_processes(scan: &RootScan, output: &mut Output<'_>) {
    let mut listed: Vec<&ProcessScan> =
        scan.processes.iter().filter(|process| process.is_alive || process.disk_bytes > 0).collect();
    listed.sort_by_key(|process| (!process.is_alive, std::cmp::Reverse(process.disk_bytes)));
    let alive = listed.iter().filter(|process| process.is_alive).count();
    let more = listed.len().saturating_sub(alive + MOST_ENDED);
    listed.truncate(alive + MOST_ENDED);
    if listed.is_empty() {
        return;
    }
    let row = |process: &&ProcessScan| {
        let granted = scan.granted(process.process);
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), size);
        let last = if process.last_frame_ns == 0 { "-".to_owned() } else { time(process.last_frame_ns) };
        vec![
            process.process.to_string(),
            (if process.is_alive { "alive" } else { "ended" }).to_owned(),
            process.segments.to_string(),
            size(process.journal_bytes),
            size(process.disk_bytes),
            bytes(granted.map(|entry| entry.limit)),
            bytes(granted.map(|entry| entry.outstanding)),
            last,
        ]
    };
    let headers =
        ["process", "", "#segments", "#journals", "#on disk", "#limit", "#not written", "last word"];
    output.table(&headers, listed.iter().map(row).collect());
    if more > 0 {
        output.line(&format!("and {more} more that ended and have files"));
    }
}
