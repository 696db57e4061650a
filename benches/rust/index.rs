//! How many pages a second does `match` look up in an index of a million objects, every answer checked?

use std::time::Instant;

use crate::measure::{Spread, chains, fill, folder, open, tiny_view};

const OBJECTS: usize = 1_000_000;
const ROUNDS: usize = 9;

/// Prints pages per second on one core.
pub fn run() {
    let folder = folder();
    let store = open(folder.path());
    let view = tiny_view(&store);
    let chains = chains(OBJECTS);
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
    println!(
        "match: {objects} objects, {} chains, one core: {} M pages/s (bar 5)",
        chains.len(),
        Spread::of(rates)
    );
}
