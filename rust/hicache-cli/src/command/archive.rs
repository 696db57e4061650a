//! The archive that `export` writes and `import` reads: a tar file of few names in a fixed order.
//!
//! `namespace.json`, then `pools/<fingerprint>.json` for each pool, then `units/000000.unit` and so on, then
//! `end.json` with what must have come before it. Nothing in an archive becomes a path.

use hicache_core::namespace::Fingerprint;
use hicache_core::{Namespace, Pool};
use serde_json::{Value, json};

/// Version of the archive.
pub const ARCHIVE_VERSION: u32 = 1;

/// First entry.
pub const NAMESPACE_NAME: &str = "namespace.json";

/// Last entry.
pub const END_NAME: &str = "end.json";

/// Longest entry in words, in bytes.
pub const MAX_WORDS_BYTES: u64 = 1 << 20;

/// Longest unit, in bytes: one page of the largest size, and its directory.
pub const MAX_UNIT_BYTES: u64 = 1536 << 20;

/// Most pools.
pub const MAX_POOLS: usize = 1024;

/// Name of a pool's entry.
pub fn pool_name(pool: &Fingerprint) -> String {
    format!("pools/{pool}.json")
}

/// Name of a unit's entry.
pub fn unit_name(number: u64) -> String {
    format!("units/{number:06}.unit")
}

/// Contents of the first entry.
pub fn namespace_json(namespace: &Namespace) -> Value {
    json!({
        "archive": ARCHIVE_VERSION,
        "fingerprint": namespace.fingerprint().to_string(),
        "namespace": namespace.to_json(),
    })
}

/// Reads the first entry.
pub fn read_namespace(bytes: &[u8]) -> Result<Namespace, String> {
    let value = read_json(bytes)?;
    if value["archive"] != json!(ARCHIVE_VERSION) {
        return Err(format!("expected an archive of version {ARCHIVE_VERSION}, found {}", value["archive"]));
    }
    let namespace = Namespace::from_json(&value["namespace"]).map_err(|error| error.to_string())?;
    if value["fingerprint"] != json!(namespace.fingerprint().to_string()) {
        return Err("its fingerprint is not that of its fields".to_owned());
    }
    Ok(namespace)
}

/// Reads a pool's entry of this name.
pub fn read_pool(name: &str, bytes: &[u8]) -> Result<Pool, String> {
    let pool = Pool::from_json(&read_json(bytes)?).map_err(|error| error.to_string())?;
    if pool_name(&pool.fingerprint()) != name {
        return Err("its name is not that of its fields".to_owned());
    }
    Ok(pool)
}

/// What the last entry says.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Units before it.
    pub units: u64,
    /// Objects in them.
    pub objects: u64,
}

impl End {
    /// Contents of the last entry.
    pub fn to_json(self) -> Value {
        json!({"units": self.units, "objects": self.objects})
    }

    /// Reads the last entry.
    pub fn read(bytes: &[u8]) -> Result<End, String> {
        let value = read_json(bytes)?;
        let number = |name: &str| value[name].as_u64().ok_or_else(|| format!("expected a number {name}"));
        Ok(End { units: number("units")?, objects: number("objects")? })
    }
}

fn read_json(bytes: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}
