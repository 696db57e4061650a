//! What one call asks of a view: pools and policies of its own, a start that another view's look-up told.

use hicache_core::store::counters::Counter;
use hicache_core::{
    ChainStart, Component, DType, ErrorKind, HitPolicy, LayoutName, Pool, PoolKind, PoolMemory, View,
    ViewOptions, ViewPool,
};

use crate::support::{
    Memory, backup, contiguous, counter, keys, lend, namespace, open, page_bytes, restore, tile, tiny,
};

/// A pool of one blob of 32 bytes for each page.
fn state(name: &str) -> ViewPool {
    let pool =
        Pool::new(name, PoolKind::State, DType::UInt8, None, vec![Component::per_page("x", 32)]).unwrap();
    ViewPool::new(pool, tile((0, 1), (0, 1)), LayoutName::PageFirst)
}

/// A view of kv, a window and a state, with 6 pages of kv, pages 1 and 4 of `swa` and pages 1 and 3 of `state`.
fn hybrid(store: &hicache_core::Store, chain: &[hicache_core::PageKey]) -> View {
    let pools = vec![contiguous(tiny()), state("swa"), state("state")];
    let view = store.view(namespace("r1"), pools, ViewOptions::default()).unwrap();
    let held: [&[i64]; 3] = [&[0, 1, 2, 3, 4, 5], &[-1, 1, -1, -1, 4, -1], &[-1, 1, -1, 3, -1, -1]];
    let memory = [512, 32, 32].map(|page| Memory::of(&page_bytes(page, 6 * page as usize)));
    let lent = memory.iter().zip(held);
    let lent = lent.map(|(memory, slots)| PoolMemory { regions: vec![&memory.region], slots }).collect();
    assert_eq!(view.backup(chain, lent, ChainStart::default()).unwrap().leading(), 6);
    view
}

#[test]
fn a_call_brings_its_own_policies() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let chain = keys("hybrid", 6);
    let view = hybrid(&store, &chain);
    // The view's own policy wants every page of every pool.
    assert_eq!(view.match_prefix(&chain).unwrap().pages, 0);
    let (all, last) = (Some(HitPolicy::AllPages), Some(HitPolicy::TrailingPages(1)));
    for (policies, pages, legal, verdicts) in [
        ([all, None, None], 6, vec![1, 2, 3, 4, 5, 6], vec![("kv", 6)]),
        ([all, last, None], 5, vec![2, 5], vec![("kv", 6), ("swa", 5)]),
        ([all, None, last], 4, vec![2, 4], vec![("kv", 6), ("state", 4)]),
        ([all, last, last], 2, vec![2], vec![("kv", 6), ("swa", 5), ("state", 4)]),
        ([None, None, last], 4, vec![2, 4], vec![("state", 4)]),
    ] {
        let found = view.match_pools(&chain, &policies).unwrap();
        assert_eq!((found.pages, found.legal()), (pages, legal), "{policies:?}");
        let told: Vec<_> = found.pools.iter().map(|pool| (pool.name.as_str(), pool.pages)).collect();
        assert_eq!(told, verdicts, "{policies:?}");
    }
    let limited = view.match_pools(&chain, &[all, last, None]).unwrap().limited_by;
    assert_eq!(limited.as_deref(), Some("swa: no longer prefix has its last 1 pages"));
}

#[test]
fn policies_that_make_no_sense_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let chain = keys("hybrid", 6);
    let view = hybrid(&store, &chain);
    let all = Some(HitPolicy::AllPages);
    for policies in [
        vec![],
        vec![all, None],
        vec![None, None, None],
        vec![all, Some(HitPolicy::TrailingPages(0)), None],
        vec![all, all, all, all],
    ] {
        let error = view.match_pools(&chain, &policies).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{policies:?}: {error}");
    }
}

#[test]
fn what_one_view_looked_up_another_stores_with_its_parent() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let pool = |pool: ViewPool| store.view(namespace("r1"), vec![pool], ViewOptions::default()).unwrap();
    let asking = store
        .view(namespace("r1"), vec![contiguous(tiny()), state("state")], ViewOptions::default())
        .unwrap();
    let (kv, states) = (pool(contiguous(tiny())), pool(state("state")));
    let chain = keys("learned", 6);
    let bytes = page_bytes(1, 6 * 512);
    let learned = |view: &View, first: usize, page: usize| {
        let before = counter(&store, Counter::BackupUnknownParent);
        let slots: Vec<i64> = (0..(6 - first) as i64).collect();
        let memory = Memory::of(&bytes[..(6 - first) * page]);
        view.backup(&chain[first..], lend(&memory, &slots), ChainStart::default()).unwrap();
        counter(&store, Counter::BackupUnknownParent) == before
    };
    let first = Memory::of(&bytes[..3 * 512]);
    assert_eq!(backup(&kv, &chain[..3], &first).leading(), 3);
    let policies = [Some(HitPolicy::AllPages), Some(HitPolicy::AllPages)];
    assert_eq!(asking.match_pools(&chain, &policies).unwrap().pages, 0);
    assert!(learned(&kv, 3, 512), "kv misses page 3, whatever the other pool has");
    assert!(learned(&states, 0, 32), "together they miss page 0");
    let other = keys("never looked up", 2);
    let before = counter(&store, Counter::BackupUnknownParent);
    let memory = Memory::of(&bytes[..1024]);
    kv.backup(&other, lend(&memory, &[0, 1]), ChainStart::default()).unwrap();
    assert_eq!(counter(&store, Counter::BackupUnknownParent), before + 1);
}

#[test]
fn flags_say_for_each_page_whether_it_is_there() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let kv = store.view(namespace("r1"), vec![contiguous(tiny())], ViewOptions::default()).unwrap();
    let (chain, memory) = (keys("flags", 4), Memory::of(&page_bytes(1, 4 * 512)));
    let report = kv.backup(&chain, lend(&memory, &[0, 1, -1, 3]), ChainStart::default()).unwrap();
    assert_eq!((report.flags(), report.leading()), (vec![true, true, false, true], 2));
    let report = kv.backup(&chain[..2], lend(&memory, &[0, 1]), ChainStart::default()).unwrap();
    assert_eq!((report.flags(), report.leading()), (vec![true, true], 2), "present is there, too");
    let report = restore(&kv, &chain, &Memory::canary(4 * 512));
    assert_eq!((report.flags(), report.leading()), (vec![true, true, false, true], 2));
    assert_eq!(restore(&kv, &chain[2..], &Memory::canary(1024)).leading(), 0);
}
