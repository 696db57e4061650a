//! Values that people type: fingerprints, keys, sizes.

use bytesize::ByteSize;
use hicache_core::inspect::{self, NamespaceScan, RootScan};
use hicache_core::{Namespace, namespace::Fingerprint};
use std::path::Path;
use std::time::Duration;

use crate::failure::Failure;

/// A size in bytes, `512MiB` or `64 GB`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>().map(|size| size.0)
}

/// A length of time: `90m`, `36h`, `7d`, `2 weeks`. Days have 24 hours.
pub fn parse_age(text: &str) -> Result<Duration, String> {
    let expected = || format!("expected a length of time such as 36h or 7d, found {text:?}");
    let span: jiff::Span = text.parse().map_err(|_| expected())?;
    let age = span.to_duration(jiff::SpanRelativeTo::days_are_24_hours()).map_err(|_| expected())?;
    age.try_into().map_err(|_| expected())
}

/// Reads a root; the namespace in it.
pub fn scan_namespace(root: &Path, fingerprint: &Fingerprint) -> Result<RootScan, Failure> {
    let scan = inspect::scan(root)?;
    find(&scan, fingerprint)?;
    Ok(scan)
}

/// The namespace of a scanned root.
pub fn find<'a>(scan: &'a RootScan, fingerprint: &Fingerprint) -> Result<&'a NamespaceScan, Failure> {
    scan.namespace(fingerprint).ok_or_else(|| {
        Failure::new(format!("expected namespace {fingerprint} in {}, found none", scan.root.display()))
    })
}

/// The identity of a scanned namespace.
pub fn identity(namespace: &NamespaceScan) -> Result<&Namespace, Failure> {
    namespace.namespace.as_ref().ok_or_else(|| {
        Failure::new(format!(
            "expected a whole manifest or segment header in namespace {}, found none: nothing says which \
             namespace it is",
            namespace.fingerprint
        ))
    })
}
