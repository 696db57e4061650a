//! The log that a rank writes: records in checksummed blocks, readable up to where the rank died.
//!
//! ```text
//! header   "hcaudit" 0   u32 version   u32 rank   u32 ranks   u64 run   u64 checksum of the 28 bytes before
//! block    u32 bytes of payload   u32 number of the block   u64 checksum   payload
//! payload  frames: number length, then  0 text           the next name
//!                                       1 text           the next stream
//!                                       2 stream name    and the rest of a record, see `record`
//! ```
//!
//! Numbers are little-endian, those without a width in seven-bit groups. A checksum is the XXH3 (64 bits) of
//! run, number of the block and payload. Names are told once and then meant by their order. The last block of a
//! rank that was killed may be cut; everything before it is read.

use super::record::Record;
use super::wire::{Reader, Writer};
use crate::digest;
use crate::error::{RankError, RankErrorKind, Result};
use crate::topology::Rank;
use std::collections::BTreeMap;

const MAGIC: &[u8; 8] = b"hcaudit\0";
const VERSION: u32 = 1;
/// A block is closed when its payload has reached this size.
const BLOCK_BYTES: usize = 16 << 10;

/// Whose log it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogHeader {
    /// The rank that wrote it.
    pub rank: Rank,
    /// How many ranks there are.
    pub ranks: u32,
    /// A number that all logs of one run share.
    pub run: u64,
}

/// Encodes records. It does no I/O: the bytes are taken out and written by the caller.
#[derive(Debug)]
pub struct LogWriter {
    header: LogHeader,
    out: Vec<u8>,
    block: Writer,
    /// The frame under way; its memory is used again for each one.
    frame: Writer,
    blocks: u32,
    names: BTreeMap<String, u64>,
    streams: BTreeMap<String, u64>,
}

impl LogWriter {
    /// A log; its header is ready to be written.
    pub fn new(header: LogHeader) -> LogWriter {
        let mut writer = Writer::new();
        writer.bytes(MAGIC);
        [VERSION, header.rank.0, header.ranks].iter().for_each(|&value| writer.u32(value));
        writer.u64(header.run);
        let mut out = writer.finish();
        let checksum = digest::of_bytes(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        let (names, streams) = (BTreeMap::new(), BTreeMap::new());
        let (block, frame) = (Writer::new(), Writer::new());
        LogWriter { header, out, block, frame, blocks: 0, names, streams }
    }

    /// Appends a record of a stream.
    pub fn append(&mut self, stream: &str, record: &Record) {
        let name = intern(&mut self.block, &mut self.names, 0, &record.name);
        let stream = intern(&mut self.block, &mut self.streams, 1, stream);
        self.frame.clear();
        self.frame.byte(2);
        self.frame.number(stream);
        self.frame.number(name);
        record.write_rest(&mut self.frame);
        self.block.number(self.frame.len() as u64);
        self.block.bytes(self.frame.written());
        if self.block.len() >= BLOCK_BYTES {
            self.close_block();
        }
    }

    fn close_block(&mut self) {
        if self.block.len() == 0 {
            return;
        }
        let payload = self.block.written();
        self.out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        self.out.extend_from_slice(&self.blocks.to_le_bytes());
        self.out.extend_from_slice(&checksum(self.header.run, self.blocks, payload).to_le_bytes());
        self.out.extend_from_slice(payload);
        self.block.clear();
        self.blocks += 1;
    }

    /// Bytes that are complete: the header and closed blocks, to be appended to the file.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Closes the block under way, so that everything recorded so far is in the bytes that [`take`](Self::take)
    /// gives.
    pub fn flush(&mut self) {
        self.close_block();
    }
}

fn intern(block: &mut Writer, known: &mut BTreeMap<String, u64>, tag: u8, text: &str) -> u64 {
    if let Some(&number) = known.get(text) {
        return number;
    }
    let number = known.len() as u64;
    known.insert(text.to_owned(), number);
    let mut frame = Writer::new();
    frame.byte(tag);
    frame.text(text);
    let frame = frame.finish();
    block.number(frame.len() as u64);
    block.bytes(&frame);
    number
}

fn checksum(run: u64, block: u32, payload: &[u8]) -> u64 {
    digest::mix(digest::mix(run, u64::from(block)), digest::of_bytes(payload))
}

/// A log that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLog {
    /// Whose it is.
    pub header: LogHeader,
    /// Records of each stream, in order.
    pub streams: BTreeMap<String, Vec<Record>>,
    /// Why reading stopped before the end, for a log whose rank was killed or whose bytes are damaged.
    pub cut: Option<String>,
}

impl AuditLog {
    /// Reads a log. A last block that is incomplete or damaged ends it; what stands before counts.
    ///
    /// # Errors
    ///
    /// `corrupt` for a damaged header, or a whole block that does not say what its checksum promises;
    /// `unsupported_version` for a newer log.
    pub fn decode(bytes: &[u8]) -> Result<AuditLog> {
        let mut reader = Reader::new("audit log", bytes);
        if reader.take("magic", MAGIC.len())? != MAGIC {
            return Err(reader.corrupt("these bytes do not begin as one"));
        }
        let version = reader.u32("version")?;
        if version != VERSION {
            let message = format!("audit log of version {version}, this build reads {VERSION}");
            return Err(RankError::new(RankErrorKind::UnsupportedVersion, message));
        }
        let header = LogHeader {
            rank: Rank(reader.u32("rank")?),
            ranks: reader.u32("ranks")?,
            run: reader.u64("run")?,
        };
        if reader.u64("checksum")? != digest::of_bytes(&bytes[..MAGIC.len() + 20]) {
            return Err(reader.corrupt("the checksum of the header does not match"));
        }
        let mut log = AuditLog { header, streams: BTreeMap::new(), cut: None };
        let (mut names, mut order) = (Vec::new(), Vec::new());
        for number in 0.. {
            if reader.is_empty() {
                break;
            }
            match next_block(&mut reader, header.run, number) {
                Ok(payload) => log.read_block(payload, &mut names, &mut order)?,
                Err(error) => {
                    log.cut = Some(format!("block {number}: {error}"));
                    break;
                }
            }
        }
        Ok(log)
    }

    fn read_block(&mut self, payload: &[u8], names: &mut Vec<String>, order: &mut Vec<String>) -> Result<()> {
        let mut reader = Reader::new("audit log", payload);
        while !reader.is_empty() {
            let len = usize::try_from(reader.number("length of a frame")?).unwrap_or(usize::MAX);
            let mut frame = Reader::new("audit log", reader.take("frame", len)?);
            match frame.byte("tag of a frame")? {
                0 => names.push(frame.text("name")?.to_owned()),
                1 => order.push(frame.text("stream")?.to_owned()),
                2 => {
                    let stream = known(&mut frame, order, "stream")?;
                    let name = known(&mut frame, names, "name")?;
                    let record = Record::read_rest(name, &mut frame)?;
                    self.streams.entry(stream).or_default().push(record);
                }
                tag => return Err(frame.corrupt(format!("tag {tag} of a frame"))),
            }
            frame.finish()?;
        }
        Ok(())
    }
}

fn next_block<'a>(reader: &mut Reader<'a>, run: u64, number: u32) -> Result<&'a [u8]> {
    let len = reader.u32("length of a block")? as usize;
    let found = reader.u32("number of a block")?;
    let expected = reader.u64("checksum of a block")?;
    let payload = reader.take("payload", len)?;
    if found != number || checksum(run, number, payload) != expected {
        return Err(reader.corrupt("its number or checksum does not match"));
    }
    Ok(payload)
}

fn known(frame: &mut Reader<'_>, list: &[String], what: &str) -> Result<String> {
    let number = frame.number(what)?;
    let entry = usize::try_from(number).ok().and_then(|number| list.get(number));
    entry.cloned().ok_or_else(|| frame.corrupt(format!("{what} {number} of {}", list.len())))
}
