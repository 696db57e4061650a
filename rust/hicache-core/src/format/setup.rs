//! How a process is set up, in words for people: the body of a setup frame.

use serde_json::{Map, Value, json};

use crate::host_pool::PoolPlacement;
use crate::{Error, Result};

/// Most placements that a process tells of, and most bytes of their words together.
const MOST_POOLS: usize = 64;
const MOST_BYTES: usize = 16 << 10;

/// What one process says of itself. Nothing is decided by it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Setup {
    /// Bytes of the file system that this process leaves to others; `None` where it does not say.
    pub free_space_floor_bytes: Option<u64>,
    /// Where its host pools stand.
    pub pools: Vec<PoolPlacement>,
}

impl Setup {
    /// Checks that it is short enough for a journal.
    ///
    /// # Errors
    /// `Config` for more than 64 pools, or words of more than 16 KiB.
    pub fn validate(&self) -> Result<()> {
        let bytes: usize =
            self.pools.iter().map(|pool| pool.name.len() + pool.place.len() + pool.reason.len()).sum();
        if self.pools.len() > MOST_POOLS || bytes > MOST_BYTES {
            return Err(Error::config(format!(
                "expected at most {MOST_POOLS} pools with {MOST_BYTES} bytes of words, found {} with {bytes}",
                self.pools.len()
            )));
        }
        Ok(())
    }

    /// The body: a JSON object.
    pub fn encode(&self) -> Vec<u8> {
        let mut words = Map::new();
        if let Some(bytes) = self.free_space_floor_bytes {
            words.insert("free_space_floor_bytes".into(), json!(bytes));
        }
        if !self.pools.is_empty() {
            let pool =
                |pool: &PoolPlacement| json!({"name": pool.name, "place": pool.place, "reason": pool.reason});
            words.insert("pools".into(), self.pools.iter().map(pool).collect());
        }
        Value::Object(words).to_string().into_bytes()
    }

    /// Reads a body. Fields that are not there, or that this build does not know, are passed over; `None` where it is
    /// no JSON object.
    pub fn decode(body: &[u8]) -> Option<Setup> {
        let words: Map<String, Value> = serde_json::from_slice(body).ok()?;
        let pools = words.get("pools").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let pool = |pool: &Value| {
            let text = |name: &str| pool.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            PoolPlacement { name: text("name"), place: text("place"), reason: text("reason") }
        };
        Some(Setup {
            free_space_floor_bytes: words.get("free_space_floor_bytes").and_then(Value::as_u64),
            pools: pools.iter().take(MOST_POOLS).map(pool).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setup_comes_back_and_what_a_later_build_adds_is_passed_over() {
        let pool = PoolPlacement { name: "kv".into(), place: "target".into(), reason: "alone".into() };
        let setup = Setup { free_space_floor_bytes: Some(1 << 30), pools: vec![pool] };
        assert_eq!(Setup::decode(&setup.encode()), Some(setup));
        assert_eq!(Setup::decode(&Setup::default().encode()), Some(Setup::default()));
        let later =
            br#"{"cores": 8, "free_space_floor_bytes": "much", "pools": [{"name": 3, "colour": "red"}, 7]}"#;
        let known = Setup { free_space_floor_bytes: None, pools: vec![PoolPlacement::default(); 2] };
        assert_eq!(Setup::decode(later), Some(known));
        for other in [&b""[..], b"[]", b"{", b"\xff"] {
            assert_eq!(Setup::decode(other), None);
        }
    }

    #[test]
    fn more_words_than_a_journal_should_hold_are_refused() {
        let pool = PoolPlacement { reason: "x".repeat(MOST_BYTES / MOST_POOLS), ..PoolPlacement::default() };
        let of = |count| Setup { pools: vec![pool.clone(); count], ..Setup::default() };
        of(MOST_POOLS).validate().unwrap();
        assert!(of(MOST_POOLS + 1).validate().is_err());
        let mut long = of(MOST_POOLS);
        long.pools[0].name = "y".into();
        assert!(long.validate().is_err());
    }
}
