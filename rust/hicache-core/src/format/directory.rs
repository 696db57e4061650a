//! The directory of a publication unit: what its payload holds, so that a segment describes itself.
//!
//! `[header][offset of each run][checksum]`, then each run: `[run header][checksum][entries]`. Every entry has a
//! checksum of its own under the object's seed, so that a reader can take one entry without the rest, and
//! damage costs the entry, run or unit that it lies in.

use crate::format::form::Form;
use crate::format::{Damage, Decoder, Encoder, ProcessId, SegmentId, checksum_with_seed};
use crate::key::PageKey;
use crate::namespace::Fingerprint;

/// First bytes of a directory. Directories start at multiples of [`DIRECTORY_ALIGNMENT`].
pub const DIRECTORY_MAGIC: [u8; 8] = *b"HICDIR01";

/// Directories start at multiples of this many bytes in a segment.
pub const DIRECTORY_ALIGNMENT: u64 = 64;

const RUN_MAGIC: u32 = u32::from_le_bytes(*b"HRUN");
const HEADER_BYTES: usize = 104;
const RUN_HEADER_BYTES: usize = 4 + 4 + Form::ENCODED_BYTES + 8 + 8 + 4 + 4 + 4 + 4 + 32;
/// Most canonical pool bytes in a run header: more than any pool has, less than a length that could harm.
const MAX_POOL_BYTES: u32 = 1 << 16;

/// Depth of a page whose position in its sequence is not known.
pub const UNKNOWN_DEPTH: u32 = u32::MAX;

/// What comes before a page in its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// The writer did not know.
    Unknown,
    /// Nothing: the page starts a sequence.
    Root,
    /// The page with this key.
    Page(PageKey),
}

/// Header of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryHeader {
    /// Namespace of every object in the unit.
    pub namespace: Fingerprint,
    /// Segment that the unit was written to.
    pub segment: SegmentId,
    /// Generation of the namespace at the time of writing; `clear` raises it.
    pub generation: u64,
    /// Offset of the unit in its segment, in bytes.
    pub unit_offset: u64,
    /// Offset of this directory in its segment.
    pub directory_offset: u64,
    /// Length of this directory.
    pub directory_bytes: u64,
    /// Wall clock at writing, ns since 1970.
    pub written_ns: u64,
}

/// One page in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Key of the page.
    pub key: PageKey,
    /// First stored byte, from the start of the unit.
    pub payload_offset: u64,
    /// Stored length and checksum of each block, in order.
    pub blocks: Vec<Block>,
}

/// One checksum block of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Bytes on disk; equal to the raw length for a block stored as it is.
    pub stored_bytes: u32,
    /// See [`crate::format::block::block_checksum`].
    pub checksum: u64,
}

impl Entry {
    /// Stored bytes of the page.
    pub fn stored_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| u64::from(block.stored_bytes)).sum()
    }

    /// Bytes of an encoded entry: the same for all objects of one form.
    pub fn encoded_bytes(form: &Form) -> u64 {
        32 + 8 + 12 * u64::from(form.blocks()) + 8
    }

    /// Appends the entry.
    pub fn encode(&self, form: &Form, namespace: &Fingerprint, out: &mut Encoder) {
        let start = out.bytes.len();
        out.raw(&self.key.0).u64(self.payload_offset);
        for block in &self.blocks {
            out.u32(block.stored_bytes).u64(block.checksum);
        }
        let checksum = checksum_with_seed(form.seed(namespace, &self.key), &out.bytes[start..]);
        out.u64(checksum);
    }

    /// Reads an entry of an object of `form` and checks it.
    pub fn decode(form: &Form, namespace: &Fingerprint, bytes: &[u8]) -> Result<Self, Damage> {
        let mut input = Decoder::new("directory entry", bytes);
        input.expect(bytes.len() as u64 == Entry::encoded_bytes(form))?;
        let key = PageKey(input.array()?);
        let payload_offset = input.u64()?;
        let mut blocks = Vec::with_capacity(form.blocks() as usize);
        for index in 0..form.blocks() {
            let block = Block { stored_bytes: input.u32()?, checksum: input.u64()? };
            input.expect(block.stored_bytes <= form.block_raw_bytes(index))?;
            blocks.push(block);
        }
        let expected = checksum_with_seed(form.seed(namespace, &key), &bytes[..input.position()]);
        let found = input.u64()?;
        input.expect(found == expected)?;
        Ok(Entry { key, payload_offset, blocks })
    }
}

/// Consecutive pages of one chain, of one form, written together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Form of every object in the run.
    pub form: Form,
    /// Canonical bytes of the pool, so that a segment needs no other file to be understood.
    pub pool_bytes: Vec<u8>,
    /// First stored byte, from the start of the unit.
    pub payload_offset: u64,
    /// Stored bytes of all pages.
    pub payload_bytes: u64,
    /// What comes before the first page.
    pub parent: Parent,
    /// Pages before the first one in its sequence, or [`UNKNOWN_DEPTH`].
    pub depth: u32,
    /// The pages, in chain order.
    pub entries: Vec<Entry>,
}

impl Run {
    fn encoded_bytes(&self) -> u64 {
        let entries = self.entries.len() as u64 * Entry::encoded_bytes(&self.form);
        (RUN_HEADER_BYTES + self.pool_bytes.len() + 8) as u64 + entries
    }
}

/// Bytes that a directory of these runs takes.
pub fn directory_bytes(runs: &[Run]) -> u64 {
    let header = (HEADER_BYTES + 8 * runs.len() + 8) as u64;
    header + runs.iter().map(Run::encoded_bytes).sum::<u64>()
}

/// Offset of each run's first entry from the start of the directory.
pub fn entries_offsets(runs: &[Run]) -> Vec<u64> {
    let mut offset = (HEADER_BYTES + 8 * runs.len() + 8) as u64;
    runs.iter()
        .map(|run| {
            let entries = offset + (RUN_HEADER_BYTES + run.pool_bytes.len() + 8) as u64;
            offset += run.encoded_bytes();
            entries
        })
        .collect()
}

/// Encodes a directory. `header.directory_bytes` is filled in.
pub fn encode(header: &DirectoryHeader, runs: &[Run]) -> Vec<u8> {
    let total = directory_bytes(runs);
    let mut out = Encoder::with_capacity(total as usize);
    out.raw(&DIRECTORY_MAGIC).u32(crate::format::FORMAT_VERSION).u32(runs.len() as u32);
    out.raw(&header.namespace.0).raw(&header.segment.process.0).u32(header.segment.number).u32(0);
    out.u64(header.generation).u64(header.unit_offset).u64(header.directory_offset).u64(total);
    out.u64(header.written_ns).u64(0);
    debug_assert_eq!(out.bytes.len(), HEADER_BYTES);
    let mut offset = (HEADER_BYTES + 8 * runs.len() + 8) as u64;
    for run in runs {
        out.u64(offset);
        offset += run.encoded_bytes();
    }
    out.checksum_from(0);
    for run in runs {
        encode_run(run, &header.namespace, &mut out);
    }
    debug_assert_eq!(out.bytes.len() as u64, total);
    out.bytes
}

fn encode_run(run: &Run, namespace: &Fingerprint, out: &mut Encoder) {
    let start = out.bytes.len();
    out.u32(RUN_MAGIC).u32(run.entries.len() as u32);
    run.form.encode(out);
    out.u64(run.payload_offset).u64(run.payload_bytes).u32(run.depth);
    let (kind, parent) = match run.parent {
        Parent::Unknown => (0, [0; 32]),
        Parent::Root => (1, [0; 32]),
        Parent::Page(key) => (2, key.0),
    };
    out.u32(kind).u32(run.pool_bytes.len() as u32).u32(0).raw(&parent).raw(&run.pool_bytes);
    out.checksum_from(start);
    for entry in &run.entries {
        entry.encode(&run.form, namespace, out);
    }
}

/// A directory as read back: what is whole, and how much is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    /// Its header.
    pub header: DirectoryHeader,
    /// Whole runs, with the offset of their entries from the start of the directory. A damaged entry is `None`.
    pub runs: Vec<ReadRun>,
    /// Runs whose header is damaged.
    pub damaged_runs: u32,
}

/// A run as read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadRun {
    /// The run; `entries` is empty, see `entries` beside it.
    pub run: Run,
    /// Its pages; `None` for a damaged entry.
    pub entries: Vec<Option<Entry>>,
    /// Offset of the first entry from the start of the directory.
    pub entries_offset: u64,
}

/// Reads the header of a directory: of `bytes`, only what the header needs is looked at.
pub fn decode_header(bytes: &[u8]) -> Result<(DirectoryHeader, Vec<u64>), Damage> {
    let mut input = Decoder::new("directory header", bytes);
    input.expect(input.clone().raw(8)? == DIRECTORY_MAGIC)?;
    input.raw(8)?;
    let version = input.u32()?;
    input.expect(version == crate::format::FORMAT_VERSION)?;
    let run_count = input.u32()? as usize;
    let namespace = Fingerprint(input.array()?);
    let segment = SegmentId { process: ProcessId(input.array()?), number: input.u32()? };
    input.zeros(4)?;
    let header = DirectoryHeader {
        namespace,
        segment,
        generation: input.u64()?,
        unit_offset: input.u64()?,
        directory_offset: input.u64()?,
        directory_bytes: input.u64()?,
        written_ns: input.u64()?,
    };
    input.zeros(8)?;
    input.expect(header.unit_offset <= header.directory_offset)?;
    input.expect(header.directory_offset.checked_add(header.directory_bytes).is_some())?;
    input.expect(run_count.checked_mul(8).is_some_and(|table| table <= input.remaining()))?;
    let offsets = (0..run_count).map(|_| input.u64()).collect::<Result<_, _>>()?;
    input.checksum_from(0)?;
    Ok((header, offsets))
}

/// Reads a whole directory.
pub fn decode(bytes: &[u8]) -> Result<Directory, Damage> {
    let (header, offsets) = decode_header(bytes)?;
    if header.directory_bytes != bytes.len() as u64 {
        return Err(Damage::at("directory length", 0));
    }
    let mut directory = Directory { header, runs: Vec::new(), damaged_runs: 0 };
    // Each run ends where the next one starts. No two share bytes, so that all are no more than what was read.
    let ends = offsets.iter().skip(1).copied().chain([header.directory_bytes]);
    let mut free_from = 0;
    for (&offset, end) in offsets.iter().zip(ends) {
        let is_apart = offset >= free_from;
        match decode_run(&header.namespace, bytes, offset, end) {
            Ok(run) if is_apart => {
                directory.runs.push(run);
                free_from = end;
            }
            _ => directory.damaged_runs += 1,
        }
    }
    Ok(directory)
}

fn decode_run(namespace: &Fingerprint, bytes: &[u8], offset: u64, end: u64) -> Result<ReadRun, Damage> {
    let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok());
    let bytes = range.and_then(|(start, end)| bytes.get(start..end));
    let mut input = Decoder::new("run header", bytes.ok_or(Damage::at("run offset", offset))?);
    let magic = input.u32()?;
    input.expect(magic == RUN_MAGIC)?;
    let entry_count = u64::from(input.u32()?);
    let form = Form::decode(&mut input)?;
    let (payload_offset, payload_bytes, depth) = (input.u64()?, input.u64()?, input.u32()?);
    let parent_kind = input.u32()?;
    let pool_len = input.u32()?;
    input.expect(pool_len <= MAX_POOL_BYTES)?;
    input.zeros(4)?;
    let parent_key = input.array()?;
    let parent = match parent_kind {
        0 => Parent::Unknown,
        1 => Parent::Root,
        2 => Parent::Page(PageKey(parent_key)),
        _ => return Err(input.damage()),
    };
    let pool_bytes = input.raw(pool_len as usize)?.to_vec();
    input.checksum_from(0)?;
    let entry_bytes = Entry::encoded_bytes(&form);
    input.expect(entry_count.checked_mul(entry_bytes).is_some_and(|all| all <= input.remaining() as u64))?;
    let entries_offset = offset + input.position() as u64;
    let entries = (0..entry_count)
        .map(|_| {
            input.raw(entry_bytes as usize).and_then(|bytes| Entry::decode(&form, namespace, bytes)).ok()
        })
        .collect();
    let run = Run { form, pool_bytes, payload_offset, payload_bytes, parent, depth, entries: Vec::new() };
    Ok(ReadRun { run, entries, entries_offset })
}

/// Length that the directory at the start of `bytes` claims, not yet checked; `None` when none starts here.
pub fn announced_bytes(bytes: &[u8]) -> Option<u64> {
    const DIRECTORY_BYTES_AT: usize = 16 + 16 + 16 + 8 + 8 + 8 + 8;
    if !bytes.starts_with(&DIRECTORY_MAGIC) {
        return None;
    }
    let field = bytes.get(DIRECTORY_BYTES_AT..DIRECTORY_BYTES_AT + 8)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}
