//! Reading directories where journals are silent: segments whose writer is dead, and whose units are not all
//! told of.
//!
//! The journals that are lost may have told of removes too, whose bytes are punched by now. So what a directory
//! names is taken in only where the disk holds it.

use std::collections::HashMap;

use hicache_sys::DIRECT_ALIGNMENT;
use hicache_sys::file::{self, Access, is_hole};

use crate::format::block::block_checksum;
use crate::format::directory::{
    self, DIRECTORY_ALIGNMENT, DIRECTORY_MAGIC, Directory, Entry, Parent, ReadRun,
};
use crate::format::form::Form;
use crate::format::frame::{AddRun, AddUnit, ShortKey, short_key};
use crate::format::segment::{SEAL_BYTES, SEGMENT_HEADER_BYTES, Seal, SegmentHeader};
use crate::format::{Damage, SegmentId};
use crate::store::index::UNNAMED;

/// Units that journals told of: for each segment, where they start and how long they are.
pub type KnownUnits = HashMap<SegmentId, Vec<(u64, u64)>>;

/// Directories looked for at once.
const SCAN_BYTES: usize = 4 << 20;
/// More than the longest directory: a unit of 256 MiB of the smallest blocks has one of 400 KiB.
const MAX_DIRECTORY_BYTES: u64 = 256 << 20;

/// Reads the header of a segment file.
pub fn read_header(file: &std::fs::File) -> Result<SegmentHeader, Damage> {
    let mut bytes = vec![0; SEGMENT_HEADER_BYTES as usize];
    file::read_exact(file, &mut bytes, 0).map_err(|_| Damage::at("segment header", 0))?;
    SegmentHeader::decode(&bytes)
}

/// Reads the seal at the end of a segment file.
pub fn read_seal(file: &std::fs::File, file_bytes: u64) -> Result<(Seal, u64), Damage> {
    let damage = Damage::at("seal", file_bytes);
    let mut fixed = [0; SEAL_BYTES as usize];
    let fixed_at = file_bytes.checked_sub(SEAL_BYTES).ok_or(damage)?;
    file::read_exact(file, &mut fixed, fixed_at).map_err(|_| damage)?;
    let (offset, count) = Seal::locate(&fixed)?;
    let len = u64::from(count) * 8 + SEAL_BYTES;
    if offset.checked_add(len) != Some(file_bytes) {
        return Err(damage);
    }
    let mut bytes = vec![0; len as usize];
    file::read_exact(file, &mut bytes, offset).map_err(|_| damage)?;
    Ok((Seal::decode(&bytes)?, offset))
}

/// Units of a segment that no journal told of.
#[derive(Default)]
pub struct Unknown {
    /// Directories that name something that the disk holds; an entry whose payload is gone is like a damaged one.
    pub directories: Vec<Directory>,
    /// Directories and entries that do not verify, or whose payload does not, and that are more than a hole.
    pub damaged: u64,
    /// Whether the segment has its seal.
    pub is_sealed: bool,
}

/// Directories of a dead writer's segment that are not among the `known` units, as far as the disk holds what they
/// name.
pub fn unknown_directories(
    path: &std::path::Path,
    id: SegmentId,
    known: &[(u64, u64)],
) -> std::io::Result<Vec<Directory>> {
    if has_nothing_else(std::fs::symlink_metadata(path)?.len(), known) {
        return Ok(Vec::new());
    }
    let file = file::open_read(path, Access::Buffered)?;
    Ok(unknown_units(&file, id, known)?.directories)
}

/// Whether a segment of this length has no place for a unit beside the `known` ones: behind its header they follow
/// each other up to its end, or up to a seal that lists just so many.
fn has_nothing_else(file_bytes: u64, known: &[(u64, u64)]) -> bool {
    let mut end = SEGMENT_HEADER_BYTES;
    for &(start, len) in known {
        if end.checked_next_multiple_of(DIRECT_ALIGNMENT as u64).is_none_or(|aligned| start > aligned) {
            return false;
        }
        end = end.max(start.saturating_add(len));
    }
    let seal_bytes = known.len() as u64 * 8 + SEAL_BYTES;
    !known.is_empty() && file_bytes.checked_sub(end).is_some_and(|left| left == 0 || left == seal_bytes)
}

/// [`unknown_directories`] of an open segment.
///
/// A sealed segment lists them; in any other they are found by looking through the stretches that no known unit
/// covers, directory starts being aligned and checksummed.
pub fn unknown_units(file: &std::fs::File, id: SegmentId, known: &[(u64, u64)]) -> std::io::Result<Unknown> {
    let file_bytes = file.metadata()?.len();
    let is_known = |unit_offset: u64| known.binary_search_by_key(&unit_offset, |&(start, _)| start).is_ok();
    let (mut unknown, mut is_sealed) = (Unknown::default(), false);
    let mut keep = |directory: Directory| {
        if directory.header.segment == id && !is_known(directory.header.unit_offset) {
            unknown.directories.push(directory);
        }
    };
    match read_seal(file, file_bytes) {
        Ok((seal, _)) if seal.segment == id => {
            is_sealed = true;
            if seal.directories.len() > known.len() {
                for offset in seal.directories {
                    match read_directory(file, offset, file_bytes)? {
                        Some(directory) => keep(directory),
                        None => unknown.damaged += 1,
                    }
                }
            }
        }
        _ => {
            for (start, end) in gaps(known, file_bytes) {
                scan(file, start, end, file_bytes, &mut keep)?;
            }
        }
    }
    unknown.is_sealed = is_sealed;
    for directory in &mut unknown.directories {
        unknown.damaged += drop_missing(file, directory)?;
    }
    unknown.directories.retain(|directory| {
        let mut entries = directory.runs.iter().flat_map(|run| &run.entries);
        entries.any(Option::is_some)
    });
    Ok(unknown)
}

/// Drops entries whose payload is not on the disk; how many places are damaged.
fn drop_missing(file: &std::fs::File, directory: &mut Directory) -> std::io::Result<u64> {
    let (namespace, unit_offset) = (directory.header.namespace, directory.header.unit_offset);
    let mut damaged = u64::from(directory.damaged_runs);
    for read in &mut directory.runs {
        for slot in &mut read.entries {
            let Some(entry) = slot else {
                damaged += 1;
                continue;
            };
            let start = unit_offset.saturating_add(entry.payload_offset);
            if is_hole(file, start, entry.stored_bytes())? {
                *slot = None;
            } else if !verifies(file, start, entry, &read.run.form, &namespace)? {
                *slot = None;
                damaged += 1;
            }
        }
    }
    Ok(damaged)
}

/// Whether the first block of a payload is what its entry says: a page that was removed starts with a hole, or
/// with the zeros that are left of one in a disk block shared with its neighbours.
fn verifies(
    file: &std::fs::File,
    start: u64,
    entry: &Entry,
    form: &Form,
    namespace: &crate::namespace::Fingerprint,
) -> std::io::Result<bool> {
    let Some(first) = entry.blocks.first() else { return Ok(false) };
    let mut stored = vec![0; first.stored_bytes as usize];
    match file::read_exact(file, &mut stored, start) {
        Ok(()) => Ok(block_checksum(form.seed(namespace, &entry.key), 0, &stored) == first.checksum),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Stretches of the file between units, the header left out.
fn gaps(known: &[(u64, u64)], file_bytes: u64) -> Vec<(u64, u64)> {
    let mut gaps = Vec::new();
    let mut position = SEGMENT_HEADER_BYTES;
    for &(start, len) in known {
        if start > position {
            gaps.push((position, start));
        }
        position = position.max(start.saturating_add(len));
    }
    if file_bytes > position {
        gaps.push((position, file_bytes));
    }
    gaps
}

fn scan(
    file: &std::fs::File,
    start: u64,
    end: u64,
    file_bytes: u64,
    keep: &mut dyn FnMut(Directory),
) -> std::io::Result<()> {
    let mut buffer = vec![0; SCAN_BYTES];
    let mut position = start.next_multiple_of(DIRECTORY_ALIGNMENT);
    while position + DIRECTORY_ALIGNMENT <= end {
        let len = (end - position).min(SCAN_BYTES as u64) as usize;
        file::read_exact(file, &mut buffer[..len], position)?;
        let step = DIRECTORY_ALIGNMENT as usize;
        for at in (0..len.saturating_sub(DIRECTORY_MAGIC.len())).step_by(step) {
            if buffer[at..at + DIRECTORY_MAGIC.len()] == DIRECTORY_MAGIC {
                read_directory(file, position + at as u64, file_bytes)?.into_iter().for_each(&mut *keep);
            }
        }
        position += (len as u64).next_multiple_of(DIRECTORY_ALIGNMENT);
    }
    Ok(())
}

/// Reads the directory at `offset`; `None` when none is there.
///
/// # Errors
/// What the system says: such a place may hold one.
pub fn read_directory(
    file: &std::fs::File,
    offset: u64,
    file_bytes: u64,
) -> std::io::Result<Option<Directory>> {
    let Some(room) = file_bytes.checked_sub(offset) else { return Ok(None) };
    let mut head = vec![0; room.min(DIRECT_ALIGNMENT as u64) as usize];
    file::read_exact(file, &mut head, offset)?;
    // The header's own checksum comes after a table that may be longer than what was read: take the length,
    // which the whole decode checks.
    let announced = directory::announced_bytes(&head);
    let Some(total) = announced.filter(|&total| total <= room.min(MAX_DIRECTORY_BYTES)) else {
        return Ok(None);
    };
    let mut bytes = vec![0; total as usize];
    file::read_exact(file, &mut bytes, offset)?;
    Ok(directory::decode(&bytes).ok().filter(|directory| directory.header.directory_offset == offset))
}

/// The unit that a directory describes.
pub fn unit_of(directory: &Directory) -> AddUnit {
    let header = &directory.header;
    AddUnit {
        segment: header.segment,
        generation: header.generation,
        unit_offset: header.unit_offset,
        unit_bytes: header.directory_offset + header.directory_bytes - header.unit_offset,
        directory_offset: header.directory_offset,
        directory_bytes: header.directory_bytes,
    }
}

/// A directory as the `Add` frame that its writer would have sent: whole runs of whole entries.
///
/// A damaged entry leaves its place in the run unnamed.
pub fn announce(directory: &Directory, mut each: impl FnMut(&AddUnit, &AddRun<'_>)) {
    let unit = unit_of(directory);
    with_runs(directory, |runs| runs.iter().for_each(|run| each(&unit, run)));
}

/// Hands the runs of the `Add` frame to `give`, all together.
pub fn with_runs<T>(directory: &Directory, give: impl FnOnce(&[AddRun<'_>]) -> T) -> T {
    let header = &directory.header;
    let named = |read: &ReadRun| {
        let keys =
            read.entries.iter().map(|entry| entry.as_ref().map_or(UNNAMED, |entry| short_key(&entry.key)));
        keys.collect()
    };
    let keys: Vec<Vec<ShortKey>> = directory.runs.iter().map(named).collect();
    let mut runs = Vec::with_capacity(keys.len());
    for (read, keys) in directory.runs.iter().zip(&keys) {
        let run = &read.run;
        runs.push(AddRun {
            form: run.form,
            entries_offset: header.directory_offset.saturating_add(read.entries_offset),
            payload_offset: header.unit_offset.saturating_add(run.payload_offset),
            payload_bytes: run.payload_bytes,
            parent: if let Parent::Page(key) = run.parent { short_key(&key) } else { [0; 16] },
            depth: run.depth,
            keys: keys.as_flattened(),
        });
    }
    give(&runs)
}
