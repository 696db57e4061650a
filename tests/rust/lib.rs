//! What the worker processes and the tests agree on. The integration tests live in `main.rs`.

pub mod deployment;
