//! The one place that time comes from where a call waits or is judged by it: tests let it run ahead.

use std::time::{Duration, Instant};

/// A monotonic clock.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    /// Nanoseconds by which it is ahead of the machine's.
    #[cfg(feature = "testing")]
    pub ahead: std::sync::Arc<std::sync::atomic::AtomicU64>,
}

impl Clock {
    /// This moment.
    pub fn now(&self) -> Instant {
        #[cfg(feature = "testing")]
        return Instant::now() + Duration::from_nanos(self.ahead.load(std::sync::atomic::Ordering::Relaxed));
        #[cfg(not(feature = "testing"))]
        Instant::now()
    }

    /// Whether a deadline has passed; `None` never does.
    pub fn is_past(&self, deadline: Option<Instant>) -> bool {
        deadline.is_some_and(|deadline| self.now() >= deadline)
    }

    /// Time left until `deadline`; `None` for no end.
    pub(crate) fn left(&self, deadline: Option<Instant>) -> Option<Duration> {
        deadline.map(|deadline| deadline.saturating_duration_since(self.now()))
    }

    /// Lets it run ahead.
    #[cfg(feature = "testing")]
    pub fn advance(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.ahead.fetch_add(nanos, std::sync::atomic::Ordering::Relaxed);
    }
}
