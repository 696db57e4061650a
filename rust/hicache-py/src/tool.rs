//! The store tool inside the wheel: the same library as the binary's, started from Python.

use std::ffi::OsString;
use std::io::Write;

use pyo3::prelude::*;

/// Runs the store tool on a command line, program name first; its exit code.
#[pyfunction]
#[pyo3(name = "_run_tool")]
pub(crate) fn run_tool(py: Python<'_>, args: Vec<OsString>) -> i32 {
    py.detach(|| {
        let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
        let code = hicache_cli::run(&args, &mut out, &mut err);
        // The reader is gone when this fails; there is nobody left to tell.
        let _ = out.flush();
        code
    })
}
