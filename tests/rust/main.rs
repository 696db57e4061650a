//! Integration tests, one promise a module.

mod identity;
mod key_vectors;
mod layouts;
mod plans;
mod tiles;
