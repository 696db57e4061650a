//! Room in the pools of the tree: what is evicted for a request, what is given back, and that nothing is lost.

use super::Violation;
use super::engine_node::{Device, Host, NODES, Node, parents_of};
use super::engine_tree::Tree;
use crate::audit::Kind;

impl Tree {
    /// Tries an allocation of device pages, evicting least recently used nodes until it succeeds; false where
    /// nothing more may go.
    pub(super) fn with_room(
        &mut self,
        guard: Option<usize>,
        mut alloc: impl FnMut(&mut Tree) -> bool,
    ) -> bool {
        while !alloc(self) {
            let present = self.nodes.present();
            let guarded = guard.map_or(0, |node| 1 << node);
            // A node with branches stays, unless branches in host memory only keep it there as well.
            let needed = parents_of(present.device) | parents_of(present.host) & !present.host;
            let candidates = present.resident & !guarded & !needed;
            let Some(victim) = self.least_recent(candidates, |node| node.lock) else { return false };
            self.note(Kind::Called, "evict", &[victim as i64]);
            let pages = self.nodes[victim].device_pages;
            if self.device.free(pages.list()).is_err() {
                return false;
            }
            self.nodes.set_device(victim, Device::Absent).device_pages.clear();
        }
        true
    }

    /// The same for host pages.
    pub(super) fn with_host_room(&mut self, mut alloc: impl FnMut(&mut Tree) -> bool) -> bool {
        while !alloc(self) {
            let present = self.nodes.present();
            let candidates = present.saved & (present.device | !parents_of(present.device | present.host));
            let Some(victim) = self.least_recent(candidates, |node| node.pin) else { return false };
            self.note(Kind::Called, "evict host", &[victim as i64]);
            if self.drop_host(victim).is_err() {
                return false;
            }
        }
        true
    }

    /// The least recently used of the candidates that no copy holds, the lowest of equals.
    fn least_recent(&self, mut candidates: u32, holds: impl Fn(&Node) -> u8) -> Option<usize> {
        // No branch but the loop's own: which nodes are held and in what order they were used is anybody's guess.
        let mut oldest = u64::MAX;
        while candidates != 0 {
            let number = candidates.trailing_zeros() as usize;
            candidates &= candidates - 1;
            let node = &self.nodes[number];
            let place = u64::from(node.used) << 8 | number as u64;
            oldest = oldest.min(if holds(node) == 0 { place } else { u64::MAX });
        }
        (oldest != u64::MAX).then_some((oldest & 0xff) as usize)
    }

    pub(super) fn drop_host(&mut self, node: usize) -> Result<(), Violation> {
        let pages = self.nodes[node].host_pages;
        self.host.free(pages.list()).map_err(|error| Violation::new("I15", error.to_string()))?;
        self.nodes.set_host(node, Host::Absent).host_pages.clear();
        Ok(())
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
            let entry = self.nodes.change(node);
            (entry.lock, entry.pin, entry.prefetch) = (0, 0, None);
            if entry.device() == Device::Loading {
                let pages = std::mem::take(&mut entry.device_pages);
                self.nodes.set_device(node, Device::Absent);
                self.device.free(pages.list()).map_err(|error| Violation::new("I15", error.to_string()))?;
            }
            if matches!(self.nodes[node].host(), Host::Writing | Host::Prefetching | Host::Querying) {
                self.drop_host(node)?;
            }
        }
        self.in_flight = 0;
        Ok(())
    }
}
