//! `ranks diff`: where the logs of the consensus checker part.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use hicache_ranks::audit::{AuditLog, Difference, Record, Value as Field, first_difference};
use serde_json::{Value, json};

use crate::failure::{Done, Failure};
use crate::output::Output;
use crate::{FINE, PROBLEMS};

/// Largest log that is read, in bytes.
const MAX_LOG_BYTES: u64 = 4 << 30;

/// Looks at what the ranks of one engine recorded.
#[derive(Args)]
pub struct Ranks {
    #[command(subcommand)]
    command: RanksCommand,
}

#[derive(Subcommand)]
enum RanksCommand {
    Diff(Diff),
}

impl Ranks {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        match &self.command {
            RanksCommand::Diff(command) => command.run(output),
        }
    }
}

/// Finds the first record in which the logs of the ranks differ, and shows it with what stands around it.
#[derive(Args)]
struct Diff {
    /// Logs of the consensus checker, one of each rank
    #[arg(required = true, num_args = 2.., value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// Records before and behind the difference that are shown
    #[arg(long, default_value_t = 5)]
    context: usize,
}

impl Diff {
    fn run(&self, output: &mut Output<'_>) -> Done {
        let mut logs = self.logs.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
        logs.sort_by_key(|log| log.header.rank);
        let found = first_difference(&logs, self.context).map_err(|error| Failure::new(error.to_string()))?;
        let code = if found.is_some() { PROBLEMS } else { FINE };
        if output.is_json() {
            output.document("ranks diff", document(&logs, found.as_ref()));
            return Ok(code);
        }
        match &found {
            Some(found) => found.to_string().lines().for_each(|line| output.line(line)),
            None => {
                let records: usize = logs[0].streams.values().map(Vec::len).sum();
                output.line(&format!("{} ranks agree in all {records} records", logs.len()));
            }
        }
        for log in &logs {
            if let Some(reason) = &log.cut {
                output.line(&format!("the log of {} ends early: {reason}", log.header.rank));
            }
        }
        let of = logs[0].header.ranks;
        if logs.len() < of as usize {
            output.line(&format!("{} of {of} ranks were compared", logs.len()));
        }
        Ok(code)
    }
}

fn read(path: &Path) -> Result<AuditLog, Failure> {
    let unreadable = |error: std::io::Error| Failure::io("cannot read", path, &error);
    let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    if bytes > MAX_LOG_BYTES {
        return Err(Failure::new(format!("{}: {bytes} bytes are too many for a log", path.display())));
    }
    let bytes = std::fs::read(path).map_err(unreadable)?;
    AuditLog::decode(&bytes).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

fn document(logs: &[AuditLog], found: Option<&Difference>) -> Value {
    let ranks: Vec<Value> = logs
        .iter()
        .map(|log| {
            json!({
                "rank": log.header.rank.0,
                "records": log.streams.values().map(Vec::len).sum::<usize>(),
                "cut": log.cut,
            })
        })
        .collect();
    let difference = found.map(|found| {
        let sides: Vec<Value> = found
            .records
            .iter()
            .zip(&found.after)
            .map(|((rank, record), (_, after))| {
                json!({
                    "rank": rank.0,
                    "record": record.as_ref().map(record_json),
                    "after": after.iter().map(record_json).collect::<Vec<_>>(),
                })
            })
            .collect();
        json!({
            "stream": found.stream,
            "index": found.index,
            "silent": found.silent().map(|rank| rank.0),
            "before": found.before.iter().map(record_json).collect::<Vec<_>>(),
            "sides": sides,
        })
    });
    json!({
        "run": format!("{:016x}", logs[0].header.run),
        "ranks": logs[0].header.ranks,
        "logs": ranks,
        "is_equal": found.is_none(),
        "difference": difference,
    })
}

fn record_json(record: &Record) -> Value {
    json!({
        "step": record.step,
        "kind": record.kind.name(),
        "name": record.name,
        "fields": record.fields.iter().map(field_json).collect::<Vec<_>>(),
    })
}

fn field_json(field: &Field) -> Value {
    match field {
        Field::Absent => Value::Null,
        Field::Bool(value) => json!(value),
        Field::Int(value) => json!(value),
        Field::Digest(value) => json!({ "digest": format!("{value:016x}") }),
        Field::Text(value) => json!(value),
        Field::List(values) => values.iter().map(field_json).collect(),
    }
}
