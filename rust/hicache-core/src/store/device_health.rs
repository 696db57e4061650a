//! Whether the device keeps up with the deadlines of calls: how long its transfers take, and what follows from it.
//!
//! A slow device makes calls go through memory of the store ([`Bounce::Auto`]), and one that does not answer at all
//! opens the [`breaker`](crate::store::breaker). Both concern calls with a deadline alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::store::breaker::{Admission, Breaker, BreakerState, Verdict};
use crate::store::clock::Clock;
use crate::store::counters::{Counter, Counters};
use crate::store::latencies::Latencies;
use crate::store::notices::{Level, Notices};
use crate::{Error, Result};

/// A device is slow when its transfers take longer than this part of a call's time.
const SLOW_PART: u32 = 4;

/// A call that had less time than this says nothing of the device.
const SHORTEST_JUDGED: Duration = Duration::from_millis(50);

/// A call that ends so long after its deadline has exceeded it: the device did not complete what was in flight.
const GRACE: Duration = Duration::from_millis(100);

/// When payload goes through memory of the store, on its way to or from the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Bounce {
    /// Never: the call may exceed its deadline by what is in flight, since the system writes into the caller's memory.
    #[default]
    Never,
    /// When the device is slow for the call's deadline.
    Auto,
    /// Always.
    Always,
}

impl Bounce {
    /// Mode of this name.
    ///
    /// # Errors
    /// `Config` for another name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "never" => Ok(Bounce::Never),
            "auto" => Ok(Bounce::Auto),
            "always" => Ok(Bounce::Always),
            _ => Err(Error::config(format!("expected bounce never, auto or always, found {name:?}"))),
        }
    }

    /// Name of the mode.
    pub fn name(self) -> &'static str {
        match self {
            Bounce::Never => "never",
            Bounce::Auto => "auto",
            Bounce::Always => "always",
        }
    }
}

/// What is known of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceReport {
    /// Whether it is slow for the time that the latest call with a deadline had.
    pub is_slow: bool,
    /// Time within which 99 of 100 recent payload reads ended.
    pub p99_read: Duration,
    /// The same of payload writes.
    pub p99_write: Duration,
    /// State of the breaker.
    pub breaker: BreakerState,
    /// Requests given up by their calls that the device has not completed yet.
    pub abandoned: usize,
    /// Memory of the store that bounced requests hold, in bytes.
    pub bounce_bytes: u64,
}

/// Times of transfers and the breaker of one store.
pub(crate) struct DeviceHealth {
    pub(crate) clock: Clock,
    pub(crate) reads: Latencies,
    pub(crate) writes: Latencies,
    breaker: Breaker,
    /// Time that the latest call with a deadline had, in us; 0 before there was one.
    latest_us: AtomicU64,
    counters: Arc<Counters>,
    notices: Arc<Notices>,
}

impl DeviceHealth {
    pub(crate) fn new(clock: Clock, counters: Arc<Counters>, notices: Arc<Notices>) -> Self {
        DeviceHealth {
            reads: Latencies::new(clock.clone()),
            writes: Latencies::new(clock.clone()),
            clock,
            breaker: Breaker::default(),
            latest_us: AtomicU64::new(0),
            counters,
            notices,
        }
    }

    /// Begins a restore or backup. `None`: it is refused, since the device was too slow for those before.
    pub(crate) fn begin(&self, deadline: Option<Instant>) -> Option<Call<'_>> {
        let Some(deadline) = deadline else {
            return Some(Call { health: self, limits: None, admission: Admission::Free });
        };
        let began = self.clock.now();
        let time = deadline.saturating_duration_since(began);
        if time >= SHORTEST_JUDGED {
            self.latest_us.store(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        let admission = self.breaker.admit(began);
        if admission == Admission::Refused {
            self.counters.add(Counter::BreakerRefused, 1);
            return None;
        }
        Some(Call { health: self, limits: Some(Limits { deadline, time }), admission })
    }

    /// Whether calls with a deadline are refused at this moment.
    pub(crate) fn refuses(&self) -> bool {
        self.breaker.refuses(self.clock.now())
    }

    /// Whether transfers take too long for calls that have so much time.
    fn is_slow(&self, time: Duration) -> bool {
        self.reads.p99().max(self.writes.p99()) > time / SLOW_PART
    }

    /// What is known; what bounced requests hold is for others to fill in.
    pub(crate) fn report(&self) -> DeviceReport {
        let latest = Duration::from_micros(self.latest_us.load(Ordering::Relaxed));
        DeviceReport {
            is_slow: !latest.is_zero() && self.is_slow(latest),
            p99_read: self.reads.p99(),
            p99_write: self.writes.p99(),
            breaker: self.breaker.state(self.clock.now()),
            abandoned: 0,
            bounce_bytes: 0,
        }
    }
}

/// A restore or backup under way, judged when it ends; one that is only dropped says nothing of the device.
pub(crate) struct Call<'a> {
    health: &'a DeviceHealth,
    limits: Option<Limits>,
    admission: Admission,
}

#[derive(Clone, Copy)]
struct Limits {
    deadline: Instant,
    time: Duration,
}

/// What a call came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CallEnd {
    /// Pages moved.
    pub(crate) moved: usize,
    /// Pages that came too late.
    pub(crate) late: usize,
    /// No request could be made, since every thread for bounced ones hangs.
    pub(crate) is_stuck: bool,
}

impl Call<'_> {
    /// Whether its payload goes through memory of the store. A call that finds out whether the device answers again
    /// does so too, unless it never may.
    pub(crate) fn bounces(&self, bounce: Bounce) -> bool {
        match (bounce, self.limits) {
            (Bounce::Always, _) => true,
            (Bounce::Never, _) | (Bounce::Auto, None) => false,
            (Bounce::Auto, Some(limits)) => {
                self.admission == Admission::Probe || self.health.is_slow(limits.time)
            }
        }
    }

    /// Judges the call.
    pub(crate) fn end(mut self, end: CallEnd) {
        let Some(limits) = self.limits.take() else { return };
        let health = self.health;
        let now = health.clock.now();
        let is_past = now > limits.deadline + GRACE;
        if is_past && !limits.time.is_zero() {
            health.counters.add(Counter::CallsPastDeadline, 1);
        }
        let verdict = if limits.time < SHORTEST_JUDGED {
            Verdict::Nothing
        } else if end.is_stuck {
            Verdict::Stuck
        } else if end.late > 0 {
            // Much was asked for, and the device moved what it could: that is no fault of its.
            // What it still has of this call counts as a slow transfer, see `Latencies::p99`.
            let was_served = end.moved > 0 && !is_past && !health.is_slow(limits.time);
            if was_served { Verdict::Nothing } else { Verdict::Late }
        } else if is_past {
            Verdict::Late
        } else if end.moved > 0 {
            Verdict::InTime
        } else {
            Verdict::Nothing
        };
        self.note(verdict, now);
    }

    fn note(&self, verdict: Verdict, now: Instant) {
        let health = self.health;
        if let Some(pause) = health.breaker.note(self.admission, verdict, now) {
            health.counters.add(Counter::BreakerOpenings, 1);
            health.notices.push(Level::Warning, "breaker", || {
                format!(
                    "the device is too slow for the deadlines of calls (99 of 100 reads within {:?}): those with a deadline are answered \"late\" at once for {pause:?}",
                    health.reads.p99()
                )
            });
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        // A call that failed before it came to the device must not keep the next one from finding out.
        if self.limits.is_some() {
            self.note(Verdict::Nothing, self.health.clock.now());
        }
    }
}
