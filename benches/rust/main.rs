//! Benchmarks of the store. Each answers one question, against the physical limit taken in the same run.
//!
//! `cargo run --release -p hicache-benches -- [index|open|io|compression|visibility|ranks-open|transfer|pools|replay [SECONDS]|replay-catalog|all]`

mod compression;
mod index;
mod io;
mod measure;
mod open;
mod pools;
mod ranks;
mod replay;
mod transfer;
mod visibility;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["open-child", root, chains] => open::child(root, chains.parse().expect("a number of chains")),
        ["visibility-child", root, page_bytes] => {
            visibility::child(root, page_bytes.parse().expect("bytes of a page"), false);
        }
        ["visibility-onlooker", root, page_bytes] => {
            visibility::child(root, page_bytes.parse().expect("bytes of a page"), true);
        }
        ["ranks-fill-child", root, rank] => ranks::fill_child(root, rank.parse().expect("a rank")),
        ["ranks-open-child", root, rank] => ranks::open_child(root, rank.parse().expect("a rank")),
        ["index"] => index::run(),
        ["open"] => open::run(),
        ["io"] => io::run(),
        ["compression"] => compression::run(),
        ["ranks-open"] => ranks::run(),
        ["replay"] => replay::run_store(None),
        ["replay", seconds] => replay::run_store(Some(seconds.parse().expect("seconds for each trace"))),
        ["replay-catalog"] => replay::run_catalog(),
        ["visibility"] => visibility::run(),
        ["transfer"] => transfer::run(),
        ["pools"] => pools::run(),
        [] | ["all"] => {
            index::run();
            open::run();
            io::run();
            compression::run();
            visibility::run();
            ranks::run();
            transfer::run();
            pools::run();
            replay::run_store(None);
        }
        _ => {
            eprintln!(
                "expected one of index, open, io, compression, visibility, ranks-open, transfer, pools, replay [SECONDS], replay-catalog, all; found {arguments:?}"
            );
            std::process::exit(2);
        }
    }
}
