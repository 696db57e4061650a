//! Batches that load cached prefixes into scratch, with loads that come out otherwise than expected.

use super::{Choices, Run, Violation, World};
use crate::placement::Placement;
use crate::rules::{Rule, Rules};
use crate::scratch::{Room, ScratchBudget, ScratchSize};

/// The scratch world.
#[derive(Debug)]
pub struct ScratchWorld {
    rules: Rules,
}

impl ScratchWorld {
    /// A world with these rules.
    pub fn new(rules: Rules) -> ScratchWorld {
        ScratchWorld { rules }
    }
}

impl World for ScratchWorld {
    fn name(&self) -> String {
        "scratch".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        let fail = |error: crate::RankError| Violation::new("I7", error.to_string());
        let owners = 2 + choices.below(3);
        let placement = Placement::new(owners, 4).map_err(fail)?;
        let context = u64::from(8 + choices.below(60));
        let size = ScratchSize::new(placement, 2, context, 32).map_err(fail)?;
        let longest = context as u32 / 4;
        let mut budget = ScratchBudget::new(size).with_rules(self.rules);
        for _ in 0..4 {
            budget.clear();
            // Pages and new tokens of the requests that were admitted.
            let mut admitted: Vec<(u32, u64)> = Vec::new();
            for _ in 0..6 {
                let (expected, extend) = (choices.below(longest + 1), u64::from(1 + choices.below(12)));
                let mark = budget.mark();
                let mut loads = Vec::new();
                if !self.rules.hold(Rule::ReserveBeforeLoad) {
                    loads.push(expected);
                }
                if budget.reserve(expected, extend).map_err(fail)? == Room::Full {
                    if !loads.is_empty() {
                        return Err(Violation::new("I7", "a load without a reservation"));
                    }
                    continue;
                }
                // The load says how much there is; the reservation follows.
                let found = if choices.one_in(3) { choices.below(longest + 1) } else { expected };
                if found != expected {
                    budget.rollback(mark);
                    if budget.reserve(found, extend).map_err(fail)? == Room::Full {
                        continue;
                    }
                }
                admitted.push((found, extend));
            }
            let prefix: u64 = admitted.iter().map(|&(pages, _)| size.padded(pages)).sum();
            let chunk: u64 = admitted.iter().map(|&(_, extend)| extend.next_multiple_of(4)).sum();
            if prefix > size.prefix_tokens() || chunk > size.chunk_tokens() {
                let message = format!("a batch needs {prefix} and {chunk} tokens of scratch");
                return Err(Violation::new("I7", message));
            }
            if budget.used() != (prefix, chunk) {
                let message = format!("{:?} reserved for a batch of {prefix} and {chunk}", budget.used());
                return Err(Violation::new("I7", message));
            }
        }
        Ok(())
    }
}
