//! Deleting what a raised generation left behind.

use crate::format::SegmentId;
use crate::store::Inner;
use crate::store::namespace_state::NamespaceState;
use crate::store::{recover, root, tail};

/// Unlinks segments of generations before the present one, of this process and of dead ones. A live process's
/// segment stays: it goes on writing there until it sees the new generation.
pub(crate) fn delete_old_segments(inner: &Inner, state: &NamespaceState) {
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
