//! Streams and events of an engine, and events of our own.

use std::ffi::c_void;

use super::driver::{call, to_handle, to_pointer};
use super::error::code;
use super::{CudaError, Driver};

/// Events carry no time unless asked: recording one without is cheaper.
const DISABLE_TIMING: u32 = 2;

/// A stream that somebody else owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream {
    handle: u64,
}

impl Stream {
    /// A stream by its handle, such as torch's `stream.cuda_stream`; 0 is the legacy default stream.
    ///
    /// # Safety
    /// The handle is of a live stream, or 0, and the stream lives as long as this value and its copies are used.
    pub unsafe fn from_raw(handle: u64) -> Stream {
        Stream { handle }
    }

    /// The driver's handle.
    pub fn handle(self) -> u64 {
        self.handle
    }

    /// Work given to this stream from now on waits for what `event` has recorded last.
    pub fn wait(self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both handles are alive: their makers promised it.
        unsafe { event.driver.stream_wait_event(self.handle, event.handle) }
    }

    /// Waits until all work of this stream is done. Release the interpreter lock first.
    pub fn synchronize(self, driver: &Driver) -> Result<(), CudaError> {
        // SAFETY: the handle is alive: its maker promised it.
        unsafe { driver.stream_synchronize(self.handle) }
    }

    /// Whether what is given to this stream goes into a graph that is being captured.
    pub fn is_capturing(self, driver: &Driver) -> Result<bool, CudaError> {
        // SAFETY: the handle is alive: its maker promised it.
        unsafe { driver.stream_is_capturing(self.handle) }
    }
}

/// A point in a stream's work that other streams, and the CPU, can wait for.
#[derive(Debug)]
pub struct Event {
    driver: &'static Driver,
    handle: u64,
    is_own: bool,
}

impl Event {
    /// A new event of the current context, without times.
    pub fn new(driver: &'static Driver) -> Result<Event, CudaError> {
        let handle = driver.event_create(DISABLE_TIMING)?;
        Ok(Event { driver, handle, is_own: true })
    }

    /// Somebody else's event by its handle, such as torch's `event.cuda_event`. A torch event has the handle 0 until
    /// it is recorded for the first time.
    ///
    /// # Errors
    /// `Refused` for the handle 0.
    ///
    /// # Safety
    /// The handle is of a live event, which lives as long as this value.
    pub unsafe fn borrowed(driver: &'static Driver, handle: u64) -> Result<Event, CudaError> {
        if handle == 0 {
            let why = "expected the handle of an event that was recorded once, found 0".to_owned();
            return Err(CudaError::Refused { call: "cuEventRecord", why });
        }
        Ok(Event { driver, handle, is_own: false })
    }

    /// The driver's handle.
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// Marks the work given to `stream` up to now.
    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both handles are alive: their makers promised it.
        unsafe { self.driver.event_record(self.handle, stream.handle()) }
    }

    /// Whether everything that was marked is done. An event that was never recorded is.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle is alive: its maker promised it, or it is our own.
        unsafe { self.driver.event_query(self.handle) }
    }

    /// Waits until everything that was marked is done. Release the interpreter lock first.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is alive: its maker promised it, or it is our own.
        unsafe { self.driver.event_synchronize(self.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.is_own && !self.driver.is_inherited() {
            // SAFETY: our own event, destroyed once. A driver that is gone has taken it along.
            let _ = unsafe { self.driver.event_destroy(self.handle) };
        }
    }
}

// The calls themselves, for handles as they come.
impl Driver {
    /// Makes an event of the current context.
    pub fn event_create(&self, flags: u32) -> Result<u64, CudaError> {
        let mut event: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, event_create, "cuEventCreate", &raw mut event, flags) }?;
        Ok(to_handle(event))
    }

    /// Marks the work given to `stream` up to now.
    ///
    /// # Safety
    /// Both handles are alive.
    pub unsafe fn event_record(&self, event: u64, stream: u64) -> Result<(), CudaError> {
        // SAFETY: live handles, as the caller promises.
        unsafe { call!(self, event_record, "cuEventRecord", to_pointer(event), to_pointer(stream)) }
    }

    /// Whether what was marked is done.
    ///
    /// # Safety
    /// The handle is alive.
    pub unsafe fn event_query(&self, event: u64) -> Result<bool, CudaError> {
        // SAFETY: a live handle, as the caller promises.
        match unsafe { call!(self, event_query, "cuEventQuery", to_pointer(event)) } {
            Err(error) if error.code() == Some(code::NOT_READY) => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Waits until what was marked is done.
    ///
    /// # Safety
    /// The handle is alive.
    pub unsafe fn event_synchronize(&self, event: u64) -> Result<(), CudaError> {
        // SAFETY: a live handle, as the caller promises.
        unsafe { call!(self, event_synchronize, "cuEventSynchronize", to_pointer(event)) }
    }

    /// Destroys an event; what waits for it goes on waiting.
    ///
    /// # Safety
    /// The handle is alive, and not used again.
    pub unsafe fn event_destroy(&self, event: u64) -> Result<(), CudaError> {
        // SAFETY: a live handle, as the caller promises.
        unsafe { call!(self, event_destroy, "cuEventDestroy", to_pointer(event)) }
    }

    /// Work given to `stream` from now on waits for what `event` has recorded.
    ///
    /// # Safety
    /// Both handles are alive.
    pub unsafe fn stream_wait_event(&self, stream: u64, event: u64) -> Result<(), CudaError> {
        let (stream, event) = (to_pointer(stream), to_pointer(event));
        // SAFETY: live handles, as the caller promises.
        unsafe { call!(self, stream_wait_event, "cuStreamWaitEvent", stream, event, 0) }
    }

    /// Waits until all work of `stream` is done.
    ///
    /// # Safety
    /// The handle is alive.
    pub unsafe fn stream_synchronize(&self, stream: u64) -> Result<(), CudaError> {
        // SAFETY: a live handle, as the caller promises.
        unsafe { call!(self, stream_synchronize, "cuStreamSynchronize", to_pointer(stream)) }
    }

    /// Whether `stream` is being captured into a graph.
    ///
    /// # Safety
    /// The handle is alive.
    pub unsafe fn stream_is_capturing(&self, stream: u64) -> Result<bool, CudaError> {
        let mut status = 0;
        let stream = to_pointer(stream);
        // SAFETY: a live handle, as the caller promises; writes one integer.
        unsafe { call!(self, stream_is_capturing, "cuStreamIsCapturing", stream, &raw mut status) }?;
        Ok(status != 0)
    }
}
