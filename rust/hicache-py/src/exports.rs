//! Memory of host pools as buffers and DLPack tensors: the one place where our own addresses leave.
//!
//! The limited API of Python 3.10 does not name the buffer protocol, though its slots have had the same numbers and
//! its struct the same fields since Python 3.9, where both entered the stable ABI in 3.11. So the slots are given to
//! a type of their own, made by hand, which the class that Python sees inherits from.

use std::ffi::{c_char, c_int, c_void};

use hicache_sys::Region;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::errors::Result;
use crate::host_pool::PyHostPool;

const PY_BF_GETBUFFER: c_int = 1;
const PY_BF_RELEASEBUFFER: c_int = 2;
const PYBUF_FORMAT: c_int = 0x4;
const PYBUF_ND: c_int = 0x8;
const PYBUF_STRIDES: c_int = 0x10 | PYBUF_ND;

/// `Py_buffer`, as it has been since Python 3.3.
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// What stands behind a buffer: a consumer holds it, some of them longer than the buffer itself (torch does).
#[pyclass(frozen, name = "_HostExport", module = "hicache_store")]
struct PyHostExport {
    region: Region,
    shape: [ffi::Py_ssize_t; 1],
    strides: [ffi::Py_ssize_t; 1],
}

/// The class of host pools: the compiled one, with the buffer protocol.
pub(crate) fn host_pool_class(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let compiled = py.get_type::<PyHostPool>();
    let bases = PyTuple::new(py, [compiled.as_any(), buffer_class(py)?.as_any()])?;
    let names = PyDict::new(py);
    names.set_item("__slots__", PyTuple::new(py, ["__weakref__"])?)?;
    names.set_item("__module__", "hicache_store")?;
    names.set_item("__doc__", compiled.getattr("__doc__")?)?;
    py.get_type::<PyType>().call1(("HostPool", bases, names))
}

fn buffer_class(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    let mut slots = [
        ffi::PyType_Slot { slot: PY_BF_GETBUFFER, pfunc: get_buffer as *mut c_void },
        ffi::PyType_Slot { slot: PY_BF_RELEASEBUFFER, pfunc: release_buffer as *mut c_void },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"hicache_store._HostBuffer".as_ptr(),
        basicsize: 0, // that of `object`
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as _,
        slots: slots.as_mut_ptr(),
    };
    // SAFETY: a terminated list of slots, each a function of the type that its number stands for; the name is static.
    let class = unsafe { ffi::PyType_FromSpec(&raw mut spec) };
    // SAFETY: a new reference, or null with an exception set.
    let class = unsafe { Bound::from_owned_ptr_or_err(py, class) }?;
    Ok(class.cast_into::<PyType>()?)
}

/// `getbufferproc`: the whole memory as writable bytes.
unsafe extern "C" fn get_buffer(slf: *mut ffi::PyObject, view: *mut PyBuffer, flags: c_int) -> c_int {
    // SAFETY: the interpreter calls this slot, attached.
    let py = unsafe { Python::assume_attached() };
    // SAFETY: the interpreter passes the object that it was asked for.
    let object = unsafe { Bound::from_borrowed_ptr(py, slf) };
    let export = match export_of(&object) {
        Ok(export) => Some(export),
        Err(error) => {
            PyErr::from(error).restore(py);
            None
        }
    };
    let done = if export.is_some() { 0 } else { -1 };
    // SAFETY: the interpreter passes a place for one buffer, uninitialised.
    unsafe { view.write(fill(export, flags)) };
    done
}

/// `releasebufferproc`: nothing is to be done, since the buffer holds its export. That there is one matters: numpy
/// holds a buffer only of classes that want to know its end, and else the object alone, which `close` cannot see.
unsafe extern "C" fn release_buffer(_slf: *mut ffi::PyObject, _view: *mut PyBuffer) {}

fn export_of<'py>(object: &Bound<'py, PyAny>) -> Result<Bound<'py, PyHostExport>> {
    let Ok(pool) = object.cast::<PyHostPool>() else {
        return Err(PyTypeError::new_err("expected a HostPool").into());
    };
    let region = pool.get().pool()?.region()?;
    let shape = [region.len() as ffi::Py_ssize_t];
    Ok(Bound::new(object.py(), PyHostExport { region, shape, strides: [1] })?)
}

/// A buffer that holds `export`, or an empty one that holds nothing, as the interpreter wants it beside an exception.
fn fill(export: Option<Bound<'_, PyHostExport>>, flags: c_int) -> PyBuffer {
    let none = std::ptr::null_mut();
    let mut buffer = PyBuffer {
        buf: std::ptr::null_mut(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 1,
        readonly: 0,
        ndim: 1,
        format: std::ptr::null_mut(),
        shape: none,
        strides: none,
        suboffsets: none,
        internal: std::ptr::null_mut(),
    };
    let Some(export) = export else { return buffer };
    let PyHostExport { region, shape, strides } = export.get();
    let asked = |flag: c_int| flags & flag == flag;
    buffer.buf = std::ptr::with_exposed_provenance_mut(region.address());
    buffer.len = shape[0];
    if asked(PYBUF_FORMAT) {
        buffer.format = c"B".as_ptr().cast_mut();
    }
    // Consumers read the two arrays, and nobody writes to them.
    if asked(PYBUF_ND) {
        buffer.shape = shape.as_ptr().cast_mut();
    }
    if asked(PYBUF_STRIDES) {
        buffer.strides = strides.as_ptr().cast_mut();
    }
    buffer.obj = export.into_any().into_ptr();
    buffer
}

/// Kinds of device in DLPack.
pub(crate) const DL_CPU: i32 = 1;
/// Host memory that a CUDA device reaches.
pub(crate) const DL_CUDA_HOST: i32 = 3;

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, of DLPack before 1.0.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

/// `DLManagedTensorVersioned`, of DLPack 1.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// What a tensor holds until its deleter is called.
struct Tensor {
    region: Region,
    shape: [i64; 1],
    strides: [i64; 1],
}

impl Tensor {
    /// The tensor of bytes, and what the deleter takes back.
    fn export(region: Region, device_type: i32) -> (DlTensor, *mut c_void) {
        let (address, len) = (region.address(), region.len() as i64);
        let mut held = Box::new(Tensor { region, shape: [len], strides: [1] });
        let tensor = DlTensor {
            data: std::ptr::with_exposed_provenance_mut(address),
            device_type,
            device_id: 0,
            ndim: 1,
            dtype_code: 1, // unsigned integers
            dtype_bits: 8,
            dtype_lanes: 1,
            shape: held.shape.as_mut_ptr(),
            strides: held.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        (tensor, Box::into_raw(held).cast())
    }
}

/// A capsule with the bytes of `region` as a `uint8` tensor of one axis, in the form of DLPack 1 or of before.
pub(crate) fn to_capsule(
    py: Python<'_>,
    region: Region,
    device_type: i32,
    versioned: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let (tensor, context) = Tensor::export(region, device_type);
    let capsule = if versioned {
        let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
        let managed = DlVersioned { major: 1, minor: 0, context, deleter, flags: 0, tensor };
        let managed = Box::into_raw(Box::new(managed));
        // SAFETY: a live address, a static name, and a destructor of the right type.
        unsafe { ffi::PyCapsule_New(managed.cast(), c"dltensor_versioned".as_ptr(), Some(end_versioned)) }
    } else {
        let deleter = Some(delete_managed as unsafe extern "C" fn(_));
        let managed = Box::into_raw(Box::new(DlManaged { tensor, context, deleter }));
        // SAFETY: as above.
        unsafe { ffi::PyCapsule_New(managed.cast(), c"dltensor".as_ptr(), Some(end_managed)) }
    };
    // SAFETY: a new reference, or null with an exception set (out of memory: the tensor is then never freed).
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Called by the consumer, from any thread, once.
unsafe extern "C" fn delete_managed(managed: *mut DlManaged) {
    // SAFETY: made by `to_capsule` from a box, and given back once.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: made by `Tensor::export` from a box, and given back once.
    drop(unsafe { Box::from_raw(managed.context.cast::<Tensor>()) }.region);
}

/// Called by the consumer, from any thread, once.
unsafe extern "C" fn delete_versioned(managed: *mut DlVersioned) {
    // SAFETY: made by `to_capsule` from a box, and given back once.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: made by `Tensor::export` from a box, and given back once.
    drop(unsafe { Box::from_raw(managed.context.cast::<Tensor>()) }.region);
}

/// Of a capsule that nobody consumed; a consumed one has another name.
unsafe extern "C" fn end_managed(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule that ends; the name is static.
    if unsafe { ffi::PyCapsule_IsValid(capsule, c"dltensor".as_ptr()) } == 1 {
        // SAFETY: as above, and it has this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, c"dltensor".as_ptr()) };
        // SAFETY: nobody has consumed it.
        unsafe { delete_managed(managed.cast()) };
    }
}

/// Of a capsule that nobody consumed; a consumed one has another name.
unsafe extern "C" fn end_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule that ends; the name is static.
    if unsafe { ffi::PyCapsule_IsValid(capsule, c"dltensor_versioned".as_ptr()) } == 1 {
        // SAFETY: as above, and it has this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, c"dltensor_versioned".as_ptr()) };
        // SAFETY: nobody has consumed it.
        unsafe { delete_versioned(managed.cast()) };
    }
}
