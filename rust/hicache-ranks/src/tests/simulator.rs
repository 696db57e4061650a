//! The simulator itself: it repeats, it shrinks, and it misses every rule that is taken away.

use super::support::{faulty, topology};
use crate::rules::{Rule, Rules};
use crate::sim::{
    Choices, Engine, EngineConfig, Faults, MixedWorld, World, explore, mutation_gate, replay, shrink,
    worlds_against,
};

/// Schedules in the long walk: `HICACHE_RANKS_SCHEDULES`, otherwise what a test run has time for.
fn schedules() -> u64 {
    std::env::var("HICACHE_RANKS_SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000)
}

#[test]
fn i24_the_same_choices_give_the_same_run() {
    let mut engine = Engine::new(EngineConfig { trace: true, ..faulty(2, 2, 1) });
    for seed in 0..20 {
        let mut choices = Choices::from_seed(seed);
        engine.run(&mut choices).expect("no fault is fatal");
        let (first, steps) = (engine.traces(), engine.steps());
        replay(&mut engine, choices.taken()).expect("the same");
        assert_eq!((engine.traces(), engine.steps()), (first, steps));
        assert!(engine.events() > 0);
    }
}

#[test]
fn i24_a_schedule_runs_in_a_used_world_as_in_a_new_one() {
    let faults = Faults { crash: true, drop: true, ..Faults::SURVIVABLE };
    for (pp, cp, tp) in [(2, 1, 1), (2, 1, 2)] {
        let config = EngineConfig { trace: true, faults, ..faulty(pp, cp, tp) };
        let run = |engine: &mut Engine, seed| {
            let end = engine.run(&mut Choices::from_seed(seed));
            (end, engine.traces(), engine.steps(), engine.events(), engine.errors())
        };
        let mut used = Engine::new(config);
        for seed in 0..20 {
            assert_eq!(run(&mut used, seed), run(&mut Engine::new(config), seed), "seed {seed}");
        }
    }
}

#[test]
fn mixed_worlds_and_faults_hold_every_invariant() {
    let mut world = MixedWorld::new(30);
    if let Err(failure) = explore(&mut world, 0, schedules()) {
        panic!("{failure}\nshrunk: {}", shrink(&mut world, &failure, 2000));
    }
}

#[test]
fn every_rule_is_missed_within_2000_schedules() {
    for result in mutation_gate(2000) {
        let rule = result.rule;
        let (schedules, failure) = result.caught.unwrap_or_else(|| panic!("{rule:?} can be lost unseen"));
        assert!(schedules <= 2000 && !failure.choices.is_empty(), "{rule:?}");
    }
}

#[test]
fn with_all_rules_the_worlds_of_the_gate_hold() {
    for rule in Rule::ALL {
        for mut world in worlds_against(rule, Rules::ALL) {
            explore(world.as_mut(), 0, 25).unwrap_or_else(|failure| panic!("{rule:?}: {failure}"));
        }
    }
}

#[test]
fn a_failing_schedule_is_printed_replayed_and_shrunk() {
    let rules = Rules::without(Rule::PinUntilAck);
    let mut world = Engine::new(EngineConfig { rules, ..EngineConfig::new(topology(2, 1, 1)) });
    let failure = explore(&mut world, 0, 2000).expect_err("the rule is missing");
    assert!(failure.to_string().contains("seed"), "{failure}");
    let again = replay(&mut world, &failure.choices).expect_err("it fails again");
    assert_eq!(again, failure.violation);
    let small = shrink(&mut world, &failure, 3000);
    assert!(
        small.choices.len() < failure.choices.len() / 2,
        "{} of {}",
        small.choices.len(),
        failure.choices.len()
    );
    assert_eq!(
        replay(&mut world, &small.choices).expect_err("it still fails").invariant,
        failure.violation.invariant
    );
}
