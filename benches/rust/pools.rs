//! How long does it take to make a pool of 1 GiB whose pages all have their memory, against `mmap` and `memset` in the
//! same run?

use std::hint::black_box;
use std::time::Instant;

use hicache_core::HostPool;
use hicache_sys::memory::{MemoryOptions, Wish};

use crate::measure::Spread;

const SLOT_BYTES: u64 = 1 << 20;
const SLOTS: u64 = 1 << 10;
const ROUNDS: usize = 5;

/// One way to make the pool, and what was measured of it.
struct Case {
    name: String,
    options: MemoryOptions,
    got: String,
    rates: Vec<f64>,
    ratios: Vec<f64>,
}

impl Case {
    fn new(huge_pages: Wish, touch_threads: usize) -> Case {
        let pages =
            if huge_pages == Wish::Off { "ordinary pages" } else { "huge pages where they can be had" };
        Case {
            name: format!("{pages}, {touch_threads} threads"),
            options: MemoryOptions {
                huge_pages,
                touch_threads,
                register: Wish::Off,
                ..MemoryOptions::default()
            },
            got: String::new(),
            rates: Vec::new(),
            ratios: Vec::new(),
        }
    }
}

/// Prints how fast the pool is made with one and two threads, with and without huge pages, and what pages were got.
pub fn run() {
    let bytes = (SLOTS * SLOT_BYTES) as f64;
    let mut cases = [(Wish::Off, 1), (Wish::Off, 2), (Wish::Try, 1), (Wish::Try, 2)]
        .map(|(pages, threads)| Case::new(pages, threads));
    let mut plain = Vec::new();
    for _ in 0..ROUNDS {
        // So large an allocation is a mapping of its own, and filling it with ones is what gives it its pages.
        let started = Instant::now();
        let filled = black_box(vec![1_u8; (SLOTS * SLOT_BYTES) as usize]);
        let memset = started.elapsed().as_secs_f64();
        drop(filled);
        plain.push(bytes / memset / 1e9);
        for case in &mut cases {
            let started = Instant::now();
            let pool = HostPool::new(SLOTS, SLOT_BYTES, &case.options).expect("a pool");
            let made = started.elapsed().as_secs_f64();
            let report = pool.report().expect("an open pool");
            case.got =
                format!("{}, {} MiB on huge pages", report.words().join(", "), report.huge_bytes >> 20);
            case.rates.push(bytes / made / 1e9);
            case.ratios.push(memset / made);
        }
    }
    let plain = Spread::of(plain);
    for Case { name, got, rates, ratios, .. } in cases {
        println!(
            "RESULT: pool: 1 GiB, {name}: {} GB/s, {} x mmap and memset on one thread, {plain} GB/s; got {got}",
            Spread::of(rates),
            Spread::of(ratios)
        );
    }
    let setting = |name: &str| {
        let text = std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}"));
        text.map_or_else(|error| error.to_string(), |text| text.trim().to_owned())
    };
    println!("RESULT: pool: transparent huge pages on this machine: {}", setting("enabled"));
}
