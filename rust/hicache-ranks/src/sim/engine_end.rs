//! How a run ends: failures, deadlines, and what must hold then.

use super::engine::Engine;
use super::engine_net::{FIBERS, OUTCOME, PROGRESS, QUERY};
use super::engine_rank::{Fiber, HIT, LOAD, REPORT, SimRank, WRITE};
use super::{Run, Violation};
use crate::ack::AckLog;
use crate::ask::{Answer, Ask, Lane};
use crate::error::{RankError, RankErrorKind};
use crate::rules::Rule;
use crate::topology::{Rank, Scope};
use crate::watch::{Beat, Watch};

impl Engine {
    pub(super) fn failed(&mut self, rank: usize, error: RankError) -> Run {
        if !self.struck {
            let invariant = match error.kind() {
                RankErrorKind::AckOrder => "I9",
                RankErrorKind::Disagreement => "I4",
                _ => "I10",
            };
            return Err(Violation::new(invariant, format!("rank {rank}: {error}")));
        }
        self.ranks[rank].error = Some(error);
        self.stop(rank);
        Ok(())
    }

    /// Nothing of a rank runs any more.
    pub(super) fn stop(&mut self, rank: usize) {
        self.runnable &= !(0xf << (rank * FIBERS));
        self.reading &= !(1 << rank);
        self.copies.retain(|copy| usize::from(copy.rank) != rank);
    }

    /// Whom a blocked thread misses.
    pub(super) fn missing(&self, rank: usize, ask: &Ask) -> Vec<usize> {
        match ask {
            Ask::Reduce(reduce) | Ask::Start(reduce) => self.net.missing(rank, reduce.scope, reduce.lane),
            Ask::Collect { lane, .. } => self.net.missing(rank, Scope::Stage, *lane),
            Ask::Send { .. } => self.paths[rank].1.into_iter().collect(),
            Ask::Receive { .. } => self.paths[rank].0.into_iter().collect(),
            // The log is filled by a thread of this rank, which may itself wait.
            Ask::Wait { log, .. } => {
                let thread = match *log {
                    WRITE | LOAD => OUTCOME,
                    HIT => QUERY,
                    _ => PROGRESS,
                };
                match self.ranks[rank].blocked(thread) {
                    Some(ask) => self.missing(rank, ask),
                    None => {
                        let lane = match thread {
                            OUTCOME => Lane::Outcome,
                            QUERY => Lane::Query,
                            _ => Lane::Progress,
                        };
                        self.net.missing(rank, Scope::Replica, lane)
                    }
                }
            }
        }
    }

    /// Every deadline passes: nothing can happen any more.
    pub(super) fn expire(&mut self) -> Run {
        let mut watch = Watch::new();
        for (number, rank) in self.ranks.iter().enumerate() {
            if rank.crashed || rank.error.is_some() {
                watch.silence(Rank(number as u32));
                continue;
            }
            let mut missing = Vec::new();
            for thread in 0..FIBERS {
                if let Some(ask) = rank.blocked(thread) {
                    missing.extend(self.missing(number, ask).iter().map(|&rank| Rank(rank as u32)));
                }
            }
            missing.retain(|&other| other != Rank(number as u32));
            watch.beat(Rank(number as u32), Beat { progress: u64::from(rank.step), missing });
        }
        let mut woken = false;
        for rank in 0..self.ranks.len() {
            for thread in 0..FIBERS {
                let Some(ask) = self.ranks[rank].blocked(thread) else { continue };
                if self.ranks[rank].is_over() {
                    continue;
                }
                if !self.config.rules.hold(Rule::DeadlineEnds) {
                    let operation = ask.operation();
                    return Err(Violation::new("I25", format!("rank {rank} waits for ever: {operation}")));
                }
                let missing: Vec<Rank> =
                    self.missing(rank, ask).into_iter().map(|rank| Rank(rank as u32)).collect();
                let culprit = watch.culprit(&missing).unwrap_or(Rank(rank as u32));
                self.answer(rank, thread, Answer::Expired { culprit });
                woken = true;
                break;
            }
        }
        let everybody: Vec<Rank> = (0..self.ranks.len() as u32).map(Rank).collect();
        for rank in 0..self.ranks.len() {
            let waits = self.ranks[rank].fibers.iter().any(|&state| state != Fiber::Ready);
            if self.parked >> rank & 1 == 1 && !waits && !self.ranks[rank].is_over() {
                let culprit = watch.culprit(&everybody).unwrap_or(Rank(rank as u32));
                self.failed(rank, RankError::stalled("operations under way", culprit))?;
                woken = true;
            }
        }
        if !woken {
            return Err(Violation::new("I25", "a survivor neither works nor waits"));
        }
        Ok(())
    }

    pub(super) fn check_deadlock(&self) -> Run {
        if self.struck {
            return Ok(());
        }
        let waits = self.ranks.iter().enumerate().flat_map(|(rank, entry)| {
            (0..FIBERS)
                .filter_map(|thread| entry.blocked(thread))
                .map(move |ask| format!("rank {rank}: {}", ask.operation()))
        });
        let waits: Vec<String> = waits.collect();
        Err(Violation::new("I10", format!("deadlock: {}", waits.join(", "))))
    }

    pub(super) fn check_end(&mut self) -> Run {
        let crashed = self.ranks.iter().position(|rank| rank.crashed);
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            if rank.crashed {
                continue;
            }
            if let Some(error) = &rank.error {
                let named = error.rank();
                if crashed.is_some() && !self.lost && named != crashed.map(|rank| Rank(rank as u32)) {
                    let message = format!("rank {number} blames {named:?}, {crashed:?} died: {error}");
                    return Err(Violation::new("I25", message));
                }
                rank.tree.abandon()?;
            } else if let Some(log) = rank.logs.iter().find(|log| !log.is_empty()) {
                let message = format!("rank {number}: {} entries of {} are left", log.len(), log.name());
                return Err(Violation::new("I14", message));
            }
            rank.tree.check_conservation(true)?;
        }
        if !self.struck {
            for log in [WRITE, LOAD, HIT, REPORT] {
                let digest = |rank: &SimRank| (rank.logs[log].digest(), rank.logs[log].appended());
                if self.ranks.iter().any(|rank| digest(rank) != digest(&self.ranks[0])) {
                    let name = AckLog::name(&self.ranks[0].logs[log]);
                    return Err(Violation::new("I8", format!("ranks appended differently to {name}")));
                }
            }
        }
        Ok(())
    }
}
