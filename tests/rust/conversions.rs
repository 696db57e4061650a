//! Any ranks of any layout restore what other ranks of other layouts stored, row for row, or miss.

use hicache_core::format::directory;
use hicache_core::format::frame::{FrameKind, Step, step};
use hicache_core::format::{Encoder, checksum};
use hicache_core::{
    BackupOutcome, ChainStart, Component, DType, Layout, LayoutName, Namespace, PageKey, Pool, PoolKind,
    PoolMemory, RestoreOptions, RestoreOutcome, RowUnit, Span, Store, StoreOptions, Tile, TokenLattice, View,
    ViewOptions, ViewPool,
};
use proptest::prelude::*;

use crate::support::{
    self, CANARY, Memory, backup, contiguous, fast_folder, files_ending, keys, kv_pool, object, open,
    page_bytes, restore, tiny,
};

const LAYERS: u32 = 4;
const HEADS: u32 = 4;
const PAGE: u32 = 8;

/// A page that lies in more objects than this is missing.
const MOST_PARTS: usize = 64;

fn namespace() -> Namespace {
    Namespace::new("org/grid", "r1", PAGE, None).unwrap()
}

/// Bytes of a row, told by what it is of.
fn row(page: usize, component: usize, layer: u32, head: u32, token: u32, len: u32) -> Vec<u8> {
    let numbers = [page as u64, component as u64, u64::from(layer), u64::from(head), u64::from(token)];
    page_bytes(numbers.iter().fold(1, |all, number| all * 100 + number), len as usize)
}

/// One rank: its part of every page and the order in which its host memory has it.
#[derive(Debug, Clone)]
struct Rank {
    tile: Tile,
    layout: LayoutName,
    /// A buffer for each component.
    split: bool,
}

impl Rank {
    fn pool(&self, pool: &Pool) -> ViewPool {
        ViewPool::new(pool.clone(), self.tile, self.layout)
    }

    fn layout(&self, pool: &Pool, pages: usize) -> Layout {
        Layout::host(self.layout, pool, &self.tile, pages as u64, self.split).unwrap()
    }

    /// Where each row of `page` is in the rank's buffers when it has `slot`, and its bytes.
    fn rows(&self, pool: &Pool, layout: &Layout, page: usize, slot: u64) -> Vec<(usize, u64, Vec<u8>)> {
        let mut rows = Vec::new();
        let tokens = self.tile.tokens;
        for (number, component) in pool.components().iter().enumerate() {
            let count = if component.unit == RowUnit::Page { 1 } else { tokens.count };
            for layer in self.tile.layers.start..self.tile.layers.end {
                for head in self.tile.heads.start..self.tile.heads.end {
                    for token in (0..count).map(|index| tokens.first + index * tokens.step) {
                        let (buffer, offset) = layout.offset(number, slot, layer, head, token);
                        // A row for the page is the same on all ranks that have it.
                        let named = if component.unit == RowUnit::Page { 0 } else { token };
                        rows.push((
                            buffer,
                            offset,
                            row(page, number, layer, head, named, component.row_bytes),
                        ));
                    }
                }
            }
        }
        rows
    }

    fn memory(&self, layout: &Layout) -> Vec<Memory> {
        layout.buffer_bytes.iter().map(|&bytes| Memory::canary(bytes as usize)).collect()
    }

    fn store(&self, pool: &Pool, view: &View, keys: &[PageKey]) -> Vec<BackupOutcome> {
        let layout = self.layout(pool, keys.len());
        let memory = self.memory(&layout);
        for page in 0..keys.len() {
            for (buffer, offset, bytes) in self.rows(pool, &layout, page, page as u64) {
                memory[buffer].region.copy_in(offset, &bytes).unwrap();
            }
        }
        let slots: Vec<i64> = (0..keys.len() as i64).collect();
        let regions = memory.iter().map(|memory| &*memory.region).collect();
        let start = ChainStart { parent: None, depth: Some(0) };
        view.backup(keys, vec![PoolMemory { regions, slots: &slots }], start).unwrap().outcomes
    }

    /// Restores to slots in turned order; every row of a restored page must be the model's.
    fn restore(&self, pool: &Pool, view: &View, keys: &[PageKey]) -> Vec<RestoreOutcome> {
        let layout = self.layout(pool, keys.len());
        let memory = self.memory(&layout);
        let slots: Vec<i64> = (0..keys.len() as i64).rev().collect();
        let regions = memory.iter().map(|memory| &*memory.region).collect();
        let lent = vec![PoolMemory { regions, slots: &slots }];
        let outcomes = view.restore(keys, lent, RestoreOptions::default()).unwrap().outcomes;
        let buffers: Vec<Vec<u8>> = memory.iter().map(Memory::bytes).collect();
        for (page, (outcome, &slot)) in outcomes.iter().zip(&slots).enumerate() {
            for (buffer, offset, bytes) in self.rows(pool, &layout, page, slot as u64) {
                let landed = &buffers[buffer][offset as usize..][..bytes.len()];
                match outcome {
                    RestoreOutcome::Restored => {
                        assert!(landed == bytes, "page {page}, offset {offset}, {self:?}")
                    }
                    _ => assert!(landed.iter().all(|&byte| byte == CANARY), "page {page} is missing"),
                }
            }
        }
        outcomes
    }
}

fn lattices() -> Vec<Vec<TokenLattice>> {
    let dealt = |ways| (0..ways).map(move |first| TokenLattice::new(first, ways, PAGE / ways)).collect();
    let sliced =
        |ways| (0..ways).map(move |part| TokenLattice::new(part * PAGE / ways, 1, PAGE / ways)).collect();
    vec![dealt(1), dealt(2), dealt(4), dealt(8), sliced(2), sliced(4)]
}

fn spans(limit: u32) -> Vec<Vec<Span>> {
    let span = |start, end| Span { start, end };
    let even = |ways| (0..ways).map(|part| span(part * limit / ways, (part + 1) * limit / ways)).collect();
    vec![even(1), even(2), even(4), vec![span(0, 3), span(3, limit)], vec![span(0, 1), span(1, limit)]]
}

/// All ranks of a deployment: stages of layers, ranks of heads, ranks of tokens.
fn grid() -> impl Strategy<Value = Vec<Tile>> {
    use prop::sample::select;
    (select(spans(LAYERS)), select(spans(HEADS)), select(lattices())).prop_map(|(layers, heads, tokens)| {
        let mut tiles = Vec::new();
        for &layers in &layers {
            for &heads in &heads {
                tiles.extend(tokens.iter().map(|&tokens| Tile { layers, heads, tokens }));
            }
        }
        tiles
    })
}

/// A layout that this tile can have; `pick` chooses.
fn layout_for(tile: &Tile, pick: usize) -> LayoutName {
    let heads = tile.heads.len();
    let groups = (1..=heads).rev().filter(|group| heads.is_multiple_of(*group));
    let plain =
        [LayoutName::LayerFirst, LayoutName::PageFirst, LayoutName::PageFirstDirect, LayoutName::PageHead];
    let all: Vec<LayoutName> = plain
        .into_iter()
        .chain(groups.map(|heads_per_group| LayoutName::PageUnified { heads_per_group }))
        .collect();
    all[pick % all.len()]
}

fn rank(tile: Tile, pick: usize, split: bool) -> Rank {
    let layout = layout_for(&tile, pick);
    Rank { tile, layout, split: split && !matches!(layout, LayoutName::PageUnified { .. }) }
}

/// Keys and values, and scales of each page. Short rows go through a scratch buffer, long ones straight.
fn a_pool(row_bytes: u32) -> Pool {
    let components = vec![
        Component::per_token("k", row_bytes),
        Component::per_token("v", 2 * row_bytes),
        Component::per_page("scales", 8),
    ];
    Pool::new("kv", PoolKind::Kv, DType::UInt8, None, components).unwrap()
}

fn ways_to_store(root: &std::path::Path) -> Store {
    let options =
        StoreOptions { capacity_bytes: Some(64 << 20), io_threads: Some(1), ..StoreOptions::default() };
    Store::open(root, options).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_deployment_restores_what_any_other_stored(
        writers in grid(),
        readers in grid(),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 4),
        split in any::<(bool, bool)>(),
        row_bytes in prop::sample::select(vec![8u32, 24, 2048]),
        zstd_level in prop::option::of(Just(1)),
        lost in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let folder = fast_folder();
        let pool = a_pool(row_bytes);
        let keys = keys("deployments", 3);
        let lost = lost.map(|lost| lost.index(writers.len()));
        let layout_of = |pick: usize| picks[pick].index(20);
        for (number, &tile) in writers.iter().enumerate() {
            if Some(number) == lost {
                continue;
            }
            // Stages of one deployment share a store; its halves are two processes.
            let rank = rank(tile, layout_of(number % 2), split.0);
            let store = ways_to_store(folder.path());
            let view = store.view(namespace(), vec![rank.pool(&pool)], ViewOptions { zstd_level }).unwrap();
            prop_assert_eq!(rank.store(&pool, &view, &keys), vec![BackupOutcome::Stored; 3]);
        }
        let store = ways_to_store(folder.path());
        for (number, &tile) in readers.iter().enumerate() {
            let rank = rank(tile, layout_of(2 + number % 2), split.1);
            let view = store.view(namespace(), vec![rank.pool(&pool)], ViewOptions::default()).unwrap();
            let parts = writers.iter().filter(|writer| writer.intersect(&tile).is_some()).count();
            let is_lost = lost.is_some_and(|lost| writers[lost].intersect(&tile).is_some());
            let missing = is_lost || parts > MOST_PARTS;
            let expected = if missing { RestoreOutcome::Absent } else { RestoreOutcome::Restored };
            prop_assert_eq!(view.match_prefix(&keys).unwrap().pages, if missing { 0 } else { 3 });
            prop_assert_eq!(rank.restore(&pool, &view, &keys), vec![expected; 3]);
        }
    }
}

#[test]
fn a_page_in_too_many_parts_is_missing_and_its_parts_are_not() {
    let folder = fast_folder();
    let (pool, keys) = (a_pool(8), keys("parts", 1));
    let store = ways_to_store(folder.path());
    let view = |rank: &Rank| store.view(namespace(), vec![rank.pool(&pool)], ViewOptions::default()).unwrap();
    let part = |layer, head, token: Option<u32>| {
        let span = |start| Span { start, end: start + 1 };
        let tokens = token.map_or(TokenLattice::new(0, 1, PAGE), |token| TokenLattice::new(token, 1, 1));
        rank(Tile { layers: span(layer), heads: span(head), tokens }, 1, false)
    };
    let whole = |layers| rank(stage(layers), 1, false);
    for layer in 0..LAYERS {
        for head in 0..HEADS {
            for token in 0..PAGE {
                let one = part(layer, head, Some(token));
                assert_eq!(one.store(&pool, &view(&one), &keys), [BackupOutcome::Stored]);
            }
        }
    }
    for (rank, parts) in
        [(part(0, 0, None), 8), (whole((0, 2)), 64), (whole((0, 3)), 96), (whole((0, 4)), 128)]
    {
        let expected = if parts > MOST_PARTS { RestoreOutcome::Absent } else { RestoreOutcome::Restored };
        assert_eq!(rank.restore(&pool, &view(&rank), &keys), [expected], "{parts} parts");
    }
}

/// The whole heads and tokens of some layers.
fn stage(layers: (u32, u32)) -> Tile {
    let span = |start, end| Span { start, end };
    Tile::whole_page(span(layers.0, layers.1), span(0, HEADS), PAGE).unwrap()
}

#[test]
fn case_d04_pipeline_stages_share_a_key_and_not_a_byte() {
    let latent =
        Pool::new("kv", PoolKind::Latent, DType::UInt8, None, vec![Component::per_token("latent", 48)]);
    for pool in [a_pool(24), latent.unwrap()] {
        let is_latent = pool.kind() == PoolKind::Latent;
        let part = |layers| {
            let heads = Span { start: 0, end: if is_latent { 1 } else { HEADS } };
            Rank { tile: Tile { heads, ..stage(layers) }, layout: LayoutName::LayerFirst, split: false }
        };
        let root = tempfile::tempdir().unwrap();
        let store = open(root.path());
        let keys = keys("stages", 2);
        let view =
            |rank: &Rank| store.view(namespace(), vec![rank.pool(&pool)], ViewOptions::default()).unwrap();
        let (front, back) = (part((0, 2)), part((2, 4)));
        assert_eq!(front.store(&pool, &view(&front), &keys), [BackupOutcome::Stored; 2]);
        // The other stage's pages are not there because this one's are.
        assert_eq!(view(&back).match_prefix(&keys).unwrap().pages, 0);
        assert_eq!(back.restore(&pool, &view(&back), &keys), [RestoreOutcome::Absent; 2]);
        assert_eq!(part((0, 3)).restore(&pool, &view(&part((0, 3))), &keys), [RestoreOutcome::Absent; 2]);
        assert_eq!(back.store(&pool, &view(&back), &keys), [BackupOutcome::Stored; 2]);
        // Another split of the layers, and none: exact rows of both, whatever the stages were.
        for layers in [(0, 2), (2, 4), (0, 3), (3, 4), (1, 3), (0, 4)] {
            let rank = part(layers);
            assert_eq!(rank.restore(&pool, &view(&rank), &keys), [RestoreOutcome::Restored; 2], "{layers:?}");
        }
    }
}

#[test]
fn case_d13_another_layout_gives_the_same_rows_in_its_own_order() {
    let pool = kv_pool("bfloat16", 16);
    let tile = Tile::whole_page(Span { start: 0, end: 2 }, Span { start: 0, end: 2 }, 4).unwrap();
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let keys = keys("orders", 2);
    let view = |layout| {
        let pool = contiguous(ViewPool::new(pool.clone(), tile, layout));
        store.view(support::namespace("r1"), vec![pool], ViewOptions::default()).unwrap()
    };
    let source = page_bytes(5, 2 * 512);
    let stored = backup(&view(LayoutName::LayerFirst), &keys, &Memory::of(&source));
    assert_eq!(stored.outcomes, [BackupOutcome::Stored; 2]);
    let target = Memory::canary(2 * 512);
    assert_eq!(restore(&view(LayoutName::PageFirst), &keys, &target).outcomes, [RestoreOutcome::Restored; 2]);
    let landed = target.bytes();
    assert_ne!(landed, source);
    // [page, k or v, layer, token, head] of 16 bytes becomes [page, k or v, token, layer, head].
    for outer in 0..4 {
        for layer in 0..2 {
            for token in 0..4 {
                let from = outer * 256 + (layer * 4 + token) * 32;
                let to = outer * 256 + (token * 2 + layer) * 32;
                assert!(landed[to..to + 32] == source[from..from + 32]);
            }
        }
    }
}

/// Sets the layout word of a form that is encoded at `form` in `bytes`: from `page_first` to `layer_first`.
fn change_layout(bytes: &mut [u8], form: usize) {
    let at = form + 16 + 28;
    assert_eq!(bytes[at..at + 4], LayoutName::PageFirst.code().to_le_bytes());
    bytes[at..at + 4].copy_from_slice(&LayoutName::LayerFirst.code().to_le_bytes());
}

/// A layout word changed by hand, with every checksum made right again that can be without knowing the pages.
#[test]
fn case_d13_a_forged_layout_word_is_a_miss() {
    for (in_journal, in_segment) in [(true, false), (false, true), (true, true)] {
        let root = tempfile::tempdir().unwrap();
        let keys = keys("forged", 3);
        let source = page_bytes(6, 3 * 512);
        let pool = || contiguous(tiny());
        let open_view = |store: &Store, layout| {
            let pool = ViewPool { layout, ..pool() };
            store.view(support::namespace("r1"), vec![pool], ViewOptions::default()).unwrap()
        };
        {
            let store = open(root.path());
            backup(&open_view(&store, LayoutName::PageFirst), &keys, &Memory::of(&source));
        }
        let [journal] = &files_ending(root.path(), ".idx")[..] else { panic!("one journal") };
        let object = object(root.path(), &keys[0]);
        if in_segment {
            let mut bytes = std::fs::read(&object.segment).unwrap();
            let pool_bytes = pool().pool.canonical_bytes().len();
            let header_end = object.entry.start as usize - 8;
            let run = header_end - pool_bytes - (8 + 64 + 64);
            change_layout(&mut bytes, run + 8);
            let sum = checksum(&bytes[run..header_end]);
            bytes[header_end..header_end + 8].copy_from_slice(&sum.to_le_bytes());
            let start = (object.payload.start + 3 * 512) as usize;
            let length =
                directory::announced_bytes(&bytes[start..]).expect("a directory behind the pages") as usize;
            let directory = directory::decode(&bytes[start..start + length]).unwrap();
            assert_eq!(directory.runs[0].run.form.layout, LayoutName::LayerFirst);
            assert!(directory.runs[0].entries.iter().all(Option::is_none), "entries are bound to the layout");
            std::fs::write(&object.segment, bytes).unwrap();
        }
        if in_journal {
            let mut bytes = std::fs::read(journal).unwrap();
            let mut at = 0;
            while let Step::Frame(frame, next) = step(&bytes, at)
                && frame.kind != FrameKind::Add
            {
                at = next;
            }
            // The first add frame: its header, the unit, the form.
            change_layout(&mut bytes, at + 80 + 64);
            let Step::Damaged(_) = step(&bytes, at) else { panic!("a frame is checked") };
            let length = u32::from_le_bytes(bytes[at + 48..at + 52].try_into().unwrap()) as usize;
            let mut sum = Encoder::default();
            sum.u64(checksum(&bytes[at + 16..at + 80 + length]));
            bytes[at + 8..at + 16].copy_from_slice(&sum.bytes);
            assert!(matches!(step(&bytes, at), Step::Frame(..)));
            std::fs::write(journal, bytes).unwrap();
        } else {
            // Without a journal the directories speak.
            std::fs::remove_file(journal).unwrap();
        }
        for layout in [LayoutName::PageFirst, LayoutName::LayerFirst] {
            let store = open(root.path());
            let target = Memory::canary(3 * 512);
            let outcomes = restore(&open_view(&store, layout), &keys, &target).outcomes;
            assert!(
                outcomes
                    .iter()
                    .all(|outcome| matches!(outcome, RestoreOutcome::Damaged | RestoreOutcome::Absent)),
                "{outcomes:?}"
            );
            assert_eq!(open_view(&store, layout).match_prefix(&keys).unwrap().pages, 0);
            assert!(target.bytes().iter().all(|&byte| byte == CANARY), "raw bytes of another order");
        }
    }
}
