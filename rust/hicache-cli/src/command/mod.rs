//! The commands, one file each.

mod archive;
mod clear;
mod differ;
mod explain;
mod export;
mod import;
mod ls;
mod probe;
mod prune;
mod ranks;
mod repair;
mod resize;
mod sglang_config;
mod stat;
mod verify;

use clap::Subcommand;

use crate::failure::Done;
use crate::output::Output;

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    Ls(ls::Ls),
    Stat(stat::Stat),
    Verify(verify::Verify),
    Explain(explain::Explain),
    Clear(clear::Clear),
    Export(export::Export),
    Import(import::Import),
    Prune(prune::Prune),
    Repair(repair::Repair),
    Resize(resize::Resize),
    Probe(probe::Probe),
    Ranks(ranks::Ranks),
    SglangConfig(sglang_config::SglangConfig),
}

impl Command {
    /// Does it.
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        match self {
            Command::Ls(command) => command.run(output),
            Command::Stat(command) => command.run(output),
            Command::Verify(command) => command.run(output),
            Command::Explain(command) => command.run(output),
            Command::Clear(command) => command.run(output),
            Command::Export(command) => command.run(output),
            Command::Import(command) => command.run(output),
            Command::Prune(command) => command.run(output),
            Command::Repair(command) => command.run(output),
            Command::Resize(command) => command.run(output),
            Command::Probe(command) => command.run(output),
            Command::Ranks(command) => command.run(output),
            Command::SglangConfig(command) => command.run(output),
        }
    }
}
