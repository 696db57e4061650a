//! Integration tests, one promise a module.

mod bad_input;
mod cli;
mod conversions;
mod format_golden;
mod hostile_store;
mod identity;
mod io_faults;
mod key_vectors;
mod layouts;
mod namespaces;
mod plans;
mod readiness;
mod store_round_trip;
mod support;
mod tiles;
