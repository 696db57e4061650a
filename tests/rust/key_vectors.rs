//! Page keys equal the engine's, hash for hash.
//!
//! The fixture was computed with the functions of sglang 0.5.23.

use hicache_core::{PageKey, bigram_page_keys, chain_seed, page_keys};
use serde_json::Value;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/key_vectors.json")).unwrap()
}

fn optional_text<'a>(object: &'a Value, field: &str) -> Option<&'a str> {
    match &object[field] {
        Value::Null => None,
        value => Some(value.as_str().unwrap()),
    }
}

fn optional_key(object: &Value, field: &str) -> Option<PageKey> {
    optional_text(object, field).map(|text| text.parse().unwrap())
}

#[test]
fn every_chain_of_the_fixture_is_reproduced() {
    let fixture = fixture();
    let chains = fixture["chains"].as_array().unwrap();
    assert_eq!(chains.len(), 9, "a chain was added or lost");
    for chain in chains {
        let name = chain["name"].as_str().unwrap();
        let page_size = u32::try_from(chain["page_size"].as_u64().unwrap()).unwrap();
        let tokens: Vec<u64> =
            chain["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect();
        let seed = chain_seed(optional_text(chain, "extra_key"), optional_text(chain, "cache_salt"));
        let prior = optional_key(chain, "prior").or(seed);
        let keys = if chain["bigram"].as_bool().unwrap_or(false) {
            bigram_page_keys(&tokens, page_size, prior.as_ref())
        } else {
            page_keys(&tokens, page_size, prior.as_ref())
        };
        let keys: Vec<String> = keys.iter().map(PageKey::to_string).collect();
        let expected: Vec<&str> =
            chain["hashes"].as_array().unwrap().iter().map(|hash| hash.as_str().unwrap()).collect();
        assert_eq!(keys, expected, "{name}");
    }
}

#[test]
fn every_seed_of_the_fixture_is_reproduced() {
    let fixture = fixture();
    let seeds = fixture["namespace_seeds"].as_array().unwrap();
    assert_eq!(seeds.len(), 9, "a seed was added or lost");
    for case in seeds {
        let seed = chain_seed(optional_text(case, "extra_key"), optional_text(case, "cache_salt"));
        assert_eq!(seed, optional_key(case, "seed"), "{case}");
    }
}
