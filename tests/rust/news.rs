//! `journal/news` spares look-ups a look at every journal, and nothing hangs on it.

use std::path::Path;
use std::time::{Duration, Instant};

use hicache_core::inspect::scan;
use hicache_core::{RestoreOutcome, View};

use crate::support::{Memory, backup, fast_folder, files_ending, keys, open, page_bytes, restore, tiny_view};

fn matched(view: &View, chain: &str) -> usize {
    view.match_prefix(&keys(chain, 1)).unwrap().pages
}

fn page(view: &View, number: u64) -> Memory {
    Memory::of(&page_bytes(number, view.page_bytes(0) as usize))
}

/// Takes the file away and puts something else under its name.
type Spoil = fn(&Path);

const SPOILS: [(&str, Spoil); 6] = [
    ("nothing", |_| {}),
    ("an empty file", |news| std::fs::write(news, b"").unwrap()),
    ("too few bytes", |news| std::fs::write(news, b"abc").unwrap()),
    ("other bytes", |news| std::fs::write(news, [7; 64]).unwrap()),
    ("a folder", |news| std::fs::create_dir(news).unwrap()),
    ("a link to itself", |news| std::os::unix::fs::symlink("news", news).unwrap()),
];

#[test]
fn what_nobody_tells_of_is_restored_at_once_and_matched_soon() {
    for (what, spoil) in SPOILS {
        let folder = fast_folder();
        let (here, there) = (open(folder.path()), open(folder.path()));
        let (writer, reader) = (tiny_view(&here), tiny_view(&there));
        backup(&writer, &keys("first", 1), &page(&writer, 1));
        assert_eq!(matched(&reader, "first"), 1);

        let news = folder.path().join("journal/news");
        std::fs::remove_file(&news).unwrap();
        spoil(&news);
        backup(&writer, &keys("second", 1), &page(&writer, 2));
        // It looks at the journals, whatever the file says.
        let memory = Memory::canary(page(&reader, 2).bytes().len());
        let report = restore(&reader, &keys("second", 1), &memory);
        assert_eq!(report.outcomes, [RestoreOutcome::Restored], "{what}");
        assert_eq!(memory.bytes(), page(&reader, 2).bytes(), "{what}");

        backup(&writer, &keys("third", 1), &page(&writer, 3));
        let patience = Instant::now() + Duration::from_secs(30);
        while matched(&reader, "third") == 0 {
            assert!(Instant::now() < patience, "{what}: never seen");
        }
    }
}

#[test]
fn the_file_is_one_of_the_stores_and_is_never_told_alike_twice() {
    let folder = fast_folder();
    let (here, there) = (open(folder.path()), open(folder.path()));
    let views = [tiny_view(&here), tiny_view(&there)];
    let mut seen = std::collections::HashSet::new();
    for number in 0..20 {
        backup(&views[number % 2], &keys(&format!("chain {number}"), 1), &page(&views[0], number as u64));
        assert!(seen.insert(std::fs::read(folder.path().join("journal/news")).unwrap()), "{number}");
    }
    assert_eq!(files_ending(folder.path(), "news").len(), 1);
    assert!(seen.iter().all(|bytes| bytes.len() == 8));
    assert_eq!(scan(folder.path()).unwrap().problems.len(), 0);
}
