//! The form of a stored object: everything but its key and its place.

use crate::format::{Damage, Decoder, Encoder, checksum};
use crate::key::PageKey;
use crate::layout::LayoutName;
use crate::namespace::Fingerprint;
use crate::tile::{Span, Tile, TokenLattice};

/// How a payload is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Codec {
    /// Bytes as they are.
    None,
    /// Each block a standard zstd frame.
    Zstd,
    /// Each block two standard zstd frames, of its even bytes and of its odd bytes, for 16-bit floats.
    ZstdPlanes,
}

impl Codec {
    /// Number in the format.
    pub fn code(self) -> u8 {
        match self {
            Codec::None => 0,
            Codec::Zstd => 1,
            Codec::ZstdPlanes => 2,
        }
    }

    /// Codec of a number in the format.
    pub fn from_code(code: u8) -> Option<Self> {
        [Codec::None, Codec::Zstd, Codec::ZstdPlanes].into_iter().find(|codec| codec.code() == code)
    }

    /// Name in the tools.
    pub fn name(self) -> &'static str {
        match self {
            Codec::None => "none",
            Codec::Zstd => "zstd",
            Codec::ZstdPlanes => "zstd+planes",
        }
    }
}

/// Smallest and largest checksum block, in bytes. A page smaller than a block is one block.
pub const BLOCK_BYTES: std::ops::RangeInclusive<u32> = (8 << 10)..=(64 << 10);

/// Largest page that one object holds, in bytes.
pub const MAX_PAGE_BYTES: u64 = 1 << 30;

/// What all objects of a run have in common. Two objects of equal key and form hold the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Form {
    /// Identity of the pool.
    pub pool: Fingerprint,
    /// The rectangle that the object holds.
    pub tile: Tile,
    /// Order of the rows inside the object.
    pub layout: LayoutName,
    /// How blocks are encoded.
    pub codec: Codec,
    /// Raw bytes of a checksum block; the last one of a page may be shorter.
    pub block_bytes: u32,
    /// Raw bytes of one object.
    pub page_bytes: u64,
}

impl Form {
    /// Bytes of an encoded form.
    pub const ENCODED_BYTES: usize = 16 + 28 + 4 + 1 + 3 + 4 + 8;

    /// Checksum blocks of one object.
    pub fn blocks(&self) -> u32 {
        self.page_bytes.div_ceil(u64::from(self.block_bytes)) as u32
    }

    /// Raw bytes of block `index`.
    pub fn block_raw_bytes(&self, index: u32) -> u32 {
        let start = u64::from(index) * u64::from(self.block_bytes);
        (self.page_bytes - start).min(u64::from(self.block_bytes)) as u32
    }

    /// Appends the form.
    pub fn encode(&self, out: &mut Encoder) {
        let tile = &self.tile;
        out.raw(&self.pool.0);
        out.u32(tile.layers.start).u32(tile.layers.end).u32(tile.heads.start).u32(tile.heads.end);
        out.u32(tile.tokens.first).u32(tile.tokens.step).u32(tile.tokens.count);
        out.u32(self.layout.code()).u8(self.codec.code()).raw(&[0; 3]);
        out.u32(self.block_bytes).u64(self.page_bytes);
    }

    /// Reads a form; one that no writer makes is damage.
    pub fn decode(input: &mut Decoder<'_>) -> Result<Self, Damage> {
        let pool = Fingerprint(input.array()?);
        let layers = Span { start: input.u32()?, end: input.u32()? };
        let heads = Span { start: input.u32()?, end: input.u32()? };
        let tokens = TokenLattice { first: input.u32()?, step: input.u32()?, count: input.u32()? };
        let layout = LayoutName::from_code(input.u32()?).map_err(|_| input.damage())?;
        let codec = Codec::from_code(input.u8()?).ok_or(input.damage())?;
        input.zeros(3)?;
        let form = Form {
            pool,
            tile: Tile { layers, heads, tokens },
            layout,
            codec,
            block_bytes: input.u32()?,
            page_bytes: input.u64()?,
        };
        input.expect(BLOCK_BYTES.contains(&form.block_bytes))?;
        input.expect((1..=MAX_PAGE_BYTES).contains(&form.page_bytes))?;
        input.expect(form.tile.validate(Tile::MAX_PAGE_SIZE).is_ok())?;
        Ok(form)
    }

    /// Seed that binds checksums of the object `key` to its identity, so that bytes which are right for
    /// another page, pool, tile, layout or namespace never verify here.
    pub fn seed(&self, namespace: &Fingerprint, key: &PageKey) -> u64 {
        let mut identity = Encoder::with_capacity(16 + Self::ENCODED_BYTES + 32);
        identity.raw(&namespace.0);
        self.encode(&mut identity);
        identity.raw(&key.0);
        checksum(&identity.bytes)
    }
}
