//! Votes: how far a prefix is usable on every rank, and how operations ended.
//!
//! A minimum over ranks is right where every shorter prefix of a usable one is usable too. Trailing state (a
//! window, a recurrent checkpoint) is usable at certain lengths only, and the minimum of the longest ones may
//! be a length that nobody has. Then the sets of legal lengths are intersected, over pools and ranks, and the
//! longest common one is the hit.
//!
//! The length of a vector follows from the request and the list of pools, never from what is present here.

use crate::ack::{Outcome, Ticket};
use crate::ask::{Answer, Ask, Lane, Operation, Proof, Reduce, ReduceOp};
use crate::digest;
use crate::error::{RankError, RankErrorKind, Result};
use crate::rules::{Rule, Rules};
use crate::topology::Scope;

/// The element-wise minimum of vectors of equal length.
///
/// # Errors
///
/// `shape` where lengths differ.
pub fn minima(into: &mut [i64], other: &[i64]) -> Result<()> {
    combine(ReduceOp::Min, into, other)
}

/// What a transport does with two vectors of a reduction.
///
/// # Errors
///
/// `shape` where lengths differ.
pub fn combine(op: ReduceOp, into: &mut [i64], other: &[i64]) -> Result<()> {
    if into.len() != other.len() {
        let message = format!("vectors of {} and of {} words are reduced", into.len(), other.len());
        return Err(RankError::new(RankErrorKind::Shape, message));
    }
    for (word, &other) in into.iter_mut().zip(other) {
        *word = match op {
            ReduceOp::Min => (*word).min(other),
            ReduceOp::And => *word & other,
        };
    }
    Ok(())
}

/// A set of legal prefix lengths, in pages. Length 0 is always legal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths {
    span: u32,
    words: Vec<i64>,
}

impl Lengths {
    /// Only length 0, for a request of `span` pages.
    pub fn none(span: u32) -> Lengths {
        let mut lengths = Lengths { span, words: vec![0; Lengths::words_for(span)] };
        lengths.insert(0);
        lengths
    }

    /// Every length up to `pages`: the pool needs all pages of a prefix and has that many leading ones.
    pub fn up_to(span: u32, pages: u32) -> Lengths {
        let mut lengths = Lengths::none(span);
        (1..=pages.min(span)).for_each(|length| lengths.insert(length));
        lengths
    }

    /// Exactly these lengths, and 0: the pool needs the state that ends there.
    pub fn exactly(span: u32, legal: impl IntoIterator<Item = u32>) -> Lengths {
        let mut lengths = Lengths::none(span);
        legal.into_iter().filter(|&length| length <= span).for_each(|length| lengths.insert(length));
        lengths
    }

    /// Words for a span: one bit for each length 0..=span, 63 to a word, so that no word is negative.
    fn words_for(span: u32) -> usize {
        span as usize / 63 + 1
    }

    fn insert(&mut self, length: u32) {
        self.words[length as usize / 63] |= 1 << (length % 63);
    }

    /// Whether `length` pages can be used.
    pub fn contains(&self, length: u32) -> bool {
        length <= self.span && self.words[length as usize / 63] >> (length % 63) & 1 == 1
    }

    /// The longest legal length.
    pub fn longest(&self) -> u32 {
        let word = self.words.iter().rposition(|&word| word > 0).unwrap_or(0);
        (word * 63) as u32 + self.words[word].max(1).ilog2()
    }

    /// The lengths that are legal in both.
    ///
    /// # Errors
    ///
    /// `shape` where the spans differ.
    pub fn intersect(&mut self, other: &Lengths) -> Result<()> {
        combine(ReduceOp::And, &mut self.words, &other.words)
    }
}

/// What this rank has of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolVote {
    /// The pool needs every page of a prefix; so many leading pages are there.
    AllPages(u32),
    /// The pool needs what ends exactly at the length; these lengths are there.
    Ending(Lengths),
    /// This rank does not hold the pool and has nothing to say.
    NoVerdict,
}

/// The agreed answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit {
    /// Pages that every rank can use, over all pools. At most the span.
    pub pages: u32,
    /// The longest legal length of each pool alone, for the explanation of a short hit. Without a vote from any
    /// rank: the span.
    pub by_pool: Vec<u32>,
}

/// The vote of one rank on the hit of one request.
///
/// Every rank calls it for every request in the order of submission, also for one that was cancelled or whose
/// look-up failed: see [`HitVote::nothing`].
#[derive(Debug, Clone)]
pub struct HitVote {
    operation: Operation,
    span: u32,
    masks: bool,
    votes: Vec<PoolVote>,
    rules: Rules,
}

impl HitVote {
    /// The vote on request `number` of `span` pages. `masks` says whether any of the pools has trailing state;
    /// it is a fact of the deployment, equal on all ranks, like the number and order of pools.
    pub fn new(number: u64, span: u32, masks: bool, votes: Vec<PoolVote>) -> HitVote {
        let operation = Operation { name: "hit of request", number };
        HitVote { operation, span, masks, votes, rules: Rules::ALL }
    }

    /// The vote of a rank that has nothing: it cancelled, its look-up failed, it does not know the request.
    pub fn nothing(number: u64, span: u32, masks: bool, pools: usize) -> HitVote {
        HitVote::new(number, span, masks, vec![PoolVote::AllPages(0); pools])
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> HitVote {
        self.rules = rules;
        self
    }

    /// The request's number.
    pub fn number(&self) -> u64 {
        self.operation.number
    }

    /// The reduction to carry out.
    pub fn ask(&self) -> Ask {
        let op = self.op();
        let mut values = Vec::new();
        Proof::push(&mut values, op, self.tag());
        for vote in &self.votes {
            match (self.masks, vote) {
                (false, PoolVote::AllPages(pages)) => values.push(i64::from((*pages).min(self.span))),
                (false, PoolVote::Ending(lengths)) => values.push(i64::from(lengths.longest())),
                (false, PoolVote::NoVerdict) => values.push(i64::from(self.span)),
                (true, vote) => values.extend(self.mask(vote)),
            }
        }
        let (scope, lane) = (Scope::Replica, Lane::Query);
        Ask::Reduce(Reduce { scope, lane, op, operation: self.operation, values })
    }

    fn mask(&self, vote: &PoolVote) -> Vec<i64> {
        let lengths = match vote {
            PoolVote::AllPages(pages) if !self.rules.hold(Rule::MaskFromSpan) => {
                Lengths::up_to(*pages, *pages)
            }
            PoolVote::AllPages(pages) => Lengths::up_to(self.span, *pages),
            PoolVote::Ending(lengths) => lengths.clone(),
            PoolVote::NoVerdict => Lengths::up_to(self.span, self.span),
        };
        if self.rules.hold(Rule::MaskIntersection) {
            return lengths.words;
        }
        Lengths::up_to(self.span, lengths.longest()).words
    }

    /// The agreed hit.
    ///
    /// # Errors
    ///
    /// `rank_stalled` after a deadline; `rank_disagreement` where ranks voted on different requests; `shape`
    /// for an answer of another length.
    pub fn resume(&self, answer: Answer) -> Result<Hit> {
        let op = self.op();
        let width = if self.masks { Lengths::words_for(self.span) } else { 1 };
        let values = answer.values(self.operation, 2 + width * self.votes.len())?;
        if !Proof::holds(&values, op, self.tag()) {
            let message = format!("{}: ranks vote on different requests", self.operation);
            return Err(RankError::new(RankErrorKind::Disagreement, message));
        }
        let values = &values[2..];
        if !self.masks {
            let lengths = values.iter().zip(&self.votes).map(|(&agreed, vote)| match vote {
                PoolVote::AllPages(own) if !self.rules.hold(Rule::HitMinimum) => *own,
                _ => agreed.clamp(0, i64::from(self.span)) as u32,
            });
            let by_pool: Vec<u32> = lengths.collect();
            return Ok(Hit { pages: by_pool.iter().copied().min().unwrap_or(self.span), by_pool });
        }
        let mut common = Lengths::up_to(self.span, self.span);
        let mut by_pool = Vec::with_capacity(self.votes.len());
        for words in values.chunks(width) {
            let pool = Lengths { span: self.span, words: words.to_vec() };
            by_pool.push(pool.longest());
            common.intersect(&pool)?;
        }
        Ok(Hit { pages: common.longest(), by_pool })
    }

    fn op(&self) -> ReduceOp {
        if self.masks { ReduceOp::And } else { ReduceOp::Min }
    }

    fn tag(&self) -> i64 {
        let digest = digest::mix(digest::mix(0x4869_7421, self.operation.number), u64::from(self.span));
        digest::word(digest::mix(digest, self.votes.len() as u64))
    }
}

/// The vote on the outcome of a copy that can fail on one rank alone: it counts only where it succeeded on all.
///
/// Votes are cast in the order of the log, see [`AckLog::next_vote`](crate::ack::AckLog::next_vote).
#[derive(Debug, Clone, Copy)]
pub struct OutcomeVote {
    ticket: Ticket,
    outcome: Outcome,
}

impl OutcomeVote {
    /// The vote on an entry that has finished here.
    pub fn new(ticket: Ticket, outcome: Outcome) -> OutcomeVote {
        OutcomeVote { ticket, outcome }
    }

    /// The reduction to carry out.
    pub fn ask(&self) -> Ask {
        let mut values = Vec::with_capacity(3);
        Proof::push(&mut values, ReduceOp::Min, self.ticket.0 as i64);
        values.push(i64::from(self.outcome == Outcome::Done));
        let (scope, lane) = (Scope::Replica, Lane::Outcome);
        Ask::Reduce(Reduce { scope, lane, op: ReduceOp::Min, operation: self.operation(), values })
    }

    /// The agreed outcome.
    ///
    /// # Errors
    ///
    /// As [`HitVote::resume`].
    pub fn resume(&self, answer: Answer) -> Result<Outcome> {
        let values = answer.values(self.operation(), 3)?;
        if !Proof::holds(&values, ReduceOp::Min, self.ticket.0 as i64) {
            let message = format!("{}: ranks vote on different entries", self.operation());
            return Err(RankError::new(RankErrorKind::Disagreement, message));
        }
        Ok(if values[2] == 1 { Outcome::Done } else { Outcome::Failed })
    }

    fn operation(&self) -> Operation {
        Operation { name: "outcome of entry", number: self.ticket.0 }
    }
}

/// The smallest capacity of all ranks, which every rank then uses: stages with other layers would otherwise
/// evict at other times.
#[derive(Debug, Clone)]
pub struct CapacityVote {
    pages: Vec<u64>,
}

impl CapacityVote {
    /// The vote of a rank with room for `pages` pages in each of its pools.
    pub fn new(pages: Vec<u64>) -> CapacityVote {
        CapacityVote { pages }
    }

    /// The reduction to carry out, once, before the first step.
    pub fn ask(&self) -> Ask {
        let values = self.pages.iter().map(|&pages| pages.min(i64::MAX as u64) as i64).collect();
        let (scope, lane) = (Scope::Replica, Lane::Scheduler);
        Ask::Reduce(Reduce { scope, lane, op: ReduceOp::Min, operation: self.operation(), values })
    }

    /// The agreed capacities.
    ///
    /// # Errors
    ///
    /// As [`HitVote::resume`].
    pub fn resume(&self, answer: Answer) -> Result<Vec<u64>> {
        let values = answer.values(self.operation(), self.pages.len())?;
        Ok(values.into_iter().map(|pages| pages.max(0) as u64).collect())
    }

    fn operation(&self) -> Operation {
        Operation { name: "capacity of pools", number: self.pages.len() as u64 }
    }
}
