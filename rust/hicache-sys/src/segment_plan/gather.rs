//! Gather blocks of a prefix that is spread over ranks: plans that pack a rank's pages before an all-gather, and
//! unpack all ranks' pages after it.
//!
//! ```text
//!            rank 1's pool pages of layer l                 scratch, two slots in turn
//!            [trash][ 4 ][ 9 ][ 2 ] ...            slot l % 2: | block 0 | block 1 | block 2 | block 3 |
//!                     |    |    |                                          4 9 2 T
//!                     '----'----'---- pack, index 4 9 2 trash -------------^          B = 4 pages a block
//! ```
//!
//! Every rank sends a block of the same number of pages, so a rank with fewer pages fills its block with copies of a
//! page that nobody reads, the trash page.

use super::error::{PlanError, in_range};
use super::{IndexKind, IndexVector, Segment, SegmentSide, Strides};

/// The scratch in which prefixes are assembled: two slots that adjacent layers use in turn, each a block for every
/// rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherShape {
    /// Address of slot 0.
    pub scratch: u64,
    /// Bytes from slot 0 to slot 1.
    pub slot_bytes: u64,
    /// Ranks that share the prefixes.
    pub ranks: u32,
    /// Pages of a block, padding included.
    pub block_pages: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Bytes of a row: one token of one layer of one component, contiguous.
    pub row_bytes: u32,
}

/// Rows of one layer in a rank's pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherRank {
    /// Address of the row of page 0, slot 0.
    pub base: u64,
    /// Bytes from page to page and from slot to slot; `group` is not used.
    pub strides: Strides,
    /// Pages of the pool, the trash page included.
    pub pages: u32,
    /// Pages to move, in order.
    pub index: IndexVector,
}

impl GatherShape {
    /// Bytes of a rank's block.
    pub fn block_bytes(&self) -> u64 {
        let page_bytes = u64::from(self.page_size) * u64::from(self.row_bytes);
        page_bytes.saturating_mul(self.block_pages.into())
    }

    /// Address of the block of `rank` in the slot of `layer`.
    ///
    /// # Errors
    /// [`PlanError::Count`] for a rank that there is not, an impossible page size, and where the blocks of all ranks do not fit into a slot.
    pub fn block(&self, layer: u32, rank: u32) -> Result<u64, PlanError> {
        in_range("ranks", self.ranks, 1, u32::MAX)?;
        in_range("rank", rank, 0, self.ranks - 1)?;
        in_range("page size", self.page_size, 1, super::MAX_COUNT - 1)?;
        let all_blocks = self.block_bytes().checked_mul(self.ranks.into());
        if all_blocks.is_none_or(|bytes| bytes > self.slot_bytes) {
            let least = all_blocks.unwrap_or(u64::MAX);
            return Err(PlanError::Count {
                what: "slot bytes",
                least,
                most: u64::MAX,
                found: self.slot_bytes,
            });
        }
        let offset = u64::from(layer % 2) * self.slot_bytes + u64::from(rank) * self.block_bytes();
        self.scratch.checked_add(offset).ok_or(PlanError::Count {
            what: "scratch address",
            least: 0,
            most: u64::MAX - offset,
            found: self.scratch,
        })
    }

    /// Pages of a block as the index of [`gather_pack`]: `pages`, then the trash page.
    ///
    /// # Errors
    /// [`PlanError::Count`] for more pages than a block has.
    pub fn padded(&self, pages: &[i64], trash: i64) -> Result<Vec<i64>, PlanError> {
        in_range("pages of a block", pages.len() as u64, 0, self.block_pages)?;
        let mut index = vec![trash; self.block_pages as usize];
        index[..pages.len()].copy_from_slice(pages);
        Ok(index)
    }

    /// Scratch of `pages` pages at `base`, one behind the other.
    fn scratch_side(&self, base: u64) -> Result<SegmentSide, PlanError> {
        let slot = i64::from(self.row_bytes);
        let strides = Strides { page: slot * i64::from(self.page_size), slot, group: 0 };
        SegmentSide::identity(base, strides, self.page_size)
    }

    fn pool_side(&self, pool: &GatherRank) -> Result<SegmentSide, PlanError> {
        let strides = Strides { group: 0, ..pool.strides };
        SegmentSide::new(IndexKind::Page, pool.base, strides, self.page_size, pool.pages, Some(pool.index))
    }

    fn items(&self, pages: u64) -> Result<u32, PlanError> {
        let items = pages.saturating_mul(self.page_size.into());
        in_range("tokens of a gather", items, 0, super::MAX_COUNT - 1)?;
        Ok(items as u32)
    }
}

/// Packs a rank's pages of `layer` into its block: `pool.index` holds [`GatherShape::block_pages`] pages, as
/// [`GatherShape::padded`] makes them. The longest runs there are.
///
/// # Errors
/// [`PlanError::Count`] where a number of `shape` or `pool` is out of range.
pub fn gather_pack(
    shape: &GatherShape,
    layer: u32,
    rank: u32,
    pool: &GatherRank,
) -> Result<Segment, PlanError> {
    let destination = shape.scratch_side(shape.block(layer, rank)?)?;
    let items = shape.items(shape.block_pages.into())?;
    Ok(Segment::new(shape.pool_side(pool)?, destination, items, 1, shape.row_bytes)?.compact())
}

/// Unpacks the blocks of all ranks, in rank order, from the slot of `layer` into pages: `pool.index` holds
/// `ranks * block_pages` pages, negative where the block has padding. (Many writers of one trash page would be a race.)
///
/// # Errors
/// As for [`gather_pack`].
pub fn gather_unpack(shape: &GatherShape, layer: u32, pool: &GatherRank) -> Result<Segment, PlanError> {
    let source = shape.scratch_side(shape.block(layer, 0)?)?;
    let items = shape.items(u64::from(shape.ranks) * u64::from(shape.block_pages))?;
    Ok(Segment::new(source, shape.pool_side(pool)?, items, 1, shape.row_bytes)?.compact())
}
