//! What is recorded of an object: the field of a record, and the digest that a selector asks for.

use std::borrow::Cow;

use hicache_ranks::audit::{Kind, Record, Value};
use hicache_ranks::digest;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyFloat, PyInt, PyList, PyMemoryView, PySequence, PyString, PyTuple,
};

/// Longest list that is recorded item by item, and longest text; of longer ones a digest is.
const MAX_ITEMS: usize = 32;
const MAX_TEXT: usize = 256;
/// Deepest list in a list.
const MAX_DEPTH: u32 = 6;

/// The field that an object stands for: equal where the objects are equal, on every rank.
pub(super) fn to_value(object: &Bound<'_, PyAny>, depth: u32) -> PyResult<Value> {
    if object.is_none() {
        return Ok(Value::Absent);
    }
    if let Ok(truth) = object.cast_exact::<PyBool>() {
        return Ok(Value::Bool(truth.is_true()));
    }
    if let Ok(number) = object.cast::<PyInt>() {
        return Ok(match number.extract::<i64>() {
            Ok(number) => Value::Int(number),
            Err(_) => Value::Text(number.str()?.to_string()),
        });
    }
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(to_text(text.to_string_lossy()));
    }
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Value::Digest(digest::of_bytes(bytes.as_bytes())));
    }
    if let Ok(number) = object.cast::<PyFloat>() {
        return Ok(Value::Text(number.repr()?.to_string()));
    }
    if depth < MAX_DEPTH && (object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>()) {
        return to_list(object, depth);
    }
    // An address would differ from rank to rank; the type does not.
    Ok(Value::Text(format!("<{}>", object.get_type().name()?)))
}

/// The field that text stands for.
pub(super) fn to_text(text: Cow<'_, str>) -> Value {
    if text.len() <= MAX_TEXT {
        return Value::Text(text.into_owned());
    }
    Value::Digest(digest::of_bytes(text.as_bytes()))
}

fn to_list(object: &Bound<'_, PyAny>, depth: u32) -> PyResult<Value> {
    let fields = object.try_iter()?.map(|item| to_value(&item?, depth + 1)).collect::<PyResult<Vec<_>>>()?;
    if fields.len() <= MAX_ITEMS {
        return Ok(Value::List(fields));
    }
    let record = Record { step: 0, kind: Kind::State, name: String::new(), fields };
    Ok(Value::Digest(digest::of_bytes(&record.to_bytes())))
}

/// What a selector's `digest` gives of an object: equal where the values are, for arrays, tensors and long lists.
pub(super) fn to_digest(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    let list = to_list_of_array(object)?;
    Ok(Value::Digest(digest_of(list.as_ref().unwrap_or(object))?))
}

/// What `object.tolist()` gives, where there is such a method.
fn to_list_of_array<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    static GETATTR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if object.is_exact_instance_of::<PyList>() || object.is_exact_instance_of::<PyTuple>() {
        return Ok(None);
    }
    let py = object.py();
    // The built-in makes no error for an attribute that is missing; that would cost more than all the rest.
    let getattr = GETATTR.import(py, "builtins", "getattr")?;
    let tolist = getattr.call1((object, intern!(py, "tolist"), py.None()))?;
    if tolist.is_none() { Ok(None) } else { tolist.call0().map(Some) }
}

fn digest_of(object: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = object.py();
    let of_repr = || PyResult::Ok(digest::of_bytes(object.repr()?.to_str()?.as_bytes()));
    if let Some(len) = list_len(object) {
        return match to_numbers(object.cast::<PySequence>()?, len) {
            Ok(numbers) => Ok(digest::of_bytes(&numbers)),
            // Not numbers of 64 bits alone: what they look like.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => of_repr(),
            Err(error) if error.is_instance_of::<PyOverflowError>(py) => of_repr(),
            Err(error) => Err(error),
        };
    }
    if object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyByteArray>()
        || object.is_instance_of::<PyMemoryView>()
    {
        let bytes = py.get_type::<PyBytes>().call1((object,))?;
        return Ok(digest::of_bytes(bytes.cast::<PyBytes>()?.as_bytes()));
    }
    if object.is_none()
        || object.is_instance_of::<PyString>()
        || object.is_instance_of::<PyInt>()
        || object.is_instance_of::<PyFloat>()
    {
        return of_repr();
    }
    Ok(digest::of_bytes(&[]))
}

/// How many items a list or tuple has; None for anything else.
fn list_len(object: &Bound<'_, PyAny>) -> Option<usize> {
    match object.cast::<PyList>() {
        Ok(list) => Some(list.len()),
        Err(_) => object.cast::<PyTuple>().ok().map(|tuple| tuple.len()),
    }
}

/// The numbers of a list, each in the 8 bytes of this machine, one after the other.
fn to_numbers(list: &Bound<'_, PySequence>, len: usize) -> PyResult<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len * size_of::<i64>());
    for place in 0..len {
        bytes.extend_from_slice(&list.get_item(place)?.extract::<i64>()?.to_ne_bytes());
    }
    Ok(bytes)
}
