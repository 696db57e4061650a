//! Comparison while the engine runs: rounds on a thread of its own, over groups of its own.
//!
//! A round takes two reductions for all streams together. The first tells how many records each rank has of each
//! stream; the second compares a digest over as many as all have. Where it differs, the first differing record
//! is searched by halving, and its text is exchanged, so that every rank reports the same. The engine's own
//! collectives are not touched: they may already hang.
//!
//! Every rank calls rounds equally often, also with nothing new. A rank whose records stay away while others
//! have more is named when a deadline passes; a rank that does not come to the round is named by the answer
//! [`Answer::Expired`].

use super::record::Record;
use super::wire::Writer;
use crate::ask::{Answer, Ask, Lane, Operation, Reduce, ReduceOp};
use crate::digest;
use crate::error::{RankError, Result};
use crate::rules::{Rule, Rules};
use crate::topology::{Rank, Scope, Topology};
use std::collections::VecDeque;

/// Longest text of a record that is exchanged; what is longer is cut.
const MAX_TEXT: usize = 1024;
/// Bytes of text in a word of a reduction, so that no word is negative.
const BYTES_PER_WORD: usize = 7;

/// What a round found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// As many records as all ranks have are equal.
    Equal,
    /// The first record of a stream in which ranks differ.
    Differs {
        /// The stream.
        stream: usize,
        /// Number of the record within the stream, from 0.
        index: u64,
        /// What each rank recorded there, as text, in the order of ranks.
        records: Vec<(Rank, String)>,
    },
    /// A rank that recorded nothing more while others did, until the deadline.
    Silent {
        /// The rank.
        rank: Rank,
        /// The stream.
        stream: usize,
        /// How many records it has.
        records: u64,
        /// How many others have.
        others: u64,
    },
}

/// What a round leads to.
#[derive(Debug, PartialEq, Eq)]
pub enum AuditStep {
    /// Something is needed first; go on with [`RankAudit::resume`].
    Ask(Ask),
    /// The round is over.
    Done(Verdict),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Counting,
    Comparing,
    /// Records below `low` are equal, those below `high` are not.
    Searching {
        stream: usize,
        low: u64,
        high: u64,
    },
    Measuring {
        stream: usize,
        index: u64,
    },
    Telling {
        stream: usize,
        index: u64,
        words: usize,
    },
}

/// Records of one stream that have not been compared.
#[derive(Debug, Clone, Default)]
struct Stream {
    /// Records that are known to be equal on all ranks.
    verified: u64,
    /// Digest over those.
    digest: u64,
    /// Digest over the records up to each one that is still to be compared, and the record.
    waiting: VecDeque<(u64, Record)>,
    /// What all ranks had in the last round.
    least: u64,
}

impl Stream {
    fn recorded(&self) -> u64 {
        self.verified + self.waiting.len() as u64
    }

    fn digest_through(&self, count: u64) -> u64 {
        let place = count.checked_sub(self.verified + 1);
        place.and_then(|place| self.waiting.get(place as usize)).map_or(self.digest, |(digest, _)| *digest)
    }
}

/// The checker of one rank.
#[derive(Debug)]
pub struct RankAudit {
    members: Vec<Rank>,
    place: usize,
    streams: Vec<Stream>,
    round: u64,
    state: State,
    overdue: bool,
    common: Vec<u64>,
    /// Memory in which records are written to have their digest.
    writer: Writer,
    rules: Rules,
}

impl RankAudit {
    /// The checker of `rank` for `streams` streams, one for each thread that records. The number is the same on
    /// all ranks.
    ///
    /// # Errors
    ///
    /// `config` for a rank outside of the topology or no streams.
    pub fn new(topology: &Topology, rank: Rank, streams: usize) -> Result<RankAudit> {
        if streams == 0 {
            return Err(RankError::config("an audit of 0 streams"));
        }
        let members = topology.members(rank, Scope::Replica)?;
        let place = members.iter().position(|&member| member == rank).unwrap_or(0);
        Ok(RankAudit {
            members,
            place,
            streams: vec![Stream::default(); streams],
            round: 0,
            state: State::Idle,
            overdue: false,
            common: Vec::new(),
            writer: Writer::new(),
            rules: Rules::ALL,
        })
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> RankAudit {
        self.rules = rules;
        self
    }

    /// Records something of a stream. Streams beyond the last count as the last.
    pub fn record(&mut self, stream: usize, record: Record) {
        let last = if self.rules.hold(Rule::StreamPerThread) { self.streams.len() - 1 } else { 0 };
        let stream = &mut self.streams[stream.min(last)];
        let before = stream.waiting.back().map_or(stream.digest, |(digest, _)| *digest);
        let digest = record.digest_in(self.rules, &mut self.writer);
        stream.waiting.push_back((digest::mix(before, digest), record));
    }

    /// Records that have not been compared: what a caller bounds by calling rounds.
    pub fn waiting(&self) -> usize {
        self.streams.iter().map(|stream| stream.waiting.len()).sum()
    }

    /// For each stream, how many records are known to be equal on all ranks, and how many wait to be compared. By
    /// this a caller's clock can tell that no round brought news.
    pub fn progress(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.streams.iter().map(|stream| (stream.verified, stream.waiting.len()))
    }

    /// Begins a round. `overdue` says that by this rank's clock no round brought news for longer than the deadline.
    ///
    /// # Errors
    ///
    /// `state` where a round is under way.
    pub fn begin(&mut self, overdue: bool) -> Result<AuditStep> {
        if self.state != State::Idle {
            return Err(RankError::state(format!(
                "audit round {}: begun while {:?}",
                self.round, self.state
            )));
        }
        self.round += 1;
        self.overdue = overdue;
        self.state = State::Counting;
        let mut values = vec![-i64::from(overdue)];
        // Everybody fills in its own places; the minimum leaves what each one wrote.
        values.resize(1 + self.streams.len() * self.members.len(), i64::MAX);
        for (number, stream) in self.streams.iter().enumerate() {
            values[1 + number * self.members.len() + self.place] = stream.recorded() as i64;
        }
        Ok(self.reduce(values))
    }

    /// Goes on with the answer to an [`Ask`].
    ///
    /// # Errors
    ///
    /// `rank_stalled` where a rank did not come to the round, `state` where none is under way. The next round can
    /// be begun.
    pub fn resume(&mut self, answer: Answer) -> Result<AuditStep> {
        let state = std::mem::replace(&mut self.state, State::Idle);
        match state {
            State::Idle => Err(RankError::state("audit: resumed without a round")),
            State::Counting => self.counted(answer),
            State::Comparing => self.compared(answer),
            State::Searching { stream, low, high } => self.searched(answer, stream, low, high),
            State::Measuring { stream, index } => self.measured(answer, stream, index),
            State::Telling { stream, index, words } => self.told(answer, stream, index, words),
        }
    }

    fn counted(&mut self, answer: Answer) -> Result<AuditStep> {
        let ranks = self.members.len();
        let values = answer.values(self.operation(), 1 + ranks * self.streams.len())?;
        let overdue = values[0] < 0 && self.rules.hold(Rule::SilentRankNamed);
        self.common.clear();
        let mut silent = None;
        for (number, counts) in values[1..].chunks(ranks).enumerate() {
            let least = counts.iter().copied().min().unwrap_or(0).max(0) as u64;
            let most = counts.iter().copied().max().unwrap_or(0).max(0) as u64;
            let late = counts.iter().position(|&count| count == least as i64).unwrap_or(0);
            if overdue && least < most && least == self.streams[number].least && silent.is_none() {
                let rank = self.members[late];
                silent = Some(Verdict::Silent { rank, stream: number, records: least, others: most });
            }
            self.streams[number].least = least;
            self.common.push(least);
        }
        if let Some(verdict) = silent {
            return Ok(AuditStep::Done(verdict));
        }
        let digests = self.streams.iter().zip(&self.common).map(|(stream, &n)| stream.digest_through(n));
        let values = digests.map(digest::word).flat_map(|word| [word, -word]).collect();
        self.state = State::Comparing;
        Ok(self.reduce(values))
    }

    fn compared(&mut self, answer: Answer) -> Result<AuditStep> {
        let values = answer.values(self.operation(), 2 * self.streams.len())?;
        if let Some(stream) = values.chunks(2).position(|pair| pair[0] != -pair[1]) {
            let (low, high) = (self.streams[stream].verified, self.common[stream]);
            return Ok(self.search(stream, low, high));
        }
        for (stream, &common) in self.streams.iter_mut().zip(&self.common) {
            while stream.verified < common
                && let Some((digest, _)) = stream.waiting.pop_front()
            {
                stream.digest = digest;
                stream.verified += 1;
            }
        }
        Ok(AuditStep::Done(Verdict::Equal))
    }

    fn search(&mut self, stream: usize, low: u64, high: u64) -> AuditStep {
        if high - low <= 1 || !self.rules.hold(Rule::FirstDifference) {
            self.state = State::Measuring { stream, index: low };
            let text = self.text(stream, low);
            return self.reduce(vec![-(text.len() as i64)]);
        }
        let middle = low + (high - low) / 2;
        self.state = State::Searching { stream, low, high };
        let word = digest::word(self.streams[stream].digest_through(middle));
        self.reduce(vec![word, -word])
    }

    fn searched(&mut self, answer: Answer, stream: usize, low: u64, high: u64) -> Result<AuditStep> {
        let values = answer.values(self.operation(), 2)?;
        let middle = low + (high - low) / 2;
        let (low, high) = if values[0] == -values[1] { (middle, high) } else { (low, middle) };
        Ok(self.search(stream, low, high))
    }

    fn measured(&mut self, answer: Answer, stream: usize, index: u64) -> Result<AuditStep> {
        let values = answer.values(self.operation(), 1)?;
        let words = ((-values[0]).clamp(0, MAX_TEXT as i64) as usize).div_ceil(BYTES_PER_WORD);
        self.state = State::Telling { stream, index, words };
        let mut values = vec![i64::MAX; words * self.members.len()];
        let text = self.text(stream, index);
        for (word, place) in values[self.place * words..][..words].iter_mut().zip(0..) {
            let bytes = text.iter().skip(place * BYTES_PER_WORD).take(BYTES_PER_WORD);
            *word = bytes.zip(0..).fold(0, |word, (&byte, shift)| word | i64::from(byte) << (8 * shift));
        }
        Ok(self.reduce(values))
    }

    fn told(&mut self, answer: Answer, stream: usize, index: u64, words: usize) -> Result<AuditStep> {
        let values = answer.values(self.operation(), words * self.members.len())?;
        let records = self.members.iter().zip(values.chunks(words.max(1)));
        let records = records.map(|(&rank, words)| (rank, text_of(words))).collect();
        Ok(AuditStep::Done(Verdict::Differs { stream, index, records }))
    }

    /// The text of a record, cut to what is exchanged.
    fn text(&self, stream: usize, index: u64) -> Vec<u8> {
        let stream = &self.streams[stream];
        let place = index.checked_sub(stream.verified).map(|place| place as usize);
        let record = place.and_then(|place| stream.waiting.get(place));
        let mut text = record.map_or_else(String::new, |(_, record)| record.to_string()).into_bytes();
        text.truncate(MAX_TEXT);
        text
    }

    fn operation(&self) -> Operation {
        Operation { name: "audit round", number: self.round }
    }

    fn reduce(&self, values: Vec<i64>) -> AuditStep {
        let (scope, lane, op) = (Scope::Replica, Lane::Audit, ReduceOp::Min);
        AuditStep::Ask(Ask::Reduce(Reduce { scope, lane, op, operation: self.operation(), values }))
    }
}

fn text_of(words: &[i64]) -> String {
    let bytes = words.iter().flat_map(|word| word.to_le_bytes().into_iter().take(BYTES_PER_WORD));
    let bytes: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
