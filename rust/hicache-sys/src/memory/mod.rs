//! Host memory for pools: of huge pages, near a device, touched, locked, registered, shared; each as far as it
//! can be had, and the report says how far that was.
//!
//! It is made in this order: asked of the limits, mapped, bound to a node before its first touch, taken from forked
//! children, touched on several threads, registered or locked. It goes in the reverse order: unregistered, unmapped.
//! A forked child has nothing at the addresses, is refused by every method, and undoes nothing.

mod error;
mod limits;
mod make;
mod mapping;
mod numa;
mod options;
mod registration;
mod share;
mod touch;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

pub use error::{MemoryError, MemoryErrorKind};
pub use mapping::{hugetlb_page_bytes, page_bytes, transparent_page_bytes};
pub use numa::{current_node, node_cpus, nodes_with_memory};
pub use options::{MemoryOptions, MemoryReport, Node, PageKind, Wish};
pub use share::duplicate;

use crate::Region;
use crate::cuda::Driver;
use crate::fork::Guarded;
use make::{check, map, piece_bytes, report, touch_threads, wanted_node};
use mapping::{Advice, Backing, Mapping};
use registration::Registration;

type Result<T> = std::result::Result<T, MemoryError>;

/// Memory that a pool stands on.
#[derive(Debug)]
pub struct HostMemory {
    /// `None` only while it is dropped.
    mapping: Option<Mapping>,
    len: usize,
    registration: Option<Registration>,
    file: Option<Guarded>,
    report: MemoryReport,
}

impl HostMemory {
    /// Makes `len` zeroed bytes.
    ///
    /// # Errors
    /// `Invalid` for impossible sizes; `Unsupported`, `Limit`, `Device` or `System` where something required cannot
    /// be had. Nothing is left behind.
    pub fn new(len: usize, options: &MemoryOptions) -> Result<HostMemory> {
        check(len, options)?;
        if options.lock == Wish::Require && options.register == Wish::Off {
            limits::check_lock(len as u64)?;
        }
        let (mapping, file, report) = map(len, options)?;
        HostMemory { mapping: Some(mapping), len, registration: None, file, report }.furnish(options)
    }

    /// Maps memory that another process shares, by a descriptor of [`HostMemory::descriptor`] that it sent. Bytes are
    /// as they are there. `len` bytes, not more than the other has.
    ///
    /// # Errors
    /// As [`HostMemory::new`]; `Invalid` for a descriptor of anything else.
    pub fn attach(descriptor: BorrowedFd<'_>, len: usize, options: &MemoryOptions) -> Result<HostMemory> {
        check(len, options)?;
        let file = share::attach(descriptor)?;
        let system = |error| MemoryError::system("look at shared memory", error);
        let mapped_bytes = file.metadata().map_err(system)?.len() as usize;
        if len > mapped_bytes {
            return Err(MemoryError::new(
                MemoryErrorKind::Invalid,
                format!("expected {len} bytes of shared memory, found {mapped_bytes}"),
            ));
        }
        let huge_page = share::huge_page_bytes(&file).map_err(system)?;
        let page = huge_page.unwrap_or_else(page_bytes);
        let mapping = Mapping::new(mapped_bytes, page, Backing::Shared(file.as_fd()))
            .map_err(|error| MemoryError::system(&format!("mmap {mapped_bytes} shared bytes"), error))?;
        let mut report = report(mapped_bytes, page, true);
        if huge_page.is_some() {
            report.pages = PageKind::Hugetlb;
        }
        HostMemory { mapping: Some(mapping), len, registration: None, file: Some(file), report }
            .furnish(options)
    }

    /// Everything after the mapping; what was done is undone by `drop` where a step fails.
    fn furnish(mut self, options: &MemoryOptions) -> Result<HostMemory> {
        let mapping = self.mapping.as_ref().expect("memory that is being made");
        let (base, mapped_bytes) = (mapping.base(), mapping.len());
        mapping
            .advise(Advice::NotInChildren)
            .map_err(|error| MemoryError::system("madvise DONTFORK", error))?;
        let node = wanted_node(options)?;
        let cpus = node.map(|node| numa::node_cpus(node).unwrap_or_default()).unwrap_or_default();
        if let Some(node) = node {
            match numa::bind(base, mapped_bytes, node, options.node_is_required) {
                Ok(()) => self.report.node = Some(node),
                Err(error) => {
                    let what =
                        format!("mbind to node {node}: {error} (in a container this needs CAP_SYS_NICE)");
                    self.unmet(options.node_is_required, MemoryErrorKind::Unsupported, what)?;
                }
            }
        }
        if options.prefault {
            let threads = touch_threads(options, mapped_bytes, cpus.len());
            let page = page_bytes();
            touch::touch(base, mapped_bytes, page, threads, &cpus).map_err(|error| {
                MemoryError::system(
                    &format!("touch {mapped_bytes} bytes (no memory is left for them)"),
                    error,
                )
            })?;
            self.report.prefaulted = true;
            self.look_at_node(base, mapped_bytes, page, options.node_is_required)?;
        }
        self.look_at_pages(base, mapped_bytes, options)?;
        self.register(base, mapped_bytes, options)?;
        self.lock(options)?;
        Ok(self)
    }

    /// Compares the node that pages stand on with the one that was asked for.
    fn look_at_node(&mut self, base: usize, len: usize, page: usize, is_required: bool) -> Result<()> {
        let Some(node) = self.report.node else { return Ok(()) };
        // Where the question is refused the answer of `mbind` has to do.
        let Ok((there, asked)) = numa::sample(base, len, page, node) else { return Ok(()) };
        if there < asked {
            self.report.node = None;
            let what = format!("node {node}: {there} of {asked} pages looked at stand on it");
            self.unmet(is_required, MemoryErrorKind::Unsupported, what)?;
        }
        Ok(())
    }

    /// Counts the huge pages that were got.
    fn look_at_pages(&mut self, base: usize, len: usize, options: &MemoryOptions) -> Result<()> {
        if options.huge_pages == Wish::Off && self.report.pages != PageKind::Hugetlb {
            return Ok(());
        }
        self.report.huge_bytes = mapping::huge_bytes(base, len)?;
        if self.report.pages == PageKind::Hugetlb {
            self.report.huge_bytes = len;
            return Ok(());
        }
        if self.report.huge_bytes > 0 {
            self.report.pages = PageKind::Transparent;
        }
        let whole = transparent_page_bytes().map_or(len, |size| len / size * size);
        if self.report.huge_bytes < whole || whole == 0 {
            let got = self.report.huge_bytes;
            let what = format!("huge pages: {got} of {len} bytes stand on them");
            self.unmet(options.huge_pages == Wish::Require, MemoryErrorKind::Unsupported, what)?;
        }
        Ok(())
    }

    fn register(&mut self, base: usize, len: usize, options: &MemoryOptions) -> Result<()> {
        if options.register == Wish::Off {
            return Ok(());
        }
        let is_required = options.register == Wish::Require;
        let driver = match Driver::get() {
            Ok(driver) => driver,
            Err(unavailable) => {
                let what = format!("registration: {unavailable}");
                return self.unmet(is_required, MemoryErrorKind::Unsupported, what);
            }
        };
        let piece = piece_bytes(len, self.report.page_bytes, options);
        // SAFETY: the mapping lives in `self`, which unregisters before it unmaps, or leaks the mapping.
        match unsafe { Registration::new(driver, base, len, piece) } {
            Ok(registration) => {
                self.report.registered_pieces = registration.piece_bytes();
                self.registration = Some(registration);
                Ok(())
            }
            Err(refusal) => {
                if !refusal.is_undone
                    && let Some(mapping) = self.mapping.take()
                {
                    mapping.leak();
                    return Err(MemoryError::device(&refusal.error));
                }
                let what = format!("registration of {len} bytes: {}", refusal.error);
                self.unmet(is_required, MemoryErrorKind::Device, what)
            }
        }
    }

    fn lock(&mut self, options: &MemoryOptions) -> Result<()> {
        if options.lock == Wish::Off || self.registration.is_some() {
            return Ok(());
        }
        let mapping = self.mapping.as_ref().expect("memory that is being made");
        let outcome = limits::check_lock(mapping.len() as u64).and_then(|()| {
            let what = format!("mlock {} bytes", mapping.len());
            mapping.lock().map_err(|error| MemoryError::system(&what, error))
        });
        match outcome {
            Ok(()) => self.report.locked = true,
            Err(error) if options.lock == Wish::Require => return Err(error),
            Err(error) => self.report.unmet.push(error.to_string()),
        }
        Ok(())
    }

    /// Notes a wish that was not met, or fails where it was required.
    fn unmet(&mut self, is_required: bool, kind: MemoryErrorKind, what: String) -> Result<()> {
        if is_required {
            return Err(MemoryError::new(kind, what));
        }
        self.report.unmet.push(what);
        Ok(())
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes were asked for: never.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What was got.
    pub fn report(&self) -> &MemoryReport {
        &self.report
    }

    /// Whether this is a forked child of the process that made the memory, where it is not.
    pub fn is_inherited(&self) -> bool {
        self.mapping.as_ref().is_none_or(Mapping::is_inherited)
    }

    /// Address of the first byte.
    ///
    /// # Errors
    /// `Forked` in a forked child.
    pub fn address(&self) -> Result<usize> {
        match &self.mapping {
            Some(mapping) if !mapping.is_inherited() => Ok(mapping.base()),
            _ => Err(MemoryError::new(
                MemoryErrorKind::Forked,
                "pool belongs to another process: a forked child has no part in it, start children by spawn",
            )),
        }
    }

    /// Address of the first byte as devices see it; `None` where it is not registered.
    ///
    /// # Errors
    /// `Forked` in a forked child, `Device`.
    pub fn device_address(&self) -> Result<Option<u64>> {
        let address = self.address()?;
        let found = self.registration.as_ref().map(|registration| registration.device_address(address));
        found.transpose().map_err(|error| MemoryError::device(&error))
    }

    /// Descriptor by which another process may map the memory; `None` where it is not shared.
    ///
    /// # Errors
    /// `Forked` in a forked child; `System` where there is no descriptor left.
    pub fn descriptor(&self) -> Result<Option<OwnedFd>> {
        self.address()?;
        let Some(file) = &self.file else { return Ok(None) };
        let copied = file.as_fd().try_clone_to_owned();
        copied
            .map(Some)
            .map_err(|error| MemoryError::system("duplicate a descriptor of shared memory", error))
    }

    /// A view of the whole memory that keeps it. In a forked child the view has no bytes.
    ///
    /// # Errors
    /// `Forked` in a forked child.
    pub fn region(self: &Arc<Self>) -> Result<Region> {
        let base = mapping::pointer(self.address()?).cast();
        let generation = crate::fork::generation()
            .map_err(|error| MemoryError::system("install handlers of forks", error))?;
        let owner: Box<dyn std::any::Any + Send + Sync> = Box::new(Arc::clone(self));
        // SAFETY: `len` bytes of a mapping that is readable and writable as long as the owner lives. Who may write
        // when is what the leases of a pool are for; the store's calls name the slots that they touch.
        let region = unsafe { Region::from_raw_parts(base, self.len, true, Some(owner)) };
        Ok(region.of_generation(generation))
    }

    /// Unregisters, then unmaps. `drop` does the same and cannot tell what went wrong.
    ///
    /// # Errors
    /// `Device` where the driver refuses to let go: the memory is then never unmapped, since the driver may still
    /// use it. Not where the driver has ended.
    pub fn close(mut self) -> Result<()> {
        self.free()
    }

    fn free(&mut self) -> Result<()> {
        let Some(mapping) = self.mapping.take() else { return Ok(()) };
        let registration = self.registration.take();
        if mapping.is_inherited() {
            // What the parent registered, and the context it holds, are not the child's to undo.
            std::mem::forget(registration);
            return Ok(());
        }
        if let Some(mut registration) = registration
            && let Err(error) = registration.undo()
        {
            mapping.leak();
            return Err(MemoryError::device(&error));
        }
        drop(mapping);
        Ok(())
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let _ = self.free();
    }
}
