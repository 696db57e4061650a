//! How fast does the processor copy pages between layouts, against `memcpy` in the same run, and how long does a plan take?

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use hicache_core::transfer::{Memory, Placed, PoolSlots, TransferPlan, TransferPool, copy_pages};
use hicache_core::{Component, CopyPlan, DType, Layout, LayoutName, Pool, PoolKind, Span, Tile};
use hicache_sys::Region;

use crate::measure::Spread;

const PAGES: u64 = 16;
const ROUNDS: usize = 9;

/// Prints the ratio to `memcpy` for pages of 8 MiB on one core, and the time of a plan.
pub fn run() {
    for (heads, group) in [(8, 8), (8, 4), (8, 1)] {
        report_mha(heads, group);
    }
    report_plan();
}

/// Seconds that this thread had the processor for `work`; those of the clock where the system does not tell.
fn seconds(work: impl FnOnce()) -> f64 {
    let on_processor = || -> Option<f64> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        Some(text.split_whitespace().next()?.parse::<f64>().ok()? / 1e9)
    };
    let (before, started) = (on_processor(), Instant::now());
    work();
    match (before, on_processor()) {
        (Some(before), Some(after)) if after > before => after - before,
        _ => started.elapsed().as_secs_f64(),
    }
}

fn pool(row_bytes: u32, components: &[&str]) -> Pool {
    let components = components.iter().map(|name| Component::per_token(name, row_bytes)).collect();
    Pool::new("kv", PoolKind::Kv, DType::parse("bfloat16").expect("a type"), None, components)
        .expect("a pool")
}

/// 32 layers, 64 tokens, 8 heads of 128 elements of 16 bit, K and V: 8 MiB.
fn report_mha(heads: u32, heads_per_group: u32) {
    let pool = pool(256, &["k", "v"]);
    let span = |end| Span { start: 0, end };
    let tile = Tile::whole_page(span(32), span(heads), 64).expect("a tile");
    let first = LayoutName::PageFirst;
    let unified = LayoutName::PageUnified { heads_per_group };
    let cases = [(first, unified), (unified, first), (unified, unified)];
    for (from, to) in cases {
        let side = |name| {
            let layout = Layout::host(name, &pool, &tile, PAGES, false).expect("a layout");
            let region = Region::owned(layout.buffer_bytes[0] as usize);
            region.copy_in(0, &vec![7; region.len()]).expect("written");
            (layout, Arc::new(region))
        };
        let ((src, from_memory), (dst, to_memory)) = (side(from), side(to));
        let plan = CopyPlan::between(&src, &dst, &tile).expect("a plan");
        let slots: Vec<i64> = (0..PAGES as i64).collect();
        let scattered: Vec<i64> = slots.iter().map(|slot| slot * 5 % PAGES as i64).collect();
        let one = |(from, to): (&i64, &i64)| {
            PoolSlots::new(&[*from], &[*to], plan.src(), plan.dst()).expect("slots")
        };
        let pages: Vec<PoolSlots> = slots.iter().zip(&scattered).map(one).collect();
        let bytes = from_memory.len() as f64;
        let page = plan.bytes() as usize;
        let (mut ratios, mut plain, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        let (from_regions, to_regions) = ([Arc::clone(&from_memory)], [Arc::clone(&to_memory)]);
        for _ in 0..ROUNDS {
            // Page by page in turn, so that what else the machine does meets both alike.
            let (mut memcpy, mut copied) = (0.0, 0.0);
            for one in &pages {
                let (from, to) = one.pairs().next().expect("a page");
                let (from, to) = (from * page as u64, to * page as u64);
                memcpy += seconds(|| {
                    from_memory
                        .with_bytes(from, page as u64, |bytes| to_memory.copy_in(to, bytes))
                        .expect("inside")
                        .expect("inside");
                });
                copied += seconds(|| copy_pages(&plan, &from_regions, &to_regions, one).expect("copied"));
            }
            plain.push(bytes / memcpy / 1e9);
            rates.push(bytes / copied / 1e9);
            ratios.push(memcpy / copied);
        }
        let bar = if from == to { 0.95 } else { 0.5 };
        println!(
            "RESULT: copy: {from} to {to}, {PAGES} pages of {page} bytes, one core: {} x memcpy (bar {bar}); {} GB/s, memcpy {} GB/s",
            Spread::of(ratios),
            Spread::of(rates),
            Spread::of(plain)
        );
    }
}

/// 61 layers of latent rows of 576 elements of 16 bit, 64 tokens a page, 128 pages, one tensor a layer.
fn report_plan() {
    let pool = pool(1152, &["latent"]);
    let tile =
        |start, end| Tile::whole_page(Span { start, end }, Span { start: 0, end: 1 }, 64).expect("a tile");
    // Memory is lent by address, so that no 578 MiB are taken.
    let lent = |layout: &Layout| {
        let buffers = layout
            .buffer_bytes
            .iter()
            .map(|&bytes| hicache_core::transfer::DeviceBuffer { address: 1 << 40, bytes });
        Memory::Device(buffers.collect::<Vec<_>>().into())
    };
    let host = Layout::host(LayoutName::PageFirst, &pool, &tile(0, 61), 128, false).expect("a layout");
    let device: Vec<Layout> = (0..61)
        .map(|layer| {
            Layout::host(LayoutName::LayerFirst, &pool, &tile(layer, layer + 1), 4096, false)
                .expect("a layout")
        })
        .collect();
    let placed = |layout: &Layout| Placed { memory: lent(layout), layout: layout.clone() };
    let slots: Vec<i64> = (0..128).collect();
    let times = (0..101).map(|_| {
        let pools = vec![TransferPool {
            name: "latent".into(),
            host: placed(&host),
            device: device.iter().map(placed).collect(),
            first_step: 0,
        }];
        let started = Instant::now();
        let plan = TransferPlan::new(black_box(pools)).expect("a plan");
        let slots = plan.restore_slots(&[(&slots, &slots)]).expect("slots");
        let taken = started.elapsed().as_secs_f64() * 1e6;
        assert_eq!(black_box(slots).pools[0].source().len() * plan.restore().len(), 128 * 61);
        taken
    });
    println!("RESULT: plan: 61 latent layers, 128 pages: {} us (bar 100)", Spread::of(times.collect()));
}
