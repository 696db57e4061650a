//! How many pages a second does `match` look up in an index of a million objects, every answer checked?

use std::time::Instant;

use hicache_core::View;

use crate::measure::{Chain, Spread, chains, fill, fill_singly, folder, open, tiny_view};

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
