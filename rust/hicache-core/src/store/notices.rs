//! Words for the operator, collected by the store and handed out by whoever can log them.
//!
//! The store calls no logger itself: a logger may take locks (Python's interpreter lock) that a caller of the
//! store holds. The binding drains the notices after each call.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How much a notice matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// As expected.
    Info,
    /// Something is slower, smaller or less than asked for; the store goes on.
    Warning,
}

/// One line for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// How much it matters.
    pub level: Level,
    /// The line.
    pub message: String,
}

/// Lines of one kind come at most once in this time; the next one says how many were left out.
const QUIET: Duration = Duration::from_secs(10);
const MOST_WAITING: usize = 256;

/// Waiting notices, at most one of a kind in ten seconds.
#[derive(Default)]
pub struct Notices {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Notice>,
    kinds: HashMap<&'static str, (Instant, u64)>,
}

impl Notices {
    /// Adds a line of `kind`, unless one of that kind came lately.
    pub fn push(&self, level: Level, kind: &'static str, message: impl FnOnce() -> String) {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let now = Instant::now();
        let mut left_out = 0;
        if let Some((last, suppressed)) = state.kinds.get_mut(kind) {
            if now.duration_since(*last) < QUIET {
                *suppressed += 1;
                return;
            }
            left_out = *suppressed;
        }
        state.kinds.insert(kind, (now, 0));
        let mut message = message();
        if left_out > 0 {
            message.push_str(&format!(" ({left_out} more like this since the last line)"));
        }
        if state.waiting.len() < MOST_WAITING {
            state.waiting.push_back(Notice { level, message });
        }
    }

    /// Takes what waits.
    pub fn drain(&self) -> Vec<Notice> {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.waiting.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_kind_is_one_line() {
        let notices = Notices::default();
        for index in 0..100 {
            notices.push(Level::Warning, "damage", || format!("page {index}"));
        }
        notices.push(Level::Info, "open", || "opened".into());
        let lines: Vec<_> = notices.drain().into_iter().map(|notice| notice.message).collect();
        assert_eq!(lines, ["page 0", "opened"]);
        assert!(notices.drain().is_empty());
    }
}
