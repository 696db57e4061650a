//! Restores layer by layer: store to host slots to device rows, the first layer first.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::event::{Event, HostEvent};
use super::executor::Executor;
use super::gate::LayerGate;
use super::plan::{Memory, TransferPlan};
use super::slots::Slots;
use super::{Edge, Edges};
use crate::key::PageKey;
use crate::store::{PoolMemory, RestoreOptions, RestoreOutcome, RestoreReport, View};
use crate::{Error, ErrorKind, Result};

/// Bytes of the pages that are read together where pages are read whole.
const CHUNK_BYTES: u64 = 32 << 20;

/// Fewest bytes of one request, and of all requests of one group of layers.
const REQUEST_BYTES: u64 = 64 << 10;
const GROUP_BYTES: u64 = 1 << 20;

/// How a restore reads the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reading {
    /// By groups of layers of all pages where that reads at most an eighth more than it must, in requests of at least
    /// 64 KiB; else whole pages, some at a time. Layouts that interleave layers (`page_first`, `page_head`) give the
    /// latter.
    #[default]
    Auto,
    /// By groups of so many layers, at least 1.
    Layers(u32),
    /// So many whole pages at a time, at least 1.
    Pages(usize),
}

/// What a layer's reader may count on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Announce {
    /// No layer is ready before every page has been read and verified: a page that cannot be had is a miss for all
    /// its layers, and the others are usable. Disk and copies overlap, and copies and whoever reads the layers.
    #[default]
    Pages,
    /// A layer is ready when its own bytes are there, while later ones are still read. Should a page fail after that,
    /// the whole restore is withdrawn: the gate refuses every further read, and what was computed must go.
    Layers,
}

/// One restore.
#[derive(Clone, Default)]
pub struct TransferRestore {
    /// Pages of one chain.
    pub keys: Vec<PageKey>,
    /// Of each pool a host slot for each page; or fewer slots than pages, for all pools alike: they are then filled in
    /// turn, each half again when it has been copied.
    pub host_slots: Vec<Vec<i64>>,
    /// Of each pool the device slot of each page; -1 for none.
    pub device_slots: Vec<Vec<i64>>,
    /// Ends of earlier uses of the host slots: nothing is read into them before.
    pub host_free: Vec<Event>,
    /// Ends of earlier uses of the device rows: nothing is copied to them before.
    pub device_free: Vec<Event>,
    /// Deadline and bounce, as for [`View::restore`].
    pub options: RestoreOptions,
    /// When layers are ready.
    pub announce: Announce,
    /// How the disk is read.
    pub reading: Reading,
    /// Which orders are kept.
    pub edges: Edges,
}

/// What is read and copied together.
struct Unit {
    pages: Range<usize>,
    steps: Range<u32>,
    /// First of the given host slots that it fills, and which half of them.
    first_slot: usize,
    half: usize,
}

/// Restores from one view through one plan.
pub struct LayerwiseRestore {
    view: Arc<View>,
    plan: Arc<TransferPlan>,
}

impl LayerwiseRestore {
    /// Restores of `view` to the memory of `plan`, whose pools are those of the view in the same order.
    ///
    /// # Errors
    /// `Geometry` where a host pool is laid out otherwise than the view says, or is memory of a device; `Config` where
    /// the pools differ.
    pub fn new(view: Arc<View>, plan: Arc<TransferPlan>) -> Result<LayerwiseRestore> {
        check_view(&view, &plan)?;
        Ok(LayerwiseRestore { view, plan })
    }

    /// Starts a restore on a thread of its own.
    ///
    /// # Errors
    /// `Geometry` for slots that do not fit, `Closed`, `Io` where no thread can be had.
    pub fn start(&self, request: TransferRestore, executor: Arc<dyn Executor>) -> Result<LayerwiseTicket> {
        self.view.inner.check_open()?;
        self.check(&request)?;
        let gate = Arc::new(LayerGate::new(self.plan.steps(), request.edges));
        let drained = HostEvent::new();
        let this = LayerwiseRestore { view: Arc::clone(&self.view), plan: Arc::clone(&self.plan) };
        let (its_gate, its_end) = (Arc::clone(&gate), Arc::clone(&drained));
        let thread = std::thread::Builder::new().name("hicache-restore".into()).spawn(move || {
            let _ends = Ends { gate: Arc::clone(&its_gate), drained: Arc::clone(&its_end) };
            this.run(&request, &*executor, &its_gate)
        });
        let thread =
            thread.map_err(|error| Error::new(ErrorKind::Io, format!("cannot start a restore: {error}")))?;
        Ok(LayerwiseTicket { gate, drained, state: Mutex::new(Outcome::Running(thread)) })
    }

    /// Carries a restore out on the calling thread.
    fn run(
        &self,
        request: &TransferRestore,
        executor: &dyn Executor,
        gate: &LayerGate,
    ) -> Result<RestoreReport> {
        let done = self.run_units(request, executor, gate);
        // Whatever happened: host slots are not given back while a copy still reads them.
        let drained = executor.record(None).and_then(|event| event.wait_until(None));
        if let Err(error) = &done {
            gate.withdraw(error.message());
        }
        drained?;
        let report = done?;
        self.view.note_restored(&request.keys, &report);
        Ok(report)
    }

    fn run_units(
        &self,
        request: &TransferRestore,
        executor: &dyn Executor,
        gate: &LayerGate,
    ) -> Result<RestoreReport> {
        let (edges, deadline) = (request.edges, request.options.deadline);
        let is_asked = |page: usize| {
            (0..request.host_slots.len())
                .any(|pool| request.host_slots[pool].get(page).is_none_or(|&slot| slot >= 0))
        };
        let mut outcomes: Vec<RestoreOutcome> = (0..request.keys.len())
            .map(|page| if is_asked(page) { RestoreOutcome::Restored } else { RestoreOutcome::Skipped })
            .collect();
        let mut is_late = false;
        for event in request.host_free.iter().filter(|_| edges.hold(Edge::SlotReuse)) {
            is_late |= !event.wait_until(deadline)?;
        }
        for event in request.device_free.iter().filter(|_| edges.hold(Edge::Ready)) {
            executor.wait(event)?;
        }
        let units = self.units(request)?;
        let mut last_of_half: [Option<Event>; 2] = [None, None];
        for (number, unit) in units.iter().enumerate() {
            if let Some(event) = last_of_half[unit.half].take().filter(|_| edges.hold(Edge::SlotReuse)) {
                is_late |= !event.wait_until(deadline)?;
            }
            if edges.hold(Edge::Load) {
                self.read(request, unit, is_late, &mut outcomes)?;
            }
            let slots = Arc::new(self.slots(request, unit, &outcomes)?);
            let is_last = units[number + 1..].iter().all(|later| later.steps.start >= unit.steps.end);
            for step in unit.steps.clone() {
                executor.copy(&self.plan.restore()[step as usize], &slots)?;
                if is_last {
                    gate.issue(step, executor.record(Some(step))?);
                }
            }
            if !edges.hold(Edge::Load) {
                self.read(request, unit, is_late, &mut outcomes)?;
            }
            if request.host_slots[0].len() < request.keys.len() {
                last_of_half[unit.half] = Some(executor.record(None)?);
            }
            if request.announce == Announce::Layers {
                match outcomes.iter().position(|outcome| is_miss(*outcome)) {
                    None => gate.announce(),
                    Some(page) => gate.withdraw(format!("page {page} is {}", outcomes[page].name())),
                }
            }
        }
        if units.is_empty() {
            for step in 0..self.plan.steps() {
                gate.issue(step, executor.record(Some(step))?);
            }
        }
        match units.is_empty() || outcomes.contains(&RestoreOutcome::Restored) {
            false => gate.withdraw("no page was restored"),
            true if request.announce == Announce::Pages => gate.announce(),
            true => {}
        }
        let bytes = self.restored_bytes(request, &outcomes);
        Ok(RestoreReport { outcomes, bytes })
    }

    /// Reads the layers of a unit, of the pages that are still whole; says which are not any more.
    fn read(
        &self,
        request: &TransferRestore,
        unit: &Unit,
        is_late: bool,
        outcomes: &mut [RestoreOutcome],
    ) -> Result<()> {
        let found = if is_late {
            vec![RestoreOutcome::Late; unit.pages.len()]
        } else {
            let slots = self.host_slots(request, unit, outcomes);
            let (keys, layers) = (&request.keys[unit.pages.clone()], self.plan.layers(&unit.steps));
            self.view.restore_layers(keys, self.memory(&slots), Some(&layers), request.options)?.outcomes
        };
        let pages = outcomes[unit.pages.clone()].iter_mut().zip(found);
        pages.filter(|(have, _)| **have == RestoreOutcome::Restored).for_each(|(have, found)| *have = found);
        Ok(())
    }

    /// Host slots of a unit by pool; -1 for pages that are lost.
    fn host_slots(
        &self,
        request: &TransferRestore,
        unit: &Unit,
        outcomes: &[RestoreOutcome],
    ) -> Vec<Vec<i64>> {
        let of_pool = |slots: &Vec<i64>| {
            let pages = unit.pages.clone().zip(&slots[unit.first_slot..]);
            let alive = |(page, &slot): (usize, &i64)| {
                if outcomes[page] == RestoreOutcome::Restored { slot } else { -1 }
            };
            pages.map(alive).collect()
        };
        request.host_slots.iter().map(of_pool).collect()
    }

    fn slots(&self, request: &TransferRestore, unit: &Unit, outcomes: &[RestoreOutcome]) -> Result<Slots> {
        let host = self.host_slots(request, unit, outcomes);
        let device = request.device_slots.iter().map(|slots| &slots[unit.pages.clone()]);
        let pairs: Vec<(&[i64], &[i64])> = host.iter().map(Vec::as_slice).zip(device).collect();
        self.plan.restore_slots(&pairs)
    }

    fn memory<'a>(&'a self, slots: &'a [Vec<i64>]) -> Vec<PoolMemory<'a>> {
        let pools = self.plan.pools().iter().zip(slots);
        pools.map(|(pool, slots)| PoolMemory { regions: regions(&pool.host.memory), slots }).collect()
    }

    fn restored_bytes(&self, request: &TransferRestore, outcomes: &[RestoreOutcome]) -> u64 {
        let restored =
            outcomes.iter().enumerate().filter(|(_, outcome)| **outcome == RestoreOutcome::Restored);
        let of_page = |page: usize| -> u64 {
            let has = |pool: &usize| request.host_slots[*pool].get(page).is_none_or(|&slot| slot >= 0);
            (0..request.host_slots.len()).filter(has).map(|pool| self.view.page_bytes(pool)).sum()
        };
        restored.map(|(page, _)| of_page(page)).sum()
    }

    fn check(&self, request: &TransferRestore) -> Result<()> {
        let pages = request.keys.len();
        check_slots(&self.plan, pages, &request.host_slots, &request.device_slots)?;
        if request.host_slots[0].len() < pages && matches!(request.reading, Reading::Layers(_)) {
            return Err(Error::config("expected a host slot for each page where layers are read by groups"));
        }
        if matches!(request.reading, Reading::Layers(0) | Reading::Pages(0)) {
            return Err(Error::config("expected to read at least one layer or page at a time, found 0"));
        }
        // All host slots at once, so that one that is named twice is found whatever the order of reading.
        let host: Vec<&[i64]> = request.host_slots.iter().map(Vec::as_slice).collect();
        let nowhere: Vec<Vec<i64>> = host.iter().map(|slots| vec![-1; slots.len()]).collect();
        let pairs: Vec<(&[i64], &[i64])> =
            host.iter().copied().zip(nowhere.iter().map(Vec::as_slice)).collect();
        self.plan.backup_slots(&pairs)?;
        let device: Vec<&[i64]> = request.device_slots.iter().map(Vec::as_slice).collect();
        let nowhere: Vec<Vec<i64>> = device.iter().map(|slots| vec![-1; slots.len()]).collect();
        let pairs: Vec<(&[i64], &[i64])> = nowhere.iter().map(Vec::as_slice).zip(device).collect();
        self.plan.restore_slots(&pairs).map(|_| ())
    }

    fn units(&self, request: &TransferRestore) -> Result<Vec<Unit>> {
        let (pages, steps) = (request.keys.len(), self.plan.steps());
        let ring = request.host_slots[0].len();
        let by_layers = |group: u32| {
            let groups = (0..steps).step_by(group as usize);
            let unit = |start: u32| Unit {
                pages: 0..pages,
                steps: start..start.saturating_add(group).min(steps),
                first_slot: 0,
                half: 0,
            };
            groups.map(unit).collect()
        };
        let halves = if ring >= pages || ring < 2 { 1 } else { 2 };
        let by_pages = |chunk: usize| {
            let chunk = if ring >= pages { chunk } else { chunk.min(ring / halves) };
            let unit = |(number, start): (usize, usize)| {
                let half = number % halves;
                let first_slot = if ring >= pages { start } else { half * (ring / halves) };
                Unit { pages: start..(start + chunk).min(pages), steps: 0..steps, first_slot, half }
            };
            (0..pages).step_by(chunk).enumerate().map(unit).collect()
        };
        Ok(match request.reading {
            _ if pages == 0 => Vec::new(),
            Reading::Layers(group) => by_layers(group),
            Reading::Pages(chunk) => by_pages(chunk),
            Reading::Auto => match self.group_steps(request)? {
                Some(group) if ring >= pages => by_layers(group),
                _ => by_pages((CHUNK_BYTES / self.page_bytes().max(1)).max(1) as usize),
            },
        })
    }

    fn page_bytes(&self) -> u64 {
        (0..self.plan.pools().len()).map(|pool| self.view.page_bytes(pool)).sum()
    }

    /// The smallest group of layers that can be read by itself at little cost, judged by the first page; `None` where
    /// pages are better read whole.
    fn group_steps(&self, request: &TransferRestore) -> Result<Option<u32>> {
        let Some(key) = request.keys.first() else { return Ok(None) };
        self.view.refresh();
        let slots: Vec<Vec<i64>> = vec![vec![-1]; self.plan.pools().len()];
        let memory = self.view.bind(self.memory(&slots), 1, false)?;
        let index = self.view.state.index();
        let steps = self.plan.steps();
        let mut group = 1;
        while group * 2 <= steps {
            // The second group: the first one begins where the page does, and tells too little.
            let layers = self.plan.layers(&(group..group * 2));
            let (mut wanted, mut read, mut ranges) = (0, 0, 0);
            for ((pool, memory), layers) in self.view.pools.iter().zip(&memory).zip(layers) {
                let Some(cost) = pool.read_cost(&index, key, layers, memory)? else { return Ok(None) };
                wanted += cost.wanted_bytes;
                read += cost.read_bytes;
                ranges += cost.ranges;
            }
            let is_cheap = wanted > 0 && read <= wanted + wanted / 8;
            if is_cheap && read >= ranges * REQUEST_BYTES && read * request.keys.len() as u64 >= GROUP_BYTES {
                return Ok(Some(group));
            }
            group *= 2;
        }
        Ok(None)
    }
}

fn is_miss(outcome: RestoreOutcome) -> bool {
    !matches!(outcome, RestoreOutcome::Restored | RestoreOutcome::Skipped)
}

/// Ends what waits for a restore, also when its thread panics.
struct Ends {
    gate: Arc<LayerGate>,
    drained: Arc<HostEvent>,
}

impl Drop for Ends {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.gate.withdraw("its thread panicked");
            // What it had issued may still be under way.
            self.drained.fail("the restore panicked");
        }
        self.drained.set();
    }
}

enum Outcome {
    Running(JoinHandle<Result<RestoreReport>>),
    Done(std::result::Result<RestoreReport, (ErrorKind, String)>),
}

/// A restore under way. Dropping it lets the restore go on.
pub struct LayerwiseTicket {
    gate: Arc<LayerGate>,
    drained: Arc<HostEvent>,
    state: Mutex<Outcome>,
}

impl LayerwiseTicket {
    /// The gate before the layers.
    pub fn gate(&self) -> &Arc<LayerGate> {
        &self.gate
    }

    /// Comes when nothing reads the host slots any more, and nothing writes the device rows: both may then be given
    /// back or used again.
    pub fn drained(&self) -> Event {
        Arc::clone(&self.drained) as Event
    }

    /// Waits until the pages have been read and copied, and says what became of each. A page is either restored in all
    /// layers of all pools, or a miss.
    ///
    /// # Errors
    /// What the restore ended with.
    pub fn finish(&self) -> Result<RestoreReport> {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Outcome::Running(_) = *state {
            let panicked = Err((ErrorKind::Io, "the restore panicked".to_owned()));
            let Outcome::Running(thread) = std::mem::replace(&mut *state, Outcome::Done(panicked)) else {
                unreachable!("looked at above")
            };
            if let Ok(ended) = thread.join() {
                *state = Outcome::Done(ended.map_err(|error| (error.kind(), error.message().to_owned())));
            }
        }
        match &*state {
            Outcome::Done(Ok(report)) => Ok(report.clone()),
            Outcome::Done(Err((kind, message))) => Err(Error::new(*kind, message.clone())),
            Outcome::Running(_) => unreachable!("joined above"),
        }
    }
}

/// The regions of host memory; none where it is a device's, which [`check_view`] refuses.
pub(super) fn regions(memory: &Memory) -> Vec<&hicache_sys::Region> {
    match memory {
        Memory::Host(regions) => regions.iter().map(Arc::as_ref).collect(),
        Memory::Device(_) => Vec::new(),
    }
}

pub(super) fn check_view(view: &View, plan: &TransferPlan) -> Result<()> {
    let names: Vec<&str> = plan.pools().iter().map(|pool| pool.name.as_str()).collect();
    if names != view.pool_names() {
        return Err(Error::config(format!(
            "expected the pools of the view, {}, found {}",
            view.pool_names().join(", "),
            names.join(", ")
        )));
    }
    for (number, pool) in plan.pools().iter().enumerate() {
        if let Memory::Device(_) = pool.host.memory {
            return Err(Error::geometry(format!("host pool {:?} is memory of a device", pool.name)));
        }
        let expected = view.host_layout(number, regions(&pool.host.memory))?;
        if *expected != pool.host.layout {
            return Err(Error::geometry(format!(
                "host pool {:?} is laid out otherwise than the view says: {} of {} slots against {} of {}",
                pool.name, pool.host.layout.name, pool.host.layout.slots, expected.name, expected.slots
            )));
        }
    }
    Ok(())
}

/// Checks the numbers of slots: a device slot for each page; host slots as many, or fewer and then all there.
pub(super) fn check_slots(
    plan: &TransferPlan,
    pages: usize,
    host: &[Vec<i64>],
    device: &[Vec<i64>],
) -> Result<()> {
    let pools = plan.pools().len();
    if host.len() != pools || device.len() != pools {
        return Err(Error::geometry(format!(
            "expected host and device slots of {pools} pools, found {} and {}",
            host.len(),
            device.len()
        )));
    }
    let ring = host[0].len();
    for (pool, (host, device)) in plan.pools().iter().zip(host.iter().zip(device)) {
        let is_ring = ring < pages && ring > 0;
        if device.len() != pages || host.len() != ring || !(ring == pages || is_ring) {
            return Err(Error::geometry(format!(
                "expected {pages} device slots for pool {:?} and as many host slots or fewer, for all pools alike, found {} and {}",
                pool.name,
                device.len(),
                host.len()
            )));
        }
        if is_ring && host.iter().any(|&slot| slot < 0) {
            return Err(Error::geometry(
                "expected no empty host slot where there are fewer slots than pages",
            ));
        }
    }
    Ok(())
}
