//! How much smaller are real pages with zstd level 1 and byte planes, and at what speed?

use std::time::Instant;

use hicache_core::format::block::{decode_block, encode_block};
use hicache_core::format::form::Codec;

use crate::measure::Spread;

const BLOCK_BYTES: usize = 64 << 10;
const ROUNDS: usize = 7;

/// Prints ratio and speed for one real page in bfloat16.
pub fn run() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/kv/smollm2_tau0_bf16_page0.bin.zst");
    let packed = std::fs::read(path).expect("the sample page");
    let page = zstd::bulk::decompress(&packed, 16 << 20).expect("a zstd file");
    report(&page);
}

fn report(page: &[u8]) {
    for codec in [Codec::Zstd, Codec::ZstdPlanes] {
        let (mut packing, mut unpacking, mut ratio) = (Vec::new(), Vec::new(), 0.0);
        for _ in 0..ROUNDS {
            let started = Instant::now();
            let blocks: Vec<Vec<u8>> = page
                .chunks(BLOCK_BYTES)
                .map(|raw| {
                    let mut out = Vec::new();
                    encode_block(codec, 1, raw, &mut out).expect("compressed");
                    out
                })
                .collect();
            packing.push(page.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
            let started = Instant::now();
            let mut raw = vec![0; BLOCK_BYTES];
            for (block, original) in blocks.iter().zip(page.chunks(BLOCK_BYTES)) {
                assert!(decode_block(codec, block, &mut raw[..original.len()]));
                assert!(raw[..original.len()] == *original);
            }
            unpacking.push(page.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
            ratio = page.len() as f64 / blocks.iter().map(Vec::len).sum::<usize>() as f64;
        }
        let bar = if codec == Codec::ZstdPlanes { " (bar 1.42)" } else { "" };
        println!(
            "RESULT: compression: real bfloat16 page, {} level 1: {ratio:.3} x{bar}; pack {} GB/s, unpack {} GB/s",
            codec.name(),
            Spread::of(packing),
            Spread::of(unpacking)
        );
    }
}
