//! The archive of compiled kernels: several architectures in one file, with what they were made from.
//!
//! ```text
//! offset  bytes
//!      0      8  "HCKERNEL"
//!      8      4  ABI of the segment plan
//!     12      4  entries
//!     16      8  hash of the sources
//!     24      8  hash of the number of entries and of everything from offset 32 on
//!     32     24  for each entry: kind (1 cubin, 2 PTX, 3 fatbin), architecture (90 = 9.0), offset, bytes
//!      .      .  the entries; PTX ends with a zero byte
//! ```
//!
//! Numbers are little-endian. One format for the image embedded at build time, for the file of a release and for the
//! cache of what NVRTC compiled, so that there is one reader, and a stale or damaged image is refused in each place.

use std::fmt;

use super::hash::{HASH_START, hash_more, hash_sources};
use crate::segment_plan;

const MAGIC: &[u8; 8] = b"HCKERNEL";
const HEADER: usize = 32;
const ENTRY: usize = 24;

/// The kernels' sources by the names under which they include each other; the first is the one to compile.
pub const SOURCES: [(&str, &str); 5] = [
    ("segment_copy.cu", include_str!("../../../../cuda/segment_copy.cu")),
    ("leaf.h", include_str!("../../../../cuda/leaf.h")),
    ("segment_bulk.h", include_str!("../../../../cuda/segment_bulk.h")),
    ("segment_plan.h", include_str!("../../../../cuda/segment_plan.h")),
    ("segment_walk.h", include_str!("../../../../cuda/segment_walk.h")),
];

/// What `build.rs` has put in: an image, or nothing.
pub static EMBEDDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.image"));

/// Hash of [`SOURCES`]; an image made from others is stale.
pub fn source_hash() -> u64 {
    hash_sources(SOURCES)
}

/// What an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum EntryKind {
    /// Code for one architecture, and for later ones of the same major version.
    Cubin = 1,
    /// Text that the driver compiles, for this architecture and later ones.
    Ptx = 2,
    /// Several of the above in the toolkit's own archive.
    Fatbin = 3,
}

/// One entry of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// What it holds.
    pub kind: EntryKind,
    /// Compute capability, 10 x major + minor; 0 for a fatbin.
    pub architecture: u32,
    /// The code.
    pub code: &'a [u8],
}

/// Why an image is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageError {
    /// Nothing was built in.
    Empty,
    /// Not an image, cut short, or damaged.
    Damaged(&'static str),
    /// Made for another segment plan, or from other sources.
    Stale {
        /// `abi` or `source hash`.
        what: &'static str,
        /// What this library has.
        expected: u64,
        /// What the image has.
        found: u64,
    },
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageError::Empty => f.write_str("no kernels were built in"),
            ImageError::Damaged(what) => write!(f, "damaged image of kernels: {what}"),
            ImageError::Stale { what, expected, found } => {
                write!(f, "stale image of kernels: expected {what} {expected:#x}, found {found:#x}")
            }
        }
    }
}

impl std::error::Error for ImageError {}

/// A verified image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image<'a> {
    entries: Vec<Entry<'a>>,
}

impl<'a> Image<'a> {
    /// Reads an image of this library's kernels.
    ///
    /// # Errors
    /// [`ImageError`] says why it is not one.
    pub fn read(bytes: &'a [u8]) -> Result<Image<'a>, ImageError> {
        if bytes.is_empty() {
            return Err(ImageError::Empty);
        }
        if bytes.len() < HEADER || !bytes.starts_with(MAGIC) {
            return Err(ImageError::Damaged("the header"));
        }
        let number = |at: usize, len: usize| -> u64 {
            bytes[at..at + len].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        let fresh = |what, expected, found| match expected == found {
            true => Ok(()),
            false => Err(ImageError::Stale { what, expected, found }),
        };
        fresh("ABI", segment_plan::ABI.into(), number(8, 4))?;
        fresh("source hash", source_hash(), number(16, 8))?;
        if hash_more(hash_more(HASH_START, &bytes[12..16]), &bytes[HEADER..]) != number(24, 8) {
            return Err(ImageError::Damaged("the hash of its content"));
        }
        let count = number(12, 4) as usize;
        if count > (bytes.len() - HEADER) / ENTRY {
            return Err(ImageError::Damaged("the number of entries"));
        }
        let entry = |place: usize| {
            let at = HEADER + place * ENTRY;
            let kind = match number(at, 4) {
                1 => EntryKind::Cubin,
                2 => EntryKind::Ptx,
                3 => EntryKind::Fatbin,
                _ => return Err(ImageError::Damaged("the kind of an entry")),
            };
            let (first, len) = (number(at + 8, 8) as usize, number(at + 16, 8) as usize);
            let code = first.checked_add(len).and_then(|end| bytes.get(first..end));
            match code {
                Some(code) if kind != EntryKind::Ptx || code.last() == Some(&0) => {
                    Ok(Entry { kind, architecture: number(at + 4, 4) as u32, code })
                }
                _ => Err(ImageError::Damaged("the place of an entry")),
            }
        };
        Ok(Image { entries: (0..count).map(entry).collect::<Result<_, _>>()? })
    }

    /// All entries.
    pub fn entries(&self) -> &[Entry<'a>] {
        &self.entries
    }

    /// What can run on a device of this compute capability (10 x major + minor), the best first: the cubin of the
    /// same major version and the nearest minor one below, a fatbin, then the newest PTX that is not too new.
    pub fn candidates(&self, capability: u32) -> Vec<Entry<'a>> {
        let fits = |entry: &&Entry<'a>| match entry.kind {
            EntryKind::Cubin => {
                entry.architecture / 10 == capability / 10 && entry.architecture <= capability
            }
            EntryKind::Ptx => entry.architecture <= capability,
            EntryKind::Fatbin => true,
        };
        let mut found: Vec<_> = self.entries.iter().filter(fits).copied().collect();
        let rank = |kind| match kind {
            EntryKind::Cubin => 0,
            EntryKind::Fatbin => 1,
            EntryKind::Ptx => 2,
        };
        found.sort_by_key(|entry| (rank(entry.kind), std::cmp::Reverse(entry.architecture)));
        found
    }
}

/// Writes an image of this library's kernels.
pub fn write_image(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut body = Vec::new();
    let mut offset = (HEADER + entries.len() * ENTRY) as u64;
    for entry in entries {
        body.extend((entry.kind as u32).to_le_bytes());
        body.extend(entry.architecture.to_le_bytes());
        body.extend(offset.to_le_bytes());
        body.extend((entry.code.len() as u64).to_le_bytes());
        offset += entry.code.len() as u64;
    }
    for entry in entries {
        body.extend(entry.code);
    }
    let mut image = MAGIC.to_vec();
    image.extend(segment_plan::ABI.to_le_bytes());
    let count = (entries.len() as u32).to_le_bytes();
    image.extend(count);
    image.extend(source_hash().to_le_bytes());
    image.extend(hash_more(hash_more(HASH_START, &count), &body).to_le_bytes());
    image.extend(body);
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<Entry<'static>> {
        let entry = |kind, architecture, code| Entry { kind, architecture, code };
        vec![
            entry(EntryKind::Cubin, 80, b"eighty".as_slice()),
            entry(EntryKind::Ptx, 80, b".version\0"),
            entry(EntryKind::Cubin, 100, b"hundred"),
            entry(EntryKind::Cubin, 90, b""),
            entry(EntryKind::Ptx, 90, b".target\0"),
        ]
    }

    #[test]
    fn what_was_written_is_read() {
        let bytes = write_image(&entries());
        assert_eq!(Image::read(&bytes).unwrap().entries(), entries());
        assert_eq!(Image::read(&[]), Err(ImageError::Empty));
    }

    #[test]
    fn the_best_entry_for_a_device_comes_first() {
        let bytes = write_image(&entries());
        let image = Image::read(&bytes).unwrap();
        let order = |capability| -> Vec<(EntryKind, u32)> {
            image.candidates(capability).iter().map(|entry| (entry.kind, entry.architecture)).collect()
        };
        use EntryKind::{Cubin, Ptx};
        assert_eq!(order(86), [(Cubin, 80), (Ptx, 80)]);
        assert_eq!(order(90), [(Cubin, 90), (Ptx, 90), (Ptx, 80)]);
        assert_eq!(order(103), [(Cubin, 100), (Ptx, 90), (Ptx, 80)]);
        // No cubin of another major version, none that is newer.
        assert_eq!(order(120), [(Ptx, 90), (Ptx, 80)]);
        assert_eq!(order(75), []);
    }

    #[test]
    fn every_damaged_byte_and_every_length_is_noticed() {
        let bytes = write_image(&entries());
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(Image::read(&damaged).is_err(), "byte {at}");
            assert!(at == 0 || Image::read(&bytes[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn an_image_of_another_abi_or_other_sources_is_stale() {
        for (at, what) in [(8, "ABI"), (16, "source hash")] {
            let mut stale = write_image(&entries());
            stale[at] += 1;
            let error = Image::read(&stale).unwrap_err();
            assert!(matches!(error, ImageError::Stale { what: found, .. } if found == what), "{error}");
        }
    }

    #[test]
    fn what_is_embedded_is_nothing_or_fresh() {
        match Image::read(EMBEDDED) {
            Err(ImageError::Empty) => {}
            image => assert!(!image.unwrap().candidates(90).is_empty()),
        }
    }
}
