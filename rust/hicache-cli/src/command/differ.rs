//! Identities to compare: from a file, or from a namespace in a root.

use std::path::Path;

use hicache_core::namespace::{Difference, Fingerprint};
use hicache_core::{Namespace, Pool};
use serde_json::Value;

use crate::command::explain::read_text;
use crate::failure::Failure;
use crate::values::{find, identity, scan_namespace};

/// Longest description that is read, in bytes.
const MAX_SPEC_BYTES: u64 = 1 << 20;

/// A namespace, and its pools where they are known.
pub struct Spec {
    namespace: Namespace,
    pools: Vec<Pool>,
}

/// Reads a spec: a JSON file, `ROOT:FINGERPRINT`, or a fingerprint of a namespace in `root`.
pub fn read(text: &str, root: Option<&Path>) -> Result<Spec, Failure> {
    if let (Ok(fingerprint), Some(root)) = (text.parse::<Fingerprint>(), root) {
        return from_root(root, &fingerprint);
    }
    if let Some((root, fingerprint)) = text.rsplit_once(':')
        && let Ok(fingerprint) = fingerprint.parse::<Fingerprint>()
    {
        return from_root(Path::new(root), &fingerprint);
    }
    from_file(Path::new(text))
}

fn from_root(root: &Path, fingerprint: &Fingerprint) -> Result<Spec, Failure> {
    let scan = scan_namespace(root, fingerprint)?;
    let found = find(&scan, fingerprint)?;
    Ok(Spec { namespace: identity(found)?.clone(), pools: found.pools.values().cloned().collect() })
}

fn from_file(path: &Path) -> Result<Spec, Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::new(format!("{}: {error}", path.display()));
    let text = read_text(path, MAX_SPEC_BYTES)?;
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    let (namespace, pools) = match value.get("namespace") {
        Some(namespace) => (namespace, value.get("pools")),
        None => (&value, None),
    };
    let pools = match pools {
        None => Vec::new(),
        Some(Value::Array(pools)) => pools
            .iter()
            .map(|pool| Pool::from_json(pool).map_err(|error| wrong(&error)))
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong(&"expected pools to be a list")),
    };
    Ok(Spec { namespace: Namespace::from_json(namespace).map_err(|error| wrong(&error))?, pools })
}

/// The fields in which two identities differ. Pools are compared by name, and only where both sides have some.
pub fn differences(left: &Spec, right: &Spec) -> Vec<Difference> {
    let mut found = left.namespace.differences(&right.namespace);
    if left.pools.is_empty() || right.pools.is_empty() {
        return found;
    }
    let others = |of: &[Pool], with: &[Pool]| -> Vec<Pool> {
        of.iter().filter(|pool| !with.contains(pool)).cloned().collect()
    };
    let lefts = others(&left.pools, &right.pools);
    let mut rights = others(&right.pools, &left.pools);
    let absence = |pool: &Pool, left: &str, right: &str| Difference {
        field: format!("pool {:?}", pool.name()),
        left: left.to_owned(),
        right: right.to_owned(),
    };
    for pool in &lefts {
        match rights.iter().position(|other| other.name() == pool.name()) {
            Some(index) => {
                let other = rights.remove(index);
                found.extend(pool.differences(&other).into_iter().map(|difference| Difference {
                    field: format!("pool {:?}: {}", pool.name(), difference.field),
                    ..difference
                }));
            }
            None => found.push(absence(pool, "present", "absent")),
        }
    }
    found.extend(rights.iter().map(|pool| absence(pool, "absent", "present")));
    found
}
