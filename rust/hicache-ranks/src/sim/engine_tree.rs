//! The logical cache that every rank mirrors: a small prefix tree over a device and a host pool.
//!
//! Everything here is a function of the requests and of the consumed acknowledgements. What a rank does with
//! its own memory stands in `engine_rank`.

use super::Violation;
use super::copies::{NODE_PAGES, Pages};
use crate::ack::Outcome;
use crate::audit::{Kind, Record, Value};
use crate::chain::{Base, Ownership};
use crate::classed_pool::ClassedPool;
use crate::digest::{mix, scatter};
use crate::placement::Placement;
use crate::prefetch::{Prefetch, Publication, Report};
use crate::rules::{Rule, Rules};

/// Six roots; the others are branches of the first ones, so that two branches share a root.
pub(super) const NODES: usize = 16;
const ROOTS: usize = 6;

/// The branches of each root, as bits.
const CHILDREN: [u32; NODES] = {
    let mut children = [0; NODES];
    let mut node = ROOTS;
    while node < NODES {
        children[(node - ROOTS) % ROOTS] |= 1 << node;
        node += 1;
    }
    children
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Absent,
    Loading,
    Resident,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Host {
    Absent,
    Writing,
    Querying,
    Prefetching,
    Resident,
}

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub device: Device,
    pub host: Host,
    pub device_pages: Pages,
    pub host_pages: Pages,
    base: Base,
    /// Copies that read or write the device pages.
    lock: u8,
    /// Copies that read or write the host pages.
    pin: u8,
    used: u32,
    prefetch: Option<Prefetch>,
    pub terminated: bool,
}

/// What the rank is to submit.
#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    Compute { node: usize },
    Read { node: usize },
    Write { node: usize, operation: u64 },
    Load { node: usize, operation: u64 },
    Query { node: usize, operation: u64 },
}

impl Node {
    /// Pages that are being read, 0 where none are.
    pub fn prefetch_hit(&self) -> u32 {
        self.prefetch.as_ref().map_or(0, Prefetch::hit)
    }
}

pub(super) fn pages_of(node: usize) -> u32 {
    1 + (node * 7 % NODE_PAGES) as u32
}

pub(super) fn parent_of(node: usize) -> Option<usize> {
    (node >= ROOTS).then(|| (node - ROOTS) % ROOTS)
}

/// Content of page `page` of a node.
pub(super) fn tag(node: usize, page: usize) -> u32 {
    (node * 4 + page + 1) as u32
}

pub(super) fn node_of(operation: u64) -> usize {
    (operation & 0xff) as usize
}

#[derive(Debug)]
pub(super) struct Tree {
    pub nodes: Vec<Node>,
    pub device: ClassedPool,
    pub host: ClassedPool,
    pub ownership: Ownership,
    pub actions: Vec<Action>,
    clock: u32,
    sequence: u64,
    /// Submitted operations that have not been consumed.
    pub in_flight: u32,
    /// What the checker is given, where it is asked for.
    pub trace: Option<Vec<Record>>,
    pub step: u64,
    visible: u64,
    /// Nodes that changed since the digest was taken, the digest of each, and their sum.
    changed: u32,
    digests: [u64; NODES],
    digest: u64,
    rules: Rules,
}

impl Tree {
    pub fn new(
        owners: u32,
        device: u32,
        host: u32,
        rules: Rules,
        own_order: bool,
    ) -> Result<Tree, Violation> {
        let fail = |error: crate::RankError| Violation::new("I1", error.to_string());
        let placement = Placement::new(owners, 64).map_err(fail)?;
        let pool = |pages: u32| ClassedPool::new(placement, pages / owners).map_err(fail);
        let node = Node {
            device: Device::Absent,
            host: Host::Absent,
            device_pages: Pages::default(),
            host_pages: Pages::default(),
            base: Base(0),
            lock: 0,
            pin: 0,
            used: 0,
            prefetch: None,
            terminated: false,
        };
        Ok(Tree {
            nodes: vec![node; NODES],
            device: pool(device)?.with_rules(rules, own_order),
            host: pool(host)?.with_rules(rules, own_order),
            ownership: Ownership::new(placement).with_rules(rules),
            actions: Vec::new(),
            clock: 0,
            sequence: 0,
            in_flight: 0,
            trace: None,
            step: 0,
            visible: 0,
            changed: 0,
            digests: [0; NODES],
            digest: 0,
            rules,
        })
    }

    #[inline]
    fn note(&mut self, kind: Kind, name: &str, fields: &[i64]) {
        if self.trace.is_some() {
            self.keep_note(kind, name, fields);
        }
    }

    #[cold]
    fn keep_note(&mut self, kind: Kind, name: &str, fields: &[i64]) {
        if let Some(trace) = &mut self.trace {
            let fields = fields.iter().copied().map(Value::Int).collect();
            trace.push(Record { step: self.step, kind, name: name.to_owned(), fields });
        }
    }

    /// A node that is about to change.
    fn change(&mut self, node: usize) -> &mut Node {
        self.changed |= 1 << node;
        &mut self.nodes[node]
    }

    /// Digest of everything that must be equal on all ranks.
    pub fn digest(&mut self) -> u64 {
        while self.changed != 0 {
            let number = self.changed.trailing_zeros() as usize;
            self.changed &= self.changed - 1;
            let node = &self.nodes[number];
            let state = (node.device as u64) << 3 | node.host as u64;
            let counts = u64::from(node.lock) << 8 | u64::from(node.pin);
            let flags = state << 17 | counts << 1 | u64::from(node.terminated);
            let digest = scatter((number as u64) << 56 ^ flags << 32 ^ u64::from(node.used));
            let before = std::mem::replace(&mut self.digests[number], digest);
            self.digest = self.digest.wrapping_add(digest).wrapping_sub(before);
        }
        mix(mix(self.digest, self.device.digest()), self.host.digest() ^ self.visible ^ self.sequence << 48)
    }

    fn exists(&self, node: usize) -> bool {
        self.nodes[node].device != Device::Absent || self.nodes[node].host != Host::Absent
    }

    /// Nodes on the device and in host memory, as bits.
    fn present(&self) -> (u32, u32) {
        self.nodes.iter().enumerate().fold((0, 0), |(device, host), (number, node)| {
            (
                device | u32::from(node.device != Device::Absent) << number,
                host | u32::from(node.host != Host::Absent) << number,
            )
        })
    }

    fn operation(&mut self, node: usize) -> u64 {
        self.sequence += 1;
        self.in_flight += 1;
        self.sequence << 8 | node as u64
    }

    /// Serves a request whose prompt ends with `node`; `storage` says whether the store is asked for what is
    /// nowhere else.
    pub fn request(&mut self, node: usize, storage: bool) -> Result<(), Violation> {
        self.note(Kind::Called, "match", &[node as i64]);
        let mut hit = 0;
        let path = [parent_of(node), Some(node)];
        for node in path.into_iter().flatten() {
            self.clock += 1;
            let found = self.nodes[node].device;
            if found != Device::Absent {
                self.change(node).used = self.clock;
                hit += 1;
                if found == Device::Resident {
                    self.actions.push(Action::Read { node });
                }
                continue;
            }
            let size = pages_of(node) as usize;
            let served = match self.nodes[node].host {
                Host::Resident if self.nodes[node].host_pages.list().len() == size => self.load(node)?,
                Host::Absent if storage => {
                    if self.parent_is_there(node) {
                        self.change(node).host = Host::Querying;
                        self.change(node).base = self.base(node, true);
                        let operation = self.operation(node);
                        self.actions.push(Action::Query { node, operation });
                    }
                    false
                }
                Host::Absent | Host::Resident => self.compute(node)?,
                Host::Writing | Host::Querying | Host::Prefetching => false,
            };
            if !served {
                break;
            }
        }
        self.note(Kind::Returned, "match", &[node as i64, hit]);
        self.visible = mix(self.visible, hit as u64);
        Ok(())
    }

    fn parent_is_there(&self, node: usize) -> bool {
        parent_of(node).is_none_or(|parent| self.exists(parent))
    }

    fn base(&self, node: usize, host: bool) -> Base {
        let pool = if host { &self.host } else { &self.device };
        match parent_of(node) {
            Some(parent) => self.ownership.extension(self.nodes[parent].base, pool),
            None => self.ownership.new_chain(pool),
        }
    }

    fn position(node: usize) -> u32 {
        parent_of(node).map_or(0, pages_of)
    }

    /// Pages of a path are one cyclic run.
    fn check_cyclic(&self, node: usize, pages: &Pages) -> Result<(), Violation> {
        let root = parent_of(node).unwrap_or(node);
        let owners = self.device.placement().owners();
        if owners == 1 {
            return Ok(());
        }
        for (page, at) in pages.list().iter().zip(Tree::position(node)..) {
            if page % owners != self.nodes[root].base.owner_at(at, owners) {
                let base = self.nodes[root].base;
                let message = format!("node {node}: page {page} at position {at} of a chain with {base:?}");
                return Err(Violation::new("I2", message));
            }
        }
        Ok(())
    }

    fn compute(&mut self, node: usize) -> Result<bool, Violation> {
        if self.nodes[node].pin > 0 || !self.parent_is_there(node) {
            return Ok(false);
        }
        if !self.exists(node) {
            self.change(node).base = self.base(node, false);
        }
        let owners = self.device.placement().owners();
        let start = self.nodes[node].base.owner_at(Tree::position(node), owners);
        let guard = parent_of(node);
        let Some(pages) = self.with_room(guard, |tree| tree.device.alloc_cyclic(start, pages_of(node)))
        else {
            return Ok(false);
        };
        if self.nodes[node].host == Host::Resident {
            // A part of the prefix that came from the store.
            self.drop_host(node)?;
        }
        let pages = Pages::of(&pages);
        self.check_cyclic(node, &pages)?;
        let clock = self.clock;
        let entry = self.change(node);
        (entry.device, entry.device_pages, entry.used) = (Device::Resident, pages, clock);
        self.note(Kind::Called, "insert", &[node as i64]);
        self.actions.push(Action::Compute { node });
        self.backup(node)?;
        Ok(true)
    }

    fn backup(&mut self, node: usize) -> Result<(), Violation> {
        let source = self.nodes[node].device_pages;
        let ownership = self.ownership;
        let Some(pages) =
            self.with_host_room(|tree| ownership.allocate_backup(&mut tree.host, source.list()))
        else {
            return Ok(());
        };
        let pages = Pages::of(&pages);
        self.check_cyclic(node, &pages)?;
        let pinned = u8::from(self.rules.hold(Rule::PinUntilAck));
        let entry = self.change(node);
        (entry.host, entry.host_pages) = (Host::Writing, pages);
        entry.lock += pinned;
        entry.pin += pinned;
        let operation = self.operation(node);
        self.note(Kind::State, "lock", &[node as i64]);
        self.actions.push(Action::Write { node, operation });
        Ok(())
    }

    fn load(&mut self, node: usize) -> Result<bool, Violation> {
        let source = self.nodes[node].host_pages;
        let ownership = self.ownership;
        self.change(node).pin += 1;
        let pages = self
            .with_room(parent_of(node), |tree| ownership.allocate_restore(&mut tree.device, source.list()));
        self.change(node).pin -= 1;
        let Some(pages) = pages else { return Ok(false) };
        let pages = Pages::of(&pages);
        self.check_cyclic(node, &pages)?;
        let pinned = u8::from(self.rules.hold(Rule::PinUntilAck));
        let clock = self.clock;
        let entry = self.change(node);
        (entry.device, entry.device_pages, entry.used) = (Device::Loading, pages, clock);
        entry.lock += pinned;
        entry.pin += pinned;
        let operation = self.operation(node);
        self.note(Kind::State, "lock", &[node as i64]);
        self.actions.push(Action::Load { node, operation });
        Ok(true)
    }

    /// Tries an allocation of device pages, evicting least recently used nodes until it succeeds.
    fn with_room<T>(
        &mut self,
        guard: Option<usize>,
        mut alloc: impl FnMut(&mut Tree) -> Option<T>,
    ) -> Option<T> {
        loop {
            if let Some(done) = alloc(self) {
                return Some(done);
            }
            let (device, host) = self.present();
            let free = |number: usize, node: &Node| {
                let children = CHILDREN[number];
                node.device == Device::Resident
                    && node.lock == 0
                    && Some(number) != guard
                    && device & children == 0
                    && (node.host != Host::Absent || host & children == 0)
            };
            let victim = self.least_recent(free)?;
            self.note(Kind::Called, "evict", &[victim as i64]);
            let pages = self.nodes[victim].device_pages;
            self.device.free(pages.list()).ok()?;
            self.change(victim).device_pages.clear();
            self.change(victim).device = Device::Absent;
        }
    }

    /// The same for host pages.
    fn with_host_room<T>(&mut self, mut alloc: impl FnMut(&mut Tree) -> Option<T>) -> Option<T> {
        loop {
            if let Some(done) = alloc(self) {
                return Some(done);
            }
            let (device, host) = self.present();
            let free = |number: usize, node: &Node| {
                node.host == Host::Resident
                    && node.pin == 0
                    && (node.device != Device::Absent || (device | host) & CHILDREN[number] == 0)
            };
            let victim = self.least_recent(free)?;
            self.note(Kind::Called, "evict host", &[victim as i64]);
            self.drop_host(victim).ok()?;
        }
    }

    /// The least recently used node that may go.
    fn least_recent(&self, free: impl Fn(usize, &Node) -> bool) -> Option<usize> {
        let mut victim: Option<(u32, usize)> = None;
        for (number, node) in self.nodes.iter().enumerate() {
            if victim.is_none_or(|(used, _)| node.used < used) && free(number, node) {
                victim = Some((node.used, number));
            }
        }
        victim.map(|(_, number)| number)
    }

    fn drop_host(&mut self, node: usize) -> Result<(), Violation> {
        let pages = self.nodes[node].host_pages;
        self.host.free(pages.list()).map_err(|error| Violation::new("I15", error.to_string()))?;
        self.change(node).host_pages.clear();
        self.change(node).host = Host::Absent;
        Ok(())
    }

    fn unlock(&mut self, node: usize) {
        self.note(Kind::State, "unlock", &[node as i64]);
        self.in_flight -= 1;
        if self.rules.hold(Rule::PinUntilAck) {
            let entry = self.change(node);
            entry.lock = entry.lock.saturating_sub(1);
            entry.pin = entry.pin.saturating_sub(1);
        }
    }

    /// A backup was consumed.
    pub fn written(&mut self, operation: u64, outcome: Outcome) -> Result<(), Violation> {
        let node = node_of(operation);
        self.unlock(node);
        match outcome {
            Outcome::Done => self.change(node).host = Host::Resident,
            Outcome::Failed => self.drop_host(node)?,
        }
        Ok(())
    }

    /// A load was consumed.
    pub fn loaded(&mut self, operation: u64) {
        let node = node_of(operation);
        self.unlock(node);
        self.change(node).device = Device::Resident;
    }

    /// A hit was consumed: host pages for it, and whether there is something to read.
    pub fn hit(&mut self, operation: u64, pages: u32) -> Result<bool, Violation> {
        let node = node_of(operation);
        let span = pages_of(node);
        if pages > span {
            return Err(Violation::new("I12", format!("a hit of {pages} pages in a span of {span}")));
        }
        self.visible = mix(self.visible, operation ^ u64::from(pages));
        let root = parent_of(node).unwrap_or(node);
        let owners = self.host.placement().owners();
        let start = self.nodes[root].base.owner_at(Tree::position(node), owners);
        let run = (pages > 0).then(|| self.with_host_room(|tree| tree.host.alloc_cyclic(start, pages)));
        let Some(taken) = run.flatten() else {
            self.change(node).host = Host::Absent;
            self.in_flight -= 1;
            return Ok(false);
        };
        let taken = Pages::of(&taken);
        self.check_cyclic(node, &taken)?;
        let prefetch = Prefetch::new(operation, span, pages).with_rules(self.rules);
        let entry = self.change(node);
        (entry.host, entry.host_pages, entry.terminated) = (Host::Prefetching, taken, false);
        entry.pin += 1;
        entry.prefetch = Some(prefetch);
        Ok(true)
    }

    /// An agreed report was consumed; with the last, what was published.
    pub fn progress(&mut self, report: Report) -> Result<Option<Publication>, Violation> {
        let node = node_of(report.operation);
        let Some(prefetch) = &mut self.change(node).prefetch else {
            let message = format!("operation {} of no prefetch", report.operation);
            return Err(Violation::new("I14", message));
        };
        let before = prefetch.completed();
        let publication =
            prefetch.consume(report).map_err(|error| Violation::new("I14", error.to_string()))?;
        let (after, hit) = (prefetch.completed(), prefetch.hit());
        if after < before || after > hit {
            let message = format!("completed goes from {before} to {after} of {hit}");
            return Err(Violation::new("I12", message));
        }
        let Some(publication) = publication else { return Ok(None) };
        let mut tail = self.nodes[node].host_pages;
        let freed = tail.list()[publication.publish as usize..publication.free_to as usize].to_vec();
        self.host.free(&freed).map_err(|error| Violation::new("I15", error.to_string()))?;
        tail.truncate(publication.publish as usize);
        let entry = self.change(node);
        entry.prefetch = None;
        entry.pin -= 1;
        entry.host_pages = tail;
        entry.host = if publication.publish > 0 { Host::Resident } else { Host::Absent };
        entry.terminated = false;
        self.in_flight -= 1;
        self.note(Kind::State, "publish", &[node as i64, i64::from(publication.publish)]);
        self.visible = mix(self.visible, u64::from(publication.publish));
        Ok(Some(publication))
    }

    /// Reads submitted before `expired` have run out of time.
    pub fn terminate(&mut self, expired: u64) {
        for node in 0..NODES {
            let entry = &self.nodes[node];
            let late = entry.prefetch.as_ref().is_some_and(|prefetch| prefetch.operation() >> 8 < expired);
            if late && !entry.terminated {
                self.change(node).terminated = true;
                self.note(Kind::State, "terminate", &[node as i64]);
            }
        }
    }

    /// What was submitted last, so that a clock can call it late.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Every page is free or belongs to a node, and, where nothing is under way, nothing is locked.
    pub fn check_conservation(&self, quiet: bool) -> Result<(), Violation> {
        for (name, pool, held) in [
            ("device", &self.device, self.nodes.iter().map(|node| node.device_pages.list().len()).sum()),
            ("host", &self.host, self.nodes.iter().map(|node| node.host_pages.list().len()).sum::<usize>()),
        ] {
            let free = pool.free_pages() as usize;
            if free + held != pool.total() as usize {
                let message = format!("{name}: {free} free and {held} held of {} pages", pool.total());
                return Err(Violation::new("I15", message));
            }
        }
        let locked = self.nodes.iter().position(|node| node.lock > 0 || node.pin > 0);
        match locked {
            Some(node) if quiet => Err(Violation::new("I16", format!("node {node} is locked for ever"))),
            _ => Ok(()),
        }
    }

    /// Gives up what is under way, on a rank that cannot go on.
    pub fn abandon(&mut self) -> Result<(), Violation> {
        for node in 0..NODES {
            let entry = self.change(node);
            (entry.lock, entry.pin, entry.prefetch) = (0, 0, None);
            if entry.device == Device::Loading {
                let pages = std::mem::take(&mut entry.device_pages);
                entry.device = Device::Absent;
                self.device.free(pages.list()).map_err(|error| Violation::new("I15", error.to_string()))?;
            }
            if matches!(self.nodes[node].host, Host::Writing | Host::Prefetching | Host::Querying) {
                self.drop_host(node)?;
            }
        }
        self.in_flight = 0;
        Ok(())
    }
}
