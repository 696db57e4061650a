//! Plans on the CPU against bytes that the tests place themselves.

use super::*;
use crate::Region;

/// Small and deterministic; the tests only need variety.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) ^ (self.0 >> 11)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

fn region(len: usize, mut byte: impl FnMut(usize) -> u8) -> Region {
    let region = Region::owned(len);
    region.copy_in(0, &(0..len).map(&mut byte).collect::<Vec<_>>()).unwrap();
    region
}

fn bytes(region: &Region, at: u64, len: u64) -> Vec<u8> {
    region.with_bytes(at, len, <[u8]>::to_vec).unwrap()
}

fn extent(region: &Region) -> Extent {
    Extent { base: region.address() as u64, len: region.len() as u64 }
}

fn base(region: &Region) -> u64 {
    region.address() as u64
}

fn strides(page: i64, slot: i64, group: i64) -> Strides {
    Strides { page, slot, group }
}

fn vector(index: &[i64]) -> IndexVector {
    IndexVector { address: index.as_ptr() as u64, width: IndexWidth::Eight }
}

#[test]
fn magic_division_is_division() {
    let mut random = Random(1);
    let divisors = (1..=600).chain((0..31).flat_map(|bit| {
        let power = 1_u32 << bit;
        [power.max(2) - 1, power, (power + 1).min(MAX_COUNT - 1)]
    }));
    let more: Vec<u32> = (0..2000).map(|_| 1 + random.below((1 << 31) - 1) as u32).collect();
    for divisor in divisors.chain(more) {
        let side = SegmentSide::identity(4096, Strides::default(), divisor).unwrap();
        let multiples = (0..20).map(|_| (random.below(1 << 31) as u32 / divisor) * divisor);
        let around = multiples.flat_map(|n| [n.saturating_sub(1), n, (n + 1).min(MAX_COUNT - 1)]);
        for number in around.chain([0, 1, divisor - 1, divisor, MAX_COUNT - 2, MAX_COUNT - 1]) {
            assert_eq!(side.divide(number), (number / divisor, number % divisor), "{number} / {divisor}");
        }
    }
}

#[test]
fn items_land_where_the_formula_says() {
    // Source: 3 pages of 2 tokens, runs of 3 bytes in 2 groups apart; destination: the groups together.
    let source = region(256, |i| i as u8);
    let destination = region(256, |_| 0xee);
    let (tokens, pages) = (vec![5_i64, -1, 1, 9], vec![2_i64, 0]);
    let from = SegmentSide::tokens(base(&source), strides(40, 10, 80 + 40), 2, 6, vector(&tokens)).unwrap();
    let to = SegmentSide::pages(base(&destination), strides(30, 6, 3), 2, 3, vector(&pages)).unwrap();
    let plan = SegmentPlan::new(&[Segment::new(from, to, 4, 2, 3).unwrap()]).unwrap();
    let index = [IndexSlice::Eight(&tokens), IndexSlice::Eight(&pages)];
    let memory = Memory { source: &[&source], destination: &[&destination], index: &index };
    // Token 9 is past the limit of 6.
    assert_eq!(run_on_cpu(&plan, &memory), Ok(1));
    let mut want = vec![0xee; 256];
    // Item 0: token 5 = page 2, slot 1, at 90; to page 2, slot 0. Item 2: token 1, at 10; to page 0, slot 0.
    for (at, from) in [(60, 90), (63, 210), (0, 10), (3, 130)] {
        for byte in 0..3 {
            want[at + byte] = (from + byte) as u8;
        }
    }
    assert_eq!(bytes(&destination, 0, 256), want);
}

#[test]
fn narrow_indices_are_read_as_such_and_never_as_wide_ones() {
    let (source, destination) = (region(64, |i| i as u8), region(64, |_| 0));
    let narrow = [3_i32, 1, -1, 0];
    let index = IndexVector { address: narrow.as_ptr() as u64, width: IndexWidth::Four };
    let from = SegmentSide::pages(base(&source), strides(8, 0, 0), 1, 4, index).unwrap();
    let to = SegmentSide::identity(base(&destination), strides(8, 0, 0), 1).unwrap();
    let mut plan = SegmentPlan::new(&[Segment::new(from, to, 4, 1, 8).unwrap()]).unwrap();
    let slices = [IndexSlice::Four(&narrow)];
    let memory = Memory { source: &[&source], destination: &[&destination], index: &slices };
    assert_eq!(run_on_cpu(&plan, &memory), Ok(0));
    assert_eq!(bytes(&destination, 0, 16), [bytes(&source, 24, 8), bytes(&source, 8, 8)].concat());
    assert_eq!(bytes(&destination, 16, 8), [0; 8]);
    plan.segment[0].source.index_bytes = 8;
    plan.segment[0].items = 2;
    let error = run_on_cpu(&plan, &memory).unwrap_err();
    assert!(matches!(error, PlanError::IndexOutsideExtents { side: Side::Source, .. }), "{error}");
}

#[test]
fn every_corner_is_checked_to_the_byte() {
    let index = vec![0_i64; 64];
    let indices = [Extent { base: index.as_ptr() as u64, len: 512 }];
    let near = Extent { base: 1 << 20, len: 1 << 16 };
    let spread =
        [strides(1000, 100, 10), strides(-1000, 100, 10), strides(1000, -100, 10), strides(1000, 100, -10)];
    for strides in spread {
        for kind in 0..4 {
            let at = 1 << 21;
            let side = |base| match kind {
                // 17 tokens in pages of 5: three whole pages and two tokens.
                0 => SegmentSide::tokens(base, strides, 5, 17, vector(&index)),
                1 => SegmentSide::pages(base, strides, 5, 4, vector(&index)),
                2 => SegmentSide::identity(base, strides, 5),
                _ => SegmentSide::pages(base, strides, 50, 4, vector(&index)),
            };
            // By hand: the lowest and highest byte over all places that the side can have.
            let reach = |page: i64, slot: i64| {
                [0, 2].map(|group| page * strides.page + slot * strides.slot + group * strides.group)
            };
            let places: Vec<i64> = match kind {
                0 => (0..17).flat_map(|token| reach(token / 5, token % 5)).collect(),
                1 => (0..20).flat_map(|token| reach(token / 5, token % 5)).collect(),
                2 => (0..13).flat_map(|token| reach(token / 5, token % 5)).collect(),
                // Pages longer than the items: later slots are out of reach.
                _ => (0..52).flat_map(|token| reach(token / 13, token % 13)).collect(),
            };
            let (low, high) = (places.iter().min().unwrap(), places.iter().max().unwrap() + 7);
            let exact = Extent { base: (at + low) as u64, len: (high - low) as u64 };
            let to = SegmentSide::identity(near.base, Strides { page: 64, slot: 0, group: 16 }, 1).unwrap();
            let segment = Segment::new(side(at as u64).unwrap(), to, 13, 3, 7).unwrap();
            let plan = SegmentPlan::new(&[segment]).unwrap();
            let validate = |source| {
                plan.validate(&Extents { source: &[near, source], destination: &[near], index: &indices })
            };
            assert_eq!(validate(exact), Ok(()), "{strides:?} kind {kind}");
            let (first, end) = (i128::from(at + low), i128::from(at + high));
            let outside = Err(PlanError::OutsideExtents { segment: 0, side: Side::Source, first, end });
            assert_eq!(validate(Extent { base: exact.base + 1, len: exact.len - 1 }), outside);
            assert_eq!(validate(Extent { len: exact.len - 1, ..exact }), outside);
        }
    }
}

#[test]
fn a_changed_field_is_refused() {
    let index = [0_i64; 8];
    let whole = [Extent { base: 0, len: u64::MAX }];
    let from = SegmentSide::tokens(1 << 20, strides(64, 16, 0), 4, 8, vector(&index)).unwrap();
    let to = SegmentSide::identity(1 << 30, strides(64, 16, 0), 4).unwrap();
    let good = SegmentPlan::new(&[Segment::new(from, to, 8, 1, 16).unwrap()]).unwrap();
    let extents = Extents { source: &whole, destination: &whole, index: &whole };
    assert_eq!(good.validate(&extents), Ok(()));
    type Change = fn(&mut SegmentPlan);
    let changes: [(Change, &str); 15] = [
        (|plan| plan.abi += 1, "ABI"),
        (|plan| plan.segments = 17, "segments"),
        (|plan| plan.segments = 0, "segments"),
        (|plan| plan.error = 6, "error word"),
        (|plan| plan.segment[0].groups = 0, "groups"),
        (|plan| plan.segment[0].run_bytes = 0, "run bytes"),
        (|plan| plan.segment[0].items = 1 << 31, "items * groups"),
        (|plan| plan.segment[0].lanes_log2 = 6, "lanes_log2"),
        (|plan| plan.segment[0].source.page_size = 5, "page_magic"),
        (|plan| plan.segment[0].source.page_shift = 1, "page_shift"),
        (|plan| plan.segment[0].source.index_kind = 3, "index kind"),
        (|plan| plan.segment[0].source.index_bytes = 2, "index_bytes"),
        (|plan| plan.segment[0].source.index += 4, "aligned index"),
        (|plan| plan.segment[0].destination.index = 8, "expected index 0x0"),
        (|plan| plan.segment[0].source.limit = u32::MAX, "limit"),
    ];
    for (change, word) in changes {
        let mut plan = good;
        change(&mut plan);
        let error = plan.validate(&extents).unwrap_err().to_string();
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn overlap_is_refused_exactly_where_bytes_are_shared() {
    let memory = [Extent { base: 0, len: 1 << 40 }];
    let extents = Extents { source: &memory, destination: &memory, index: &memory };
    let identity =
        |base: u64, page, slot, size| SegmentSide::identity(base, strides(page, slot, 0), size).unwrap();
    let plan = |pairs: &[(SegmentSide, SegmentSide)]| {
        let segments: Vec<_> =
            pairs.iter().map(|(from, to)| Segment::new(*from, *to, 12, 1, 16).unwrap()).collect();
        SegmentPlan::new(&segments).unwrap().validate(&extents)
    };
    let from = identity(1 << 30, 64, 16, 4);
    // K and V of one layer of page_unified: interleaved in each page, never touching.
    let (k, v) = (identity(4096, 128, 16, 4), identity(4096 + 64, 128, 16, 4));
    assert_eq!(plan(&[(from, k), (from, v)]), Ok(()));
    // One byte too early, and the last row of K's pages meets the first of V's.
    let early = identity(4096 + 63, 128, 16, 4);
    let expected = PlanError::SegmentsOverlap { segment: 1, other: 0, side: Side::Destination };
    assert_eq!(plan(&[(from, k), (from, early)]), Err(expected));
    // Two layers of page_first, interleaved in each token.
    let (a, b) = (identity(4096, 128, 32, 4), identity(4096 + 16, 128, 32, 4));
    assert_eq!(plan(&[(from, a), (from, b)]), Ok(()));
    // A part of a page written, the next part read.
    assert_eq!(plan(&[(v, k)]), Ok(()));
    let expected = PlanError::SegmentsOverlap { segment: 0, other: 0, side: Side::Source };
    assert_eq!(plan(&[(early, k)]), Err(expected));
    // Rows closer than they are long.
    let close = identity(4096, 64, 15, 4);
    assert_eq!(plan(&[(from, close)]), Err(PlanError::RunsOverlap { segment: 0 }));
}

#[test]
fn apart_agrees_with_counting_bytes() {
    let mut random = Random(7);
    let (mut told_apart, mut total) = (0, 0);
    for _ in 0..20_000 {
        let mut family = || {
            let len = 1 + random.below(4) as u32;
            let inner = i64::from(len) + random.below(3) as i64;
            let middle = inner * 3 + random.below(6) as i64;
            let sign = |random: &mut Random| if random.below(2) == 0 { -1 } else { 1 };
            let counts = [1 + random.below(3) as u32, 1 + random.below(3) as u32, 1 + random.below(3) as u32];
            let axes = [
                (sign(&mut random) * [24, 36][random.below(2) as usize].max(middle), counts[0]),
                (sign(&mut random) * middle.min(12), counts[1]),
                (sign(&mut random) * inner, counts[2]),
            ];
            let start = random.below(40) as i128;
            (disjoint::Runs::new(start, axes, len), start, axes, len)
        };
        let (a, b) = (family(), family());
        let touched = |(_, start, axes, len): &(disjoint::Runs, i128, [(i64, u32); 3], u32)| {
            let mut bytes = vec![];
            for i in 0..axes[0].1 {
                for j in 0..axes[1].1 {
                    for k in 0..axes[2].1 {
                        let steps =
                            i64::from(i) * axes[0].0 + i64::from(j) * axes[1].0 + i64::from(k) * axes[2].0;
                        bytes.extend((0..*len).map(|byte| start + i128::from(steps) + i128::from(byte)));
                    }
                }
            }
            bytes
        };
        let (a_bytes, b_bytes) = (touched(&a), touched(&b));
        let unique: std::collections::HashSet<_> = a_bytes.iter().collect();
        assert!(!a.0.nested() || unique.len() == a_bytes.len(), "{a:?}");
        assert_eq!(
            (a.0.first(), a.0.end()),
            (*a_bytes.iter().min().unwrap(), a_bytes.iter().max().unwrap() + 1)
        );
        if !a.0.nested() || !b.0.nested() {
            continue;
        }
        let shared = b_bytes.iter().any(|byte| unique.contains(byte));
        assert!(!(shared && a.0.apart(&b.0)), "{a:?} {b:?}");
        total += u32::from(!shared);
        told_apart += u32::from(a.0.apart(&b.0));
    }
    // It may refuse what it cannot tell, but seldom: most families here mix without a common stride.
    assert!(told_apart * 2 > total, "{told_apart} of {total}");
}

#[test]
fn a_compact_plan_moves_the_same_bytes_in_longer_runs() {
    let (page, row) = (5_u32, 12_u32);
    let (source, destination) = (region(4096, |i| (i * 7 % 251) as u8), region(4096, |_| 0xee));
    let pages = [3_i64, 0, -1, 5];
    let slot = i64::from(row);
    let from = SegmentSide::pages(base(&source), strides(70, slot, 300), page, 4, vector(&pages)).unwrap();
    // Pages of one token without gaps: as good as pages of five.
    let to = SegmentSide::identity(base(&destination), strides(slot, 0, 1000), 1).unwrap();
    let plain = SegmentPlan::new(&[Segment::new(from, to, 20, 2, row).unwrap()]).unwrap();
    let by_size = SegmentSide::identity(base(&destination), strides(60, slot, 1000), page).unwrap();
    let same_size = SegmentPlan::new(&[Segment::new(from, by_size, 20, 2, row).unwrap()]).unwrap();
    let slices = [IndexSlice::Eight(&pages)];
    let memory = Memory { source: &[&source], destination: &[&destination], index: &slices };
    let mut results = vec![];
    for plan in [same_size, same_size.compact(), plain] {
        destination.copy_in(0, &[0xee; 4096]).unwrap();
        assert_eq!(run_on_cpu(&plan, &memory), Ok(1));
        results.push(bytes(&destination, 0, 4096));
        assert_eq!(plan.bytes(), same_size.bytes());
    }
    let compact = same_size.compact().segment[0];
    assert_eq!((compact.items, compact.run_bytes, compact.source.page_size), (4, 60, 1));
    assert!(results.iter().all(|result| *result == results[0]));
    assert_ne!(results[0], vec![0xee; 4096]);
    // Strides with gaps, odd numbers of items and token indices stay as they are.
    let gaps =
        SegmentSide::pages(base(&source), strides(70, slot + 1, 300), page, 4, vector(&pages)).unwrap();
    let tokens = SegmentSide::tokens(base(&source), strides(60, slot, 300), page, 4, vector(&pages)).unwrap();
    for (side, items) in [(gaps, 20), (tokens, 4), (from, 19)] {
        let plan = SegmentPlan::new(&[Segment::new(side, by_size, items, 2, row).unwrap()]).unwrap();
        assert_eq!(plan.compact(), plan);
    }
}

#[test]
fn the_widest_vector_divides_what_is_used() {
    let side = |base, page, slot, group| SegmentSide::identity(base, strides(page, slot, group), 2).unwrap();
    let width = |from, to, run, groups| Segment::new(from, to, 4, groups, run).unwrap().vector_bytes();
    let even = side(64, 64, 32, 0);
    assert_eq!(width(even, even, 32, 1), 16);
    assert_eq!(width(even, even, 24, 1), 8);
    assert_eq!(width(even, even, 132, 1), 4);
    assert_eq!(width(even, even, 2, 1), 2);
    assert_eq!(width(even, even, 4097, 1), 1);
    assert_eq!(width(side(68, 64, 32, 0), even, 32, 1), 4);
    assert_eq!(width(even, side(64, -72, 32, 0), 32, 1), 8);
    assert_eq!(width(even, side(64, 64, 34, 0), 32, 1), 2);
    // A group stride counts only where there are groups.
    assert_eq!(width(even, side(64, 64, 32, 1), 32, 1), 16);
    assert_eq!(width(even, side(64, 64, 32, 1), 32, 2), 1);
}

#[test]
fn gather_blocks_are_packed_padded_and_unpacked() {
    // 3 ranks, blocks of 2 pages of 4 tokens of 8 bytes; rank 1 has one page, so its block ends with the trash page.
    let scratch = region(2 * 1024, |_| 0xee);
    let shape = GatherShape {
        scratch: base(&scratch),
        slot_bytes: 1024,
        ranks: 3,
        block_pages: 2,
        page_size: 4,
        row_bytes: 8,
    };
    let pools: Vec<Region> = (0..3).map(|rank| region(5 * 32, move |i| (50 * rank + i / 32) as u8)).collect();
    let local: [&[i64]; 3] = [&[4, 1], &[2], &[3, 4]];
    for layer in [0, 1] {
        for (rank, pool) in pools.iter().enumerate() {
            let index = shape.padded(local[rank], 0).unwrap();
            let rows =
                GatherRank { base: base(pool), strides: strides(32, 8, 0), pages: 5, index: vector(&index) };
            let segment = gather_pack(&shape, layer, rank as u32, &rows).unwrap();
            assert_eq!((segment.items, segment.run_bytes), (2, 32), "whole pages");
            let slices = [IndexSlice::Eight(&index)];
            let memory = Memory { source: &[pool], destination: &[&scratch], index: &slices };
            assert_eq!(run_on_cpu(&SegmentPlan::new(&[segment]).unwrap(), &memory), Ok(0));
        }
        let at = u64::from(layer) * 1024;
        let numbers: Vec<u8> = (0..6).map(|page| bytes(&scratch, at + page * 32, 32)[31]).collect();
        assert_eq!(numbers, [4, 1, 52, 50, 103, 104]);
        let rest = 1024 - 6 * 32;
        assert_eq!(bytes(&scratch, at + 6 * 32, rest), vec![0xee; rest as usize]);
    }
    let whole = region(8 * 32, |_| 0xee);
    let index = [7_i64, 4, 5, -1, 6, 3];
    let rows = GatherRank { base: base(&whole), strides: strides(32, 8, 0), pages: 8, index: vector(&index) };
    let segment = gather_unpack(&shape, 1, &rows).unwrap();
    let slices = [IndexSlice::Eight(&index)];
    let memory = Memory { source: &[&scratch], destination: &[&whole], index: &slices };
    assert_eq!(run_on_cpu(&SegmentPlan::new(&[segment]).unwrap(), &memory), Ok(0));
    let numbers: Vec<u8> = (0..8).map(|page| bytes(&whole, page * 32, 32)[0]).collect();
    assert_eq!(numbers, [0xee, 0xee, 0xee, 104, 1, 52, 103, 4]);
    // More pages than a block, a rank too many, and blocks that do not fit into a slot.
    assert!(shape.padded(&[1, 2, 3], 0).is_err());
    assert!(gather_pack(&shape, 0, 3, &rows).is_err());
    let small = GatherShape { slot_bytes: 191, ..shape };
    assert!(gather_pack(&small, 0, 0, &rows).unwrap_err().to_string().contains("slot bytes"));
}

#[test]
fn memory_lent_for_reading_is_not_written() {
    let bytes = [1_u8; 64];
    // SAFETY: the array outlives the region, is lent for reading only, and nobody changes it.
    let read_only = unsafe { Region::from_raw_parts(bytes.as_ptr().cast_mut(), 64, false, None) };
    let source = region(64, |_| 2);
    let side = |region: &Region| SegmentSide::identity(base(region), strides(8, 0, 0), 1).unwrap();
    let plan = SegmentPlan::new(&[Segment::new(side(&source), side(&read_only), 8, 1, 8).unwrap()]).unwrap();
    let memory = Memory { source: &[&source], destination: &[&read_only], index: &[] };
    let error = run_on_cpu(&plan, &memory).unwrap_err();
    assert!(matches!(error, PlanError::OutsideExtents { side: Side::Destination, .. }), "{error}");
    let extents = Extents { source: &[extent(&source)], destination: &[extent(&read_only)], index: &[] };
    assert_eq!(plan.validate(&extents), Ok(()));
}
