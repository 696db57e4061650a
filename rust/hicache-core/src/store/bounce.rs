//! Requests that a call can leave behind: on threads of their own, in memory of the store.
//!
//! A request owns all that it touches. When a call gives it up while the device has it, it ends later, on its thread,
//! in memory that nobody looks at any more. Threads and memory are bounded: when every thread hangs in such a request,
//! further ones are refused at once.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::store::clock::Clock;
use crate::store::io::guarded;

/// Threads for bounced requests. They start when they are first needed.
pub(crate) const BOUNCE_THREADS: usize = 4;

/// Memory that all bounced requests hold at most. A page that is larger goes alone.
pub(crate) const BOUNCE_BYTES: u64 = 64 << 20;

/// Requests are given up while a device that answers is about to complete them: only when every thread is still in such
/// a one after this time, they hang.
const HANGING: Duration = Duration::from_millis(100);

/// How long closing waits for requests that are under way, before they are left to end by themselves.
const CLOSING: Duration = Duration::from_millis(500);

type Job = Box<dyn FnOnce() + Send>;

/// Threads and memory for requests that may be left behind. When it is closed, idle threads end, and the others as soon
/// as their requests do; nobody waits for them.
pub(crate) struct Bouncer {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Clock,
    state: Mutex<State>,
    /// A request came or ended, memory came back.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(u64, Job)>,
    threads: usize,
    idle: usize,
    /// Requests under way of each batch that still waits for them.
    running: HashMap<u64, usize>,
    /// Requests under way that nobody waits for.
    abandoned: usize,
    /// Since when every thread is in one of them.
    full_since: Option<Instant>,
    bytes: u64,
    batches: u64,
    is_closed: bool,
    /// To be done when the last request has ended.
    last: Option<Job>,
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.abandoned == 0
    }

    fn set_abandoned(&mut self, abandoned: usize, now: Instant) {
        self.abandoned = abandoned;
        let is_full = abandoned >= BOUNCE_THREADS;
        self.full_since = if is_full { self.full_since.or(Some(now)) } else { None };
    }

    fn is_stuck(&self, now: Instant) -> bool {
        self.full_since.is_some_and(|since| now >= since + HANGING)
    }
}

/// Why there is no memory for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoMemory {
    /// Others held it until the deadline.
    Late,
    /// Every thread hangs in the device.
    Stuck,
}

impl Bouncer {
    pub(crate) fn new(clock: Clock) -> Self {
        Bouncer { shared: Arc::new(Shared { clock, state: Mutex::default(), changed: Condvar::new() }) }
    }

    /// Whether every thread hangs in a request that was given up.
    pub(crate) fn is_stuck(&self) -> bool {
        self.shared.lock().is_stuck(self.shared.clock.now())
    }

    /// Requests given up that the device still has, and bytes that all requests hold.
    pub(crate) fn in_flight(&self) -> (usize, u64) {
        let state = self.shared.lock();
        (state.abandoned, state.bytes)
    }

    /// Memory for a request of so many bytes, if there is any now.
    pub(crate) fn try_memory(&self, bytes: u64) -> Option<BounceMemory> {
        self.shared.take(&mut self.shared.lock(), bytes)
    }

    /// Memory for a request of so many bytes, waited for until `deadline`.
    pub(crate) fn memory(&self, bytes: u64, deadline: Option<Instant>) -> Result<BounceMemory, NoMemory> {
        let mut state = self.shared.lock();
        loop {
            if state.is_stuck(self.shared.clock.now()) {
                return Err(NoMemory::Stuck);
            }
            if let Some(memory) = self.shared.take(&mut state, bytes) {
                return Ok(memory);
            }
            state = self.shared.wait(state, deadline).ok_or(NoMemory::Late)?;
        }
    }

    /// Takes no more requests, and does `last` when those under way have ended: now, within a moment, or whenever the
    /// device lets go of them, on the thread of the last one.
    pub(crate) fn close(&self, last: Job) {
        let until = self.shared.clock.now() + CLOSING;
        let mut state = self.shared.lock();
        state.is_closed = true;
        self.shared.changed.notify_all();
        while !state.is_idle() {
            match self.shared.wait(state, Some(until)) {
                Some(changed) => state = changed,
                None => {
                    state = self.shared.lock();
                    break;
                }
            }
        }
        if state.is_idle() {
            drop(state);
            last();
        } else {
            state.last = Some(last);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits for a change, or for threads to be taken for hanging; `None` when the deadline has passed.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        deadline: Option<Instant>,
    ) -> Option<MutexGuard<'a, State>> {
        let left = self.clock.left(deadline);
        if left.is_some_and(|left| left.is_zero()) {
            return None;
        }
        let hanging = state.full_since.and_then(|since| self.clock.left(Some(since + HANGING)));
        let hanging = hanging.filter(|time| !time.is_zero());
        let Some(left) = left.into_iter().chain(hanging).min() else {
            return Some(self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()));
        };
        let waited = self.changed.wait_timeout(state, left);
        Some(waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0)
    }

    fn take(self: &Arc<Self>, state: &mut State, bytes: u64) -> Option<BounceMemory> {
        if state.bytes > 0 && state.bytes.saturating_add(bytes) > BOUNCE_BYTES {
            return None;
        }
        state.bytes += bytes;
        Some(BounceMemory { shared: Arc::clone(self), bytes })
    }

    /// A thread of the pool.
    fn work(self: Arc<Self>) {
        let mut state = self.lock();
        loop {
            let Some((batch, job)) = state.waiting.pop_front() else {
                if state.is_closed {
                    state.threads -= 1;
                    return;
                }
                state.idle += 1;
                state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
                state.idle -= 1;
                continue;
            };
            *state.running.entry(batch).or_default() += 1;
            drop(state);
            job();
            state = self.lock();
            match state.running.get_mut(&batch) {
                Some(1) => drop(state.running.remove(&batch)),
                Some(running) => *running -= 1,
                None => {
                    let abandoned = state.abandoned - 1;
                    state.set_abandoned(abandoned, self.clock.now());
                }
            }
            let last = if state.is_idle() { state.last.take() } else { None };
            self.changed.notify_all();
            if let Some(last) = last {
                drop(state);
                // Closing panics no thread that is in nobody's way.
                let _ = guarded(|| {
                    last();
                    Ok(())
                });
                state = self.lock();
            }
        }
    }
}

/// Memory of the store for one request, counted until this is dropped.
pub(crate) struct BounceMemory {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Drop for BounceMemory {
    fn drop(&mut self) {
        self.shared.lock().bytes -= self.bytes;
        self.shared.changed.notify_all();
    }
}

type Inbox<T> = Arc<Mutex<VecDeque<(usize, io::Result<T>)>>>;

/// The requests of one call, which it waits for until its deadline and then leaves behind.
pub(crate) struct AbandonableBatch<T> {
    shared: Arc<Shared>,
    number: u64,
    inbox: Inbox<T>,
    in_flight: usize,
}

impl<T: Send + 'static> AbandonableBatch<T> {
    pub(crate) fn new(bouncer: &Bouncer) -> Self {
        let mut state = bouncer.shared.lock();
        state.batches += 1;
        let (shared, number) = (Arc::clone(&bouncer.shared), state.batches);
        AbandonableBatch { shared, number, inbox: Arc::default(), in_flight: 0 }
    }

    /// Hands a request to the threads. It owns what it touches.
    pub(crate) fn submit(&mut self, index: usize, request: impl FnOnce() -> io::Result<T> + Send + 'static) {
        let inbox = Arc::clone(&self.inbox);
        let job = move || {
            let ended = guarded(request);
            inbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push_back((index, ended));
        };
        self.in_flight += 1;
        let mut state = self.shared.lock();
        state.waiting.push_back((self.number, Box::new(job)));
        if state.idle < state.waiting.len() && state.threads < BOUNCE_THREADS {
            let name = format!("hicache-bounce-{}", state.threads);
            let shared = Arc::clone(&self.shared);
            // Without a thread, the request waits for one, and is late.
            if std::thread::Builder::new().name(name).spawn(move || shared.work()).is_ok() {
                state.threads += 1;
            }
        }
        self.shared.changed.notify_all();
    }

    /// Requests whose end was not looked at yet.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The next request that has ended. `None`: the deadline has passed, or every thread hangs in requests of others.
    pub(crate) fn next(&mut self, deadline: Option<Instant>) -> Option<(usize, io::Result<T>)> {
        let mut state = self.shared.lock();
        loop {
            if let Some(ended) =
                self.inbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop_front()
            {
                self.in_flight -= 1;
                return Some(ended);
            }
            if state.is_stuck(self.shared.clock.now()) {
                return None;
            }
            state = self.shared.wait(state, deadline)?;
        }
    }

    /// Leaves behind what has not ended: what waits is not begun, and what the device has ends by itself. How many
    /// requests that were.
    pub(crate) fn abandon(self) -> usize {
        self.leave()
    }
}

impl<T> AbandonableBatch<T> {
    fn leave(&self) -> usize {
        let mut state = self.shared.lock();
        let (waiting, left): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut state.waiting).into_iter().partition(|(batch, _)| *batch != self.number);
        state.waiting = waiting;
        let running = state.running.remove(&self.number).unwrap_or(0);
        let abandoned = state.abandoned + running;
        state.set_abandoned(abandoned, self.shared.clock.now());
        self.shared.changed.notify_all();
        drop(state);
        // Requests that were not begun give back their memory, which takes the lock.
        drop(left);
        running
    }
}

impl<T> Drop for AbandonableBatch<T> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const SOON: Duration = Duration::from_millis(20);

    fn soon() -> Option<Instant> {
        Some(Instant::now() + SOON)
    }

    /// Requests that hang until the sender is dropped, one more than `count` of them if there are threads for it.
    fn hang(bouncer: &Bouncer, count: usize) -> (mpsc::Sender<()>, AbandonableBatch<()>) {
        let (release, released) = mpsc::channel::<()>();
        let (begun, has_begun) = mpsc::channel();
        let released = Arc::new(Mutex::new(released));
        let mut batch = AbandonableBatch::new(bouncer);
        for index in 0..count {
            let (released, begun) = (Arc::clone(&released), begun.clone());
            batch.submit(index, move || {
                begun.send(()).unwrap();
                let _ = released.lock().unwrap().recv();
                Ok(())
            });
        }
        (0..count).for_each(|_| has_begun.recv().unwrap());
        (release, batch)
    }

    #[test]
    fn requests_end_and_panics_are_errors() {
        let bouncer = Bouncer::new(Clock::default());
        let mut batch = AbandonableBatch::new(&bouncer);
        for index in 0..20 {
            batch.submit(index, move || if index == 7 { panic!("seven") } else { Ok(index) });
        }
        let mut ended: Vec<_> = (0..20).map(|_| batch.next(None).unwrap()).collect();
        ended.sort_by_key(|(index, _)| *index);
        for (index, result) in ended {
            assert_eq!(result.ok(), (index != 7).then_some(index));
        }
        assert_eq!((batch.in_flight(), batch.abandon()), (0, 0));
        assert!(bouncer.shared.lock().threads <= BOUNCE_THREADS);
    }

    #[test]
    fn what_hangs_is_left_behind_and_others_go_on() {
        let bouncer = Bouncer::new(Clock::default());
        let (release, mut stuck) = hang(&bouncer, 2);
        assert!(stuck.next(soon()).is_none());
        assert_eq!(stuck.abandon(), 2);
        assert_eq!((bouncer.in_flight().0, bouncer.is_stuck()), (2, false));
        let mut other = AbandonableBatch::new(&bouncer);
        other.submit(0, || Ok(5));
        assert_eq!(other.next(None).unwrap().1.unwrap(), 5);
        drop(release);
        let mut state = bouncer.shared.lock();
        while state.abandoned > 0 {
            state = bouncer.shared.wait(state, None).unwrap();
        }
    }

    #[test]
    fn when_all_threads_hang_requests_are_refused_and_waiting_ones_are_not_begun() {
        let bouncer = Bouncer::new(Clock::default());
        let (release, stuck) = hang(&bouncer, BOUNCE_THREADS);
        let mut waiting = AbandonableBatch::new(&bouncer);
        waiting.submit(0, || Ok(()));
        assert!(waiting.next(soon()).is_none());
        assert_eq!(stuck.abandon(), BOUNCE_THREADS);
        assert!(!bouncer.is_stuck(), "they were given up this moment");
        assert!(waiting.next(None).is_none(), "nobody will come to it");
        assert_eq!(waiting.abandon(), 0);
        assert!(bouncer.is_stuck() && bouncer.shared.lock().waiting.is_empty());
        assert_eq!(bouncer.memory(1, None).err(), Some(NoMemory::Stuck));
        drop(release);
    }

    #[test]
    fn memory_is_bounded_and_a_large_page_goes_alone() {
        let bouncer = Bouncer::new(Clock::default());
        let large = bouncer.memory(BOUNCE_BYTES + 1, None).unwrap();
        assert!(bouncer.try_memory(1).is_none());
        assert_eq!(bouncer.memory(1, soon()).err(), Some(NoMemory::Late));
        drop(large);
        let most = bouncer.memory(BOUNCE_BYTES - 1, None).unwrap();
        let rest = bouncer.try_memory(1).unwrap();
        assert!(bouncer.try_memory(1).is_none());
        assert_eq!(bouncer.in_flight(), (0, BOUNCE_BYTES));
        drop((most, rest));
        assert_eq!(bouncer.in_flight(), (0, 0));
    }

    #[test]
    fn closing_leaves_the_end_to_the_last_request() {
        let bouncer = Bouncer::new(Clock::default());
        let (release, stuck) = hang(&bouncer, 1);
        let (closed, is_closed) = mpsc::channel();
        let last = closed.clone();
        bouncer.close(Box::new(move || last.send(()).unwrap()));
        assert!(is_closed.try_recv().is_err(), "a request is under way");
        stuck.abandon();
        assert!(is_closed.try_recv().is_err(), "it was given up, and is under way all the same");
        drop(release);
        is_closed.recv().unwrap();

        let idle = Bouncer::new(Clock::default());
        idle.close(Box::new(move || closed.send(()).unwrap()));
        is_closed.try_recv().unwrap();
    }
}
