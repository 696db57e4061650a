//! Integration tests, one promise a module.
