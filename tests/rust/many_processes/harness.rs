//! The harness itself: what must fail a test does.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hicache_tests::deployment::{Deployment, keys};

use super::driver::Worker;
use super::ledger::Ledger;
use crate::support::{Memory, backup, fast_folder, open, page_bytes};

const PAGE: u32 = 16 << 10;

fn panics(what: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(what)).expect_err("it must fail");
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[test]
fn a_worker_tells_of_wrong_bytes_and_ends() {
    let folder = fast_folder();
    let store = open(folder.path());
    let view = Deployment::whole(PAGE).view(&store).unwrap();
    backup(&view, &keys(1, 1), &Memory::of(&page_bytes(1, PAGE as usize)));
    let mut worker = Worker::start(folder.path(), &format!("page={PAGE}"));
    let message = panics(|| {
        worker.restore(1, 0..1);
    });
    assert!(message.contains("WRONG BYTES in page 0 of chain 1"), "{message}");
    super::driver::wait_until("it ends", || worker.ended().is_some());
    assert_eq!(worker.ended().unwrap().code(), Some(3));
}

#[test]
fn a_ledger_notices_a_page_that_is_lost() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let options = format!("page={PAGE}");
    let mut worker = Worker::start(&root, &options);
    let line = format!("backed {}", worker.ask("backup 3 0 2", "backed"));
    let mut ledger = Ledger::default();
    ledger.take([line.clone()]);
    assert_eq!(ledger.settle(&root, &Deployment::whole(PAGE), &options).exact, 2);
    // The same report of a page that was never there: its segment is, and nobody removed it.
    ledger.take([line.replace("backed 3 0", "backed 3 5")]);
    let message = panics(|| {
        ledger.settle(&root, &Deployment::whole(PAGE), &options);
    });
    assert!(message.contains("page 5 of chain 3") && message.contains("is lost"), "{message}");
    // A segment that went with its pages is no loss.
    let segment = crate::support::files_ending(&root, ".seg").remove(0);
    worker.kill();
    std::fs::remove_file(segment).unwrap();
    std::fs::remove_dir_all(root.join("journal")).unwrap();
    assert_eq!(ledger.settle(&root, &Deployment::whole(PAGE), &options).exact, 0);
}

#[test]
fn a_worker_dies_and_stops_where_it_is_told() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    for (chain, fault) in ["payload die", "directory die", "frame die", "frame tear"].iter().enumerate() {
        let mut worker = Worker::start(&root, &format!("page={PAGE}"));
        assert_eq!(worker.backup(100 + chain as u64, 0..1), "s");
        worker.ask(&format!("arm {fault} 1"), "armed");
        assert_eq!(worker.backup(chain as u64, 0..2), "ss", "the first one passes");
        worker.tell(&format!("backup {chain} 2 4"));
        assert_eq!(worker.wait_until_dead(), Vec::<String>::new(), "{fault}");
    }
    let mut worker = Worker::start(&root, &format!("page={PAGE}"));
    worker.ask("arm frame stop", "armed");
    worker.tell("backup 50 0 2");
    worker.wait_until_stopped();
    worker.go_on();
    assert!(worker.answer("backed").contains("ss"));
}
