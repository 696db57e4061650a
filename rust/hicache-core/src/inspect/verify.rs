//! Checking every stored byte of a root.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::Result;
use crate::format::SegmentId;
use crate::format::form::Form;
use crate::format::frame::ShortKey;
use crate::inspect::{NamespaceScan, ObjectRef, ObjectState, RootScan};
use crate::namespace::Fingerprint;
use crate::tile::Tile;

/// What is wrong with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FindingKind {
    /// Its bytes do not verify, and readers do not know yet.
    Damaged,
    /// A reader put it into quarantine, and no whole copy has been stored since.
    Quarantined,
    /// A reader put it into quarantine, and a whole copy has been stored since: nothing is missing.
    Healed,
}

impl FindingKind {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            FindingKind::Damaged => "damaged",
            FindingKind::Quarantined => "quarantined",
            FindingKind::Healed => "healed",
        }
    }
}

/// An object that is not whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What is wrong with it.
    pub kind: FindingKind,
    /// Its namespace.
    pub namespace: Fingerprint,
    /// Its pool.
    pub pool: Fingerprint,
    /// Its rectangle.
    pub tile: Tile,
    /// Its full page key in hex, or the leading half followed by `..` where the directory entry is damaged too.
    pub key: String,
    /// Its segment.
    pub segment: SegmentId,
    /// Offset of its directory entry in the segment.
    pub entry_offset: u64,
    /// What was found.
    pub message: String,
}

/// How far a check is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Objects looked at.
    pub objects: u64,
    /// Stored bytes read.
    pub bytes: u64,
    /// Objects to look at in all.
    pub of_objects: u64,
}

/// Reads and verifies every object of `namespaces` that is live or in quarantine, several at a time.
///
/// `progress` is called now and then from several threads. The findings are in the order of the disk.
///
/// # Errors
/// Those of [`crate::inspect::scan`].
pub fn verify(
    scan: &RootScan,
    only: Option<&Fingerprint>,
    progress: &(dyn Fn(VerifyProgress) + Sync),
) -> Result<(VerifyProgress, Vec<Finding>)> {
    let namespaces: Vec<&NamespaceScan> =
        scan.namespaces.iter().filter(|have| only.is_none_or(|only| *only == have.fingerprint)).collect();
    let wanted = |object: &ObjectRef<'_>| object.state == ObjectState::Live || object.state.is_quarantined();
    let of_objects =
        namespaces.iter().flat_map(|namespace| namespace.objects()).filter(wanted).count() as u64;
    let (objects, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let now = || VerifyProgress {
        objects: objects.load(Ordering::Relaxed),
        bytes: bytes.load(Ordering::Relaxed),
        of_objects,
    };
    let mut findings = Vec::new();
    for namespace in namespaces {
        // Healed objects have a whole copy: known only when all live ones were read.
        let whole: Mutex<HashSet<(ShortKey, Fingerprint, Tile)>> = Mutex::default();
        let check_run = |run: Vec<ObjectRef<'_>>| -> Vec<Finding> {
            let run: Vec<_> = run.into_iter().filter(wanted).collect();
            let Some(first) = run.first() else { return Vec::new() };
            let segment = namespace.open_segment(first.segment());
            let mut found = Vec::new();
            for object in &run {
                let read = match &segment {
                    Ok(segment) => object.read(namespace, segment),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                };
                objects.fetch_add(1, Ordering::Relaxed);
                match read {
                    Ok(stored) => {
                        bytes.fetch_add(stored.stored.len() as u64, Ordering::Relaxed);
                        if object.state == ObjectState::Live {
                            lock(&whole).insert((object.key, object.form.pool, object.form.tile));
                        } else {
                            found.push(finding(namespace, object, object.state.name().to_owned()));
                        }
                    }
                    Err(error) => found.push(finding(namespace, object, error.to_string())),
                }
            }
            progress(now());
            found
        };
        let found: Vec<Vec<Finding>> =
            namespace.runs_in_disk_order().into_par_iter().map(check_run).collect();
        let whole = whole.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        let is_healed = |finding: &Finding| {
            let mut key = [0; 16];
            hex::decode_to_slice(&finding.key[..32], &mut key).is_ok()
                && whole.contains(&(key, finding.pool, finding.tile))
        };
        for mut finding in found.into_iter().flatten() {
            if finding.kind == FindingKind::Quarantined && is_healed(&finding) {
                finding.kind = FindingKind::Healed;
            }
            findings.push(finding);
        }
    }
    if findings.iter().any(|finding| finding.kind == FindingKind::Damaged) {
        drop_removed(scan, &mut findings)?;
    }
    Ok((now(), findings))
}

/// Beside a live store, an object may be removed while it is read: looked at again, that is no finding. A journal
/// that was written anew meanwhile tells no more of objects whose segment went; so those that are there count.
fn drop_removed(scan: &RootScan, findings: &mut Vec<Finding>) -> Result<()> {
    let there = still_there(&scan.root)?;
    findings.retain(|finding| there.contains(&(finding.segment, finding.entry_offset)));
    Ok(())
}

/// Objects of a root that nobody removed by now: their segments, and where their entries are.
pub(super) fn still_there(root: &Path) -> Result<HashSet<(SegmentId, u64)>> {
    let is_there =
        |object: &ObjectRef<'_>| object.state == ObjectState::Live || object.state.is_quarantined();
    let place = |object: ObjectRef<'_>| (object.segment(), object.entry_offset());
    let scan = crate::inspect::scan(root)?;
    Ok(scan.namespaces.iter().flat_map(NamespaceScan::objects).filter(is_there).map(place).collect())
}

fn finding(namespace: &NamespaceScan, object: &ObjectRef<'_>, message: String) -> Finding {
    let Form { pool, tile, .. } = *object.form;
    let entry =
        namespace.open_segment(object.segment()).and_then(|segment| object.read_entry(namespace, &segment));
    Finding {
        kind: if object.state.is_quarantined() { FindingKind::Quarantined } else { FindingKind::Damaged },
        namespace: namespace.fingerprint,
        pool,
        tile,
        key: entry.map_or_else(|_| format!("{}..", hex::encode(object.key)), |entry| entry.key.to_string()),
        segment: object.segment(),
        entry_offset: object.entry_offset(),
        message,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
