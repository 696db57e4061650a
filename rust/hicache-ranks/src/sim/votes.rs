//! Votes on hits over random holdings, against the intersection by brute force.

use super::{Choices, Run, Violation, World};
use crate::ask::{Answer, Ask};
use crate::rules::Rules;
use crate::vote::{HitVote, Lengths, PoolVote, combine};

/// The vote world.
#[derive(Debug)]
pub struct VoteWorld {
    rules: Rules,
}

impl VoteWorld {
    /// A world with these rules.
    pub fn new(rules: Rules) -> VoteWorld {
        VoteWorld { rules }
    }
}

impl World for VoteWorld {
    fn name(&self) -> String {
        "votes".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        let (ranks, masks) = (2 + choices.below(3), choices.one_in(2));
        let span = choices.below(140);
        let pools = 1 + choices.below(3);
        let mut legal = vec![true; span as usize + 1];
        let mut votes = Vec::new();
        for _ in 0..ranks {
            let mut own = Vec::new();
            for pool in 0..pools {
                // The first pool is KV; the others end at certain lengths where there are such pools.
                own.push(if pool > 0 && choices.one_in(8) {
                    PoolVote::NoVerdict
                } else if pool == 0 || !masks {
                    let pages = if choices.one_in(2) { span } else { choices.below(span + 1) };
                    legal.iter_mut().skip(pages as usize + 1).for_each(|legal| *legal = false);
                    PoolVote::AllPages(pages)
                } else {
                    let there: Vec<bool> =
                        (0..=span).map(|length| length == 0 || choices.one_in(2)).collect();
                    legal.iter_mut().zip(&there).for_each(|(legal, there)| *legal &= there);
                    let lengths = (0..=span).filter(|&length| there[length as usize]);
                    PoolVote::Ending(Lengths::exactly(span, lengths))
                });
            }
            votes.push(HitVote::new(7, span, masks, own).with_rules(self.rules));
        }
        let expected = legal.iter().rposition(|&legal| legal).unwrap_or(0) as u32;
        let mut agreed: Option<Vec<i64>> = None;
        for vote in &votes {
            let Ask::Reduce(reduce) = vote.ask() else { continue };
            match &mut agreed {
                None => agreed = Some(reduce.values),
                Some(values) => combine(reduce.op, values, &reduce.values)
                    .map_err(|error| Violation::new("I10", error.to_string()))?,
            }
        }
        for vote in &votes {
            let answer = Answer::Values(agreed.clone().unwrap_or_default());
            let hit = vote.resume(answer).map_err(|error| Violation::new("I10", error.to_string()))?;
            if hit.pages != expected {
                let message = format!("a hit of {} pages, all pools of all ranks have {expected}", hit.pages);
                return Err(Violation::new("I13", message));
            }
        }
        Ok(())
    }
}
