//! Segment files: a header, publication units, and once sealed a table of the units' directories.

use crate::format::{Damage, Decoder, Encoder, FORMAT_VERSION, ProcessId, SegmentId};
use crate::namespace::{Fingerprint, Namespace};

/// First bytes of a segment.
pub const SEGMENT_MAGIC: [u8; 8] = *b"HICSEG01";

/// Bytes of a segment's header; the first unit starts here.
pub const SEGMENT_HEADER_BYTES: u64 = 4096;

/// Last bytes of a sealed segment start with this.
const SEAL_MAGIC: [u8; 8] = *b"HICSEAL1";

/// Bytes of the fixed part at the very end of a sealed segment.
pub const SEAL_BYTES: u64 = 64;

/// Header of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Which segment this is.
    pub segment: SegmentId,
    /// Namespace of all its objects, in full, so that the segment needs no manifest.
    pub namespace: Namespace,
    /// Generation of the namespace that all its units belong to.
    pub generation: u64,
    /// Wall clock at creation, ns since 1970.
    pub created_ns: u64,
}

impl SegmentHeader {
    /// The header as [`SEGMENT_HEADER_BYTES`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let namespace = self.namespace.canonical_bytes();
        let mut out = Encoder::with_capacity(SEGMENT_HEADER_BYTES as usize);
        out.raw(&SEGMENT_MAGIC).u32(FORMAT_VERSION).u32(self.segment.number);
        out.raw(&self.segment.process.0).raw(&self.namespace.fingerprint().0);
        out.u64(self.generation).u64(self.created_ns).u32(namespace.len() as u32).u32(0).raw(&namespace);
        out.zeros_to(SEGMENT_HEADER_BYTES as usize - 8).checksum_from(0);
        out.bytes
    }

    /// Reads a header.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let mut input = Decoder::new("segment header", bytes);
        let magic: [u8; 8] = input.array()?;
        input.expect(magic == SEGMENT_MAGIC)?;
        let version = input.u32()?;
        input.expect(version == FORMAT_VERSION)?;
        let number = input.u32()?;
        let segment = SegmentId { process: ProcessId(input.array()?), number };
        let fingerprint = Fingerprint(input.array()?);
        let (generation, created_ns) = (input.u64()?, input.u64()?);
        let len = input.u32()? as usize;
        input.zeros(4)?;
        let namespace = Namespace::from_canonical_bytes(input.raw(len)?)
            .map_err(|_| Damage::at("namespace in a segment", 0))?;
        input.expect(namespace.fingerprint() == fingerprint)?;
        let padding =
            (SEGMENT_HEADER_BYTES as usize - 8).checked_sub(input.position()).ok_or(input.damage())?;
        input.zeros(padding)?;
        input.checksum_from(0)?;
        Ok(SegmentHeader { segment, namespace, generation, created_ns })
    }
}

/// End of a sealed segment: where its directories are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    /// Which segment this is.
    pub segment: SegmentId,
    /// Offset of each published unit's directory, in bytes.
    pub directories: Vec<u64>,
}

impl Seal {
    /// `[offset of each directory][fixed part of SEAL_BYTES]`, to be written at `offset`.
    pub fn encode(&self, offset: u64) -> Vec<u8> {
        let mut out = Encoder::with_capacity(8 * self.directories.len() + SEAL_BYTES as usize);
        for &directory in &self.directories {
            out.u64(directory);
        }
        out.raw(&SEAL_MAGIC).raw(&self.segment.process.0).u32(self.segment.number);
        out.u32(self.directories.len() as u32).u64(offset);
        out.zeros_to(8 * self.directories.len() + SEAL_BYTES as usize - 8).checksum_from(0);
        out.bytes
    }

    /// Where the seal starts and how many directories it lists, from the last [`SEAL_BYTES`] bytes of a file.
    pub fn locate(fixed: &[u8]) -> Result<(u64, u32), Damage> {
        let mut input = Decoder::new("seal", fixed);
        let magic: [u8; 8] = input.array()?;
        input.expect(magic == SEAL_MAGIC)?;
        input.raw(20)?;
        let count = input.u32()?;
        Ok((input.u64()?, count))
    }

    /// Reads a whole seal, from where [`Seal::locate`] says up to the end of the file.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let table = (bytes.len() as u64).checked_sub(SEAL_BYTES).ok_or(Damage::at("seal", 0))?;
        let mut input = Decoder::new("seal", bytes);
        input.expect(table.is_multiple_of(8))?;
        let directories: Vec<u64> = (0..table / 8).map(|_| input.u64()).collect::<Result<_, _>>()?;
        let magic: [u8; 8] = input.array()?;
        input.expect(magic == SEAL_MAGIC)?;
        let segment = SegmentId { process: ProcessId(input.array()?), number: input.u32()? };
        let count = input.u32()?;
        input.expect(u64::from(count) == table / 8)?;
        input.u64()?;
        input.zeros(bytes.len() - 8 - input.position())?;
        input.checksum_from(0)?;
        Ok(Seal { segment, directories })
    }
}
