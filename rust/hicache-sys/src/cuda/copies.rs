//! Host memory that the device reaches, and the copy engine.

use std::ffi::c_uint;

use super::driver::{call, to_pointer};
use super::symbols::{MemLocation, MemcpyAttributes};
use super::{CudaError, Driver};

/// Registered memory counts as pinned in every context, and has an address on the device.
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;

/// Copies given to the driver at once where they come as triples: their arrays stand on the stack.
const BATCH: usize = 128;

/// When the copy engine may read the source of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceOrder {
    /// In the stream's order. The only right one for sources on the device.
    Stream = 1,
    /// At any time from now on: for host memory that is complete, and stays so until the copy is done.
    Any = 3,
}

/// One copy: address of the destination, address of the source, bytes.
pub type Copy3 = (u64, u64, usize);

impl Driver {
    /// Pins `len` bytes at `base` and makes them reachable from every device. There must be a current context.
    ///
    /// # Safety
    /// The range is mapped, and stays so until [`Driver::host_unregister`] was called with the same `base`.
    pub unsafe fn host_register(&self, base: usize, len: usize) -> Result<(), CudaError> {
        let address = to_pointer(base as u64);
        // SAFETY: a mapped range, as the caller promises.
        unsafe { call!(self, host_register, "cuMemHostRegister", address, len, PORTABLE_AND_MAPPED) }
    }

    /// Undoes [`Driver::host_register`]; waits for the device. A driver that has ended took the registration along,
    /// and that is no error.
    ///
    /// # Safety
    /// Nothing that the device does, or will do, touches the range.
    pub unsafe fn host_unregister(&self, base: usize) -> Result<(), CudaError> {
        // SAFETY: the driver checks the address against its own list; the rest is the caller's promise.
        match unsafe { call!(self, host_unregister, "cuMemHostUnregister", to_pointer(base as u64)) } {
            Err(error) if error.is_gone() => Ok(()),
            other => other,
        }
    }

    /// The device's address of registered host memory at `base`. Often the same number, but not everywhere.
    pub fn host_device_pointer(&self, base: usize) -> Result<u64, CudaError> {
        let mut address = 0_u64;
        let host = to_pointer(base as u64);
        // SAFETY: writes one address; the driver checks the other against its own list.
        unsafe { call!(self, host_device_pointer, "cuMemHostGetDevicePointer", &raw mut address, host, 0) }?;
        Ok(address)
    }

    /// Ordinal of the device that memory at `address` belongs to; for registered host memory the one whose context
    /// registered it.
    pub fn pointer_device(&self, address: u64) -> Result<i32, CudaError> {
        const DEVICE_ORDINAL: i32 = 9;
        let mut ordinal = -1_i32;
        let place = (&raw mut ordinal).cast();
        // SAFETY: writes one integer; the driver checks the address against its own list.
        unsafe { call!(self, pointer_attribute, "cuPointerGetAttribute", place, DEVICE_ORDINAL, address) }?;
        Ok(ordinal)
    }

    /// Copies `len` bytes in the order of `stream`.
    ///
    /// # Safety
    /// Both ranges stay valid, and unused by others, until the stream has done the copy; the stream is alive.
    pub unsafe fn copy_async(
        &self,
        destination: u64,
        source: u64,
        len: usize,
        stream: u64,
    ) -> Result<(), CudaError> {
        let stream = to_pointer(stream);
        // SAFETY: valid ranges and a live stream, as the caller promises.
        unsafe { call!(self, memcpy_async, "cuMemcpyAsync", destination, source, len, stream) }
    }

    /// Whether the driver takes many copies in one call: CUDA 12.8 and newer.
    pub fn has_copy_batch(&self) -> bool {
        self.symbols.memcpy_batch_13.is_some() || self.symbols.memcpy_batch_12.is_some()
    }

    /// Does many copies with few calls; allocates nothing. They are done in any order, and overlap.
    ///
    /// # Errors
    /// `Refused` for the legacy default stream, which batches may not use; `Missing` on a driver before CUDA 12.8.
    ///
    /// # Safety
    /// As for [`Driver::copy_async`], of each. No destination overlaps another, or a source. [`SourceOrder::Any`]
    /// only for sources in host memory that are complete now.
    pub unsafe fn copy_batch_async(
        &self,
        copies: &[Copy3],
        stream: u64,
        order: SourceOrder,
    ) -> Result<(), CudaError> {
        let (mut destinations, mut sources, mut sizes) = ([0_u64; BATCH], [0_u64; BATCH], [0_usize; BATCH]);
        for part in copies.chunks(BATCH) {
            for (place, &(destination, source, len)) in part.iter().enumerate() {
                (destinations[place], sources[place], sizes[place]) = (destination, source, len);
            }
            let count = part.len();
            let arrays = (&destinations[..count], &sources[..count], &sizes[..count]);
            // SAFETY: a part of what the caller promised for the whole.
            unsafe { self.copy_arrays_async(arrays.0, arrays.1, arrays.2, stream, order) }?;
        }
        Ok(())
    }

    /// As [`Driver::copy_batch_async`], with addresses and sizes (bytes) in arrays of one length, in one call.
    ///
    /// # Errors
    /// Those of `copy_batch_async`; `Refused` for arrays of different lengths.
    ///
    /// # Safety
    /// As for [`Driver::copy_batch_async`].
    pub unsafe fn copy_arrays_async(
        &self,
        destinations: &[u64],
        sources: &[u64],
        sizes: &[usize],
        stream: u64,
        order: SourceOrder,
    ) -> Result<(), CudaError> {
        const NAME: &str = "cuMemcpyBatchAsync";
        let count = destinations.len();
        if sources.len() != count || sizes.len() != count {
            let (sources, sizes) = (sources.len(), sizes.len());
            return Err(CudaError::Refused {
                call: NAME,
                why: format!("expected {count} sources and sizes, found {sources} and {sizes}"),
            });
        }
        if stream == 0 {
            let why = "expected a stream of its own, found the legacy default stream".to_owned();
            return Err(CudaError::Refused { call: NAME, why });
        }
        if count == 0 {
            return Ok(());
        }
        let attributes = MemcpyAttributes {
            source_order: order as i32,
            source_hint: MemLocation::default(),
            destination_hint: MemLocation::default(),
            flags: 0,
        };
        let first = 0_usize; // these attributes hold from copy 0 on
        let (destinations, sources, sizes) = (destinations.as_ptr(), sources.as_ptr(), sizes.as_ptr());
        let (attributes, first, stream) = (&raw const attributes, &raw const first, to_pointer(stream));
        if let Some(copy) = self.symbols.memcpy_batch_13 {
            // SAFETY: arrays of `count` elements and one set of attributes; the rest is the caller's promise.
            let code = unsafe { copy(destinations, sources, sizes, count, attributes, first, 1, stream) };
            return self.check(NAME, code);
        }
        let Some(copy) = self.symbols.memcpy_batch_12 else { return Err(self.missing(NAME)) };
        let mut failed = usize::MAX; // the copy that is at fault, where the driver knows
        // SAFETY: as above; writes one integer.
        let code = unsafe {
            copy(destinations, sources, sizes, count, attributes, first, 1, &raw mut failed, stream)
        };
        self.check(NAME, code)
    }
}
