//! A disk that somebody else fills: pages are refused, serving goes on, and it ends by itself.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::driver::Worker;
use super::mounted::{Mounted, on_each};
use crate::support::{fast_folder, listing};

const PAGE: u64 = 64 << 10;
const ALL: std::ops::Range<usize> = 0..8;

/// A file that takes what is free.
struct Filler {
    path: PathBuf,
}

impl Filler {
    fn new(mounted: &Mounted) -> Filler {
        Filler { path: mounted.top().join("filler") }
    }

    /// Grows until nothing is left.
    fn fill(&self) {
        let mut file = std::fs::File::options().create(true).append(true).open(&self.path).unwrap();
        for step in [1 << 20, 64 << 10, 4096, 512] {
            let bytes = vec![1; step];
            while file.write_all(&bytes).is_ok() {}
        }
    }

    /// Gives back so many bytes.
    fn shrink(&self, bytes: u64) {
        let file = std::fs::File::options().write(true).open(&self.path).unwrap();
        let len = file.metadata().unwrap().len();
        file.set_len(len - bytes).unwrap();
        file.sync_all().unwrap();
    }

    fn remove(self) {
        std::fs::remove_file(&self.path).unwrap();
    }
}

fn temporary_files(root: &Path) -> Vec<PathBuf> {
    let names = listing(root).into_iter().map(|(path, ..)| path);
    names
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tmp-")))
        .collect()
}

/// Pages that can be had are exact, the others are missing: nothing else.
fn check(worker: &mut Worker, chains: std::ops::Range<u64>) -> usize {
    let mut had = 0;
    for chain in chains {
        let letters = worker.restore(chain, ALL);
        assert!(letters.chars().all(|letter| "rav".contains(letter)), "chain {chain}: {letters}");
        had += letters.matches('r').count();
    }
    had
}

#[test]
fn a_disk_that_somebody_else_fills_refuses_pages_and_loses_none() {
    on_each(64, |mounted| {
        let kind = mounted.kind;
        let root = mounted.root();
        let filler = Filler::new(mounted);
        let mut worker = Worker::start(&root, &format!("page={PAGE} capacity={}", 48 << 20));
        // Nothing of its own is there to make room with.
        filler.fill();
        for chain in 0..3 {
            assert_eq!(worker.backup(chain, ALL), "rrrrrrrr", "{kind}: not a byte is free");
            assert_eq!(worker.matched(chain, 8), 0);
        }
        assert_eq!(worker.counter("backup_refused_no_space_pages"), 24, "{kind}");
        assert_eq!(temporary_files(&root), Vec::<PathBuf>::new(), "{kind}");
        // Room for some pages: later ones are stored in place of earlier ones, or refused.
        filler.shrink(8 << 20);
        let mut stored = 0;
        for chain in 100..120 {
            let letters = worker.backup(chain, ALL);
            assert!(letters.chars().all(|letter| "sr".contains(letter)), "{kind}, chain {chain}: {letters}");
            if letters == "ssssssss" {
                assert_eq!(worker.restore(chain, ALL), "rrrrrrrr", "{kind}: just stored");
                stored += 1;
            }
        }
        assert!(stored >= 8, "{kind}: {stored} chains of 512 KiB stored in 8 MiB");
        let before = check(&mut worker, 100..120);
        assert!(before >= 64, "{kind}: {before} pages of 64 KiB can be had in 8 MiB");
        // Full again, and again: what is stored is served.
        filler.fill();
        for chain in 120..125 {
            let letters = worker.backup(chain, ALL);
            assert!(letters.chars().all(|letter| "sr".contains(letter)), "{kind}, chain {chain}: {letters}");
            filler.fill();
        }
        check(&mut worker, 100..125);
        assert_eq!(temporary_files(&root), Vec::<PathBuf>::new(), "{kind}");
        let mut other = Worker::start(&root, &format!("page={PAGE}"));
        check(&mut other, 100..125);
        filler.remove();
        for (chain, worker) in [(200, &mut worker), (201, &mut other)] {
            assert_eq!(worker.backup(chain, ALL), "ssssssss", "{kind}: there is room again");
            assert_eq!(worker.restore(chain, ALL), "rrrrrrrr");
        }
        check(&mut other, 100..125);
        assert!(mounted.free_bytes() > 0);
        worker.close();
        other.close();
    });
}

/// A quota says EDQUOT where a disk says ENOSPC.
#[test]
fn a_quota_that_is_used_up_refuses_pages_and_loses_none() {
    for errno in [28, 122] {
        for point in ["header", "payload", "directory", "frame"] {
            let folder = fast_folder();
            let root = folder.path().join("root");
            let mut worker = Worker::start(&root, &format!("page={PAGE} capacity={}", 16 << 20));
            if point != "header" {
                assert_eq!(worker.backup(0, ALL), "ssssssss");
            }
            worker.ask(&format!("arm {point} {errno}*1000"), "armed");
            assert_eq!(worker.backup(1, ALL), "rrrrrrrr", "errno {errno} at the {point}");
            assert_eq!(worker.counter("backup_refused_no_space_pages"), 8, "errno {errno} at the {point}");
            if point != "header" {
                let letters = worker.restore(0, ALL);
                assert!(letters.chars().all(|letter| "rav".contains(letter)), "{letters}");
            }
            worker.ask("disarm", "disarmed");
            assert_eq!(worker.backup(2, ALL), "ssssssss", "errno {errno} at the {point}, healed");
            assert_eq!(worker.restore(2, ALL), "rrrrrrrr");
            worker.close();
        }
    }
}
