//! Memory of Python objects as regions: the one place where an address enters.
//!
//! The limited API has no buffer protocol before Python 3.11, so buffers are taken through numpy, which holds
//! the export as long as its array lives. Tensors are taken by what they can do; torch is never imported.

use std::any::Any;
use std::sync::Arc;

use hicache_core::transfer::{DeviceBuffer, DeviceBuffers};
use hicache_core::{Error, ErrorKind};
use hicache_sys::Region;
use hicache_sys::cuda::{DeviceMemory, PlanDevice, PlanEvent, PlanStream, Wishes};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::{to_u64, type_name};
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
    /// Memory of a device, which is never looked at here.
    Device(DeviceBuffers),
}

/// One buffer, or a list with one for each: what [`to_regions`] takes, `(address, bytes)` of host memory, tensors on a
/// device, objects with `__cuda_array_interface__`, or `(address, bytes, device)`.
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
            device.push(OnDevice { address, bytes, writable: true, kind, owner: item.clone().unbind() });
        } else if let Some(found) =
            OnDevice::tensor(item)?.map_or_else(|| OnDevice::array(item), |found| Ok(Some(found)))?
        {
            device.push(found);
        } else {
            host.push(to_region(item)?);
        }
    }
    match (host.is_empty(), device.is_empty()) {
        (_, true) => Ok(Found::Host(host)),
        (true, false) if device.iter().all(|one| one.kind.starts_with("cuda")) => {
            Ok(Found::Device(DeviceBuffers::lent(device.into_iter().map(OnDevice::lend).collect())))
        }
        // Plans can be made of it; there is nothing here that would copy it.
        (true, false) => {
            let buffer = |one: OnDevice| DeviceBuffer { address: one.address, bytes: one.bytes };
            Ok(Found::Device(device.into_iter().map(buffer).collect::<Vec<_>>().into()))
        }
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

/// Memory of a device with what keeps it valid.
struct OnDevice {
    address: u64,
    bytes: u64,
    writable: bool,
    /// Such as `cuda`, `cuda:1`, `npu`.
    kind: String,
    owner: Py<PyAny>,
}

impl OnDevice {
    /// A tensor that is not on the host.
    fn tensor(item: &Bound<'_, PyAny>) -> Result<Option<OnDevice>> {
        if !is_tensor(item)? {
            return Ok(None);
        }
        let kind: String = item.getattr("device")?.getattr("type")?.extract()?;
        if kind == "cpu" {
            return Ok(None);
        }
        if !item.call_method0("is_contiguous")?.is_truthy()? {
            let shape = item.getattr("shape")?;
            return Err(not_contiguous(&format!("a strided tensor of shape {shape}")));
        }
        let (address, bytes) =
            (item.call_method0("data_ptr")?.extract()?, item.getattr("nbytes")?.extract()?);
        Ok(Some(OnDevice { address, bytes, writable: true, kind, owner: item.clone().unbind() }))
    }

    /// An array by `__cuda_array_interface__`.
    fn array(item: &Bound<'_, PyAny>) -> Result<Option<OnDevice>> {
        if !item.hasattr("__cuda_array_interface__")? {
            return Ok(None);
        }
        let found = item.getattr("__cuda_array_interface__")?;
        let shape: Vec<u64> = found.get_item("shape")?.extract()?;
        let (address, read_only): (u64, bool) = found.get_item("data")?.extract()?;
        let typestr: String = found.get_item("typestr")?.extract()?;
        let size = typestr.get(2..).and_then(|size| size.parse::<u64>().ok());
        let size = size.ok_or_else(|| {
            Error::geometry(format!(
                "expected a typestr such as <f2 in __cuda_array_interface__, found {typestr:?}"
            ))
        })?;
        let strides: Option<Vec<i64>> = found.call_method1("get", ("strides",))?.extract()?;
        let mut bytes = size;
        for (place, &count) in shape.iter().enumerate().rev() {
            let is_packed = |strides: &Vec<i64>| count <= 1 || strides.get(place) == Some(&(bytes as i64));
            if !strides.as_ref().is_none_or(is_packed) && !shape.contains(&0) {
                return Err(not_contiguous(&format!("a strided array of shape {shape:?}")));
            }
            bytes *= count;
        }
        let kind = "cuda".to_owned();
        Ok(Some(OnDevice { address, bytes, writable: !read_only, kind, owner: item.clone().unbind() }))
    }

    fn lend(self) -> Arc<DeviceMemory> {
        let owner: Box<dyn Any + Send + Sync> = Box::new(self.owner);
        // SAFETY: the tensor or array says that `bytes` contiguous bytes stand at `address` of a CUDA device, as long as
        // `owner` lives, which the memory holds; of a bare address the caller says so. That nobody else touches the
        // slots of a transfer before its end is the caller's promise (see the stub).
        let memory =
            unsafe { DeviceMemory::from_raw_parts(self.address, self.bytes, self.writable, Some(owner)) };
        Arc::new(memory)
    }
}

/// A stream of a device by its handle; 0 is the device's default stream.
pub(crate) fn device_stream(device: &Arc<PlanDevice>, handle: i64, wishes: Wishes) -> Result<PlanStream> {
    let handle = to_u64("stream", handle)?;
    // SAFETY: that the handle is of a live stream of this device, until the call or its ticket has ended, is the
    // caller's promise, given with the number (see the stub).
    let stream = unsafe { PlanStream::new(device, handle, wishes) };
    Ok(stream.map_err(|error| Error::config(format!("stream: {error}")))?)
}

/// An event of the driver by its handle, which is not 0.
pub(crate) fn driver_event(device: &Arc<PlanDevice>, handle: u64) -> Result<PlanEvent> {
    // SAFETY: that the handle is of a live event, until the call or its ticket has ended, is the caller's promise,
    // given with the number (see the stub).
    let event = unsafe { device.borrowed(handle) };
    Ok(event.map_err(|error| Error::config(error.to_string()))?)
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
