//! Open segment files: a bounded set, the least recently used one closed first.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};

use crate::format::SegmentId;
use crate::namespace::Fingerprint;
use crate::store::io::{SegmentFile, Transfers};
use crate::store::paths::Paths;

/// Segments open for reading.
pub struct SegmentFiles {
    paths: Paths,
    transfers: Arc<Transfers>,
    most: usize,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    files: HashMap<(Fingerprint, SegmentId), (Arc<SegmentFile>, u64)>,
    clock: u64,
}

impl SegmentFiles {
    /// Keeps at most `most` segments open.
    pub fn new(paths: Paths, transfers: Arc<Transfers>, most: usize) -> Self {
        SegmentFiles { paths, transfers, most, open: Mutex::default() }
    }

    /// The open file of a segment, opened now if it is not. Too many open files: the idle ones are closed and
    /// the open is tried once more.
    pub fn get(&self, namespace: &Fingerprint, segment: SegmentId) -> io::Result<Arc<SegmentFile>> {
        if let Some(file) = self.touch(namespace, segment) {
            return Ok(file);
        }
        let path = self.paths.segment(namespace, segment);
        let opened = match self.transfers.open(&path, false) {
            // EMFILE and ENFILE
            Err(error) if matches!(error.raw_os_error(), Some(23 | 24)) => {
                self.lock().files.clear();
                self.transfers.open(&path, false)
            }
            opened => opened,
        };
        let file = Arc::new(opened?);
        self.insert(namespace, segment, Arc::clone(&file));
        Ok(file)
    }

    /// Adds a file that is open already: the writer's.
    pub fn insert(&self, namespace: &Fingerprint, segment: SegmentId, file: Arc<SegmentFile>) {
        let mut open = self.lock();
        open.clock += 1;
        let clock = open.clock;
        open.files.insert((*namespace, segment), (file, clock));
        while open.files.len() > self.most {
            let oldest = open.files.iter().min_by_key(|(_, (_, used))| *used).map(|(id, _)| *id);
            let Some(oldest) = oldest else { break };
            open.files.remove(&oldest);
        }
    }

    /// Closes a segment, so that its blocks go back once it is unlinked.
    pub fn forget(&self, namespace: &Fingerprint, segment: SegmentId) {
        self.lock().files.remove(&(*namespace, segment));
    }

    /// Closes all.
    pub fn clear(&self) {
        self.lock().files.clear();
    }

    fn touch(&self, namespace: &Fingerprint, segment: SegmentId) -> Option<Arc<SegmentFile>> {
        let mut open = self.lock();
        open.clock += 1;
        let clock = open.clock;
        let (file, used) = open.files.get_mut(&(*namespace, segment))?;
        *used = clock;
        Some(Arc::clone(file))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
