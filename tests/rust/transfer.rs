//! The processor and the kernels' plans move exactly the rows of a plan, for every layout, on every slot.

use std::sync::Arc;

use crate::layouts::{layout_name, pool};
use crate::plans::{copy_rows, outer, pattern, poison};
use hicache_core::transfer::{
    CpuCopies, DeviceBuffer, DevicePlans, IndexUnit, Indices, LayerPlan, Memory, Placed, PoolIndices,
    PoolSlots, TransferPlan, TransferPool, copy_pages,
};
use hicache_core::{
    Component, CopyPlan, DType, ErrorKind, Layout, LayoutName, Pool, PoolKind, RowUnit, Span, Tile,
    TokenLattice,
};
use hicache_sys::Region;
use hicache_sys::segment_plan::{IndexSlice, IndexVector, IndexWidth, Memory as Lent, run_on_cpu};
use proptest::prelude::*;

/// Rows of real models: head sizes from 7 to 576, every item size.
fn wide_pool() -> impl Strategy<Value = Pool> {
    let row = (7..=576u32, prop::sample::select(vec![1u32, 2, 4, 8])).prop_map(|(dim, item)| dim * item);
    let unit = prop::sample::select(vec![RowUnit::Token, RowUnit::Token, RowUnit::Page]);
    prop::collection::vec((row, unit), 1..3).prop_map(|components| {
        let components = components.into_iter().enumerate().map(|(i, (row_bytes, unit))| Component {
            unit,
            ..Component::per_token(&i.to_string(), row_bytes)
        });
        Pool::new("kv", PoolKind::Kv, DType::UInt8, None, components.collect()).unwrap()
    })
}

fn rect() -> impl Strategy<Value = Tile> {
    // Heads enough for several whole groups on both sides.
    let span =
        |most| (0..3u32, 1..most).prop_map(|(start, len): (u32, u32)| Span { start, end: start + len });
    let tokens =
        (0..4u32, 1..4u32, 1..8u32).prop_map(|(first, step, count)| TokenLattice::new(first, step, count));
    (span(4u32), span(9u32), tokens).prop_map(|(layers, heads, tokens)| Tile { layers, heads, tokens })
}

/// A host layout of some slots over a tile that holds `rect`.
fn side(pool: Pool, rect: Tile) -> impl Strategy<Value = Layout> {
    (outer(rect), 2..5u64, any::<bool>(), 0..40u64).prop_flat_map(move |(tile, slots, split, before)| {
        let pool = pool.clone();
        layout_name(tile.heads.len()).prop_map(move |name| match name {
            LayoutName::PageUnified { .. } => {
                let page_bytes = before + pool.page_bytes(&tile).unwrap();
                Layout::packed(name, &pool, &tile, slots, before, page_bytes).unwrap()
            }
            _ => Layout::host(name, &pool, &tile, slots, split).unwrap(),
        })
    })
}

fn case() -> impl Strategy<Value = (Layout, Layout, Tile)> {
    (prop_oneof![pool(), wide_pool()], rect())
        .prop_flat_map(|(pool, rect)| (side(pool.clone(), rect), side(pool, rect), Just(rect)))
}

pub fn regions(buffers: &[Vec<u8>]) -> Vec<Arc<Region>> {
    let region = |bytes: &Vec<u8>| {
        let region = Region::owned(bytes.len());
        region.copy_in(0, bytes).unwrap();
        Arc::new(region)
    };
    buffers.iter().map(region).collect()
}

pub fn contents(regions: &[Arc<Region>]) -> Vec<Vec<u8>> {
    let bytes = |region: &Arc<Region>| {
        let mut out = vec![0; region.len()];
        region.copy_out(0, &mut out).unwrap();
        out
    };
    regions.iter().map(bytes).collect()
}

/// Pages to slots: each slot of the source once, to a slot of the destination, some to none.
fn slots(src: &Layout, dst: &Layout) -> (Vec<i64>, Vec<i64>) {
    let pages = src.slots.max(dst.slots);
    let slot = |page: u64, limit: u64| if page < limit { (limit - 1 - page) as i64 } else { -1 };
    let from = (0..pages).map(|page| (page % src.slots) as i64).collect();
    (from, (0..pages).map(|page| slot(page, dst.slots)).collect())
}

fn expected(
    src: &Layout,
    dst: &Layout,
    rect: &Tile,
    from: &[Vec<u8>],
    slots: (&[i64], &[i64]),
) -> Vec<Vec<u8>> {
    let mut to = poison(dst);
    for (&source, &destination) in slots.0.iter().zip(slots.1) {
        if source >= 0 && destination >= 0 {
            copy_rows(src, dst, rect, (source as u64, destination as u64), from, &mut to);
        }
    }
    to
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_processor_moves_what_its_rows_are((src, dst, rect) in case()) {
        let plan = CopyPlan::between(&src, &dst, &rect).unwrap();
        let (from_slots, to_slots) = slots(&src, &dst);
        let from = pattern(&src);
        let expected = expected(&src, &dst, &rect, &from, (&from_slots, &to_slots));
        let pairs = PoolSlots::new(&from_slots, &to_slots, plan.src(), plan.dst()).unwrap();
        let to = regions(&poison(&dst));
        copy_pages(&plan, &regions(&from), &to, &pairs).unwrap();
        prop_assert_eq!(contents(&to), expected);
        // And back, over the plan with its sides swapped.
        let back = regions(&poison(&src));
        let reversed = plan.reversed();
        let pairs = PoolSlots::new(&[0], &[1], reversed.src(), reversed.dst()).unwrap();
        copy_pages(&reversed, &to, &back, &pairs).unwrap();
        let mut expected = poison(&src);
        copy_rows(&dst, &src, &rect, (0, 1), &contents(&to), &mut expected);
        prop_assert_eq!(contents(&back), expected);
    }

    #[test]
    fn a_launch_moves_what_its_rows_are(
        (src, dst, rect) in case(),
        of_tokens in any::<bool>(),
        of_one_layer in any::<bool>(),
    ) {
        let layers = if of_one_layer { 1 } else { rect.layers.len() };
        let layers = Span { start: rect.layers.start, end: rect.layers.start + layers };
        let layer = Tile { layers, ..rect };
        let plan = CopyPlan::between(&src, &dst, &layer).unwrap();
        let (from_slots, to_slots) = slots(&src, &dst);
        let from = pattern(&src);
        let expected = expected(&src, &dst, &layer, &from, (&from_slots, &to_slots));
        let (from, to) = (regions(&from), regions(&poison(&dst)));
        let one = hicache_core::transfer::Move {
            pool: 0,
            plan,
            src: Memory::Host(from.clone().into()),
            dst: Memory::Host(to.clone().into()),
        };
        let lowered = LayerPlan { step: 0, moves: vec![one] };
        let has_pages = src.components.iter().any(|component| component.unit == RowUnit::Page);
        let tokens = i64::from(layer.tokens.count);
        let unit = if of_tokens && !has_pages { IndexUnit::Token } else { IndexUnit::Page };
        let by_token: Vec<i64> = to_slots
            .iter()
            .flat_map(|&slot| (0..tokens).map(move |token| if slot < 0 { -1 } else { slot * tokens + token }))
            .collect();
        let to_index = if unit == IndexUnit::Token { by_token } else { to_slots.clone() };
        let from_index: Vec<i32> = from_slots.iter().map(|&slot| slot as i32).collect();
        let index = [IndexSlice::Four(&from_index), IndexSlice::Eight(&to_index)];
        let indices = PoolIndices {
            pages: from_slots.len() as u32,
            source: Indices {
                vector: IndexVector { address: index[0].address(), width: IndexWidth::Four },
                unit: IndexUnit::Page,
            },
            destination: Indices {
                vector: IndexVector { address: index[1].address(), width: IndexWidth::Eight },
                unit,
            },
        };
        let lend = |regions: &[Arc<Region>]| regions.iter().map(Arc::clone).collect::<Vec<_>>();
        let (from, to_lent) = (lend(&from), lend(&to));
        let (source, destination): (Vec<&Region>, Vec<&Region>) =
            (from.iter().map(Arc::as_ref).collect(), to_lent.iter().map(Arc::as_ref).collect());
        let memory = Lent { source: &source, destination: &destination, index: &index };
        for launch in lowered.lower(&[indices]).unwrap() {
            prop_assert_eq!(run_on_cpu(&launch, &memory).unwrap(), 0);
        }
        prop_assert_eq!(contents(&to), expected);
    }
}

fn span(start: u32, end: u32) -> Span {
    Span { start, end }
}

fn whole(layers: Span, heads: u32, tokens: u32) -> Tile {
    Tile::whole_page(layers, span(0, heads), tokens).unwrap()
}

fn named(name: &str, kind: PoolKind, components: &[(&str, u32, RowUnit)]) -> Pool {
    let components = components
        .iter()
        .map(|&(name, row_bytes, unit)| Component { unit, ..Component::per_token(name, row_bytes) })
        .collect();
    Pool::new(name, kind, DType::UInt8, None, components).unwrap()
}

fn lent(layout: &Layout) -> Memory {
    let buffers = layout.buffer_bytes.iter().map(|&bytes| DeviceBuffer { address: 4096, bytes });
    Memory::Device(buffers.collect::<Vec<_>>().into())
}

fn placed(layout: Layout) -> Placed {
    Placed { memory: lent(&layout), layout }
}

/// Latents, a draft model and an indexer in one host page, as three parts of it.
fn packed() -> TransferPlan {
    let latent = named("latent", PoolKind::Latent, &[("c", 1152, RowUnit::Token)]);
    let draft = named("draft", PoolKind::Draft, &[("k", 256, RowUnit::Token), ("v", 256, RowUnit::Token)]);
    let indexer = named("indexer", PoolKind::Indexer, &[("i", 8448, RowUnit::Page)]);
    let tile = |layers, heads| whole(span(0, layers), heads, 64);
    let parts = [(latent, tile(61, 1)), (draft, tile(1, 8)), (indexer, tile(61, 1))];
    let page_bytes: u64 = parts.iter().map(|(pool, tile)| pool.page_bytes(tile).unwrap()).sum();
    let mut offset = 0;
    let pools = parts.into_iter().map(|(pool, tile)| {
        let host =
            Layout::packed(LayoutName::PageFirstDirect, &pool, &tile, 128, offset, page_bytes).unwrap();
        offset += pool.page_bytes(&tile).unwrap();
        let device = (tile.layers.start..tile.layers.end)
            .map(|layer| {
                let tile = Tile { layers: span(layer, layer + 1), ..tile };
                placed(Layout::host(LayoutName::LayerFirst, &pool, &tile, 1000, true).unwrap())
            })
            .collect();
        TransferPool { name: pool.name().to_owned(), host: placed(host), device, first_step: 0 }
    });
    TransferPlan::new(pools.collect()).unwrap()
}

#[test]
fn a_layer_of_all_pools_is_one_launch() {
    let plan = packed();
    let vector = IndexVector { address: 64, width: IndexWidth::Eight };
    let indices = Indices { vector, unit: IndexUnit::Page };
    let indices = PoolIndices { pages: 128, source: indices, destination: indices };
    assert_eq!(plan.steps(), 61);
    for (step, layer) in plan.restore().iter().enumerate() {
        let launches = layer.lower(&[indices; 3]).unwrap();
        assert_eq!(launches.len(), 1);
        // Latents and indexer, and with the first layer the draft's K and V; tokens became whole pages.
        let expected = if step == 0 { vec![73_728, 131_072, 131_072, 8448] } else { vec![73_728, 8448] };
        let runs: Vec<u32> = launches[0].used().iter().map(|segment| segment.run_bytes).collect();
        assert_eq!(runs, expected);
        assert!(launches[0].used().iter().all(|segment| segment.items == 128));
        let back = plan.backup()[step].lower(&[indices; 3]).unwrap();
        assert_eq!(back[0].bytes(), launches[0].bytes());
        assert_eq!(back[0].used()[0].source.base, launches[0].used()[0].destination.base);
    }
}

#[test]
fn more_than_sixteen_segments_are_several_launches() {
    // 5 groups of 3 heads against 3 groups of 5: 7 parts of K and of V.
    let pool = named("kv", PoolKind::Kv, &[("k", 16, RowUnit::Token), ("v", 16, RowUnit::Token)]);
    let tile = whole(span(0, 1), 15, 4);
    let layout = |heads_per_group| {
        Layout::host(LayoutName::PageUnified { heads_per_group }, &pool, &tile, 4, false).unwrap()
    };
    let pools = |count: usize| {
        (0..count).map(|i| TransferPool {
            name: i.to_string(),
            host: placed(layout(3)),
            device: vec![placed(layout(5))],
            first_step: 0,
        })
    };
    let vector = IndexVector { address: 64, width: IndexWidth::Eight };
    let indices = Indices { vector, unit: IndexUnit::Page };
    let indices = PoolIndices { pages: 2, source: indices, destination: indices };
    let plan = TransferPlan::new(pools(2).collect()).unwrap();
    let launches = plan.restore()[0].lower(&[indices; 2]).unwrap();
    let segments: Vec<usize> = launches.iter().map(|launch| launch.used().len()).collect();
    assert!(segments.len() > 1, "{segments:?}");
    assert!(segments[..segments.len() - 1].iter().all(|&count| count == 16), "{segments:?}");
    let moved: u64 = launches.iter().map(|launch| launch.bytes()).sum();
    assert_eq!(moved, 2 * plan.restore()[0].page_bytes());
    assert_eq!(plan.restore()[0].lower(&[indices]).unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn token_indices_do_not_reach_rows_of_pages() {
    let vector = IndexVector { address: 64, width: IndexWidth::Eight };
    let of = |unit| Indices { vector, unit };
    let indices = PoolIndices { pages: 2, source: of(IndexUnit::Page), destination: of(IndexUnit::Token) };
    assert_eq!(packed().restore()[0].lower(&[indices; 3]).unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn memory_that_is_too_small_is_refused_when_the_plan_is_made() {
    let pool = named("kv", PoolKind::Kv, &[("k", 16, RowUnit::Token)]);
    let tile = whole(span(0, 2), 2, 4);
    let layout = || Layout::host(LayoutName::PageFirst, &pool, &tile, 4, false).unwrap();
    let good = || TransferPool {
        name: "kv".into(),
        host: placed(layout()),
        device: vec![placed(layout())],
        first_step: 0,
    };
    assert!(TransferPlan::new(vec![good()]).is_ok());
    let short = |placed: &mut Placed| {
        let bytes = placed.layout.buffer_bytes[0] - 1;
        placed.memory = Memory::Device(vec![DeviceBuffer { address: 0, bytes }].into());
    };
    let mut bad = vec![good(), good(), good(), good()];
    short(&mut bad[0].host);
    short(&mut bad[1].device[0]);
    bad[2].device.clear();
    bad[3].device[0].layout.tile.layers.end = 1;
    for (i, pool) in bad.into_iter().enumerate() {
        assert_eq!(TransferPlan::new(vec![pool]).unwrap_err().kind(), ErrorKind::Geometry, "case {i}");
    }
}

#[test]
fn slots_that_do_not_fit_are_refused() {
    let plan = packed();
    let good: (&[i64], &[i64]) = (&[0, 127], &[999, -1]);
    assert!(plan.restore_slots(&[good; 3]).is_ok());
    let bad: [(&[i64], &[i64]); 5] = [
        (&[0, 128], &[1, 2]),
        (&[0, 1], &[1, 1000]),
        (&[0, -2], &[1, 2]),
        (&[0, 1], &[2, 2]),
        (&[0, 1], &[2]),
    ];
    for (i, slots) in bad.into_iter().enumerate() {
        let error = plan.restore_slots(&[good, slots, good]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Geometry, "case {i}");
        assert!(error.to_string().contains("draft"), "{error}");
    }
    // Two pages may come from one slot, none may go to one.
    let twice: (&[i64], &[i64]) = (&[5, 5], &[1, 2]);
    assert!(plan.restore_slots(&[twice; 3]).is_ok());
    assert!(plan.backup_slots(&[twice; 3]).is_err());
    assert!(plan.restore_slots(&[good; 2]).is_err());
}

#[test]
fn memory_of_a_device_is_not_touched_by_the_processor() {
    let plan = packed();
    let one: (&[i64], &[i64]) = (&[0], &[0]);
    let slots = plan.restore_slots(&[one; 3]).unwrap();
    let error = CpuCopies::new(1).unwrap().copy_now(&plan.restore()[0], &slots).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn memory_that_nobody_lent_is_not_given_to_a_device() {
    let plan = packed();
    assert!(plan.is_on_device());
    let error = DevicePlans::new(&plan).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("address alone"), "{error}");
}

#[test]
fn several_threads_copy_what_one_copies() {
    let pool = named("kv", PoolKind::Kv, &[("k", 256, RowUnit::Token), ("v", 256, RowUnit::Token)]);
    let tile = whole(span(0, 1), 8, 64);
    let src = Layout::host(LayoutName::PageFirst, &pool, &tile, 40, false).unwrap();
    let dst = Layout::host(LayoutName::PageHead, &pool, &tile, 40, false).unwrap();
    let from = regions(&pattern(&src));
    let slots: Vec<i64> = (0..40).collect();
    let there: Vec<i64> = slots.iter().map(|slot| slot * 7 % 40).collect();
    let copied = |threads| {
        let to = regions(&poison(&dst));
        let plan = TransferPlan::new(vec![TransferPool {
            name: "kv".into(),
            host: Placed { layout: src.clone(), memory: Memory::Host(from.clone().into()) },
            device: vec![Placed { layout: dst.clone(), memory: Memory::Host(to.clone().into()) }],
            first_step: 0,
        }])
        .unwrap();
        let slots = plan.restore_slots(&[(&slots, &there)]).unwrap();
        CpuCopies::new(threads).unwrap().copy_now(&plan.restore()[0], &slots).unwrap();
        contents(&to)
    };
    assert_eq!(copied(3), copied(1));
    assert_ne!(copied(1), poison(&dst));
}
