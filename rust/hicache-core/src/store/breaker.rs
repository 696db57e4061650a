//! The breaker: after calls in a row that the device did not serve in time, further ones are refused at once for a
//! while, then one is let through to find out.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// So many late calls in a row open it.
const LATE_IN_A_ROW: u32 = 3;

/// Time of the first opening; each one that follows without a call in time between is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What a call finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Closed: it goes on.
    Free,
    /// It goes on, and alone, to find out.
    Probe,
    /// Open.
    Refused,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The device served it in time.
    InTime,
    /// The device did not.
    Late,
    /// Nothing can be serviced: every thread hangs in the device.
    Stuck,
    /// It says nothing of the device.
    Nothing,
}

/// State in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// Calls go on.
    Closed,
    /// Calls with a deadline are refused at once.
    Open,
    /// The next call is let through, or is under way, to find out.
    HalfOpen,
}

impl BreakerState {
    /// Name in Python and the tools.
    pub fn name(self) -> &'static str {
        match self {
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half-open",
        }
    }
}

#[derive(Default)]
pub(crate) struct Breaker {
    /// Whether it is not closed: a closed one costs calls no lock.
    is_open: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    late_in_a_row: u32,
    open: Option<Open>,
}

#[derive(Clone, Copy)]
struct Open {
    until: Instant,
    pause: Duration,
    is_probed: bool,
}

impl Breaker {
    /// Asks to go on.
    pub(crate) fn admit(&self, now: Instant) -> Admission {
        if !self.is_open.load(Ordering::Acquire) {
            return Admission::Free;
        }
        match &mut self.lock().open {
            None => Admission::Free,
            Some(open) if open.is_probed || now < open.until => Admission::Refused,
            Some(open) => {
                open.is_probed = true;
                Admission::Probe
            }
        }
    }

    /// Whether calls are refused at this moment. Asking changes nothing.
    pub(crate) fn refuses(&self, now: Instant) -> bool {
        self.is_open.load(Ordering::Acquire)
            && self.lock().open.is_some_and(|open| open.is_probed || now < open.until)
    }

    /// Takes note of how an admitted call ended. The pause, if it opened by it.
    pub(crate) fn note(&self, admission: Admission, verdict: Verdict, now: Instant) -> Option<Duration> {
        let mut state = self.lock();
        let is_probe = admission == Admission::Probe;
        if is_probe && let Some(open) = &mut state.open {
            open.is_probed = false;
        }
        state.late_in_a_row = match verdict {
            Verdict::InTime => 0,
            Verdict::Late => state.late_in_a_row.saturating_add(1),
            Verdict::Stuck => LATE_IN_A_ROW,
            Verdict::Nothing => return None,
        };
        let pause = match (&state.open, verdict) {
            // Only the probe closes it: a call that began before may end in time by chance.
            (Some(_), Verdict::InTime) if is_probe => {
                state.open = None;
                self.is_open.store(false, Ordering::Release);
                return None;
            }
            (Some(open), Verdict::Late | Verdict::Stuck) if is_probe => (2 * open.pause).min(LONGEST_PAUSE),
            (None, _) if state.late_in_a_row >= LATE_IN_A_ROW => FIRST_PAUSE,
            _ => return None,
        };
        state.open = Some(Open { until: now + pause, pause, is_probed: false });
        self.is_open.store(true, Ordering::Release);
        Some(pause)
    }

    /// Its state, in one word.
    pub(crate) fn state(&self, now: Instant) -> BreakerState {
        match self.lock().open {
            None => BreakerState::Closed,
            Some(open) if open.is_probed || now >= open.until => BreakerState::HalfOpen,
            Some(_) => BreakerState::Open,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A call that is admitted so and ends so.
    fn call(breaker: &Breaker, now: Instant, expected: Admission, verdict: Verdict) -> Option<Duration> {
        let admission = breaker.admit(now);
        assert_eq!(admission, expected);
        breaker.note(admission, verdict, now)
    }

    #[test]
    fn it_opens_probes_and_closes() {
        let (breaker, start) = (Breaker::default(), Instant::now());
        use Admission::{Free, Probe, Refused};
        use Verdict::{InTime, Late, Nothing};
        assert_eq!(call(&breaker, start, Free, Late), None);
        assert_eq!(call(&breaker, start, Free, Late), None);
        assert_eq!(call(&breaker, start, Free, InTime), None);
        assert_eq!(call(&breaker, start, Free, Late), None);
        assert_eq!(call(&breaker, start, Free, Nothing), None);
        assert_eq!(call(&breaker, start, Free, Late), None, "two in a row after one in time");
        assert_eq!(call(&breaker, start, Free, Late), Some(SECOND));
        assert_eq!((breaker.admit(start), breaker.refuses(start)), (Refused, true));
        assert_eq!(breaker.state(start), BreakerState::Open);

        let later = start + SECOND;
        assert!(!breaker.refuses(later), "a look-up is answered, so that the call to find out comes");
        assert_eq!(breaker.admit(later), Probe);
        assert_eq!((breaker.admit(later), breaker.refuses(later)), (Refused, true), "one at a time");
        assert_eq!(breaker.state(later), BreakerState::HalfOpen);
        assert_eq!(breaker.note(Free, InTime, later), None);
        assert_eq!(breaker.state(later), BreakerState::HalfOpen, "a call from before does not close it");
        assert_eq!(breaker.note(Probe, Late, later), Some(2 * SECOND));
        assert_eq!(breaker.admit(later + SECOND), Refused);

        let later = later + 2 * SECOND;
        assert_eq!(call(&breaker, later, Probe, Nothing), None);
        assert_eq!(
            call(&breaker, later, Probe, InTime),
            None,
            "one that said nothing is followed by another"
        );
        assert_eq!(breaker.state(later), BreakerState::Closed);
        assert_eq!(call(&breaker, later, Free, Late), None);
    }

    #[test]
    fn pauses_grow_up_to_half_a_minute_and_start_anew() {
        let (breaker, mut now) = (Breaker::default(), Instant::now());
        assert_eq!(call(&breaker, now, Admission::Free, Verdict::Stuck), Some(SECOND));
        for expected in [2, 4, 8, 16, 30, 30] {
            now += LONGEST_PAUSE;
            assert_eq!(call(&breaker, now, Admission::Probe, Verdict::Late), Some(expected * SECOND));
        }
        now += LONGEST_PAUSE;
        assert_eq!(call(&breaker, now, Admission::Probe, Verdict::InTime), None);
        assert_eq!(call(&breaker, now, Admission::Free, Verdict::Stuck), Some(SECOND));
    }
}
