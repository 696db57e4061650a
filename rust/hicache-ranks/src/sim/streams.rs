//! Load, gather and compute streams of several ranks, in any order that the edges allow.

use super::{Choices, Run, Violation, World};
use crate::layer_gate::{Edge, LayerGate, Tenant};
use crate::rules::Rules;
use std::collections::{BTreeSet, VecDeque};

const RANKS: usize = 2;
const LAYERS: u32 = 5;
const PASSES: u64 = 2;

/// What a stream does next.
#[derive(Debug, Clone)]
struct Work {
    tenant: Tenant,
    slot: usize,
    waits: Vec<Edge>,
}

#[derive(Debug, Default)]
struct Streams {
    load: VecDeque<Tenant>,
    gather: VecDeque<Work>,
    compute: VecDeque<Work>,
    /// A read that has begun.
    reading: Option<(Tenant, usize)>,
    events: BTreeSet<Edge>,
    loaded: BTreeSet<Tenant>,
    /// What lies in the slots; `None` where some rank's part was not there.
    slots: [Option<Tenant>; 2],
}

/// The stream world.
#[derive(Debug)]
pub struct StreamWorld {
    rules: Rules,
}

impl StreamWorld {
    /// A world with these rules.
    pub fn new(rules: Rules) -> StreamWorld {
        StreamWorld { rules }
    }

    fn issue(&self) -> Result<Streams, Violation> {
        let fail = |error: crate::RankError| Violation::new("I6", error.to_string());
        let mut gate = LayerGate::new(LAYERS).map_err(fail)?.with_rules(self.rules);
        let mut streams = Streams::default();
        let mut slots = Vec::new();
        let all: Vec<Tenant> =
            (0..PASSES).flat_map(|epoch| (0..LAYERS).map(move |layer| Tenant { epoch, layer })).collect();
        streams.load.extend(all.iter().copied());
        let mut gather = |streams: &mut Streams, gate: &mut LayerGate| {
            let gather = gate.gather();
            slots.push(gather.slot);
            streams.gather.push_back(Work { tenant: gather.tenant, slot: gather.slot, waits: gather.waits });
            slots.len()
        };
        gather(&mut streams, &mut gate);
        let mut pending = Vec::new();
        for &tenant in &all {
            pending.push((tenant, gate.read(tenant).map_err(fail)?));
            // The next layer is assembled while this one is read.
            if tenant != all[all.len() - 1] {
                gather(&mut streams, &mut gate);
            }
        }
        for ((tenant, waits), slot) in pending.into_iter().zip(slots) {
            streams.compute.push_back(Work { tenant, slot, waits });
        }
        Ok(streams)
    }
}

impl World for StreamWorld {
    fn name(&self) -> String {
        "streams".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        let mut ranks: Vec<Streams> = Vec::new();
        for _ in 0..RANKS {
            ranks.push(self.issue()?);
        }
        loop {
            let ready = |streams: &Streams, work: Option<&Work>| {
                work.is_some_and(|work| work.waits.iter().all(|edge| streams.events.contains(edge)))
            };
            let mut possible = Vec::new();
            // A gather is a collective: it runs when every rank's stream has come to it.
            if ranks.iter().all(|streams| ready(streams, streams.gather.front())) {
                possible.push((0, 'g'));
            }
            for (rank, streams) in ranks.iter().enumerate() {
                if !streams.load.is_empty() {
                    possible.push((rank, 'l'));
                }
                if streams.reading.is_some() {
                    possible.push((rank, 'e'));
                } else if ready(streams, streams.compute.front()) {
                    possible.push((rank, 'r'));
                }
            }
            if possible.is_empty() {
                break;
            }
            let (rank, what) = possible[choices.below(possible.len() as u32) as usize];
            match what {
                'g' => {
                    let complete = |streams: &Streams| {
                        streams.gather.front().is_some_and(|work| streams.loaded.contains(&work.tenant))
                    };
                    let complete = ranks.iter().all(complete);
                    for streams in &mut ranks {
                        if let Some(work) = streams.gather.pop_front() {
                            streams.slots[work.slot] = complete.then_some(work.tenant);
                            streams.events.insert(Edge::Gathered(work.tenant));
                        }
                    }
                }
                'l' => {
                    if let Some(tenant) = ranks[rank].load.pop_front() {
                        ranks[rank].loaded.insert(tenant);
                        ranks[rank].events.insert(Edge::Loaded(tenant));
                    }
                }
                'r' => {
                    if let Some(work) = ranks[rank].compute.pop_front() {
                        ranks[rank].reading = Some((work.tenant, work.slot));
                        check(&ranks[rank], work.tenant, work.slot, "begins")?;
                    }
                }
                _ => {
                    if let Some((tenant, slot)) = ranks[rank].reading.take() {
                        check(&ranks[rank], tenant, slot, "ends")?;
                        ranks[rank].events.insert(Edge::ReadEnded(tenant));
                    }
                }
            }
        }
        match ranks.iter().position(|streams| !streams.compute.is_empty()) {
            Some(rank) => Err(Violation::new("I5", format!("the streams of rank {rank} wait for ever"))),
            None => Ok(()),
        }
    }
}

fn check(streams: &Streams, tenant: Tenant, slot: usize, when: &str) -> Run {
    if streams.slots[slot] == Some(tenant) {
        return Ok(());
    }
    let found = streams.slots[slot];
    Err(Violation::new("I6", format!("a read of {tenant:?} {when} with {found:?} in slot {slot}")))
}
