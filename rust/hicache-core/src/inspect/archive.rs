//! A namespace as a sequence of self-contained units, to be carried to another root.
//!
//! Stored bytes are carried as they are: checksums are bound to identity, not to a place.

use std::io;

use crate::format::SegmentId;
use crate::format::archive::append_directory_offset;
use crate::format::directory::{
    DIRECTORY_ALIGNMENT, DirectoryHeader, Entry, Parent, Run, UNKNOWN_DEPTH, directory_bytes, encode,
};
use crate::inspect::verify::still_there;
use crate::inspect::{NamespaceScan, ObjectRef, ObjectState};
use crate::store::recover;

/// Stored bytes after which a unit is full.
const UNIT_BYTES: u64 = 64 << 20;

/// What an export left out.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ExportReport {
    /// Objects handed out.
    pub objects: u64,
    /// Stored bytes handed out.
    pub bytes: u64,
    /// Live objects that did not verify, and were left out.
    pub damaged: u64,
    /// Objects that were removed while the export went on, and were left out.
    pub removed: u64,
}

/// Objects that could not be read: their segments, and where their entries are.
type Unread = Vec<(SegmentId, u64)>;

/// Hands out every live object that verifies, in units. Beside a live store, objects may be removed meanwhile.
///
/// # Errors
/// Those of `take`. Damage is left out and counted, not an error.
pub fn export_units(
    namespace: &NamespaceScan,
    take: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<ExportReport> {
    let mut report = ExportReport::default();
    let mut unread = Unread::new();
    for run in namespace.runs_in_disk_order() {
        export_run(namespace, &run, &mut report, &mut unread, take)?;
    }
    report.damaged = unread.len() as u64;
    if report.damaged > 0
        && let Some(root) = namespace.folder.ancestors().nth(2)
        && let Ok(there) = still_there(root)
    {
        report.removed = unread.iter().filter(|&place| !there.contains(place)).count() as u64;
        report.damaged -= report.removed;
    }
    Ok(report)
}

fn export_run(
    namespace: &NamespaceScan,
    objects: &[ObjectRef<'_>],
    report: &mut ExportReport,
    unread: &mut Unread,
    take: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let place = |object: &ObjectRef<'_>| (object.segment(), object.entry_offset());
    let live = |object: &&ObjectRef<'_>| object.state == ObjectState::Live;
    let Some(first) = objects.iter().find(live) else { return Ok(()) };
    let Ok(segment) = namespace.open_segment(first.segment()) else {
        unread.extend(objects.iter().filter(live).map(place));
        return Ok(());
    };
    let file_bytes = segment.metadata()?.len();
    let directory = recover::read_directory(&segment, first.run.directory_offset, file_bytes).ok().flatten();
    let header_of = directory.and_then(|directory| {
        let offset = first.run.entries_offset.checked_sub(first.run.directory_offset)?;
        directory.runs.into_iter().find(|run| run.entries_offset == offset).map(|run| run.run)
    });
    // Entries are whole or not each by itself: without the header, only what comes before the run is unknown.
    let from_journal = || {
        let pool_bytes = namespace.pools.get(&first.form.pool)?.canonical_bytes();
        let (form, depth, parent) = (*first.form, first.run.depth, Parent::Unknown);
        Some(Run {
            form,
            pool_bytes,
            payload_offset: 0,
            payload_bytes: 0,
            parent,
            depth,
            entries: Vec::new(),
        })
    };
    let Some(header) = header_of.or_else(from_journal) else {
        unread.extend(objects.iter().filter(live).map(place));
        return Ok(());
    };
    let mut unit = ArchiveUnit::new(namespace, header);
    let mut before: Option<(u32, Parent)> = None;
    for object in objects.iter() {
        let read =
            if object.state == ObjectState::Live { Some(object.read(namespace, &segment)) } else { None };
        let Some(Ok(stored)) = read else {
            if object.state == ObjectState::Live {
                unread.push(place(object));
            }
            unit.finish(take)?;
            // What comes before the next page is known if its entry is whole, readable or not.
            let parent = object
                .read_entry(namespace, &segment)
                .map_or(Parent::Unknown, |entry| Parent::Page(entry.key));
            before = Some((object.ordinal, parent));
            continue;
        };
        if unit.is_empty() {
            unit.start(object.ordinal, before);
        }
        report.objects += 1;
        report.bytes += stored.stored.len() as u64;
        before = Some((object.ordinal, Parent::Page(stored.key)));
        unit.push(stored.entry, &stored.stored);
        if unit.payload.len() as u64 >= UNIT_BYTES {
            unit.finish(take)?;
        }
    }
    unit.finish(take)
}

/// A unit of one run on its way.
struct ArchiveUnit<'a> {
    namespace: &'a NamespaceScan,
    header: Run,
    parent: Parent,
    depth: u32,
    entries: Vec<Entry>,
    payload: Vec<u8>,
}

impl<'a> ArchiveUnit<'a> {
    fn new(namespace: &'a NamespaceScan, header: Run) -> Self {
        let (parent, depth) = (header.parent, header.depth);
        ArchiveUnit { namespace, header, parent, depth, entries: Vec::new(), payload: Vec::new() }
    }

    fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn start(&mut self, ordinal: u32, before: Option<(u32, Parent)>) {
        self.parent = match before {
            None if ordinal == 0 => self.header.parent,
            Some((last, parent)) if last + 1 == ordinal => parent,
            _ => Parent::Unknown,
        };
        self.depth = match self.header.depth {
            UNKNOWN_DEPTH => UNKNOWN_DEPTH,
            depth => depth.saturating_add(ordinal),
        };
    }

    fn push(&mut self, mut entry: Entry, stored: &[u8]) {
        entry.payload_offset = self.payload.len() as u64;
        self.entries.push(entry);
        self.payload.extend_from_slice(stored);
    }

    fn finish(&mut self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let run = Run {
            payload_offset: 0,
            payload_bytes: self.payload.len() as u64,
            parent: self.parent,
            depth: self.depth,
            entries: std::mem::take(&mut self.entries),
            ..self.header.clone()
        };
        let mut bytes = std::mem::take(&mut self.payload);
        bytes.resize(bytes.len().next_multiple_of(DIRECTORY_ALIGNMENT as usize), 0);
        let runs = [run];
        let header = DirectoryHeader {
            namespace: self.namespace.fingerprint,
            segment: SegmentId { process: crate::format::ProcessId([0; 16]), number: 0 },
            generation: 0,
            unit_offset: 0,
            directory_offset: bytes.len() as u64,
            directory_bytes: directory_bytes(&runs),
            written_ns: crate::store::now_ns(),
        };
        bytes.extend_from_slice(&encode(&header, &runs));
        append_directory_offset(&mut bytes, header.directory_offset);
        take(&bytes)
    }
}
