//! How many pages a second does `match` look up in an index of a million objects, every answer checked?

use std::time::Instant;

use hicache_core::{ChainStart, PoolMemory, View};
use hicache_sys::Region;

use crate::measure::{Chain, LONGEST, Spread, chains, fill, folder, open, tiny_view};

const OBJECTS: usize = 1_000_000;
/// Of the second case, in which every page is a unit of its own.
const SINGLE_OBJECTS: usize = 200_000;
const ROUNDS: usize = 9;

/// Prints pages per second on one core.
pub fn run() {
    measure("chains stored whole (bar 5)", OBJECTS, fill);
    measure("every page stored by itself", SINGLE_OBJECTS, fill_singly);
}

fn measure(case: &str, objects: usize, fill: fn(&View, &[Chain]) -> usize) {
    let folder = folder();
    let store = open(folder.path());
    let view = tiny_view(&store);
    let chains = chains(objects);
    let objects = fill(&view, &chains);
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let mut pages = 0;
        for chain in &chains {
            let found = view.match_prefix(&chain.keys).expect("an answer");
            assert_eq!(found.pages, chain.stored);
            // A hole ends the look-up: only what was looked at counts.
            pages += found.pages;
        }
        rates.push(pages as f64 / started.elapsed().as_secs_f64() / 1e6);
    }
    let (chains, rate) = (chains.len(), Spread::of(rates));
    println!("RESULT: match: {objects} objects in {chains} chains, {case}, one core: {rate} M pages/s");
}

/// Stores every page with a call of its own, chains mixed, as a decoding engine does.
fn fill_singly(view: &View, chains: &[Chain]) -> usize {
    let memory = Region::owned(16);
    let mut objects = 0;
    for page in 0..LONGEST {
        for chain in chains.iter().filter(|chain| page < chain.keys.len() && page != chain.stored) {
            let start =
                ChainStart { parent: page.checked_sub(1).map(|before| chain.keys[before]), depth: None };
            let memory = vec![PoolMemory { regions: vec![&memory], slots: &[0] }];
            let report = view.backup(&chain.keys[page..=page], memory, start).expect("a backup");
            assert!(report.reason.is_none(), "{:?}", report.reason);
            objects += 1;
        }
    }
    objects
}
