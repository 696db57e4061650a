//! Asks of threads, carried out over the simulated network.

use super::engine::Engine;
use super::engine_net::{FIBERS, Posted, SCHEDULER, fiber};
use super::{Choices, Violation};
use crate::ask::{Answer, Ask, Reduce};

impl Engine {
    pub(super) fn ask(
        &mut self,
        rank: usize,
        thread: usize,
        ask: Ask,
        choices: &mut Choices,
    ) -> Result<Option<Answer>, Violation> {
        match ask {
            Ask::Reduce(ref reduce) => {
                if let Some(answer) = self.reduce(rank, thread, reduce)? {
                    return Ok(Some(answer));
                }
            }
            Ask::Start(ref reduce) => {
                if let Some(answer) = self.reduce(rank, thread, reduce)? {
                    self.collected[rank] = Some(answer);
                }
                return Ok(Some(Answer::Done));
            }
            Ask::Collect { .. } => {
                if let Some(answer) = self.collected[rank].take() {
                    return Ok(Some(answer));
                }
            }
            Ask::Send { values, .. } if self.net.can_send(rank) => {
                self.deliver(rank, values, choices);
                return Ok(Some(Answer::Done));
            }
            Ask::Send { .. } => {}
            Ask::Receive { .. } => {
                if let Some(from) = self.paths[rank].0
                    && let Some(values) = self.net.receive(from)
                {
                    self.sender_goes_on(from, choices);
                    return Ok(Some(Answer::Values(values)));
                }
            }
            Ask::Wait { log, .. } => {
                if self.ranks[rank].logs[log].front_ready() {
                    return Ok(Some(Answer::Done));
                }
            }
        }
        self.ranks[rank].block(thread, ask);
        self.runnable &= !(1 << fiber(rank, thread));
        Ok(None)
    }

    pub(super) fn is_lost(&mut self) -> bool {
        self.sent += 1;
        let lost = self.drop == Some(self.sent);
        self.struck |= lost;
        self.lost |= lost;
        lost
    }

    pub(super) fn deliver(&mut self, rank: usize, values: Vec<i64>, choices: &mut Choices) {
        if self.is_lost() {
            return;
        }
        let twice = self.config.faults.duplicate && choices.one_in(8);
        let receives = |to: &usize| matches!(self.ranks[*to].blocked(SCHEDULER), Some(Ask::Receive { .. }));
        let Some(to) = self.paths[rank].1.filter(receives) else {
            return self.net.send(rank, values, twice);
        };
        if !twice && self.net.is_quiet(rank) {
            return self.answer(to, SCHEDULER, Answer::Values(values));
        }
        self.net.send(rank, values, twice);
        if let Some(values) = self.net.receive(rank) {
            self.answer(to, SCHEDULER, Answer::Values(values));
        }
    }

    pub(super) fn sender_goes_on(&mut self, from: usize, choices: &mut Choices) {
        if !self.net.can_send(from) || self.ranks[from].is_over() {
            return;
        }
        if let Some(Ask::Send { values, .. }) = self.ranks[from].blocked_mut(SCHEDULER) {
            let values = std::mem::take(values);
            self.answer(from, SCHEDULER, Answer::Done);
            self.deliver(from, values, choices);
        }
    }

    pub(super) fn reduce(
        &mut self,
        rank: usize,
        thread: usize,
        reduce: &Reduce,
    ) -> Result<Option<Answer>, Violation> {
        let lost = self.is_lost();
        let Posted::Complete(arrived) = self.net.post(rank, thread, reduce, lost)? else { return Ok(None) };
        let answer = self.net.result(rank, reduce);
        let mut others = arrived & !(1 << fiber(rank, thread));
        while others != 0 {
            let bit = others.trailing_zeros() as usize;
            others &= others - 1;
            let (other, thread) = (bit / FIBERS, bit % FIBERS);
            match self.ranks[other].blocked(thread) {
                Some(Ask::Reduce(_) | Ask::Collect { .. }) => {
                    self.answer(other, thread, answer.clone());
                }
                // Begun and not yet collected.
                _ => self.collected[other] = Some(answer.clone()),
            }
        }
        Ok(Some(answer))
    }
}
