//! Writing and reading little-endian fields.

use crate::format::checksum;

/// Bytes that do not decode: which structure, and how far into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damage {
    /// The structure or field that was being read.
    pub what: &'static str,
    /// Byte position in the input, from its start.
    pub position: u64,
}

impl Damage {
    /// Damage found in `what` at `position`.
    pub fn at(what: &'static str, position: u64) -> Self {
        Damage { what, position }
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "damaged {} at byte {}", self.what, self.position)
    }
}

impl std::error::Error for Damage {}

/// Appends fields to a byte vector.
#[derive(Default)]
pub struct Encoder {
    /// What was written so far.
    pub bytes: Vec<u8>,
}

impl Encoder {
    /// An empty one with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Self {
        Encoder { bytes: Vec::with_capacity(capacity) }
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes.push(value);
        self
    }

    /// Two bytes.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Zero bytes up to a length of `len`.
    pub fn zeros_to(&mut self, len: usize) -> &mut Self {
        debug_assert!(self.bytes.len() <= len);
        self.bytes.resize(len, 0);
        self
    }

    /// The XXH3-64 of everything from `start` on.
    pub fn checksum_from(&mut self, start: usize) -> &mut Self {
        let value = checksum(&self.bytes[start..]);
        self.u64(value)
    }
}

/// Takes fields from the front of a byte slice.
#[derive(Clone)]
pub struct Decoder<'a> {
    input: &'a [u8],
    position: usize,
    what: &'static str,
}

impl<'a> Decoder<'a> {
    /// Reads `input`, naming `what` in any damage.
    pub fn new(what: &'static str, input: &'a [u8]) -> Self {
        Decoder { input, position: 0, what }
    }

    /// Damage at the present position.
    pub fn damage(&self) -> Damage {
        Damage::at(self.what, self.position as u64)
    }

    /// Damage unless `holds`.
    pub fn expect(&self, holds: bool) -> Result<(), Damage> {
        if holds { Ok(()) } else { Err(self.damage()) }
    }

    /// Bytes taken so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes not taken yet.
    pub fn remaining(&self) -> usize {
        self.input.len() - self.position
    }

    /// The next `len` bytes.
    pub fn raw(&mut self, len: usize) -> Result<&'a [u8], Damage> {
        let end =
            self.position.checked_add(len).filter(|&end| end <= self.input.len()).ok_or(self.damage())?;
        let bytes = &self.input[self.position..end];
        self.position = end;
        Ok(bytes)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Damage> {
        let mut out = [0; N];
        out.copy_from_slice(self.raw(N)?);
        Ok(out)
    }

    /// One byte.
    pub fn u8(&mut self) -> Result<u8, Damage> {
        Ok(self.array::<1>()?[0])
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Result<u16, Damage> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Result<u32, Damage> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Result<u64, Damage> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Bytes that must be zero.
    pub fn zeros(&mut self, len: usize) -> Result<(), Damage> {
        let position = self.position;
        match self.raw(len)?.iter().all(|&byte| byte == 0) {
            true => Ok(()),
            false => Err(Damage::at(self.what, position as u64)),
        }
    }

    /// A stored XXH3-64 that must equal that of the bytes from `start` up to here.
    pub fn checksum_from(&mut self, start: usize) -> Result<(), Damage> {
        let expected = checksum(&self.input[start..self.position]);
        let found = self.u64()?;
        self.expect(found == expected)
    }
}
