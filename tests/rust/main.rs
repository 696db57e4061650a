//! Integration tests, one promise a module.

mod key_vectors;
mod tiles;
