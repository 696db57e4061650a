//! Format 1: the bytes on disk. `docs/format.md` describes every field and is held equal by golden fixtures.
//!
//! This module turns structures into bytes and back, and nothing else: it opens no file. All integers are
//! little endian. A decoder trusts no length, count or offset; damaged input gives [`Damage`], never a
//! panic and never an allocation larger than the input.

pub mod archive;
pub mod block;
pub mod directory;
pub mod form;
pub mod frame;
pub mod ledger;
pub mod root;
pub mod segment;
pub mod setup;
mod wire;

pub use wire::{Damage, Decoder, Encoder};

/// Version of the format that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Identity of a process: 128 random bits, never a pid (two containers may both be pid 1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub [u8; 16]);

impl ProcessId {
    /// A fresh one.
    pub fn random() -> crate::Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|error| {
            crate::Error::new(crate::ErrorKind::Io, format!("the system gives no random bytes: {error}"))
        })?;
        Ok(ProcessId(bytes))
    }
}

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl std::fmt::Debug for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ProcessId({self})")
    }
}

impl std::str::FromStr for ProcessId {
    type Err = Damage;

    fn from_str(text: &str) -> Result<Self, Damage> {
        let mut bytes = [0; 16];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| Damage::at("process id", 0))?;
        // One spelling only, so that a name and its id are the same thing.
        if hex::encode(bytes) != text {
            return Err(Damage::at("process id", 0));
        }
        Ok(ProcessId(bytes))
    }
}

/// A segment: the `number`-th payload file that one process wrote. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId {
    /// Its writer.
    pub process: ProcessId,
    /// Counts from 0 in each process.
    pub number: u32,
}

impl SegmentId {
    /// Name of its file inside the namespace's folder.
    pub fn file_name(&self) -> String {
        format!("{}-{}.seg", self.process, self.number)
    }

    /// The segment that a file of this name holds; `None` for any other name.
    pub fn from_file_name(name: &str) -> Option<Self> {
        let (process, number) = name.strip_suffix(".seg")?.split_once('-')?;
        let id = SegmentId { process: process.parse().ok()?, number: number.parse().ok()? };
        (id.file_name() == name).then_some(id)
    }
}

impl std::fmt::Display for SegmentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.file_name())
    }
}

/// XXH3-64 of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

/// XXH3-64 of `bytes` under `seed`.
pub fn checksum_with_seed(seed: u64, bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot_with_seed(seed, bytes)
}
