//! How payload is cut for I/O, and the checksum of what lies in pieces.

use std::io;
use std::ops::Range;

use hicache_sys::file::Piece;

use crate::format::block::{StreamingChecksum, block_checksum};
use crate::format::form::Form;

/// About as many bytes as one transfer moves: a large one costs less for each byte, in the kernel and in the device,
/// and one of more than this little less, while a slow device would take longer to end it.
pub(crate) const CHUNK_BYTES: u64 = 1 << 20;

/// Smaller ones are not worth it, even where threads have nothing to do.
const LEAST_CHUNK_BYTES: u64 = 256 << 10;

/// Chunks that each thread should have of a batch, so that all are busy until its end.
const CHUNKS_FOR_EACH_THREAD: u64 = 2;

/// How a batch of `bytes` is cut that this many threads share.
pub(crate) fn chunk_bytes(bytes: u64, threads: usize) -> u64 {
    (bytes / (threads as u64 * CHUNKS_FOR_EACH_THREAD)).clamp(LEAST_CHUNK_BYTES, CHUNK_BYTES)
}

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

/// Cuts `pages` equal pages, of each the bytes `range`, into chunks of about `chunk_bytes` at block borders: several
/// small pages at once, or a part of a large one.
pub(crate) fn cut(
    form: &Form,
    pages: usize,
    range: Range<u64>,
    chunk_bytes: u64,
) -> Vec<(Range<usize>, Range<u64>)> {
    let page_len = range.end - range.start;
    if page_len <= chunk_bytes / 2 {
        let at_once = (chunk_bytes / page_len.max(1)) as usize;
        return (0..pages)
            .step_by(at_once)
            .map(|first| (first..(first + at_once).min(pages), range.clone()))
            .collect();
    }
    let step = chunk_bytes.next_multiple_of(u64::from(form.block_bytes));
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
    use crate::format::form::Codec;
    use crate::tile::{Span, Tile, TokenLattice};
    use crate::{Fingerprint, LayoutName};
    use hicache_sys::Region;

    fn form(page_bytes: u64) -> Form {
        let one = Span { start: 0, end: 1 };
        let tile = Tile { layers: one, heads: one, tokens: TokenLattice { first: 0, step: 1, count: 1 } };
        let (layout, codec) = (LayoutName::PageFirst, Codec::None);
        Form { pool: Fingerprint([0; 16]), tile, layout, codec, block_bytes: 64 << 10, page_bytes }
    }

    #[test]
    fn a_large_batch_goes_in_large_chunks_and_a_small_one_keeps_every_thread_busy() {
        assert_eq!(chunk_bytes(1 << 30, 4), 1 << 20);
        assert_eq!(chunk_bytes(8 << 20, 4), 1 << 20);
        assert_eq!(chunk_bytes(4 << 20, 4), 512 << 10, "two for each thread");
        assert_eq!(chunk_bytes(4 << 20, 1), 1 << 20);
        assert_eq!(chunk_bytes(64 << 10, 4), 256 << 10, "no smaller ones");
    }

    #[test]
    fn every_byte_is_in_one_chunk_and_no_block_in_two() {
        const BLOCK: u64 = 64 << 10;
        for page_bytes in [1_u64, 1000, 64 << 10, (200 << 10) + 8, (600 << 10) + 512, (4608 << 10) + 8] {
            for chunk_bytes in [256 << 10, 300 << 10, 1 << 20] {
                // Whole pages, and the later blocks of each.
                let later = (page_bytes / 2).next_multiple_of(BLOCK).min((page_bytes - 1) / BLOCK * BLOCK);
                for range in [0..page_bytes, later..page_bytes] {
                    let what = format!("{range:?} of {page_bytes} bytes by {chunk_bytes}");
                    let (mut page, mut at) = (0, range.start);
                    for (pages, bytes) in cut(&form(page_bytes), 5, range.clone(), chunk_bytes) {
                        let len = pages.len() as u64 * (bytes.end - bytes.start);
                        assert!(len > 0 && len < chunk_bytes + BLOCK, "{what}: {len}");
                        assert_eq!((pages.start, bytes.start), (page, at), "{what}");
                        assert!(bytes.end == page_bytes || bytes.end.is_multiple_of(BLOCK), "{what}");
                        assert!(pages.len() == 1 || bytes == range, "{what}");
                        (page, at) =
                            if bytes.end == range.end { (pages.end, range.start) } else { (page, bytes.end) };
                    }
                    assert_eq!((page, at), (5, range.start), "{what}");
                }
            }
        }
    }

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
