//! Writers of the same pages at the same time leave one copy, and there is never none.

use hicache_tests::deployment::Deployment;

use super::driver::{Backed, Worker, wait_until};
use super::ledger::live_copies;
use crate::support::fast_folder;

const WRITERS: usize = 8;
const PAGE: u32 = 16 << 10;
const PAGES: usize = 8;

#[test]
fn eight_writers_of_one_chain_leave_one_copy_of_each_page() {
    let folder = fast_folder();
    let root = folder.path().join("root");
    let options = format!("page={PAGE} capacity={} threads=1", 16 << 20);
    let mut reader = Worker::start(&root, &options);
    let mut writers: Vec<Worker> = (0..WRITERS).map(|_| Worker::start(&root, &options)).collect();
    let deployment = Deployment::whole(PAGE);
    for chain in 0..3 {
        // Every one has written all and told nothing: none knows of the others.
        for writer in &mut writers {
            writer.ask("arm frame stop", "armed");
            writer.tell(&format!("backup {chain} 0 {PAGES}"));
        }
        writers.iter_mut().for_each(Worker::wait_until_stopped);
        assert_eq!(reader.matched(chain, PAGES), 0);
        writers.iter().for_each(Worker::go_on);
        for writer in &mut writers {
            assert_eq!(Backed::parse(&writer.answer("backed")).letters, "s".repeat(PAGES));
            assert_eq!(reader.matched(chain, PAGES), PAGES, "one has published");
        }
        let (mut looks, mut most) = (0, 0);
        let mut look = |reader: &mut Worker| {
            let copies = live_copies(&root, &deployment, chain, PAGES);
            assert!(copies.iter().all(|&copies| copies >= 1), "a page without a copy: {copies:?}");
            assert_eq!(reader.matched(chain, PAGES), PAGES);
            assert_eq!(reader.restore(chain, 0..PAGES).replace('v', "r"), "r".repeat(PAGES));
            looks += 1;
            most = most.max(copies.iter().copied().max().unwrap());
            copies.iter().all(|&copies| copies == 1)
        };
        wait_until("one copy of each page stays", || look(&mut reader));
        for _ in 0..20 {
            assert!(look(&mut reader), "it stays at one");
        }
        println!("chain {chain}: from {most} copies to one, in {looks} looks");
    }
    for writer in writers {
        writer.close();
    }
    assert_eq!(live_copies(&root, &deployment, 0, PAGES), [1; PAGES]);
    let mut late = Worker::start(&root, &options);
    assert_eq!(late.restore(0, 0..PAGES), "r".repeat(PAGES));
}
