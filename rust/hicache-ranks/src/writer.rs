//! What a rank holds of a page, and which rank writes it.
//!
//! A holding is a rectangle in model-global coordinates together with the class of pages it is held of. Ranks
//! with equal holdings are replicas; the first of them writes, the others answer "done, not mine". So each
//! rectangle of each page has exactly one writer, under every kind of context parallelism.

use crate::error::{RankError, Result};
use crate::placement::Owner;
use crate::rules::{Rule, Rules};
use crate::topology::{Coordinates, CpKind, Rank, Topology};

/// A half-open range of layers or heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    /// First index.
    pub start: u32,
    /// One past the last index.
    pub end: u32,
}

impl Range {
    /// Part `index` of `parts` nearly equal contiguous parts; the first ones are longer by one.
    pub fn part(self, index: u32, parts: u32) -> Range {
        let (len, longer) = ((self.end - self.start) / parts, (self.end - self.start) % parts);
        let start = self.start + index * len + index.min(longer);
        Range { start, end: start + len + u32::from(index < longer) }
    }
}

/// Every `lanes`-th token of a page, beginning with token `lane`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lanes {
    /// First token.
    pub lane: u32,
    /// Distance of tokens.
    pub lanes: u32,
}

/// The pages a holding is about: all, or those of one owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pages {
    /// Every page.
    All,
    /// Pages of one owner.
    OwnedBy(Owner),
}

/// What a rank holds of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holding {
    /// Of which pages.
    pub pages: Pages,
    /// Model-global layers.
    pub layers: Range,
    /// Model-global KV heads; `0..1` for latent rows.
    pub heads: Range,
    /// Tokens within a page.
    pub tokens: Lanes,
}

/// How a pool is spread over the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spread {
    stages: Vec<Range>,
    kv_heads: u32,
    rules: Rules,
}

impl Spread {
    /// A pool whose stage `i` holds the layers `stages[i]` and that has `kv_heads` heads; 1 head for latent
    /// rows, which every tensor parallel rank holds.
    ///
    /// # Errors
    ///
    /// `config` where a stage is empty, stages overlap, or there is no head.
    pub fn new(stages: Vec<Range>, kv_heads: u32) -> Result<Spread> {
        let ordered = stages.windows(2).all(|pair| pair[0].end <= pair[1].start);
        if kv_heads == 0 || stages.is_empty() || !ordered || stages.iter().any(|s| s.start >= s.end) {
            return Err(RankError::config(format!("{kv_heads} heads over stages {stages:?}")));
        }
        Ok(Spread { stages, kv_heads, rules: Rules::ALL })
    }

    /// Takes a rule away.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> Spread {
        self.rules = rules;
        self
    }

    /// Layers dealt out to `stages` stages as evenly as possible.
    ///
    /// # Errors
    ///
    /// As [`Spread::new`].
    pub fn even(layers: u32, stages: u32, kv_heads: u32) -> Result<Spread> {
        if stages == 0 {
            return Err(RankError::config("a pipeline of 0 stages"));
        }
        let all = Range { start: 0, end: layers };
        Spread::new((0..stages).map(|stage| all.part(stage, stages)).collect(), kv_heads)
    }

    /// What the rank at `at` holds.
    ///
    /// # Errors
    ///
    /// `config` where the pool was made for another number of stages, or heads do not divide.
    pub fn holding(&self, topology: &Topology, at: Coordinates) -> Result<Holding> {
        if self.stages.len() != topology.pp() as usize {
            return Err(RankError::config(format!(
                "a pool of {} stages in a pipeline of {}",
                self.stages.len(),
                topology.pp()
            )));
        }
        // Ranks of one decode context parallel group share their heads and deal out the tokens.
        let (groups, group) = (topology.tp() / topology.dcp(), at.tp / topology.dcp());
        let heads = self.kv_heads;
        if !groups.is_multiple_of(heads) && !heads.is_multiple_of(groups) {
            return Err(RankError::config(format!("{heads} heads over {groups} tensor parallel groups")));
        }
        let stage = self.stages[at.pp as usize];
        let heads = if heads >= groups {
            Range { start: 0, end: heads }.part(group, groups)
        } else {
            // Several groups hold the same head.
            let head = group * heads / groups;
            Range { start: head, end: head + 1 }
        };
        let whole = Lanes { lane: 0, lanes: 1 };
        let mut holding = Holding { pages: Pages::All, layers: stage, heads, tokens: whole };
        match topology.cp_kind() {
            CpKind::None | CpKind::Replicated => {}
            CpKind::Page => holding.pages = Pages::OwnedBy(at.cp),
            CpKind::Layer => holding.layers = stage.part(at.cp, topology.cp()),
            CpKind::Token => holding.tokens = Lanes { lane: at.cp, lanes: topology.cp() },
        }
        if topology.dcp() > 1 {
            // Decode context parallelism deals out the tokens that are left.
            let Lanes { lane, lanes } = holding.tokens;
            holding.tokens = Lanes { lane: lane + lanes * at.dcp, lanes: lanes * topology.dcp() };
        }
        Ok(holding)
    }

    /// The rank that writes what `rank` holds: the first rank of its replica with an equal holding.
    ///
    /// # Errors
    ///
    /// `config` as [`Spread::holding`], or for a rank outside.
    pub fn writer(&self, topology: &Topology, rank: Rank) -> Result<Rank> {
        let own = topology.coordinates(rank)?;
        let holding = self.holding(topology, own)?;
        if !self.rules.hold(Rule::OneWriterPerRectangle) && self.kv_heads == 1 {
            return Ok(topology.rank(Coordinates { cp: 0, tp: 0, ..own }));
        }
        for cp in 0..topology.cp() {
            for tp in 0..topology.tp() {
                let other = topology.rank(Coordinates { cp, tp, ..own });
                if self.holding(topology, topology.coordinates(other)?)? == holding {
                    return Ok(other);
                }
            }
        }
        Ok(rank)
    }

    /// True where `rank` writes what it holds.
    ///
    /// # Errors
    ///
    /// As [`Spread::writer`].
    pub fn is_writer(&self, topology: &Topology, rank: Rank) -> Result<bool> {
        Ok(self.writer(topology, rank)? == rank)
    }
}
