//! The entries of `libcuda.so.1` that are used, each looked for by itself: a driver that lacks one has the others.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::error::{Unavailable, code};

/// Soname of the driver. The file without a version belongs to toolkits, and may be a stub for linking.
const LIBRARY: &CStr = c"libcuda.so.1";

/// Entries are those for the legacy default stream, as in a program that asks for nothing else.
const LEGACY_STREAM: u64 = 1;

/// `CUmemLocation`: unused here, all zero.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MemLocation {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MemcpyAttributes {
    pub source_order: c_int,
    pub source_hint: MemLocation,
    pub destination_hint: MemLocation,
    pub flags: c_uint,
}

const _: () = assert!(size_of::<MemcpyAttributes>() == 24);

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// One line an entry: field, name to ask `cuGetProcAddress` for, version whose form is meant, exported name, type.
macro_rules! symbols {
    ($( $field:ident: $name:literal, $version:literal, $exported:literal, ($($argument:ty),*); )*) => {
        /// The entries that this driver has.
        pub(super) struct Symbols {
            $( pub $field: Option<unsafe extern "C" fn($($argument),*) -> c_int>, )*
        }

        impl Symbols {
            fn find(library: &Library) -> Symbols {
                Symbols {
                    $( $field: {
                        let address = library.entry($name, $version, $exported);
                        // SAFETY: the address is null, or of the driver's entry of this name and version, whose
                        // type is the one written here; an `Option` of a function pointer is a nullable address.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($argument),*) -> c_int>,
                            >(address)
                        }
                    }, )*
                }
            }
        }
    };
}

symbols! {
    init: c"cuInit", 2000, c"cuInit", (c_uint);
    driver_version: c"cuDriverGetVersion", 2020, c"cuDriverGetVersion", (*mut c_int);
    error_name: c"cuGetErrorName", 6000, c"cuGetErrorName", (c_int, *mut *const c_char);
    error_string: c"cuGetErrorString", 6000, c"cuGetErrorString", (c_int, *mut *const c_char);
    device_count: c"cuDeviceGetCount", 2000, c"cuDeviceGetCount", (*mut c_int);
    device_get: c"cuDeviceGet", 2000, c"cuDeviceGet", (*mut c_int, c_int);
    device_attribute: c"cuDeviceGetAttribute", 2000, c"cuDeviceGetAttribute", (*mut c_int, c_int, c_int);
    context_current: c"cuCtxGetCurrent", 4000, c"cuCtxGetCurrent", (*mut *mut c_void);
    context_device: c"cuCtxGetDevice", 2000, c"cuCtxGetDevice", (*mut c_int);
    context_push: c"cuCtxPushCurrent", 4000, c"cuCtxPushCurrent_v2", (*mut c_void);
    context_pop: c"cuCtxPopCurrent", 4000, c"cuCtxPopCurrent_v2", (*mut *mut c_void);
    primary_retain: c"cuDevicePrimaryCtxRetain", 7000, c"cuDevicePrimaryCtxRetain", (*mut *mut c_void, c_int);
    primary_release: c"cuDevicePrimaryCtxRelease", 11000, c"cuDevicePrimaryCtxRelease_v2", (c_int);
    library_load: c"cuLibraryLoadData", 12000, c"cuLibraryLoadData",
        (*mut *mut c_void, *const c_void, *mut c_int, *mut *mut c_void, c_uint, *mut c_int, *mut *mut c_void, c_uint);
    library_kernel: c"cuLibraryGetKernel", 12000, c"cuLibraryGetKernel",
        (*mut *mut c_void, *mut c_void, *const c_char);
    library_unload: c"cuLibraryUnload", 12000, c"cuLibraryUnload", (*mut c_void);
    kernel_attribute: c"cuKernelSetAttribute", 12000, c"cuKernelSetAttribute", (c_int, c_int, *mut c_void, c_int);
    module_load: c"cuModuleLoadData", 2000, c"cuModuleLoadData", (*mut *mut c_void, *const c_void);
    module_function: c"cuModuleGetFunction", 2000, c"cuModuleGetFunction",
        (*mut *mut c_void, *mut c_void, *const c_char);
    module_unload: c"cuModuleUnload", 2000, c"cuModuleUnload", (*mut c_void);
    function_attribute: c"cuFuncSetAttribute", 9000, c"cuFuncSetAttribute", (*mut c_void, c_int, c_int);
    launch: c"cuLaunchKernel", 4000, c"cuLaunchKernel",
        (*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void,
         *mut *mut c_void);
    host_register: c"cuMemHostRegister", 6050, c"cuMemHostRegister_v2", (*mut c_void, usize, c_uint);
    host_unregister: c"cuMemHostUnregister", 4000, c"cuMemHostUnregister", (*mut c_void);
    host_device_pointer: c"cuMemHostGetDevicePointer", 3020, c"cuMemHostGetDevicePointer_v2",
        (*mut u64, *mut c_void, c_uint);
    pointer_attribute: c"cuPointerGetAttribute", 4000, c"cuPointerGetAttribute", (*mut c_void, c_int, u64);
    memcpy_async: c"cuMemcpyAsync", 4000, c"cuMemcpyAsync", (u64, u64, usize, *mut c_void);
    memcpy_batch_12: c"cuMemcpyBatchAsync", 12080, c"cuMemcpyBatchAsync",
        (*const u64, *const u64, *const usize, usize, *const MemcpyAttributes, *const usize, usize, *mut usize,
         *mut c_void);
    memcpy_batch_13: c"cuMemcpyBatchAsync", 13000, c"cuMemcpyBatchAsync_v2",
        (*const u64, *const u64, *const usize, usize, *const MemcpyAttributes, *const usize, usize, *mut c_void);
    stream_wait_event: c"cuStreamWaitEvent", 3020, c"cuStreamWaitEvent", (*mut c_void, *mut c_void, c_uint);
    stream_synchronize: c"cuStreamSynchronize", 2000, c"cuStreamSynchronize", (*mut c_void);
    stream_is_capturing: c"cuStreamIsCapturing", 10000, c"cuStreamIsCapturing", (*mut c_void, *mut c_int);
    event_create: c"cuEventCreate", 2000, c"cuEventCreate", (*mut *mut c_void, c_uint);
    event_record: c"cuEventRecord", 2000, c"cuEventRecord", (*mut c_void, *mut c_void);
    event_query: c"cuEventQuery", 2000, c"cuEventQuery", (*mut c_void);
    event_synchronize: c"cuEventSynchronize", 2000, c"cuEventSynchronize", (*mut c_void);
    event_destroy: c"cuEventDestroy", 4000, c"cuEventDestroy_v2", (*mut c_void);
}

impl Symbols {
    /// Opens the driver's library and looks for every entry.
    pub fn open() -> Result<Symbols, Unavailable> {
        Ok(Symbols::find(&Library::open()?))
    }
}

/// The opened library. It is never closed: entries are kept for ever, and drivers do not like to be unloaded.
struct Library {
    handle: *mut c_void,
    ask: Option<GetProcAddress>,
    version: c_int,
}

impl Library {
    fn open() -> Result<Library, Unavailable> {
        // SAFETY: a constant, terminated name; the driver's initialisers run, as in every program that uses it.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(Unavailable { reason: format!("no CUDA driver: {}", last_error()) });
        }
        let mut library = Library { handle, ask: None, version: 0 };
        let ask = library.exported(c"cuGetProcAddress_v2");
        // SAFETY: null, or the entry of this name, which has had this type since CUDA 12.0.
        library.ask = unsafe { std::mem::transmute::<*mut c_void, Option<GetProcAddress>>(ask) };
        library.version = library.ask_version();
        Ok(library)
    }

    /// The driver's version, 1000 x major + 10 x minor; 0 if it does not say.
    fn ask_version(&self) -> c_int {
        let address = self.exported(c"cuDriverGetVersion");
        type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: null, or the entry of this name, whose type has never changed.
        let ask = unsafe { std::mem::transmute::<*mut c_void, Option<Ask>>(address) };
        let mut version = 0;
        // SAFETY: writes one integer, and may be called before `cuInit`.
        let done = ask.map(|ask| unsafe { ask(&raw mut version) });
        if done == Some(code::SUCCESS) { version } else { 0 }
    }

    /// Address of the form that `version` of CUDA gave to `name`, or null.
    fn entry(&self, name: &CStr, version: c_int, exported: &CStr) -> *mut c_void {
        // What is newer than the driver is not there, whatever a library may export under the name.
        if self.version != 0 && version > self.version {
            return std::ptr::null_mut();
        }
        let mut address = std::ptr::null_mut();
        let mut status = 0;
        if let Some(ask) = self.ask {
            // SAFETY: a terminated name, and two live places for the answers.
            let done =
                unsafe { ask(name.as_ptr(), &raw mut address, version, LEGACY_STREAM, &raw mut status) };
            if done == code::SUCCESS && !address.is_null() {
                return address;
            }
        }
        self.exported(exported)
    }

    fn exported(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a handle that is never closed, and a terminated name.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }
}

/// What the dynamic loader has to say about its last failure, on one line.
fn last_error() -> String {
    // SAFETY: takes nothing; the text is this thread's, and stays until its next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return format!("{} cannot be opened", LIBRARY.to_string_lossy());
    }
    // SAFETY: not null, hence a terminated string, copied at once.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().replace('\n', " ")
}
