//! Containers with process numbers of their own share a root: every first process of one is number 1.

use super::driver::{Worker, wait_until};
use crate::support::{fast_folder, files_ending};

const OPTIONS: &str = "page=16384 capacity=16777216 threads=1";

#[test]
fn processes_that_all_are_number_one_share_a_root() {
    let tried = std::process::Command::new("unshare").args(["--pid", "--fork", "true"]).output();
    if !tried.as_ref().is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: no process namespace can be made here: {tried:?}");
        return;
    }
    let folder = fast_folder();
    let root = folder.path().join("root");
    let mut first = Worker::start_as_number_one(&root, OPTIONS);
    let mut second = Worker::start_as_number_one(&root, OPTIONS);
    assert_ne!(first.process, second.process);
    assert_eq!((first.backup(1, 0..4), second.backup(2, 0..4)), ("ssss".into(), "ssss".into()));
    for worker in [&mut first, &mut second] {
        assert_eq!((worker.restore(1, 0..4), worker.restore(2, 0..4)), ("rrrr".into(), "rrrr".into()));
    }
    // A third one opens and finishes the dead, of which there is none: both go on.
    let mut third = Worker::start_as_number_one(&root, OPTIONS);
    assert_eq!((first.backup(1, 4..6), second.backup(2, 4..6)), ("ss".into(), "ss".into()));
    first.kill();
    assert_eq!(second.backup(3, 0..4), "ssss");
    assert_eq!((third.restore(1, 0..6), third.restore(3, 0..4)), ("rrrrrr".into(), "rrrr".into()));
    let has_lock = |process: &str| {
        files_ending(&root, ".lock").iter().any(|path| path.to_string_lossy().contains(process))
    };
    wait_until("the dead one is finished", || !has_lock(&first.process));
    assert!(has_lock(&second.process), "a living process was taken for dead");
    assert_eq!(second.restore(1, 0..6), "rrrrrr");
}
