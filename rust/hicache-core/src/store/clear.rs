//! `clear`: a namespace's generation is raised, and what it left behind is deleted.

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
    if let Ok(Some(sealed)) = state.writer.close(&inner.transfers) {
        inner.tell_sealed(state.fingerprint, &sealed);
    }
    state.refresh(&inner.counters);
    delete_old_segments(inner, state);
    Ok(objects)
}

/// Unlinks segments of generations before the present one, of this process and of dead ones. A live process's
/// segment stays: it goes on writing there until it sees the new generation.
fn delete_old_segments(inner: &Inner, state: &NamespaceState) {
    let generation = state.index().generation();
    let folder = inner.paths.namespace(&state.fingerprint);
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
        if let Ok(metadata) = file.metadata() {
            // First the blocks, then the name: readers may still hold the file open.
            let _ = hicache_sys::file::punch_hole(&file, 0, metadata.len());
        }
        let _ = std::fs::remove_file(&path); // gone already is as good
    }
}
