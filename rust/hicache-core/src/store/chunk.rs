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

/// Gathers pieces of several pages, `page_len` bytes of each, and gives each block while it is still in the nearest
/// cache: the page and block, both counted from the first one here, and the bytes.
pub(crate) fn gather_blocks(
    pieces: &[Piece<'_>],
    out: &mut [u8],
    page_len: usize,
    block_bytes: usize,
    mut give: impl FnMut(usize, u32, &[u8]),
) -> io::Result<()> {
    let (mut at, mut given) = (0, 0);
    for piece in pieces {
        let end = at + piece.len as usize;
        let Some(room) = out.get_mut(at..end) else { return Err(io::ErrorKind::InvalidInput.into()) };
        piece
            .region
            .copy_out(piece.offset, room)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        at = end;
        loop {
            let (page, within) = (given / page_len, given % page_len);
            let block_end = given + block_bytes.min(page_len - within);
            if block_end > at {
                break;
            }
            give(page, (within / block_bytes) as u32, &out[given..block_end]);
            given = block_end;
        }
    }
    match at == out.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use hicache_sys::Region;

    #[test]
    fn gathered_blocks_are_those_of_each_page() {
        let region = Region::owned(1000);
        let bytes: Vec<u8> = (0..1000_u32).map(|i| (i * 7 % 251) as u8).collect();
        region.copy_in(0, &bytes).unwrap();
        // Two pages of 70 bytes, blocks of 32, pieces that cross blocks and end inside them.
        for piece_len in [1, 5, 31, 32, 35, 70, 140] {
            let starts = (0..140_u64).step_by(piece_len);
            let pieces: Vec<Piece<'_>> = starts
                .map(|start| Piece {
                    region: &region,
                    offset: 3 + start * 2,
                    len: (piece_len as u64).min(140 - start),
                })
                .collect();
            let expected: Vec<u8> = pieces
                .iter()
                .flat_map(|piece| bytes[piece.offset as usize..][..piece.len as usize].to_vec())
                .collect();
            let (mut out, mut seen) = (vec![0; 140], Vec::new());
            gather_blocks(&pieces, &mut out, 70, 32, |page, block, bytes| {
                seen.push((page, block, bytes.to_vec()));
            })
            .unwrap();
            assert_eq!(out, expected);
            let wanted: Vec<(usize, u32, Vec<u8>)> = expected
                .chunks(70)
                .enumerate()
                .flat_map(|(page, bytes)| {
                    (0..).zip(bytes.chunks(32)).map(move |(block, bytes)| (page, block, bytes.to_vec()))
                })
                .collect();
            assert_eq!(seen, wanted, "pieces of {piece_len} bytes");
            assert!(gather_blocks(&pieces, &mut [0; 139], 70, 32, |_, _, _| ()).is_err());
            assert!(gather_blocks(&pieces, &mut [0; 141], 70, 32, |_, _, _| ()).is_err());
        }
    }
}
