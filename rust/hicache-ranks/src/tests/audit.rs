//! The consensus checker: I17, its log and what hostile bytes do to it.

use super::support::topology;
use crate::ask::{Answer, Ask};
use crate::audit::{
    AuditLog, AuditStep, Kind, LogHeader, LogWriter, RankAudit, Record, StateDigest, Value, first_difference,
};
use crate::error::RankErrorKind;
use crate::sim::{AuditWorld, Choices, explore};
use crate::topology::Rank;
use crate::{RankError, Rules};

fn record(step: u64, name: &str, number: i64) -> Record {
    let fields = vec![Value::Int(number), Value::Text("ab".to_owned()), Value::Absent, Value::Bool(true)];
    Record { step, kind: Kind::Called, name: name.to_owned(), fields }
}

fn log(rank: u32, records: &[(&str, Record)]) -> Vec<u8> {
    let mut writer = LogWriter::new(LogHeader { rank: Rank(rank), ranks: 2, run: 77 });
    let mut bytes = Vec::new();
    for (stream, record) in records {
        writer.append(stream, record);
        bytes.extend(writer.take());
    }
    writer.flush();
    bytes.extend(writer.take());
    bytes
}

#[test]
fn i17_the_first_differing_record_is_named_exactly_or_the_silent_rank() {
    explore(&mut AuditWorld::new(Rules::ALL), 0, 1500).expect("exact");
}

#[test]
fn i17_a_rank_that_does_not_come_to_the_round_is_named() {
    let mut audit = RankAudit::new(&topology(2, 1, 1), Rank(0), 1).expect("a rank");
    audit.record(0, record(1, "evict", 5));
    assert_eq!(audit.waiting(), 1);
    assert!(matches!(audit.begin(false).expect("idle"), AuditStep::Ask(Ask::Reduce(_))));
    assert_eq!(audit.begin(false).expect_err("under way").kind(), RankErrorKind::State);
    let error = audit.resume(Answer::Expired { culprit: Rank(1) }).expect_err("late");
    assert_eq!((error.kind(), error.rank()), (RankErrorKind::Stalled, Some(Rank(1))));
    // The next round can be begun.
    assert!(audit.begin(false).is_ok());
    assert!(RankAudit::new(&topology(2, 1, 1), Rank(0), 0).is_err());
}

#[test]
fn i17_logs_are_compared_stream_by_stream_and_the_earliest_step_wins() {
    let common = [
        ("scheduler", record(1, "match", 1)),
        ("io", record(1, "read", 1)),
        ("scheduler", record(2, "evict", 3)),
    ];
    let with = |more: &[(&'static str, Record)]| [&common[..], more].concat();
    let left = with(&[
        ("io", record(9, "read", 2)),
        ("scheduler", record(5, "unlock", 1)),
        ("scheduler", record(6, "match", 2)),
    ]);
    // The io stream differs later by steps, and runs in another order among the streams.
    let right = with(&[
        ("scheduler", record(5, "unlock", 4)),
        ("scheduler", record(6, "match", 3)),
        ("io", record(9, "read", 7)),
    ]);
    let decode = |rank, records: &[(&str, Record)]| AuditLog::decode(&log(rank, records)).expect("whole");
    let logs = [decode(0, &left), decode(1, &right)];
    let found = first_difference(&logs, 3).expect("two ranks").expect("they differ");
    assert_eq!((found.stream.as_str(), found.index, found.silent()), ("scheduler", 2, None));
    assert_eq!(found.records[1].1, Some(record(5, "unlock", 4)));
    assert_eq!((found.before.len(), found.after[0].1.len()), (2, 1));
    let text = found.to_string();
    assert!(text.contains("> rank 0") && text.contains("step 5 called unlock(4, \"ab\", -, true)"), "{text}");
    // Equal logs, and one that ends early.
    assert_eq!(first_difference(&[decode(0, &left), decode(1, &left)], 3).expect("two ranks"), None);
    let short =
        first_difference(&[decode(0, &left), decode(1, &left[..5])], 3).expect("two ranks").expect("shorter");
    assert_eq!((short.silent(), short.index), (Some(Rank(1)), 3));
    assert!(short.to_string().contains("nothing more"));
    assert!(first_difference(&logs[..1], 3).is_err());
    assert!(first_difference(&[logs[0].clone(), logs[0].clone()], 3).is_err());
}

#[test]
fn i17_fields_cannot_run_into_each_other() {
    let texts =
        |a: &str, b: &str| Record { fields: vec![Value::from(a), Value::from(b)], ..record(1, "match", 1) };
    assert_ne!(texts("ab", "c").digest(Rules::ALL), texts("a", "bc").digest(Rules::ALL));
    assert_ne!(texts("ab", "c").to_bytes(), texts("a", "bc").to_bytes());
}

#[test]
fn a_log_round_trips_and_is_compact() {
    let mut fields =
        vec![Value::Int(i64::MIN), Value::Int(i64::MAX), Value::Digest(u64::MAX), Value::from(0)];
    fields.push(Value::List(vec![Value::List(vec![Value::from("x")]), Value::Bool(false)]));
    let odd = Record { step: u64::MAX, kind: Kind::Returned, name: "ä".to_owned(), fields };
    assert_eq!(Record::from_bytes(&odd.to_bytes()).expect("whole"), odd);
    let records: Vec<_> =
        (0..5000).map(|step| ("scheduler", record(step, "match", 7))).chain([("io", odd)]).collect();
    let bytes = log(1, &records);
    let read = AuditLog::decode(&bytes).expect("whole");
    assert_eq!(read.header, LogHeader { rank: Rank(1), ranks: 2, run: 77 });
    assert_eq!((read.streams["scheduler"].len(), read.streams["io"].len(), read.cut), (5000, 1, None));
    assert!(bytes.len() / records.len() < 20, "{} bytes a record", bytes.len() / records.len());
}

#[test]
fn a_log_has_these_bytes_for_ever() {
    let bytes = log(
        3,
        &[("s", Record { step: 300, kind: Kind::State, name: "n".to_owned(), fields: vec![Value::Int(-2)] })],
    );
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = concat!(
        "68636175646974000100000003000000020000004d00000000000000",
        "HEADER",
        "1200000000000000",
        "BLOCK",
        "0300016e",
        "03010173",
        "0902000002ac02010303"
    );
    let (header, block) = (&hex[56..72], &hex[88..104]);
    assert_eq!(hex, expected.replace("HEADER", header).replace("BLOCK", block));
}

#[test]
fn a_cut_or_damaged_log_gives_what_stands_before_and_never_panics() {
    let records: Vec<_> = (0..3000).map(|step| ("scheduler", record(step, "match", 7))).collect();
    let bytes = log(0, &records);
    for cut in (0..bytes.len()).step_by(101) {
        match AuditLog::decode(&bytes[..cut]) {
            Ok(log) => assert!(log.streams.values().all(|list| list.len() <= 3000)),
            Err(error) => assert!(cut < 36 && error.kind() == RankErrorKind::Corrupt, "{cut}: {error}"),
        }
    }
    let mut choices = Choices::from_seed(5);
    for _ in 0..300 {
        let mut damaged = bytes.clone();
        let at = choices.below(bytes.len() as u32) as usize;
        damaged[at] ^= 1 << choices.below(8);
        match AuditLog::decode(&damaged) {
            Ok(log) => assert!(log.cut.is_some(), "byte {at} is covered by no checksum"),
            Err(error) => assert!(at < 36, "{at}: {error}"),
        }
    }
    let newer = |bytes: &mut Vec<u8>| bytes[8] = 2;
    let mut other = bytes.clone();
    newer(&mut other);
    assert_eq!(AuditLog::decode(&other).expect_err("newer").kind(), RankErrorKind::UnsupportedVersion);
    // Records of any bytes.
    for _ in 0..2000 {
        let noise: Vec<u8> = (0..choices.below(40)).map(|_| choices.below(256) as u8).collect();
        if let Ok(record) = Record::from_bytes(&noise) {
            assert_eq!(record.to_bytes(), noise, "one record has one form");
        }
    }
}

#[test]
fn a_digest_of_state_tells_locks_order_free_lists_and_bases_apart() {
    let mut state = StateDigest::default();
    let empty = state.combined();
    state.lock(5);
    state.lock(5);
    let locked = state.combined();
    state.unlock(5);
    assert_ne!(state.combined(), locked, "locks are counted");
    state.unlock(5);
    assert_eq!(state.combined(), empty);
    state.base(3, 1);
    assert_ne!(state.combined(), empty);
    state.base(3, 1);
    assert_eq!(state.combined(), empty);
    let touched = |nodes: &[u64]| {
        let mut state = StateDigest::default();
        nodes.iter().for_each(|&node| state.touch(node));
        state.combined()
    };
    assert_ne!(touched(&[1, 2]), touched(&[2, 1]));
    state.free_lists(9);
    assert_ne!(state.combined(), empty);
    assert_eq!(state.record(4).fields.len(), 4);
}

#[test]
fn every_kind_of_error_has_a_name_of_its_own() {
    let names: std::collections::BTreeSet<_> = RankErrorKind::ALL.iter().map(|kind| kind.name()).collect();
    assert_eq!(names.len(), RankErrorKind::ALL.len());
    let error = RankError::config("a size").with("pages", 3);
    assert_eq!((error.message(), error.kind(), error.rank()), ("a size", RankErrorKind::Config, None));
}
