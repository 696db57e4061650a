//! What writers reported as stored, held against what the root has in the end.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use hicache_core::format::frame::{
    AddRun, AddUnit, FrameKind, Location, Reason, ShortKey, Step, decode_add, decode_gone, short_key, step,
};
use hicache_core::inspect::{ObjectState, RootScan, scan};
use hicache_tests::deployment::{Deployment, keys};

use super::driver::{Backed, Worker};
use crate::support::files_ending;

/// Longest chain of these tests, in pages.
const LONGEST: usize = 64;

/// Pages reported as stored, with the segments that they went to.
#[derive(Default)]
pub struct Ledger {
    pages: BTreeMap<(u64, usize), BTreeSet<Option<String>>>,
    /// How many times a page was reported as stored.
    pub reports: usize,
    /// Backups that refused pages.
    pub refusals: usize,
}

/// What became of the reported pages.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Live and exact.
    pub exact: usize,
    /// Told as removed to make room, or with their segment.
    pub evicted: usize,
}

impl Ledger {
    /// Takes in lines of a worker.
    pub fn take(&mut self, lines: impl IntoIterator<Item = String>) {
        for backed in lines.into_iter().filter_map(|line| Backed::of_line(&line)) {
            for page in backed.stored() {
                self.reports += 1;
                self.pages.entry((backed.chain, page)).or_default().insert(backed.segment.clone());
            }
            self.refusals += usize::from(backed.letters.contains('r'));
        }
    }

    /// Holds everything against the root with a fresh worker. Every reported page is live and exact, or was removed
    /// to make room.
    pub fn settle(&self, root: &Path, deployment: &Deployment, options: &str) -> Verdict {
        let mut verdict = Verdict::default();
        let mut worker = Worker::start(root, options);
        // What the dead left is finished by the open; a look at the namespace makes sure of it.
        worker.matched(u64::MAX, 1);
        let found = scan(root).unwrap();
        let states = states(&found, deployment);
        let folder = root.join("ns").join(deployment.namespace().unwrap().fingerprint().to_string());
        let mut removes = removed_and_forgotten(root);
        let mut chain_keys: HashMap<u64, Vec<ShortKey>> = HashMap::new();
        for ((chain, page), segments) in &self.pages {
            let keys = chain_keys
                .entry(*chain)
                .or_insert_with(|| keys(*chain, LONGEST).iter().map(short_key).collect());
            let states = states.get(&keys[*page]).map_or(&[][..], Vec::as_slice);
            if states.contains(&ObjectState::Live) {
                let letters = worker.restore(*chain, *page..*page + 1);
                if letters == "r" {
                    verdict.exact += 1;
                    continue;
                }
                // Room is kept ahead on the side: then it has left since the scan.
                let now = self::states(&scan(root).unwrap(), deployment);
                let is_live = now.get(&keys[*page]).is_some_and(|now| now.contains(&ObjectState::Live));
                assert!(
                    letters == "a" && !is_live,
                    "page {page} of chain {chain} is live and gives {letters:?}"
                );
                verdict.evicted += 1;
                continue;
            }
            let is_room = |state: &ObjectState| {
                use Reason::{Duplicate, Evicted, Expired};
                matches!(state, ObjectState::Gone(Evicted | Duplicate | Expired))
            };
            let bad: Vec<_> = states.iter().filter(|state| !is_room(state)).collect();
            assert!(bad.is_empty(), "page {page} of chain {chain} was published and is {bad:?}");
            if states.is_empty() {
                // A unit of which all left may be forgotten, the removes of a segment that is there may not.
                for name in segments.iter().flatten().filter(|name| folder.join(name).exists()) {
                    let left = removes.get_mut(name).filter(|left| **left > 0);
                    let left = left.unwrap_or_else(|| {
                        panic!("page {page} of chain {chain} was published to {name}; nobody removed it and it is lost")
                    });
                    *left -= 1;
                }
            }
            verdict.evicted += 1;
        }
        worker.close();
        verdict
    }
}

/// For each segment, how many objects were removed to make room of which no journal tells any more.
fn removed_and_forgotten(root: &Path) -> HashMap<String, usize> {
    let (mut told, mut removed) = (BTreeSet::new(), BTreeSet::new());
    for journal in files_ending(root, ".idx") {
        let bytes = std::fs::read(journal).unwrap();
        let mut at = 0;
        loop {
            match step(&bytes, at) {
                Step::Frame(frame, next) => {
                    at = next;
                    match frame.kind {
                        FrameKind::Add => {
                            let mut run = |unit: &AddUnit, run: AddRun<'_>| {
                                told.insert((unit.segment.file_name(), run.entries_offset));
                            };
                            decode_add(frame.body, &mut run).unwrap();
                        }
                        FrameKind::Remove => {
                            for record in decode_gone(frame.body).unwrap() {
                                let Location { segment, entries_offset, ordinal } = record.location;
                                let ordinals = ordinal..ordinal + record.objects;
                                let places =
                                    ordinals.map(|ordinal| (segment.file_name(), entries_offset, ordinal));
                                removed.extend(places);
                            }
                        }
                        _ => {}
                    }
                }
                Step::Damaged(next) => at = next,
                Step::Incomplete => break,
            }
        }
    }
    let mut counts = HashMap::new();
    for (segment, entries_offset, _) in removed {
        if !told.contains(&(segment.clone(), entries_offset)) {
            *counts.entry(segment).or_default() += 1;
        }
    }
    counts
}

/// States of all objects of one rank, by key.
pub fn states(found: &RootScan, deployment: &Deployment) -> HashMap<ShortKey, Vec<ObjectState>> {
    let mut states: HashMap<ShortKey, Vec<ObjectState>> = HashMap::new();
    let fingerprint = deployment.namespace().unwrap().fingerprint();
    let tile = deployment.pool().unwrap().tile;
    for object in found.namespace(&fingerprint).into_iter().flat_map(|namespace| namespace.objects()) {
        if object.form.tile == tile {
            states.entry(object.key).or_default().push(object.state);
        }
    }
    states
}

/// Live copies of each page of a chain's first `pages`.
pub fn live_copies(root: &Path, deployment: &Deployment, chain: u64, pages: usize) -> Vec<usize> {
    let states = states(&scan(root).unwrap(), deployment);
    let live = |key| {
        let states = states.get(&short_key(key)).map_or(&[][..], Vec::as_slice);
        states.iter().filter(|state| **state == ObjectState::Live).count()
    };
    keys(chain, pages).iter().map(live).collect()
}

/// Live objects of all namespaces.
pub fn live_objects(root: &Path) -> usize {
    let found = scan(root).unwrap();
    let objects = found.namespaces.iter().flat_map(|namespace| namespace.objects());
    objects.filter(|object| object.state == ObjectState::Live).count()
}
