//! A lock that can be waited for until a deadline: whoever has its turn may hang in the device.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A value for one thread at a time.
pub(crate) struct Turn<T> {
    slot: Mutex<Slot<T>>,
    back: Condvar,
}

struct Slot<T> {
    /// `None` while a thread has it.
    value: Option<Box<T>>,
    waiting: u32,
}

impl<T> Turn<T> {
    pub(crate) fn new(value: T) -> Self {
        Turn { slot: Mutex::new(Slot { value: Some(Box::new(value)), waiting: 0 }), back: Condvar::new() }
    }

    /// Takes the value, as long as it takes.
    pub(crate) fn take(&self) -> Taken<'_, T> {
        loop {
            // A day is as good as for ever, and an end that never comes needs no other code.
            if let Some(taken) = self.take_within(Duration::from_secs(86_400)) {
                return taken;
            }
        }
    }

    /// Takes the value; `None` when others have it for longer than this.
    pub(crate) fn take_within(&self, patience: Duration) -> Option<Taken<'_, T>> {
        let mut slot = self.slot();
        if slot.value.is_none() {
            let until = Instant::now() + patience;
            slot.waiting += 1;
            while slot.value.is_none() {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let waited = self.back.wait_timeout(slot, left);
                slot = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            }
            slot.waiting -= 1;
        }
        Some(Taken { turn: self, value: Some(slot.value.take()?) })
    }

    fn slot(&self) -> MutexGuard<'_, Slot<T>> {
        self.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The value, until this is dropped.
pub(crate) struct Taken<'a, T> {
    turn: &'a Turn<T>,
    /// `None` only while it is dropped.
    value: Option<Box<T>>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.value {
            Some(value) => value,
            None => unreachable!("taken until it is dropped"),
        }
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.value {
            Some(value) => value,
            None => unreachable!("taken until it is dropped"),
        }
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        let mut slot = self.turn.slot();
        slot.value = self.value.take();
        // Telling somebody costs a system call.
        if slot.waiting > 0 {
            self.turn.back.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_waiting_ends() {
        let turn = Turn::new(1);
        let mut taken = turn.take();
        *taken += 1;
        assert!(turn.take_within(Duration::ZERO).is_none());
        assert!(turn.take_within(Duration::from_millis(2)).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| *turn.take());
            while turn.slot().waiting == 0 {
                std::thread::yield_now();
            }
            drop(taken);
            assert_eq!(waiting.join().unwrap(), 2);
        });
    }

    #[test]
    fn a_panic_gives_it_back() {
        let turn = Turn::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _taken = turn.take();
            panic!("while it was taken");
        }));
        assert!(panicked.is_err());
        assert_eq!(turn.take_within(Duration::ZERO).map(|taken| *taken), Some(1));
    }
}
