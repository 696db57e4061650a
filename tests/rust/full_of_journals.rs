//! Journals give back what they take, also where there is no room for anything else any more.

use std::path::Path;

use hicache_core::store::testing::{Limits, finish_dead, keep_journal_small};
use hicache_core::{BackupOutcome, RestoreOutcome, Store, StoreOptions, View, ViewOptions};

use crate::support::*;

const CAPACITY: u64 = 16 << 20;
const PAGE: usize = 512;

/// A store that does nothing by itself on the side.
fn open(root: &Path, capacity: u64) -> Store {
    let options = StoreOptions {
        capacity_bytes: Some(capacity),
        io_threads: Some(1),
        keeps_no_house: true,
        ..StoreOptions::default()
    };
    Store::open(root, options).unwrap()
}

fn view(store: &Store) -> View {
    store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap()
}

/// Stores a page that is a chain of its own: of all pages it takes the most of a journal.
fn store_page(view: &View, number: u64) -> BackupOutcome {
    let memory = Memory::of(&page_bytes(number, PAGE));
    backup(view, &keys(&format!("page {number}"), 1), &memory).outcomes[0]
}

fn journal_bytes(root: &Path) -> u64 {
    files_ending(root, ".idx").iter().map(|path| path.metadata().unwrap().len()).sum()
}

/// Pages can be stored again, come back exact, and the root is within its capacity.
fn assert_usable(store: &Store, first: u64) {
    let view = view(store);
    for number in first..first + 200 {
        assert_eq!(store_page(&view, number), BackupOutcome::Stored, "page {number}");
    }
    for number in first..first + 200 {
        let memory = Memory::canary(PAGE);
        let outcomes = restore(&view, &keys(&format!("page {number}"), 1), &memory).outcomes;
        assert_eq!(outcomes, [RestoreOutcome::Restored], "page {number}");
        assert!(memory.bytes() == page_bytes(number, PAGE), "page {number}");
    }
    assert!(store.used_bytes() <= store.capacity_bytes());
}

#[test]
fn journals_that_fill_the_root_are_written_anew_or_merged() {
    let (root, dead) = (fast_folder(), fast_folder());
    let store = open(root.path(), CAPACITY);
    let pages = view(&store);
    let mut number = 0;
    while store_page(&pages, number) == BackupOutcome::Stored {
        number += 1;
        assert!(number < 400_000, "the root never fills up");
        if number % 100 == 0 {
            assert!(store.used_bytes() <= CAPACITY, "{} bytes after {number} pages", store.used_bytes());
        }
    }
    assert!(journal_bytes(root.path()) > CAPACITY / 2, "something else than the journal fills it");
    copy_tree(root.path(), dead.path());

    keep_journal_small(&store).unwrap();
    assert!(journal_bytes(root.path()) < CAPACITY / 64);
    assert_usable(&store, number);

    let next = open(dead.path(), CAPACITY);
    finish_dead(&next, Limits::within(std::time::Duration::from_secs(60), CAPACITY), &mut |_| ()).unwrap();
    assert!(journal_bytes(dead.path()) < CAPACITY / 64);
    assert_usable(&next, number);
}

#[test]
fn a_root_made_smaller_than_its_journal_becomes_usable() {
    let root = fast_folder();
    let store = open(root.path(), 128 * CAPACITY);
    let pages = view(&store);
    let mut number = 0;
    while journal_bytes(root.path()) <= CAPACITY {
        assert_eq!(store_page(&pages, number), BackupOutcome::Stored);
        number += 1;
    }
    store.resize(CAPACITY).unwrap();
    assert_eq!(store_page(&pages, number), BackupOutcome::Refused, "there is room beside the journal");
    keep_journal_small(&store).unwrap();
    assert_usable(&store, number);
}
