//! Page keys: the engine's prefix-chain hash of tokens, 32 raw bytes inside, hex at the boundary.
//!
//! The hash covers tokens and the chain before them, nothing else: model, revision, page size and row
//! format are in the namespace and the pool.
//!
//! Source: sglang 0.5.23, `mem_cache/utils.py` (`storage_namespace_seed`) and
//! `mem_cache/cpp_utils/hash_binding.cpp`.

use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

/// The key of one page: the SHA-256 of the key before it and of the page's tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(pub [u8; 32]);

impl fmt::Display for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageKey({self})")
    }
}

impl FromStr for PageKey {
    type Err = Error;

    /// Reads 64 hex digits.
    fn from_str(text: &str) -> Result<PageKey> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| {
            Error::config(format!("a page key is 64 hex digits, got {} bytes of text", text.len()))
        })?;
        Ok(PageKey(bytes))
    }
}

/// The key that stands before the first page of a request with an adapter (`extra_key`) or a cache salt;
/// `None` where the request has neither, and the chain then starts without one.
///
/// An absent part and an empty part give different seeds.
pub fn chain_seed(extra_key: Option<&str>, cache_salt: Option<&str>) -> Option<PageKey> {
    if extra_key.is_none() && cache_salt.is_none() {
        return None;
    }
    let mut digest = Sha256::new_with_prefix(b"sglang-cache-namespace-v1");
    for part in [extra_key, cache_salt] {
        match part {
            None => digest.update([0]),
            Some(text) => {
                digest.update([1]);
                digest.update((text.len() as u64).to_le_bytes());
                digest.update(text.as_bytes());
            }
        }
    }
    Some(PageKey(digest.finalize().into()))
}

/// Keys of the whole pages of `tokens`, in order; the tokens of a last part page are left out, and so is
/// everything where `page_size` is 0.
///
/// A page hashes the key before it (`prior` for the first page, if any), then its tokens as little-endian
/// uint32. Where one token of the page does not fit, the page hashes a byte 0xff and its tokens as
/// little-endian uint64 instead; the odd length keeps the two forms apart.
pub fn page_keys(tokens: &[u64], page_size: u32, prior: Option<&PageKey>) -> Vec<PageKey> {
    let page_size = page_size as usize;
    if page_size == 0 {
        return Vec::new();
    }
    let mut chain = Chain::new(prior, tokens.len() / page_size);
    for page in tokens.chunks_exact(page_size) {
        chain.push(page, page.iter().copied());
    }
    chain.keys
}

/// Keys of a speculative engine's pages: position `i` is the pair `(tokens[i], tokens[i + 1])`, so a page
/// of `page_size` positions needs one token more than it has positions, and pages share that token.
///
/// `n` tokens have `n - 1` positions. The form of [`page_keys`] holds, with two numbers for each position.
pub fn bigram_page_keys(tokens: &[u64], page_size: u32, prior: Option<&PageKey>) -> Vec<PageKey> {
    let page_size = page_size as usize;
    if page_size == 0 {
        return Vec::new();
    }
    let pages = tokens.len().saturating_sub(1) / page_size;
    let mut chain = Chain::new(prior, pages);
    for page in 0..pages {
        let tokens = &tokens[page * page_size..][..page_size + 1];
        chain.push(tokens, tokens.windows(2).flatten().copied());
    }
    chain.keys
}

/// Keys computed so far, and the one that the next page hashes first.
struct Chain {
    prior: Option<PageKey>,
    keys: Vec<PageKey>,
    bytes: Vec<u8>,
}

impl Chain {
    fn new(prior: Option<&PageKey>, pages: usize) -> Chain {
        Chain { prior: prior.copied(), keys: Vec::with_capacity(pages), bytes: Vec::new() }
    }

    /// Adds a page that reads `tokens` and hashes `words`, which are those tokens in hashing order.
    fn push(&mut self, tokens: &[u64], words: impl Iterator<Item = u64>) {
        self.bytes.clear();
        if let Some(prior) = self.prior {
            self.bytes.extend_from_slice(&prior.0);
        }
        if tokens.iter().any(|&token| token > u64::from(u32::MAX)) {
            self.bytes.push(0xff);
            self.bytes.extend(words.flat_map(u64::to_le_bytes));
        } else {
            self.bytes.extend(words.flat_map(|word| (word as u32).to_le_bytes()));
        }
        let key = PageKey(Sha256::digest(&self.bytes).into());
        self.prior = Some(key);
        self.keys.push(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_reads_back() {
        let key = page_keys(&[0, 1, 2, 3], 4, None)[0];
        let text = key.to_string();
        assert_eq!(text, "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe");
        assert_eq!(text.parse::<PageKey>().unwrap(), key);
        for bad in ["", "ba", &text[1..], &format!("{text}0"), &text.replace('b', "g")] {
            assert!(bad.parse::<PageKey>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn only_whole_pages_have_keys() {
        assert!(page_keys(&[1, 2, 3], 4, None).is_empty());
        assert_eq!(page_keys(&[1, 2, 3, 4, 5], 4, None), page_keys(&[1, 2, 3, 4], 4, None));
        assert!(page_keys(&[1, 2], 0, None).is_empty());
        // Four tokens have three positions; the fifth completes the page.
        assert!(bigram_page_keys(&[1, 2, 3, 4], 4, None).is_empty());
        assert_eq!(bigram_page_keys(&[1, 2, 3, 4, 5], 4, None).len(), 1);
        assert!(bigram_page_keys(&[], 4, None).is_empty());
        assert!(bigram_page_keys(&[1, 2], 0, None).is_empty());
    }

    #[test]
    fn a_bigram_page_is_wide_because_of_the_token_it_shares() {
        let wide = u64::from(u32::MAX) + 1;
        let mut bytes = vec![0xff];
        bytes.extend([1, 2, 2, wide].iter().flat_map(|word: &u64| word.to_le_bytes()));
        let expected = PageKey(Sha256::digest(&bytes).into());
        assert_eq!(bigram_page_keys(&[1, 2, wide], 2, None), [expected]);
    }
}
