//! How payload is cut for I/O, and the checksum of what lies in pieces.

use std::io;
use std::ops::Range;

use hicache_sys::file::Piece;

use crate::format::block::{StreamingChecksum, block_checksum};
use crate::format::form::Form;

/// About as many bytes as one transfer moves: small enough to be still in cache after its checksum, and to end soon
/// once it was begun.
pub(crate) const CHUNK_BYTES: u64 = 256 << 10;

/// Checksum of a raw block that lies in pieces.
pub(crate) fn pieces_checksum(seed: u64, block: u32, pieces: &[Piece<'_>]) -> io::Result<u64> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
    if let [piece] = pieces {
        let whole = |bytes: &[u8]| block_checksum(seed, block, bytes);
        return piece.region.with_bytes(piece.offset, piece.len, whole).map_err(invalid);
    }
    let mut streaming = StreamingChecksum::new(seed, block);
    for piece in pieces {
        piece.region.with_bytes(piece.offset, piece.len, |bytes| streaming.update(bytes)).map_err(invalid)?;
    }
    Ok(streaming.finish())
}

/// Cuts `pages` equal pages, of each the bytes `range`, into chunks of about [`CHUNK_BYTES`] at block borders:
/// several small pages at once, or a part of a large one.
pub(crate) fn cut(form: &Form, pages: usize, range: Range<u64>) -> Vec<(Range<usize>, Range<u64>)> {
    let page_len = range.end - range.start;
    if page_len <= CHUNK_BYTES / 2 {
        let at_once = (CHUNK_BYTES / page_len.max(1)) as usize;
        return (0..pages)
            .step_by(at_once)
            .map(|first| (first..(first + at_once).min(pages), range.clone()))
            .collect();
    }
    let step = CHUNK_BYTES.next_multiple_of(u64::from(form.block_bytes));
    let mut chunks = Vec::with_capacity(pages * page_len.div_ceil(step) as usize);
    for page in 0..pages {
        let mut at = range.start;
        while at < range.end {
            let end = (at + step).min(range.end);
            chunks.push((page..page + 1, at..end));
            at = end;
        }
    }
    chunks
}
