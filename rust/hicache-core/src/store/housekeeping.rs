//! What a writing process does on the side, a few times a second: it takes in what others said, removes needless
//! copies, tells of uses, seals what is over, keeps room ahead, moves what lies in sparse segments, and finishes
//! the dead.
//!
//! Nothing depends on it for correctness: a process without it only leaves more to do for the others.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::store::counters::Counter;
use crate::store::evict::Want;
use crate::store::finish::{Finisher, Limits};
use crate::store::notices::Level;
use crate::store::{Inner, clear, compact, duplicates, room};
use crate::{Error, ErrorKind, Result};

/// Between two rounds. Two writers' copies of one page are told apart within a second; this is well below.
const EVERY: Duration = Duration::from_millis(200);

/// Between two looks for dead processes, journals to write anew and expired pages.
const SLOWLY: Duration = Duration::from_secs(2);

/// Between two measurements of the files, which find what was removed by hand and who is gone.
const MEASURE: Duration = Duration::from_secs(10);

/// Longest time given at once to finishing the dead.
const FINISHING: Duration = Duration::from_millis(500);

/// The thread of one store.
pub(crate) struct Housekeeping {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Housekeeping {
    /// Starts the thread.
    pub(crate) fn start(inner: &Arc<Inner>, mut finisher: Finisher) -> Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let inner = Arc::clone(inner);
        let run = move || {
            // The dead were just finished.
            let (mut slowly_at, mut measured_at) = (Instant::now(), Instant::now());
            loop {
                let is_due = slowly_at.elapsed() >= SLOWLY;
                // A fault in here costs one round, not all that come after it.
                let round = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    inner.keep_house(is_due);
                    if is_due || inner.has_large_journal() {
                        inner.keep_journal();
                    }
                    if is_due {
                        inner.finish_aside(&mut finisher, FINISHING);
                    }
                    if measured_at.elapsed() >= MEASURE && inner.is_writing() {
                        inner.budget.measure();
                        measured_at = Instant::now();
                    }
                }));
                if round.is_err() {
                    inner.notices.push(Level::Warning, "housekeeping", || {
                        "a round of housekeeping panicked; the next one starts anew".into()
                    });
                }
                if is_due {
                    slowly_at = Instant::now();
                }
                if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("hicache-housekeeping".into()).spawn(run).map_err(|error| {
                Error::new(ErrorKind::Io, format!("cannot start the housekeeping thread: {error}"))
            })?;
        Ok(Housekeeping { stop, thread })
    }

    /// Lets the thread end by itself.
    pub(crate) fn leave(self) {
        drop(self.stop);
    }

    /// Ends the thread; returns when it has.
    pub(crate) fn stop(self) {
        drop(self.stop);
        // A panic in it is no reason for another here.
        let _ = self.thread.join();
    }
}

impl Inner {
    fn keep_house(&self, slowly: bool) {
        let mut has_removed = false;
        for state in self.open_namespaces() {
            state.refresh(&self.counters);
            clear::leave_old_generations(self, &state);
            self.tell_sealed(&state);
            has_removed |= duplicates::remove(self, &state);
        }
        self.leave_touches();
        self.leave_counters(false);
        if has_removed {
            self.evict_aside(Want::Leftovers);
        }
        room::keep_ahead(self);
        if slowly {
            if let Some(time_to_live) = self.options.time_to_live {
                let now = crate::store::now_ns();
                let age = u64::try_from(time_to_live.as_nanos()).unwrap_or(u64::MAX);
                self.evict_aside(Want::RecordedBefore(now.saturating_sub(age)));
            }
            compact::one_sparse_segment(self);
            self.evictor.forget_if_idle();
        }
    }

    /// Writes this process's journal anew when it is worth it; what goes wrong is told in the log.
    fn keep_journal(&self) {
        if let Err(error) = self.keep_journal_small() {
            self.notices
                .push(Level::Warning, "checkpoint", || format!("cannot write the journal anew: {error}"));
        }
    }

    /// Finishes dead processes, for so long at most; what goes wrong is told in the log.
    pub(crate) fn finish_aside(&self, finisher: &mut Finisher, time: Duration) {
        match self.finish_dead(finisher, Limits::within(time, self.budget.capacity()), &mut |_| ()) {
            Ok(report) => {
                self.counters
                    .add(Counter::FinishedSegments, report.segments_sealed + report.segments_removed);
                if report.freed_bytes > 0 {
                    self.budget.measure();
                }
            }
            Err(error) => self.notices.push(Level::Warning, "finish", || {
                format!("cannot finish what dead processes left: {error}")
            }),
        }
    }
}
