//! What a namespace and a pool share as identities: canonical bytes, a fingerprint, named differences.
//!
//! Canonical bytes are an ASCII tag and then every field in a fixed order, integers little-endian, text
//! with its length before it, options with a presence byte before them. So no two different values have
//! the same bytes. The reader trusts no length and allocates nothing that the bytes do not hold.

use crate::error::{Error, ErrorKind, Result};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

/// The first 16 bytes of the SHA-256 of an identity's canonical bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 16]);

impl Fingerprint {
    pub(crate) fn of(canonical: &[u8]) -> Fingerprint {
        let digest: [u8; 32] = Sha256::digest(canonical).into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        Fingerprint(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = Error;

    /// Reads 32 hex digits.
    fn from_str(text: &str) -> Result<Fingerprint> {
        let mut bytes = [0; 16];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| {
            Error::config(format!("a fingerprint is 32 hex digits, got {} bytes of text", text.len()))
        })?;
        Ok(Fingerprint(bytes))
    }
}

/// One field in which two identities differ, with both values as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The field's name, as in the JSON form: `revision`, `components[1].row_bytes`.
    pub field: String,
    /// The value on the left.
    pub left: String,
    /// The value on the right.
    pub right: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} is not {}", self.field, self.left, self.right)
    }
}

/// Collects the fields that differ.
#[derive(Default)]
pub(crate) struct Differences(pub Vec<Difference>);

impl Differences {
    /// Notes `field` where the two texts differ.
    pub fn compare(&mut self, field: impl Into<String>, left: impl fmt::Display, right: impl fmt::Display) {
        let (left, right) = (left.to_string(), right.to_string());
        if left != right {
            self.0.push(Difference { field: field.into(), left, right });
        }
    }
}

/// Text of an optional value for people: quoted, so that no value can be taken for `absent`.
pub(crate) fn optional_text(value: Option<&str>) -> String {
    value.map_or_else(|| "absent".to_owned(), |text| format!("{text:?}"))
}

/// Refuses text that is empty, longer than `limit` bytes, or holds a NUL.
pub(crate) fn check_text(what: &str, text: &str, limit: usize) -> Result<()> {
    let problem = if text.is_empty() {
        "is empty".to_owned()
    } else if text.len() > limit {
        format!("is {} bytes long, at most {limit} are allowed", text.len())
    } else if text.contains('\0') {
        "holds a NUL character".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::namespace(format!("{what} {problem}")))
}

/// Writes canonical bytes. Lengths are checked before, when the identity is made.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub fn new(tag: &[u8]) -> Writer {
        Writer(tag.to_vec())
    }

    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn text(&mut self, text: &str) {
        debug_assert!(text.len() <= usize::from(u16::MAX), "checked when the identity was made");
        self.0.extend_from_slice(&(text.len() as u16).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
    }

    pub fn optional_text(&mut self, text: Option<&str>) {
        self.u8(u8::from(text.is_some()));
        if let Some(text) = text {
            self.text(text);
        }
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads canonical bytes; every call checks what is left.
pub(crate) struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader behind `tag`; `what` names the identity in messages.
    pub fn new(what: &'static str, tag: &[u8], bytes: &'a [u8]) -> Result<Reader<'a>> {
        let rest = bytes.strip_prefix(tag).ok_or_else(|| {
            Error::corrupt(format!("these are not the canonical bytes of a {what}: the tag is missing"))
        })?;
        Ok(Reader { what, rest })
    }

    fn take(&mut self, field: &str, len: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(len) else {
            let (what, left) = (self.what, self.rest.len());
            return Err(Error::corrupt(format!(
                "canonical {what}: {field} needs {len} bytes, {left} are left"
            )));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub fn u8(&mut self, field: &str) -> Result<u8> {
        Ok(self.take(field, 1)?[0])
    }

    pub fn u32(&mut self, field: &str) -> Result<u32> {
        let bytes = self.take(field, 4)?;
        Ok(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte)))
    }

    pub fn text(&mut self, field: &str) -> Result<&'a str> {
        let bytes = self.take(field, 2)?;
        let len = usize::from(bytes[0]) | usize::from(bytes[1]) << 8;
        let bytes = self.take(field, len)?;
        std::str::from_utf8(bytes)
            .map_err(|_| Error::corrupt(format!("canonical {}: {field} is not UTF-8", self.what)))
    }

    pub fn optional_text(&mut self, field: &str) -> Result<Option<&'a str>> {
        match self.u8(field)? {
            0 => Ok(None),
            1 => self.text(field).map(Some),
            byte => Err(Error::corrupt(format!(
                "canonical {}: presence byte of {field} is {byte}, expected 0 or 1",
                self.what
            ))),
        }
    }

    /// Reads the schema version and refuses every other than `expected`.
    pub fn schema_version(&mut self, expected: u32) -> Result<()> {
        check_schema_version(self.what, self.u32("schema_version")?, expected)
    }

    pub fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            n => Err(Error::corrupt(format!("canonical {}: {n} bytes follow the last field", self.what))),
        }
    }
}

pub(crate) fn check_schema_version(what: &str, found: u32, expected: u32) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let message = format!("{what} has schema version {found}, this build reads {expected}");
    Err(Error::new(ErrorKind::UnsupportedVersion, message))
}

/// A JSON object whose fields are all known.
pub(crate) struct Fields<'a> {
    what: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub fn new(what: &'static str, known: &[&str], value: &'a Value) -> Result<Fields<'a>> {
        let map = value
            .as_object()
            .ok_or_else(|| Error::namespace(format!("a {what} is a JSON object, got {}", kind_of(value))))?;
        if let Some(unknown) = map.keys().find(|key| !known.contains(&key.as_str())) {
            let known = known.join(", ");
            return Err(Error::namespace(format!(
                "{what} has an unknown field {unknown:?}: expected {known}"
            )));
        }
        Ok(Fields { what, map })
    }

    /// The field's value; `None` where it is missing or null.
    pub fn optional(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub fn required(&self, field: &str) -> Result<&'a Value> {
        self.optional(field)
            .ok_or_else(|| Error::namespace(format!("{} lacks the field \"{field}\"", self.what)))
    }

    pub fn text(&self, field: &str) -> Result<&'a str> {
        self.as_text(field, self.required(field)?)
    }

    pub fn optional_text(&self, field: &str) -> Result<Option<&'a str>> {
        self.optional(field).map(|value| self.as_text(field, value)).transpose()
    }

    pub fn u32(&self, field: &str) -> Result<u32> {
        let value = self.required(field)?;
        value
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| self.wrong(field, "an integer from 0 to 4294967295", value))
    }

    pub fn array(&self, field: &str) -> Result<&'a [Value]> {
        let value = self.required(field)?;
        let array = value.as_array().ok_or_else(|| self.wrong(field, "an array", value))?;
        Ok(array)
    }

    fn as_text(&self, field: &str, value: &'a Value) -> Result<&'a str> {
        value.as_str().ok_or_else(|| self.wrong(field, "text", value))
    }

    fn wrong(&self, field: &str, expected: &str, value: &Value) -> Error {
        let found = match value {
            Value::Number(number) => number.to_string(),
            other => kind_of(other).to_owned(),
        };
        Error::namespace(format!("{}: field \"{field}\" is {found}, expected {expected}", self.what))
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
