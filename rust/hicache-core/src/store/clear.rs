//! `clear`: a namespace's generation is raised, and what it left behind is deleted.

use std::sync::atomic::Ordering;

use crate::format::SegmentId;
use crate::namespace::Namespace;
use crate::store::namespace_state::NamespaceState;
use crate::store::{Inner, Store, recover, root, tail};
use crate::{Error, ErrorKind, Result};

impl Store {
    /// Forgets everything stored in `namespace`, like [`crate::View::clear`], without a view of it.
    ///
    /// # Errors
    /// `Closed`, `Unsupported` on a read-only store, `Io`, also when nothing was ever stored in the namespace.
    pub fn clear_namespace(&self, namespace: &Namespace) -> Result<()> {
        clear(&self.inner, &self.inner.namespace(namespace)).map(|_| ())
    }
}

/// Clears a namespace; the number of objects that this process knew in it.
pub(crate) fn clear(inner: &Inner, state: &NamespaceState) -> Result<usize> {
    inner.check_open()?;
    if inner.options.read_only {
        return Err(Error::new(ErrorKind::Unsupported, "the store is open for reading only"));
    }
    state.refresh(&inner.counters);
    let (seen, objects) = {
        let index = state.index();
        (index.generation(), index.len())
    };
    inner.announce().map_err(|error| Error::io("cannot write to", &inner.paths.journals(), error))?;
    state.raise_generation(inner.process, seen)?;
    state.writer.close(&inner.transfers);
    inner.tell_sealed(state);
    state.refresh(&inner.counters);
    delete_old_segments(inner, state);
    Ok(objects)
}

/// Seals and deletes this process's segments of generations that are over, once for each.
pub(crate) fn leave_old_generations(inner: &Inner, state: &NamespaceState) {
    let generation = state.index().generation();
    if state.left_generation.swap(generation, Ordering::Relaxed) < generation {
        state.writer.retire_before(&inner.transfers, generation);
        inner.tell_sealed(state);
        delete_old_segments(inner, state);
    }
}

/// Unlinks segments of generations before the present one, of this process and of dead ones. A live process's
/// segment stays: it goes on writing there until it sees the new generation.
fn delete_old_segments(inner: &Inner, state: &NamespaceState) {
    let generation = state.index().generation();
    let folder = inner.paths.namespace(&state.fingerprint);
    let before = inner.budget.before_freeing();
    let mut freed = Vec::new();
    for id in root::list(&folder).iter().filter_map(|name| SegmentId::from_file_name(name)) {
        if id.process != inner.process && tail::is_alive(&inner.paths, id.process) {
            continue;
        }
        let path = inner.paths.segment(&state.fingerprint, id);
        let Ok(file) = hicache_sys::file::open_write(&path, hicache_sys::file::Access::Buffered) else {
            continue;
        };
        // A segment whose header is damaged is of no known generation: it stays for `verify` to report.
        if !recover::read_header(&file).is_ok_and(|header| header.generation < generation) {
            continue;
        }
        inner.files.forget(&state.fingerprint, id);
        let bytes = file.metadata().map_or(0, |metadata| hicache_sys::file::allocated_bytes(&metadata));
        // First the blocks, then the name: readers may still hold the file open.
        if file.set_len(0).is_ok() && std::fs::remove_file(&path).is_ok() {
            freed.push((id.process, bytes));
        }
    }
    if !freed.is_empty() {
        inner.budget.freed(before, &freed);
    }
}
