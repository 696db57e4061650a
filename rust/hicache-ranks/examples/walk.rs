//! A long walk over all worlds, topologies and faults; ends at the first violation, which it shrinks.
//!
//! ```text
//! cargo run --release -p hicache-ranks --features simulator --example walk -- [schedules] [first seed]
//! ```

use hicache_ranks::sim::{MixedWorld, explore, shrink};

fn main() {
    let mut arguments = std::env::args().skip(1).filter_map(|text| text.parse().ok());
    let (count, first) = (arguments.next().unwrap_or(1_000_000), arguments.next().unwrap_or(0));
    let mut world = MixedWorld::new(30);
    match explore(&mut world, first, count) {
        Ok(()) => println!("RESULT: {count} schedules from seed {first} on, no violation"),
        Err(failure) => {
            println!("{failure}\nshrunk: {}", shrink(&mut world, &failure, 4000));
            std::process::exit(1);
        }
    }
}
