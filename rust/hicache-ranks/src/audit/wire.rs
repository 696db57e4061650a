//! Bytes of records and logs: little-endian numbers, short forms for small ones, lengths before contents.

use crate::error::{RankError, RankErrorKind, Result};

/// Writes bytes.
#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub fn new() -> Writer {
        Writer::default()
    }

    pub fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// Seven bits a byte, lowest first; the high bit says that more follow.
    pub fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.bytes(text.as_bytes());
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// What was written so far.
    pub fn written(&self) -> &[u8] {
        &self.0
    }

    /// Begins anew in the same memory.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads bytes; every call checks what is left and trusts no length.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Reader<'a> {
        Reader { what, rest: bytes }
    }

    pub fn corrupt(&self, message: impl std::fmt::Display) -> RankError {
        RankError::new(RankErrorKind::Corrupt, format!("{}: {message}", self.what))
    }

    pub fn take(&mut self, field: &str, len: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(len) else {
            return Err(self.corrupt(format!("{field} needs {len} bytes, {} are left", self.rest.len())));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub fn byte(&mut self, field: &str) -> Result<u8> {
        Ok(self.take(field, 1)?[0])
    }

    pub fn u32(&mut self, field: &str) -> Result<u32> {
        Ok(self.fixed(field, 4)? as u32)
    }

    pub fn u64(&mut self, field: &str) -> Result<u64> {
        self.fixed(field, 8)
    }

    fn fixed(&mut self, field: &str, len: usize) -> Result<u64> {
        let bytes = self.take(field, len)?;
        Ok(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    pub fn number(&mut self, field: &str) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(field)?;
            let bits = u64::from(byte & 0x7f);
            // One number has one form: nothing beyond 64 bits, no empty last byte.
            if shift == 63 && bits > 1 || byte == 0 && shift > 0 {
                return Err(self.corrupt(format!("{field} is no number in its shortest form")));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.corrupt(format!("{field} has more than 64 bits")))
    }

    pub fn text(&mut self, field: &str) -> Result<&'a str> {
        let len = usize::try_from(self.number(field)?).unwrap_or(usize::MAX);
        let bytes = self.take(field, len)?;
        std::str::from_utf8(bytes).map_err(|_| self.corrupt(format!("{field} is not UTF-8")))
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(self.corrupt(format!("{left} bytes follow the last field"))),
        }
    }
}
