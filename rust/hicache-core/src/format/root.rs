//! The small files in words: `root.json`, `manifest.json`, pool descriptions, `generation`.
//!
//! They are for people and tools. Each one carries a checksum or is named by its own fingerprint, and none is
//! needed to read a page: segments and journals describe themselves.

use serde_json::{Map, Value, json};

use crate::format::{FORMAT_VERSION, checksum};
use crate::{Error, ErrorKind, Result};

/// Contents of `root.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootDescription {
    /// 32 lowercase hex digits, made once.
    pub uuid: String,
    /// Budget of the root in bytes.
    pub capacity_bytes: u64,
    /// Wall clock at creation, ns since 1970.
    pub created_ns: u64,
}

/// What a `root.json` turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub enum RootFile {
    /// Whole.
    Whole(RootDescription),
    /// Not whole; why. The rest of the root does not depend on it.
    Damaged(String),
}

impl RootDescription {
    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut words = Map::new();
        words.insert("what".into(), json!("root of a hicache_store page store, see docs/format.md"));
        words.insert("format".into(), json!(FORMAT_VERSION));
        words.insert("uuid".into(), json!(self.uuid));
        words.insert("capacity_bytes".into(), json!(self.capacity_bytes));
        words.insert("created_ns".into(), json!(self.created_ns));
        words.insert("checksum".into(), json!(words_checksum(&words)));
        pretty(&Value::Object(words))
    }

    /// Reads the file's bytes.
    ///
    /// # Errors
    /// `UnsupportedVersion` for a whole file of a newer format.
    pub fn decode(bytes: &[u8]) -> Result<RootFile> {
        let words = match serde_json::from_slice(bytes) {
            Ok(Value::Object(words)) => words,
            Ok(_) => return Ok(RootFile::Damaged("expected a JSON object".into())),
            Err(error) => return Ok(RootFile::Damaged(error.to_string())),
        };
        let found = words.get("checksum").and_then(Value::as_str).unwrap_or_default();
        let mut rest = words.clone();
        rest.remove("checksum");
        if found != words_checksum(&rest) {
            return Ok(RootFile::Damaged("its checksum does not match its fields".into()));
        }
        let number = |name| words.get(name).and_then(Value::as_u64);
        let format = number("format").unwrap_or_default();
        if format != u64::from(FORMAT_VERSION) {
            return Err(Error::new(
                ErrorKind::UnsupportedVersion,
                format!("expected a root of format {FORMAT_VERSION}, found format {format}"),
            ));
        }
        let uuid = words.get("uuid").and_then(Value::as_str);
        match (uuid, number("capacity_bytes"), number("created_ns")) {
            (Some(uuid), Some(capacity_bytes), Some(created_ns)) => {
                Ok(RootFile::Whole(RootDescription { uuid: uuid.into(), capacity_bytes, created_ns }))
            }
            _ => Ok(RootFile::Damaged("expected uuid, capacity_bytes and created_ns".into())),
        }
    }
}

/// XXH3-64 of the object's compact JSON without its `checksum`, as 16 hex digits.
fn words_checksum(words: &Map<String, Value>) -> String {
    // serde_json keeps the keys of a map sorted, so the compact text is the same for the same fields.
    let compact = serde_json::to_vec(words).expect("a JSON object of strings and numbers");
    format!("{:016x}", checksum(&compact))
}

/// JSON for people, with a line end.
pub fn pretty(value: &Value) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("JSON of strings and numbers");
    bytes.push(b'\n');
    bytes
}

/// Contents of a namespace's `generation` file: `"<generation> <checksum>\n"`.
pub fn encode_generation(generation: u64) -> Vec<u8> {
    let digits = generation.to_string();
    format!("{digits} {:016x}\n", checksum(digits.as_bytes())).into_bytes()
}

/// Reads a `generation` file; `None` when it is not whole.
pub fn decode_generation(bytes: &[u8]) -> Option<u64> {
    let generation = std::str::from_utf8(bytes).ok()?.split(' ').next()?.parse().ok()?;
    (encode_generation(generation) == bytes).then_some(generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_file_is_whole_damaged_or_newer() {
        let description = RootDescription { uuid: "ab".repeat(16), capacity_bytes: 16 << 20, created_ns: 7 };
        let bytes = description.encode();
        assert_eq!(RootDescription::decode(&bytes).unwrap(), RootFile::Whole(description));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            let read = RootDescription::decode(&damaged);
            let blank =
                |bytes: &[u8]| bytes.iter().filter(|b| !b.is_ascii_whitespace()).copied().collect::<Vec<_>>();
            if blank(&damaged) != blank(&bytes) {
                assert!(!matches!(read, Ok(RootFile::Whole(_))), "byte {at} flipped unseen");
            }
        }
        let mut newer: Value = serde_json::from_slice(&bytes).unwrap();
        newer["format"] = json!(2);
        let words = newer.as_object_mut().unwrap();
        words.remove("checksum");
        let seal = words_checksum(words);
        words.insert("checksum".into(), json!(seal));
        let error = RootDescription::decode(&pretty(&newer)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnsupportedVersion);
    }

    #[test]
    fn a_generation_file_with_any_flipped_byte_is_not_whole() {
        let bytes = encode_generation(41);
        assert_eq!(decode_generation(&bytes), Some(41));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(decode_generation(&damaged), None, "byte {at}");
        }
    }
}
