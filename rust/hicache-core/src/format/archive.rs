//! Archived units: a publication unit as in a segment, its start as offset 0, so that it stands alone.
//!
//! `[payload][directory][offset of the directory, 8 bytes]`

/// Ends a unit whose directory starts at `offset`.
pub fn append_directory_offset(unit: &mut Vec<u8>, offset: u64) {
    unit.extend_from_slice(&offset.to_le_bytes());
}

/// Splits an archived unit into payload and directory; `None` when it is cut short.
pub fn split_unit(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (unit, offset) = bytes.split_last_chunk::<8>()?;
    unit.split_at_checked(usize::try_from(u64::from_le_bytes(*offset)).ok()?)
}
