//! Effects of consumed acknowledgements on the tree.

use super::Violation;
use super::copies::Pages;
use super::engine_node::{Device, Host, NODES, node_of, pages_of, parent_of, position_of};
use super::engine_tree::Tree;
use crate::ack::Outcome;
use crate::audit::Kind;
use crate::digest::mix;
use crate::prefetch::{Prefetch, Publication, Report};
use crate::rules::Rule;

impl Tree {
    fn unlock(&mut self, node: usize) {
        self.note(Kind::State, "unlock", &[node as i64]);
        self.in_flight -= 1;
        if self.rules.hold(Rule::PinUntilAck) {
            let entry = self.nodes.change(node);
            entry.lock = entry.lock.saturating_sub(1);
            entry.pin = entry.pin.saturating_sub(1);
        }
    }

    /// A backup was consumed.
    pub fn written(&mut self, operation: u64, outcome: Outcome) -> Result<(), Violation> {
        let node = node_of(operation);
        self.unlock(node);
        match outcome {
            Outcome::Failed => self.drop_host(node),
            Outcome::Done => {
                self.nodes.set_host(node, Host::Resident);
                Ok(())
            }
        }
    }

    /// A load was consumed.
    pub fn loaded(&mut self, operation: u64) {
        let node = node_of(operation);
        self.unlock(node);
        self.nodes.set_device(node, Device::Resident);
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
        let start = self.nodes[root].base.owner_at(position_of(node), owners);
        let mut taken = Pages::of(pages);
        let room =
            pages > 0 && self.with_host_room(|tree| tree.host.alloc_cyclic_into(start, taken.list_mut()));
        if !room {
            self.nodes.set_host(node, Host::Absent);
            self.in_flight -= 1;
            return Ok(false);
        }
        self.check_cyclic(node, &taken)?;
        let prefetch = Prefetch::new(operation, span, pages).with_rules(self.rules);
        let entry = self.nodes.set_host(node, Host::Prefetching);
        (entry.host_pages, entry.terminated) = (taken, false);
        entry.pin += 1;
        entry.prefetch = Some(prefetch);
        Ok(true)
    }

    /// An agreed report was consumed; with the last, what was published.
    pub fn progress(&mut self, report: Report) -> Result<Option<Publication>, Violation> {
        let node = node_of(report.operation);
        let Some(prefetch) = &mut self.nodes.change(node).prefetch else {
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
        let freed = &tail.list()[publication.publish as usize..publication.free_to as usize];
        self.host.free(freed).map_err(|error| Violation::new("I15", error.to_string()))?;
        tail.truncate(publication.publish as usize);
        let state = if publication.publish > 0 { Host::Resident } else { Host::Absent };
        let entry = self.nodes.set_host(node, state);
        entry.prefetch = None;
        entry.pin -= 1;
        entry.host_pages = tail;
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
                self.nodes.change(node).terminated = true;
                self.note(Kind::State, "terminate", &[node as i64]);
            }
        }
    }
}
