//! The protocol rules by name, and the switch that takes one of them away in a test.
//!
//! A rule whose absence no test notices is a rule that may be lost. So each has a switch, and the gate in
//! the simulator demands that schedules without it go wrong. In builds without the feature `simulator`,
//! [`Rules`] has no size and every rule holds.

/// A protocol rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// A backup draws host pages from the owner sequence of the pages it copies. Without: from the class with
    /// most free pages.
    BackupKeepsOwner,
    /// A restore draws device pages from the owner sequence of the host pages. Without: from the class with
    /// most free pages.
    RestoreKeepsOwner,
    /// A branch continues its parent's rotation. Without: it starts a rotation of its own.
    BranchInheritsBase,
    /// A chain with another base than the path it lands on is declined. Without: it is spliced in.
    SpliceDeclined,
    /// An allocation of several runs happens as a whole or not at all. Without: what fits is kept.
    AllOrNothing,
    /// Free pages are taken in an order that all ranks share. Without: in an order of the rank's own.
    OrderedFreePages,
    /// A rank copies the pages it owns. Without: all of them.
    OwnShareOnly,
    /// Each rectangle has one writer among its holders. Without: global rank 0 writes what is replicated.
    OneWriterPerRectangle,
    /// A gather names each shared page once. Without: once for each request.
    SharedPagesOnce,
    /// Stage 0 takes the minimum over its ranks. Without: each its own counts.
    StageMinimum,
    /// Later stages take the counts that are passed down. Without: each stage its own minimum.
    ChainedCounts,
    /// Every step sends and receives, also with nothing to say. Without: a rank with empty logs skips it.
    UnconditionalStep,
    /// Only a leading run of finished entries is ready. Without: all finished entries count.
    LeadingRun,
    /// An entry is applied when its local transfer has finished. Without: when it is chosen.
    WaitForLocal,
    /// A rank whose share of an operation is empty appends an entry all the same. Without: none.
    EmptyShareAcks,
    /// A failed operation leaves an entry. Without: none.
    FailureAcks,
    /// A second completion of an entry changes nothing. Without: it completes the next entry.
    DuplicateIgnored,
    /// A message of another step is recognised. Without: whatever arrives is taken.
    MessageHeader,
    /// Threads reduce in groups of their own. Without: all in one.
    SeparateLanes,
    /// Source and target of a copy are pinned until its entry is consumed. Without: until it was submitted.
    PinUntilAck,
    /// All ranks use the smallest capacity. Without: each its own.
    AgreedCapacity,
    /// In lagged mode the first stage uses the counts it passes down. Without: the ones just reduced.
    LaggedForAll,
    /// A copy that can fail on one rank counts only when all ranks agree on its outcome. Without: each rank
    /// believes its own.
    OutcomeVote,
    /// The hit is the minimum over ranks. Without: each rank's own.
    HitMinimum,
    /// Legal lengths are intersected. Without: the minimum of the longest ones is taken.
    MaskIntersection,
    /// A mask is sized by the request. Without: by what is present locally.
    MaskFromSpan,
    /// Completed lengths are reduced to the minimum. Without: each rank's own.
    CompletedMinimum,
    /// A completed length never exceeds the agreed hit and never shrinks. Without: as reported.
    CompletedWithinHit,
    /// Side pools shorten the completed length. Without: the KV pages alone count.
    SidecarsClamp,
    /// Each operation ends with one done entry, also after an error. Without: errors end it silently.
    DoneAlways,
    /// Results are consumed in the order that stage 0 chose. Without: when they arrive.
    OrderedPublication,
    /// A cancelled operation takes part in its reductions. Without: it leaves.
    CancelledTakesPart,
    /// Whether an operation has timed out is decided once for all ranks. Without: by each clock.
    AgreedTimeout,
    /// Pages past the completed length are freed when the operation is done. Without: they stay taken.
    TailFreed,
    /// A gather of a layer waits for its load. Without: it does not.
    LoadBeforeGather,
    /// A read of a layer waits for its gather. Without: it does not.
    GatherBeforeRead,
    /// A gather waits for the readers of its slot. Without: it does not.
    SlotReuseWaits,
    /// Two slots alternate. Without: there is one.
    TwoSlots,
    /// Scratch is reserved before a load is queued. Without: after.
    ReserveBeforeLoad,
    /// A reservation is rolled back when lengths change. Without: it stays.
    RollbackOnChange,
    /// Each request's prefix is padded to whole gather blocks. Without: its tokens are counted.
    PaddedPrefix,
    /// The prefetch is started before the promise is sent. Without: promised first.
    PrefetchBeforePromise,
    /// A promise that cannot be kept fails the request. Without: it is shortened silently.
    PromiseKept,
    /// A request runs when every rank is ready. Without: when this one is.
    JointReady,
    /// A failure on one rank fails the request on all. Without: on that one.
    JointFailure,
    /// Locks are released once on every path. Without: an abort forgets them.
    LocksReleased,
    /// A request that finds a restore under way waits for its event. Without: it takes the pages as ready.
    FollowerWaits,
    /// The peer sends the pages behind the promise. Without: behind its own match.
    SuffixBehindPromise,
    /// The fields of a record are framed. Without: they are joined.
    FramedFields,
    /// Each thread has its stream of records. Without: all share one.
    StreamPerThread,
    /// The search names the first differing record. Without: the batch that holds it.
    FirstDifference,
    /// A rank whose records stay away is named. Without: the others wait.
    SilentRankNamed,
    /// A wait that has passed its deadline ends in an error. Without: it is repeated.
    DeadlineEnds,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Rule; 53] = [
        Rule::BackupKeepsOwner,
        Rule::RestoreKeepsOwner,
        Rule::BranchInheritsBase,
        Rule::SpliceDeclined,
        Rule::AllOrNothing,
        Rule::OrderedFreePages,
        Rule::OwnShareOnly,
        Rule::OneWriterPerRectangle,
        Rule::SharedPagesOnce,
        Rule::StageMinimum,
        Rule::ChainedCounts,
        Rule::UnconditionalStep,
        Rule::LeadingRun,
        Rule::WaitForLocal,
        Rule::EmptyShareAcks,
        Rule::FailureAcks,
        Rule::DuplicateIgnored,
        Rule::MessageHeader,
        Rule::SeparateLanes,
        Rule::PinUntilAck,
        Rule::AgreedCapacity,
        Rule::LaggedForAll,
        Rule::OutcomeVote,
        Rule::HitMinimum,
        Rule::MaskIntersection,
        Rule::MaskFromSpan,
        Rule::CompletedMinimum,
        Rule::CompletedWithinHit,
        Rule::SidecarsClamp,
        Rule::DoneAlways,
        Rule::OrderedPublication,
        Rule::CancelledTakesPart,
        Rule::AgreedTimeout,
        Rule::TailFreed,
        Rule::LoadBeforeGather,
        Rule::GatherBeforeRead,
        Rule::SlotReuseWaits,
        Rule::TwoSlots,
        Rule::ReserveBeforeLoad,
        Rule::RollbackOnChange,
        Rule::PaddedPrefix,
        Rule::PrefetchBeforePromise,
        Rule::PromiseKept,
        Rule::JointReady,
        Rule::JointFailure,
        Rule::LocksReleased,
        Rule::FollowerWaits,
        Rule::SuffixBehindPromise,
        Rule::FramedFields,
        Rule::StreamPerThread,
        Rule::FirstDifference,
        Rule::SilentRankNamed,
        Rule::DeadlineEnds,
    ];
}

/// Which rules hold: all, except for at most one that a test took away.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rules {
    #[cfg(any(test, feature = "simulator"))]
    removed: Option<Rule>,
}

impl Rules {
    /// All rules.
    pub const ALL: Rules = Rules {
        #[cfg(any(test, feature = "simulator"))]
        removed: None,
    };

    /// All rules but one.
    #[cfg(any(test, feature = "simulator"))]
    pub fn without(rule: Rule) -> Rules {
        Rules { removed: Some(rule) }
    }

    /// True where the rule holds.
    #[cfg(any(test, feature = "simulator"))]
    #[inline]
    pub fn hold(self, rule: Rule) -> bool {
        self.removed != Some(rule)
    }

    /// True where the rule holds: always, in this build.
    #[cfg(not(any(test, feature = "simulator")))]
    #[inline(always)]
    pub fn hold(self, _rule: Rule) -> bool {
        true
    }
}
