//! Page keys: from what callers hold them in, and computed from tokens.

use hicache_core::{Error, PageKey};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyInt, PyList, PySequence, PyString};

use crate::arguments::{is_array, to_integers, to_u32, type_name};
use crate::errors::Result;

/// Bytes of one key.
const KEY_BYTES: usize = 32;

/// Keys of a chain: a list of 32 bytes or 64 hex digits each, a uint8 array `[pages, 32]`, or all in one bytes
/// object.
pub(crate) fn to_keys(object: &Bound<'_, PyAny>) -> Result<Vec<PageKey>> {
    if let Ok(list) = object.cast::<PyList>() {
        return list
            .iter()
            .enumerate()
            .map(|(page, item)| to_key(|| format!("keys[{page}]"), &item))
            .collect();
    }
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return flat_keys(bytes.as_bytes());
    }
    if let Ok(bytes) = object.cast::<PyByteArray>() {
        return flat_keys(&bytes.to_vec());
    }
    if is_array(object)? {
        return array_keys(object);
    }
    if object.is_instance_of::<PyString>() || object.cast::<PySequence>().is_err() {
        return Err(Error::config(format!(
            "keys: expected a list of keys, an array of shape [pages, 32] or their bytes, found {}",
            type_name(object)
        ))
        .into());
    }
    let items = object.try_iter()?.enumerate();
    items.map(|(page, item)| to_key(|| format!("keys[{page}]"), &item?)).collect()
}

/// One key; `name` says which, for messages.
pub(crate) fn to_key(name: impl Fn() -> String, item: &Bound<'_, PyAny>) -> Result<PageKey> {
    let found = if let Ok(bytes) = item.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        if let Ok(key) = bytes.try_into() {
            return Ok(PageKey(key));
        }
        format!("{} bytes", bytes.len())
    } else if let Ok(text) = item.cast::<PyString>() {
        let text = text.to_cow()?;
        if let Ok(key) = text.parse() {
            return Ok(key);
        }
        format!("text of {} characters that is no such number", text.chars().count())
    } else if item.is_instance_of::<PyInt>() {
        return Err(Error::config(format!(
            "{}: found an integer; a page key is a SHA-256 digest (32 bytes, or 64 hex digits), never a hash() value, which differs from process to process",
            name()
        ))
        .into());
    } else {
        type_name(item)
    };
    Err(Error::config(format!("{}: expected 32 bytes or 64 hex digits, found {found}", name())).into())
}

fn flat_keys(bytes: &[u8]) -> Result<Vec<PageKey>> {
    let (keys, rest) = bytes.as_chunks::<KEY_BYTES>();
    if !rest.is_empty() {
        return Err(Error::config(format!(
            "keys: expected a multiple of {KEY_BYTES} bytes, found {}",
            bytes.len()
        ))
        .into());
    }
    Ok(keys.iter().map(|key| PageKey(*key)).collect())
}

fn array_keys(array: &Bound<'_, PyAny>) -> Result<Vec<PageKey>> {
    let (shape, dtype) = (array.getattr("shape")?, array.getattr("dtype")?.str()?);
    let is_rows = shape.extract::<(usize, usize)>().is_ok_and(|(_, columns)| columns == KEY_BYTES);
    if !is_rows || dtype.to_cow()? != "uint8" {
        return Err(Error::config(format!(
            "keys: expected a uint8 array of shape [pages, {KEY_BYTES}], found {dtype} of shape {shape}"
        ))
        .into());
    }
    let bytes = array.call_method0("tobytes")?;
    flat_keys(bytes.cast::<PyBytes>().map_err(PyErr::from)?.as_bytes())
}

/// Computes the keys of the whole pages of `tokens`.
#[pyfunction]
#[pyo3(signature = (tokens, page_size, *, prior=None, extra_key=None, cache_salt=None, bigram=false))]
pub(crate) fn page_keys<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    page_size: i64,
    prior: Option<&Bound<'py, PyAny>>,
    extra_key: Option<&str>,
    cache_salt: Option<&str>,
    bigram: bool,
) -> Result<Bound<'py, PyList>> {
    let page_size = to_u32("page_size", page_size)?;
    if page_size == 0 {
        return Err(Error::config("page_size is 0, expected at least one token in a page").into());
    }
    let tokens = to_integers("tokens", tokens)?;
    if let Some(index) = tokens.iter().position(|token| *token < 0) {
        let found = tokens[index];
        return Err(Error::config(format!("tokens[{index}] is {found}, expected 0 or more")).into());
    }
    let seed = hicache_core::chain_seed(extra_key, cache_salt);
    let prior = match prior {
        Some(_) if seed.is_some() => {
            return Err(Error::config(
                "expected prior, or extra_key and cache_salt: the key of an earlier page holds them already",
            )
            .into());
        }
        Some(prior) => Some(to_key(|| "prior".to_owned(), prior)?),
        None => seed,
    };
    let compute = if bigram { hicache_core::bigram_page_keys } else { hicache_core::page_keys };
    let keys = py.detach(|| {
        let tokens: Vec<u64> = tokens.into_iter().map(i64::cast_unsigned).collect();
        compute(&tokens, page_size, prior.as_ref())
    });
    Ok(PyList::new(py, keys.iter().map(|key| PyBytes::new(py, &key.0)))?)
}

/// Computes what the first page of a request with an adapter or a cache salt hashes before its tokens.
#[pyfunction]
#[pyo3(signature = (extra_key=None, cache_salt=None))]
pub(crate) fn chain_seed<'py>(
    py: Python<'py>,
    extra_key: Option<&str>,
    cache_salt: Option<&str>,
) -> Option<Bound<'py, PyBytes>> {
    hicache_core::chain_seed(extra_key, cache_salt).map(|key| PyBytes::new(py, &key.0))
}
