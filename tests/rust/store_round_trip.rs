//! What was backed up comes back exactly, in this process and in the next.

use hicache_core::{BackupOutcome, RestoreOutcome};

use crate::support::{Memory, backup, keys, open, page_bytes, restore, tiny_view};

#[test]
fn pages_come_back_in_this_store_and_after_reopening() {
    let root = tempfile::tempdir().unwrap();
    let keys = keys("round trip", 8);
    let source = Memory::of(&page_bytes(1, 8 * 512));
    {
        let store = open(root.path());
        let view = tiny_view(&store);
        assert_eq!(view.match_prefix(&keys).unwrap().pages, 0);
        let report = backup(&view, &keys, &source);
        assert_eq!(report.outcomes, [BackupOutcome::Stored; 8], "{:?}", report.reason);
        assert_eq!(view.match_prefix(&keys).unwrap().pages, 8);
        let target = Memory::canary(8 * 512);
        assert_eq!(restore(&view, &keys, &target).outcomes, [RestoreOutcome::Restored; 8]);
        assert!(target.bytes() == source.bytes());
        assert_eq!(backup(&view, &keys, &source).outcomes, [BackupOutcome::Present; 8]);
    }
    let store = open(root.path());
    let view = tiny_view(&store);
    assert_eq!(view.match_prefix(&keys).unwrap().limited_by, None);
    let target = Memory::canary(8 * 512);
    assert_eq!(restore(&view, &keys, &target).outcomes, [RestoreOutcome::Restored; 8]);
    assert!(target.bytes() == source.bytes());
}
