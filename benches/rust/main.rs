//! Benchmarks of the store. Each answers one question, against the physical limit taken in the same run.
//!
//! `cargo run --release -p hicache-benches -- [index|open|io|compression|all]`

mod compression;
mod index;
mod io;
mod measure;
mod open;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["open-child", root, chains] => open::child(root, chains.parse().expect("a number of chains")),
        ["index"] => index::run(),
        ["open"] => open::run(),
        ["io"] => io::run(),
        ["compression"] => compression::run(),
        [] | ["all"] => {
            index::run();
            open::run();
            io::run();
            compression::run();
        }
        _ => {
            eprintln!("expected one of index, open, io, compression, all; found {arguments:?}");
            std::process::exit(2);
        }
    }
}
