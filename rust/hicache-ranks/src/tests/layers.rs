//! Order of loads, gathers and reads, and their scratch: I5 to I7.

use crate::Rules;
use crate::error::RankErrorKind;
use crate::layer_gate::{Edge, LayerGate, Tenant};
use crate::placement::Placement;
use crate::scratch::{Room, ScratchBudget, ScratchSize};
use crate::sim::{ScratchWorld, StreamWorld, explore};

#[test]
fn i05_nothing_is_read_before_it_was_loaded_and_gathered_in_any_schedule() {
    explore(&mut StreamWorld::new(Rules::ALL), 0, 1000).expect("in order");
    let mut gate = LayerGate::new(4).expect("layers");
    let at = |layer| Tenant { epoch: 0, layer };
    let gathers: Vec<_> = (0..4).map(|_| gate.gather()).collect();
    assert_eq!(gathers[0].waits, [Edge::Loaded(at(0))]);
    assert_eq!(gathers[3].waits, [Edge::Loaded(at(3)), Edge::ReadEnded(at(1))]);
    assert_eq!(gate.read(at(3)).expect("live"), [Edge::Gathered(at(3))]);
}

#[test]
fn i06_two_adjacent_layers_are_live_also_where_one_pass_ends() {
    let mut gate = LayerGate::new(3).expect("layers");
    let mut slots = Vec::new();
    let mut before: Option<Tenant> = None;
    for _ in 0..7 {
        let gather = gate.gather();
        assert!(gate.read(gather.tenant).is_ok());
        assert!(before.is_none_or(|before| gate.read(before).is_ok()));
        before = Some(gather.tenant);
        slots.push(gather.slot);
    }
    assert_eq!(slots, [0, 1, 0, 1, 0, 1, 0], "an odd number of layers does not put two into one slot");
    let error = gate.read(Tenant { epoch: 0, layer: 1 }).expect_err("long gone");
    assert_eq!(error.kind(), RankErrorKind::Ownership);
    assert!(LayerGate::new(0).is_err());
}

#[test]
fn i07_scratch_is_charged_as_the_specification_counts_it() {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    for (context, plain, draft) in [(131_072, 1.39, 2.79), (202_752, 2.15, 4.30), (1_048_576, 11.07, 22.15)] {
        for owners in [4, 8] {
            let placement = Placement::new(owners, 64).expect("sizes");
            let size = ScratchSize::new(placement, 8, context, 8192).expect("sizes");
            assert!((gib(size.bytes(708, false)) - plain).abs() < 0.01, "{}", gib(size.bytes(708, false)));
            assert!((gib(size.bytes(708, true)) - draft).abs() < 0.01);
        }
    }
    assert!(ScratchSize::new(Placement::new(2, 4).expect("sizes"), 0, 8, 8).is_err());
    assert!(ScratchSize::new(Placement::new(2, 4).expect("sizes"), 2, u64::MAX, 8).is_err());
}

#[test]
fn i07_an_admitted_batch_fits_and_nothing_is_loaded_without_a_reservation() {
    explore(&mut ScratchWorld::new(Rules::ALL), 0, 1000).expect("fits");
    let size = ScratchSize::new(Placement::new(4, 4).expect("sizes"), 2, 64, 16).expect("sizes");
    assert_eq!((size.rows(), size.prefix_tokens(), size.padded(5)), (128 + 16 + 4, 128, 32));
    let mut budget = ScratchBudget::new(size);
    let mark = budget.mark();
    assert_eq!(budget.reserve(16, 4).expect("fits alone"), Room::Granted);
    assert_eq!(budget.reserve(13, 4).expect("fits alone"), Room::Granted);
    assert_eq!(budget.reserve(1, 4).expect("fits alone"), Room::Full);
    budget.rollback(mark);
    assert_eq!(budget.used(), (0, 0));
    // What would not fit in an empty batch never will.
    assert_eq!(budget.reserve(40, 4).expect_err("too long").kind(), RankErrorKind::Config);
    assert_eq!(budget.reserve(0, 17).expect_err("too long").kind(), RankErrorKind::Config);
}
