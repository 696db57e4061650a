//! The first difference between the logs of all ranks.

use super::log::AuditLog;
use super::record::Record;
use crate::error::{RankError, Result};
use crate::topology::Rank;
use std::collections::BTreeSet;
use std::fmt;

/// Where logs part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The stream.
    pub stream: String,
    /// Number of the first differing record within the stream, from 0.
    pub index: usize,
    /// What each rank recorded there; `None` where its stream ends before.
    pub records: Vec<(Rank, Option<Record>)>,
    /// Records before it that all ranks share, oldest first.
    pub before: Vec<Record>,
    /// Records of each rank behind it.
    pub after: Vec<(Rank, Vec<Record>)>,
}

impl Difference {
    /// The rank whose records end here while others go on, where there is one.
    pub fn silent(&self) -> Option<Rank> {
        self.records.iter().find(|(_, record)| record.is_none()).map(|(rank, _)| *rank)
    }

    fn step(&self) -> u64 {
        self.records.iter().flat_map(|(_, record)| record).map(|record| record.step).min().unwrap_or(0)
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "stream {}: ranks differ from record {} on", self.stream, self.index)?;
        let first = self.index - self.before.len();
        for (place, record) in self.before.iter().enumerate() {
            writeln!(f, "  all ranks  {:>6}  {record}", first + place)?;
        }
        for (rank, record) in &self.records {
            let text = record.as_ref().map_or_else(|| "nothing more".to_owned(), Record::to_string);
            let name = rank.to_string();
            writeln!(f, "> {name:<9}  {:>6}  {text}", self.index)?;
            for (_, records) in self.after.iter().filter(|(other, _)| other == rank) {
                for (place, record) in records.iter().enumerate() {
                    writeln!(f, "  {name:<9}  {:>6}  {record}", self.index + 1 + place)?;
                }
            }
        }
        Ok(())
    }
}

/// The first record in which the logs differ, with up to `context` records before and behind it; `None` where
/// all agree. Of several streams that differ, the one whose difference has the lowest step, then in order of
/// their names.
///
/// # Errors
///
/// `config` for fewer than two logs, logs of different runs, or two of one rank.
pub fn first_difference(logs: &[AuditLog], context: usize) -> Result<Option<Difference>> {
    let ranks: BTreeSet<Rank> = logs.iter().map(|log| log.header.rank).collect();
    if logs.len() < 2 || ranks.len() < logs.len() {
        return Err(RankError::config(format!("{} logs of {} ranks", logs.len(), ranks.len())));
    }
    let first = logs[0].header;
    if let Some(other) = logs.iter().map(|log| log.header).find(|header| header.run != first.run) {
        let message =
            format!("{} is of run {:x}, {} of run {:x}", first.rank, first.run, other.rank, other.run);
        return Err(RankError::config(message));
    }
    let streams: BTreeSet<&String> = logs.iter().flat_map(|log| log.streams.keys()).collect();
    let differences = streams.into_iter().filter_map(|stream| in_stream(logs, stream, context));
    Ok(differences.min_by_key(Difference::step))
}

fn in_stream(logs: &[AuditLog], stream: &str, context: usize) -> Option<Difference> {
    let records: Vec<&[Record]> =
        logs.iter().map(|log| log.streams.get(stream).map_or(&[][..], Vec::as_slice)).collect();
    let longest = records.iter().map(|records| records.len()).max()?;
    let index = (0..longest).find(|&at| records.iter().any(|list| list.get(at) != records[0].get(at)))?;
    let rank = |place: usize| logs[place].header.rank;
    let at = |list: &&[Record]| list.get(index).cloned();
    let behind = |list: &&[Record]| list.iter().skip(index + 1).take(context).cloned().collect();
    Some(Difference {
        stream: stream.to_owned(),
        index,
        records: records.iter().enumerate().map(|(place, list)| (rank(place), at(list))).collect(),
        before: records[0][index.saturating_sub(context)..index].to_vec(),
        after: records.iter().enumerate().map(|(place, list)| (rank(place), behind(list))).collect(),
    })
}
