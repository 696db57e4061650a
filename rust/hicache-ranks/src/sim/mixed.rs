//! All worlds and topologies in turn: what the long walks go through.

use super::{
    AuditWorld, Choices, Engine, EngineConfig, Faults, OwnershipWorld, PromiseWorld, Run, ScratchWorld,
    StreamWorld, VoteWorld, World, WriterWorld,
};
use crate::pp_sync::Mode;
use crate::rules::Rules;
use crate::topology::{CpKind, Topology};

/// Sizes of the axes pp, cp, tp that the engine is run with.
pub const SHAPES: [(u32, u32, u32); 9] =
    [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (4, 1, 1), (3, 1, 2)];

/// A world that each schedule chooses anew.
pub struct MixedWorld {
    engines: Vec<Engine>,
    others: Vec<Box<dyn World>>,
}

impl MixedWorld {
    /// All worlds with engines of `steps` steps.
    pub fn new(steps: u32) -> MixedWorld {
        let survivable = Faults::SURVIVABLE;
        let faults = [
            Faults::default(),
            survivable,
            Faults { crash: true, ..survivable },
            Faults { drop: true, ..survivable },
        ];
        let mut engines = Vec::new();
        for (pp, cp, tp) in SHAPES {
            let kind = if cp > 1 { CpKind::Page } else { CpKind::None };
            let topology = Topology::new(pp, cp, tp, kind).expect("small sizes and a kind");
            for mode in [Mode::Now, Mode::Lagged] {
                for (voted, faults) in faults.into_iter().enumerate() {
                    let voted = voted % 2 == 1 || mode == Mode::Lagged;
                    let plain = EngineConfig::new(topology);
                    engines.push(Engine::new(EngineConfig { steps, mode, faults, voted, ..plain }));
                }
            }
        }
        let rules = Rules::ALL;
        let others: Vec<Box<dyn World>> = vec![
            Box::new(OwnershipWorld::new(rules)),
            Box::new(StreamWorld::new(rules)),
            Box::new(PromiseWorld::new(rules)),
            Box::new(ScratchWorld::new(rules)),
            Box::new(VoteWorld::new(rules)),
            Box::new(AuditWorld::new(rules)),
            Box::new(WriterWorld::new(rules)),
        ];
        MixedWorld { engines, others }
    }
}

impl World for MixedWorld {
    fn name(&self) -> String {
        "mixed".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        // One schedule in eight is none of an engine.
        if choices.one_in(8) {
            let world = choices.below(self.others.len() as u32) as usize;
            return self.others[world].run(choices);
        }
        let engine = choices.below(self.engines.len() as u32) as usize;
        self.engines[engine].run(choices).map_err(|mut violation| {
            violation.message = format!("{}: {}", self.engines[engine].name(), violation.message);
            violation
        })
    }
}
