//! Random topologies: every cell of every page is written by exactly one rank.

use super::{Choices, Run, Violation, World};
use crate::rules::Rules;
use crate::topology::{CpKind, Rank, Topology};
use crate::writer::{Pages, Spread};

/// The writer world.
#[derive(Debug)]
pub struct WriterWorld {
    rules: Rules,
}

impl WriterWorld {
    /// A world with these rules.
    pub fn new(rules: Rules) -> WriterWorld {
        WriterWorld { rules }
    }
}

impl World for WriterWorld {
    fn name(&self) -> String {
        "writers".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        let fail = |error: crate::RankError| Violation::new("I19", error.to_string());
        let (pp, cp) = (1 + choices.below(3), 1 + choices.below(3));
        let kinds = [CpKind::Page, CpKind::Layer, CpKind::Token, CpKind::Replicated];
        let kind = kinds[choices.below(4) as usize];
        let (tp, heads): (u32, u32) = (1 << choices.below(4), 1 << choices.below(4));
        let dcp = 1 << choices.below(tp.ilog2() + 1);
        let topology =
            Topology::new(pp, cp, tp, kind).and_then(|topology| topology.with_dcp(dcp)).map_err(fail)?;
        // Enough layers that no part is empty.
        let layers = pp * cp + choices.below(5);
        let spread = Spread::even(layers, pp, heads).map_err(fail)?.with_rules(self.rules);
        let lanes = topology.cp() * dcp;
        let classes = topology.owners();
        let cell = |page: u32, layer: u32, head: u32, token: u32| {
            (((page * layers + layer) * heads + head) * lanes + token) as usize
        };
        let mut written = vec![0u32; (classes * layers * heads * lanes) as usize];
        for rank in (0..topology.ranks()).map(Rank) {
            let holding =
                spread.holding(&topology, topology.coordinates(rank).map_err(fail)?).map_err(fail)?;
            let writes = spread.is_writer(&topology, rank).map_err(fail)?;
            for page in (0..classes).filter(|&page| match holding.pages {
                Pages::All => true,
                Pages::OwnedBy(owner) => owner == page,
            }) {
                for layer in holding.layers.start..holding.layers.end {
                    for head in holding.heads.start..holding.heads.end {
                        let tokens = (holding.tokens.lane..lanes).step_by(holding.tokens.lanes as usize);
                        for token in tokens {
                            written[cell(page, layer, head, token)] += u32::from(writes);
                        }
                    }
                }
            }
        }
        match written.iter().position(|&written| written != 1) {
            Some(at) => {
                let message = format!("{topology:?}, {heads} heads: cell {at} has {} writers", written[at]);
                Err(Violation::new("I19", message))
            }
            None => Ok(()),
        }
    }
}
