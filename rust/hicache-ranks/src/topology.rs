//! Where a rank stands: its coordinates on the axes, and the groups it agrees with.
//!
//! Ranks are numbered as the engine numbers them: pipeline stages outermost, inside a stage data parallel
//! replicas, inside a replica context parallel ranks, innermost tensor parallel ranks. Decode context
//! parallelism cuts the tensor parallel ranks into contiguous groups.

use crate::error::{RankError, Result};
use std::fmt;

/// Number of a process within the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// What context parallel ranks hold of a sequence. It is stated, never guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CpKind {
    /// There is one context parallel rank.
    None,
    /// Whole pages, dealt out in turn: page number modulo ranks.
    Page,
    /// Whole layers: each rank a contiguous part of its stage's layers.
    Layer,
    /// Every `cp`-th token of each page.
    Token,
    /// Everything: all ranks hold the same.
    Replicated,
}

/// Sizes of the axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Topology {
    dp: u32,
    pp: u32,
    cp: u32,
    tp: u32,
    dcp: u32,
    cp_kind: CpKind,
}

/// Position on each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Coordinates {
    /// Data parallel replica.
    pub dp: u32,
    /// Pipeline stage.
    pub pp: u32,
    /// Context parallel rank.
    pub cp: u32,
    /// Tensor parallel rank (of attention).
    pub tp: u32,
    /// Decode context parallel rank: `tp` modulo the size of that axis.
    pub dcp: u32,
}

/// Which ranks take part in a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Context and tensor parallel ranks of one stage of one replica.
    Stage,
    /// All stages of one replica.
    Replica,
}

impl Topology {
    /// Largest number of ranks.
    pub const MAX_RANKS: u32 = 4096;

    /// A topology without decode context parallelism and with one replica.
    ///
    /// # Errors
    ///
    /// `config`: an axis of size 0, too many ranks, or several context parallel ranks without a kind.
    pub fn new(pp: u32, cp: u32, tp: u32, cp_kind: CpKind) -> Result<Topology> {
        Topology { dp: 1, pp, cp, tp, dcp: 1, cp_kind }.validated()
    }

    /// The same with `dp` replicas.
    ///
    /// # Errors
    ///
    /// As [`Topology::new`].
    pub fn with_dp(self, dp: u32) -> Result<Topology> {
        Topology { dp, ..self }.validated()
    }

    /// The same with decode context parallelism over groups of `dcp` tensor parallel ranks.
    ///
    /// # Errors
    ///
    /// `config` where `dcp` does not divide the tensor parallel axis.
    pub fn with_dcp(self, dcp: u32) -> Result<Topology> {
        Topology { dcp, ..self }.validated()
    }

    fn validated(self) -> Result<Topology> {
        let Topology { dp, pp, cp, tp, dcp, cp_kind } = self;
        let ranks = [dp, pp, cp, tp].iter().try_fold(1u32, |ranks, &size| ranks.checked_mul(size));
        if [dp, pp, cp, tp, dcp].contains(&0) || ranks.is_none_or(|ranks| ranks > Topology::MAX_RANKS) {
            return Err(RankError::config(format!(
                "dp {dp} x pp {pp} x cp {cp} x tp {tp} (dcp {dcp}): each is at least 1, their product at most {}",
                Topology::MAX_RANKS
            )));
        }
        if cp > 1 && cp_kind == CpKind::None {
            return Err(RankError::config(format!(
                "cp {cp} needs to know what a rank holds: page, layer, token or replicated"
            )));
        }
        if !tp.is_multiple_of(dcp) {
            return Err(RankError::config(format!("dcp {dcp} does not divide tp {tp}")));
        }
        let cp_kind = if cp == 1 { CpKind::None } else { cp_kind };
        Ok(Topology { cp_kind, ..self })
    }

    /// Data parallel replicas.
    pub fn dp(&self) -> u32 {
        self.dp
    }

    /// Pipeline stages.
    pub fn pp(&self) -> u32 {
        self.pp
    }

    /// Context parallel ranks.
    pub fn cp(&self) -> u32 {
        self.cp
    }

    /// Tensor parallel ranks.
    pub fn tp(&self) -> u32 {
        self.tp
    }

    /// Decode context parallel ranks.
    pub fn dcp(&self) -> u32 {
        self.dcp
    }

    /// What context parallel ranks hold.
    pub fn cp_kind(&self) -> CpKind {
        self.cp_kind
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.dp * self.pp * self.cp * self.tp
    }

    /// Number of owner classes of pages: context parallel ranks where pages are dealt out, otherwise 1.
    pub fn owners(&self) -> u32 {
        if self.cp_kind == CpKind::Page { self.cp } else { 1 }
    }

    /// Coordinates of a rank.
    ///
    /// # Errors
    ///
    /// `config` for a rank outside.
    pub fn coordinates(&self, rank: Rank) -> Result<Coordinates> {
        if rank.0 >= self.ranks() {
            return Err(RankError::config(format!("{rank} of {} ranks", self.ranks())));
        }
        let (rest, tp) = (rank.0 / self.tp, rank.0 % self.tp);
        let (rest, cp) = (rest / self.cp, rest % self.cp);
        Ok(Coordinates { dp: rest % self.dp, pp: rest / self.dp, cp, tp, dcp: tp % self.dcp })
    }

    /// The rank at a position. Positions are taken modulo the sizes of their axes.
    pub fn rank(&self, at: Coordinates) -> Rank {
        let (dp, pp, cp, tp) = (at.dp % self.dp, at.pp % self.pp, at.cp % self.cp, at.tp % self.tp);
        Rank(((pp * self.dp + dp) * self.cp + cp) * self.tp + tp)
    }

    /// Ranks that `rank` reduces with, in ascending order, itself included.
    ///
    /// # Errors
    ///
    /// `config` for a rank outside.
    pub fn members(&self, rank: Rank, scope: Scope) -> Result<Vec<Rank>> {
        let own = self.coordinates(rank)?;
        let stages = match scope {
            Scope::Stage => own.pp..own.pp + 1,
            Scope::Replica => 0..self.pp,
        };
        let mut members = Vec::new();
        for pp in stages {
            for cp in 0..self.cp {
                members.extend((0..self.tp).map(|tp| self.rank(Coordinates { pp, cp, tp, ..own })));
            }
        }
        Ok(members)
    }

    /// Number of ranks in a scope.
    pub fn scope_size(&self, scope: Scope) -> u32 {
        match scope {
            Scope::Stage => self.cp * self.tp,
            Scope::Replica => self.pp * self.cp * self.tp,
        }
    }

    /// The same position one stage earlier, from which counts are received.
    pub fn previous_stage(&self, at: Coordinates) -> Option<Rank> {
        (at.pp > 0).then(|| self.rank(Coordinates { pp: at.pp - 1, ..at }))
    }

    /// The same position one stage later, to which counts are passed.
    pub fn next_stage(&self, at: Coordinates) -> Option<Rank> {
        (at.pp + 1 < self.pp).then(|| self.rank(Coordinates { pp: at.pp + 1, ..at }))
    }
}
