//! What the threads of a rank do in their turns.

use super::engine::Engine;
use super::engine::{IDLE, REST, Truth};
use super::engine_net::{PROGRESS, QUERY, SCHEDULER, fiber};
use super::engine_node::{NODES, node_of, pages_of};
use super::engine_rank::{Fiber, HIT, Query, REPORT, WRITE, pack};
use super::engine_tree::Action;
use super::{Choices, Run, Violation};
use crate::ack::Outcome;
use crate::ask::Answer;
use crate::pp_sync::{StepInput, SyncStep};
use crate::prefetch::Part;
use crate::rules::Rule;

impl Engine {
    pub(super) fn run_thread(&mut self, rank: usize, thread: usize, choices: &mut Choices) -> Run {
        let entry = &mut self.ranks[rank];
        if matches!(entry.fibers[thread], Fiber::Blocked | Fiber::Finished) {
            self.runnable &= !(1 << fiber(rank, thread));
            return Ok(());
        }
        entry.fibers[thread] = Fiber::Ready;
        let answer = entry.take_answer(thread);
        if thread == SCHEDULER {
            return self.run_scheduler(rank, answer, choices);
        }
        let ask = match answer {
            Some(answer) => return self.background_answer(rank, thread, answer),
            None => match thread {
                QUERY => self.ranks[rank].next_query(),
                PROGRESS => self.ranks[rank].next_report(),
                _ => self.ranks[rank].next_outcome(),
            },
        };
        match ask {
            Some(ask) => {
                if let Some(answer) = self.ask(rank, thread, ask, choices)? {
                    return self.background_answer(rank, thread, answer);
                }
            }
            None => self.runnable &= !(1 << fiber(rank, thread)),
        }
        Ok(())
    }

    pub(super) fn background_answer(&mut self, rank: usize, thread: usize, answer: Answer) -> Run {
        let entry = &mut self.ranks[rank];
        let result = match thread {
            QUERY => match entry.query_vote.take() {
                Some(vote) => match vote.resume(answer) {
                    Ok(hit) => return self.hit_agreed(rank, vote.number(), hit.pages),
                    Err(error) => Err(error),
                },
                None => Ok(()),
            },
            PROGRESS => match entry.progress_vote.take() {
                Some(vote) => vote.resume(answer).map(|report| {
                    entry.logs[REPORT].append_finished(report.operation, Outcome::Done, pack(report));
                }),
                None => Ok(()),
            },
            _ => match entry.outcome_vote.take() {
                Some((vote, ticket)) => vote
                    .resume(answer)
                    .and_then(|outcome| entry.logs[WRITE].decide(ticket, outcome))
                    .map(|_| ()),
                None => Ok(()),
            },
        };
        if let Err(error) = result {
            return self.failed(rank, error);
        }
        self.runnable |= 1 << fiber(rank, thread);
        self.wake_wait(rank);
        Ok(())
    }

    pub(super) fn hit_agreed(&mut self, rank: usize, operation: u64, pages: u32) -> Run {
        let truth = self.truth(operation);
        if pages != truth.hit {
            let message = format!("rank {rank}: hit of {pages} pages, all ranks have {}", truth.hit);
            return Err(Violation::new("I12", message));
        }
        let entry = &mut self.ranks[rank];
        if !self.config.rules.hold(Rule::OrderedPublication) {
            entry.apply_hit(operation, u64::from(pages))?;
            if !entry.reads.is_empty() {
                self.reading |= 1 << rank;
            }
        }
        self.ranks[rank].logs[HIT].append_finished(operation, Outcome::Done, u64::from(pages));
        self.runnable |= 1 << fiber(rank, QUERY);
        self.wake_wait(rank);
        Ok(())
    }

    pub(super) fn truth(&mut self, operation: u64) -> &mut Truth {
        let place = (operation >> 8) as usize;
        if self.truths.len() <= place {
            self.truths.resize(place + 1, Truth { hit: u32::MAX, completed: u32::MAX });
        }
        &mut self.truths[place]
    }

    pub(super) fn run_scheduler(
        &mut self,
        rank: usize,
        mut answer: Option<Answer>,
        choices: &mut Choices,
    ) -> Run {
        let entry = &mut self.ranks[rank];
        let digest = if self.config.proof { entry.digest } else { 0 };
        let input = StepInput { digest, expired: entry.late };
        loop {
            let entry = &mut self.ranks[rank];
            let step = match answer {
                None => entry.sync.begin(&mut entry.logs, input),
                Some(answer) => entry.sync.resume(answer, &mut entry.logs),
            };
            match step {
                Err(error) => return self.failed(rank, error),
                Ok(SyncStep::Done { expired }) => return self.after_step(rank, expired, choices),
                Ok(SyncStep::Ask(ask)) => {
                    answer = self.ask(rank, SCHEDULER, ask, choices)?;
                    if answer.is_none() {
                        return Ok(());
                    }
                }
                Ok(SyncStep::Apply { log, ack }) => {
                    let entry = &mut self.ranks[rank];
                    if let Some(done) = entry.apply(rank, log, ack)? {
                        self.check_published(rank, done.operation)?;
                    }
                    if !self.ranks[rank].reads.is_empty() {
                        self.reading |= 1 << rank;
                    }
                    answer = Some(Answer::Done);
                }
            }
        }
    }

    pub(super) fn check_published(&mut self, rank: usize, operation: u64) -> Run {
        let node = node_of(operation);
        let published = self.ranks[rank].tree.nodes[node].host_pages.list().len() as u32;
        let truth = *self.truth(operation);
        if published != truth.completed.min(truth.hit) {
            return Err(Violation::new(
                "I12",
                format!("rank {rank}: {published} pages published, all ranks have {}", truth.completed),
            ));
        }
        Ok(())
    }

    pub(super) fn after_step(&mut self, rank: usize, expired: u64, choices: &mut Choices) -> Run {
        let config = &self.config;
        let timeouts = config.faults.timeouts;
        let entry = &mut self.ranks[rank];
        let number = entry.step;
        let word = self.script.get(number as usize).map_or(0, |&word| word as usize);
        entry.tree.step = u64::from(number);
        let verdict = if config.rules.hold(Rule::AgreedTimeout) { expired } else { entry.late };
        if verdict > 0 {
            entry.tree.terminate(verdict);
            for read in &mut entry.reads {
                read.cancelled |= entry.tree.nodes[read.node].terminated;
            }
        }
        let (steps, trace) = (config.steps, config.trace);
        if let Some(request) = word.checked_sub(IDLE) {
            entry.tree.request(request % NODES, config.storage && request >= NODES)?;
            self.carry_out(rank, choices)?;
        }
        let entry = &mut self.ranks[rank];
        if timeouts && choices.one_in(16) {
            entry.late = entry.tree.sequence() + 1;
        }
        let digest = entry.tree.digest();
        entry.digest = digest;
        match self.digests.get(number as usize) {
            None => self.digests.push(digest),
            Some(&first) if first != digest && !trace => {
                return Err(Violation::new("I4", format!("rank {rank} differs after step {number}")));
            }
            Some(_) => {}
        }
        entry.step += 1;
        if entry.step >= steps {
            self.resting |= 1 << fiber(rank, SCHEDULER);
            if entry.tree.in_flight == 0 {
                entry.fibers[SCHEDULER] = Fiber::Finished;
                self.runnable &= !(1 << fiber(rank, SCHEDULER));
            } else if entry.step > steps + REST && self.struck {
                // What it waits for is lost; its own deadline for operations under way will tell.
                self.runnable &= !(1 << fiber(rank, SCHEDULER));
                self.parked |= 1 << rank;
            } else if entry.step > steps + REST {
                return Err(Violation::new("I14", format!("rank {rank} does not come to rest")));
            }
        }
        Ok(())
    }

    /// Carries out what the tree decided.
    pub(super) fn carry_out(&mut self, rank: usize, choices: &mut Choices) -> Run {
        let faults = self.config.faults;
        let mut actions = std::mem::take(&mut self.ranks[rank].tree.actions);
        for action in actions.drain(..) {
            match action {
                Action::Compute { node } => self.ranks[rank].fill(node, true, 0, pages_of(node) as usize),
                Action::Read { node } => self.ranks[rank].check_content(node, true, rank)?,
                Action::Query { node, operation } => {
                    let span = pages_of(node);
                    let local = if choices.below(3) == 0 { choices.below(span + 1) } else { span };
                    let cancelled = (faults.timeouts || faults.exceptions) && choices.one_in(8);
                    let truth = self.truth(operation);
                    truth.hit = truth.hit.min(if cancelled { 0 } else { local });
                    self.ranks[rank].queries.push_back(Query { operation, local, cancelled });
                    if self.ranks[rank].fibers[QUERY] == Fiber::Ready {
                        self.runnable |= 1 << fiber(rank, QUERY);
                    }
                }
                Action::Write { .. } | Action::Load { .. } => {
                    let may_fail = faults.failures && self.config.voted;
                    let fails = may_fail && matches!(action, Action::Write { .. }) && choices.one_in(8);
                    if let Some(copy) = self.ranks[rank].submit(rank, action, fails)? {
                        self.copies.push(copy);
                    } else {
                        self.wake_outcome(rank);
                    }
                }
            }
        }
        self.ranks[rank].tree.actions = actions;
        Ok(())
    }

    /// The reading thread of a rank tries the next part of its oldest read.
    pub(super) fn read(&mut self, rank: usize, choices: &mut Choices) -> Run {
        let faults = self.config.faults;
        let entry = &mut self.ranks[rank];
        let Some(read) = entry.reads.front_mut() else {
            self.reading &= !(1 << rank);
            return Ok(());
        };
        let (node, operation) = (read.node, read.operation);
        let raises = faults.exceptions && choices.one_in(10);
        let short = faults.failures && choices.one_in(8);
        let part = read.reading.next_part();
        let (start, end) = read.reading.next_batch();
        let hit = entry.tree.nodes[node].prefetch_hit();
        if raises && !self.config.rules.hold(Rule::DoneAlways) {
            // The thread that reads has gone, and with it the reports that others wait for.
            entry.reads.pop_front();
            return Ok(());
        }
        let failed = raises || short || read.cancelled;
        let pages = match part {
            // A backend may read ahead and say so.
            Some(Part::Progress) if !failed && faults.failures && choices.one_in(8) => end - start + 1,
            Some(Part::Progress) if !failed => end - start,
            Some(Part::SidePools) if !failed => hit,
            // One page less than everything beside.
            Some(Part::SidePools) if short => hit.saturating_sub(1),
            _ => 0,
        };
        let report = read.reading.report(pages).map_err(|error| Violation::new("I14", error.to_string()))?;
        let over = read.reading.next_part().is_none();
        entry.reports.push_back(report);
        if entry.fibers[PROGRESS] == Fiber::Ready {
            self.runnable |= 1 << fiber(rank, PROGRESS);
        }
        if over {
            entry.reads.pop_front();
        }
        match part {
            Some(Part::Progress) => {
                entry.fill(node, false, start as usize, (start + pages).min(end) as usize);
                if pages < end - start {
                    let truth = self.truth(operation);
                    truth.completed = truth.completed.min(start);
                }
            }
            Some(Part::SidePools) => {
                let truth = self.truth(operation);
                truth.completed = truth.completed.min(pages);
            }
            Some(Part::Done) | None => {}
        }
        Ok(())
    }
}
