//! Tests by promise: the invariants of the specification (`i01_` to `i25_`), its example, and cases from the field.

mod agreement;
mod audit;
mod cases;
mod layers;
mod ownership;
mod promises;
mod simulator;
mod support;
mod votes;
