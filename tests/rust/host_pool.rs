//! A slot has one holder at a time, and memory goes when nobody has a part of it any more.

use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;

use hicache_core::{ErrorKind, HostPool, RestoreOutcome};
use hicache_sys::memory::{MemoryOptions, Wish};

use crate::support::{Memory, backup, keys, open, page_bytes, restore, tiny_view};

fn options() -> MemoryOptions {
    MemoryOptions { register: Wish::Off, ..MemoryOptions::default() }
}

fn pool(slots: u64) -> HostPool {
    HostPool::new(slots, 512, &options()).unwrap()
}

/// Bytes of memory, and mappings, that this process has.
fn held() -> (u64, usize) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    (kib * 1024, fs::read_to_string("/proc/self/maps").unwrap().lines().count())
}

#[test]
fn more_than_is_free_is_an_error_and_leases_nothing() {
    let pool = pool(4);
    let held = pool.lease(3).unwrap();
    assert_eq!(held.slots().unwrap(), [0, 1, 2]);
    let error = pool.lease(2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolExhausted);
    assert!(error.message().contains("found 1 of 4 (3 in 1 leases)"), "{error}");
    assert!(pool.try_lease(2).unwrap().is_none());
    assert_eq!(pool.lease(u64::MAX).unwrap_err().kind(), ErrorKind::PoolExhausted);
    assert_eq!(pool.usage().unwrap().free_slots, 1);
    held.release().unwrap();
    assert_eq!(pool.lease(4).unwrap().slots().unwrap().len(), 4);
}

#[test]
fn a_lease_that_is_dropped_leaks_nothing() {
    let pool = pool(3);
    for _ in 0..1000 {
        drop(pool.lease(3).unwrap());
    }
    let lease = pool.lease(3).unwrap();
    lease.release_slots(&[1]).unwrap();
    assert_eq!(pool.lease(1).unwrap().slots().unwrap(), [1]);
    drop(lease);
    let usage = pool.usage().unwrap();
    assert_eq!((usage.free_slots, usage.leased_slots, usage.leases, usage.views), (3, 0, 0, 0));
}

#[test]
fn what_was_released_is_not_released_again_nor_used() {
    let pool = pool(2);
    let lease = pool.lease(2).unwrap();
    let handles = lease.handles().unwrap();
    pool.check(&handles).unwrap();
    lease.release_slots(&[0]).unwrap();
    for slots in [&[0][..], &[1, 1], &[1, 7]] {
        assert_eq!(lease.release_slots(slots).unwrap_err().kind(), ErrorKind::Lease, "{slots:?}");
    }
    assert_eq!(lease.slots().unwrap(), [1]);
    lease.release().unwrap();
    assert_eq!(lease.release().unwrap_err().kind(), ErrorKind::Lease);
    assert_eq!(lease.slots().unwrap_err().kind(), ErrorKind::Lease);
    assert!(pool.check(&handles).unwrap_err().message().contains("released already"));
    let next = pool.lease(2).unwrap();
    assert!(pool.check(&handles).unwrap_err().message().contains("leased to somebody else"));
    pool.check(&next.handles().unwrap()).unwrap();
}

#[test]
fn slots_of_another_pool_are_refused() {
    // Both pools have leased slot 0 once: only the pool tells the leases apart.
    let (one, other) = (pool(1), pool(1));
    let (own, lease) = (one.lease(1).unwrap(), other.lease(1).unwrap());
    assert_eq!(one.release(&lease).unwrap_err().kind(), ErrorKind::Lease);
    assert_eq!(one.check(&lease.handles().unwrap()).unwrap_err().kind(), ErrorKind::Lease);
    one.check(&own.handles().unwrap()).unwrap();
    other.release(&lease).unwrap();
}

#[test]
fn many_threads_never_hold_the_same_slot() {
    let pool = pool(8);
    let owners: Vec<_> = (0..8).map(|_| std::sync::atomic::AtomicBool::new(false)).collect();
    std::thread::scope(|scope| {
        for count in [1, 2, 3, 5] {
            let (pool, owners) = (&pool, &owners);
            scope.spawn(move || {
                for _ in 0..2000 {
                    let Some(lease) = pool.try_lease(count).unwrap() else { continue };
                    let slots = lease.slots().unwrap();
                    for &slot in &slots {
                        assert!(!owners[slot as usize].swap(true, std::sync::atomic::Ordering::AcqRel));
                    }
                    for &slot in &slots {
                        owners[slot as usize].store(false, std::sync::atomic::Ordering::Release);
                    }
                }
            });
        }
    });
    assert_eq!(pool.usage().unwrap().free_slots, 8);
}

#[test]
fn a_pool_that_is_in_use_stays_open() {
    let pool = pool(2);
    let lease = pool.lease(1).unwrap();
    assert_eq!(pool.close().unwrap_err().kind(), ErrorKind::Lease);
    lease.release().unwrap();
    let region = pool.region().unwrap();
    let error = pool.close().unwrap_err();
    assert!(error.message().contains("views"), "{error}");
    region.copy_in(0, b"alive").unwrap();
    drop(region);
    pool.close().unwrap();
    pool.close().unwrap();
    assert_eq!(pool.region().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pool.lease(1).unwrap_err().kind(), ErrorKind::Closed);
    assert!(pool.is_closed());
}

#[test]
fn a_view_keeps_memory_whose_pool_is_gone() {
    let pool = pool(2);
    let region = pool.region().unwrap();
    drop(pool);
    region.copy_in(1000, b"still here").unwrap();
    let mut back = [0; 10];
    region.copy_out(1000, &mut back).unwrap();
    assert_eq!(&back, b"still here");
}

#[test]
fn pages_of_a_store_are_restored_into_a_pool() {
    let root = tempfile::tempdir().unwrap();
    let (store, keys) = (open(root.path()), keys("into a pool", 8));
    let view = tiny_view(&store);
    let source = Memory::of(&page_bytes(3, 8 * 512));
    backup(&view, &keys, &source);
    let pool = pool(8);
    let target = Memory { region: Arc::new(pool.region().unwrap()) };
    assert_eq!(restore(&view, &keys, &target).outcomes, [RestoreOutcome::Restored; 8]);
    assert!(target.bytes() == source.bytes());
}

#[test]
fn a_hundred_pools_leave_nothing_behind() {
    let cycle = |shared| {
        let options = MemoryOptions { shared, ..options() };
        let pool = HostPool::new(4, 1 << 20, &options).unwrap();
        assert_eq!(pool.report().unwrap().mapped_bytes, 4 << 20);
        let lease = pool.lease(4).unwrap();
        pool.region().unwrap().copy_in(3 << 20, &[7; 4096]).unwrap();
        drop(lease);
        if shared { drop(pool) } else { pool.close().unwrap() }
    };
    (0..4).for_each(|number| cycle(number % 2 == 0));
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let (before, files) = (held(), descriptors());
    (0..100).for_each(|number| cycle(number % 2 == 0));
    let after = held();
    // Other tests run meanwhile: a hundred pools would be 400 MiB and 300 mappings.
    assert!(after.0 < before.0 + (100 << 20), "from {before:?} to {after:?}");
    assert!(after.1 < before.1 + 60, "from {before:?} to {after:?}");
    assert!(descriptors() < files + 40, "{files} descriptors before, {} after", descriptors());
}

#[test]
fn shared_memory_is_the_same_bytes_in_both_pools() {
    let options = MemoryOptions { shared: true, ..options() };
    let pool = HostPool::new(4, 512, &options).unwrap();
    let lease = pool.lease(2).unwrap();
    pool.region().unwrap().copy_in(512, b"from the maker").unwrap();
    let descriptor = pool.descriptor().unwrap().unwrap();
    let peer = HostPool::attach(descriptor.as_fd(), 4, 512, &options).unwrap();
    let mut back = [0; 14];
    peer.region().unwrap().copy_out(512, &mut back).unwrap();
    assert_eq!(&back, b"from the maker");
    peer.region().unwrap().copy_in(0, b"from the peer").unwrap();
    pool.region().unwrap().with_bytes(0, 13, |bytes| assert_eq!(bytes, b"from the peer")).unwrap();
    assert_eq!(peer.lease(1).unwrap_err().kind(), ErrorKind::Unsupported);
    let too_many = HostPool::attach(descriptor.as_fd(), 1 << 20, 512, &options).unwrap_err();
    assert_eq!(too_many.kind(), ErrorKind::Config);
    drop(lease);
    drop(pool);
    peer.region().unwrap().with_bytes(0, 13, |bytes| assert_eq!(bytes, b"from the peer")).unwrap();
}

#[test]
fn a_file_that_could_become_shorter_is_no_shared_memory() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let error = HostPool::attach(file.as_fd(), 4, 512, &options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.message().contains("shorter"), "{error}");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_mapped() {
    for (slots, slot_bytes) in [(0, 512), (1, 0), (u64::MAX, 512), (1 << 31, u64::MAX), ((1 << 31) + 1, 1)] {
        let error = HostPool::new(slots, slot_bytes, &options()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Geometry, "{slots} x {slot_bytes}");
    }
    // More than any machine has: the limits are asked before the kernel is.
    let error = HostPool::new(1 << 20, 1 << 30, &options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit);
    let without_touch = MemoryOptions { huge_pages: Wish::Require, prefault: false, ..options() };
    assert_eq!(HostPool::new(4, 512, &without_touch).unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn what_was_not_got_is_said() {
    let options = MemoryOptions { register: Wish::Try, huge_pages: Wish::Try, ..options() };
    let report = HostPool::new(1, 512, &options).unwrap().report().unwrap();
    let words = report.words();
    assert!(words.contains(&"prefaulted"), "{words:?}");
    if !words.contains(&"registered") {
        assert!(report.unmet.iter().any(|line| line.starts_with("registration")), "{:?}", report.unmet);
    }
    assert!(report.unmet.iter().any(|line| line.starts_with("huge pages")), "{:?}", report.unmet);
    let plain = MemoryOptions { register: Wish::Off, huge_pages: Wish::Off, prefault: false, ..options };
    let report = HostPool::new(1, 512, &plain).unwrap().report().unwrap();
    assert!(report.words().is_empty() && report.unmet.is_empty(), "{report:?}");
}
