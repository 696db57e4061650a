//! The mutation gate as a table: rule, schedules until it was missed, the invariant that missed it.
//!
//! ```text
//! cargo run --release -p hicache-ranks --features simulator --example gate -- [schedules]
//! ```

use hicache_ranks::Rules;
use hicache_ranks::rules::Rule;
use hicache_ranks::sim::{explore, mutation_gate, worlds_against};

fn main() {
    let limit = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(2_000);
    for rule in Rule::ALL {
        for mut world in worlds_against(rule, Rules::ALL) {
            if let Err(failure) = explore(world.as_mut(), 0, limit.min(200)) {
                println!("with all rules: {failure}");
                std::process::exit(1);
            }
        }
    }
    let mut missed = 0;
    for result in mutation_gate(limit) {
        match result.caught {
            Some((schedules, failure)) => {
                println!("{:<24} {schedules:>5}  {}", format!("{:?}", result.rule), failure.violation);
            }
            None => {
                missed += 1;
                println!("{:<24} not caught in {limit}", format!("{:?}", result.rule));
            }
        }
    }
    println!("{missed} rules can be lost unseen");
    std::process::exit(i32::from(missed > 0));
}
