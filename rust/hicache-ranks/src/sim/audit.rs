//! Ranks that record equal streams, except for one planted difference or one rank that falls silent.

use super::{Choices, Run, Violation, World};
use crate::ask::{Answer, Ask};
use crate::audit::{AuditStep, Kind, RankAudit, Record, Value, Verdict};
use crate::rules::Rules;
use crate::topology::{CpKind, Topology};
use crate::vote::combine;

const RANKS: usize = 3;
const STREAMS: usize = 2;
const RECORDS: u32 = 40;

/// What is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plant {
    Nothing,
    /// Another number in one record of one rank.
    Field {
        rank: usize,
        stream: usize,
        index: u32,
    },
    /// The same characters, cut into fields elsewhere.
    Cut {
        rank: usize,
        stream: usize,
        index: u32,
    },
    /// No record from here on.
    Silence {
        rank: usize,
        stream: usize,
        index: u32,
    },
}

/// The checker's world.
#[derive(Debug)]
pub struct AuditWorld {
    rules: Rules,
}

impl AuditWorld {
    /// A world with these rules.
    pub fn new(rules: Rules) -> AuditWorld {
        AuditWorld { rules }
    }
}

fn record(plant: Plant, rank: usize, stream: usize, index: u32) -> Record {
    let text = |text: &str| Value::Text(text.to_owned());
    let mut fields = vec![Value::Int(i64::from(index)), text("ab"), text("c")];
    match plant {
        Plant::Field { rank: r, stream: s, index: i } if (r, s, i) == (rank, stream, index) => {
            fields[0] = Value::Int(-1);
        }
        Plant::Cut { rank: r, stream: s, index: i } if (r, s, i) == (rank, stream, index) => {
            (fields[1], fields[2]) = (text("a"), text("bc"));
        }
        _ => {}
    }
    let name = if stream == 0 { "evict" } else { "prefetch" };
    Record { step: u64::from(index), kind: Kind::Called, name: name.to_owned(), fields }
}

/// One round on all ranks; the verdict must be the same everywhere.
fn round(audits: &mut [RankAudit], overdue: bool) -> Result<Verdict, Violation> {
    let fail = |error: crate::RankError| Violation::new("I17", error.to_string());
    let mut steps = Vec::new();
    for audit in audits.iter_mut() {
        steps.push(audit.begin(overdue).map_err(fail)?);
    }
    loop {
        let mut agreed: Option<Vec<i64>> = None;
        let mut verdicts = Vec::new();
        for step in &steps {
            match step {
                AuditStep::Ask(Ask::Reduce(reduce)) => match &mut agreed {
                    None => agreed = Some(reduce.values.clone()),
                    Some(values) => combine(reduce.op, values, &reduce.values).map_err(fail)?,
                },
                AuditStep::Ask(_) => {}
                AuditStep::Done(verdict) => verdicts.push(verdict.clone()),
            }
        }
        if verdicts.len() == steps.len() {
            let verdict = verdicts.swap_remove(0);
            return match verdicts.iter().all(|other| *other == verdict) {
                true => Ok(verdict),
                false => Err(Violation::new("I17", "ranks report different things")),
            };
        }
        steps.clear();
        for audit in audits.iter_mut() {
            let answer = Answer::Values(agreed.clone().unwrap_or_default());
            steps.push(audit.resume(answer).map_err(fail)?);
        }
    }
}

impl World for AuditWorld {
    fn name(&self) -> String {
        "audit".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        let fail = |error: crate::RankError| Violation::new("I17", error.to_string());
        let topology = Topology::new(RANKS as u32, 1, 1, CpKind::None).map_err(fail)?;
        let mut audits = Vec::new();
        for rank in 0..RANKS as u32 {
            let audit = RankAudit::new(&topology, crate::Rank(rank), STREAMS).map_err(fail)?;
            audits.push(audit.with_rules(self.rules));
        }
        let kind = choices.below(4);
        let (rank, stream) = (choices.below(RANKS as u32) as usize, choices.below(STREAMS as u32) as usize);
        let index = choices.below(RECORDS);
        let plant = match kind {
            0 => Plant::Nothing,
            1 => Plant::Field { rank, stream, index },
            2 => Plant::Cut { rank, stream, index },
            _ => Plant::Silence { rank, stream, index },
        };
        // How far each rank has come in each stream: threads and ranks run as they like.
        let mut come = [[0u32; STREAMS]; RANKS];
        let total = |rank: usize, stream: usize| match plant {
            Plant::Silence { rank: r, stream: s, index } if (r, s) == (rank, stream) => index,
            _ => RECORDS,
        };
        let mut rounds_at_rest = 0;
        let verdict = loop {
            let mut moved = false;
            for _ in 0..1 + choices.below(40) {
                let (rank, stream) =
                    (choices.below(RANKS as u32) as usize, choices.below(STREAMS as u32) as usize);
                let at = come[rank][stream];
                if at < total(rank, stream) {
                    audits[rank].record(stream, record(plant, rank, stream, at));
                    come[rank][stream] += 1;
                    moved = true;
                }
            }
            let everything =
                |rank: usize| (0..STREAMS).all(|stream| come[rank][stream] == total(rank, stream));
            let rest = !moved && (0..RANKS).all(everything);
            rounds_at_rest += u32::from(rest);
            match round(&mut audits, rest)? {
                Verdict::Equal if rounds_at_rest > 3 => break Verdict::Equal,
                Verdict::Equal => {}
                verdict => break verdict,
            }
        };
        let exact = match (plant, &verdict) {
            (Plant::Nothing, Verdict::Equal) => true,
            (
                Plant::Field { rank, stream, index } | Plant::Cut { rank, stream, index },
                Verdict::Differs { stream: found, index: at, records },
            ) => {
                let texts = (0..RANKS).map(|rank| record(plant, rank, stream, index).to_string());
                (*found, *at) == (stream, u64::from(index))
                    && records.len() == RANKS
                    && records[rank].1 != records[(rank + 1) % RANKS].1
                    && texts.eq(records.iter().map(|(_, text)| text.clone()))
            }
            (
                Plant::Silence { rank, stream, index },
                Verdict::Silent { rank: who, stream: found, records, .. },
            ) => (who.0 as usize, *found, *records) == (rank, stream, u64::from(index)),
            _ => false,
        };
        if exact {
            Ok(())
        } else {
            Err(Violation::new("I17", format!("planted {plant:?}, found {verdict:?}")))
        }
    }
}
