//! The budget's ledger: how much disk each live process may take.

use crate::format::{Damage, Decoder, Encoder, FORMAT_VERSION, ProcessId};

/// First bytes of a ledger.
pub const LEDGER_MAGIC: [u8; 8] = *b"HICBUDG1";

/// Length of the file in bytes: what is behind the last entry is not looked at.
pub const LEDGER_BYTES: u64 = 16 << 10;

/// Most processes of one ledger.
pub const MAX_LEDGER_ENTRIES: usize = (LEDGER_BYTES as usize - HEADER_BYTES - 8) / ENTRY_BYTES;

const HEADER_BYTES: usize = 56;
const ENTRY_BYTES: usize = 32;

/// What one live process may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerEntry {
    /// The process.
    pub process: ProcessId,
    /// Most bytes that its own files take on disk, now and until it asks again.
    pub limit: u64,
    /// Bytes of the limit that its files did not take yet when it last asked; never less than that now.
    pub outstanding: u64,
}

/// Contents of the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// Counts full measurements.
    pub measurements: u64,
    /// Wall clock of the last one, ns since 1970. Decides only how soon the next one may come.
    pub measured_ns: u64,
    /// Bytes that all files took then.
    pub measured_bytes: u64,
    /// Bytes of what belongs to no live process, and of what file systems add by themselves.
    pub nobody: u64,
    /// The live processes.
    pub entries: Vec<LedgerEntry>,
}

impl Ledger {
    /// Sum of all limits.
    pub fn sum(&self) -> u64 {
        self.entries.iter().fold(self.nobody, |sum, entry| sum.saturating_add(entry.limit))
    }

    /// Entry of a process.
    pub fn entry(&self, process: ProcessId) -> Option<&LedgerEntry> {
        self.entries.iter().find(|entry| entry.process == process)
    }

    /// Entry of a process, to be changed.
    pub fn entry_mut(&mut self, process: ProcessId) -> Option<&mut LedgerEntry> {
        self.entries.iter_mut().find(|entry| entry.process == process)
    }

    /// The bytes at the start of the file.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::with_capacity(HEADER_BYTES + ENTRY_BYTES * self.entries.len() + 8);
        out.raw(&LEDGER_MAGIC).u32(FORMAT_VERSION).u32(self.entries.len() as u32);
        out.u64(self.measurements).u64(self.measured_ns).u64(self.measured_bytes).u64(self.nobody).u64(0);
        for entry in &self.entries {
            out.raw(&entry.process.0).u64(entry.limit).u64(entry.outstanding);
        }
        out.checksum_from(0);
        out.bytes
    }

    /// Reads the file's bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let mut input = Decoder::new("budget ledger", bytes);
        let magic = input.array::<8>()?;
        input.expect(magic == LEDGER_MAGIC)?;
        let version = input.u32()?;
        input.expect(version == FORMAT_VERSION)?;
        let count = input.u32()? as usize;
        input.expect(count <= MAX_LEDGER_ENTRIES)?;
        let (measurements, measured_ns, measured_bytes) = (input.u64()?, input.u64()?, input.u64()?);
        let nobody = input.u64()?;
        input.zeros(8)?;
        let entries = (0..count)
            .map(|_| {
                let process = ProcessId(input.array()?);
                Ok(LedgerEntry { process, limit: input.u64()?, outstanding: input.u64()? })
            })
            .collect::<Result<_, Damage>>()?;
        input.checksum_from(0)?;
        Ok(Ledger { measurements, measured_ns, measured_bytes, nobody, entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_comes_back_and_any_flipped_bit_is_seen() {
        let entry = |byte| LedgerEntry { process: ProcessId([byte; 16]), limit: 9 << 20, outstanding: 4096 };
        let ledger = Ledger {
            measurements: 3,
            measured_ns: 7,
            measured_bytes: 12 << 20,
            nobody: 1 << 20,
            entries: vec![entry(1), entry(2)],
        };
        let mut bytes = ledger.encode();
        assert_eq!(ledger.sum(), 19 << 20);
        let used = bytes.len();
        bytes.resize(LEDGER_BYTES as usize, 0xa5);
        assert_eq!(Ledger::decode(&bytes).unwrap(), ledger);
        for bit in 0..used * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Ledger::decode(&bytes).is_err(), "bit {bit} flipped unseen");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let full = Ledger { entries: vec![entry(3); MAX_LEDGER_ENTRIES], ..ledger };
        assert!(full.encode().len() as u64 <= LEDGER_BYTES);
        assert_eq!(Ledger::decode(&full.encode()).unwrap(), full);
    }
}
