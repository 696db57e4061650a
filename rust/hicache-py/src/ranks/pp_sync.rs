//! pp_sync from Python: the machine together with the logs that it consumes.

use std::sync::{Arc, Mutex};

use hicache_ranks::ack::{Feed, Voting};
use hicache_ranks::pp_sync::{Mode, PpSync, StepInput, SyncStep};
use hicache_ranks::{AckLog, Rank, RankError};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::ack::{PyAck, PyAckLog, SharedLog, distinct};
use crate::ranks::ask::{PyAsk, to_answer};
use crate::ranks::lock;
use crate::ranks::topology::PyTopology;

/// An entry is consumed: apply its effect, then go on.
#[pyclass(frozen, get_all, name = "Apply", module = "hicache_store.ranks")]
pub(crate) struct PyApply {
    /// Which log, by its place.
    log: usize,
    /// The entry.
    ack: Py<PyAck>,
}

/// A step is over.
#[pyclass(frozen, eq, get_all, name = "StepEnd", module = "hicache_store.ranks")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PyStepEnd {
    /// Operations numbered below have run out of time, on all ranks alike.
    expired: u64,
}

/// What a step leads to.
#[derive(IntoPyObject)]
pub(crate) enum Step {
    Ask(PyAsk),
    Apply(PyApply),
    End(PyStepEnd),
}

struct Inner {
    sync: PpSync,
    input: StepInput,
}

/// The machine of one rank's scheduler thread.
#[pyclass(frozen, name = "PpSync", module = "hicache_store.ranks")]
pub(crate) struct PyPpSync {
    inner: Mutex<Inner>,
    logs: Vec<Arc<SharedLog>>,
}

impl PyPpSync {
    /// Runs the machine over its logs. They are locked together, so nobody sees them taken out.
    fn step(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut Inner, &mut [AckLog]) -> hicache_ranks::Result<SyncStep>,
    ) -> Result<Step> {
        let mut inner = lock(&self.inner);
        let mut held: Vec<_> = self.logs.iter().map(|shared| lock(&shared.log)).collect();
        let nothing = || AckLog::new("", Feed::Scheduler, Voting::Local);
        let mut logs: Vec<_> = held.iter_mut().map(|log| std::mem::replace(&mut **log, nothing())).collect();
        let step = run(&mut inner, &mut logs);
        held.iter_mut().zip(logs).for_each(|(held, log)| **held = log);
        drop(held);
        Ok(match step? {
            SyncStep::Ask(ask) => Step::Ask(PyAsk::new(ask, &self.logs)),
            SyncStep::Apply { log, ack } => Step::Apply(PyApply { log, ack: Py::new(py, PyAck::from(ack))? }),
            SyncStep::Done { expired } => Step::End(PyStepEnd { expired }),
        })
    }
}

#[pymethods]
impl PyPpSync {
    #[new]
    #[pyo3(signature = (topology, rank, logs, mode="now"))]
    fn new(topology: &PyTopology, rank: u32, logs: Vec<Py<PyAckLog>>, mode: &str) -> Result<Self> {
        let mode = match mode {
            "now" => Mode::Now,
            "lagged" => Mode::Lagged,
            _ => return Err(RankError::config(format!("mode {mode:?}: expected now or lagged")).into()),
        };
        let logs: Vec<_> = logs.iter().map(|log| Arc::clone(&log.get().shared)).collect();
        distinct(&logs)?;
        let sync = PpSync::new(&topology.inner, Rank(rank), logs.len(), mode)?;
        Ok(PyPpSync { inner: Mutex::new(Inner { sync, input: StepInput::default() }), logs })
    }

    /// Says what this rank brings to the next step.
    #[pyo3(signature = (*, digest=0, expired=0))]
    fn bring(&self, digest: u64, expired: u64) {
        lock(&self.inner).input = StepInput { digest, expired };
    }

    /// Begins a step.
    fn begin(&self, py: Python<'_>) -> Result<Step> {
        self.step(py, |inner, logs| inner.sync.begin(logs, inner.input))
    }

    /// Goes on with the answer to an ask, or with None after an entry was applied.
    fn resume(&self, py: Python<'_>, answer: &Bound<'_, PyAny>) -> Result<Step> {
        let answer = to_answer(answer)?;
        self.step(py, |inner, logs| inner.sync.resume(answer, logs))
    }

    /// Begins again after a failure.
    fn restart(&self, epoch: u64) {
        lock(&self.inner).sync.restart(epoch);
    }

    /// Steps begun so far.
    #[getter]
    fn steps(&self) -> u64 {
        lock(&self.inner).sync.step()
    }

    fn __repr__(&self) -> String {
        format!("<PpSync over {} logs, step {}>", self.logs.len(), self.steps())
    }
}
