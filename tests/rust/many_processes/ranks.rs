//! The ranks of one deployment keep the same pages: what all can restore is nearly what the best one can.

use hicache_tests::deployment::Numbers;

use super::driver::{Worker, sized, taken_bytes};
use crate::support::fast_folder;

const RANKS: usize = 8;
const CAPACITY: u64 = 16 << 20;
/// Of one rank: a page of all ranks is 128 KiB.
const PAGE: u64 = 16 << 10;
const LENGTH: usize = 8;
/// Four times the capacity.
const CHAINS: u64 = 4 * CAPACITY / (PAGE * RANKS as u64 * LENGTH as u64);

/// Answers of all ranks to the same line, worked on at the same time.
fn all<R>(ranks: &mut [Worker], line: &str, word: &str, parse: impl Fn(&str) -> R) -> Vec<R> {
    ranks.iter_mut().for_each(|rank| rank.tell(line));
    ranks.iter_mut().map(|rank| parse(&rank.answer(word))).collect()
}

#[test]
fn what_all_ranks_have_is_nearly_what_the_best_one_has() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let start = |rank| {
        Worker::start(&root, &format!("page={PAGE} capacity={CAPACITY} rank={rank} ranks={RANKS} threads=1"))
    };
    let mut ranks: Vec<Worker> = (0..RANKS).map(start).collect();
    let requests = sized(300, 3000);
    let mut numbers = Numbers(5);
    let mut recent: Vec<u64> = Vec::new();
    let (mut agreed, mut of_rank, mut refused) = (0, [0; RANKS], 0);
    for _ in 0..requests {
        // Mostly what was asked a short time ago, else anything.
        let chain = match recent.len() {
            len @ 1.. if numbers.below(10) < 7 => {
                recent[len - 1 - numbers.below(len.min(10) as u64) as usize]
            }
            _ => numbers.below(CHAINS),
        };
        recent.retain(|&other| other != chain);
        recent.push(chain);
        let matched = all(&mut ranks, &format!("match {chain} {LENGTH}"), "matched", |text| {
            text.parse::<usize>().unwrap()
        });
        let common = *matched.iter().min().unwrap();
        agreed += common;
        of_rank.iter_mut().zip(&matched).for_each(|(sum, pages)| *sum += pages);
        if common > 0 {
            let letters = all(&mut ranks, &format!("restore {chain} 0 {common}"), "restored", str::to_owned);
            assert!(
                letters.iter().all(|letters| letters.chars().all(|letter| "rav".contains(letter))),
                "{letters:?}"
            );
        }
        let backed = all(&mut ranks, &format!("backup {chain} 0 {LENGTH}"), "backed", str::to_owned);
        refused += backed
            .iter()
            .filter(|line| super::driver::Backed::parse(line).letters.contains(['r', 'e']))
            .count();
    }
    let best = *of_rank.iter().max().unwrap();
    let share = agreed as f64 / best as f64;
    let hit = best as f64 / (requests * LENGTH) as f64;
    println!(
        "RESULT: 8 ranks, capacity a quarter of the pages: agreed hit {share:.3} of the best rank's, which is {hit:.3}; \
         {refused} backups refused (bar 0.98)"
    );
    assert!(taken_bytes(&root) <= CAPACITY, "{} bytes taken", taken_bytes(&root));
    assert_eq!(refused, 0, "room is made for every page");
    assert!(share >= 0.98, "agreed {agreed} pages, best rank {best}, all {of_rank:?}");
    // Ten recent chains fit: those asks hit, and some of the others do.
    assert!(hit >= 0.5, "the best rank hits {hit}");
}
