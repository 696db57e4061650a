//! Promises to a prefill peer and the account of tokens: I16, I21 to I23.

use super::support::reduce_all;
use crate::Rules;
use crate::ask::Answer;
use crate::error::RankErrorKind;
use crate::ledger::{Stage, Tier, TierLedger};
use crate::restore::{Fate, Found, Obligation, Phase, Promise, RestoreSession};
use crate::sim::{PromiseWorld, explore};

fn session() -> RestoreSession {
    RestoreSession::new(1, 50, 4, Found { device: 2, host: 3, storage: 4 }).expect("it fits")
}

/// Promised, with everything in host memory, the load queued.
fn loading() -> RestoreSession {
    let mut session = session();
    session.prefetch(true).expect("before the promise");
    assert_eq!(session.promise().expect("decided"), Promise { from: 36, to: 50 });
    session.prefetched(4).expect("promised");
    session.rematched(9).expect("promised");
    session.loading(0).expect("covered");
    session
}

fn poll(sessions: &mut [RestoreSession]) -> Vec<Fate> {
    let asks: Vec<_> = sessions.iter().map(RestoreSession::poll).collect();
    let values = reduce_all(&asks).expect("equal lengths");
    sessions
        .iter_mut()
        .map(|session| session.resume(Answer::Values(values.clone())).expect("one request"))
        .collect()
}

#[test]
fn i21_a_promise_is_kept_on_all_ranks_or_the_request_fails_on_all() {
    explore(&mut PromiseWorld::new(Rules::ALL), 0, 1500).expect("kept");
    let mut sessions = [loading(), loading()];
    assert_eq!(sessions[0].restored(), Some(Promise { from: 8, to: 36 }));
    sessions[0].loaded(true).expect("queued");
    sessions.iter_mut().for_each(|session| session.transferred(true));
    assert_eq!(poll(&mut sessions), [Fate::Pending; 2], "rank 1 has not loaded");
    sessions[1].loaded(true).expect("queued");
    assert_eq!(poll(&mut sessions), [Fate::Commit; 2]);
    for session in &mut sessions {
        assert_eq!(session.release(), [Obligation::Lock, Obligation::SuffixSlots]);
        assert_eq!(session.release(), [], "once");
    }
}

#[test]
fn i21_the_peer_sends_what_lies_behind_the_promise_whatever_it_has_cached() {
    let mut session = session();
    assert_eq!(session.transfer(0), None);
    session.prefetch(false).expect("before the promise");
    // Declined: the storage part is no part of the promise.
    let promise = session.promise().expect("decided");
    assert_eq!(promise, Promise { from: 20, to: 50 });
    assert_eq!(session.transfer(0), Some(promise));
    assert_eq!(session.transfer(44), Some(promise));
    assert_eq!(session.promise().expect_err("once").kind(), RankErrorKind::State);
    assert_eq!(session.prefetch(true).expect_err("too late").kind(), RankErrorKind::State);
}

#[test]
fn i21_no_promise_before_the_prefetch_is_decided() {
    let mut session = session();
    assert_eq!(session.promise().expect_err("undecided").kind(), RankErrorKind::State);
    // Nothing in the store: nothing to decide.
    let found = Found { device: 1, host: 0, storage: 0 };
    assert!(RestoreSession::new(1, 4, 4, found).expect("it fits").promise().is_ok());
    assert!(RestoreSession::new(1, 3, 4, found).is_err());
}

#[test]
fn i22_a_failure_or_an_abort_on_one_rank_is_the_fate_of_all() {
    let mut sessions = [loading(), loading(), loading()];
    sessions[1].abort();
    assert_eq!(poll(&mut sessions), [Fate::Fail; 3]);
    assert_eq!(
        sessions.each_ref().map(RestoreSession::phase),
        [Phase::Failed, Phase::Aborted, Phase::Failed]
    );
    let mut sessions = [loading(), loading()];
    sessions[0].loaded(false).expect("queued");
    assert_eq!(poll(&mut sessions), [Fate::Fail; 2]);
    let mut sessions = [loading(), loading()];
    sessions[0].transferred(false);
    assert_eq!(poll(&mut sessions), [Fate::Fail; 2]);
}

#[test]
fn i16_an_aborted_request_gives_back_after_its_load_has_ended_and_not_before() {
    let mut session = loading();
    session.abort();
    assert_eq!(session.release(), [], "pages are still written");
    assert_eq!(session.obligations(), [Obligation::Lock, Obligation::SuffixSlots, Obligation::Load]);
    session.loaded(true).expect("queued");
    assert_eq!(session.phase(), Phase::Aborted);
    assert_eq!(session.release(), [Obligation::Lock, Obligation::SuffixSlots]);
    assert!(session.loaded(true).is_err(), "there is no load");
}

#[test]
fn i05_a_request_that_finds_a_restore_under_way_waits_for_it() {
    let mut session = session();
    session.prefetch(false).expect("before the promise");
    session.promise().expect("decided");
    session.rematched(5).expect("promised");
    session.loading(1).expect("covered");
    session.loaded(true).expect("queued");
    session.transferred(true);
    assert!(!session.is_ready());
    session.followed();
    assert!(session.is_ready());
}

#[test]
fn i21_an_eviction_between_match_and_rematch_fails_instead_of_shrinking() {
    let mut session = session();
    session.prefetch(true).expect("before the promise");
    session.promise().expect("decided");
    assert_eq!(session.prefetched(4).expect("promised"), Phase::Prefetching);
    assert_eq!(session.rematched(8).expect("promised"), Phase::Failed);
    assert_eq!(session.promised().map(|promise| promise.from), Some(36));
    assert!(session.loading(0).is_err());
}

#[test]
fn i23_tiers_and_stages_of_a_request_add_up() {
    let mut ledger = TierLedger::new(100);
    for (tier, tokens) in [(Tier::Device, 20), (Tier::Host, 30), (Tier::Storage, 8), (Tier::Recomputed, 42)] {
        ledger.take(tier, tokens);
    }
    for (stage, tokens) in Stage::ALL.into_iter().zip([16, 12, 8, 8, 8]) {
        ledger.reach(stage, tokens);
    }
    ledger.shortfall("another rank had less", 4);
    assert!(ledger.check(128).is_err(), "four tokens have no reason");
    ledger.shortfall("a page was damaged", 4);
    ledger.copied(38, 38 * 128);
    ledger.check(128).expect("adds up");
    assert!(ledger.check(64).is_err(), "bytes do not match rows");
    let mut more = ledger.clone();
    more.reach(Stage::Completed, 5);
    assert!(more.check(128).is_err(), "more completed than agreed");
    ledger.take(Tier::Host, 1);
    assert!(ledger.check(128).is_err(), "more tokens than the prompt has");
}
