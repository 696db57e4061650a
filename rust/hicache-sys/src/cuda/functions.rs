//! Code for the device: images, the functions in them, and their launch.

use std::ffi::{CStr, c_void};

use super::driver::{call, to_handle, to_pointer};
use super::{CudaError, Driver};

/// A loaded image. Loaded once and kept; [`Driver::library_unload`] is for images that were only tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// Independent of contexts (`cuLibraryLoadData`, CUDA 12 and newer).
    Library(u64),
    /// Of the context that was current when it was loaded (`cuModuleLoadData`).
    Module(u64),
}

/// A kernel that can be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// Independent of contexts: a `CUkernel`.
    Kernel(u64),
    /// Of one context: a `CUfunction`.
    Function(u64),
}

impl Function {
    /// The driver's handle, which `cuLaunchKernel` takes in both cases.
    pub fn handle(self) -> u64 {
        match self {
            Function::Kernel(handle) | Function::Function(handle) => handle,
        }
    }
}

impl Driver {
    /// Loads a cubin, a fatbin or PTX, on old drivers into the current context.
    ///
    /// # Safety
    /// `image` is a whole image of one of these sorts (PTX with a NUL at its end): the driver reads as far as the
    /// image itself says.
    pub unsafe fn library_load(&self, image: &[u8]) -> Result<Library, CudaError> {
        let mut handle: *mut c_void = std::ptr::null_mut();
        let data = image.as_ptr().cast::<c_void>();
        let (none, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
        if let Some(load) = self.symbols.library_load {
            // SAFETY: a whole image, as the caller promises; no options; writes one handle.
            let code = unsafe { load(&raw mut handle, data, none, nothing, 0, none, nothing, 0) };
            self.check("cuLibraryLoadData", code)?;
            return Ok(Library::Library(to_handle(handle)));
        }
        // SAFETY: as above.
        unsafe { call!(self, module_load, "cuModuleLoadData", &raw mut handle, data) }?;
        Ok(Library::Module(to_handle(handle)))
    }

    /// Finds a kernel by its name.
    ///
    /// # Safety
    /// The library is loaded.
    pub unsafe fn library_function(&self, library: Library, name: &CStr) -> Result<Function, CudaError> {
        let mut found: *mut c_void = std::ptr::null_mut();
        let place = &raw mut found;
        match library {
            Library::Library(handle) => {
                let handle = to_pointer(handle);
                // SAFETY: a loaded library, as the caller promises, and a terminated name; writes one handle.
                unsafe { call!(self, library_kernel, "cuLibraryGetKernel", place, handle, name.as_ptr()) }?;
                Ok(Function::Kernel(to_handle(found)))
            }
            Library::Module(handle) => {
                let handle = to_pointer(handle);
                // SAFETY: as above.
                unsafe { call!(self, module_function, "cuModuleGetFunction", place, handle, name.as_ptr()) }?;
                Ok(Function::Function(to_handle(found)))
            }
        }
    }

    /// Unloads an image.
    ///
    /// # Safety
    /// The library is loaded; nothing of it runs, and nothing of it is used again.
    pub unsafe fn library_unload(&self, library: Library) -> Result<(), CudaError> {
        match library {
            // SAFETY: a loaded library that nothing uses, as the caller promises.
            Library::Library(handle) => unsafe {
                call!(self, library_unload, "cuLibraryUnload", to_pointer(handle))
            },
            // SAFETY: as above.
            Library::Module(handle) => unsafe {
                call!(self, module_unload, "cuModuleUnload", to_pointer(handle))
            },
        }
    }

    /// Sets an attribute of a function on a device; the numbers are in [`super::function_attribute`].
    ///
    /// # Safety
    /// The function's library is loaded.
    pub unsafe fn function_set(
        &self,
        function: Function,
        attribute: i32,
        value: i32,
        device: i32,
    ) -> Result<(), CudaError> {
        match function {
            Function::Kernel(handle) => {
                let handle = to_pointer(handle);
                // SAFETY: a kernel of a loaded library, as the caller promises.
                unsafe {
                    call!(self, kernel_attribute, "cuKernelSetAttribute", attribute, value, handle, device)
                }
            }
            Function::Function(handle) => {
                let handle = to_pointer(handle);
                // SAFETY: as above.
                unsafe { call!(self, function_attribute, "cuFuncSetAttribute", handle, attribute, value) }
            }
        }
    }

    /// Starts a kernel on `stream`: `grid` blocks of `block` threads, each block with `shared` bytes of dynamic
    /// shared memory. `params` holds the address of each argument; the driver copies them before it returns.
    ///
    /// # Safety
    /// The arguments are those of the kernel in number, order and size; every address in them stays valid, and what
    /// the kernel reads and writes is left alone, until the stream has done it; stream and function are alive.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        stream: u64,
        params: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let [gx, gy, gz] = grid;
        let [bx, by, bz] = block;
        let (function, stream) = (to_pointer(function.handle()), to_pointer(stream));
        let (params, extra) = (params.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: fitting arguments and live handles, as the caller promises.
        unsafe {
            call!(
                self,
                launch,
                "cuLaunchKernel",
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                stream,
                params,
                extra
            )
        }
    }
}
