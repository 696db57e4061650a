//! The mutation gate: for each rule, schedules without it must go wrong.

use super::{
    AuditWorld, Engine, EngineConfig, Failure, Faults, OwnershipWorld, PromiseWorld, ScratchWorld,
    StreamWorld, VoteWorld, World, WriterWorld, explore,
};
use crate::pp_sync::Mode;
use crate::rules::{Rule, Rules};
use crate::topology::{CpKind, Topology};

/// What the gate found for one rule.
#[derive(Debug)]
pub struct GateResult {
    /// The rule that was taken away.
    pub rule: Rule,
    /// How many schedules it took, and the one that failed; `None` where none did.
    pub caught: Option<(u64, Box<Failure>)>,
}

/// An engine under everything that it must survive.
fn engine(pp: u32, cp: u32, tp: u32, change: impl Fn(&mut EngineConfig), rules: Rules) -> Box<dyn World> {
    let kind = if cp > 1 { CpKind::Page } else { CpKind::None };
    // Sizes are given in this file and fit.
    let topology = Topology::new(pp, cp, tp, kind).expect("small sizes and a kind");
    let mut config = EngineConfig { faults: Faults::SURVIVABLE, rules, ..EngineConfig::new(topology) };
    change(&mut config);
    Box::new(Engine::new(config))
}

/// The worlds in which the absence of a rule must show, the most telling one first.
pub fn worlds_against(rule: Rule, rules: Rules) -> Vec<Box<dyn World>> {
    let plain = |_: &mut EngineConfig| {};
    let voted = |config: &mut EngineConfig| config.voted = true;
    let lagged = |config: &mut EngineConfig| config.mode = Mode::Lagged;
    // Long enough that small pools fill and pages are wanted again while they are copied.
    let busy = |config: &mut EngineConfig| (config.storage, config.steps) = (false, 200);
    let fatal = |config: &mut EngineConfig| config.faults.crash = true;
    match rule {
        Rule::BackupKeepsOwner
        | Rule::RestoreKeepsOwner
        | Rule::BranchInheritsBase
        | Rule::SpliceDeclined
        | Rule::AllOrNothing
        | Rule::OwnShareOnly
        | Rule::SharedPagesOnce => vec![Box::new(OwnershipWorld::new(rules))],
        Rule::OneWriterPerRectangle => vec![Box::new(WriterWorld::new(rules))],
        Rule::MaskIntersection | Rule::MaskFromSpan => vec![Box::new(VoteWorld::new(rules))],
        Rule::HitMinimum => vec![Box::new(VoteWorld::new(rules)), engine(2, 1, 1, plain, rules)],
        Rule::StageMinimum => vec![engine(2, 1, 2, plain, rules)],
        Rule::EmptyShareAcks => vec![engine(1, 2, 1, plain, rules), engine(2, 2, 1, plain, rules)],
        Rule::FailureAcks | Rule::OutcomeVote => vec![engine(2, 1, 1, voted, rules)],
        Rule::PinUntilAck => vec![engine(2, 1, 1, busy, rules), engine(2, 1, 2, plain, rules)],
        Rule::LaggedForAll => vec![engine(2, 1, 1, lagged, rules)],
        Rule::DeadlineEnds => vec![engine(2, 1, 1, fatal, rules)],
        Rule::LoadBeforeGather | Rule::GatherBeforeRead | Rule::SlotReuseWaits | Rule::TwoSlots => {
            vec![Box::new(StreamWorld::new(rules))]
        }
        Rule::ReserveBeforeLoad | Rule::RollbackOnChange | Rule::PaddedPrefix => {
            vec![Box::new(ScratchWorld::new(rules))]
        }
        Rule::PrefetchBeforePromise
        | Rule::PromiseKept
        | Rule::JointReady
        | Rule::JointFailure
        | Rule::LocksReleased
        | Rule::FollowerWaits
        | Rule::SuffixBehindPromise => vec![Box::new(PromiseWorld::new(rules))],
        Rule::FramedFields | Rule::StreamPerThread | Rule::FirstDifference | Rule::SilentRankNamed => {
            vec![Box::new(AuditWorld::new(rules))]
        }
        Rule::OrderedFreePages
        | Rule::ChainedCounts
        | Rule::UnconditionalStep
        | Rule::LeadingRun
        | Rule::WaitForLocal
        | Rule::DuplicateIgnored
        | Rule::MessageHeader
        | Rule::SeparateLanes
        | Rule::AgreedCapacity
        | Rule::CompletedMinimum
        | Rule::CompletedWithinHit
        | Rule::SidecarsClamp
        | Rule::DoneAlways
        | Rule::OrderedPublication
        | Rule::CancelledTakesPart
        | Rule::AgreedTimeout
        | Rule::TailFreed => vec![engine(2, 1, 1, plain, rules), engine(2, 1, 2, plain, rules)],
    }
}

/// Takes each rule away in turn and runs up to `limit` schedules against it, counted over its worlds.
pub fn mutation_gate(limit: u64) -> Vec<GateResult> {
    let attempt = |rule: Rule| {
        let worlds = worlds_against(rule, Rules::without(rule));
        let share = limit / worlds.len() as u64;
        let mut caught = None;
        for (place, mut world) in worlds.into_iter().enumerate() {
            if let Err(failure) = explore(world.as_mut(), 0, share) {
                caught = Some((place as u64 * share + failure.seed + 1, failure));
                break;
            }
        }
        GateResult { rule, caught }
    };
    Rule::ALL.into_iter().map(attempt).collect()
}
