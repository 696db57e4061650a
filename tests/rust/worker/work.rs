//! Work without being asked: random or in order, until it is halted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hicache_tests::deployment::Numbers;

use crate::pages::Pages;
use crate::{fail, number, say};

/// What to do.
///
/// `seed`; `seconds` and `pages`, after which it ends by itself (pages stored by this work); `write`, percent of
/// calls that are backups; `first` and `chains`, the chains; `length` of the longest prefix in pages; `order`, 1 to
/// take the chains one after the other, each whole; `tolerant`, 1 where files are damaged on purpose.
pub struct Spec {
    seed: u64,
    seconds: u64,
    pages: u64,
    write: u64,
    first: u64,
    chains: u64,
    length: u64,
    is_ordered: bool,
    is_tolerant: bool,
}

impl Spec {
    /// Of words.
    pub fn parse(values: &HashMap<&str, &str>) -> Spec {
        Spec {
            seed: number(values, "seed", 1),
            seconds: number(values, "seconds", 600),
            pages: number(values, "pages", u64::MAX),
            write: number(values, "write", 50),
            first: number(values, "first", 0),
            chains: number(values, "chains", u64::MAX),
            length: number(values, "length", 8),
            is_ordered: number(values, "order", 0) == 1,
            is_tolerant: number(values, "tolerant", 0) == 1,
        }
    }
}

/// Works, tells each backup, and sums up in a line `worked backups=.. restores=.. matched=.. restored=..`.
pub fn run(pages: &Pages, spec: &Spec, halted: &AtomicBool) {
    let deadline = Instant::now() + Duration::from_secs(spec.seconds);
    let mut numbers = Numbers(spec.seed);
    let (mut backups, mut restores, mut matched, mut restored, mut stored) = (0_u64, 0_u64, 0, 0, 0);
    while !halted.load(Ordering::SeqCst) && Instant::now() < deadline && stored < spec.pages {
        let (chain, length) = match spec.is_ordered {
            true => (spec.first + backups % spec.chains, spec.length),
            false => (spec.first + numbers.below(spec.chains), 1 + numbers.below(spec.length)),
        };
        if numbers.below(100) < spec.write {
            let backed = pages.backup(chain, 0..length as usize);
            if backed.letters.contains('e') && !spec.is_tolerant {
                fail(&backed.line());
            }
            stored += backed.letters.matches('s').count() as u64;
            backups += 1;
            say(&backed.line());
        } else {
            let promised = pages.matched(chain, length as usize);
            let letters = pages.restore(chain, 0..length as usize);
            if letters.contains(['e', 'f', 'd']) && !spec.is_tolerant {
                fail(&format!("restore of chain {chain}: {letters}"));
            }
            restores += 1;
            matched += promised;
            restored += letters.matches('r').count();
        }
    }
    say(&format!("worked backups={backups} restores={restores} matched={matched} restored={restored}"));
}

/// Stores and restores `chains` chains of `length` pages from several threads; pages that cannot be had are counted.
pub fn storm(pages: &Pages, threads: u64, chains: u64, length: usize) -> String {
    let totals: [AtomicU64; 4] = Default::default();
    let count = &|total: usize, letters: &str, wanted: char| {
        totals[total].fetch_add(letters.matches(wanted).count() as u64, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for chain in (0..chains).filter(|chain| chain % threads == thread) {
                    let letters = pages.backup(chain, 0..length).letters;
                    count(0, &letters, 's');
                    let letters = pages.restore(chain, 0..length);
                    count(1, &letters, 'r');
                    count(2, &letters, 'e');
                    count(3, &letters, 'a');
                }
            });
        }
    });
    let [stored, restored, error, absent] = totals.each_ref().map(|total| total.load(Ordering::Relaxed));
    format!("stormed stored={stored} restored={restored} error={error} absent={absent}")
}
