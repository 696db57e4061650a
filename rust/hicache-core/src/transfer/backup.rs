//! Backups layer by layer: device rows to host slots to the store, the restore in reverse.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::event::{Event, HostEvent};
use super::executor::Executor;
use super::plan::TransferPlan;
use super::restore::{check_slots, check_view, regions};
use super::{Edge, Edges};
use crate::key::PageKey;
use crate::store::{BackupOptions, BackupOutcome, BackupReport, ChainStart, PoolMemory, View};
use crate::{Error, ErrorKind, Result};

/// Bytes of the pages that are copied and stored together.
const CHUNK_BYTES: u64 = 32 << 20;

/// One backup.
#[derive(Clone, Default)]
pub struct TransferBackup {
    /// Pages of one chain.
    pub keys: Vec<PageKey>,
    /// Of each pool a host slot for each page; or fewer slots than pages, for all pools alike, filled in turn.
    pub host_slots: Vec<Vec<i64>>,
    /// Of each pool the device slot of each page; -1 for none.
    pub device_slots: Vec<Vec<i64>>,
    /// Ends of earlier uses of the host slots.
    pub host_free: Vec<Event>,
    /// Ends of the work that writes the device rows: nothing is copied from them before.
    pub ready: Vec<Event>,
    /// By step, where layers are ready one after the other: the end of the work that writes that layer.
    pub layer_ready: Vec<Event>,
    /// Where the chain starts.
    pub start: ChainStart,
    /// Deadline and bounce, as for [`View::backup_with`].
    pub options: BackupOptions,
    /// Which orders are kept.
    pub edges: Edges,
}

struct Unit {
    pages: Range<usize>,
    first_slot: usize,
}

/// Backups to one view through one plan.
pub struct LayerwiseBackup {
    view: Arc<View>,
    plan: Arc<TransferPlan>,
}

impl LayerwiseBackup {
    /// Backups from the memory of `plan` to `view`.
    ///
    /// # Errors
    /// As [`super::LayerwiseRestore::new`].
    pub fn new(view: Arc<View>, plan: Arc<TransferPlan>) -> Result<LayerwiseBackup> {
        check_view(&view, &plan)?;
        Ok(LayerwiseBackup { view, plan })
    }

    /// Starts a backup on a thread of its own.
    ///
    /// # Errors
    /// `Geometry` for slots that do not fit, `Closed`, `Io` where no thread can be had.
    pub fn start(
        &self,
        request: TransferBackup,
        executor: Arc<dyn Executor>,
    ) -> Result<LayerwiseBackupTicket> {
        self.view.inner.check_open()?;
        check_slots(&self.plan, request.keys.len(), &request.host_slots, &request.device_slots)?;
        if !request.layer_ready.is_empty() && request.layer_ready.len() != self.plan.steps() as usize {
            let (steps, found) = (self.plan.steps(), request.layer_ready.len());
            return Err(Error::config(format!(
                "expected an event for each of {steps} layers, found {found}"
            )));
        }
        let drained = HostEvent::new();
        let this = LayerwiseBackup { view: Arc::clone(&self.view), plan: Arc::clone(&self.plan) };
        let its_end = Arc::clone(&drained);
        let thread = std::thread::Builder::new().name("hicache-backup".into()).spawn(move || {
            let _end = End(its_end);
            let done = this.run(&request, &*executor);
            executor.record(None)?.wait_until(None)?;
            done
        });
        let thread =
            thread.map_err(|error| Error::new(ErrorKind::Io, format!("cannot start a backup: {error}")))?;
        Ok(LayerwiseBackupTicket { drained, thread: Mutex::new(Some(thread)) })
    }

    fn run(&self, request: &TransferBackup, executor: &dyn Executor) -> Result<BackupReport> {
        let deadline = request.options.deadline;
        let mut report = BackupReport { outcomes: Vec::new(), raw_bytes: 0, stored_bytes: 0, reason: None };
        for event in request.host_free.iter().filter(|_| request.edges.hold(Edge::SlotReuse)) {
            if !event.wait_until(deadline)? {
                report.outcomes = vec![BackupOutcome::Late; request.keys.len()];
                report.reason = Some("the host slots were not free before the deadline".into());
                return Ok(report);
            }
        }
        for event in request.ready.iter().filter(|_| request.edges.hold(Edge::Ready)) {
            executor.wait(event)?;
        }
        let units = self.units(request);
        let mut copied: Option<Event> = None;
        for (number, unit) in units.iter().enumerate() {
            let mine = match copied.take() {
                Some(copied) => copied,
                None => self.copy(request, unit, executor, number == 0)?,
            };
            // The next pages are copied while these are stored, to other slots, which were stored before that.
            let next = units.get(number + 1).filter(|next| next.first_slot != unit.first_slot);
            copied = next.map(|next| self.copy(request, next, executor, false)).transpose()?;
            self.store(request, unit, &mine, &mut report)?;
        }
        Ok(report)
    }

    /// Issues the copies of some pages; the event of their end.
    fn copy(
        &self,
        request: &TransferBackup,
        unit: &Unit,
        executor: &dyn Executor,
        is_first: bool,
    ) -> Result<Event> {
        let host = request.host_slots.iter().map(|slots| &slots[unit.first_slot..][..unit.pages.len()]);
        let device = request.device_slots.iter().map(|slots| &slots[unit.pages.clone()]);
        let pairs: Vec<(&[i64], &[i64])> = host.zip(device).collect();
        let slots = Arc::new(self.plan.backup_slots(&pairs)?);
        for plan in self.plan.backup() {
            if let (true, true, Some(event)) =
                (is_first, request.edges.hold(Edge::Ready), request.layer_ready.get(plan.step as usize))
            {
                executor.wait(event)?;
            }
            executor.copy(plan, &slots)?;
        }
        executor.record(None)
    }

    /// Stores pages when they have been copied.
    fn store(
        &self,
        request: &TransferBackup,
        unit: &Unit,
        copied: &Event,
        report: &mut BackupReport,
    ) -> Result<()> {
        let is_late = request.edges.hold(Edge::Load) && !copied.wait_until(request.options.deadline)?;
        if is_late {
            report.outcomes.resize(unit.pages.end, BackupOutcome::Late);
            report
                .reason
                .get_or_insert_with(|| "the device did not hand its pages over before the deadline".into());
            return Ok(());
        }
        // A page that has no device slot was not copied: its host slot holds something else.
        let of_pool = |(host, device): (&Vec<i64>, &Vec<i64>)| -> Vec<i64> {
            let host = host[unit.first_slot..].iter();
            host.zip(&device[unit.pages.clone()])
                .map(|(&host, &device)| if device < 0 { -1 } else { host })
                .collect()
        };
        let slots: Vec<Vec<i64>> =
            request.host_slots.iter().zip(&request.device_slots).map(of_pool).collect();
        let pools = self.plan.pools().iter().zip(&slots);
        let memory =
            pools.map(|(pool, slots)| PoolMemory { regions: regions(&pool.host.memory), slots }).collect();
        let start = match unit.pages.start.checked_sub(1) {
            None => request.start,
            Some(before) => ChainStart {
                parent: Some(request.keys[before]),
                depth: request.start.depth.map(|depth| depth + unit.pages.start as u32),
            },
        };
        let keys = &request.keys[unit.pages.clone()];
        let stored = self.view.backup_with(keys, memory, start, request.options)?;
        report.outcomes.extend(stored.outcomes);
        report.raw_bytes += stored.raw_bytes;
        report.stored_bytes += stored.stored_bytes;
        report.reason = report.reason.take().or(stored.reason);
        Ok(())
    }

    fn units(&self, request: &TransferBackup) -> Vec<Unit> {
        let pages = request.keys.len();
        let ring = request.host_slots[0].len();
        let page_bytes: u64 = (0..self.plan.pools().len()).map(|pool| self.view.page_bytes(pool)).sum();
        let chunk = (CHUNK_BYTES / page_bytes.max(1)).max(1) as usize;
        // With fewer slots than pages one half is stored while the other is filled; a single slot has no other half,
        // so its pages go one by one.
        let halves = if ring >= pages || ring < 2 { 1 } else { 2 };
        let chunk = if ring >= pages { chunk } else { chunk.min(ring / halves) };
        let unit = |(number, start): (usize, usize)| Unit {
            pages: start..(start + chunk).min(pages),
            first_slot: if ring >= pages { start } else { number % halves * (ring / halves) },
        };
        (0..pages).step_by(chunk.max(1)).enumerate().map(unit).collect()
    }
}

struct End(Arc<HostEvent>);

impl Drop for End {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // What it had issued may still be under way.
            self.0.fail("the backup panicked");
        }
        self.0.set();
    }
}

/// A backup under way. Dropping it lets the backup go on.
pub struct LayerwiseBackupTicket {
    drained: Arc<HostEvent>,
    thread: Mutex<Option<JoinHandle<Result<BackupReport>>>>,
}

impl LayerwiseBackupTicket {
    /// Comes when the host slots and the device rows may be used again.
    pub fn drained(&self) -> Event {
        Arc::clone(&self.drained) as Event
    }

    /// Waits until the pages have been stored, and says what became of each. It answers once.
    ///
    /// # Errors
    /// What the backup ended with; `Config` the second time.
    pub fn finish(&self) -> Result<BackupReport> {
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let thread = thread.ok_or_else(|| Error::config("the backup has been finished before"))?;
        thread.join().map_err(|_| Error::new(ErrorKind::Io, "the backup panicked"))?
    }
}
