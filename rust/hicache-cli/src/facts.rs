//! What several commands say of a scan, counted and put into words and JSON.

use std::collections::{BTreeMap, HashMap, HashSet};

use hicache_core::format::form::Form;
use hicache_core::format::frame::Reason;
use hicache_core::inspect::{NamespaceScan, ObjectState, Problem, RootScan};
use hicache_core::tile::Tile;
use serde_json::{Value, json};

use crate::output::{Output, path_text};
use crate::{FINE, PROBLEMS};

/// Objects of a namespace, or of a root, by state.
#[derive(Debug, Default, Clone, Copy)]
pub struct Objects {
    /// Those that can be restored, as far as the journals say.
    pub live: u64,
    /// Their stored bytes.
    pub live_bytes: u64,
    /// Those that a reader gave up because of their bytes, and that were not stored again.
    pub quarantined: u64,
    /// Those that a reader gave up and that were stored again since.
    pub healed: u64,
    /// Those that were evicted.
    pub evicted: u64,
    /// Those that were older than the time to live of a process.
    pub expired: u64,
    /// Those that were removed because another copy stays.
    pub duplicate: u64,
    /// Those that `clear` took away.
    pub cleared: u64,
    /// Those that left for a reason of a later version.
    pub other: u64,
}

impl Objects {
    /// Counts the objects of a namespace.
    pub fn of(namespace: &NamespaceScan) -> Self {
        let mut counts = Objects::default();
        let mut given_up = Vec::new();
        for object in namespace.objects() {
            match object.state {
                ObjectState::Live => {
                    counts.live += 1;
                    counts.live_bytes = counts.live_bytes.saturating_add(object.stored_bytes());
                }
                ObjectState::Gone(Reason::Evicted) => counts.evicted += 1,
                ObjectState::Gone(Reason::Expired) => counts.expired += 1,
                ObjectState::Gone(Reason::Duplicate) => counts.duplicate += 1,
                ObjectState::Gone(Reason::Other(_)) => counts.other += 1,
                ObjectState::Gone(_) => given_up.push((object.key, object.form.pool, object.form.tile)),
                ObjectState::Cleared => counts.cleared += 1,
            }
        }
        if !given_up.is_empty() {
            let wanted: HashSet<_> = given_up.iter().copied().collect();
            let live = namespace.objects().filter(|object| object.state == ObjectState::Live);
            let stored_again: HashSet<_> = live
                .map(|object| (object.key, object.form.pool, object.form.tile))
                .filter(|object| wanted.contains(object))
                .collect();
            counts.healed = given_up.iter().filter(|object| stored_again.contains(object)).count() as u64;
            counts.quarantined = given_up.len() as u64 - counts.healed;
        }
        counts
    }

    /// Adds those of another namespace.
    pub fn add(&mut self, other: &Objects) {
        self.live += other.live;
        self.live_bytes = self.live_bytes.saturating_add(other.live_bytes);
        self.quarantined += other.quarantined;
        self.healed += other.healed;
        self.evicted += other.evicted;
        self.expired += other.expired;
        self.duplicate += other.duplicate;
        self.cleared += other.cleared;
        self.other += other.other;
    }

    /// As JSON.
    pub fn to_json(self) -> Value {
        json!({
            "live": self.live,
            "live_stored_bytes": self.live_bytes,
            "quarantined": self.quarantined,
            "healed": self.healed,
            "evicted": self.evicted,
            "expired": self.expired,
            "duplicate": self.duplicate,
            "cleared": self.cleared,
            "other": self.other,
        })
    }
}

/// Live objects and their stored bytes for each form, by pool name and tile.
pub fn forms(namespace: &NamespaceScan) -> Vec<(Form, u64, u64)> {
    let mut counts: HashMap<&Form, (u64, u64)> = HashMap::new();
    for object in namespace.objects().filter(|object| object.state == ObjectState::Live) {
        let (objects, bytes) = counts.entry(object.form).or_default();
        *objects += 1;
        *bytes = bytes.saturating_add(object.stored_bytes());
    }
    let mut forms: Vec<_> =
        counts.into_iter().map(|(form, (objects, bytes))| (*form, objects, bytes)).collect();
    forms.sort_by_key(|(form, ..)| {
        (namespace.pool_name(&form.pool), form.pool, form.tile, form.layout.name(), form.codec)
    });
    forms
}

/// Names of the pools, each once.
pub fn pool_names(namespace: &NamespaceScan) -> Vec<String> {
    let mut names: Vec<String> = namespace.pools.values().map(|pool| pool.name().to_owned()).collect();
    names.sort();
    names.dedup();
    names
}

/// A rectangle as JSON: half-open layers and heads, and the token lattice.
pub fn tile_json(tile: &Tile) -> Value {
    let tokens = &tile.tokens;
    json!({
        "layers": [tile.layers.start, tile.layers.end],
        "heads": [tile.heads.start, tile.heads.end],
        "tokens": {"first": tokens.first, "step": tokens.step, "count": tokens.count},
    })
}

/// A rectangle in few words: tokens are named only where they are not the whole page.
pub fn tile_text(tile: &Tile, page_size: Option<u32>) -> String {
    let (layers, heads, tokens) = (&tile.layers, &tile.heads, &tile.tokens);
    let text = format!("layers {}..{} heads {}..{}", layers.start, layers.end, heads.start, heads.end);
    if tokens.first == 0 && tokens.step == 1 && page_size == Some(tokens.count) {
        return text;
    }
    format!("{text} tokens {}+{}x{}", tokens.first, tokens.step, tokens.count)
}

/// The problems of a scan as JSON.
pub fn problems_json(scan: &RootScan) -> Value {
    let problem = |problem: &Problem| {
        json!({
            "kind": problem.kind.name(),
            "path": path_text(scan.relative(&problem.path)),
            "message": problem.message,
        })
    };
    scan.problems.iter().map(problem).collect()
}

/// Says the problems of a scan in words.
pub fn say_problems(scan: &RootScan, output: &mut Output<'_>) {
    for problem in &scan.problems {
        let path = path_text(scan.relative(&problem.path));
        let path = if path.is_empty() { ".".to_owned() } else { path };
        output.words(&format!("problem ({}): {path}: {}", problem.kind.name(), problem.message));
    }
}

/// Exit code of a command that only looked: problems are those that somebody should look at.
pub fn verdict(scan: &RootScan) -> i32 {
    if scan.problems.iter().any(|problem| problem.kind.is_alarming()) { PROBLEMS } else { FINE }
}

/// Counts by name.
pub fn counters_json(scan: &RootScan) -> Value {
    let totals: BTreeMap<&str, u64> =
        scan.counters.iter().map(|(counter, value)| (counter.name(), *value)).collect();
    json!(totals)
}
