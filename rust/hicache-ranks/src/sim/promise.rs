//! Requests on the decode side with a prefill peer, on several ranks, under failures of single ranks.

use super::{Choices, Run, Violation, World};
use crate::ask::{Answer, Ask};
use crate::restore::{Fate, Found, Obligation, Phase, RestoreSession};
use crate::rules::{Rule, Rules};
use crate::vote::combine;
use std::collections::BTreeMap;

const RANKS: usize = 3;
const PAGE: u32 = 4;

/// One request on one rank, and what really happened to it there.
#[derive(Debug)]
struct Side {
    session: RestoreSession,
    /// The own load has landed, the load it follows has landed.
    landed: bool,
    followed: bool,
    loading: bool,
    fate: Option<Fate>,
    given: BTreeMap<Obligation, u32>,
}

/// The promise world.
#[derive(Debug)]
pub struct PromiseWorld {
    rules: Rules,
}

impl PromiseWorld {
    /// A world with these rules.
    pub fn new(rules: Rules) -> PromiseWorld {
        PromiseWorld { rules }
    }

    fn poll(&self, sides: &mut [Side]) -> Run {
        let fail = |error: crate::RankError| Violation::new("I22", error.to_string());
        let mut agreed: Option<Vec<i64>> = None;
        for side in sides.iter() {
            let Ask::Reduce(reduce) = side.session.poll() else { continue };
            match &mut agreed {
                None => agreed = Some(reduce.values),
                Some(values) => combine(reduce.op, values, &reduce.values).map_err(fail)?,
            }
        }
        for side in sides.iter_mut() {
            let answer = Answer::Values(agreed.clone().unwrap_or_default());
            let fate = side.session.resume(answer).map_err(fail)?;
            side.fate = (fate != Fate::Pending).then_some(fate);
        }
        Ok(())
    }

    fn request(&self, number: u64, choices: &mut Choices) -> Run {
        let fail = |error: crate::RankError| Violation::new("I21", error.to_string());
        let found = Found { device: choices.below(4), host: choices.below(3), storage: choices.below(3) };
        let pages = found.device + found.host + found.storage;
        let prompt = u64::from(pages * PAGE + choices.below(9));
        // Pages of the device part that another request is still loading.
        let follows = found.device > 0 && choices.one_in(3);
        let accepted = !choices.one_in(4);
        let mut sides = Vec::new();
        for _ in 0..RANKS {
            let mut session =
                RestoreSession::new(number, prompt, PAGE, found).map_err(fail)?.with_rules(self.rules);
            if self.rules.hold(Rule::PrefetchBeforePromise) {
                session.prefetch(accepted).map_err(fail)?;
                session.promise().map_err(fail)?;
            } else {
                session.promise().map_err(fail)?;
                session.prefetch(accepted).map_err(fail)?;
            }
            let given = BTreeMap::new();
            let (landed, followed, loading, fate) = (false, !follows, false, None);
            sides.push(Side { session, landed, followed, loading, fate, given });
        }
        let Some(promise) = sides[0].session.promised() else {
            return Err(Violation::new("I21", "no promise"));
        };
        let storage = if accepted { found.storage } else { 0 };
        // Agreed by the minimum: a shortage is a shortage everywhere. So is an eviction before the rematch.
        let read = if choices.one_in(5) { choices.below(storage + 1) } else { storage };
        let evicted = if choices.one_in(8) { choices.below(2) } else { 0 };
        // Whether something went wrong for which a request may fail.
        let mut clean = read == storage && evicted == 0;
        let covered = found.device + found.host + read - evicted.min(found.host);
        let peer_match = u64::from(choices.below(8) * PAGE);
        let Some(transfer) = sides[0].session.transfer(peer_match) else {
            return Err(Violation::new("I21", "no transfer"));
        };
        if (transfer.from, transfer.to) != (promise.from, promise.to) {
            let message = format!("tokens {} on are sent, {} on are missing", transfer.from, promise.from);
            return Err(Violation::new("I21", message));
        }
        for side in &mut sides {
            side.session.prefetched(read).map_err(fail)?;
            side.session.rematched(covered).map_err(fail)?;
            if side.session.phase() == Phase::Prefetching {
                side.session.loading(u32::from(follows)).map_err(fail)?;
                side.loading = true;
            }
        }
        for tick in 0..60 {
            for side in &mut sides {
                match choices.below(6) {
                    1 if side.loading => {
                        // Late in the run nothing fails any more, so that it ends.
                        let complete = !choices.one_in(8);
                        clean &= complete;
                        side.session.loaded(complete).map_err(fail)?;
                        (side.landed, side.loading) = (complete, false);
                    }
                    2 if !side.followed => {
                        side.followed = true;
                        side.session.followed();
                    }
                    3 => {
                        let complete = !choices.one_in(12);
                        clean &= complete;
                        side.session.transferred(complete);
                    }
                    4 if choices.one_in(24) => {
                        clean = false;
                        side.session.abort();
                    }
                    _ => {}
                }
                if tick == 50 {
                    if side.loading {
                        side.session.loaded(true).map_err(fail)?;
                        (side.landed, side.loading) = (true, false);
                    }
                    if !side.followed {
                        side.followed = true;
                        side.session.followed();
                    }
                    side.session.transferred(true);
                }
            }
            if sides.iter().any(|side| side.fate.is_none()) {
                self.poll(&mut sides)?;
            }
            let kept = u64::from(covered) * u64::from(PAGE) >= promise.from;
            for (rank, side) in sides.iter().enumerate() {
                if side.fate == Some(Fate::Commit) && !(side.landed && side.followed && kept) {
                    let message = format!("rank {rank} runs a request with tokens that are not there");
                    return Err(Violation::new("I21", message));
                }
                if side.fate != sides[0].fate {
                    let message = format!("rank {rank} says {:?}, rank 0 {:?}", side.fate, sides[0].fate);
                    return Err(Violation::new("I22", message));
                }
            }
            for side in &mut sides {
                for what in side.session.release() {
                    *side.given.entry(what).or_default() += 1;
                }
            }
        }
        if clean && sides[0].fate != Some(Fate::Commit) {
            return Err(Violation::new("I21", "a request fails although nothing went wrong"));
        }
        for (rank, side) in sides.iter().enumerate() {
            if side.fate.is_none() {
                return Err(Violation::new("I22", format!("rank {rank} never learns its fate")));
            }
            let once = |what: &Obligation| side.given.get(what) == Some(&1);
            if !side.session.obligations().is_empty()
                || ![Obligation::Lock, Obligation::SuffixSlots].iter().all(once)
            {
                let message = format!(
                    "rank {rank} gave back {:?}, still holds {:?}",
                    side.given,
                    side.session.obligations()
                );
                return Err(Violation::new("I16", message));
            }
        }
        Ok(())
    }
}

impl World for PromiseWorld {
    fn name(&self) -> String {
        "promises".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        (0..3).try_for_each(|number| self.request(number, choices))
    }
}
