//! Where pages live: I1 to I4, I19, I24.

use super::support::{faulty, topology, walk};
use crate::Rules;
use crate::chain::{Base, Ownership, Splice};
use crate::classed_pool::{ClassedPool, Run};
use crate::error::RankErrorKind;
use crate::gather::GatherPlan;
use crate::placement::Placement;
use crate::sim::{OwnershipWorld, WriterWorld, explore};
use crate::topology::{Coordinates, CpKind, Rank, Scope, Topology};
use crate::writer::Spread;
use std::collections::BTreeSet;

fn pool(owners: u32, per_class: u32) -> ClassedPool {
    ClassedPool::new(Placement::new(owners, 4).expect("sizes"), per_class).expect("sizes")
}

#[test]
fn i01_owner_and_local_number_are_a_bijection_and_rows_round_trip() {
    for owners in 1..=9 {
        for page_tokens in [1, 4, 64] {
            let placement = Placement::new(owners, page_tokens).expect("sizes");
            let mut seen = BTreeSet::new();
            for page in 0..500u64 {
                let (owner, local) = (placement.owner(page), placement.local(page));
                assert!(owner < owners && seen.insert((owner, local)));
                assert_eq!(placement.global(owner, local), page);
            }
            let locs: Vec<u64> = (0..1000).collect();
            for owner in 0..owners {
                for loc in placement.owned(&locs, owner) {
                    assert_eq!(placement.loc(owner, placement.row(loc)), loc);
                }
            }
            let owned: usize = (0..owners).map(|owner| placement.owned(&locs, owner).count()).sum();
            assert_eq!(owned, locs.len());
        }
    }
    assert_eq!(Placement::new(0, 4).expect_err("no owner").kind(), RankErrorKind::Config);
}

#[test]
fn i02_a_path_is_one_cyclic_run_and_shares_differ_by_one_page_at_most() {
    let mut pool = pool(4, 8);
    let pages = pool.alloc_cyclic(2, 7).expect("room");
    let owners: Vec<u32> = pages.iter().map(|page| page % 4).collect();
    assert_eq!(owners, [2, 3, 0, 1, 2, 3, 0]);
    let shares = (0..4).map(|owner| owners.iter().filter(|&&other| other == owner).count());
    let shares: Vec<usize> = shares.collect();
    assert!(shares.iter().max().expect("four") - shares.iter().min().expect("four") <= 1, "{shares:?}");
    // The number for admission is the tightest class, not the sum.
    pool.alloc_batch(&[Run { start: 1, pages: 1 }; 6]).expect("room");
    assert_eq!((pool.counts(), pool.floor(), pool.free_pages()), (&[6, 1, 6, 6][..], 4, 19));
    explore(&mut OwnershipWorld::new(Rules::ALL), 0, 400).expect("one run on every path");
}

#[test]
fn i02_a_branch_continues_the_rotation_of_its_parent_and_another_base_is_declined() {
    let ownership = Ownership::new(Placement::new(4, 4).expect("sizes"));
    let mut pool = pool(4, 8);
    let base = ownership.new_chain(&pool);
    assert_eq!(base, Base(0), "the lowest of equal classes");
    pool.alloc_cyclic(base.owner_at(0, 4), 3).expect("room");
    assert_eq!(ownership.new_chain(&pool), Base(3), "the class with most free pages");
    // Both branches begin at position 3, owner 3, whatever the pool looks like now.
    assert_eq!(ownership.extension(base, &pool).owner_at(3, 4), 3);
    pool.alloc_cyclic(3, 1).expect("room");
    assert_eq!(ownership.extension(base, &pool).owner_at(3, 4), 3);
    assert_eq!(ownership.splice(base, Base(0)), Splice::Accepted);
    assert_eq!(ownership.splice(base, Base(1)), Splice::Declined);
}

#[test]
fn i03_backup_and_restore_change_pages_but_never_owners() {
    let ownership = Ownership::new(Placement::new(3, 4).expect("sizes"));
    let (mut device, mut host) = (pool(3, 6), pool(3, 6));
    let original = device.alloc_cyclic(1, 5).expect("room");
    let saved = ownership.allocate_backup(&mut host, &original).expect("room");
    device.free(&original).expect("taken");
    // Others take the pages that were free first.
    device.alloc_cyclic(1, 4).expect("room");
    let restored = ownership.allocate_restore(&mut device, &saved).expect("room");
    let owners = |pages: &[u32]| pages.iter().map(|page| page % 3).collect::<Vec<_>>();
    assert_eq!(owners(&original), owners(&restored));
    assert_ne!(original, restored);
    let share = ownership.own_share(2, &saved, &restored).expect("equal owners");
    assert!(share.iter().all(|(from, to)| from % 3 == 2 && to % 3 == 2) && share.len() == 2);
    let error = ownership.own_share(0, &[0], &[1]).expect_err("another owner");
    assert_eq!(error.kind(), RankErrorKind::Ownership);
    explore(&mut OwnershipWorld::new(Rules::ALL), 1000, 400).expect("content follows its owner");
}

#[test]
fn i02_a_gather_sends_equal_blocks_and_shared_pages_once() {
    // Two requests share the pages 0 to 2; position order, one run from owner 0 of 3.
    let (first, second): (&[u32], &[u32]) = (&[0, 1, 2, 3], &[0, 1, 2, 6, 7]);
    let plan = GatherPlan::new(3, &[first, second]).expect("cyclic");
    assert_eq!((plan.block(), plan.scratch_pages()), (4, 12));
    let sent: Vec<Option<u32>> = plan.send(0).collect();
    assert_eq!(sent, [Some(0), Some(3), Some(6), None]);
    assert_eq!((plan.scratch_page(7), plan.scratch_page(5)), (Some(5), None));
    // Five pages of one owner are no run of three owners: more than a block of two.
    assert!(GatherPlan::new(3, &[&[0, 3, 6, 9, 12]]).is_err());
}

#[test]
fn i04_mirrored_state_is_equal_on_all_ranks_after_every_step() {
    for (pp, cp, tp) in [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)] {
        walk(faulty(pp, cp, tp), 100);
    }
}

#[test]
fn i15_a_batch_is_allocated_as_a_whole_or_not_at_all_and_nothing_is_freed_twice() {
    let mut pool = pool(2, 4);
    let before = pool.digest();
    assert_eq!(pool.alloc_batch(&[Run { start: 0, pages: 4 }, Run { start: 1, pages: 5 }]), None);
    assert_eq!((pool.free_pages(), pool.digest()), (8, before));
    let pages = pool.alloc_cyclic(0, 3).expect("room");
    let error = pool.free(&[pages[0], pages[0]]).expect_err("named twice");
    assert_eq!(error.kind(), RankErrorKind::Ownership);
    assert!(!pool.is_free(pages[0]), "a refused call changes nothing");
    pool.free(&pages).expect("taken");
    assert_eq!(pool.digest(), before);
    assert!(pool.free(&[1000]).is_err());
}

#[test]
fn i19_every_cell_of_a_page_has_exactly_one_writer_in_every_topology() {
    explore(&mut WriterWorld::new(Rules::ALL), 0, 2000).expect("one writer");
    // Replicated rows under page context parallelism: each owner writes its own pages, not global rank 0 all.
    let topology = Topology::new(2, 4, 2, CpKind::Page).expect("sizes");
    let spread = Spread::even(8, 2, 1).expect("sizes");
    let writers =
        (0..topology.ranks()).filter(|&rank| spread.is_writer(&topology, Rank(rank)).expect("inside"));
    assert_eq!(writers.collect::<Vec<_>>(), [0, 2, 4, 6, 8, 10, 12, 14]);
    // Replicated context parallelism: one for each stage.
    let topology = Topology::new(2, 4, 2, CpKind::Replicated).expect("sizes");
    let writers =
        (0..topology.ranks()).filter(|&rank| spread.is_writer(&topology, Rank(rank)).expect("inside"));
    assert_eq!(writers.collect::<Vec<_>>(), [0, 8]);
    // Decode context parallelism: the first group, one rank for each lane of tokens.
    let topology = Topology::new(1, 1, 8, CpKind::None).and_then(|t| t.with_dcp(4)).expect("sizes");
    let spread = Spread::even(8, 1, 1).expect("sizes");
    let writers =
        (0..topology.ranks()).filter(|&rank| spread.is_writer(&topology, Rank(rank)).expect("inside"));
    assert_eq!(writers.collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn i24_free_pages_are_taken_in_an_order_that_does_not_depend_on_how_they_came_back() {
    let (mut a, mut b) = (pool(2, 8), pool(2, 8));
    let (x, y) = (a.alloc_cyclic(0, 5).expect("room"), a.alloc_cyclic(1, 5).expect("room"));
    b.alloc_cyclic(0, 5).expect("room");
    b.alloc_cyclic(1, 5).expect("room");
    a.free(&x).expect("taken");
    a.free(&y).expect("taken");
    let mut pages: Vec<u32> = x.iter().chain(&y).copied().collect();
    pages.reverse();
    b.free(&pages).expect("taken");
    assert_eq!(a.digest(), b.digest());
    assert_eq!(a.alloc_cyclic(0, 9), b.alloc_cyclic(0, 9));
}

#[test]
fn coordinates_are_numbered_as_the_engine_numbers_its_ranks() {
    let topology = Topology::new(2, 2, 4, CpKind::Layer).and_then(|t| t.with_dp(2)).expect("sizes");
    for rank in (0..topology.ranks()).map(Rank) {
        assert_eq!(topology.rank(topology.coordinates(rank).expect("inside")), rank);
    }
    // Stages outermost, then replicas, context, tensor.
    let at = Coordinates { dp: 1, pp: 1, cp: 0, tp: 3, dcp: 0 };
    assert_eq!(topology.rank(at), Rank(16 + 8 + 3));
    let stage = topology.members(Rank(27), Scope::Stage).expect("inside");
    assert_eq!(stage, (24..32).map(Rank).collect::<Vec<_>>());
    assert_eq!(topology.members(Rank(27), Scope::Replica).expect("inside").len(), 16);
    assert_eq!(topology.previous_stage(at), Some(Rank(8 + 3)));
    assert!(topology.coordinates(Rank(32)).is_err());
    assert_eq!(super::support::topology(1, 1, 1).owners(), 1);
}

#[test]
fn owner_classes_follow_the_kind_of_context_parallelism() {
    assert_eq!(topology(1, 4, 1).owners(), 4);
    assert_eq!(Topology::new(1, 4, 1, CpKind::Token).expect("sizes").owners(), 1);
}

#[test]
fn pages_written_into_a_list_of_the_caller_are_those_of_a_list_of_its_own() {
    for owners in [1, 3] {
        let ownership = Ownership::new(Placement::new(owners, 4).expect("sizes"));
        let (mut device, mut host) = (pool(owners, 6), pool(owners, 6));
        let (mut other_device, mut other_host) = (pool(owners, 6), pool(owners, 6));
        for pages in [3, 2, 0, 1, 4, 3, 5] {
            let start = pages % owners;
            let mut pairs = Vec::new();
            let mut lists = |list: Option<Vec<u32>>, into: &mut [u32], room: bool| {
                assert_eq!(list.is_some(), room);
                let written: &[u32] = if room { into } else { &[] };
                pairs.push((list.clone().unwrap_or_default(), written.to_vec()));
                list.unwrap_or_default()
            };
            let mut into = vec![u32::MAX; pages as usize];
            let room = other_device.alloc_cyclic_into(start, &mut into);
            let source = lists(device.alloc_cyclic(start, pages), &mut into, room);
            let mut into = vec![u32::MAX; source.len()];
            let room = ownership.allocate_backup_into(&mut other_host, &source, &mut into);
            let saved = lists(ownership.allocate_backup(&mut host, &source), &mut into, room);
            let mut into = vec![u32::MAX; saved.len()];
            let room = ownership.allocate_restore_into(&mut other_device, &saved, &mut into);
            lists(ownership.allocate_restore(&mut device, &saved), &mut into, room);
            assert!(pairs.iter().all(|(list, written)| list == written), "{pairs:?}");
            assert_eq!((device.digest(), host.digest()), (other_device.digest(), other_host.digest()));
        }
        let mut into = [u32::MAX; 40];
        assert!(!device.alloc_cyclic_into(0, &mut into), "no pool has so many pages");
        assert!(!ownership.allocate_backup_into(&mut host, &[0, 1], &mut into[..1]), "another length");
        assert!(!ownership.allocate_restore_into(&mut device, &[0, 1], &mut into[..1]), "another length");
        assert_eq!(into, [u32::MAX; 40], "nothing is written without room");
        assert_eq!((device.digest(), host.digest()), (other_device.digest(), other_host.digest()));
    }
}
