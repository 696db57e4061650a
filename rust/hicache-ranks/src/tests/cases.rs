//! Failures from the field, as far as ranks are concerned.

use super::support::{Stage, faulty, reduce_all, topology, walk};
use crate::ack::{AckLog, Feed, Voting};
use crate::ask::{Answer, Ask};
use crate::classed_pool::ClassedPool;
use crate::digest;
use crate::error::RankErrorKind;
use crate::placement::Placement;
use crate::pp_sync::Mode;
use crate::prefetch::{Part, Prefetch, Reading};
use crate::sim::Choices;
use crate::topology::{CpKind, Rank, Topology};
use crate::vote::{HitVote, Lengths, PoolVote};
use crate::writer::{Pages, Spread};

#[test]
fn case_d01_the_hit_is_the_longest_length_that_every_pool_of_every_rank_can_restore() {
    let span = 6;
    let pools = |idx: Vec<u32>| {
        vec![
            PoolVote::AllPages(6),
            PoolVote::Ending(Lengths::exactly(span, [2, 5])),
            PoolVote::Ending(Lengths::exactly(span, idx)),
        ]
    };
    // One rank with all pools, another with all but an index page.
    for (idx, expected) in [(vec![2, 4], 2), (vec![4], 0)] {
        let votes = [HitVote::new(1, span, true, pools(vec![2, 4])), HitVote::new(1, span, true, pools(idx))];
        let values = reduce_all(&[votes[0].ask(), votes[1].ask()]).expect("equal lengths");
        for vote in &votes {
            assert_eq!(vote.resume(Answer::Values(values.clone())).expect("an answer").pages, expected);
        }
    }
}

#[test]
fn case_d01_a_side_page_that_is_missing_at_the_read_shortens_what_is_published() {
    let mut reading = Reading::new(1, 4, 4, true).expect("a batch");
    let mut scheduler = Prefetch::new(1, 6, 4);
    let reports = [4, 2, 0].map(|pages| reading.report(pages).expect("a part"));
    assert_eq!(reports.map(|report| report.part), [Part::Progress, Part::SidePools, Part::Done]);
    let publications = reports.map(|report| scheduler.consume(report).expect("in order"));
    let publication = publications[2].expect("done");
    assert_eq!((publication.publish, publication.free_to), (2, 4));
}

#[test]
fn case_d05_an_unclear_layout_is_refused_shards_write_their_own_and_replicas_elect_one() {
    let error = Topology::new(1, 4, 1, CpKind::None).expect_err("of what does a rank hold a part?");
    assert_eq!(error.kind(), RankErrorKind::Config);
    assert!(error.message().contains("page, layer, token or replicated"), "{error}");
    for (kind, writers, distinct) in
        [(CpKind::Page, 4, 4), (CpKind::Token, 4, 4), (CpKind::Layer, 4, 4), (CpKind::Replicated, 1, 1)]
    {
        let topology = Topology::new(1, 4, 1, kind).expect("sizes");
        let spread = Spread::even(8, 1, 1).expect("sizes");
        let holdings: Vec<_> = (0..4)
            .map(|rank| {
                let at = topology.coordinates(Rank(rank)).expect("inside");
                spread.holding(&topology, at).expect("it divides")
            })
            .collect();
        let written = (0..4).filter(|&rank| spread.is_writer(&topology, Rank(rank)).expect("inside")).count();
        let different: std::collections::BTreeSet<_> = holdings.iter().collect();
        assert_eq!((written, different.len()), (writers, distinct), "{kind:?}");
        assert_eq!(holdings[1].pages, if kind == CpKind::Page { Pages::OwnedBy(1) } else { Pages::All });
    }
}

#[test]
fn case_d06_a_rank_with_nothing_to_say_takes_part_and_a_missing_one_is_named() {
    let vote = |number, pages: Option<u32>| match pages {
        Some(pages) => HitVote::new(number, 8, false, vec![PoolVote::AllPages(pages)]),
        None => HitVote::nothing(number, 8, false, 1),
    };
    // Rank 2 does not know the request.
    let votes = [vote(1, Some(5)), vote(1, Some(7)), vote(1, None), vote(1, Some(5))];
    let values = reduce_all(&votes.each_ref().map(HitVote::ask)).expect("equal lengths");
    for vote in &votes {
        assert_eq!(vote.resume(Answer::Values(values.clone())).expect("an answer").pages, 0);
    }
    // Rank 3 never calls: the others say so, and later calls work.
    for vote in [vote(2, Some(5)), vote(2, Some(7)), vote(2, None)] {
        let error = vote.resume(Answer::Expired { culprit: Rank(3) }).expect_err("late");
        assert_eq!((error.kind(), error.rank()), (RankErrorKind::Stalled, Some(Rank(3))));
    }
    let votes = [vote(3, Some(5)), vote(3, Some(7))];
    let values = reduce_all(&votes.each_ref().map(HitVote::ask)).expect("equal lengths");
    assert_eq!(votes[0].resume(Answer::Values(values)).expect("an answer").pages, 5);
    // The step of a rank with empty logs sends as much as that of a busy one.
    let mut idle = Stage::new(
        &topology(2, 1, 1),
        0,
        vec![AckLog::new("load", Feed::Scheduler, Voting::Local)],
        Mode::Now,
    );
    let sent = idle.begin();
    assert_eq!(sent.len(), 1);
    let mut behind = Stage::new(
        &topology(2, 1, 1),
        1,
        vec![AckLog::new("load", Feed::Scheduler, Voting::Local)],
        Mode::Now,
    );
    behind.begin();
    assert!(matches!(behind.waits, Some(Ask::Receive { .. })));
    behind.answer(Answer::Values(sent[0].clone()));
    assert_eq!((idle.steps, behind.steps), (1, 1));
}

#[test]
fn case_d21_pages_of_reads_that_end_early_come_back_on_every_path() {
    let mut pool = ClassedPool::new(Placement::new(1, 4).expect("sizes"), 64).expect("sizes");
    let mut choices = Choices::from_seed(21);
    for round in 0..10_000u64 {
        let span = 1 + choices.below(20);
        let hit = choices.below(span + 1);
        let pages = pool.alloc_cyclic(0, hit).expect("everything came back");
        let (mut reading, mut scheduler) =
            (Reading::new(round, hit, 3, true).expect("a batch"), Prefetch::new(round, span, hit));
        // A third is cancelled midway, a third fails, a third is fine.
        let (kind, until) = (round % 3, choices.below(8));
        let mut done = 0;
        while let Some(part) = reading.next_part() {
            let (start, end) = reading.next_batch();
            let bad = kind == 0 && reading.next_batch().0 > until || kind == 1 && choices.below(3) == 0;
            let pages_read = match part {
                _ if bad => 0,
                Part::Progress => end - start,
                Part::SidePools | Part::Done => hit,
            };
            let report = reading.report(pages_read).expect("a part");
            if let Some(publication) = scheduler.consume(report).expect("in order") {
                done += 1;
                assert_eq!(publication.free_to, hit);
                let (published, tail) = pages.split_at(publication.publish as usize);
                pool.free(tail).expect("taken");
                // The engine evicts what was published.
                pool.free(published).expect("taken");
            }
        }
        assert_eq!(done, 1);
    }
    assert_eq!(pool.free_pages(), 64);
    walk(faulty(1, 1, 2), 100);
}

#[test]
fn case_d22_digests_are_equal_in_every_process() {
    // Golden values: no seed of the process, no address and no map order enters.
    assert_eq!(digest::of_bytes(b""), 0x2d06_8005_38d3_94c2);
    assert_eq!(digest::scatter(0), 0xe220_a839_7b1d_cdaf);
    assert_eq!(digest::mix(0, 0), digest::scatter(0x9e37_79b9_7f4a_7c15));
    assert!(digest::word(u64::MAX) > 0 && digest::word(0) == 0);
    let mut pool = ClassedPool::new(Placement::new(3, 4).expect("sizes"), 5).expect("sizes");
    pool.alloc_cyclic(1, 4).expect("room");
    let fresh = || {
        let mut pool = ClassedPool::new(Placement::new(3, 4).expect("sizes"), 5).expect("sizes");
        pool.alloc_cyclic(1, 4).expect("room");
        pool.digest()
    };
    assert_eq!(pool.digest(), fresh());
}
