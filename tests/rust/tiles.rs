//! Tiles cover and never overlap: the arithmetic equals a plain set of rows.

use hicache_core::{ErrorKind, Span, Tile, TokenLattice, cover};
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGE: u32 = 48;

type Row = (u32, u32, u32);

fn tokens(lattice: &TokenLattice) -> impl Iterator<Item = u32> + use<> {
    let lattice = *lattice;
    (0..lattice.count).map(move |i| lattice.first + i * lattice.step)
}

fn rows(tile: &Tile) -> BTreeSet<Row> {
    let mut rows = BTreeSet::new();
    for layer in tile.layers.start..tile.layers.end {
        for head in tile.heads.start..tile.heads.end {
            rows.extend(tokens(&tile.tokens).map(|token| (layer, head, token)));
        }
    }
    rows
}

fn span(limit: u32) -> impl Strategy<Value = Span> {
    (0..limit).prop_flat_map(move |start| {
        (Just(start), start + 1..=limit).prop_map(|(start, end)| Span { start, end })
    })
}

fn lattice(page: u32) -> impl Strategy<Value = TokenLattice> {
    (0..page, 1..=12u32).prop_flat_map(move |(first, step)| {
        (1..=(page - first).div_ceil(step)).prop_map(move |count| TokenLattice { first, step, count })
    })
}

fn tile() -> impl Strategy<Value = Tile> {
    (span(4), span(3), lattice(PAGE)).prop_map(|(layers, heads, tokens)| Tile { layers, heads, tokens })
}

fn whole() -> Tile {
    Tile::whole_page(Span { start: 0, end: 4 }, Span { start: 0, end: 3 }, PAGE).unwrap()
}

/// The pieces lie in the tiles they name, do not overlap and make up `wanted`.
fn check_cover(wanted: &Tile, stored: &[Tile]) {
    let available: BTreeSet<Row> = stored.iter().flat_map(rows).collect();
    let wanted_rows = rows(wanted);
    let Some(pieces) = cover(wanted, stored) else {
        assert!(!wanted_rows.is_subset(&available), "a cover exists and was not found");
        return;
    };
    let mut seen = BTreeSet::new();
    for piece in &pieces {
        piece.tile.validate(PAGE).unwrap();
        assert!(stored[piece.stored].contains(&piece.tile));
        for row in rows(&piece.tile) {
            assert!(seen.insert(row), "row {row:?} is covered twice");
        }
    }
    assert_eq!(seen, wanted_rows);
}

proptest! {
    #[test]
    fn intersection_is_that_of_sets(a in tile(), b in tile()) {
        let expected: BTreeSet<Row> = rows(&a).intersection(&rows(&b)).copied().collect();
        let found = a.intersect(&b);
        prop_assert_eq!(found.as_ref().map(rows).unwrap_or_default(), expected);
        prop_assert_eq!(found, b.intersect(&a));
        prop_assert_eq!(a.rows(), rows(&a).len() as u64);
        prop_assert_eq!(a.contains(&b), rows(&b).is_subset(&rows(&a)));
    }

    #[test]
    fn position_counts_the_lattice(a in lattice(PAGE), token in 0..PAGE) {
        let expected = tokens(&a).position(|other| other == token);
        prop_assert_eq!(a.position(token), expected.map(|position| position as u32));
        prop_assert_eq!(a.last(), tokens(&a).last());
    }

    #[test]
    fn pieces_tile_the_wanted_exactly(wanted in tile(), stored in prop::collection::vec(tile(), 0..12)) {
        check_cover(&wanted, &stored);
    }

    /// One tile of a grid may be missing or come twice; the rest covers everything else.
    #[test]
    fn shares_of_a_grid_cover_the_page(
        ways in prop::sample::select(vec![1u32, 2, 3, 4, 6, 8, 16, 48]),
        split in 1..4u32,
        order in any::<prop::sample::Index>(),
        lost in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut stored = Vec::new();
        for rank in 0..ways {
            for layers in [Span { start: 0, end: split }, Span { start: split, end: 4 }] {
                let tokens = TokenLattice { first: rank, step: ways, count: PAGE / ways };
                stored.push(Tile { layers, tokens, ..whole() });
            }
        }
        let turn = order.index(stored.len());
        stored.rotate_left(turn);
        if let Some(lost) = lost {
            stored.remove(lost.index(stored.len()));
        }
        prop_assert_eq!(cover(&whole(), &stored).is_none(), lost.is_some());
        check_cover(&whole(), &stored);
    }

    /// No numbers make the arithmetic fail.
    #[test]
    fn arbitrary_numbers_are_answered(
        a in any::<(u32, u32, u32)>(), b in any::<(u32, u32, u32)>(), spans in any::<[u32; 4]>(), page in any::<u32>(),
    ) {
        let a = TokenLattice { first: a.0, step: a.1, count: a.2 };
        let b = TokenLattice { first: b.0, step: b.1, count: b.2 };
        if let Some(common) = a.intersect(&b) {
            for token in [common.first, common.last().unwrap()] {
                prop_assert!(a.position(token).is_some() && b.position(token).is_some());
            }
        }
        let tile = Tile {
            layers: Span { start: spans[0], end: spans[1] },
            heads: Span { start: spans[2], end: spans[3] },
            tokens: a,
        };
        let _ = (tile.rows(), tile.contains(&tile), tile.to_string());
        prop_assert_eq!(tile.validate(page).is_ok(), Tile::new(tile.layers, tile.heads, a, page).is_ok());
    }
}

#[test]
fn interleaved_shares_stay_in_few_pieces() {
    for ways in [2, 3, 8, 16] {
        let stored: Vec<Tile> = (0..ways)
            .map(|rank| Tile {
                tokens: TokenLattice { first: rank, step: ways, count: PAGE / ways },
                ..whole()
            })
            .collect();
        assert_eq!(cover(&whole(), &stored).unwrap().len(), ways as usize, "{ways} ways");
    }
}

#[test]
fn a_tile_that_holds_everything_is_taken_alone() {
    let half = Tile { layers: Span { start: 0, end: 2 }, ..whole() };
    let pieces = cover(&whole(), &[half, whole(), whole()]).unwrap();
    assert_eq!(pieces.len(), 1);
    assert_eq!((pieces[0].stored, pieces[0].tile), (1, whole()));
    // Otherwise what comes first gives all that it has.
    let rest = Tile { layers: Span { start: 1, end: 4 }, ..whole() };
    let pieces = cover(&whole(), &[half, rest]).unwrap();
    assert_eq!(pieces[0].tile, half);
    assert_eq!(pieces[1].tile.layers, Span { start: 2, end: 4 });
}

#[test]
fn a_scattered_cover_ends_at_a_bound() {
    let wanted = Tile::whole_page(Span { start: 0, end: 1 }, Span { start: 0, end: 1 }, 65_536).unwrap();
    let mut stored: Vec<Tile> = (0..2u32)
        .map(|first| Tile { tokens: TokenLattice { first, step: 32_768, count: 2 }, ..wanted })
        .collect();
    assert!(cover(&wanted, &stored).is_none());
    stored.push(wanted);
    assert_eq!(cover(&wanted, &stored).unwrap().len(), 1);
}

#[test]
fn equal_token_sets_are_equal_tiles() {
    let one =
        |step| Tile::new(whole().layers, whole().heads, TokenLattice { first: 5, step, count: 1 }, PAGE);
    assert_eq!(one(1).unwrap(), one(16).unwrap());
    assert!(one(0).is_err(), "a step is at least 1 all the same");
}

#[test]
fn impossible_tiles_are_refused() {
    let good = whole();
    let token = |first, step, count| Tile { tokens: TokenLattice { first, step, count }, ..good };
    let layers = |start, end| Tile { layers: Span { start, end }, ..good };
    let heads = |start, end| Tile { heads: Span { start, end }, ..good };
    let bad = [
        token(0, 1, 0),
        token(0, 0, 2),
        token(0, 1, PAGE + 1),
        token(1, 1, PAGE),
        token(u32::MAX, u32::MAX, u32::MAX),
        layers(2, 2),
        layers(3, 2),
        layers(0, 65_537),
        heads(1, 1),
        heads(0, u32::MAX),
    ];
    for tile in bad {
        assert_eq!(tile.validate(PAGE).unwrap_err().kind(), ErrorKind::Geometry, "{tile}");
    }
    for page_size in [0, PAGE - 1, 65_537, u32::MAX] {
        assert!(good.validate(page_size).is_err(), "{page_size}");
    }
}
