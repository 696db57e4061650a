//! Pages under ownership: chains, branches, backup, eviction, restore and gather with real content.

use super::{Choices, Run, Violation, World};
use crate::chain::{Base, Ownership, Splice};
use crate::classed_pool::{ClassedPool, Run as PageRun};
use crate::error::RankError;
use crate::placement::{Page, Placement};
use crate::rules::Rules;

/// A piece of a path.
#[derive(Debug, Clone)]
struct Piece {
    parent: Option<usize>,
    position: u32,
    base: Base,
    pages: u32,
    device: Option<Vec<Page>>,
    host: Option<Vec<Page>>,
    /// Owners when it was computed.
    owners: Vec<u32>,
}

/// Random steps over one pair of pools.
#[derive(Debug)]
pub struct OwnershipWorld {
    rules: Rules,
    owners: u32,
    pieces: Vec<Option<Piece>>,
    /// Content of the owners' rows, by tier, owner and local page.
    rows: [Vec<Vec<u32>>; 2],
}

const DEVICE: usize = 0;
const HOST: usize = 1;
const PER_CLASS: u32 = 10;

fn broken(error: RankError) -> Violation {
    Violation::new("I3", error.to_string())
}

impl OwnershipWorld {
    /// A world with these rules.
    pub fn new(rules: Rules) -> OwnershipWorld {
        OwnershipWorld { rules, owners: 1, pieces: Vec::new(), rows: [Vec::new(), Vec::new()] }
    }

    fn tag(piece: usize, page: usize) -> u32 {
        (piece * 64 + page + 1) as u32
    }

    fn row(&mut self, tier: usize, page: Page) -> &mut u32 {
        &mut self.rows[tier][(page % self.owners) as usize][(page / self.owners) as usize]
    }

    fn pick(&self, choices: &mut Choices, wanted: impl Fn(&Piece) -> bool) -> Option<usize> {
        let fitting: Vec<usize> =
            (0..self.pieces.len()).filter(|&at| self.pieces[at].as_ref().is_some_and(&wanted)).collect();
        (!fitting.is_empty()).then(|| fitting[choices.below(fitting.len() as u32) as usize])
    }

    fn add(&mut self, parent: Option<usize>, base: Base, position: u32, pages: Vec<Page>) {
        let number = self.pieces.len();
        for (place, &page) in pages.iter().enumerate() {
            *self.row(DEVICE, page) = OwnershipWorld::tag(number, place);
        }
        let owners = pages.iter().map(|page| page % self.owners).collect();
        let count = pages.len() as u32;
        let device = Some(pages);
        self.pieces.push(Some(Piece { parent, position, base, pages: count, device, host: None, owners }));
    }

    fn copy(&mut self, ownership: &Ownership, from: usize, source: &[Page], target: &[Page]) -> Run {
        for owner in 0..self.owners {
            for (old, new) in ownership.own_share(owner, source, target).map_err(broken)? {
                // Each rank addresses its own rows by local number, whoever owns the page.
                let content = self.rows[from][owner as usize][(old / self.owners) as usize];
                self.rows[1 - from][owner as usize][(new / self.owners) as usize] = content;
            }
        }
        Ok(())
    }

    fn path(&self, piece: usize) -> Option<Vec<(usize, Page)>> {
        let mut pieces = vec![piece];
        while let Some(parent) = self.pieces[*pieces.last()?].as_ref()?.parent {
            pieces.push(parent);
        }
        let mut path = Vec::new();
        for &number in pieces.iter().rev() {
            path.extend(self.pieces[number].as_ref()?.device.as_ref()?.iter().map(|&page| (number, page)));
        }
        Some(path)
    }

    fn check_gather(&mut self, ownership: &Ownership, choices: &mut Choices) -> Run {
        let mut prefixes = Vec::new();
        for _ in 0..2 {
            let piece = self.pick(choices, |piece| piece.device.is_some());
            prefixes.extend(piece.and_then(|piece| self.path(piece)));
        }
        let pages: Vec<Vec<Page>> =
            prefixes.iter().map(|path| path.iter().map(|(_, page)| *page).collect()).collect();
        let lists: Vec<&[Page]> = pages.iter().map(Vec::as_slice).collect();
        let plan = ownership.gather(&lists).map_err(|error| Violation::new("I2", error.to_string()))?;
        let distinct: std::collections::BTreeSet<Page> = pages.iter().flatten().copied().collect();
        let sent = (0..self.owners).flat_map(|owner| plan.send(owner)).flatten().count();
        if sent != distinct.len() {
            let message = format!("{sent} pages are gathered of {} different ones", distinct.len());
            return Err(Violation::new("I2", message));
        }
        let mut scratch = Vec::new();
        for owner in 0..self.owners {
            for page in plan.send(owner) {
                scratch.push(page.map_or(0, |page| *self.row(DEVICE, page)));
            }
        }
        if scratch.len() != plan.scratch_pages() as usize {
            let message = format!("{} pages gathered, {} planned", scratch.len(), plan.scratch_pages());
            return Err(Violation::new("I2", message));
        }
        for path in &prefixes {
            let mut places = std::collections::BTreeMap::new();
            for &(piece, page) in path {
                let place = places.entry(piece).or_insert(0usize);
                let found = plan.scratch_page(page).and_then(|at| scratch.get(at as usize)).copied();
                if found != Some(OwnershipWorld::tag(piece, *place)) {
                    let message = format!("page {page} of piece {piece} is gathered as {found:?}");
                    return Err(Violation::new("I3", message));
                }
                *place += 1;
            }
        }
        Ok(())
    }

    fn check(&self, device: &ClassedPool, host: &ClassedPool) -> Run {
        let (mut on_device, mut on_host) = (0, 0);
        for piece in self.pieces.iter().flatten() {
            for (tier, pages) in [("device", &piece.device), ("host", &piece.host)] {
                let Some(pages) = pages else { continue };
                let owners: Vec<u32> = pages.iter().map(|page| page % self.owners).collect();
                if owners != piece.owners {
                    let message = format!("{tier}: owners {owners:?} of a piece of {:?}", piece.owners);
                    return Err(Violation::new("I3", message));
                }
            }
            let root = self.root_base(piece);
            let cyclic = (0..piece.pages).map(|at| root.owner_at(piece.position + at, self.owners));
            if !cyclic.eq(piece.owners.iter().copied()) {
                let message = format!("owners {:?} at {} of base {root:?}", piece.owners, piece.position);
                return Err(Violation::new("I2", message));
            }
            on_device += piece.device.as_ref().map_or(0, Vec::len);
            on_host += piece.host.as_ref().map_or(0, Vec::len);
        }
        for (tier, pool, held) in [("device", device, on_device), ("host", host, on_host)] {
            if pool.free_pages() as usize + held != pool.total() as usize {
                let message = format!("{tier}: {} free, {held} held of {}", pool.free_pages(), pool.total());
                return Err(Violation::new("I15", message));
            }
        }
        Ok(())
    }

    fn root_base(&self, piece: &Piece) -> Base {
        let mut piece = piece;
        while let Some(parent) = piece.parent.and_then(|parent| self.pieces[parent].as_ref()) {
            piece = parent;
        }
        piece.base
    }

    fn step(
        &mut self,
        ownership: &Ownership,
        device: &mut ClassedPool,
        host: &mut ClassedPool,
        choices: &mut Choices,
    ) -> Run {
        let live = |piece: &Piece| piece.device.is_some();
        match choices.below(8) {
            0 => {
                let base = ownership.new_chain(device);
                if let Some(pages) = device.alloc_cyclic(base.owner_at(0, self.owners), 1 + choices.below(6))
                {
                    self.add(None, base, 0, pages);
                }
            }
            1 | 2 => {
                let Some(parent) = self.pick(choices, live) else { return Ok(()) };
                let Some(above) = self.pieces[parent].clone() else { return Ok(()) };
                let position = above.position + above.pages;
                let base = ownership.extension(above.base, device);
                let start = base.owner_at(position, self.owners);
                if let Some(pages) = device.alloc_cyclic(start, 1 + choices.below(5)) {
                    self.add(Some(parent), base, position, pages);
                }
            }
            3 => {
                let Some(number) = self.pick(choices, |piece| live(piece) && piece.host.is_none()) else {
                    return Ok(());
                };
                let Some(source) = self.pieces[number].as_ref().and_then(|piece| piece.device.clone()) else {
                    return Ok(());
                };
                if let Some(target) = ownership.allocate_backup(host, &source) {
                    self.copy(ownership, DEVICE, &source, &target)?;
                    if let Some(piece) = &mut self.pieces[number] {
                        piece.host = Some(target);
                    }
                }
            }
            4 => {
                let Some(number) = self.pick(choices, |piece| live(piece) && piece.host.is_some()) else {
                    return Ok(());
                };
                if let Some(pages) = self.pieces[number].as_mut().and_then(|piece| piece.device.take()) {
                    device.free(&pages).map_err(broken)?;
                    for page in pages {
                        *self.row(DEVICE, page) = 0;
                    }
                }
            }
            5 => {
                let Some(number) = self.pick(choices, |piece| !live(piece)) else { return Ok(()) };
                let Some(source) = self.pieces[number].as_ref().and_then(|piece| piece.host.clone()) else {
                    return Ok(());
                };
                if let Some(target) = ownership.allocate_restore(device, &source) {
                    self.copy(ownership, HOST, &source, &target)?;
                    if let Some(piece) = &mut self.pieces[number] {
                        piece.device = Some(target);
                    }
                }
            }
            6 => {
                // A chain computed apart from the tree, with a base of its own, lands below a cached path.
                let Some(parent) = self.pick(choices, live) else { return Ok(()) };
                let Some(above) = self.pieces[parent].clone() else { return Ok(()) };
                let base = Base(choices.below(self.owners));
                let position = above.position + above.pages;
                let start = base.owner_at(position, self.owners);
                let Some(pages) = device.alloc_cyclic(start, 1 + choices.below(3)) else { return Ok(()) };
                match ownership.splice(self.root_base(&above), base) {
                    Splice::Accepted => self.add(Some(parent), base, position, pages),
                    Splice::Declined => device.free(&pages).map_err(broken)?,
                }
            }
            _ => {
                let run = |choices: &mut Choices| PageRun {
                    start: choices.below(self.owners),
                    pages: 1 + choices.below(PER_CLASS * self.owners / 2),
                };
                let runs = [run(choices), run(choices), run(choices)];
                if let Some(batch) = device.alloc_batch(&runs) {
                    for pages in batch {
                        device.free(&pages).map_err(broken)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl World for OwnershipWorld {
    fn name(&self) -> String {
        "ownership".to_owned()
    }

    fn run(&mut self, choices: &mut Choices) -> Run {
        self.owners = [2, 3, 4, 8][choices.below(4) as usize];
        let placement = Placement::new(self.owners, 64).map_err(broken)?;
        let pool = || ClassedPool::new(placement, PER_CLASS).map(|pool| pool.with_rules(self.rules, false));
        let (mut device, mut host) = (pool().map_err(broken)?, pool().map_err(broken)?);
        let ownership = Ownership::new(placement).with_rules(self.rules);
        let rows = vec![vec![0; PER_CLASS as usize]; self.owners as usize];
        self.rows = [rows.clone(), rows];
        self.pieces.clear();
        for _ in 0..40 {
            self.step(&ownership, &mut device, &mut host, choices)?;
            self.check(&device, &host)?;
            self.check_gather(&ownership, choices)?;
        }
        Ok(())
    }
}
