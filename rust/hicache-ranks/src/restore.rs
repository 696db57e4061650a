//! A request on the decode side: what is promised to the prefill peer is restored, or the request fails.
//!
//! ```text
//!  Matched --prefetch--> Matched --promise(D)--> Promised --> Prefetching --> Loading --> Ready --> Committed
//!                                                    \____________\______________\________\---> Failed
//!  any state before Committed --abort--> Aborted
//! ```
//!
//! The promise says: `[0, D)` comes from here, send `[D, len)`. It is made once, after the prefetch was accepted
//! or declined, and never becomes smaller. In every tick every rank brings its state to one poll; the request
//! commits when all ranks are ready and fails when one has failed. What was locked or reserved is given back
//! once, on every path, by [`RestoreSession::release`].

use crate::ask::{Answer, Ask, Lane, Operation, Proof, Reduce, ReduceOp};
use crate::error::{RankError, RankErrorKind, Result};
use crate::rules::{Rule, Rules};
use crate::topology::Scope;

/// What a look-up found, in pages: parts of one prefix, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// On the device.
    pub device: u32,
    /// In host memory.
    pub host: u32,
    /// In the store, agreed on by all ranks.
    pub storage: u32,
}

/// Where a session stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Looked up; the device part is locked.
    Matched,
    /// The promise has been sent.
    Promised,
    /// Pages come from the store.
    Prefetching,
    /// Pages come to the device.
    Loading,
    /// This rank has all of `[0, D)`.
    Ready,
    /// The request runs.
    Committed,
    /// The promise cannot be kept, here or elsewhere.
    Failed,
    /// Given up from outside.
    Aborted,
}

/// What the prefill peer is told, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promise {
    /// `[0, from)` is restored here.
    pub from: u64,
    /// `[from, to)` is to be transferred.
    pub to: u64,
}

/// What the poll says, on all ranks alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Some rank is not ready yet.
    Pending,
    /// All ranks are ready and have the suffix.
    Commit,
    /// Some rank has failed or given up.
    Fail,
}

/// Things that a session holds and must give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Obligation {
    /// The lock of the matched path.
    Lock,
    /// The device slots of `[D, len)`.
    SuffixSlots,
    /// Device pages and host pins of a load under way.
    Load,
    /// A prefetch that was accepted.
    Prefetch,
}

/// One request on one rank.
#[derive(Debug, Clone)]
pub struct RestoreSession {
    request: u64,
    page_tokens: u64,
    prompt_tokens: u64,
    found: Found,
    phase: Phase,
    decided: bool,
    promise: Option<Promise>,
    suffix_arrived: bool,
    /// Loads of others that pages of this request come with.
    awaited: u32,
    held: Vec<Obligation>,
    rules: Rules,
}

impl RestoreSession {
    /// A session for a prompt of which `found` was found; the device part has been locked.
    ///
    /// # Errors
    ///
    /// `config` where more was found than the prompt has whole pages.
    pub fn new(request: u64, prompt_tokens: u64, page_tokens: u32, found: Found) -> Result<RestoreSession> {
        let page_tokens = u64::from(page_tokens);
        let pages = u64::from(found.device) + u64::from(found.host) + u64::from(found.storage);
        if page_tokens == 0 || pages * page_tokens > prompt_tokens {
            let message = format!("{pages} pages of {page_tokens} tokens found of {prompt_tokens} tokens");
            return Err(RankError::config(message));
        }
        Ok(RestoreSession {
            request,
            page_tokens,
            prompt_tokens,
            found,
            phase: Phase::Matched,
            decided: found.storage == 0,
            promise: None,
            suffix_arrived: false,
            awaited: 0,
            held: vec![Obligation::Lock],
            rules: Rules::ALL,
        })
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> RestoreSession {
        self.rules = rules;
        self
    }

    /// Where the session stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// What has been promised.
    pub fn promised(&self) -> Option<Promise> {
        self.promise
    }

    /// What the session holds.
    pub fn obligations(&self) -> &[Obligation] {
        &self.held
    }

    fn expect(&self, phases: &[Phase], what: &str) -> Result<()> {
        if phases.contains(&self.phase) {
            return Ok(());
        }
        let message = format!("request {}: {what} in phase {:?}", self.request, self.phase);
        Err(RankError::state(message))
    }

    /// The prefetch of the storage part was accepted or declined, on all ranks alike.
    ///
    /// # Errors
    ///
    /// `state` after the promise.
    pub fn prefetch(&mut self, accepted: bool) -> Result<()> {
        let late = !self.rules.hold(Rule::PrefetchBeforePromise) && self.phase == Phase::Promised;
        if late {
            // Without the rule the peer has been told already.
            self.found.storage = if accepted { self.found.storage } else { 0 };
            return Ok(());
        }
        self.expect(&[Phase::Matched], "a prefetch")?;
        self.decided = true;
        if accepted && self.found.storage > 0 {
            self.held.push(Obligation::Prefetch);
        } else {
            self.found.storage = 0;
        }
        Ok(())
    }

    /// Makes the promise; the device slots of the suffix have been taken.
    ///
    /// # Errors
    ///
    /// `state` where it was made before, or the prefetch has been neither accepted nor declined.
    pub fn promise(&mut self) -> Result<Promise> {
        self.expect(&[Phase::Matched], "a promise")?;
        if !self.decided && self.rules.hold(Rule::PrefetchBeforePromise) {
            let message = format!("request {}: a promise before the prefetch was decided", self.request);
            return Err(RankError::state(message));
        }
        let pages = self.found.device + self.found.host + self.found.storage;
        let promise = Promise { from: u64::from(pages) * self.page_tokens, to: self.prompt_tokens };
        self.promise = Some(promise);
        self.held.push(Obligation::SuffixSlots);
        self.phase = Phase::Promised;
        Ok(promise)
    }

    /// What the peer is to send.
    pub fn transfer(&self, peer_match_tokens: u64) -> Option<Promise> {
        let promise = self.promise?;
        let behind =
            if self.rules.hold(Rule::SuffixBehindPromise) { promise.from } else { peer_match_tokens };
        Some(Promise { from: behind.min(promise.to), ..promise })
    }

    /// The prefetch has ended with `pages` pages in host memory.
    ///
    /// # Errors
    ///
    /// `state` before the promise.
    pub fn prefetched(&mut self, pages: u32) -> Result<Phase> {
        self.expect(&[Phase::Promised, Phase::Failed, Phase::Aborted], "the end of a prefetch")?;
        self.drop_obligation(Obligation::Prefetch);
        if self.phase == Phase::Promised {
            self.phase = Phase::Prefetching;
            self.covered(self.found.device + self.found.host + pages.min(self.found.storage));
        }
        Ok(self.phase)
    }

    /// The second look-up, for exactly the promised tokens: what was evicted meanwhile is missing.
    ///
    /// # Errors
    ///
    /// `state` before the promise.
    pub fn rematched(&mut self, pages: u32) -> Result<Phase> {
        self.expect(&[Phase::Promised, Phase::Prefetching, Phase::Failed, Phase::Aborted], "a rematch")?;
        if matches!(self.phase, Phase::Promised | Phase::Prefetching) {
            self.covered(pages);
        }
        Ok(self.phase)
    }

    fn covered(&mut self, pages: u32) {
        let promised = self.promise.map_or(0, |promise| promise.from / self.page_tokens);
        if u64::from(pages) >= promised {
            return;
        }
        if self.rules.hold(Rule::PromiseKept) {
            self.phase = Phase::Failed;
        } else if let Some(promise) = &mut self.promise {
            promise.from = u64::from(pages) * self.page_tokens;
        }
    }

    /// The load to the device has been queued; `awaited` loads of other requests bring pages of this one.
    ///
    /// # Errors
    ///
    /// `state` before the promise.
    pub fn loading(&mut self, awaited: u32) -> Result<()> {
        self.expect(&[Phase::Promised, Phase::Prefetching], "a load")?;
        self.phase = Phase::Loading;
        self.held.push(Obligation::Load);
        self.awaited = if self.rules.hold(Rule::FollowerWaits) { awaited } else { 0 };
        Ok(())
    }

    /// A load of another request has ended that brought pages of this one.
    pub fn followed(&mut self) {
        self.awaited = self.awaited.saturating_sub(1);
    }

    /// The own load has ended. Nothing is given back before: host pages are still read and device pages written
    /// until here, also for a request that has failed or was aborted.
    ///
    /// # Errors
    ///
    /// `state` where none was queued.
    pub fn loaded(&mut self, complete: bool) -> Result<Phase> {
        if !self.held.contains(&Obligation::Load) {
            return Err(RankError::state(format!("request {}: the end of no load", self.request)));
        }
        self.drop_obligation(Obligation::Load);
        if self.phase == Phase::Loading {
            self.phase = if complete { Phase::Ready } else { Phase::Failed };
        }
        Ok(self.phase)
    }

    /// The suffix has arrived from the peer, or will not.
    pub fn transferred(&mut self, complete: bool) {
        self.suffix_arrived = complete;
        if !complete && self.phase < Phase::Committed {
            self.phase = Phase::Failed;
        }
    }

    /// This rank gives the request up. The others learn of it by the poll.
    pub fn abort(&mut self) {
        if self.phase < Phase::Committed {
            self.phase = Phase::Aborted;
        }
    }

    /// Whether this rank could run the request.
    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Ready && self.suffix_arrived && self.awaited == 0
    }

    /// The poll of a tick; every rank takes part for every request that has been promised, in order.
    pub fn poll(&self) -> Ask {
        let mut values = Vec::with_capacity(3);
        Proof::push(&mut values, ReduceOp::Min, self.request as i64);
        values.push(match self.phase {
            Phase::Failed | Phase::Aborted => 0,
            _ => 1 + i64::from(self.is_ready()),
        });
        let (scope, lane) = (Scope::Replica, Lane::Scheduler);
        Ask::Reduce(Reduce { scope, lane, op: ReduceOp::Min, operation: self.operation(), values })
    }

    /// Takes the answer to the poll.
    ///
    /// # Errors
    ///
    /// `rank_stalled` after a deadline, `rank_disagreement` where ranks polled for different requests.
    pub fn resume(&mut self, answer: Answer) -> Result<Fate> {
        let values = answer.values(self.operation(), 3)?;
        if !Proof::holds(&values, ReduceOp::Min, self.request as i64) {
            let message = format!("{}: ranks poll for different requests", self.operation());
            return Err(RankError::new(RankErrorKind::Disagreement, message));
        }
        let own = match self.phase {
            Phase::Failed | Phase::Aborted => 0,
            _ => 1 + i64::from(self.is_ready()),
        };
        let (ready, failed) = (self.rules.hold(Rule::JointReady), self.rules.hold(Rule::JointFailure));
        let status = match values[2] {
            // Without the rules a rank looks at itself.
            _ if !ready && own == 2 => 2,
            0 if !failed && own != 0 => own,
            agreed => agreed,
        };
        match status {
            0 => {
                if self.phase != Phase::Aborted {
                    self.phase = Phase::Failed;
                }
                Ok(Fate::Fail)
            }
            2 => {
                self.phase = Phase::Committed;
                Ok(Fate::Commit)
            }
            _ => Ok(Fate::Pending),
        }
    }

    /// Gives back what can be given back now, each thing once. A load or prefetch under way keeps what it needs
    /// until it has ended; call again then.
    pub fn release(&mut self) -> Vec<Obligation> {
        let ended = matches!(self.phase, Phase::Committed | Phase::Failed | Phase::Aborted);
        if !ended || (!self.rules.hold(Rule::LocksReleased) && self.phase == Phase::Aborted) {
            return Vec::new();
        }
        let busy = self.held.iter().any(|held| matches!(held, Obligation::Load | Obligation::Prefetch));
        let keeps = |held: &Obligation| match held {
            Obligation::Load | Obligation::Prefetch => true,
            Obligation::Lock | Obligation::SuffixSlots => busy,
        };
        let (kept, given) = self.held.drain(..).partition(keeps);
        self.held = kept;
        given
    }

    fn drop_obligation(&mut self, what: Obligation) {
        self.held.retain(|&held| held != what);
    }

    fn operation(&self) -> Operation {
        Operation { name: "poll of request", number: self.request }
    }

    /// The part of the promise that is written to the token map on commit, in tokens: what was not on the device.
    pub fn restored(&self) -> Option<Promise> {
        let from = u64::from(self.found.device) * self.page_tokens;
        self.promise.map(|promise| Promise { from, to: promise.from })
    }
}
