//! The `hicache-store` program; everything is in the library.
#![forbid(unsafe_code)]

use std::process::exit;

fn main() {
    let args: Vec<_> = std::env::args_os().collect();
    exit(hicache_cli::run(&args, &mut std::io::stdout(), &mut std::io::stderr()))
}
