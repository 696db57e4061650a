//! Checksum blocks: encoding, decoding, and the checksum that binds a block to its object.

use std::cell::RefCell;

use crate::format::checksum_with_seed;
use crate::format::form::Codec;

/// Checksum of stored block `index` of the object with this seed (see [`crate::format::form::Form::seed`]).
pub fn block_checksum(seed: u64, index: u32, stored: &[u8]) -> u64 {
    checksum_with_seed(seed.wrapping_add(u64::from(index)), stored)
}

/// [`block_checksum`] of a block that comes in pieces.
pub struct StreamingChecksum(twox_hash::XxHash3_64);

impl StreamingChecksum {
    /// Starts block `index` of the object with this seed.
    pub fn new(seed: u64, index: u32) -> Self {
        StreamingChecksum(twox_hash::XxHash3_64::with_seed(seed.wrapping_add(u64::from(index))))
    }

    /// The next piece.
    pub fn update(&mut self, piece: &[u8]) {
        std::hash::Hasher::write(&mut self.0, piece);
    }

    /// The checksum.
    pub fn finish(&self) -> u64 {
        std::hash::Hasher::finish(&self.0)
    }
}

thread_local! {
    static COMPRESSOR: RefCell<Option<(i32, zstd::bulk::Compressor<'static>)>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
    static PLANES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Appends block `raw` to `out` as `codec` stores it. A block that does not shrink is stored as it is, which
/// a reader tells by its length being the raw one.
pub fn encode_block(codec: Codec, level: i32, raw: &[u8], out: &mut Vec<u8>) -> std::io::Result<()> {
    if codec == Codec::None {
        out.extend_from_slice(raw);
        return Ok(());
    }
    let start = out.len();
    let shrank = COMPRESSOR.with_borrow_mut(|slot| {
        if slot.as_ref().is_none_or(|(have, _)| *have != level) {
            *slot = Some((level, zstd::bulk::Compressor::new(level)?));
        }
        let Some((_, compressor)) = slot else { unreachable!("filled above") };
        // One byte less than raw: a block that needs more is stored as it is.
        out.resize(start + raw.len().saturating_sub(1), 0);
        let room = &mut out[start..];
        Ok::<_, std::io::Error>(match codec {
            Codec::ZstdPlanes => PLANES.with_borrow_mut(|planes| {
                split_planes(raw, planes);
                // A frame for each plane: one frame would code both with the same table, and gain little.
                let (even, odd) = planes.split_at(raw.len().div_ceil(2));
                let first = compressor.compress_to_buffer(even, room).ok()?;
                let second = compressor.compress_to_buffer(odd, &mut room[first..]).ok()?;
                Some(first + second)
            }),
            Codec::Zstd | Codec::None => compressor.compress_to_buffer(raw, room).ok(),
        })
    })?;
    out.truncate(start + shrank.unwrap_or_default());
    if shrank.is_none() {
        out.extend_from_slice(raw);
    }
    Ok(())
}

/// Decodes `stored` into `raw`, whose length is the block's raw length. `false`: the bytes do not decode.
pub fn decode_block(codec: Codec, stored: &[u8], raw: &mut [u8]) -> bool {
    if stored.len() == raw.len() {
        raw.copy_from_slice(stored);
        return true;
    }
    if codec == Codec::None {
        return false;
    }
    DECOMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = zstd::bulk::Decompressor::new().ok();
        }
        let Some(decompressor) = slot else { return false };
        if codec == Codec::Zstd {
            return matches!(decompressor.decompress_to_buffer(stored, raw), Ok(len) if len == raw.len());
        }
        PLANES.with_borrow_mut(|planes| {
            planes.clear();
            planes.resize(raw.len(), 0);
            let whole = matches!(decompressor.decompress_to_buffer(stored, &mut planes[..]), Ok(len) if len == raw.len());
            if whole {
                join_planes(planes, raw);
            }
            whole
        })
    })
}

/// Even bytes, then odd bytes.
fn split_planes(raw: &[u8], planes: &mut Vec<u8>) {
    planes.clear();
    planes.resize(raw.len(), 0);
    let (even, odd) = planes.split_at_mut(raw.len().div_ceil(2));
    let (pairs, last) = raw.as_chunks::<2>();
    for ((pair, even), odd) in pairs.iter().zip(even.iter_mut()).zip(odd) {
        [*even, *odd] = *pair;
    }
    if let ([last], Some(place)) = (last, even.last_mut()) {
        *place = *last;
    }
}

/// Inverse of [`split_planes`].
fn join_planes(planes: &[u8], raw: &mut [u8]) {
    let (even, odd) = planes.split_at(planes.len().div_ceil(2));
    let (pairs, last) = raw.as_chunks_mut::<2>();
    for ((pair, even), odd) in pairs.iter_mut().zip(even).zip(odd) {
        *pair = [*even, *odd];
    }
    if let ([place], Some(last)) = (last, even.last()) {
        *place = *last;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_gives_the_bytes_back() {
        let smooth: Vec<u8> = (0..40_001_u32).map(|i| (i / 700) as u8).collect();
        let noise: Vec<u8> =
            (0..9_999_u32).map(|i| (i.wrapping_mul(2_654_435_761).rotate_left(13) >> 7) as u8).collect();
        for codec in [Codec::None, Codec::Zstd, Codec::ZstdPlanes] {
            for raw in [&smooth[..], &noise, &[], &[7], &[1, 2, 3]] {
                let mut stored = b"before".to_vec();
                encode_block(codec, 1, raw, &mut stored).unwrap();
                assert!(stored.len() <= 6 + raw.len());
                let mut back = vec![0xa5; raw.len()];
                assert!(decode_block(codec, &stored[6..], &mut back));
                assert_eq!(back, raw, "{codec:?}");
            }
        }
    }

    #[test]
    fn bytes_that_do_not_decode_are_told() {
        let mut raw = [0; 64];
        assert!(!decode_block(Codec::None, &[0; 63], &mut raw));
        assert!(!decode_block(Codec::Zstd, &[0; 63], &mut raw));
        assert!(!decode_block(Codec::ZstdPlanes, &[0x28, 0xb5, 0x2f, 0xfd], &mut raw));
    }

    #[test]
    fn a_checksum_names_its_block_and_object() {
        let one = block_checksum(1, 0, b"bytes");
        assert_ne!(one, block_checksum(2, 0, b"bytes"));
        assert_ne!(one, block_checksum(1, 1, b"bytes"));
        assert_ne!(one, block_checksum(1, 0, b"byteS"));
        let mut streaming = StreamingChecksum::new(1, 0);
        b"bytes".chunks(2).for_each(|piece| streaming.update(piece));
        assert_eq!(streaming.finish(), one);
    }
}
