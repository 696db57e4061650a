//! The logical cache that every rank mirrors: a small prefix tree over a device and a host pool.
//!
//! Everything here is a function of the requests and of the consumed acknowledgements: requests in this file,
//! what makes room in `engine_room`, acknowledgements in `engine_effects`. What a rank does with its own memory
//! stands in `engine_rank`.

use super::Violation;
use super::copies::Pages;
use super::engine_node::{Device, Host, Nodes, pages_of, parent_of, position_of};
use crate::audit::{Kind, Record, Value};
use crate::chain::{Base, Ownership};
use crate::classed_pool::ClassedPool;
use crate::digest::mix;
use crate::placement::Placement;
use crate::rules::{Rule, Rules};

/// What the rank is to submit.
#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    Compute { node: usize },
    Read { node: usize },
    Write { node: usize, operation: u64 },
    Load { node: usize, operation: u64 },
    Query { node: usize, operation: u64 },
}

#[derive(Debug, Clone)]
pub(super) struct Tree {
    pub nodes: Nodes,
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
    pub(super) visible: u64,
    pub(super) rules: Rules,
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
        Ok(Tree {
            nodes: Nodes::new(),
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
            rules,
        })
    }

    #[inline]
    pub(super) fn note(&mut self, kind: Kind, name: &str, fields: &[i64]) {
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

    /// Digest of everything that must be equal on all ranks.
    pub fn digest(&mut self) -> u64 {
        let pools = mix(self.nodes.digest(), self.device.digest());
        mix(pools, self.host.digest() ^ self.visible ^ self.sequence << 48)
    }

    /// What was submitted last, so that a clock can call it late.
    pub fn sequence(&self) -> u64 {
        self.sequence
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
        // A prefix ends where a part of it is not there.
        if match parent_of(node) {
            Some(parent) => self.visit(parent, storage, &mut hit)?,
            None => true,
        } {
            self.visit(node, storage, &mut hit)?;
        }
        self.note(Kind::Returned, "match", &[node as i64, hit]);
        self.visible = mix(self.visible, hit as u64);
        Ok(())
    }

    /// Serves the part of a request that ends with `node`: counted as a hit where it is on the device already.
    /// Whether it is on the device, or will be, and the next part can follow.
    fn visit(&mut self, node: usize, storage: bool, hit: &mut i64) -> Result<bool, Violation> {
        self.clock += 1;
        let found = self.nodes[node].device();
        if found != Device::Absent {
            self.nodes.change(node).used = self.clock;
            *hit += 1;
            if found == Device::Resident {
                self.actions.push(Action::Read { node });
            }
            return Ok(true);
        }
        match self.nodes[node].host() {
            Host::Resident if self.nodes[node].host_pages.len() == pages_of(node) => self.load(node),
            Host::Absent if storage => {
                if self.parent_is_there(node) {
                    let base = self.base(node, true);
                    self.nodes.set_host(node, Host::Querying).base = base;
                    let operation = self.operation(node);
                    self.actions.push(Action::Query { node, operation });
                }
                Ok(false)
            }
            Host::Absent | Host::Resident => self.compute(node),
            Host::Writing | Host::Querying | Host::Prefetching => Ok(false),
        }
    }

    fn parent_is_there(&self, node: usize) -> bool {
        parent_of(node).is_none_or(|parent| self.nodes.is_anywhere(parent))
    }

    fn base(&self, node: usize, host: bool) -> Base {
        let pool = if host { &self.host } else { &self.device };
        match parent_of(node) {
            Some(parent) => self.ownership.extension(self.nodes[parent].base, pool),
            None => self.ownership.new_chain(pool),
        }
    }

    /// Pages of a path are one cyclic run.
    pub(super) fn check_cyclic(&self, node: usize, pages: &Pages) -> Result<(), Violation> {
        let root = parent_of(node).unwrap_or(node);
        let owners = self.device.placement().owners();
        if owners == 1 {
            return Ok(());
        }
        for (page, at) in pages.list().iter().zip(position_of(node)..) {
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
        if !self.nodes.is_anywhere(node) {
            self.nodes.change(node).base = self.base(node, false);
        }
        let owners = self.device.placement().owners();
        let start = self.nodes[node].base.owner_at(position_of(node), owners);
        let guard = parent_of(node);
        let mut pages = Pages::of(pages_of(node));
        if !self.with_room(guard, |tree| tree.device.alloc_cyclic_into(start, pages.list_mut())) {
            return Ok(false);
        }
        if self.nodes[node].host() == Host::Resident {
            // A part of the prefix that came from the store.
            self.drop_host(node)?;
        }
        self.check_cyclic(node, &pages)?;
        let clock = self.clock;
        let entry = self.nodes.set_device(node, Device::Resident);
        (entry.device_pages, entry.used) = (pages, clock);
        self.note(Kind::Called, "insert", &[node as i64]);
        self.actions.push(Action::Compute { node });
        self.backup(node)?;
        Ok(true)
    }

    fn backup(&mut self, node: usize) -> Result<(), Violation> {
        let source = self.nodes[node].device_pages;
        let ownership = self.ownership;
        let mut pages = Pages::of(source.len());
        if !self.with_host_room(|tree| {
            ownership.allocate_backup_into(&mut tree.host, source.list(), pages.list_mut())
        }) {
            return Ok(());
        }
        self.check_cyclic(node, &pages)?;
        let pinned = u8::from(self.rules.hold(Rule::PinUntilAck));
        let entry = self.nodes.set_host(node, Host::Writing);
        entry.host_pages = pages;
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
        self.nodes.change(node).pin += 1;
        let mut pages = Pages::of(source.len());
        let room = self.with_room(parent_of(node), |tree| {
            ownership.allocate_restore_into(&mut tree.device, source.list(), pages.list_mut())
        });
        self.nodes.change(node).pin -= 1;
        if !room {
            return Ok(false);
        }
        self.check_cyclic(node, &pages)?;
        let pinned = u8::from(self.rules.hold(Rule::PinUntilAck));
        let clock = self.clock;
        let entry = self.nodes.set_device(node, Device::Loading);
        (entry.device_pages, entry.used) = (pages, clock);
        entry.lock += pinned;
        entry.pin += pinned;
        let operation = self.operation(node);
        self.note(Kind::State, "lock", &[node as i64]);
        self.actions.push(Action::Load { node, operation });
        Ok(true)
    }
}
