//! Layouts say where the engine's arrays have their rows: the rule equals nested loops over the array.

use hicache_core::{
    Component, DType, ErrorKind, Layout, LayoutName, Pool, PoolKind, RowUnit, Span, Tile, TokenLattice,
};
use proptest::prelude::*;

/// A row: component, slot, and layer, head and token counted from the tile's first.
pub type Row = (usize, u64, u32, u32, u32);

/// The shape of a pool's pages, for the nested loops.
#[derive(Debug)]
pub struct Shape {
    pub pool: Pool,
    pub tile: Tile,
    pub slots: u64,
}

impl Shape {
    fn tokens(&self, component: usize) -> u32 {
        match self.pool.components()[component].unit {
            RowUnit::Token => self.tile.tokens.count,
            RowUnit::Page => 1,
        }
    }

    fn row_bytes(&self, component: usize) -> u64 {
        u64::from(self.pool.components()[component].row_bytes)
    }

    /// Rows of one component of the host buffer, in the order of its shape.
    fn component_rows(&self, name: LayoutName, c: usize) -> Vec<Row> {
        let (layers, heads, tokens) = (self.tile.layers.len(), self.tile.heads.len(), self.tokens(c));
        let mut rows = Vec::new();
        match name {
            LayoutName::LayerFirst => {
                for l in 0..layers {
                    for p in 0..self.slots {
                        for t in 0..tokens {
                            for h in 0..heads {
                                rows.push((c, p, l, h, t));
                            }
                        }
                    }
                }
            }
            LayoutName::PageFirst => {
                for p in 0..self.slots {
                    for t in 0..tokens {
                        for l in 0..layers {
                            for h in 0..heads {
                                rows.push((c, p, l, h, t));
                            }
                        }
                    }
                }
            }
            LayoutName::PageFirstDirect => {
                for p in 0..self.slots {
                    for l in 0..layers {
                        for t in 0..tokens {
                            for h in 0..heads {
                                rows.push((c, p, l, h, t));
                            }
                        }
                    }
                }
            }
            LayoutName::PageHead => {
                for p in 0..self.slots {
                    for h in 0..heads {
                        for t in 0..tokens {
                            for l in 0..layers {
                                rows.push((c, p, l, h, t));
                            }
                        }
                    }
                }
            }
            other => unreachable!("{other} interleaves its components"),
        }
        rows
    }

    /// Rows of the whole host buffer, in order.
    fn rows(&self, name: LayoutName) -> Vec<Row> {
        let components = 0..self.pool.components().len();
        let LayoutName::PageUnified { heads_per_group } = name else {
            return components.flat_map(|c| self.component_rows(name, c)).collect();
        };
        let mut rows = Vec::new();
        for p in 0..self.slots {
            for g in 0..self.tile.heads.len() / heads_per_group {
                for l in 0..self.tile.layers.len() {
                    for c in components.clone() {
                        for t in 0..self.tokens(c) {
                            for h in 0..heads_per_group {
                                rows.push((c, p, l, g * heads_per_group + h, t));
                            }
                        }
                    }
                }
            }
        }
        rows
    }

    /// Checks that `rows` follow one another without gaps, from `start` on; where they end.
    fn check_sequence(&self, layout: &Layout, buffer: usize, start: u64, rows: &[Row]) -> u64 {
        let mut expected = start;
        for &row in rows {
            assert_eq!(offset(layout, row), (buffer, expected), "{row:?} in {}", layout.name);
            expected += self.row_bytes(row.0);
        }
        expected
    }
}

/// `Layout::offset` for a row counted from the tile's first.
pub fn offset(layout: &Layout, (component, slot, layer, head, token): Row) -> (usize, u64) {
    let Tile { layers, heads, tokens } = layout.tile;
    let token = tokens.first + token * tokens.step;
    layout.offset(component, slot, layers.start + layer, heads.start + head, token)
}

prop_compose! {
    fn any_component()(row_bytes in 1..7u32, unit in prop::sample::select(vec![RowUnit::Token, RowUnit::Token, RowUnit::Page])) -> (u32, RowUnit) {
        (row_bytes, unit)
    }
}

/// Pools of bytes with 1 to 3 components of unlike rows.
pub fn pool() -> impl Strategy<Value = Pool> {
    prop::collection::vec(any_component(), 1..4).prop_map(|components| {
        let components = components.into_iter().enumerate().map(|(i, (row_bytes, unit))| Component {
            unit,
            ..Component::per_token(&i.to_string(), row_bytes)
        });
        Pool::new("kv", PoolKind::Kv, DType::UInt8, None, components.collect()).unwrap()
    })
}

/// A layout whose groups divide `heads`.
pub fn layout_name(heads: u32) -> impl Strategy<Value = LayoutName> {
    let groups = (1..=heads).filter(move |group| heads.is_multiple_of(*group));
    let mut names: Vec<LayoutName> =
        groups.map(|heads_per_group| LayoutName::PageUnified { heads_per_group }).collect();
    names.extend([
        LayoutName::LayerFirst,
        LayoutName::PageFirst,
        LayoutName::PageFirstDirect,
        LayoutName::PageHead,
    ]);
    prop::sample::select(names)
}

prop_compose! {
    fn any_case()(heads in 1..5u32)(
        name in layout_name(heads), heads in Just(heads), head in 0..3u32, layer in 0..3u32, layers in 1..4u32,
        tokens in (0..3u32, 1..4u32, 1..5u32), pool in pool(), slots in 1..4u64,
    ) -> (LayoutName, Shape) {
        let tile = Tile {
            layers: Span { start: layer, end: layer + layers },
            heads: Span { start: head, end: head + heads },
            tokens: TokenLattice { first: tokens.0, step: tokens.1, count: tokens.2 },
        };
        (name, Shape { pool, tile, slots })
    }
}

proptest! {
    #[test]
    fn host_buffers_have_their_rows_in_order((name, shape) in any_case()) {
        let layout = Layout::host(name, &shape.pool, &shape.tile, shape.slots, false).unwrap();
        let end = shape.check_sequence(&layout, 0, 0, &shape.rows(name));
        prop_assert_eq!(&layout.buffer_bytes, &[end]);
        prop_assert_eq!(end, shape.pool.page_bytes(&shape.tile).unwrap() * shape.slots);
    }

    #[test]
    fn split_buffers_have_a_component_each((name, shape) in any_case()) {
        let layout = Layout::host(name, &shape.pool, &shape.tile, shape.slots, true);
        if let LayoutName::PageUnified { .. } = name {
            prop_assert_eq!(layout.is_ok(), shape.pool.components().len() == 1);
            return Ok(());
        }
        let layout = layout.unwrap();
        prop_assert_eq!(layout.buffer_bytes.len(), shape.pool.components().len());
        for (i, &bytes) in layout.buffer_bytes.iter().enumerate() {
            let end = shape.check_sequence(&layout, i, 0, &shape.component_rows(name, i));
            prop_assert_eq!(bytes, end);
        }
    }

    #[test]
    fn objects_are_one_page_alone((name, mut shape) in any_case()) {
        shape.slots = 1;
        let layout = Layout::object(name, &shape.pool, &shape.tile).unwrap();
        let end = shape.check_sequence(&layout, 0, 0, &shape.rows(name));
        prop_assert_eq!((&layout.buffer_bytes[..], layout.slots), (&[end][..], 1));
    }

    #[test]
    fn packed_parts_are_pages_within_pages((name, shape) in any_case(), before in 0..9u64, after in 0..9u64) {
        let part = shape.pool.page_bytes(&shape.tile).unwrap();
        let page = before + part + after;
        let layout = Layout::packed(name, &shape.pool, &shape.tile, shape.slots, before, page).unwrap();
        prop_assert_eq!(&layout.buffer_bytes, &[page * shape.slots]);
        let one = Shape { pool: shape.pool.clone(), tile: shape.tile, slots: 1 };
        for slot in 0..shape.slots {
            let rows: Vec<Row> =
                one.rows(name).into_iter().map(|(c, _, l, h, t)| (c, slot, l, h, t)).collect();
            let end = shape.check_sequence(&layout, 0, slot * page + before, &rows);
            prop_assert_eq!(end, slot * page + before + part);
        }
        let late = Layout::packed(name, &shape.pool, &shape.tile, shape.slots, before + after + 1, page);
        prop_assert_eq!(late.unwrap_err().kind(), ErrorKind::Geometry);
    }

    #[test]
    fn names_read_back(name in layout_name(4), code in any::<u32>()) {
        prop_assert_eq!(LayoutName::parse(&name.to_string()).unwrap(), name);
        prop_assert_eq!(LayoutName::from_code(name.code()).unwrap(), name);
        for code in [code, code & 0xff, code & 0xffff] {
            if let Ok(name) = LayoutName::from_code(code) {
                prop_assert_eq!(name.code(), code);
            }
        }
    }
}

fn tile(layers: u32, heads: u32, tokens: u32) -> Tile {
    Tile::whole_page(Span { start: 0, end: layers }, Span { start: 0, end: heads }, tokens).unwrap()
}

/// The rows of the table in the device plan: strides in bytes of 2 layers, 4 heads of 8 bytes, pages of 16
/// tokens, 5 pages.
#[test]
fn the_engines_strides() {
    let components = vec![Component::per_token("k", 8), Component::per_token("v", 8)];
    let pool = Pool::new("kv", PoolKind::Kv, DType::BFloat16, None, components).unwrap();
    let (layers, heads, tokens, pages, row) = (2, 4, 16, 5, 32);
    let total = tokens * pages;
    let expected = [
        // name, base of V, page, token, layer, head
        (LayoutName::LayerFirst, layers * total * row, tokens * row, row, total * row, 8),
        (LayoutName::PageFirst, total * layers * row, tokens * layers * row, layers * row, row, 8),
        (LayoutName::PageFirstDirect, total * layers * row, layers * tokens * row, row, tokens * row, 8),
        (
            LayoutName::PageHead,
            total * layers * row,
            heads * tokens * layers * 8,
            layers * 8,
            8,
            tokens * layers * 8,
        ),
        (
            LayoutName::PageUnified { heads_per_group: 4 },
            tokens * row,
            layers * 2 * tokens * row,
            row,
            2 * tokens * row,
            8,
        ),
    ];
    for (name, base, page, token, layer, head) in expected {
        let layout = Layout::host(name, &pool, &tile(2, 4, 16), 5, false).unwrap();
        let v = layout.components[1];
        let strides = (v.base, v.page_stride, v.token_stride, v.layer_stride, v.head_stride);
        assert_eq!(strides, (base, page, token, layer, head), "{name}");
    }
    let grouped = LayoutName::PageUnified { heads_per_group: 2 };
    let v = Layout::host(grouped, &pool, &tile(2, 4, 16), 5, false).unwrap().components[1];
    assert_eq!((v.base, v.group_stride), (16 * 16, 2 * 2 * 16 * 16));
}

#[test]
fn hostile_sizes_are_refused() {
    let pool = |row_bytes| {
        let components = vec![Component::per_token("k", row_bytes), Component::per_page("state", row_bytes)];
        Pool::new("kv", PoolKind::Kv, DType::UInt8, None, components).unwrap()
    };
    let huge = tile(65_536, 65_536, 65_536);
    let name = LayoutName::LayerFirst;
    let results = [
        Layout::object(name, &pool(u32::MAX), &huge),
        Layout::host(name, &pool(1), &tile(1, 1, 1), 0, false),
        Layout::host(name, &pool(1), &tile(1, 1, 1), u64::MAX, false),
        Layout::host(name, &pool(65_536), &tile(65_536, 1, 65_536), 1 << 16, true),
        Layout::packed(name, &pool(1), &tile(1, 1, 1), 1, u64::MAX, u64::MAX),
        Layout::packed(name, &pool(1), &tile(1, 1, 1), 2, 0, u64::MAX),
        Layout::packed(name, &pool(1), &tile(1, 1, 1), 0, 0, 2),
        Layout::object(LayoutName::PageUnified { heads_per_group: 3 }, &pool(1), &tile(1, 4, 1)),
        Layout::object(LayoutName::PageUnified { heads_per_group: 0 }, &pool(1), &tile(1, 4, 1)),
        Layout::object(LayoutName::PageUnified { heads_per_group: u32::MAX }, &pool(1), &tile(1, 4, 1)),
        Layout::object(name, &pool(1), &Tile { layers: Span { start: 1, end: 0 }, ..huge }),
    ];
    for (i, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Geometry, "case {i}");
    }
}

#[test]
fn unknown_names_are_refused() {
    for text in
        ["", "page", "Page_First", "page_unified", "page_unified(0)", "page_unified(x)", "page_unified(2"]
    {
        assert_eq!(LayoutName::parse(text).unwrap_err().kind(), ErrorKind::Config, "{text}");
    }
    for code in [0, 6, 1 | 1 << 8, 5, 5 | 65_537 << 8] {
        assert_eq!(LayoutName::from_code(code).unwrap_err().kind(), ErrorKind::Corrupt, "{code}");
    }
}
