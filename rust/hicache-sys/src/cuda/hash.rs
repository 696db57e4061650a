// The hash by which images and sources are told apart: FNV-1a of 64 bits, in the library, in build.rs and in
// cuda/build_image.py. It finds stale and damaged files; it does not keep out somebody who wants to get in.

/// Start of a hash.
pub(crate) const HASH_START: u64 = 0xcbf2_9ce4_8422_2325;

/// Continues `hash` over `bytes`.
pub(crate) const fn hash_more(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    hash
}

/// Hash of named texts: names and texts each end with a byte that neither contains.
pub(crate) fn hash_sources<'a>(sources: impl IntoIterator<Item = (&'a str, &'a str)>) -> u64 {
    sources.into_iter().fold(HASH_START, |hash, (name, text)| {
        let hash = hash_more(hash_more(hash, name.as_bytes()), &[0]);
        hash_more(hash_more(hash, text.as_bytes()), &[0])
    })
}
