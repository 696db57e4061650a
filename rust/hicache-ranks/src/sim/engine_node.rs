//! Nodes of the tree that every rank mirrors: its fixed shape, and the state of each node.

use super::copies::{NODE_PAGES, Pages};
use crate::chain::Base;
use crate::digest::scatter;
use crate::prefetch::Prefetch;
use std::ops::Index;

/// Six roots; the others are branches of the first ones, so that two branches share a root.
pub(super) const NODES: usize = 16;
const ROOTS: usize = 6;

/// The parent of each branch.
const PARENTS: [Option<u8>; NODES] = {
    let mut parents = [None; NODES];
    let mut node = ROOTS;
    while node < NODES {
        parents[node] = Some(((node - ROOTS) % ROOTS) as u8);
        node += 1;
    }
    parents
};

pub(super) fn parent_of(node: usize) -> Option<usize> {
    PARENTS[node].map(usize::from)
}

pub(super) fn pages_of(node: usize) -> u32 {
    1 + (node * 7 % NODE_PAGES) as u32
}

/// The nodes that are parents of some of `nodes`, as bits.
pub(super) fn parents_of(nodes: u32) -> u32 {
    const { assert!(NODES <= 3 * ROOTS, "a root has two branches at most") };
    (nodes >> ROOTS | nodes >> (2 * ROOTS)) & ((1 << ROOTS) - 1)
}

/// Pages of its path before the first of a node.
pub(super) fn position_of(node: usize) -> u32 {
    parent_of(node).map_or(0, pages_of)
}

/// Content of page `page` of a node.
pub(super) fn tag(node: usize, page: usize) -> u32 {
    (node * 4 + page + 1) as u32
}

pub(super) fn node_of(operation: u64) -> usize {
    (operation & 0xff) as usize
}

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
    device: Device,
    host: Host,
    pub device_pages: Pages,
    pub host_pages: Pages,
    pub base: Base,
    /// Copies that read or write the device pages.
    pub lock: u8,
    /// Copies that read or write the host pages.
    pub pin: u8,
    pub used: u32,
    pub prefetch: Option<Prefetch>,
    pub terminated: bool,
}

impl Node {
    /// A node that is nowhere.
    const ABSENT: Node = Node {
        device: Device::Absent,
        host: Host::Absent,
        device_pages: Pages::NONE,
        host_pages: Pages::NONE,
        base: Base(0),
        lock: 0,
        pin: 0,
        used: 0,
        prefetch: None,
        terminated: false,
    };

    pub fn device(&self) -> Device {
        self.device
    }

    pub fn host(&self) -> Host {
        self.host
    }

    /// Pages that are being read, 0 where none are.
    pub fn prefetch_hit(&self) -> u32 {
        self.prefetch.as_ref().map_or(0, Prefetch::hit)
    }
}

/// The nodes that are somewhere, as bits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Presence {
    /// On the device, or on their way there.
    pub device: u32,
    /// On the device.
    pub resident: u32,
    /// In host memory, or on their way there.
    pub host: u32,
    /// In host memory.
    pub saved: u32,
}

/// All nodes of a tree, where they are and the digest of their states.
#[derive(Debug, Clone)]
pub(super) struct Nodes {
    list: [Node; NODES],
    present: Presence,
    /// Nodes that changed since the digest was taken, the digest of each, and their sum.
    changed: u32,
    digests: [u64; NODES],
    digest: u64,
}

impl Nodes {
    pub fn new() -> Nodes {
        let present = Presence::default();
        Nodes { list: [Node::ABSENT; NODES], present, changed: 0, digests: [0; NODES], digest: 0 }
    }

    pub fn present(&self) -> Presence {
        self.present
    }

    pub fn is_anywhere(&self, node: usize) -> bool {
        has(self.present.device | self.present.host, node)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Node> {
        self.list.iter()
    }

    /// A node that is about to change.
    pub fn change(&mut self, node: usize) -> &mut Node {
        self.changed |= 1 << node;
        &mut self.list[node]
    }

    pub fn set_device(&mut self, node: usize, state: Device) -> &mut Node {
        put(&mut self.present.device, node, state != Device::Absent);
        put(&mut self.present.resident, node, state == Device::Resident);
        let entry = self.change(node);
        entry.device = state;
        entry
    }

    pub fn set_host(&mut self, node: usize, state: Host) -> &mut Node {
        put(&mut self.present.host, node, state != Host::Absent);
        put(&mut self.present.saved, node, state == Host::Resident);
        let entry = self.change(node);
        entry.host = state;
        entry
    }

    /// Digest of all that must be equal on all ranks.
    pub fn digest(&mut self) -> u64 {
        while self.changed != 0 {
            let number = self.changed.trailing_zeros() as usize;
            self.changed &= self.changed - 1;
            let node = &self.list[number];
            let state = (node.device as u64) << 3 | node.host as u64;
            let counts = u64::from(node.lock) << 8 | u64::from(node.pin);
            let flags = state << 17 | counts << 1 | u64::from(node.terminated);
            let digest = scatter((number as u64) << 56 ^ flags << 32 ^ u64::from(node.used));
            let before = std::mem::replace(&mut self.digests[number], digest);
            self.digest = self.digest.wrapping_add(digest).wrapping_sub(before);
        }
        self.digest
    }
}

impl Index<usize> for Nodes {
    type Output = Node;

    fn index(&self, node: usize) -> &Node {
        &self.list[node]
    }
}

fn has(bits: u32, node: usize) -> bool {
    bits >> node & 1 != 0
}

fn put(bits: &mut u32, node: usize, value: bool) {
    *bits = *bits & !(1 << node) | u32::from(value) << node;
}
