//! Ordered acknowledgements and pp_sync: I8 to I11, I14, I25 and the example of the specification.

use super::support::{Stage, faulty, topology, walk};
use crate::ack::{AckLog, Feed, Finish, Outcome, Ticket, Voting};
use crate::ask::{Answer, Ask};
use crate::audit::{Kind, Record};
use crate::error::RankErrorKind;
use crate::pp_sync::{Mode, PpSync, StepInput, SyncStep};
use crate::rules::{Rule, Rules};
use crate::sim::{Engine, EngineConfig, Faults, SHAPES, World, explore};
use crate::topology::Rank;
use crate::watch::{Beat, Watch};

fn log() -> AckLog {
    AckLog::new("backup", Feed::Scheduler, Voting::Local)
}

#[test]
fn i08_every_operation_leaves_an_entry_also_empty_and_failed_ones() {
    let mut log = log();
    let first = log.append(10);
    assert_eq!(log.append_finished(11, Outcome::Done, 0), Some(Ticket(1)));
    assert_eq!(log.append_finished(12, Outcome::Failed, 0), Some(Ticket(2)));
    // Nothing overtakes the first one.
    assert_eq!((log.ready(), log.front_ready(), log.len()), (0, false, 3));
    assert_eq!(log.pop().expect_err("unfinished").kind(), RankErrorKind::AckOrder);
    assert_eq!(log.finish(first, Outcome::Done).expect("known"), Finish::Noted);
    assert_eq!(log.finish(first, Outcome::Failed).expect("known"), Finish::Duplicate);
    assert_eq!(log.ready_through(), Ticket(3));
    let popped: Vec<_> = (0..3).map(|_| log.pop().expect("ready")).collect();
    assert_eq!(popped.iter().map(|ack| ack.operation).collect::<Vec<_>>(), [10, 11, 12]);
    assert_eq!(popped[2].outcome, Outcome::Failed);
    assert_eq!(log.finish(first, Outcome::Done).expect("late"), Finish::Duplicate);
    assert_eq!(log.finish(Ticket(3), Outcome::Done).expect_err("unknown").kind(), RankErrorKind::AckOrder);
    assert!(log.is_empty() && log.pop().is_err());
    for (pp, cp, tp) in SHAPES {
        walk(faulty(pp, cp, tp), 30);
    }
}

#[test]
fn i09_stages_consume_equal_counts_and_never_before_the_local_transfer() {
    let topology = topology(2, 1, 1);
    let logs = || {
        let mut log = log();
        for operation in [1, 2, 3] {
            log.append(operation);
        }
        vec![log]
    };
    let (mut first, mut second) =
        (Stage::new(&topology, 0, logs(), Mode::Now), Stage::new(&topology, 1, logs(), Mode::Now));
    // Stage 0 has finished 1 and 3: only 1 is a leading run. Stage 1 has finished nothing.
    first.logs[0].finish(Ticket(0), Outcome::Done).expect("known");
    first.logs[0].finish(Ticket(2), Outcome::Done).expect("known");
    let sent = first.begin();
    assert_eq!(first.operations(), [1]);
    second.begin();
    second.answer(Answer::Values(sent[0].clone()));
    assert!(matches!(second.waits, Some(Ask::Wait { log: 0, .. })), "it waits for its own transfer");
    assert_eq!(second.operations(), [0; 0]);
    second.logs[0].finish(Ticket(0), Outcome::Done).expect("known");
    second.answer(Answer::Done);
    assert_eq!((second.operations(), second.steps), (vec![1], 1));
}

#[test]
fn i09_a_count_beyond_what_was_submitted_is_an_error_not_a_wait() {
    let topology = topology(2, 1, 1);
    let mut full = log();
    full.append_finished(1, Outcome::Done, 0);
    let sent = Stage::new(&topology, 0, vec![full], Mode::Now).begin();
    let mut sync = PpSync::new(&topology, Rank(1), 1, Mode::Now).expect("a rank");
    let mut logs = vec![log()];
    sync.begin(&mut logs, StepInput::default()).expect("a step");
    let error = sync.resume(Answer::Values(sent[0].clone()), &mut logs).expect_err("never submitted here");
    assert_eq!(error.kind(), RankErrorKind::AckOrder);
    assert_eq!(sync.begin(&mut logs, StepInput::default()).expect_err("failed").kind(), RankErrorKind::State);
}

#[test]
fn i10_a_step_without_entries_asks_for_as_much_as_any_other() {
    let topology = topology(2, 1, 2);
    let mut shapes = Vec::new();
    for entries in [0, 3] {
        let mut log = log();
        for operation in 0..entries {
            log.append_finished(operation, Outcome::Done, 0);
        }
        let mut sync = PpSync::new(&topology, Rank(0), 1, Mode::Now).expect("a rank");
        match sync.begin(&mut [log], StepInput::default()).expect("a step") {
            SyncStep::Ask(Ask::Reduce(reduce)) => {
                shapes.push((reduce.scope, reduce.lane, reduce.values.len()))
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(shapes[0], shapes[1]);
    // Below 256 bytes, one reduction, however many logs.
    assert!(shapes[0].2 * 8 < 256);
}

#[test]
fn i10_ranks_in_different_steps_or_with_different_state_are_told_apart_at_once() {
    let topology = topology(1, 1, 2);
    for (steps, digests, kind) in
        [([1, 2], [500, 500], RankErrorKind::Shape), ([1, 1], [500, 600], RankErrorKind::Disagreement)]
    {
        let mut machines = Vec::new();
        let mut asks = Vec::new();
        for (rank, (&step, &digest)) in steps.iter().zip(&digests).enumerate() {
            let mut sync = PpSync::new(&topology, Rank(rank as u32), 1, Mode::Now).expect("a rank");
            let mut logs = vec![log()];
            for _ in 1..step {
                // A step of its own, with itself.
                let SyncStep::Ask(Ask::Reduce(own)) =
                    sync.begin(&mut logs, StepInput { digest, expired: 0 }).expect("a step")
                else {
                    panic!("a reduction")
                };
                sync.resume(Answer::Values(own.values), &mut logs).expect("agrees with itself");
            }
            match sync.begin(&mut logs, StepInput { digest, expired: 0 }).expect("a step") {
                SyncStep::Ask(ask) => asks.push(ask),
                other => panic!("{other:?}"),
            }
            machines.push((sync, logs));
        }
        let agreed = super::support::reduce_all(&asks).expect("equal lengths");
        for (sync, logs) in &mut machines {
            let error = sync.resume(Answer::Values(agreed.clone()), logs).expect_err("ranks differ");
            assert_eq!(error.kind(), kind);
        }
    }
}

#[test]
fn i11_a_paused_stage_holds_stage_0_only_by_the_message_that_is_on_its_way() {
    let topology = topology(3, 1, 1);
    let mut first = Stage::new(&topology, 0, vec![log()], Mode::Now);
    // Stage 1 does nothing. Stage 0 finishes a whole step, and the next up to its send.
    let mut under_way = first.begin();
    assert_eq!(first.steps, 1);
    let mut sync = first.sync;
    let mut logs = first.logs;
    let step = sync.begin(&mut logs, StepInput::default()).expect("a step");
    let SyncStep::Ask(Ask::Send { values, .. }) = step else { panic!("it sends at once, nothing else") };
    // The transport answers when the message before was received; only then it goes on.
    under_way.push(values);
    assert_eq!(sync.resume(Answer::Done, &mut logs).expect("goes on"), SyncStep::Done { expired: 0 });
    // Stage 1 works the messages off, without a word from stage 2 or to stage 0.
    let mut second = Stage::new(&topology, 1, vec![log()], Mode::Now);
    for message in under_way {
        second.begin();
        assert_eq!(second.answer(Answer::Values(message)).len(), 1);
    }
    assert_eq!(second.steps, 2);
    let plain = EngineConfig::new(topology);
    walk(EngineConfig { faults: Faults { pause: true, slow: true, ..Faults::default() }, ..plain }, 100);
}

#[test]
fn i09_lagged_counts_are_one_step_old_on_every_stage() {
    let topology = topology(2, 1, 1);
    let (mut first, mut second) = (
        Stage::new(&topology, 0, vec![log()], Mode::Lagged),
        Stage::new(&topology, 1, vec![log()], Mode::Lagged),
    );
    for stage in [&mut first, &mut second] {
        stage.logs[0].append_finished(1, Outcome::Done, 0);
        stage.logs[0].append_finished(2, Outcome::Done, 0);
    }
    for expected in [vec![], vec![1, 2], vec![1, 2]] {
        let sent = first.begin();
        second.begin();
        second.answer(Answer::Values(sent[0].clone()));
        assert_eq!(first.operations(), expected);
        assert_eq!(second.operations(), expected);
    }
    for (pp, cp, tp) in SHAPES {
        walk(EngineConfig { mode: Mode::Lagged, ..faulty(pp, cp, tp) }, 30);
    }
}

#[test]
fn i10_a_second_copy_of_a_message_is_passed_over_and_a_lost_one_is_named() {
    let topology = topology(2, 1, 1);
    let mut first = Stage::new(&topology, 0, vec![log()], Mode::Now);
    let mut second = Stage::new(&topology, 1, vec![log()], Mode::Now);
    let one = first.begin().remove(0);
    let two = first.begin().remove(0);
    let three = first.begin().remove(0);
    second.begin();
    second.answer(Answer::Values(one.clone()));
    second.begin();
    second.answer(Answer::Values(one));
    assert!(matches!(second.waits, Some(Ask::Receive { .. })), "it still waits for its own");
    second.answer(Answer::Values(two));
    assert_eq!(second.steps, 2);
    // From before a restart, also old.
    second.sync.restart(1);
    second.begin();
    second.answer(Answer::Values(three.clone()));
    assert!(matches!(second.waits, Some(Ask::Receive { .. })));
    let mut late = Stage::new(&topology, 1, vec![log()], Mode::Now);
    late.begin();
    let error = late.sync.resume(Answer::Values(three), &mut late.logs).expect_err("two are missing");
    assert_eq!((error.kind(), error.rank()), (RankErrorKind::Shape, Some(Rank(0))));
}

#[test]
fn i14_each_operation_ends_with_one_done_entry_under_every_fault() {
    for (pp, cp, tp) in [(2, 1, 1), (1, 1, 2), (2, 2, 1)] {
        walk(faulty(pp, cp, tp), 150);
    }
}

#[test]
fn i15_no_page_is_lost_or_held_twice_after_any_schedule() {
    let faults = Faults { crash: true, drop: true, ..Faults::SURVIVABLE };
    for (pp, cp, tp) in [(2, 1, 1), (1, 2, 1), (2, 1, 2)] {
        walk(EngineConfig { faults, ..faulty(pp, cp, tp) }, 100);
    }
}

#[test]
fn i18_what_is_published_or_read_has_its_own_content_on_every_owner() {
    // Side pools are short in every eighth read, backends read ahead, and every use of a page is checked.
    for (pp, cp, tp) in [(1, 2, 1), (2, 2, 1), (1, 2, 2)] {
        walk(EngineConfig { steps: 80, ..faulty(pp, cp, tp) }, 80);
    }
}

#[test]
fn i16_pages_of_a_copy_under_way_are_not_reclaimed_and_locks_end_at_zero() {
    // Small pools and many requests: the world checks content at every use and locks at the end.
    let plain = EngineConfig::new(topology(2, 1, 1));
    walk(EngineConfig { steps: 120, storage: false, ..plain }, 200);
}

#[test]
fn i25_survivors_of_a_crash_name_the_dead_rank_and_leak_nothing() {
    for (pp, cp, tp) in SHAPES {
        let faults = Faults { crash: true, ..Faults::default() };
        walk(EngineConfig { faults, ..faulty(pp, cp, tp) }, 60);
    }
    // A crash that strikes for certain, and what the others say.
    let mut engine = Engine::new(EngineConfig {
        faults: Faults { crash: true, ..Faults::default() },
        ..EngineConfig::new(topology(4, 1, 1))
    });
    let mut named = 0;
    for seed in 0..40 {
        explore(&mut engine, seed, 1).expect("named and clean");
        named += engine.errors().into_iter().flatten().filter(|error| error.rank().is_some()).count();
    }
    assert!(named > 30, "{named} errors with a name");
}

#[test]
fn i25_the_culprit_is_at_the_end_of_the_waits_not_at_the_beginning() {
    let ranks = |list: &[u32]| list.iter().copied().map(Rank).collect::<Vec<_>>();
    let beat = |progress, missing: &[u32]| Beat { progress, missing: ranks(missing) };
    let mut watch = Watch::new();
    assert_eq!(watch.culprit(&[]), None);
    // 3 waits for 2, 2 for 1, 1 for 0, which computes.
    watch.beat(Rank(2), beat(7, &[1]));
    watch.beat(Rank(1), beat(7, &[0]));
    watch.beat(Rank(0), beat(6, &[]));
    assert_eq!(watch.culprit(&ranks(&[2])), Some(Rank(0)));
    // A silent one on the way is it, whoever it waited for.
    watch.silence(Rank(1));
    assert_eq!(watch.culprit(&ranks(&[2])), Some(Rank(1)));
    watch.beat(Rank(1), beat(7, &[0]));
    // A circle: the one that has come least far.
    watch.beat(Rank(0), beat(6, &[2]));
    assert_eq!(watch.culprit(&ranks(&[1])), Some(Rank(0)));
}

#[test]
fn example_of_section_12_stage_0_sees_a_done_and_stage_1_keeps_b() {
    let topology = topology(2, 1, 1);
    let (a, b) = (0xa, 0xb);
    let logs = |finished: &[u64]| {
        let mut log = log();
        for operation in [a, b] {
            let ticket = log.append(operation);
            if finished.contains(&operation) {
                log.finish(ticket, Outcome::Done).expect("known");
            }
        }
        vec![log]
    };
    let mut first = Stage::new(&topology, 0, logs(&[a]), Mode::Now);
    let mut second = Stage::new(&topology, 1, logs(&[a, b]), Mode::Now);
    let sent = first.begin();
    second.begin();
    second.answer(Answer::Values(sent[0].clone()));
    assert_eq!((first.operations(), second.operations()), (vec![a], vec![a]));
    assert_eq!((second.logs[0].len(), second.logs[0].ready()), (1, 1), "stage 1 keeps B for later");
    // When stage 0 has B too, both consume it.
    first.logs[0].finish(Ticket(1), Outcome::Done).expect("known");
    let sent = first.begin();
    second.begin();
    second.answer(Answer::Values(sent[0].clone()));
    assert_eq!((first.operations(), second.operations()), (vec![a, b], vec![a, b]));
}

#[test]
fn example_of_section_12_without_pp_sync_the_first_difference_is_a_lock_release() {
    let mut engine = Engine::new(EngineConfig {
        rules: Rules::without(Rule::ChainedCounts),
        storage: false,
        proof: false,
        trace: true,
        steps: 200,
        ..EngineConfig::new(topology(2, 1, 1))
    });
    let (mut seen, mut all) = (0, 0);
    for seed in 0..60 {
        // Divergence may end the run in other ways; the records up to there are what counts.
        let _ = explore(&mut engine, seed, 1);
        let traces = engine.traces();
        let at = |record: &Record, kind, name: &str| record.kind == kind && record.name == name;
        let Some(first) = (0..traces[0].len().max(traces[1].len()))
            .find(|&index| traces[0].get(index) != traces[1].get(index))
        else {
            continue;
        };
        all += 1;
        let releases = traces.iter().filter_map(|trace| trace.get(first));
        assert!(
            releases.clone().any(|record| at(record, Kind::State, "unlock")),
            "seed {seed}: {:?}",
            releases.collect::<Vec<_>>()
        );
        // Evictions and matches that differ come later.
        let list = |trace: &[Record], kind, name: &str| {
            trace
                .iter()
                .filter(|record| at(record, kind, name))
                .map(|r| (r.step, r.fields.clone()))
                .collect::<Vec<_>>()
        };
        let evictions = traces.iter().map(|trace| list(trace, Kind::Called, "evict")).collect::<Vec<_>>();
        let matches = traces.iter().map(|trace| list(trace, Kind::Returned, "match")).collect::<Vec<_>>();
        let step = releases.map(|record| record.step).min().unwrap_or(0);
        for lists in [&evictions, &matches] {
            let differing = lists[0].iter().zip(&lists[1]).find(|(a, b)| a != b);
            if let Some((a, b)) = differing {
                assert!(a.0.min(b.0) >= step, "seed {seed}: a decision differs before a lock does");
                seen += 1;
            }
        }
    }
    assert!(all > 50 && seen > 10, "{all} runs diverged, {seen} visible decisions");
    assert!(engine.name().contains("pp2"));
}
