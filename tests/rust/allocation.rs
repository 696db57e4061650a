//! The processor carries a plan out without taking memory. A program of its own, since it has an allocator of its own.

use std::hint::black_box;
use std::sync::Arc;

use hicache_core::transfer::{
    CpuCopies, Memory, Placed, PoolSlots, Slots, TransferPlan, TransferPool, copy_pages,
};
use hicache_core::{
    Component, CopyPlan, DType, Layout, LayoutName, Pool, PoolKind, RowUnit, Span, Tile, TokenLattice,
};
use hicache_sys::Region;
use hicache_sys::allocations::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const LAYERS: u32 = 3;
const SLOTS: u64 = 5;
const NAMES: [LayoutName; 6] = [
    LayoutName::LayerFirst,
    LayoutName::PageFirst,
    LayoutName::PageFirstDirect,
    LayoutName::PageHead,
    LayoutName::PageUnified { heads_per_group: 1 },
    LayoutName::PageUnified { heads_per_group: 4 },
];

/// How often `work` takes memory.
fn taken(work: impl FnOnce()) -> u64 {
    let before = allocations();
    work();
    allocations() - before
}

fn span(start: u32, end: u32) -> Span {
    Span { start, end }
}

fn pool(name: &str, kind: PoolKind, components: &[(&str, u32, RowUnit)]) -> Pool {
    let components = components
        .iter()
        .map(|&(name, row_bytes, unit)| Component { unit, ..Component::per_token(name, row_bytes) })
        .collect();
    Pool::new(name, kind, DType::UInt8, None, components).unwrap()
}

/// Keys and values of 4 heads, and a row for each page.
fn pools() -> [(Pool, Tile); 2] {
    let tile = |heads| Tile::whole_page(span(0, LAYERS), span(0, heads), 6).unwrap();
    let kv = [("k", 24, RowUnit::Token), ("v", 40, RowUnit::Token)];
    [
        (pool("kv", PoolKind::Kv, &kv), tile(4)),
        (pool("indexer", PoolKind::Indexer, &[("i", 100, RowUnit::Page)]), tile(1)),
    ]
}

fn fits(name: LayoutName, tile: &Tile) -> bool {
    !matches!(name, LayoutName::PageUnified { heads_per_group } if heads_per_group > tile.heads.len())
}

fn memory(layout: &Layout, value: u8) -> Vec<Arc<Region>> {
    let region = |&bytes: &u64| {
        let region = Region::owned(bytes as usize);
        region.copy_in(0, &vec![value; bytes as usize]).unwrap();
        Arc::new(region)
    };
    layout.buffer_bytes.iter().map(region).collect()
}

/// Whether a byte of any buffer is `value`.
fn has(memory: &[Arc<Region>], value: u8) -> bool {
    memory
        .iter()
        .any(|region| region.with_bytes(0, region.len() as u64, |bytes| bytes.contains(&value)).unwrap())
}

#[test]
fn what_takes_memory_is_counted() {
    assert_eq!(taken(|| drop(black_box(Vec::<u8>::with_capacity(100)))), 1);
    assert_eq!(taken(|| drop(black_box(vec![0_u8; 100]))), 1);
    let mut grown = vec![1_u8; 100];
    assert_eq!(taken(|| grown.reserve(1000)), 1);
    black_box(grown);
    assert_eq!(taken(|| assert_eq!(black_box([7_u8; 100])[99], 7)), 0);
}

#[test]
fn pages_are_copied_without_taking_memory() {
    for (pool, tile) in pools() {
        // All tokens of a page, and every second one.
        for tokens in [tile.tokens, TokenLattice::new(0, 2, 3)] {
            let rect = Tile { tokens, ..tile };
            for from in NAMES.into_iter().filter(|&name| fits(name, &tile)) {
                for to in NAMES.into_iter().filter(|&name| fits(name, &tile)) {
                    let src = Layout::host(from, &pool, &tile, SLOTS, false).unwrap();
                    let dst = Layout::host(to, &pool, &tile, SLOTS, false).unwrap();
                    let plan = CopyPlan::between(&src, &dst, &rect).unwrap();
                    let (from_memory, to_memory) = (memory(&src, 7), memory(&dst, 0));
                    let slots = [0, 1, 2, -1, 4];
                    let slots = PoolSlots::new(&slots, &[4, -1, 2, 1, 0], plan.src(), plan.dst()).unwrap();
                    let count =
                        taken(|| copy_pages(&plan, &from_memory, &to_memory, black_box(&slots)).unwrap());
                    assert_eq!(count, 0, "{from} to {to}");
                    assert!(has(&to_memory, 7), "{from} to {to}: nothing was copied");
                }
            }
        }
    }
}

/// A plan from host pages to one tensor a layer, and slots for it.
fn layers(host: LayoutName) -> (TransferPlan, Slots, Slots, Vec<Vec<Arc<Region>>>) {
    let mut device_memory = Vec::new();
    let planned = pools().into_iter().map(|(pool, tile)| {
        let layout = Layout::host(
            if fits(host, &tile) { host } else { LayoutName::PageFirst },
            &pool,
            &tile,
            SLOTS,
            false,
        );
        let layout = layout.unwrap();
        let device = (0..LAYERS).map(|layer| {
            let tile = Tile { layers: span(layer, layer + 1), ..tile };
            let layout = Layout::host(LayoutName::LayerFirst, &pool, &tile, SLOTS, true).unwrap();
            let rows = memory(&layout, 0);
            device_memory.push(rows.clone());
            Placed { layout, memory: Memory::Host(rows.into()) }
        });
        let device = device.collect();
        let host = Placed { memory: Memory::Host(memory(&layout, 7).into()), layout };
        TransferPool { name: pool.name().to_owned(), host, device, first_step: 0 }
    });
    let plan = TransferPlan::new(planned.collect()).unwrap();
    let pages: (&[i64], &[i64]) = (&[0, 3, 1, 4], &[2, 0, 4, 3]);
    let (restore, backup) =
        (plan.restore_slots(&[pages; 2]).unwrap(), plan.backup_slots(&[pages; 2]).unwrap());
    (plan, restore, backup, device_memory)
}

#[test]
fn layers_are_restored_and_backed_up_without_taking_memory() {
    let copies = CpuCopies::new(1).unwrap();
    for host in NAMES {
        let (plan, restore, backup, device) = layers(host);
        for step in plan.restore() {
            assert_eq!(taken(|| copies.copy_now(step, black_box(&restore)).unwrap()), 0, "{host}, restore");
        }
        assert!(device.iter().all(|rows| has(rows, 7)), "{host}: nothing was copied");
        // Plans of the other direction are made at their first use, which is no copy.
        for step in plan.backup() {
            assert_eq!(taken(|| copies.copy_now(step, black_box(&backup)).unwrap()), 0, "{host}, backup");
        }
    }
}
