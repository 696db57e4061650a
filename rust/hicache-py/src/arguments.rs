//! Numbers and names from Python, checked, with the argument named in the message.

use hicache_core::Error;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PySequence, PyString};

use crate::errors::{Failure, Result};

/// A number that fits into 32 bits.
pub(crate) fn to_u32(name: &str, value: i64) -> Result<u32> {
    let refusal = || Error::config(format!("{name} is {value}, expected 0 to {}", u32::MAX));
    Ok(u32::try_from(value).map_err(|_| refusal())?)
}

/// A number that is not negative.
pub(crate) fn to_u64(name: &str, value: i64) -> Result<u64> {
    let refusal = || Error::config(format!("{name} is {value}, expected 0 or more"));
    Ok(u64::try_from(value).map_err(|_| refusal())?)
}

/// Signed 64-bit integers: a sequence of ints, or an array of one axis with any integer type.
pub(crate) fn to_integers(name: &str, object: &Bound<'_, PyAny>) -> Result<Vec<i64>> {
    if let Ok(list) = object.cast::<PyList>() {
        return list.iter().enumerate().map(|(index, item)| to_integer(name, index, &item)).collect();
    }
    if is_array(object)? {
        return array_integers(name, object);
    }
    let is_text = object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>();
    if is_text || object.cast::<PySequence>().is_err() {
        return Err(Error::config(format!(
            "{name}: expected a sequence or an array of integers, found {}",
            type_name(object)
        ))
        .into());
    }
    let items = object.try_iter()?.enumerate();
    items.map(|(index, item)| to_integer(name, index, &item?)).collect()
}

fn to_integer(name: &str, index: usize, item: &Bound<'_, PyAny>) -> Result<i64> {
    item.extract().map_err(|error: PyErr| {
        let found = match item.is_instance_of::<PyInt>() {
            true => "an integer of more than 64 bits".to_owned(),
            false => type_name(item),
        };
        match error.is_instance_of::<pyo3::exceptions::PyException>(item.py()) {
            true => {
                Error::config(format!("{name}[{index}]: expected a 64-bit integer, found {found}")).into()
            }
            false => Failure::Python(error), // an interrupt while a foreign type made its integer
        }
    })
}

fn array_integers(name: &str, array: &Bound<'_, PyAny>) -> Result<Vec<i64>> {
    let axes = array.getattr("shape")?.len()?;
    let kind: String = array.getattr("dtype")?.getattr("kind")?.extract()?;
    let refuse = |found: String| -> Failure {
        Error::config(format!("{name}: expected an integer array of one axis, found {found}")).into()
    };
    if axes != 1 {
        return Err(refuse(format!("{axes} axes")));
    }
    // One conversion in numpy, whatever the width, byte order and stride; then plain little-endian words.
    let wide = match kind.as_str() {
        "i" => "<i8",
        "u" => "<u8",
        _ => return Err(refuse(format!("dtype {}", array.getattr("dtype")?))),
    };
    let bytes = array.call_method1("astype", (wide,))?.call_method0("tobytes")?;
    let (words, _) = bytes.cast::<PyBytes>().map_err(PyErr::from)?.as_bytes().as_chunks::<8>();
    if kind == "i" {
        return Ok(words.iter().map(|word| i64::from_le_bytes(*word)).collect());
    }
    let unsigned = words.iter().map(|word| u64::from_le_bytes(*word)).enumerate();
    unsigned
        .map(|(index, value)| {
            i64::try_from(value).map_err(|_| {
                Error::config(format!("{name}[{index}] is {value}, expected at most {}", i64::MAX)).into()
            })
        })
        .collect()
}

/// Whether this looks like a numpy array.
pub(crate) fn is_array(object: &Bound<'_, PyAny>) -> Result<bool> {
    Ok(object.hasattr("__array_interface__")? && object.hasattr("dtype")? && object.hasattr("tobytes")?)
}

/// "a <type>", for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    match object.get_type().qualname() {
        Ok(name) => format!("a value of type {name}"),
        Err(_) => "a value of an unnamed type".to_owned(),
    }
}
