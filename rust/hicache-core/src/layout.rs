//! Layouts: where each row of a page sits, as one affine rule for each component.
//!
//! A row is one token (or page), one layer, one head of one component, and is contiguous. The offset of each
//! is `base + slot * page_stride + token * token_stride + layer * layer_stride + group * group_stride +
//! head_in_group * head_stride`. Every host layout of the engine is an instance, and so is a stored object.
//! This module computes offsets; it moves no bytes.
//!
//! Shapes, for `P` pages (slots) of `S` tokens, `L` layers, `H` heads in `G` groups, rows of `D` bytes:
//!
//! | layout | host buffer | one page alone |
//! | --- | --- | --- |
//! | `layer_first` | `[2, L, P, S, H, D]` | `[2, L, S, H, D]` |
//! | `page_first` | `[2, P, S, L, H, D]` | `[2, S, L, H, D]` |
//! | `page_first_direct` | `[2, P, L, S, H, D]` | `[2, L, S, H, D]` |
//! | `page_head` | `[2, P, H, S, L, D]` | `[2, H, S, L, D]` |
//! | `page_unified` | `[P, G, L, 2, S, H/G, D]` | `[G, L, 2, S, H/G, D]` |
//!
//! `2` stands for the pool's components, whose rows may differ in size; latent rows (MLA) are one
//! component and one head. A component with a row for each page has `S = 1`.
//!
//! Source: sglang 0.5.23, `mem_cache/pool_host/{mha,mla,page_unified}.py`.

use crate::error::{Error, Result};
use crate::pool::{Pool, RowUnit};
use crate::tile::Tile;
use std::fmt;

/// The order of a page's axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LayoutName {
    /// Layers outside pages: the device's order, on the host.
    LayerFirst,
    /// Pages, then tokens, then layers.
    PageFirst,
    /// Pages, then layers, then tokens.
    PageFirstDirect,
    /// Pages, then heads, then tokens, then layers.
    PageHead,
    /// Pages, then groups of heads, then layers, then components, then tokens.
    PageUnified {
        /// Heads of one group, 1 to 65,536; 1 for latent rows.
        heads_per_group: u32,
    },
}

impl LayoutName {
    /// The number that stands for the layout in files: the order in the low 8 bits, the heads of a group
    /// above them (0 without groups).
    pub fn code(self) -> u32 {
        match self {
            LayoutName::LayerFirst => 1,
            LayoutName::PageFirst => 2,
            LayoutName::PageFirstDirect => 3,
            LayoutName::PageHead => 4,
            LayoutName::PageUnified { heads_per_group } => 5 | heads_per_group << 8,
        }
    }

    /// Reads [`LayoutName::code`] back.
    ///
    /// # Errors
    ///
    /// `Corrupt` for a number that stands for no layout.
    pub fn from_code(code: u32) -> Result<LayoutName> {
        match (code & 0xff, code >> 8) {
            (1, 0) => Ok(LayoutName::LayerFirst),
            (2, 0) => Ok(LayoutName::PageFirst),
            (3, 0) => Ok(LayoutName::PageFirstDirect),
            (4, 0) => Ok(LayoutName::PageHead),
            (5, heads_per_group @ 1..=Tile::MAX_INDEX) => Ok(LayoutName::PageUnified { heads_per_group }),
            _ => Err(Error::corrupt(format!("{code:#x} stands for no layout"))),
        }
    }

    /// Reads the engine's word (`page_first`); groups are given as `page_unified(2)`, 2 heads each.
    ///
    /// # Errors
    ///
    /// `Config` for an unknown word, and for `page_unified` without the heads of a group.
    pub fn parse(text: &str) -> Result<LayoutName> {
        match text {
            "layer_first" => Ok(LayoutName::LayerFirst),
            "page_first" => Ok(LayoutName::PageFirst),
            "page_first_direct" => Ok(LayoutName::PageFirstDirect),
            "page_head" => Ok(LayoutName::PageHead),
            _ => parse_page_unified(text),
        }
    }

    /// The engine's word, without the heads of a group; `Display` gives what [`LayoutName::parse`] reads.
    pub fn name(self) -> &'static str {
        match self {
            LayoutName::LayerFirst => "layer_first",
            LayoutName::PageFirst => "page_first",
            LayoutName::PageFirstDirect => "page_first_direct",
            LayoutName::PageHead => "page_head",
            LayoutName::PageUnified { .. } => "page_unified",
        }
    }
}

fn parse_page_unified(text: &str) -> Result<LayoutName> {
    let Some(rest) = text.strip_prefix("page_unified") else {
        return Err(Error::config(format!(
            "unknown layout {text:?}: expected layer_first, page_first, page_first_direct, page_head or page_unified(heads per group)"
        )));
    };
    let heads = rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).map(str::parse);
    match heads {
        Some(Ok(heads_per_group @ 1..=Tile::MAX_INDEX)) => Ok(LayoutName::PageUnified { heads_per_group }),
        _ => Err(Error::config(format!(
            "layout {text:?}: give the heads of a group, 1 to {}, as in page_unified(2)",
            Tile::MAX_INDEX
        ))),
    }
}

impl fmt::Display for LayoutName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            LayoutName::PageUnified { heads_per_group } => write!(f, "({heads_per_group})"),
            _ => Ok(()),
        }
    }
}

/// Where the rows of one component sit; offsets and strides in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComponentLayout {
    /// The buffer that holds them.
    pub buffer: usize,
    /// Offset of the first row of the tile in slot 0.
    pub base: u64,
    /// From one slot to the next.
    pub page_stride: u64,
    /// From one token of the tile to the next, whatever the step of its lattice.
    pub token_stride: u64,
    /// From one layer to the next.
    pub layer_stride: u64,
    /// From one group of heads to the next.
    pub group_stride: u64,
    /// From one head of a group to the next.
    pub head_stride: u64,
    /// Heads of a group; all heads of the tile where there are no groups.
    pub heads_per_group: u32,
    /// Bytes of one row.
    pub row_bytes: u64,
    /// A row for each token, or one for the page.
    pub unit: RowUnit,
}

impl ComponentLayout {
    /// Offset of `head`, counted from the tile's first, within a layer and token.
    pub(crate) fn head_offset(&self, head: u32) -> u64 {
        let (group, head) = (head / self.heads_per_group, head % self.heads_per_group);
        u64::from(group) * self.group_stride + u64::from(head) * self.head_stride
    }
}

/// Where every row of every page of a tile sits, in one buffer or several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Order of the axes.
    pub name: LayoutName,
    /// What each page holds, in model-global coordinates.
    pub tile: Tile,
    /// Pages.
    pub slots: u64,
    /// One rule for each component of the pool, in the pool's order.
    pub components: Vec<ComponentLayout>,
    /// Exact bytes of each buffer.
    pub buffer_bytes: Vec<u64>,
}

impl Layout {
    /// One page of `tile` alone, in one buffer without gaps: the engine's flat page, and a stored object.
    /// `slots` is 1.
    ///
    /// # Errors
    ///
    /// `Geometry` for an impossible tile, for groups that do not divide its heads, and for more than 2^64
    /// bytes.
    pub fn object(name: LayoutName, pool: &Pool, tile: &Tile) -> Result<Layout> {
        Layout::packed(name, pool, tile, 1, 0, pool.page_bytes(tile)?)
    }

    /// The engine's host pool of `slots` pages: one buffer of all components, one behind the other
    /// (`page_unified`: interleaved), or with `split_buffers` a buffer each.
    ///
    /// # Errors
    ///
    /// `Geometry` as for [`Layout::object`], for 0 slots, and for split buffers of `page_unified`, whose
    /// components cannot be apart.
    pub fn host(
        name: LayoutName,
        pool: &Pool,
        tile: &Tile,
        slots: u64,
        split_buffers: bool,
    ) -> Result<Layout> {
        let page_bytes = pool.page_bytes(tile)?;
        if let LayoutName::PageUnified { .. } = name {
            if split_buffers && pool.components().len() > 1 {
                return Err(Error::geometry("page_unified keeps all components of a page in one buffer"));
            }
            return Layout::packed(name, pool, tile, slots, 0, page_bytes);
        }
        // Everything below is at most this product.
        let total_bytes = buffer_bytes(slots, page_bytes)?;
        let mut components = page_components(name, pool, tile)?;
        let mut buffers = Vec::new();
        let mut base = 0;
        for (i, component) in components.iter_mut().enumerate() {
            let rows_bytes = component_page_bytes(component, tile);
            if name == LayoutName::LayerFirst {
                component.page_stride = rows_bytes / u64::from(tile.layers.len());
                component.layer_stride = component.page_stride * slots;
            } else {
                component.page_stride = rows_bytes;
            }
            if split_buffers {
                (component.buffer, component.base) = (i, 0);
                buffers.push(rows_bytes * slots);
            } else {
                component.base = base;
                base += rows_bytes * slots;
            }
        }
        if !split_buffers {
            buffers.push(total_bytes);
        }
        Ok(Layout { name, tile: *tile, slots, components, buffer_bytes: buffers })
    }

    /// A part of larger host pages: in each of `slots` pages of `page_bytes`, the page of `tile` stands at
    /// `part_offset`, in the order of [`Layout::object`].
    ///
    /// # Errors
    ///
    /// `Geometry` as for [`Layout::object`], for 0 slots, and where the part does not fit into the page.
    pub fn packed(
        name: LayoutName,
        pool: &Pool,
        tile: &Tile,
        slots: u64,
        part_offset: u64,
        page_bytes: u64,
    ) -> Result<Layout> {
        let part_bytes = pool.page_bytes(tile)?;
        if part_offset.checked_add(part_bytes).is_none_or(|end| end > page_bytes) {
            return Err(Error::geometry(format!(
                "a part of {part_bytes} bytes at offset {part_offset} does not fit into pages of {page_bytes} bytes"
            )));
        }
        let total_bytes = buffer_bytes(slots, page_bytes)?;
        let mut components = page_components(name, pool, tile)?;
        for component in &mut components {
            component.base += part_offset;
            component.page_stride = page_bytes;
        }
        Ok(Layout { name, tile: *tile, slots, components, buffer_bytes: vec![total_bytes] })
    }

    /// The buffer, and the offset in it, of the row of `component` in `slot` for a model-global `layer` and
    /// `head` and a `token` of the page. A component with one row for the page has it for every token.
    ///
    /// # Panics
    ///
    /// Where the layout has no such component or slot, or its tile no such layer, head or token.
    pub fn offset(&self, component: usize, slot: u64, layer: u32, head: u32, token: u32) -> (usize, u64) {
        let (layers, heads) = (self.tile.layers, self.tile.heads);
        let position = self.tile.tokens.position(token);
        let inside = slot < self.slots
            && (layers.start..layers.end).contains(&layer)
            && (heads.start..heads.end).contains(&head);
        let Some(position) = position.filter(|_| inside) else {
            panic!("slot {slot}, layer {layer}, head {head}, token {token} are not all in {}", self.tile);
        };
        let rule = &self.components[component];
        let token_offset = match rule.unit {
            RowUnit::Token => u64::from(position) * rule.token_stride,
            RowUnit::Page => 0,
        };
        let offset = rule.base
            + slot * rule.page_stride
            + u64::from(layer - layers.start) * rule.layer_stride
            + rule.head_offset(head - heads.start)
            + token_offset;
        (rule.buffer, offset)
    }
}

fn buffer_bytes(slots: u64, page_bytes: u64) -> Result<u64> {
    if slots == 0 {
        return Err(Error::geometry("a layout of 0 slots holds nothing"));
    }
    slots.checked_mul(page_bytes).ok_or_else(|| {
        Error::geometry(format!("{slots} slots of {page_bytes} bytes are more than 2^64 bytes"))
    })
}

/// Bytes of one component in one page.
fn component_page_bytes(component: &ComponentLayout, tile: &Tile) -> u64 {
    let cells = u64::from(tile.layers.len()) * u64::from(tile.heads.len());
    cells * component.unit.rows(tile) * component.row_bytes
}

/// The rules within one page alone. The caller has checked that the bytes of a page fit into 64 bits: every
/// product here is at most that sum.
fn page_components(name: LayoutName, pool: &Pool, tile: &Tile) -> Result<Vec<ComponentLayout>> {
    let (layers, heads) = (u64::from(tile.layers.len()), u64::from(tile.heads.len()));
    let heads_per_group = match name {
        LayoutName::PageUnified { heads_per_group } => heads_per_group,
        _ => tile.heads.len(),
    };
    let group_heads = u64::from(heads_per_group);
    if heads_per_group == 0 || heads % group_heads != 0 {
        return Err(Error::geometry(format!(
            "groups of {heads_per_group} heads do not divide the {heads} heads of the tile"
        )));
    }
    // page_unified only: bytes of all components of one layer of one group.
    let token_bytes = |(row_bytes, unit): (u64, RowUnit)| row_bytes * unit.rows(tile);
    let shapes = pool.components().iter().map(|component| (u64::from(component.row_bytes), component.unit));
    let cell_bytes = shapes.clone().map(token_bytes).sum::<u64>() * group_heads;

    let mut base = 0;
    let mut components = Vec::with_capacity(pool.components().len());
    for (row_bytes, unit) in shapes {
        let rows = unit.rows(tile);
        let (token_stride, layer_stride, head_stride, group_stride, page_bytes);
        match name {
            LayoutName::PageFirst => {
                (head_stride, layer_stride) = (row_bytes, heads * row_bytes);
                token_stride = layers * layer_stride;
                (group_stride, page_bytes) = (heads * head_stride, rows * token_stride);
            }
            LayoutName::LayerFirst | LayoutName::PageFirstDirect => {
                (head_stride, token_stride) = (row_bytes, heads * row_bytes);
                layer_stride = rows * token_stride;
                (group_stride, page_bytes) = (heads * head_stride, layers * layer_stride);
            }
            LayoutName::PageHead => {
                (layer_stride, token_stride) = (row_bytes, layers * row_bytes);
                head_stride = rows * token_stride;
                (group_stride, page_bytes) = (heads * head_stride, heads * head_stride);
            }
            LayoutName::PageUnified { .. } => {
                (head_stride, token_stride) = (row_bytes, group_heads * row_bytes);
                layer_stride = cell_bytes;
                // The next component begins within the same layer of the same group.
                (group_stride, page_bytes) = (layers * layer_stride, rows * token_stride);
            }
        }
        components.push(ComponentLayout {
            buffer: 0,
            base,
            page_stride: 0,
            token_stride,
            layer_stride,
            group_stride,
            head_stride,
            heads_per_group,
            row_bytes,
            unit,
        });
        base += page_bytes;
    }
    Ok(components)
}
