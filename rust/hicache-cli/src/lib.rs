//! The store tool: looks at a root, verifies it, explains misses, clears, carries namespaces, probes a disk.
//!
//! The program `hicache-store` and `python -m hicache_store` are this one function, [`run`]. It owns the words
//! and the JSON that people and scripts see (`docs/cli.md`); what is read and how is `hicache_core::inspect`'s.
#![forbid(unsafe_code)]

mod command;
mod facts;
mod failure;
mod output;
pub mod sglang_options;
mod values;

use std::ffi::OsString;
use std::io::{BufRead, IsTerminal, Write};

use clap::Parser;

use crate::failure::Failure;
use crate::output::Output;

/// Exit code: everything is fine.
pub const FINE: i32 = 0;
/// Exit code: there are problems in the data.
pub const PROBLEMS: i32 = 1;
/// Exit code: the command could not be carried out.
pub const FAILED: i32 = 2;

/// Looks into a store of KV-cache pages.
///
/// Exit codes: 0 fine, 1 problems found in the data, 2 could not do it.
#[derive(Parser)]
#[command(name = "hicache-store", bin_name = "hicache-store", version, arg_required_else_help = true)]
struct Cli {
    /// One JSON document on standard output, of a documented shape.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: command::Command,
}

/// Runs the tool with `args`, the program's name first; the exit code.
///
/// Data goes to `out`, words to `err`. Questions are asked when standard input and standard error are terminals.
pub fn run(args: &[OsString], out: &mut dyn Write, err: &mut dyn Write) -> i32 {
    let on_terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let mut answers = std::io::stdin().lock();
    run_with_answers(args, out, err, if on_terminal { Some(&mut answers) } else { None })
}

/// Runs the tool like [`run`], with answers to its questions from `answers`; `None`: there is nobody to ask.
pub fn run_with_answers(
    args: &[OsString],
    out: &mut dyn Write,
    err: &mut dyn Write,
    answers: Option<&mut dyn BufRead>,
) -> i32 {
    let mut output = Output::new(out, err, answers.map(|answers| answers as &mut dyn BufRead));
    let code = match Cli::try_parse_from(args) {
        Ok(cli) => {
            output.set_json(cli.json);
            cli.command.run(&mut output).unwrap_or_else(|failure| report(&failure, &mut output))
        }
        Err(error) if !error.use_stderr() => {
            output.text(&error.to_string());
            FINE
        }
        Err(error) => report(&Failure::from(error), &mut output),
    };
    output.finish(code)
}

fn report(failure: &Failure, output: &mut Output<'_>) -> i32 {
    output.words(&format!("hicache-store: {failure}"));
    FAILED
}
