//! Hits, completed lengths and outcomes: I12, I13.

use super::support::{faulty, reduce_all, walk};
use crate::Rules;
use crate::ack::{AckLog, Feed, Finish, Outcome, Ticket, Voting};
use crate::ask::{Answer, Operation, ReduceOp};
use crate::error::RankErrorKind;
use crate::prefetch::{Part, Prefetch, ProgressVote, Publication, Reading, Report};
use crate::sim::{VoteWorld, explore};
use crate::topology::Rank;
use crate::vote::{CapacityVote, Hit, HitVote, Lengths, OutcomeVote, PoolVote, combine, minima};

fn agree(votes: &[HitVote]) -> Vec<Hit> {
    let asks: Vec<_> = votes.iter().map(HitVote::ask).collect();
    let values = reduce_all(&asks).expect("equal lengths");
    votes.iter().map(|vote| vote.resume(Answer::Values(values.clone())).expect("an answer")).collect()
}

#[test]
fn i12_stage_0_chooses_four_pages_and_all_use_four_although_six_are_local() {
    let mut readings =
        [Reading::new(9, 6, 2, false).expect("pages"), Reading::new(9, 6, 2, false).expect("pages")];
    let mut schedulers = [Prefetch::new(9, 6, 6), Prefetch::new(9, 6, 6)];
    // Rank 0 reads four pages and fails, rank 1 reads all six.
    for pages in [[2, 2], [2, 2], [0, 2], [0, 0]] {
        let reports: Vec<Report> = readings
            .iter_mut()
            .zip(pages)
            .map(|(reading, pages)| reading.report(pages).expect("a part"))
            .collect();
        let votes: Vec<ProgressVote> = reports.into_iter().map(ProgressVote::new).collect();
        let agreed =
            reduce_all(&votes.iter().map(ProgressVote::ask).collect::<Vec<_>>()).expect("equal lengths");
        for (vote, scheduler) in votes.iter().zip(&mut schedulers) {
            let report = vote.resume(Answer::Values(agreed.clone())).expect("an answer");
            let publication = scheduler.consume(report).expect("in order");
            let done = report.part == Part::Done;
            assert_eq!(publication, done.then_some(Publication { publish: 4, free_to: 6 }));
        }
    }
    assert!(readings.iter_mut().all(|reading| reading.report(0).is_err()), "one done each");
    assert_eq!(schedulers[0].completed(), 4);
}

#[test]
fn i12_completed_is_at_most_the_hit_and_the_hit_at_most_the_span() {
    let mut scheduler = Prefetch::new(1, 5, 9);
    assert_eq!((scheduler.span(), scheduler.hit()), (5, 5));
    let report = |index, part, completed| Report { operation: 1, index, part, completed };
    for (completed, expected) in [(3, 3), (2, 3), (7, 5)] {
        scheduler.consume(report(0, Part::Progress, completed)).expect("in order");
        assert_eq!(scheduler.completed(), expected);
    }
    // Side pools leave less; published is what is whole.
    scheduler.consume(report(3, Part::SidePools, 2)).expect("in order");
    let publication = scheduler.consume(report(4, Part::Done, 2)).expect("in order");
    assert_eq!(publication, Some(Publication { publish: 2, free_to: 5 }));
    let error = scheduler.consume(report(5, Part::Done, 2)).expect_err("done before");
    assert_eq!(error.kind(), RankErrorKind::AckOrder);
    for (pp, cp, tp) in [(2, 1, 1), (2, 2, 1)] {
        walk(faulty(pp, cp, tp), 100);
    }
}

#[test]
fn i12_the_number_of_reports_follows_from_the_hit_alone() {
    for hit in 0..9 {
        for (batch, side_pools) in [(1, false), (2, true), (4, true)] {
            let parts = |pages: u32| {
                let mut reading = Reading::new(1, hit, batch, side_pools).expect("a batch");
                let mut parts = Vec::new();
                while reading.next_part().is_some() {
                    parts.push(reading.report(pages).expect("a part").part);
                }
                parts
            };
            assert_eq!(parts(0), parts(batch), "a read that fails reports as often");
            assert_eq!(parts(0).iter().filter(|&&part| part == Part::Done).count(), 1);
        }
    }
    assert!(Reading::new(1, 4, 0, false).is_err());
}

#[test]
fn i13_the_chosen_length_is_legal_on_every_rank() {
    explore(&mut VoteWorld::new(Rules::ALL), 0, 2000).expect("equals the intersection");
    // The longest legal lengths are 8 and 6; their minimum is legal on one rank only.
    let span = 8;
    let votes = [[3, 6], [3, 8], [2, 3]].map(|legal| {
        HitVote::new(
            1,
            span,
            true,
            vec![PoolVote::AllPages(8), PoolVote::Ending(Lengths::exactly(span, legal))],
        )
    });
    assert!(agree(&votes).iter().all(|hit| hit.pages == 3 && hit.by_pool == [8, 3]));
}

#[test]
fn i13_the_length_of_a_mask_follows_from_the_request() {
    let empty = HitVote::nothing(4, 200, true, 1);
    let full = HitVote::new(4, 200, true, vec![PoolVote::AllPages(200)]);
    assert_eq!(agree(&[empty, full])[0].pages, 0);
    // Votes on other requests, or of other pools, are no agreement.
    let a = HitVote::new(4, 10, false, vec![PoolVote::AllPages(5)]);
    let b = HitVote::new(5, 10, false, vec![PoolVote::AllPages(5)]);
    let values = reduce_all(&[a.ask(), b.ask()]).expect("equal lengths");
    let error = a.resume(Answer::Values(values)).expect_err("two requests");
    assert_eq!((error.kind(), a.number()), (RankErrorKind::Disagreement, 4));
    assert_eq!(a.resume(Answer::Values(vec![0])).expect_err("short").kind(), RankErrorKind::Shape);
}

#[test]
fn lengths_are_sets_of_pages_with_zero_always_in() {
    for span in [0, 1, 62, 63, 64, 126, 200] {
        for pages in [0, 1, 62, 63, 64, 126, 200] {
            let lengths = Lengths::up_to(span, pages);
            assert_eq!(lengths.longest(), pages.min(span));
            assert!(lengths.contains(0) && !lengths.contains(span + 1));
            let exact = Lengths::exactly(span, [pages]);
            assert_eq!(exact.longest(), if pages <= span { pages } else { 0 });
        }
    }
    let mut common = Lengths::exactly(9, [2, 5]);
    common.intersect(&Lengths::exactly(9, [2, 4])).expect("equal spans");
    assert_eq!(common.longest(), 2);
    assert!(common.intersect(&Lengths::none(100)).is_err());
}

#[test]
fn minima_need_equal_lengths() {
    let mut values = vec![3, 1];
    minima(&mut values, &[2, 5]).expect("equal lengths");
    assert_eq!(values, [2, 1]);
    combine(ReduceOp::And, &mut values, &[3, 3]).expect("equal lengths");
    assert_eq!(values, [2, 1]);
    assert_eq!(minima(&mut values, &[1]).expect_err("lengths").kind(), RankErrorKind::Shape);
    let vote = CapacityVote::new(vec![10, 7]);
    let values = reduce_all(&[vote.ask(), CapacityVote::new(vec![9, 8]).ask()]).expect("equal lengths");
    assert_eq!(vote.resume(Answer::Values(values)).expect("an answer"), [9, 7]);
}

#[test]
fn i08_a_copy_that_failed_on_one_rank_has_failed_on_all() {
    let mut logs = [Outcome::Done, Outcome::Failed].map(|outcome| {
        let mut log = AckLog::new("backup", Feed::Scheduler, Voting::Voted);
        let ticket = log.append(1);
        log.append(2);
        assert_eq!(log.next_vote(), None, "not finished here");
        assert!(log.decide(ticket, Outcome::Done).is_err());
        log.finish(ticket, outcome).expect("known");
        assert_eq!((log.ready(), log.next_vote(), log.next_vote()), (0, Some((ticket, outcome)), None));
        log
    });
    let votes = [OutcomeVote::new(Ticket(0), Outcome::Done), OutcomeVote::new(Ticket(0), Outcome::Failed)];
    let values = reduce_all(&votes.map(|vote| vote.ask())).expect("equal lengths");
    for (vote, log) in votes.iter().zip(&mut logs) {
        let outcome = vote.resume(Answer::Values(values.clone())).expect("an answer");
        assert_eq!(log.decide(Ticket(0), outcome).expect("finished"), Finish::Noted);
        assert_eq!(log.pop().expect("ready").outcome, Outcome::Failed);
    }
}

#[test]
fn i25_a_vote_that_misses_a_rank_names_the_operation_and_the_rank() {
    let vote = HitVote::nothing(7, 10, false, 1);
    let error = vote.resume(Answer::Expired { culprit: Rank(3) }).expect_err("late");
    assert_eq!((error.kind(), error.rank()), (RankErrorKind::Stalled, Some(Rank(3))));
    assert_eq!(error.to_string(), "hit of request 7: no word from rank 3 in time");
    assert_eq!(error.context(), [("operation", "hit of request 7".to_owned())]);
    assert_eq!(vote.ask().operation(), Operation { name: "hit of request", number: 7 });
}
