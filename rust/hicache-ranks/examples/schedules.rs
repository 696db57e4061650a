//! Schedules per second of the simulated engine, and what a record of the checker costs.
//!
//! ```text
//! cargo run --release -p hicache-ranks --features simulator --example schedules -- [schedules] [first seed]
//! ```

use hicache_ranks::audit::{Kind, LogHeader, LogWriter, RankAudit, Record, Value};
use hicache_ranks::sim::{Engine, EngineConfig, Faults, explore, shrink};
use hicache_ranks::{CpKind, Rank, RankError, Topology};

/// Nanoseconds that this process has had a core for: other work on the machine does not count.
fn on_core() -> u64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn main() -> Result<(), RankError> {
    let mut arguments = std::env::args().skip(1).filter_map(|text| text.parse().ok());
    let (count, first) = (arguments.next().unwrap_or(20_000), arguments.next().unwrap_or(0));
    let plain = EngineConfig::new(Topology::new(2, 1, 1, CpKind::None)?);
    let faults = EngineConfig { faults: Faults::SURVIVABLE, voted: true, ..plain };
    let copies = EngineConfig { storage: false, ..plain };
    let worlds = [
        ("backups and loads", copies),
        ("with reads from the store", plain),
        ("everything with faults", faults),
    ];
    let mut figures = Vec::new();
    for (name, config) in worlds {
        let mut engine = Engine::new(config);
        let begin = on_core();
        if let Err(failure) = explore(&mut engine, first, count) {
            println!("{failure}\nshrunk: {}", shrink(&mut engine, &failure, 4000));
            std::process::exit(1);
        }
        let seconds = (on_core() - begin) as f64 / 1e9;
        let rate = count as f64 / seconds;
        println!(
            "{name}: {count} schedules in {seconds:.2} s of one core, {rate:.0} a second, last {} events in {:?} steps",
            engine.events(),
            engine.steps()
        );
        figures.push(format!("{name} {rate:.0}"));
    }
    println!(
        "RESULT: simulator of ranks, PP2 TP1, 60 steps, schedules/s of one core (bar 20,000 for the first): {}",
        figures.join(", ")
    );
    records(Topology::new(2, 1, 1, CpKind::None)?)
}

/// What a record of the checker costs: taken for the rounds and written to the log.
fn records(topology: Topology) -> Result<(), RankError> {
    const RECORDS: u64 = 200_000;
    let mut audit = RankAudit::new(&topology, Rank(0), 1)?;
    let mut log = LogWriter::new(LogHeader { rank: Rank(0), ranks: 2, run: 1 });
    let begin = on_core();
    let mut bytes = 0;
    for step in 0..RECORDS {
        let fields = vec![Value::Int(step as i64), Value::Digest(step), Value::Text("request-17".to_owned())];
        let record = Record { step, kind: Kind::Called, name: "match_prefix".to_owned(), fields };
        log.append("scheduler", &record);
        audit.record(0, record);
        bytes += log.take().len();
    }
    let each = (on_core() - begin) as f64 / RECORDS as f64;
    let bytes = bytes as u64 / RECORDS;
    println!("RESULT: audit in Rust, taken and logged: {each:.0} ns (bar 3000) and {bytes} bytes a record");
    Ok(())
}
