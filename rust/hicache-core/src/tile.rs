//! Tiles: the rectangle of a page that an object holds, and covering one tile with others.
//!
//! A tile is layers x heads x tokens, layers and heads in model-global coordinates, tokens within the page.
//! The tokens are a lattice, for context parallelism that slices pages and for decode context parallelism
//! that deals them out in turn. This module knows nothing of bytes.

use crate::error::{Error, Result};
use std::fmt;

/// A half-open range of layers or heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// First index.
    pub start: u32,
    /// One past the last index.
    pub end: u32,
}

impl Span {
    /// Indices in the span; 0 where it is empty or reversed.
    pub fn len(&self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    /// True where the span holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The common part, if any.
    pub fn intersect(&self, other: &Span) -> Option<Span> {
        let common = Span { start: self.start.max(other.start), end: self.end.min(other.end) };
        (!common.is_empty()).then_some(common)
    }
}

/// The tokens `first`, `first + step`, ... of a page, `count` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenLattice {
    /// First token, counted from the start of the page.
    pub first: u32,
    /// Distance from one token to the next, at least 1.
    pub step: u32,
    /// Number of tokens, at least 1.
    pub count: u32,
}

impl TokenLattice {
    /// The tokens `first`, `first + step`, ...; the step of a single token becomes 1, so that equal sets are
    /// equal values.
    pub fn new(first: u32, step: u32, count: u32) -> TokenLattice {
        TokenLattice { first, step: if count == 1 { step.min(1) } else { step }, count }
    }

    /// The last token, if the lattice holds any and its numbers fit.
    pub fn last(&self) -> Option<u32> {
        let steps = self.count.checked_sub(1)?;
        if self.step == 0 {
            return None;
        }
        self.step.checked_mul(steps)?.checked_add(self.first)
    }

    /// Position of `token` among the lattice's tokens.
    pub fn position(&self, token: u32) -> Option<u32> {
        let distance = token.checked_sub(self.first)?;
        if distance.checked_rem(self.step)? != 0 {
            return None;
        }
        let position = distance / self.step;
        (position < self.count).then_some(position)
    }

    /// The tokens of both, again a lattice (its step is the least common multiple); `None` where there are
    /// none, or where one of the two is not a lattice.
    pub fn intersect(&self, other: &TokenLattice) -> Option<TokenLattice> {
        let low = i128::from(self.first.max(other.first));
        let high = i128::from(self.last()?.min(other.last()?));
        let (solution, step) = common_residue(self, other)?;
        // The first common token that is not below `low`.
        let first = low + (solution - low).rem_euclid(step);
        if first > high {
            return None;
        }
        // Every member is at most `high`, so that all three fit; a step that does not is one past the end.
        let count = u32::try_from((high - first) / step + 1).ok()?;
        Some(TokenLattice::new(u32::try_from(first).ok()?, u32::try_from(step).unwrap_or(1), count))
    }

    /// The `count` members from position `from` on, every `every`-th.
    fn sub(&self, from: u32, every: u32, count: u32) -> TokenLattice {
        TokenLattice::new(self.first + from * self.step, self.step * every, count)
    }
}

/// Solves `x = a.first mod a.step = b.first mod b.step` (Chinese remainders): one solution, and the distance
/// between solutions, `lcm(a.step, b.step)`. Both steps are at least 1.
fn common_residue(a: &TokenLattice, b: &TokenLattice) -> Option<(i128, i128)> {
    let (step_a, step_b) = (i128::from(a.step), i128::from(b.step));
    let (first_a, first_b) = (i128::from(a.first), i128::from(b.first));
    let (gcd, inverse) = extended_gcd(step_a, step_b);
    if (first_b - first_a) % gcd != 0 {
        return None;
    }
    // x = first_a + step_a * k, where k = (first_b - first_a) / gcd * (step_a / gcd)^-1 mod step_b / gcd.
    let modulus = step_b / gcd;
    let k = ((first_b - first_a) / gcd * inverse).rem_euclid(modulus);
    Some((first_a + step_a * k, step_a * modulus))
}

/// `(g, x)` with `g = gcd(a, b)` and `a * x = g mod b`.
fn extended_gcd(a: i128, b: i128) -> (i128, i128) {
    let (mut old, mut new) = ((a, 1), (b, 0));
    while new.0 != 0 {
        let quotient = old.0 / new.0;
        (old, new) = (new, (old.0 - quotient * new.0, old.1 - quotient * new.1));
    }
    old
}

/// Layers x heads x tokens of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tile {
    /// Model-global layers.
    pub layers: Span,
    /// Model-global KV heads; `0..1` for latent rows and for pools without heads.
    pub heads: Span,
    /// Tokens within the page.
    pub tokens: TokenLattice,
}

impl Tile {
    /// One past the largest layer or head.
    pub const MAX_INDEX: u32 = 65_536;
    /// Largest page, in tokens.
    pub const MAX_PAGE_SIZE: u32 = 65_536;

    /// A validated tile, in the canonical form of [`TokenLattice::new`].
    ///
    /// # Errors
    ///
    /// As [`Tile::validate`].
    pub fn new(layers: Span, heads: Span, tokens: TokenLattice, page_size: u32) -> Result<Tile> {
        let tokens = TokenLattice::new(tokens.first, tokens.step, tokens.count);
        let tile = Tile { layers, heads, tokens };
        tile.validate(page_size)?;
        Ok(tile)
    }

    /// The tile of every token of a page.
    ///
    /// # Errors
    ///
    /// As [`Tile::validate`].
    pub fn whole_page(layers: Span, heads: Span, page_size: u32) -> Result<Tile> {
        Tile::new(layers, heads, TokenLattice::new(0, 1, page_size), page_size)
    }

    /// Checks that the tile holds something and lies within a page of `page_size` tokens.
    ///
    /// # Errors
    ///
    /// `Geometry` for an empty or reversed span, an index past [`Tile::MAX_INDEX`], a lattice that is
    /// empty, stands still or leaves the page, and a page size that is 0 or past [`Tile::MAX_PAGE_SIZE`].
    pub fn validate(&self, page_size: u32) -> Result<()> {
        for (what, span) in [("layers", self.layers), ("heads", self.heads)] {
            if span.is_empty() || span.end > Tile::MAX_INDEX {
                let Span { start, end } = span;
                return Err(Error::geometry(format!(
                    "{what} {start}..{end} of a tile: expected start < end <= {}",
                    Tile::MAX_INDEX
                )));
            }
        }
        if page_size == 0 || page_size > Tile::MAX_PAGE_SIZE {
            let limit = Tile::MAX_PAGE_SIZE;
            return Err(Error::geometry(format!("page_size is {page_size} tokens, expected 1 to {limit}")));
        }
        if self.tokens.last().is_none_or(|last| last >= page_size) {
            let TokenLattice { first, step, count } = self.tokens;
            return Err(Error::geometry(format!(
                "tokens of a tile (first {first}, step {step}, count {count}): expected at least one token, \
                 a step of at least one, and all within the page of {page_size} tokens"
            )));
        }
        Ok(())
    }

    /// The common part, if any.
    pub fn intersect(&self, other: &Tile) -> Option<Tile> {
        Some(Tile {
            layers: self.layers.intersect(&other.layers)?,
            heads: self.heads.intersect(&other.heads)?,
            tokens: self.tokens.intersect(&other.tokens)?,
        })
    }

    /// True where every row of `other` is one of this tile.
    pub fn contains(&self, other: &Tile) -> bool {
        self.intersect(other).is_some_and(|common| {
            common.layers == other.layers
                && common.heads == other.heads
                && common.tokens.count == other.tokens.count
        })
    }

    /// Rows of one token, one layer and one head; at most 2^48 in a valid tile.
    pub fn rows(&self) -> u64 {
        u64::from(self.layers.len())
            .saturating_mul(u64::from(self.heads.len()))
            .saturating_mul(u64::from(self.tokens.count))
    }

    /// Adds to `rest` what is left of this tile without `hole`, which lies inside it, as disjoint tiles.
    fn subtract(&self, hole: &Tile, rest: &mut Vec<Tile>) {
        for layers in around(self.layers, hole.layers) {
            rest.push(Tile { layers, ..*self });
        }
        let core = Tile { layers: hole.layers, ..*self };
        for heads in around(core.heads, hole.heads) {
            rest.push(Tile { heads, ..core });
        }
        let core = Tile { heads: hole.heads, ..core };
        subtract_tokens(&core.tokens, &hole.tokens, |tokens| rest.push(Tile { tokens, ..core }));
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TokenLattice { first, step, count } = self.tokens;
        let (layers, heads) = (self.layers, self.heads);
        write!(f, "layers {}..{}, heads {}..{}, ", layers.start, layers.end, heads.start, heads.end)?;
        write!(f, "tokens from {first} by {step}, {count} of them")
    }
}

/// What lies in `span` before and after `hole`.
fn around(span: Span, hole: Span) -> impl Iterator<Item = Span> {
    let before = Span { start: span.start, end: hole.start };
    let after = Span { start: hole.end, end: span.end };
    [before, after].into_iter().filter(|part| !part.is_empty())
}

/// Gives the tokens of `all` that are not in `hole`, a part of it: the other residue classes whole, so that
/// the share of another rank stays in one piece, then the ends of the hole's own class.
fn subtract_tokens(all: &TokenLattice, hole: &TokenLattice, mut give: impl FnMut(TokenLattice)) {
    let from = (hole.first - all.first) / all.step;
    let every = if hole.count == 1 { 1 } else { hole.step / all.step };
    let class = from % every;
    for other in (0..every).filter(|&other| other != class) {
        give(all.sub(other, every, (all.count - other).div_ceil(every)));
    }
    let (before, members) = (from / every, (all.count - class).div_ceil(every));
    if before > 0 {
        give(all.sub(class, every, before));
    }
    let after = before + hole.count;
    if members > after {
        give(all.sub(class + after * every, every, members - after));
    }
}

/// A part of a wanted tile and the stored tile that it is read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Position in the list of stored tiles.
    pub stored: usize,
    /// What to take from it.
    pub tile: Tile,
}

/// The most parts that [`cover`] cuts a wanted tile into.
pub const MAX_PIECES: usize = 4096;

/// Disjoint pieces of stored tiles that make up exactly `wanted`.
///
/// The first stored tile that holds all of `wanted` is taken alone; otherwise each gives what it has of
/// what earlier ones left open. `None` where something stays open, or where the stored tiles are so
/// scattered that more than [`MAX_PIECES`] parts would arise. The tiles must be valid.
pub fn cover(wanted: &Tile, stored: &[Tile]) -> Option<Vec<Piece>> {
    if let Some(stored) = stored.iter().position(|tile| tile.contains(wanted)) {
        return Some(vec![Piece { stored, tile: *wanted }]);
    }
    let mut pieces = Vec::new();
    let mut open = vec![*wanted];
    for (stored, tile) in stored.iter().enumerate() {
        let mut rest = Vec::with_capacity(open.len());
        for part in open {
            match part.intersect(tile) {
                None => rest.push(part),
                Some(common) => {
                    pieces.push(Piece { stored, tile: common });
                    part.subtract(&common, &mut rest);
                }
            }
            if rest.len() + pieces.len() > MAX_PIECES {
                return None;
            }
        }
        if rest.is_empty() {
            return Some(pieces);
        }
        open = rest;
    }
    None
}
