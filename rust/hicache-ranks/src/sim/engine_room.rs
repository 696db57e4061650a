//! Room in the pools of the tree: what is evicted for a request, what is given back, and that nothing is lost.

use super::Violation;
use super::engine_node::{CHILDREN, Device, Host, NODES, Node, has};
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
            let candidates = present.resident & !guard.map_or(0, |node| 1 << node);
            let free = |number: usize, node: &Node| {
                let children = CHILDREN[number];
                node.lock == 0
                    && present.device & children == 0
                    && (has(present.host, number) || present.host & children == 0)
            };
            let Some(victim) = self.least_recent(candidates, free) else { return false };
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
            let free = |number: usize, node: &Node| {
                node.pin == 0
                    && (has(present.device, number)
                        || (present.device | present.host) & CHILDREN[number] == 0)
            };
            let Some(victim) = self.least_recent(present.saved, free) else { return false };
            self.note(Kind::Called, "evict host", &[victim as i64]);
            if self.drop_host(victim).is_err() {
                return false;
            }
        }
        true
    }

    /// The least recently used of the candidates that may go, the lowest of equals.
    fn least_recent(&self, mut candidates: u32, free: impl Fn(usize, &Node) -> bool) -> Option<usize> {
        let mut victim: Option<(u32, usize)> = None;
        while candidates != 0 {
            let number = candidates.trailing_zeros() as usize;
            candidates &= candidates - 1;
            let node = &self.nodes[number];
            if victim.is_none_or(|(used, _)| node.used < used) && free(number, node) {
                victim = Some((node.used, number));
            }
        }
        victim.map(|(_, number)| number)
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
