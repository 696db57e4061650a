//! Journal frames: what one process says to all others.
//!
//! A journal is a sequence of frames and nothing else; every frame can be understood alone. A reader takes a
//! frame whole or not at all, since an append can be seen in parts or torn by a kill.

use crate::format::directory::UNKNOWN_DEPTH;
use crate::format::form::Form;
use crate::format::{Damage, Decoder, Encoder, ProcessId, SegmentId, checksum};
use crate::key::PageKey;
use crate::namespace::Fingerprint;

/// First bytes of a frame.
pub const FRAME_MAGIC: [u8; 8] = *b"HICFRM01";

/// Bytes of a frame before its records.
pub const FRAME_HEADER_BYTES: usize = 80;

/// Frames start at multiples of this many bytes, so that a reader finds the next one after damage.
pub const FRAME_ALIGNMENT: usize = 8;

/// Most bytes of records in one frame.
pub const MAX_BODY_BYTES: u32 = 64 << 20;

/// Leading bytes of a page key that journals and the index keep; the full key is compared before bytes are
/// served.
pub type ShortKey = [u8; 16];

/// The leading bytes of `key`.
pub fn short_key(key: &PageKey) -> ShortKey {
    let mut short = [0; 16];
    short.copy_from_slice(&key.0[..16]);
    short
}

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// A publication unit is complete and readable.
    Add,
    /// Objects left, and their bytes may already be gone.
    Remove,
    /// Objects failed to read or verify; nobody should try again.
    Quarantine,
    /// Prefixes were used: their last pages.
    Touch,
    /// A segment is complete and will not grow.
    Seal,
    /// Totals of this process so far; the last such frame holds.
    Counters,
    /// This journal says all that matters of the ones before it of the same process. It stands outside the
    /// sequence.
    Checkpoint,
    /// Totals of processes that are dead and whose journals are gone; the last such frame of a process holds.
    Inherited,
    /// How this process is set up, in words for people; the last such frame holds.
    Setup,
    /// A later build's; skipped.
    Other(u16),
}

impl FrameKind {
    fn code(self) -> u16 {
        match self {
            FrameKind::Add => 1,
            FrameKind::Remove => 2,
            FrameKind::Quarantine => 3,
            FrameKind::Touch => 4,
            FrameKind::Seal => 5,
            FrameKind::Counters => 6,
            FrameKind::Checkpoint => 7,
            FrameKind::Inherited => 8,
            FrameKind::Setup => 9,
            FrameKind::Other(code) => code,
        }
    }

    fn from_code(code: u16) -> Self {
        match code {
            1 => FrameKind::Add,
            2 => FrameKind::Remove,
            3 => FrameKind::Quarantine,
            4 => FrameKind::Touch,
            5 => FrameKind::Seal,
            6 => FrameKind::Counters,
            7 => FrameKind::Checkpoint,
            8 => FrameKind::Inherited,
            9 => FrameKind::Setup,
            other => FrameKind::Other(other),
        }
    }
}

/// A frame as read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Who speaks.
    pub process: ProcessId,
    /// Counts from 0 in each process.
    pub sequence: u64,
    /// What is said.
    pub kind: FrameKind,
    /// How many records follow.
    pub records: u32,
    /// Namespace that it is about; all zero for none.
    pub namespace: Fingerprint,
    /// Wall clock at writing, ns since 1970.
    pub written_ns: u64,
    /// The records.
    pub body: &'a [u8],
}

impl Frame<'_> {
    /// The frame as bytes, padded to [`FRAME_ALIGNMENT`].
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::with_capacity(FRAME_HEADER_BYTES + self.body.len() + FRAME_ALIGNMENT);
        out.raw(&FRAME_MAGIC).u64(0).raw(&self.process.0).u64(self.sequence);
        out.u16(self.kind.code()).u16(0).u32(self.records).u32(self.body.len() as u32).u32(0);
        out.raw(&self.namespace.0).u64(self.written_ns).raw(self.body);
        let value = checksum(&out.bytes[16..]);
        out.bytes[8..16].copy_from_slice(&value.to_le_bytes());
        out.zeros_to(out.bytes.len().next_multiple_of(FRAME_ALIGNMENT));
        out.bytes
    }

    /// Reads the frame at the start of `bytes`, with the bytes that it takes there.
    pub fn decode(bytes: &[u8]) -> Result<(Frame<'_>, usize), Damage> {
        let mut input = Decoder::new("journal frame", bytes);
        let magic: [u8; 8] = input.array()?;
        input.expect(magic == FRAME_MAGIC)?;
        let stored = input.u64()?;
        let (process, sequence) = (ProcessId(input.array()?), input.u64()?);
        let kind = FrameKind::from_code(input.u16()?);
        input.zeros(2)?;
        let (records, body_bytes) = (input.u32()?, input.u32()?);
        input.expect(body_bytes <= MAX_BODY_BYTES)?;
        input.zeros(4)?;
        let (namespace, written_ns) = (Fingerprint(input.array()?), input.u64()?);
        let body = input.raw(body_bytes as usize)?;
        input.expect(checksum(&bytes[16..input.position()]) == stored)?;
        let total = input.position().next_multiple_of(FRAME_ALIGNMENT);
        input.zeros(total - input.position())?;
        Ok((Frame { process, sequence, kind, records, namespace, written_ns, body }, total))
    }
}

/// What stands at a place in a journal.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// A whole frame, and the place after it.
    Frame(Frame<'a>, usize),
    /// Damage up to a place where a whole frame starts.
    Damaged(usize),
    /// No whole frame from here on: the rest may still be on its way, or torn.
    Incomplete,
}

/// Looks at `bytes[position..]`.
pub fn step(bytes: &[u8], position: usize) -> Step<'_> {
    if position >= bytes.len() {
        return Step::Incomplete;
    }
    if let Ok((frame, length)) = Frame::decode(&bytes[position..]) {
        return Step::Frame(frame, position + length);
    }
    // Behind damage the next frame starts at a multiple of FRAME_ALIGNMENT with the magic.
    let mut next = position + FRAME_ALIGNMENT;
    while next + FRAME_HEADER_BYTES <= bytes.len() {
        if bytes[next..next + 8] == FRAME_MAGIC && Frame::decode(&bytes[next..]).is_ok() {
            return Step::Damaged(next);
        }
        next += FRAME_ALIGNMENT;
    }
    Step::Incomplete
}

/// The one record of an `Add` frame: a unit and its runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddUnit {
    /// Where it lies.
    pub segment: SegmentId,
    /// Generation of the namespace that it belongs to.
    pub generation: u64,
    /// First byte of the unit in the segment.
    pub unit_offset: u64,
    /// Bytes of payload and directory.
    pub unit_bytes: u64,
    /// First byte of the directory in the segment.
    pub directory_offset: u64,
    /// Bytes of the directory.
    pub directory_bytes: u64,
}

/// One run in an `Add` frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddRun<'a> {
    /// Form of its objects.
    pub form: Form,
    /// First byte of the directory entries in the segment; with the segment, this names the run for ever.
    pub entries_offset: u64,
    /// First stored byte in the segment.
    pub payload_offset: u64,
    /// Stored bytes of all pages.
    pub payload_bytes: u64,
    /// Key before the first page; all zero when unknown or when the run starts a sequence (depth 0).
    pub parent: ShortKey,
    /// Pages before the first one, or [`UNKNOWN_DEPTH`].
    pub depth: u32,
    /// Keys of the pages, [`ShortKey`] after [`ShortKey`].
    pub keys: &'a [u8],
}

impl AddRun<'_> {
    /// Pages in the run.
    pub fn pages(&self) -> usize {
        self.keys.len() / 16
    }

    /// Whether the writer knew where the run stands in its sequence.
    pub fn depth_is_known(&self) -> bool {
        self.depth != UNKNOWN_DEPTH
    }
}

/// Encodes the body of an `Add` frame.
pub fn encode_add(unit: &AddUnit, runs: &[AddRun<'_>]) -> Vec<u8> {
    let keys: usize = runs.iter().map(|run| run.keys.len()).sum();
    let mut out = Encoder::with_capacity(64 + runs.len() * (56 + Form::ENCODED_BYTES) + keys);
    out.raw(&unit.segment.process.0).u32(unit.segment.number).u32(runs.len() as u32).u64(unit.generation);
    out.u64(unit.unit_offset).u64(unit.unit_bytes).u64(unit.directory_offset).u64(unit.directory_bytes);
    for run in runs {
        run.form.encode(&mut out);
        out.u64(run.entries_offset).u64(run.payload_offset).u64(run.payload_bytes);
        out.raw(&run.parent).u32(run.depth).u32(run.pages() as u32).raw(run.keys);
    }
    out.bytes
}

/// Reads the body of an `Add` frame, handing each run to `each`.
pub fn decode_add<'a>(body: &'a [u8], mut each: impl FnMut(&AddUnit, AddRun<'a>)) -> Result<AddUnit, Damage> {
    let mut input = Decoder::new("add frame", body);
    let process = ProcessId(input.array()?);
    let segment = SegmentId { process, number: input.u32()? };
    let run_count = input.u32()?;
    let unit = AddUnit {
        segment,
        generation: input.u64()?,
        unit_offset: input.u64()?,
        unit_bytes: input.u64()?,
        directory_offset: input.u64()?,
        directory_bytes: input.u64()?,
    };
    for _ in 0..run_count {
        let form = Form::decode(&mut input)?;
        let (entries_offset, payload_offset, payload_bytes) = (input.u64()?, input.u64()?, input.u64()?);
        let (parent, depth, pages) = (input.array()?, input.u32()?, input.u32()? as usize);
        let keys = input.raw(pages.checked_mul(16).ok_or(input.damage())?)?;
        each(&unit, AddRun { form, entries_offset, payload_offset, payload_bytes, parent, depth, keys });
    }
    input.expect(input.remaining() == 0)?;
    Ok(unit)
}

/// The place of an object; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Location {
    /// Its segment.
    pub segment: SegmentId,
    /// First byte of its run's directory entries in the segment.
    pub entries_offset: u64,
    /// Position in the run.
    pub ordinal: u32,
}

/// Why an object left, or must not be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Removed to keep the budget.
    Evicted,
    /// Its bytes do not verify.
    Damaged,
    /// Its bytes belong to another page.
    Foreign,
    /// The system could not read it.
    Unreadable,
    /// Another copy of it stays.
    Duplicate,
    /// Older than the time to live.
    Expired,
    /// A later build's reason.
    Other(u16),
}

impl Reason {
    fn code(self) -> u16 {
        match self {
            Reason::Evicted => 1,
            Reason::Damaged => 2,
            Reason::Foreign => 3,
            Reason::Unreadable => 4,
            Reason::Duplicate => 5,
            Reason::Expired => 6,
            Reason::Other(code) => code,
        }
    }

    fn from_code(code: u16) -> Self {
        use Reason::{Damaged, Duplicate, Evicted, Expired, Foreign, Unreadable};
        [Evicted, Damaged, Foreign, Unreadable, Duplicate, Expired]
            .into_iter()
            .find(|reason| reason.code() == code)
            .unwrap_or(Reason::Other(code))
    }

    /// Whether the object was given up because its bytes cannot be had, not to make room.
    pub fn is_quarantine(self) -> bool {
        matches!(self, Reason::Damaged | Reason::Foreign | Reason::Unreadable)
    }

    /// Name in the tools.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Evicted => "evicted",
            Reason::Damaged => "damaged",
            Reason::Foreign => "foreign bytes",
            Reason::Unreadable => "unreadable",
            Reason::Duplicate => "duplicate",
            Reason::Expired => "expired",
            Reason::Other(_) => "unknown reason",
        }
    }
}

/// A record of a `Remove` or `Quarantine` frame: objects of one run that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone {
    /// The first object.
    pub location: Location,
    /// Key of the first object.
    pub key: ShortKey,
    /// How many objects, at least one.
    pub objects: u32,
    /// Why.
    pub reason: Reason,
}

/// Encodes the body of a `Remove` or `Quarantine` frame.
pub fn encode_gone(records: &[Gone]) -> Vec<u8> {
    let mut out = Encoder::with_capacity(records.len() * 56);
    for record in records {
        let Location { segment, entries_offset, ordinal } = record.location;
        out.raw(&segment.process.0).u32(segment.number).u32(ordinal).u64(entries_offset);
        out.raw(&record.key).u16(record.reason.code()).u16(0).u32(record.objects - 1);
    }
    out.bytes
}

/// Reads the body of a `Remove` or `Quarantine` frame.
pub fn decode_gone(body: &[u8]) -> Result<Vec<Gone>, Damage> {
    let mut input = Decoder::new("remove frame", body);
    let mut records = Vec::with_capacity(body.len() / 56);
    while input.remaining() > 0 {
        let process = ProcessId(input.array()?);
        let segment = SegmentId { process, number: input.u32()? };
        let ordinal = input.u32()?;
        let location = Location { segment, entries_offset: input.u64()?, ordinal };
        let (key, reason) = (input.array()?, Reason::from_code(input.u16()?));
        input.zeros(2)?;
        // One less than the number: a record of format 1's first builds, which had zeros here, is of one object.
        let objects = input.u32()?.saturating_add(1);
        records.push(Gone { location, key, objects, reason });
    }
    Ok(records)
}

/// Encodes the body of a `Touch` frame: the last page of each used prefix, the latest use last.
pub fn encode_touch(keys: &[ShortKey]) -> Vec<u8> {
    keys.as_flattened().to_vec()
}

/// Reads the body of a `Touch` frame.
pub fn decode_touch(body: &[u8]) -> Result<&[ShortKey], Damage> {
    let (keys, rest) = body.as_chunks();
    match rest {
        [] => Ok(keys),
        _ => Err(Damage::at("touch frame", body.len() as u64)),
    }
}

/// Encodes the body of a `Counters` frame: number and value of each counter.
pub fn encode_counters(values: &[(u32, u64)]) -> Vec<u8> {
    let mut out = Encoder::with_capacity(values.len() * 12);
    for &(counter, value) in values {
        out.u32(counter).u64(value);
    }
    out.bytes
}

/// Reads the body of a `Counters` frame.
pub fn decode_counters(body: &[u8]) -> Result<Vec<(u32, u64)>, Damage> {
    let mut input = Decoder::new("counters frame", body);
    input.expect(body.len().is_multiple_of(12))?;
    (0..body.len() / 12).map(|_| Ok((input.u32()?, input.u64()?))).collect()
}

/// Encodes the body of a `Seal` frame: the segment and its length in bytes.
pub fn encode_seal(segment: SegmentId, file_bytes: u64) -> Vec<u8> {
    let mut out = Encoder::default();
    out.raw(&segment.process.0).u32(segment.number).u32(0).u64(file_bytes);
    out.bytes
}

/// Reads the body of a `Seal` frame.
pub fn decode_seal(body: &[u8]) -> Result<(SegmentId, u64), Damage> {
    let mut input = Decoder::new("seal frame", body);
    let process = ProcessId(input.array()?);
    let segment = SegmentId { process, number: input.u32()? };
    input.zeros(4)?;
    Ok((segment, input.u64()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(body: &[u8]) -> Vec<u8> {
        let (process, namespace) = (ProcessId([7; 16]), Fingerprint([9; 16]));
        Frame { process, sequence: 3, kind: FrameKind::Seal, records: 1, namespace, written_ns: 5, body }
            .encode()
    }

    #[test]
    fn a_torn_frame_is_taken_when_it_is_whole_and_not_before() {
        let whole = frame(b"record!");
        for cut in 0..whole.len() {
            assert_eq!(step(&whole[..cut], 0), Step::Incomplete, "{cut} of {} bytes", whole.len());
        }
        assert!(
            matches!(step(&whole, 0), Step::Frame(frame, end) if frame.body == b"record!" && end == whole.len())
        );
    }

    #[test]
    fn damage_in_the_middle_costs_one_frame() {
        let bytes = [frame(b"one"), frame(b"two"), frame(b"three")].concat();
        let length = frame(b"one").len();
        for at in 0..length {
            let mut damaged = bytes.clone();
            damaged[length + at] ^= 0x10;
            assert!(matches!(step(&damaged, 0), Step::Frame(_, end) if end == length));
            assert_eq!(step(&damaged, length), Step::Damaged(2 * length), "byte {at}");
        }
    }
}
