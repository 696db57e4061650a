//! What one process has done, every other one knows at its very next call.

use hicache_tests::deployment::{Deployment, keys};

use super::driver::{Worker, sized};
use crate::support::{fast_folder, flip, object};

const CAPACITY: u64 = 16 << 20;

fn two(root: &std::path::Path, page: u64) -> [Worker; 2] {
    let options = format!("page={page} capacity={CAPACITY}");
    [Worker::start(root, &options), Worker::start(root, &options)]
}

#[test]
fn a_published_page_is_a_hit_in_the_next_call_of_another_process() {
    let folder = fast_folder();
    let [mut here, mut there] = two(&folder.path().join("root"), 4096);
    for chain in 0..sized(200, 2000) {
        let (from, to) = if chain % 2 == 0 { (&mut here, &mut there) } else { (&mut there, &mut here) };
        assert_eq!(to.matched(chain, 2), 0);
        assert_eq!(from.backup(chain, 0..2), "ss");
        assert_eq!(to.matched(chain, 2), 2, "chain {chain}");
        assert_eq!(to.restore(chain, 0..2), "rr");
        assert_eq!(to.backup(chain, 0..2), "pp");
    }
}

#[test]
fn a_quarantined_page_is_a_miss_in_the_next_call_of_another_process() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let [mut here, mut there] = two(&root, 4096);
    for chain in 0..20 {
        assert_eq!(here.backup(chain, 0..4), "ssss");
        let damaged = object(&root, &keys(chain, 3)[2]);
        flip(&damaged.segment, damaged.payload.start + 7, 1);
        assert_eq!(there.matched(chain, 4), 4, "nobody knows yet");
        assert_eq!(here.restore(chain, 0..4), "rrdr");
        assert_eq!(there.matched(chain, 4), 2, "chain {chain}");
        // Stored again by the other, and known at once here.
        assert_eq!(there.backup(chain, 0..4), "ppsp");
        assert_eq!(here.matched(chain, 4), 4);
    }
}

#[test]
fn a_cleared_namespace_is_empty_in_the_next_call_of_another_process() {
    let folder = fast_folder();
    let [mut here, mut there] = two(&folder.path().join("root"), 4096);
    for chain in 0..20 {
        assert_eq!(here.backup(chain, 0..2), "ss");
        assert_eq!(there.matched(chain, 2), 2);
        here.ask("clear", "cleared");
        assert_eq!(there.matched(chain, 2), 0, "chain {chain}");
        assert_eq!(there.restore(chain, 0..2), "aa");
        assert_eq!(there.backup(chain, 0..2), "ss");
        assert_eq!(here.matched(chain, 2), 2);
    }
}

#[test]
fn an_evicted_page_is_a_miss_in_the_next_call_of_another_process() {
    let folder = fast_folder();
    let page = Deployment::whole(64 << 10).page_bytes.into();
    let [mut here, mut there] = two(&folder.path().join("root"), page);
    let mut seen = 0;
    for chain in 0..200 {
        assert_eq!(here.backup(chain, 0..8), "ssssssss", "chain {chain}");
        // The oldest chains are the first to go.
        let oldest: Vec<u64> = (chain.saturating_sub(40)..chain).take(16).collect();
        let before: Vec<usize> = oldest.iter().map(|&chain| here.matched(chain, 8)).collect();
        let other: Vec<usize> = oldest.iter().map(|&chain| there.matched(chain, 8)).collect();
        assert_eq!(before, other, "after chain {chain}");
        seen += before.iter().filter(|&&pages| pages < 8).count();
    }
    assert!(seen > 100, "{seen} evicted chains seen");
}
