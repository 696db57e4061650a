//! A plan copies exactly the rows of its rectangle, in the longest runs there are.

use crate::layouts::{layout_name, pool};
use hicache_core::{
    Component, CopyPlan, DType, ErrorKind, Layout, LayoutName, Pool, PoolKind, RowUnit, Span, Tile,
    TokenLattice, cover_source,
};
use proptest::prelude::*;

/// How a layout is made of a name and a tile.
#[derive(Debug, Clone, Copy)]
enum Form {
    Object,
    Host { slots: u64, split: bool },
    Packed { slots: u64, before: u64, after: u64 },
}

impl Form {
    fn layout(self, name: LayoutName, pool: &Pool, tile: &Tile) -> Layout {
        match self {
            Form::Object => Layout::object(name, pool, tile),
            Form::Host { slots, split } => {
                let split = split && !matches!(name, LayoutName::PageUnified { .. });
                Layout::host(name, pool, tile, slots, split)
            }
            Form::Packed { slots, before, after } => {
                let page_bytes = before + pool.page_bytes(tile).unwrap() + after;
                Layout::packed(name, pool, tile, slots, before, page_bytes)
            }
        }
        .unwrap()
    }
}

fn form() -> impl Strategy<Value = Form> {
    prop_oneof![
        Just(Form::Object),
        (1..4u64, any::<bool>()).prop_map(|(slots, split)| Form::Host { slots, split }),
        (1..4u64, 0..5u64, 0..5u64).prop_map(|(slots, before, after)| Form::Packed { slots, before, after }),
    ]
}

/// A span of at most `more` further indices on each side of `inner`.
fn around(inner: Span, more: u32) -> impl Strategy<Value = Span> {
    (0..=more.min(inner.start), 0..=more)
        .prop_map(move |(before, after)| Span { start: inner.start - before, end: inner.end + after })
}

/// A lattice that holds `inner`: finer by a divisor of its step, and longer.
fn finer(inner: TokenLattice) -> impl Strategy<Value = TokenLattice> {
    let divisors: Vec<u32> = (1..=inner.step).filter(|step| inner.step.is_multiple_of(*step)).collect();
    (prop::sample::select(divisors), 0..3u32, 0..3u32).prop_map(move |(step, before, after)| {
        let before = before.min(inner.first / step);
        let inside = (inner.count - 1) * (inner.step / step) + 1;
        TokenLattice::new(inner.first - before * step, step, before + inside + after)
    })
}

pub fn outer(rect: Tile) -> impl Strategy<Value = Tile> {
    (around(rect.layers, 2), around(rect.heads, 2), finer(rect.tokens))
        .prop_map(|(layers, heads, tokens)| Tile { layers, heads, tokens })
}

/// A layout of some form over a tile that holds `rect`.
fn side(pool: Pool, rect: Tile) -> impl Strategy<Value = Layout> {
    (outer(rect), form()).prop_flat_map(move |(tile, form)| {
        let pool = pool.clone();
        layout_name(tile.heads.len()).prop_map(move |name| form.layout(name, &pool, &tile))
    })
}

fn case() -> impl Strategy<Value = (Layout, Layout, Tile)> {
    let span = || (0..4u32, 1..4u32).prop_map(|(start, len)| Span { start, end: start + len });
    let tokens =
        (0..6u32, 1..5u32, 1..5u32).prop_map(|(first, step, count)| TokenLattice::new(first, step, count));
    let rect = (span(), span(), tokens).prop_map(|(layers, heads, tokens)| Tile { layers, heads, tokens });
    (pool(), rect).prop_flat_map(|(pool, rect)| (side(pool.clone(), rect), side(pool, rect), Just(rect)))
}

/// Bytes that tell every place apart from its neighbours.
pub fn pattern(layout: &Layout) -> Vec<Vec<u8>> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    layout.buffer_bytes.iter().map(|&bytes| (0..bytes).map(|_| next()).collect()).collect()
}

pub fn poison(layout: &Layout) -> Vec<Vec<u8>> {
    layout.buffer_bytes.iter().map(|&bytes| vec![0xee; bytes as usize]).collect()
}

fn copy(from: &[Vec<u8>], src: (usize, u64), to: &mut [Vec<u8>], dst: (usize, u64), len: u64) {
    let bytes = &from[src.0][src.1 as usize..][..len as usize];
    to[dst.0][dst.1 as usize..][..len as usize].copy_from_slice(bytes);
}

/// What the plan must do: each row of `rect` copied by itself.
pub fn copy_rows(
    src: &Layout,
    dst: &Layout,
    rect: &Tile,
    slots: (u64, u64),
    from: &[Vec<u8>],
    to: &mut [Vec<u8>],
) {
    for (c, rule) in src.components.iter().enumerate() {
        for layer in rect.layers.start..rect.layers.end {
            for head in rect.heads.start..rect.heads.end {
                for i in 0..rect.tokens.count {
                    let token = rect.tokens.first + i * rect.tokens.step;
                    let at = src.offset(c, slots.0, layer, head, token);
                    copy(from, at, to, dst.offset(c, slots.1, layer, head, token), rule.row_bytes);
                }
            }
        }
    }
}

fn rect_bytes(layout: &Layout, rect: &Tile) -> u64 {
    let cells = u64::from(rect.layers.len() * rect.heads.len());
    let rows = |unit| if unit == RowUnit::Token { u64::from(rect.tokens.count) } else { 1 };
    layout.components.iter().map(|rule| rule.row_bytes * cells * rows(rule.unit)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_plan_copies_what_its_rows_are((src, dst, rect) in case()) {
        let plan = CopyPlan::between(&src, &dst, &rect).unwrap();
        let runs = plan.runs().unwrap();
        let from = pattern(&src);
        for slots in [(0, 0), (src.slots - 1, dst.slots - 1), (src.slots / 2, 0)] {
            let (mut expected, mut found) = (poison(&dst), poison(&dst));
            copy_rows(&src, &dst, &rect, slots, &from, &mut expected);
            for run in &runs {
                let at = (run.src.buffer, run.src.at(slots.0));
                copy(&from, at, &mut found, (run.dst.buffer, run.dst.at(slots.1)), run.len);
            }
            prop_assert_eq!(&found, &expected);
        }
        prop_assert_eq!(plan.bytes(), rect_bytes(&src, &rect));
        prop_assert_eq!(plan.bytes(), runs.iter().map(|run| run.len).sum::<u64>());
        for pair in runs.windows(2) {
            let [a, b] = pair else { unreachable!() };
            prop_assert!((a.src.buffer, a.src.offset + a.len) <= (b.src.buffer, b.src.offset), "order");
            let together = |a: &hicache_core::Place, b: &hicache_core::Place, len| {
                (a.buffer, a.offset + len, a.slot_stride) == (b.buffer, b.offset, b.slot_stride)
            };
            prop_assert!(!(together(&a.src, &b.src, a.len) && together(&a.dst, &b.dst, a.len)), "not merged");
        }
        if src.slots == 1 && src.buffer_bytes.len() == 1 {
            let all = src.buffer_bytes[0];
            prop_assert_eq!(cover_source(&runs, all), plan.bytes() == all);
            prop_assert!(!cover_source(&runs, all + 1));
        }
    }
}

fn whole(layers: u32, heads: u32, tokens: u32) -> Tile {
    Tile::whole_page(Span { start: 0, end: layers }, Span { start: 0, end: heads }, tokens).unwrap()
}

fn kv(row_bytes: u32) -> Pool {
    let components = vec![Component::per_token("k", row_bytes), Component::per_token("v", row_bytes)];
    Pool::new("kv", PoolKind::Kv, DType::UInt8, None, components).unwrap()
}

/// The runs of a whole page from an object into a host pool; the row counts are those of large models.
#[test]
fn whole_pages_come_in_few_runs() {
    let (pool, tile) = (kv(256), whole(64, 8, 256));
    let unified = LayoutName::PageUnified { heads_per_group: 4 };
    let runs = |from, to| {
        let src = Layout::object(from, &pool, &tile).unwrap();
        let dst = Layout::host(to, &pool, &tile, 100, false).unwrap();
        let plan = CopyPlan::between(&src, &dst, &tile).unwrap();
        let runs = plan.runs().unwrap();
        assert!(cover_source(&runs, src.buffer_bytes[0]));
        assert!(plan.strips().len() <= 4, "strided, it is still few");
        runs.len()
    };
    assert_eq!(runs(LayoutName::PageFirst, LayoutName::PageFirst), 2);
    assert_eq!(runs(LayoutName::PageFirstDirect, LayoutName::PageFirstDirect), 2);
    assert_eq!(runs(LayoutName::PageHead, LayoutName::PageHead), 2);
    assert_eq!(runs(unified, unified), 1);
    assert_eq!(runs(LayoutName::PageFirstDirect, LayoutName::LayerFirst), 2 * 64);
    assert_eq!(runs(LayoutName::PageFirst, LayoutName::PageFirstDirect), 2 * 64 * 256);
    assert_eq!(runs(LayoutName::PageFirst, LayoutName::PageHead), 2 * 64 * 8 * 256);
    // From one order of groups into another a run is the common heads of all tokens of a layer.
    assert_eq!(runs(unified, LayoutName::PageUnified { heads_per_group: 8 }), 2 * 2 * 64 * 256);
}

#[test]
fn a_layer_range_of_page_unified_is_one_run_of_each_group() {
    let (pool, tile) = (kv(16), whole(8, 4, 64));
    let name = LayoutName::PageUnified { heads_per_group: 2 };
    let src = Layout::object(name, &pool, &tile).unwrap();
    let part = Tile { layers: Span { start: 2, end: 5 }, ..tile };
    let dst = Layout::object(name, &pool, &part).unwrap();
    let plan = CopyPlan::between(&src, &dst, &part).unwrap();
    let cell = 2 * 64 * 2 * 16;
    let runs = plan.runs().unwrap();
    let places: Vec<_> = runs.iter().map(|run| (run.src.offset, run.dst.offset, run.len)).collect();
    assert_eq!(places, [(2 * cell, 0, 3 * cell), (10 * cell, 3 * cell, 3 * cell)]);
    assert!(!cover_source(&runs, src.buffer_bytes[0]));
}

#[test]
fn what_does_not_fit_is_refused() {
    let (pool, tile) = (kv(16), whole(2, 2, 8));
    let object = |pool: &Pool| Layout::object(LayoutName::PageFirst, pool, &tile).unwrap();
    let outside = Tile { layers: Span { start: 1, end: 3 }, ..tile };
    let invalid = Tile { tokens: TokenLattice { first: 0, step: 0, count: 2 }, ..tile };
    let latent = vec![Component::per_token("k", 16)];
    let latent = Pool::new("kv", PoolKind::Latent, DType::UInt8, None, latent).unwrap();
    let paged = vec![Component::per_token("k", 16), Component::per_page("v", 16)];
    let paged = Pool::new("kv", PoolKind::Kv, DType::UInt8, None, paged).unwrap();
    // Rules of someone else's making that lead out of the buffer, also past 64 bits.
    let broken = |change: fn(&mut Layout)| {
        let mut layout = object(&pool);
        change(&mut layout);
        layout
    };
    let cases = [
        (object(&pool), object(&pool), outside),
        (object(&pool), object(&pool), invalid),
        (object(&pool), object(&latent), tile),
        (object(&pool), object(&kv(8)), tile),
        (object(&pool), object(&paged), tile),
        (object(&pool), broken(|layout| layout.components[1].base += 1), tile),
        (object(&pool), broken(|layout| layout.components[0].base = u64::MAX), tile),
        (object(&pool), broken(|layout| layout.components[0].layer_stride = u64::MAX), tile),
        (object(&pool), broken(|layout| layout.components[0].heads_per_group = 0), tile),
        (object(&pool), broken(|layout| layout.components[0].buffer = 1), tile),
        (broken(|layout| layout.components[0].row_bytes = 0), object(&pool), tile),
        (broken(|layout| layout.slots = 2), object(&pool), tile),
        (broken(|layout| layout.slots = 0), object(&pool), tile),
    ];
    for (i, (src, dst, rect)) in cases.into_iter().enumerate() {
        let error = CopyPlan::between(&src, &dst, &rect).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Geometry, "case {i}");
    }
}

#[test]
fn rows_that_touch_in_one_slot_only_stay_apart() {
    // K stands in front of V in slot 0, but V's slots lie closer together.
    let tile = whole(1, 1, 1);
    let src = Layout::object(LayoutName::PageFirst, &kv(16), &tile).unwrap();
    let mut dst = Layout::packed(LayoutName::PageFirst, &kv(16), &tile, 3, 0, 64).unwrap();
    assert_eq!(CopyPlan::between(&src, &dst, &tile).unwrap().runs().unwrap().len(), 1);
    dst.components[1].page_stride = 32;
    let plan = CopyPlan::between(&src, &dst, &tile).unwrap();
    assert_eq!(plan.runs().unwrap().iter().map(|run| run.dst.at(2)).collect::<Vec<_>>(), [128, 80]);
}

#[test]
fn a_plan_of_too_many_runs_is_refused_before_it_is_counted_out() {
    let (pool, tile) = (kv(1), whole(65_536, 2, 65_536));
    let src = Layout::object(LayoutName::PageFirst, &pool, &tile).unwrap();
    let dst = Layout::object(LayoutName::PageHead, &pool, &tile).unwrap();
    let plan = CopyPlan::between(&src, &dst, &tile).unwrap();
    assert_eq!(plan.runs().unwrap_err().kind(), ErrorKind::Geometry);
    assert_eq!(plan.strips().len(), 2);
    // The same page without a change of order is no trouble.
    assert_eq!(CopyPlan::between(&src, &src, &tile).unwrap().runs().unwrap().len(), 1);
}
