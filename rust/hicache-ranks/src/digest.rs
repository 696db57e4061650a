//! Digests of state: 64-bit numbers that are equal where the state is, on every machine and in every process.
//!
//! No seed, no pointer and no map order enters. They find accidents, not attackers.

use twox_hash::XxHash3_64;

/// Digest of bytes.
pub fn of_bytes(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// One step of a rolling digest: depends on the order of what is mixed in.
#[inline]
pub fn mix(digest: u64, value: u64) -> u64 {
    scatter(digest.rotate_left(23) ^ value.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

/// Spreads the bits of a number. The sum or exclusive or of scattered numbers is a digest of a set.
#[inline]
pub fn scatter(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A digest as a word of a reduction: not negative, so that its negation exists.
#[inline]
pub fn word(digest: u64) -> i64 {
    // Two bits are given away: 62 are plenty for accidents, and sums of two words do not overflow.
    (digest >> 2) as i64
}
