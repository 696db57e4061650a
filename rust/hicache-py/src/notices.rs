//! The store's notices, handed to Python's `logging` after each call.

use hicache_core::Store;
use hicache_core::store::notices::{Level, Notice};
use pyo3::prelude::*;

/// Name of the logger.
const LOGGER: &str = "hicache_store";

/// Logs what waits. The interpreter lock is held here and no lock of the store is. A logging set-up that raises
/// changes no outcome: the exception goes to `sys.unraisablehook`.
pub(crate) fn log(py: Python<'_>, store: &Store) {
    let waiting = store.drain_notices();
    if waiting.is_empty() {
        return;
    }
    if let Err(error) = log_all(py, &waiting) {
        error.write_unraisable(py, None);
    }
}

fn log_all(py: Python<'_>, waiting: &[Notice]) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", (LOGGER,))?;
    for notice in waiting {
        let method = match notice.level {
            Level::Info => "info",
            Level::Warning => "warning",
        };
        logger.call_method1(method, (&notice.message,))?;
    }
    Ok(())
}
