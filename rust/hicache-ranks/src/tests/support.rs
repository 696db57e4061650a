//! Driving machines by hand: a transport that does what a test says.

use crate::ack::{Ack, AckLog};
use crate::ask::{Answer, Ask, Reduce};
use crate::error::Result;
use crate::pp_sync::{Mode, PpSync, StepInput, SyncStep};
use crate::sim::{Engine, EngineConfig, Faults, World, explore};
use crate::topology::{CpKind, Rank, Topology};
use crate::vote::combine;

/// A topology with pages dealt out where there are several context parallel ranks.
pub fn topology(pp: u32, cp: u32, tp: u32) -> Topology {
    let kind = if cp > 1 { CpKind::Page } else { CpKind::None };
    Topology::new(pp, cp, tp, kind).expect("small sizes")
}

/// What all ranks put into a reduction, combined.
pub fn reduce_all(asks: &[Ask]) -> Result<Vec<i64>> {
    let reduces: Vec<&Reduce> = asks
        .iter()
        .map(|ask| match ask {
            Ask::Reduce(reduce) => reduce,
            other => panic!("{other:?} is no reduction"),
        })
        .collect();
    let mut values = reduces[0].values.clone();
    for reduce in &reduces[1..] {
        assert_eq!(reduce.op, reduces[0].op);
        combine(reduce.op, &mut values, &reduce.values)?;
    }
    Ok(values)
}

/// One scheduler thread with its logs and what it consumed.
pub struct Stage {
    pub sync: PpSync,
    pub logs: Vec<AckLog>,
    pub consumed: Vec<(usize, Ack)>,
    /// What it waits for.
    pub waits: Option<Ask>,
    pub steps: u32,
}

impl Stage {
    pub fn new(topology: &Topology, rank: u32, logs: Vec<AckLog>, mode: Mode) -> Stage {
        let sync = PpSync::new(topology, Rank(rank), logs.len(), mode).expect("a rank of the topology");
        Stage { sync, logs, consumed: Vec::new(), waits: None, steps: 0 }
    }

    /// Begins a step and goes as far as it can; messages that it sends are returned.
    pub fn begin(&mut self) -> Vec<Vec<i64>> {
        let step = self.sync.begin(&mut self.logs, StepInput::default());
        self.drive(step)
    }

    /// Goes on with an answer.
    pub fn answer(&mut self, answer: Answer) -> Vec<Vec<i64>> {
        self.waits = None;
        let step = self.sync.resume(answer, &mut self.logs);
        self.drive(step)
    }

    fn drive(&mut self, mut step: Result<SyncStep>) -> Vec<Vec<i64>> {
        let mut sent = Vec::new();
        loop {
            step = match step.expect("no error") {
                SyncStep::Done { .. } => {
                    self.steps += 1;
                    return sent;
                }
                SyncStep::Apply { log, ack } => {
                    self.consumed.push((log, ack));
                    self.sync.next(&mut self.logs)
                }
                SyncStep::Ask(Ask::Send { values, .. }) => {
                    sent.push(values);
                    self.sync.resume(Answer::Done, &mut self.logs)
                }
                SyncStep::Ask(ask) => {
                    self.waits = Some(ask);
                    return sent;
                }
            };
        }
    }

    /// Operations consumed so far.
    pub fn operations(&self) -> Vec<u64> {
        self.consumed.iter().map(|(_, ack)| ack.operation).collect()
    }
}

/// Schedules of an engine, or the failure as text.
pub fn walk(config: EngineConfig, count: u64) {
    let mut engine = Engine::new(config);
    if let Err(failure) = explore(&mut engine, 0, count) {
        panic!("{failure}");
    }
    assert!(!engine.name().is_empty());
}

/// An engine under everything that it must survive.
pub fn faulty(pp: u32, cp: u32, tp: u32) -> EngineConfig {
    let plain = EngineConfig::new(topology(pp, cp, tp));
    EngineConfig { faults: Faults::SURVIVABLE, steps: 40, voted: true, ..plain }
}
