//! The store tool inside the wheel: the same library as the binary's, started from Python.

use std::ffi::OsString;
use std::io::Write;

use pyo3::prelude::*;

use crate::errors::Failure;

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

/// Reads the options of the SGLang storage backend.
#[pyfunction]
#[pyo3(name = "_sglang_options")]
pub(crate) fn sglang_options<'py>(py: Python<'py>, text: &str) -> Result<Bound<'py, PyAny>, Failure> {
    let options = hicache_cli::sglang_options::parse(text).map_err(hicache_core::Error::config)?;
    let text = serde_json::Value::Object(options).to_string();
    Ok(py.import("json")?.call_method1("loads", (text,))?)
}
