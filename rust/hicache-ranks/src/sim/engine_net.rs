//! The network between simulated ranks: reductions by group, and messages from stage to stage.

use super::Violation;
use crate::ask::{Answer, Lane, Operation, Reduce, ReduceOp};
use crate::topology::Scope;
use crate::vote::combine;
use std::collections::VecDeque;

/// Threads of a rank that ask for something.
pub(super) const FIBERS: usize = 4;
pub(super) const SCHEDULER: usize = 0;
pub(super) const QUERY: usize = 1;
pub(super) const PROGRESS: usize = 2;
pub(super) const OUTCOME: usize = 3;

/// A thread of a rank, as a bit of a set.
pub(super) fn fiber(rank: usize, thread: usize) -> usize {
    rank * FIBERS + thread
}

/// One group on one lane.
#[derive(Debug, Default)]
struct Group {
    arrived: u64,
    count: u32,
    op: Option<(ReduceOp, Operation)>,
    values: Vec<i64>,
}

/// What became of a post.
pub(super) enum Posted {
    /// Others are still to come.
    Waiting,
    /// All have come; these threads have the answer.
    Complete(u64),
}

#[derive(Debug)]
pub(super) struct Net {
    pp: usize,
    stage_size: u32,
    one_lane: bool,
    groups: Vec<Group>,
    /// From each rank to the next stage: message, and whether it is a second copy.
    channels: Vec<VecDeque<(Vec<i64>, bool)>>,
}

impl Net {
    pub fn new(pp: usize, stage_size: usize, one_lane: bool) -> Net {
        Net {
            pp,
            stage_size: stage_size as u32,
            one_lane,
            groups: (0..(pp + 1) * Lane::ALL.len()).map(|_| Group::default()).collect(),
            channels: (0..pp * stage_size).map(|_| VecDeque::with_capacity(2)).collect(),
        }
    }

    /// Nothing has been posted or sent.
    pub fn clear(&mut self) {
        for group in &mut self.groups {
            (group.arrived, group.count, group.op) = (0, 0, None);
            group.values.clear();
        }
        self.channels.iter_mut().for_each(VecDeque::clear);
    }

    fn group(&self, rank: usize, scope: Scope, lane: Lane) -> (usize, u32) {
        let lane = match lane {
            Lane::Query | Lane::Progress | Lane::Outcome if self.one_lane => Lane::Query,
            lane => lane,
        };
        let place = Lane::ALL.iter().position(|&other| other == lane).unwrap_or(0) * (self.pp + 1);
        match scope {
            Scope::Stage => (place + 1 + rank / self.stage_size as usize, self.stage_size),
            Scope::Replica => (place, self.stage_size * self.pp as u32),
        }
    }

    /// Puts a rank's vector in; `lost` where it never arrives.
    pub fn post(
        &mut self,
        rank: usize,
        thread: usize,
        reduce: &Reduce,
        lost: bool,
    ) -> Result<Posted, Violation> {
        let (number, size) = self.group(rank, reduce.scope, reduce.lane);
        let group = &mut self.groups[number];
        if lost {
            return Ok(Posted::Waiting);
        }
        match group.op {
            None => {
                group.op = Some((reduce.op, reduce.operation));
                group.values.clear();
                group.values.extend_from_slice(&reduce.values);
            }
            Some((op, operation)) => {
                let different = op != reduce.op || operation.name != reduce.operation.name;
                if different || combine(op, &mut group.values, &reduce.values).is_err() {
                    let message = format!("{operation} meets {}: the transport aborts", reduce.operation);
                    return Err(Violation::new("I10", message));
                }
            }
        }
        group.arrived |= 1 << fiber(rank, thread);
        group.count += 1;
        if group.count < size {
            return Ok(Posted::Waiting);
        }
        let arrived = std::mem::take(&mut group.arrived);
        (group.count, group.op) = (0, None);
        Ok(Posted::Complete(arrived))
    }

    /// The answer of the reduction that a thread of `rank` has just completed.
    pub fn result(&self, rank: usize, reduce: &Reduce) -> Answer {
        let (number, _) = self.group(rank, reduce.scope, reduce.lane);
        Answer::Values(self.groups[number].values.clone())
    }

    /// Ranks that a group still misses.
    pub fn missing(&self, rank: usize, scope: Scope, lane: Lane) -> Vec<usize> {
        let (number, _) = self.group(rank, scope, lane);
        let stage = self.stage_size as usize;
        let members = match scope {
            Scope::Stage => rank / stage * stage..(rank / stage + 1) * stage,
            Scope::Replica => 0..stage * self.pp,
        };
        let here = |rank: usize| {
            (0..FIBERS).any(|thread| self.groups[number].arrived >> fiber(rank, thread) & 1 == 1)
        };
        members.filter(|&rank| !here(rank)).collect()
    }

    /// Whether a message to the next stage may be sent: one may be on its way.
    pub fn can_send(&self, rank: usize) -> bool {
        self.channels[rank].iter().all(|(_, copy)| *copy)
    }

    pub fn send(&mut self, rank: usize, message: Vec<i64>, twice: bool) {
        if twice {
            self.channels[rank].push_back((message.clone(), false));
            self.channels[rank].push_back((message, true));
        } else {
            self.channels[rank].push_back((message, false));
        }
    }

    /// Whether nothing is on its way to the next stage, not even a second copy.
    pub fn is_quiet(&self, rank: usize) -> bool {
        self.channels[rank].is_empty()
    }

    pub fn receive(&mut self, from: usize) -> Option<Vec<i64>> {
        self.channels[from].pop_front().map(|(message, _)| message)
    }
}
