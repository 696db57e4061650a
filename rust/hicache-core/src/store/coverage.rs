//! Which stored forms can serve a wanted tile: alone, or several together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::format::form::Form;
use crate::format::frame::{ShortKey, short_key};
use crate::key::PageKey;
use crate::layout::LayoutName;
use crate::namespace::Fingerprint;
use crate::store::index::{FormId, Index, ObjectId};
use crate::tile::{Tile, cover};

/// Most forms that are tried together for one page: a tile of a page in more objects than that is missing.
const MAX_PARTS: usize = 64;

/// How a page can be had: the parts of the wanted tile, each from one object. Empty: it cannot.
pub type Parts = Vec<(ObjectId, Tile)>;

/// Forms of one pool that serve one wanted tile, as of one state of the index.
pub struct Coverage {
    wanted: Tile,
    forms_seen: usize,
    /// Forms that hold all of the tile: the cheapest to read first.
    alone: Vec<FormId>,
    /// Forms that hold a part of it.
    parts: Vec<(FormId, Tile)>,
    /// For each set of parts present: how they cover the tile.
    covers: Mutex<HashMap<u64, Option<Arc<Vec<crate::tile::Piece>>>>>,
}

/// A walk along a chain. Pages stored together are found behind each other, without a look-up.
pub struct Walk<'a> {
    coverage: &'a Coverage,
    index: &'a Index,
    last: Option<ObjectId>,
}

impl Walk<'_> {
    /// Whether the next page can be had.
    pub fn has(&mut self, key: &PageKey) -> bool {
        let key = short_key(key);
        let behind = self.last.and_then(|last| self.index.find_behind(last, &key));
        self.last = behind.or_else(|| self.coverage.find_alone(self.index, &key));
        self.last.is_some() || self.coverage.has_parts(self.index, &key)
    }
}

impl Coverage {
    /// Coverage of `wanted` by the forms that `index` knows now.
    pub fn new(index: &Index, pool: Fingerprint, wanted: Tile, layout: LayoutName) -> Self {
        let mut alone: Vec<(FormId, &Form)> = Vec::new();
        let mut parts = Vec::new();
        for (number, form) in index.forms().iter().enumerate().filter(|(_, form)| form.pool == pool) {
            if form.tile.contains(&wanted) {
                alone.push((number as FormId, form));
            } else if let Some(shared) = form.tile.intersect(&wanted) {
                parts.push((number as FormId, shared));
            }
        }
        alone.sort_by_key(|(_, form)| (form.tile != wanted, form.layout != layout, form.page_bytes));
        parts.truncate(MAX_PARTS);
        Coverage {
            wanted,
            forms_seen: index.forms().len(),
            alone: alone.into_iter().map(|(number, _)| number).collect(),
            parts,
            covers: Mutex::default(),
        }
    }

    /// Whether forms were added to `index` since.
    pub fn is_stale(&self, index: &Index) -> bool {
        self.forms_seen != index.forms().len()
    }

    /// Looks pages up one after the other.
    pub fn walk<'a>(&'a self, index: &'a Index) -> Walk<'a> {
        Walk { coverage: self, index, last: None }
    }

    /// How the page can be had.
    pub fn find(&self, index: &Index, key: &ShortKey) -> Parts {
        if let Some(found) = self.find_alone(index, key) {
            return vec![(found, self.wanted)];
        }
        let Some(pieces) = self.cover(self.present_parts(index, key)) else { return Vec::new() };
        let parts: Option<Parts> = pieces
            .iter()
            .map(|piece| Some((index.find(key, self.parts.get(piece.stored)?.0)?, piece.tile)))
            .collect();
        parts.unwrap_or_default()
    }

    fn find_alone(&self, index: &Index, key: &ShortKey) -> Option<ObjectId> {
        self.alone.iter().find_map(|&form| index.find(key, form))
    }

    fn has_parts(&self, index: &Index, key: &ShortKey) -> bool {
        !self.parts.is_empty() && self.cover(self.present_parts(index, key)).is_some()
    }

    fn present_parts(&self, index: &Index, key: &ShortKey) -> u64 {
        let present =
            |(bit, (form, _)): (usize, &(FormId, Tile))| u64::from(index.find(key, *form).is_some()) << bit;
        self.parts.iter().enumerate().map(present).fold(0, |set, bit| set | bit)
    }

    fn cover(&self, present: u64) -> Option<Arc<Vec<crate::tile::Piece>>> {
        if present == 0 {
            return None;
        }
        let mut covers = self.covers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let computed = covers.entry(present).or_insert_with(|| {
            let (numbers, tiles): (Vec<usize>, Vec<Tile>) = self
                .parts
                .iter()
                .enumerate()
                .filter(|(bit, _)| present >> bit & 1 == 1)
                .map(|(bit, (_, tile))| (bit, *tile))
                .unzip();
            let mut pieces = cover(&self.wanted, &tiles)?;
            for piece in &mut pieces {
                piece.stored = numbers[piece.stored];
            }
            Some(Arc::new(pieces))
        });
        computed.clone()
    }
}
