//! Reading directories where journals are silent: segments whose writer is dead, and whose units are not all
//! told of.

use std::collections::HashMap;

use hicache_sys::DIRECT_ALIGNMENT;
use hicache_sys::file::{self, Access};

use crate::format::directory::{self, DIRECTORY_ALIGNMENT, DIRECTORY_MAGIC, Directory, Parent};
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

/// Directories of a dead writer's segment that are not among the `known` units.
///
/// A sealed segment lists them; in any other they are found by looking through the stretches that no known unit
/// covers, directory starts being aligned and checksummed.
pub fn unknown_directories(
    path: &std::path::Path,
    id: SegmentId,
    known: &[(u64, u64)],
) -> std::io::Result<Vec<Directory>> {
    let file = file::open_read(path, Access::Buffered)?;
    let file_bytes = file.metadata()?.len();
    let is_known = |unit_offset: u64| known.binary_search_by_key(&unit_offset, |&(start, _)| start).is_ok();
    let mut found = Vec::new();
    let mut keep = |directory: Directory| {
        if directory.header.segment == id && !is_known(directory.header.unit_offset) {
            found.push(directory);
        }
    };
    match read_seal(&file, file_bytes) {
        Ok((seal, _)) if seal.segment == id => {
            if seal.directories.len() > known.len() {
                for offset in seal.directories {
                    read_directory(&file, offset, file_bytes).into_iter().for_each(&mut keep);
                }
            }
        }
        _ => {
            for (start, end) in gaps(known, file_bytes) {
                scan(&file, start, end, file_bytes, &mut keep)?;
            }
        }
    }
    Ok(found)
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
                read_directory(file, position + at as u64, file_bytes).into_iter().for_each(&mut *keep);
            }
        }
        position += (len as u64).next_multiple_of(DIRECTORY_ALIGNMENT);
    }
    Ok(())
}

/// Reads the directory at `offset`; `None` when none is there.
pub fn read_directory(file: &std::fs::File, offset: u64, file_bytes: u64) -> Option<Directory> {
    let room = file_bytes.checked_sub(offset)?;
    let mut head = vec![0; room.min(DIRECT_ALIGNMENT as u64) as usize];
    file::read_exact(file, &mut head, offset).ok()?;
    // The header's own checksum comes after a table that may be longer than what was read: take the length,
    // which the whole decode checks.
    let total = directory::announced_bytes(&head).filter(|&total| total <= room.min(MAX_DIRECTORY_BYTES))?;
    let mut bytes = vec![0; total as usize];
    file::read_exact(file, &mut bytes, offset).ok()?;
    directory::decode(&bytes).ok().filter(|directory| directory.header.directory_offset == offset)
}

/// A directory as the `Add` frame that its writer would have sent: whole runs of whole entries.
///
/// A damaged entry leaves its place in the run unnamed.
pub fn announce(directory: &Directory, mut each: impl FnMut(&AddUnit, &AddRun<'_>)) {
    let header = &directory.header;
    let unit = AddUnit {
        segment: header.segment,
        generation: header.generation,
        unit_offset: header.unit_offset,
        unit_bytes: header.directory_offset + header.directory_bytes - header.unit_offset,
        directory_offset: header.directory_offset,
        directory_bytes: header.directory_bytes,
    };
    for read in &directory.runs {
        let run = &read.run;
        let keys: Vec<ShortKey> = read
            .entries
            .iter()
            .map(|entry| entry.as_ref().map_or(UNNAMED, |entry| short_key(&entry.key)))
            .collect();
        let (parent, depth) = match run.parent {
            Parent::Page(key) => (short_key(&key), run.depth),
            Parent::Root | Parent::Unknown => ([0; 16], run.depth),
        };
        let add = AddRun {
            form: run.form,
            entries_offset: header.directory_offset.saturating_add(read.entries_offset),
            payload_offset: header.unit_offset.saturating_add(run.payload_offset),
            payload_bytes: run.payload_bytes,
            parent,
            depth,
            keys: keys.as_flattened(),
        };
        each(&unit, &add);
    }
}
