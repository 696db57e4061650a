//! The driver's calls, each with its result made readable.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use super::error::{CudaError, Unavailable, code};
use super::symbols::Symbols;

/// Attributes of devices, as `cuDeviceGetAttribute` numbers them.
pub mod attribute {
    /// Multiprocessors.
    pub const MULTIPROCESSOR_COUNT: i32 = 16;
    /// Major part of the compute capability.
    pub const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
    /// Minor part of the compute capability.
    pub const COMPUTE_CAPABILITY_MINOR: i32 = 76;
    /// Whether registered host memory has the same address on the device.
    pub const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: i32 = 91;
    /// Most shared memory of one block, in bytes, where a kernel asks for it.
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: i32 = 97;
    /// NUMA node of the host memory that is closest, or -1.
    pub const HOST_NUMA_ID: i32 = 134;
}

/// Attributes of functions, as `cuFuncSetAttribute` numbers them.
pub mod function_attribute {
    /// Most dynamic shared memory, in bytes.
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: i32 = 8;
}

/// The driver of this process.
pub struct Driver {
    pub(super) symbols: Symbols,
    version: i32,
    devices: i32,
    process: u32,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver(CUDA {}, {} devices)", self.version, self.devices)
    }
}

/// Calls entry `$field`, or says that this driver lacks it.
macro_rules! call {
    ($driver:expr, $field:ident, $name:literal $(, $argument:expr)*) => {
        match $driver.symbols.$field {
            Some(entry) => $driver.check($name, entry($($argument),*)),
            None => Err($driver.missing($name)),
        }
    };
}
pub(super) use call;

impl Driver {
    /// The driver, opened and initialised at the first call and kept. A forked child of a process that has
    /// initialised it is refused: CUDA does not survive a fork.
    pub fn get() -> Result<&'static Driver, &'static Unavailable> {
        static DRIVER: OnceLock<Result<Driver, Unavailable>> = OnceLock::new();
        static FORKED: OnceLock<Unavailable> = OnceLock::new();
        let driver = DRIVER.get_or_init(Driver::open).as_ref()?;
        if driver.is_inherited() {
            return Err(FORKED.get_or_init(|| Unavailable {
                reason: format!(
                    "no CUDA in a forked child: process {} had initialised it; start children by spawn",
                    driver.process
                ),
            }));
        }
        Ok(driver)
    }

    fn open() -> Result<Driver, Unavailable> {
        let symbols = Symbols::open()?;
        let mut driver = Driver { symbols, version: 0, devices: 0, process: std::process::id() };
        driver.initialise().map_err(|error| Unavailable { reason: format!("no CUDA: {error}") })?;
        Ok(driver)
    }

    fn initialise(&mut self) -> Result<(), CudaError> {
        // SAFETY: takes a number, which has to be 0.
        unsafe { call!(self, init, "cuInit", 0) }?;
        let mut version: c_int = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, driver_version, "cuDriverGetVersion", &raw mut version) }?;
        self.version = version;
        let mut devices: c_int = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, device_count, "cuDeviceGetCount", &raw mut devices) }?;
        self.devices = devices;
        if devices > 0 { Ok(()) } else { Err(self.failed("cuDeviceGetCount", code::NO_DEVICE)) }
    }

    /// Newest CUDA that the driver knows, 1000 x major + 10 x minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Devices that this process may use, at least 1.
    pub fn devices(&self) -> i32 {
        self.devices
    }

    /// Whether this is the child of a fork of the process that initialised the driver.
    pub fn is_inherited(&self) -> bool {
        std::process::id() != self.process
    }

    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == code::SUCCESS { Ok(()) } else { Err(self.failed(call, code)) }
    }

    fn failed(&self, call: &'static str, code: c_int) -> CudaError {
        let name = ask_text(self.symbols.error_name, code).unwrap_or_else(|| "CUDA_ERROR".to_owned());
        let text = ask_text(self.symbols.error_string, code).unwrap_or_default();
        CudaError::Failed { call, code, name, text }
    }

    pub(super) fn missing(&self, call: &'static str) -> CudaError {
        CudaError::Missing { call, driver_version: self.version }
    }

    // Devices and contexts.

    /// The driver's handle of device `ordinal`, which counts from 0.
    pub fn device(&self, ordinal: i32) -> Result<i32, CudaError> {
        let mut device: c_int = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, device_get, "cuDeviceGet", &raw mut device, ordinal) }?;
        Ok(device)
    }

    /// An attribute of a device; the numbers are in [`attribute`].
    pub fn device_attribute(&self, attribute: i32, device: i32) -> Result<i32, CudaError> {
        let mut value: c_int = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, device_attribute, "cuDeviceGetAttribute", &raw mut value, attribute, device) }?;
        Ok(value)
    }

    /// The device that this thread uses now, if it uses one.
    pub fn current_device(&self) -> Result<Option<i32>, CudaError> {
        let mut context: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, context_current, "cuCtxGetCurrent", &raw mut context) }?;
        if context.is_null() {
            return Ok(None);
        }
        let mut device: c_int = 0;
        // SAFETY: writes one integer; there is a current context.
        unsafe { call!(self, context_device, "cuCtxGetDevice", &raw mut device) }?;
        Ok(Some(device))
    }

    pub(super) fn context_push(&self, context: *mut c_void) -> Result<(), CudaError> {
        // SAFETY: the callers in this module pass a primary context that they have retained.
        unsafe { call!(self, context_push, "cuCtxPushCurrent", context) }
    }

    pub(super) fn context_pop(&self) -> Result<(), CudaError> {
        let mut context: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, context_pop, "cuCtxPopCurrent", &raw mut context) }
    }

    pub(super) fn primary_retain(&self, device: i32) -> Result<*mut c_void, CudaError> {
        let mut context: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, primary_retain, "cuDevicePrimaryCtxRetain", &raw mut context, device) }?;
        Ok(context)
    }

    pub(super) fn primary_release(&self, device: i32) -> Result<(), CudaError> {
        // SAFETY: takes a number; the callers in this module release what they have retained, once.
        unsafe { call!(self, primary_release, "cuDevicePrimaryCtxRelease", device) }
    }
}

type AskText = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// A text that the driver has for a code.
fn ask_text(entry: Option<AskText>, code: c_int) -> Option<String> {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: writes one address.
    let done = unsafe { entry?(code, &raw mut text) };
    if done != code::SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: a terminated text that the driver keeps for ever.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

pub(super) fn to_pointer(handle: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(handle as usize)
}

pub(super) fn to_handle(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_device_is_told_in_words() {
        match Driver::get() {
            Ok(driver) => assert!(driver.devices() > 0 && driver.version() >= 11000),
            Err(unavailable) => assert!(unavailable.reason().contains("CUDA"), "{unavailable}"),
        }
    }
}
