//! Integration tests, one promise a module.

mod bad_input;
mod budget;
mod cli;
mod conversions;
mod deadline;
mod eviction;
mod eviction_policy;
mod format_golden;
mod hostile_store;
mod identity;
mod io_faults;
mod journals;
mod key_vectors;
mod layerwise;
mod layouts;
mod many_processes;
mod namespaces;
mod news;
mod per_call;
mod plans;
mod readiness;
mod sglang_options;
mod store_round_trip;
mod support;
mod tiles;
mod transfer;
