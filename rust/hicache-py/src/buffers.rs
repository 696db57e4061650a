//! Memory of Python objects as regions: the one place where an address enters.
//!
//! The limited API has no buffer protocol before Python 3.11, so buffers are taken through numpy, which holds
//! the export as long as its array lives. Tensors are taken by what they can do; torch is never imported.

use std::any::Any;
use std::sync::Arc;

use hicache_core::{Error, ErrorKind};
use hicache_sys::Region;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::type_name;
use crate::errors::{Failure, Result};
use crate::host_pool::PyHostPool;

/// Host memory, wrapped once: an array, a CPU tensor or any other contiguous buffer.
#[pyclass(frozen, name = "Region", module = "hicache_store")]
pub(crate) struct PyRegion {
    region: Arc<Region>,
}

#[pymethods]
impl PyRegion {
    #[new]
    fn new(buffer: &Bound<'_, PyAny>) -> Result<Self> {
        Ok(PyRegion { region: to_region(buffer)? })
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.region.len()
    }

    /// Whether a restore may write into it.
    #[getter]
    fn writable(&self) -> bool {
        self.region.is_writable()
    }

    fn __repr__(&self) -> String {
        let access = if self.region.is_writable() { "writable" } else { "read-only" };
        format!("<Region of {} bytes, {access}>", self.region.len())
    }
}

/// The memory of one pool: one object, or a list or tuple with one for each component.
pub(crate) fn to_regions(object: &Bound<'_, PyAny>) -> Result<Vec<Arc<Region>>> {
    if let Ok(list) = object.cast::<PyList>() {
        return list.iter().map(|item| to_region(&item)).collect();
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return tuple.iter().map(|item| to_region(&item)).collect();
    }
    Ok(vec![to_region(object)?])
}

/// The buffers of one side of a transfer.
pub(crate) enum Found {
    /// Memory of the host.
    Host(Vec<Arc<Region>>),
    /// Addresses and bytes on a device, which are never looked at here.
    Device(Vec<(u64, u64)>),
}

/// One buffer, or a list with one for each: what [`to_regions`] takes, `(address, bytes)` of host memory, tensors on a
/// device, or `(address, bytes, device)`.
pub(crate) fn to_buffers(object: &Bound<'_, PyAny>) -> Result<Found> {
    let items: Vec<Bound<'_, PyAny>> = match object.cast::<PyList>() {
        Ok(list) => list.iter().collect(),
        Err(_) => vec![object.clone()],
    };
    let (mut host, mut device) = (Vec::new(), Vec::new());
    for item in &items {
        if let Ok((address, bytes)) = item.extract::<(usize, usize)>() {
            if address == 0 {
                return Err(Error::config("expected the address of memory, found 0").into());
            }
            host.push(Arc::new(
                Lent { address, len: bytes, writable: true, owner: item.clone().unbind() }.into_region(),
            ));
        } else if let Ok((address, bytes, kind)) = item.extract::<(u64, u64, String)>() {
            if kind == "cpu" {
                let message = "expected a device such as \"cuda\" beside an address, found \"cpu\": give (address, bytes)";
                return Err(Error::config(message).into());
            }
            device.push((address, bytes));
        } else if is_tensor(item)? && item.getattr("device")?.getattr("type")?.extract::<String>()? != "cpu" {
            if !item.call_method0("is_contiguous")?.is_truthy()? {
                let shape = item.getattr("shape")?;
                return Err(not_contiguous(&format!("a strided tensor of shape {shape}")));
            }
            device.push((item.call_method0("data_ptr")?.extract()?, item.getattr("nbytes")?.extract()?));
        } else {
            host.push(to_region(item)?);
        }
    }
    match (host.is_empty(), device.is_empty()) {
        (_, true) => Ok(Found::Host(host)),
        (true, false) => Ok(Found::Device(device)),
        (false, false) => {
            Err(Error::geometry("expected all buffers of one side on the host or all on a device").into())
        }
    }
}

fn to_region(object: &Bound<'_, PyAny>) -> Result<Arc<Region>> {
    if let Ok(region) = object.cast::<PyRegion>() {
        return Ok(Arc::clone(&region.get().region));
    }
    if let Ok(pool) = object.cast::<PyHostPool>() {
        return Ok(Arc::new(pool.get().pool()?.region()?));
    }
    let lent = if is_tensor(object)? { Lent::tensor(object)? } else { Lent::buffer(object)? };
    Ok(Arc::new(lent.into_region()))
}

fn is_tensor(object: &Bound<'_, PyAny>) -> Result<bool> {
    Ok(object.hasattr("data_ptr")? && object.hasattr("is_contiguous")? && object.hasattr("device")?)
}

/// An address with what keeps it valid.
struct Lent {
    address: usize,
    len: usize,
    writable: bool,
    owner: Py<PyAny>,
}

impl Lent {
    fn tensor(tensor: &Bound<'_, PyAny>) -> Result<Self> {
        let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
        if device != "cpu" {
            let message = format!("expected host memory, found a tensor on device {device:?}");
            return Err(Error::new(ErrorKind::Unsupported, message).into());
        }
        if !tensor.call_method0("is_contiguous")?.is_truthy()? {
            let shape = tensor.getattr("shape")?;
            return Err(not_contiguous(&format!("a strided tensor of shape {shape}")));
        }
        Ok(Lent {
            address: tensor.call_method0("data_ptr")?.extract()?,
            len: tensor.getattr("nbytes")?.extract()?,
            writable: true,
            owner: tensor.clone().unbind(),
        })
    }

    fn buffer(object: &Bound<'_, PyAny>) -> Result<Self> {
        let numpy = object.py().import("numpy")?;
        let array = if object.is_instance(&numpy.getattr("ndarray")?)? {
            object.clone()
        } else {
            // `frombuffer` asks for the whole buffer as contiguous bytes, or refuses; the array owns the export.
            numpy.call_method1("frombuffer", (object, numpy.getattr("uint8")?)).map_err(|error| {
                if !error.is_instance_of::<pyo3::exceptions::PyException>(object.py()) {
                    return Failure::Python(error);
                }
                let found = type_name(object);
                let why = error.value(object.py());
                Error::geometry(format!(
                    "expected a contiguous buffer, array or CPU tensor, found {found} ({why})"
                ))
                .into()
            })?
        };
        let flags = array.getattr("flags")?;
        if !flags.getattr("c_contiguous")?.is_truthy()? {
            let shape = array.getattr("shape")?;
            return Err(not_contiguous(&format!("a strided array of shape {shape}")));
        }
        // Bytes written over object references would be followed as pointers.
        if array.getattr("dtype")?.getattr("hasobject")?.is_truthy()? {
            return Err(
                Error::geometry("expected an array of plain numbers, found one of Python objects").into()
            );
        }
        let (address, read_only): (usize, bool) =
            array.getattr("__array_interface__")?.get_item("data")?.extract()?;
        Ok(Lent {
            address,
            len: array.getattr("nbytes")?.extract()?,
            writable: !read_only,
            owner: array.unbind(),
        })
    }

    fn into_region(self) -> Region {
        let owner: Box<dyn Any + Send + Sync> = Box::new(self.owner);
        let base = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: numpy or the tensor says that `len` contiguous bytes stand at `base` (writable, if so marked), as
        // long as `owner` lives, which the region holds. That nobody else touches the slots of a running call is
        // the caller's promise, given with the object (see the stub).
        unsafe { Region::from_raw_parts(base, self.len, self.writable, Some(owner)) }
    }
}

fn not_contiguous(found: &str) -> Failure {
    Error::geometry(format!("expected C-contiguous memory, found {found}")).into()
}
