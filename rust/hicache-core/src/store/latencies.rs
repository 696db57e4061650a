//! How long transfers took lately, and how long those in flight have taken so far. No locks: every payload transfer
//! leaves its mark here.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::store::clock::Clock;

/// Transfers remembered.
const WINDOW: usize = 256;

/// Transfers that ended longer ago say nothing any more.
const RECENT: Duration = Duration::from_secs(10);

/// Threads told apart; of two with the same place the later one is watched.
const PLACES: usize = 64;

/// Times of one kind of transfer.
pub(crate) struct Latencies {
    clock: Clock,
    started: Instant,
    next: AtomicU32,
    /// End in ms since `started` in the upper half, time taken in units of 16 us in the lower; 0 for none.
    ended: [AtomicU64; WINDOW],
    /// Beginning of what each thread has in flight, in us since `started`; 0 for none.
    in_flight: [AtomicU64; PLACES],
}

impl Latencies {
    /// None yet.
    pub(crate) fn new(clock: Clock) -> Self {
        Latencies {
            started: clock.now(),
            clock,
            next: AtomicU32::new(0),
            ended: [const { AtomicU64::new(0) }; WINDOW],
            in_flight: [const { AtomicU64::new(0) }; PLACES],
        }
    }

    /// Carries out a transfer and remembers how long it took.
    pub(crate) fn timed<T>(&self, transfer: impl FnOnce() -> T) -> T {
        let began = self.clock.now();
        let _watch = self.watch(began);
        let done = transfer();
        let ended = self.clock.now();
        self.note(ended, ended.saturating_duration_since(began));
        done
    }

    /// Carries out a transfer that is too small to be a measure, and is one only when it does not end.
    pub(crate) fn watched<T>(&self, transfer: impl FnOnce() -> T) -> T {
        let _watch = self.watch(self.clock.now());
        transfer()
    }

    fn watch(&self, began: Instant) -> Watch<'_> {
        let place = &self.in_flight[PLACE.with(|place| *place)];
        place.store(self.micros(began).max(1), Ordering::Relaxed);
        Watch(place)
    }

    /// Remembers that a transfer took, or has taken so far, this long.
    pub(crate) fn note(&self, ended: Instant, took: Duration) {
        let ms = self.micros(ended) / 1000;
        let units = u32::try_from(took.as_micros() >> 4).unwrap_or(u32::MAX);
        let index = self.next.fetch_add(1, Ordering::Relaxed) as usize % WINDOW;
        // The first bit tells an entry from none.
        self.ended[index].store(((ms & 0x7fff_ffff) << 32) | 1 << 63 | u64::from(units), Ordering::Relaxed);
    }

    /// Time within which 99 of 100 recent transfers ended; a transfer in flight counts when it has taken longer so
    /// far. Zero when there were none.
    pub(crate) fn p99(&self) -> Duration {
        let now = self.clock.now();
        let now_us = self.micros(now);
        let oldest = (now_us / 1000).saturating_sub(RECENT.as_millis() as u64);
        let mut units: Vec<u32> = Vec::with_capacity(WINDOW);
        for entry in &self.ended {
            let entry = entry.load(Ordering::Relaxed);
            if entry != 0 && (entry >> 32) & 0x7fff_ffff >= oldest {
                units.push(entry as u32);
            }
        }
        let ended = match units.len().checked_sub(1) {
            None => Duration::ZERO,
            Some(last) => {
                let (_, units, _) = units.select_nth_unstable(last - last / 100);
                Duration::from_micros(u64::from(*units) << 4)
            }
        };
        let begun = self.in_flight.iter().map(|place| place.load(Ordering::Relaxed));
        let stuck = begun.filter(|&began| began != 0).map(|began| now_us.saturating_sub(began)).max();
        ended.max(Duration::from_micros(stuck.unwrap_or(0)))
    }

    fn micros(&self, moment: Instant) -> u64 {
        u64::try_from(moment.saturating_duration_since(self.started).as_micros()).unwrap_or(u64::MAX)
    }
}

/// Ends the watch of a transfer, also when it panics.
struct Watch<'a>(&'a AtomicU64);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

thread_local! {
    /// This thread's place.
    static PLACE: usize = {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) as usize % PLACES
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn one_slow_transfer_of_many_is_not_a_slow_device_and_three_are() {
        let latencies = Latencies::new(Clock::default());
        assert_eq!(latencies.p99(), Duration::ZERO);
        let now = Instant::now();
        (0..253).for_each(|_| latencies.note(now, 2 * MS));
        latencies.note(now, 900 * MS);
        latencies.note(now, 900 * MS);
        assert_eq!(latencies.p99(), 2 * MS);
        latencies.note(now, 900 * MS);
        assert_eq!(latencies.p99(), 900 * MS);
        // The window moves on.
        (0..256).for_each(|_| latencies.note(now, 3 * MS));
        assert!(latencies.p99() < 4 * MS);
    }

    #[test]
    fn few_transfers_are_judged_by_the_slowest() {
        let latencies = Latencies::new(Clock::default());
        let now = Instant::now();
        [1, 1, 80, 1].into_iter().for_each(|ms| latencies.note(now, ms * MS));
        assert_eq!(latencies.p99(), 80 * MS);
    }

    #[test]
    fn what_does_not_end_counts_while_it_lasts() {
        let latencies = Latencies::new(Clock::default());
        latencies.timed(|| {
            std::thread::sleep(5 * MS);
            assert!(latencies.p99() >= 5 * MS);
        });
        latencies.watched(|| std::thread::sleep(MS));
        assert!(latencies.p99() >= 5 * MS, "it ended, and is remembered");
    }

    #[cfg(feature = "testing")]
    #[test]
    fn what_ended_long_ago_is_forgotten() {
        let clock = Clock::default();
        let latencies = Latencies::new(clock.clone());
        latencies.note(clock.now(), 900 * MS);
        clock.advance(RECENT - 500 * MS);
        assert!(latencies.p99() > 800 * MS);
        clock.advance(2000 * MS);
        assert_eq!(latencies.p99(), Duration::ZERO);
    }
}
