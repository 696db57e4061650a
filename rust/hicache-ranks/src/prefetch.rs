//! A read from the store, from the agreed hit to publication.
//!
//! Three threads of a rank take part: one looks up and votes on the hit, one reads, one agrees on progress. What
//! a rank reports is a fixed sequence of parts that follows from the agreed hit alone, so that all ranks
//! reduce equally often whatever happened to their reads:
//!
//! ```text
//! progress (one for each batch of pages)   side pools   done
//! ```
//!
//! The completed length is the minimum over the rank's pools, then over ranks. It never shrinks and never
//! exceeds the hit. On done, `[0, completed)` is published and the tail is freed, once.

use crate::ask::{Answer, Ask, Lane, Operation, Proof, Reduce, ReduceOp};
use crate::digest;
use crate::error::{RankError, RankErrorKind, Result};
use crate::rules::{Rule, Rules};
use crate::topology::Scope;

/// A part of what is reported of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// A batch of KV pages has been tried.
    Progress,
    /// The side pools have been tried.
    SidePools,
    /// Nothing more will come.
    Done,
}

/// What one rank reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The operation, by its number in the order of submission.
    pub operation: u64,
    /// Which report of the operation this is, from 0.
    pub index: u32,
    /// Which part it closes.
    pub part: Part,
    /// Leading pages that are complete: KV pages in progress, side pools in their part, both in done.
    pub completed: u32,
}

/// The reading side of an operation on one rank.
///
/// [`Reading::report`] is called after every batch, after the side pools and at the end, also where a read
/// failed, raised or was cancelled.
#[derive(Debug, Clone)]
pub struct Reading {
    operation: u64,
    hit: u32,
    batch: u32,
    side_pools: bool,
    index: u32,
    kv: u32,
    /// Once a page is missing, later ones do not count.
    broken: bool,
    side: u32,
    rules: Rules,
}

impl Reading {
    /// A read of `hit` pages in batches of `batch`; all three facts are agreed.
    ///
    /// # Errors
    ///
    /// `config` for batches of no pages.
    pub fn new(operation: u64, hit: u32, batch: u32, side_pools: bool) -> Result<Reading> {
        if batch == 0 {
            return Err(RankError::config("a read in batches of 0 pages"));
        }
        let (index, kv, broken, side, rules) = (0, 0, false, hit, Rules::ALL);
        Ok(Reading { operation, hit, batch, side_pools, index, kv, broken, side, rules })
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> Reading {
        self.rules = rules;
        self
    }

    /// The part that is to be tried next; `None` after the last.
    pub fn next_part(&self) -> Option<Part> {
        let batches = self.hit.div_ceil(self.batch);
        if self.index < batches {
            Some(Part::Progress)
        } else if self.index == batches && self.side_pools {
            Some(Part::SidePools)
        } else if self.index == batches + u32::from(self.side_pools) {
            Some(Part::Done)
        } else {
            None
        }
    }

    /// Pages of the next batch, half open.
    pub fn next_batch(&self) -> (u32, u32) {
        let start = (self.index * self.batch).min(self.hit);
        (start, (start + self.batch).min(self.hit))
    }

    /// Notes how the next part went: leading pages of the batch that were read, or leading pages of the prefix
    /// that all side pools have. A failure, an exception and a cancelled operation are 0.
    ///
    /// # Errors
    ///
    /// `state` after the last part.
    pub fn report(&mut self, pages: u32) -> Result<Report> {
        let part = self.next_part().ok_or_else(|| {
            RankError::state(format!("operation {}: a report after the last part", self.operation))
        })?;
        match part {
            Part::Progress => {
                let (start, end) = self.next_batch();
                if !self.broken {
                    // What was read beyond the batch was not agreed on.
                    let bounded = self.rules.hold(Rule::CompletedWithinHit);
                    self.kv += if bounded { pages.min(end - start) } else { pages };
                }
                self.broken |= pages < end - start;
            }
            Part::SidePools if self.rules.hold(Rule::SidecarsClamp) => self.side = pages,
            Part::SidePools | Part::Done => {}
        }
        let completed = match part {
            Part::Progress => self.kv,
            Part::SidePools => self.side,
            Part::Done => self.kv.min(self.side),
        };
        let report = Report { operation: self.operation, index: self.index, part, completed };
        self.index += 1;
        Ok(report)
    }
}

/// The vote on one report.
#[derive(Debug, Clone, Copy)]
pub struct ProgressVote {
    report: Report,
    rules: Rules,
}

impl ProgressVote {
    /// The vote of a rank with this report.
    pub fn new(report: Report) -> ProgressVote {
        ProgressVote { report, rules: Rules::ALL }
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> ProgressVote {
        self.rules = rules;
        self
    }

    /// The reduction to carry out.
    pub fn ask(&self) -> Ask {
        let mut values = Vec::with_capacity(3);
        Proof::push(&mut values, ReduceOp::Min, self.tag());
        values.push(i64::from(self.report.completed));
        let (scope, lane) = (Scope::Replica, Lane::Progress);
        Ask::Reduce(Reduce { scope, lane, op: ReduceOp::Min, operation: self.operation(), values })
    }

    /// The agreed report.
    ///
    /// # Errors
    ///
    /// `rank_stalled` after a deadline; `rank_disagreement` where ranks report different operations or parts.
    pub fn resume(&self, answer: Answer) -> Result<Report> {
        let values = answer.values(self.operation(), 3)?;
        if !Proof::holds(&values, ReduceOp::Min, self.tag()) {
            let message = format!("{}: ranks report different parts", self.operation());
            return Err(RankError::new(RankErrorKind::Disagreement, message));
        }
        if !self.rules.hold(Rule::CompletedMinimum) {
            return Ok(self.report);
        }
        Ok(Report { completed: values[2].max(0) as u32, ..self.report })
    }

    fn operation(&self) -> Operation {
        Operation { name: "progress of operation", number: self.report.operation }
    }

    fn tag(&self) -> i64 {
        let place = u64::from(self.report.index) << 2 | self.report.part as u64;
        digest::word(digest::mix(digest::mix(0x5072_6f67, self.report.operation), place))
    }
}

/// What is to be done with the pages of an operation that is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Publication {
    /// Pages `[0, publish)` become visible.
    pub publish: u32,
    /// Pages `[publish, free_to)` go back to the free list.
    pub free_to: u32,
}

/// The scheduler's side of an operation: agreed reports in, one publication out.
#[derive(Debug, Clone)]
pub struct Prefetch {
    operation: u64,
    span: u32,
    hit: u32,
    completed: u32,
    /// What side pools leave of it.
    usable: u32,
    done: bool,
    rules: Rules,
}

impl Prefetch {
    /// An operation of `span` requested pages of which `hit` were agreed on; the hit is cut to the span.
    pub fn new(operation: u64, span: u32, hit: u32) -> Prefetch {
        let hit = hit.min(span);
        Prefetch { operation, span, hit, completed: 0, usable: hit, done: false, rules: Rules::ALL }
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> Prefetch {
        self.rules = rules;
        self
    }

    /// The operation's number.
    pub fn operation(&self) -> u64 {
        self.operation
    }

    /// Pages asked for.
    pub fn span(&self) -> u32 {
        self.span
    }

    /// Agreed pages, for which host pages are taken.
    pub fn hit(&self) -> u32 {
        self.hit
    }

    /// Pages that are complete on all ranks so far.
    pub fn completed(&self) -> u32 {
        self.completed
    }

    /// Takes an agreed report, as consumed through pp_sync; with the last comes what to do with the pages.
    ///
    /// # Errors
    ///
    /// `ack_order` for a report of another operation or after done.
    pub fn consume(&mut self, report: Report) -> Result<Option<Publication>> {
        if report.operation != self.operation || self.done {
            return Err(RankError::new(
                RankErrorKind::AckOrder,
                format!(
                    "operation {}{} was given a report of operation {}",
                    self.operation,
                    if self.done { ", which is done," } else { "" },
                    report.operation
                ),
            ));
        }
        let bounded = self.rules.hold(Rule::CompletedWithinHit);
        let reported = if bounded { report.completed.min(self.hit) } else { report.completed };
        match report.part {
            Part::Progress if bounded => self.completed = self.completed.max(reported),
            Part::Progress => self.completed = reported,
            Part::SidePools => self.usable = self.usable.min(reported),
            Part::Done => {}
        }
        if report.part != Part::Done {
            return Ok(None);
        }
        self.done = true;
        let publish = self.completed.min(self.usable);
        let free_to = if self.rules.hold(Rule::TailFreed) { self.hit } else { publish };
        Ok(Some(Publication { publish, free_to }))
    }
}
