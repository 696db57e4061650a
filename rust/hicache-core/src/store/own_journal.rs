//! What this process says to the others, and the room that saying it takes.
//!
//! An add comes with the room for its frame. So does the reserve, in which a journal that is large for its root is
//! written anew: without it, a root that filled up with journals would never give any of them back.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use crate::format::frame::{Frame, FrameKind, encode_counters, encode_seal, encode_touch};
use crate::format::setup::Setup;
use crate::namespace::Fingerprint;
use crate::store::budget::Room;
use crate::store::journal::Journal;
use crate::store::namespace_state::NamespaceState;
use crate::store::{Inner, now_ns, room};

/// Counters go to the journal at most this often while the store works.
const COUNTERS_EVERY: Duration = Duration::from_secs(1);

/// This process's journal, begun with the first thing that it says.
pub(crate) struct JournalState {
    pub(crate) journal: Option<Journal>,
    /// This process has ended for the others: it says nothing any more.
    pub(crate) has_ended: bool,
    counters_at: Instant,
    counters_sent: u64,
    /// How this process is set up, and whether the journal says so.
    pub(crate) setup: Setup,
    pub(crate) is_setup_said: bool,
    /// Bytes of the budget that are kept for writing the journal anew.
    reserve_bytes: u64,
}

impl JournalState {
    /// Nothing was said yet.
    pub(crate) fn new(setup: Setup) -> Self {
        JournalState {
            journal: None,
            has_ended: false,
            counters_at: Instant::now(),
            counters_sent: 0,
            setup,
            is_setup_said: false,
            reserve_bytes: 0,
        }
    }
}

/// Bytes on disk that a publication's frames need.
pub(crate) struct FrameRoom {
    /// By so many the journal grows.
    pub(crate) growth: u64,
    /// So many are to be kept, to write the journal anew one day: for [`Inner::keep_reserve`].
    pub(crate) reserve: u64,
}

impl Inner {
    /// Says something to all processes.
    pub(crate) fn say(
        &self,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> io::Result<()> {
        self.say_at(now_ns(), kind, namespace, records, body)
    }

    /// Says something that became true at `written_ns`.
    pub(crate) fn say_at(
        &self,
        written_ns: u64,
        kind: FrameKind,
        namespace: Fingerprint,
        records: u32,
        body: &[u8],
    ) -> io::Result<()> {
        let mut state = self.lock_journal();
        self.started(&mut state)?;
        self.say_setup(&mut state);
        // A unit has taken the room for its frame with its own.
        let growth =
            if kind == FrameKind::Add { 0 } else { self.started(&mut state)?.growth(body.len() as u64) };
        let room = self.room_to_say(growth);
        let journal = self.started(&mut state)?;
        let said = journal.append_at(&self.transfers, written_ns, kind, namespace, records, body);
        drop(room);
        said
    }

    /// Says what another process, which is dead, has said.
    pub(crate) fn say_copy(&self, frame: &Frame<'_>) -> io::Result<()> {
        let mut state = self.lock_journal();
        let growth = self.started(&mut state)?.growth(frame.body.len() as u64);
        let room = self.room_to_say(growth);
        let said = self.started(&mut state)?.append_copy(&self.transfers, frame);
        drop(room);
        said
    }

    /// Room for what must be said also in a full root, such as removes, without which nothing would ever leave it:
    /// where there is none, they use what the journal took ahead.
    fn room_to_say(&self, growth: u64) -> Option<Room<'_>> {
        if growth > 0 { self.budget.take(growth).ok() } else { None }
    }

    /// Whether this process has said anything yet.
    pub(crate) fn is_writing(&self) -> bool {
        self.lock_journal().journal.is_some()
    }

    /// Room that frames with so many bytes of records need.
    pub(crate) fn frame_room(&self, body_bytes: u64) -> io::Result<FrameRoom> {
        let mut state = self.lock_journal();
        self.started(&mut state)?;
        self.say_setup(&mut state);
        let kept = state.reserve_bytes;
        let journal = self.started(&mut state)?;
        let growth = journal.growth(body_bytes);
        let reserve = journal.reserve(growth, self.budget.capacity()).saturating_sub(kept);
        Ok(FrameRoom { growth, reserve })
    }

    /// Keeps of `room` what the journal lacks to be written anew.
    pub(crate) fn keep_reserve(&self, mut room: Room<'_>) {
        let mut state = self.lock_journal();
        let wanted = match &state.journal {
            Some(journal) => journal.reserve(0, self.budget.capacity()),
            None => 0,
        };
        let kept = room.split(wanted.saturating_sub(state.reserve_bytes));
        state.reserve_bytes += kept.keep();
        drop(state);
        room.give_back();
    }

    /// Lets go of what was kept for writing the journal anew.
    pub(crate) fn drop_reserve(&self) {
        self.budget.kept(std::mem::take(&mut self.lock_journal().reserve_bytes)).give_back();
    }

    /// Whether the journal takes a share of the capacity that cannot wait to be given back.
    pub(crate) fn has_large_journal(&self) -> bool {
        let state = self.lock_journal();
        state.journal.as_ref().is_some_and(|journal| journal.is_large(self.budget.capacity()))
    }

    /// Writes this process's journal anew when it is worth it, in the room that was kept for that; pages leave if it is
    /// not enough. Called from one thread.
    ///
    /// # Errors
    /// What the system says; the journal is as it was.
    pub(crate) fn keep_journal_small(&self) -> io::Result<()> {
        // It stays kept meanwhile: else each backup would ask for as much again.
        let kept = self.lock_journal().reserve_bytes;
        let mut taken = None;
        let rewritten = self.checkpoint_journal(&mut |bytes| {
            let missing = bytes.saturating_sub(kept);
            if missing > 0 {
                taken = room::take(self, missing, None).ok();
            }
            // More comes free than is taken: a root over its capacity, which was made smaller, only gains.
            missing == 0 || taken.is_some() || self.budget.granted() > self.budget.capacity()
        });
        if matches!(rewritten, Ok(true)) {
            let kept = std::mem::take(&mut self.lock_journal().reserve_bytes);
            drop((self.budget.kept(kept), taken));
            // The old journal's blocks went back, the new one's were taken: the files say how many.
            self.budget.measure();
        } else if let Some(taken) = taken {
            taken.give_back();
        }
        rewritten.map(drop)
    }

    /// Makes this process known as alive, before its first segment appears.
    pub(crate) fn announce(&self) -> io::Result<()> {
        self.started(&mut self.lock_journal()).map(|_| ())
    }

    pub(crate) fn started<'a>(&self, state: &'a mut JournalState) -> io::Result<&'a mut Journal> {
        if state.has_ended {
            return Err(io::Error::other("the store is closed"));
        }
        if state.journal.is_none() {
            // A call that is under way while the store closes must not bring the process back to life.
            if self.closed.load(Ordering::Acquire) {
                return Err(io::Error::other("the store is closed"));
            }
            let started = Journal::create(&self.paths, self.process);
            // The code is kept, so that a disk without room for a journal counts as full.
            state.journal = Some(started.map_err(|error| match error.errno() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::other(error),
            })?);
        }
        let Some(journal) = &mut state.journal else { unreachable!("filled above") };
        Ok(journal)
    }

    /// Says how this process is set up, if its journal has begun and does not say so. Where there is no room for it, or
    /// it fails, it is said later, or never: nothing depends on it.
    pub(crate) fn say_setup(&self, state: &mut JournalState) {
        let (Some(journal), false) = (&mut state.journal, state.is_setup_said || self.options.read_only)
        else {
            return;
        };
        let body = state.setup.encode();
        let Ok(room) = self.budget.take(journal.growth(body.len() as u64)) else { return };
        let said = journal.append(&self.transfers, FrameKind::Setup, Fingerprint([0; 16]), 1, &body);
        drop(room);
        state.is_setup_said = said.is_ok();
    }

    /// Leaves the totals in the journal, now and then. A process that never wrote anything leaves none.
    pub(crate) fn leave_counters(&self, now: bool) {
        // Who is in a hurry does not wait for a thread that writes, or hangs in the device.
        let mut state = match self.journal.try_lock() {
            Ok(state) => state,
            Err(TryLockError::WouldBlock) if !now => return,
            Err(_) => self.lock_journal(),
        };
        if self.options.read_only || (!now && state.counters_at.elapsed() < COUNTERS_EVERY) {
            return;
        }
        let values: Vec<(u32, u64)> =
            self.counters.snapshot().into_iter().map(|(counter, value)| (counter as u32, value)).collect();
        let sum = values.iter().map(|(_, value)| value).sum();
        if sum != state.counters_sent {
            let body = encode_counters(&values);
            let growth = state.journal.as_ref().map_or(0, |journal| journal.growth(body.len() as u64));
            let room = if now { self.room_to_say(growth) } else { self.budget.take(growth).ok() };
            // Counters that cannot be left now are left the next time, or lost with the process.
            if now || room.is_some() {
                let (kind, records) = (FrameKind::Counters, values.len() as u32);
                let _ = self.started(&mut state).and_then(|journal| {
                    journal.append(&self.transfers, kind, Fingerprint([0; 16]), records, &body)
                });
                drop(room);
                state.counters_sent = sum;
            }
        }
        self.say_setup(&mut state);
        state.counters_at = Instant::now();
    }

    /// Tells of the segments of a namespace that were sealed since the last time.
    pub(crate) fn tell_sealed(&self, state: &NamespaceState) {
        for sealed in state.writer.take_sealed() {
            let body = encode_seal(sealed.segment, sealed.file_bytes);
            // The seal in the segment says the same.
            let _ = self.say(FrameKind::Seal, state.fingerprint, 1, &body);
        }
    }

    /// Tells all of the prefixes that were used lately.
    pub(crate) fn leave_touches(&self) {
        for state in self.open_namespaces() {
            let touches = state.take_touches();
            if touches.is_empty() || self.options.read_only {
                continue;
            }
            // Recency is a hint: what cannot be told now, or finds no room, is forgotten.
            let body = encode_touch(&touches);
            let mut journal = self.lock_journal();
            let _ = self.started(&mut journal).and_then(|journal| {
                let room = self.budget.take(journal.growth(body.len() as u64));
                let room = room.map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
                let (kind, records) = (FrameKind::Touch, touches.len() as u32);
                let said = journal.append(&self.transfers, kind, state.fingerprint, records, &body);
                drop(room);
                said
            });
        }
    }

    pub(crate) fn lock_journal(&self) -> MutexGuard<'_, JournalState> {
        self.journal.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
