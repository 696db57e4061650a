//! Pages of chains to and from the store, every restored byte checked.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;

use hicache_core::format::SegmentId;
use hicache_core::format::frame::{FrameKind, Step, decode_add, step};
use hicache_core::{
    BackupOutcome, ChainStart, PageKey, PoolMemory, RestoreOptions, RestoreOutcome, Result, Store, View,
};
use hicache_sys::Region;
use hicache_tests::deployment::{Deployment, keys};

use crate::fail;

/// Fills memory that a restore must not touch.
const CANARY: u8 = 0xa5;

/// The worker's view.
pub struct Pages {
    view: View,
    deployment: Deployment,
    own: Mutex<OwnJournal>,
}

/// What became of the pages of one call.
pub struct Backed {
    chain: u64,
    first: usize,
    segment: Option<SegmentId>,
    /// A letter for each page: s stored, p present, r refused, e error, k skipped.
    pub letters: String,
    reason: Option<String>,
}

impl Backed {
    /// As a line. The segment is `-` where none is known.
    pub fn line(&self) -> String {
        let segment = self.segment.map_or("-".into(), |segment| segment.file_name());
        let reason = self.reason.as_deref().unwrap_or_default().replace('\n', " ");
        format!("backed {} {} {segment} {} {reason}", self.chain, self.first, self.letters)
    }
}

impl Pages {
    /// A view of `store`.
    pub fn new(store: &Store, deployment: Deployment) -> Result<Pages> {
        let own = OwnJournal {
            folder: store.path().join("journal"),
            process: store.process().to_string(),
            at: 0,
            file: None,
        };
        Ok(Pages { view: deployment.view(store)?, deployment, own: Mutex::new(own) })
    }

    /// Stores pages of a chain.
    pub fn backup(&self, chain: u64, pages: Range<usize>) -> Backed {
        let keys = keys(chain, pages.end);
        let bytes: Vec<u8> =
            pages.clone().flat_map(|number| self.deployment.page(chain, number as u64)).collect();
        let memory = Region::owned(bytes.len());
        memory.copy_in(0, &bytes).unwrap_or_else(|error| fail(&error.to_string()));
        let slots: Vec<i64> = (0..pages.len() as i64).collect();
        let lent = vec![PoolMemory { regions: vec![&memory], slots: &slots }];
        let parent = pages.start.checked_sub(1).map(|before| keys[before]);
        let start = ChainStart { parent, depth: Some(pages.start as u32) };
        let report = self
            .view
            .backup(&keys[pages.clone()], lent, start)
            .unwrap_or_else(|error| fail(&format!("backup: {error}")));
        let letter = |outcome: &BackupOutcome| match outcome {
            BackupOutcome::Stored => 's',
            BackupOutcome::Present => 'p',
            BackupOutcome::Skipped => 'k',
            BackupOutcome::Refused => 'r',
            BackupOutcome::Late => 'l',
            BackupOutcome::Error => 'e',
        };
        let letters: String = report.outcomes.iter().map(letter).collect();
        let segment = letters.contains('s').then(|| self.own.lock().ok()?.last_segment()).flatten();
        Backed { chain, first: pages.start, segment, letters, reason: report.reason }
    }

    /// Pages of the chain, among the first `count`, that can be had.
    pub fn matched(&self, chain: u64, count: usize) -> usize {
        let found = self.view.match_prefix(&keys(chain, count));
        found.unwrap_or_else(|error| fail(&format!("match: {error}"))).pages
    }

    /// Restores pages of a chain. A letter for each: r restored, a absent, v evicted, l late, e error, f foreign,
    /// d damaged, k skipped. What is restored is exact, what is absent left the memory alone, or this process ends.
    pub fn restore(&self, chain: u64, pages: Range<usize>) -> String {
        let keys: Vec<PageKey> = keys(chain, pages.end)[pages.clone()].to_vec();
        let page_bytes = self.deployment.page_bytes as usize;
        let mut landed = vec![CANARY; keys.len() * page_bytes];
        let memory = Region::owned(landed.len());
        memory.copy_in(0, &landed).unwrap_or_else(|error| fail(&error.to_string()));
        let slots: Vec<i64> = (0..keys.len() as i64).collect();
        let lent = vec![PoolMemory { regions: vec![&memory], slots: &slots }];
        let report = self
            .view
            .restore(&keys, lent, RestoreOptions::default())
            .unwrap_or_else(|error| fail(&format!("restore: {error}")));
        memory.copy_out(0, &mut landed).unwrap_or_else(|error| fail(&error.to_string()));
        for ((number, landed), outcome) in pages.zip(landed.chunks(page_bytes)).zip(&report.outcomes) {
            match outcome {
                RestoreOutcome::Restored if landed != self.deployment.page(chain, number as u64) => {
                    fail(&format!("WRONG BYTES in page {number} of chain {chain}"));
                }
                RestoreOutcome::Absent if landed.iter().any(|&byte| byte != CANARY) => {
                    fail(&format!("bytes in the slot of absent page {number} of chain {chain}"));
                }
                _ => {}
            }
        }
        let letter = |outcome: &RestoreOutcome| match outcome {
            RestoreOutcome::Restored => 'r',
            RestoreOutcome::Skipped => 'k',
            RestoreOutcome::Absent => 'a',
            RestoreOutcome::Evicted => 'v',
            RestoreOutcome::Late => 'l',
            RestoreOutcome::Error => 'e',
            RestoreOutcome::Foreign => 'f',
            RestoreOutcome::Damaged => 'd',
        };
        report.outcomes.iter().map(letter).collect()
    }

    /// Forgets everything in the namespace.
    pub fn clear(&self) -> usize {
        self.view.clear().unwrap_or_else(|error| fail(&format!("clear: {error}")))
    }
}

/// This process's own journal, read to learn where its pages went.
struct OwnJournal {
    folder: PathBuf,
    process: String,
    at: u64,
    file: Option<PathBuf>,
}

impl OwnJournal {
    /// Segment of the last unit told since the last call. `None` if a new journal has taken the place of the one
    /// that told it.
    fn last_segment(&mut self) -> Option<SegmentId> {
        let names = std::fs::read_dir(&self.folder).ok()?.flatten().map(|entry| entry.path());
        let is_own = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(&self.process) && name.ends_with(".idx")
        };
        let newest = names.filter(is_own).max_by_key(|path| (path.as_os_str().len(), path.clone()))?;
        if self.file.as_ref() != Some(&newest) {
            (self.at, self.file) = (0, Some(newest.clone()));
        }
        let file = std::fs::File::open(&newest).ok()?;
        let len = file.metadata().ok()?.len();
        let mut bytes = vec![0; len.checked_sub(self.at)? as usize];
        file.read_exact_at(&mut bytes, self.at).ok()?;
        let (mut position, mut segment) = (0, None);
        while let Step::Frame(frame, next) = step(&bytes, position) {
            position = next;
            if frame.kind == FrameKind::Add {
                segment = decode_add(frame.body, |_, _| ()).ok().map(|unit| unit.segment).or(segment);
            }
        }
        self.at += position as u64;
        segment
    }
}
