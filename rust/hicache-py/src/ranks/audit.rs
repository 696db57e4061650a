//! The consensus checker from Python: records of one rank, compared live, written to a log, or both.

use std::sync::Mutex;

use hicache_ranks::audit::{AuditStep, Kind, LogHeader, LogWriter, RankAudit, Record, StateDigest, Verdict};
use hicache_ranks::{Rank, RankError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Result;
use crate::ranks::ask::{PyAsk, to_answer};
use crate::ranks::field::to_value;
use crate::ranks::lock;
use crate::ranks::topology::PyTopology;

/// Digest of the state that decisions come from, kept up to date change by change.
#[pyclass(frozen, name = "StateDigest", module = "hicache_store.ranks")]
#[derive(Default)]
pub(crate) struct PyStateDigest {
    inner: Mutex<StateDigest>,
}

#[pymethods]
impl PyStateDigest {
    #[new]
    fn new() -> Self {
        PyStateDigest::default()
    }

    /// A lock of `node` was taken.
    fn lock(&self, node: u64) {
        lock(&self.inner).lock(node);
    }

    /// A lock of `node` was released.
    fn unlock(&self, node: u64) {
        lock(&self.inner).unlock(node);
    }

    /// `node` became the most recently used one.
    fn touch(&self, node: u64) {
        lock(&self.inner).touch(node);
    }

    /// The free lists now have this digest.
    fn free_lists(&self, digest: u64) {
        lock(&self.inner).free_lists(digest);
    }

    /// The chain below `node` got a rotation base, or lost it again.
    fn base(&self, node: u64, base: u32) {
        lock(&self.inner).base(node, base);
    }

    /// All of it in one number.
    #[getter]
    fn combined(&self) -> u64 {
        lock(&self.inner).combined()
    }
}

/// What a round found.
#[pyclass(frozen, get_all, name = "Verdict", module = "hicache_store.ranks")]
pub(crate) struct PyVerdict {
    /// What it is.
    kind: &'static str,
    /// The stream, by its place.
    stream: Option<usize>,
    /// Number of the first differing record, or how many the silent rank has.
    index: Option<u64>,
    /// The silent rank.
    rank: Option<u32>,
    /// What each rank recorded there, as text.
    records: Vec<(u32, String)>,
}

impl From<Verdict> for PyVerdict {
    fn from(verdict: Verdict) -> Self {
        let nothing = PyVerdict { kind: "equal", stream: None, index: None, rank: None, records: Vec::new() };
        match verdict {
            Verdict::Equal => nothing,
            Verdict::Differs { stream, index, records } => {
                let records = records.into_iter().map(|(rank, text)| (rank.0, text)).collect();
                PyVerdict { kind: "differs", stream: Some(stream), index: Some(index), records, ..nothing }
            }
            Verdict::Silent { rank, stream, records, .. } => {
                let (stream, index) = (Some(stream), Some(records));
                PyVerdict { kind: "silent", stream, index, rank: Some(rank.0), ..nothing }
            }
        }
    }
}

/// What a round leads to.
#[derive(IntoPyObject)]
pub(crate) enum Step {
    Ask(PyAsk),
    Done(PyVerdict),
}

impl From<AuditStep> for Step {
    fn from(step: AuditStep) -> Self {
        match step {
            AuditStep::Ask(ask) => Step::Ask(ask.into()),
            AuditStep::Done(verdict) => Step::Done(verdict.into()),
        }
    }
}

struct Inner {
    audit: Option<RankAudit>,
    log: Option<LogWriter>,
    overdue: bool,
}

/// The records of one rank.
#[pyclass(frozen, name = "AuditRecords", module = "hicache_store.ranks")]
pub(crate) struct PyAuditRecords {
    streams: Vec<String>,
    inner: Mutex<Inner>,
}

impl PyAuditRecords {
    /// Adds a record to a stream.
    pub(super) fn add(&self, stream: usize, record: Record) -> Result<()> {
        let Some(name) = self.streams.get(stream) else {
            return Err(RankError::config(format!("stream {stream} of {}", self.streams.len())).into());
        };
        let mut inner = lock(&self.inner);
        if let Some(log) = &mut inner.log {
            log.append(name, &record);
        }
        if let Some(audit) = &mut inner.audit {
            audit.record(stream, record);
        }
        Ok(())
    }

    fn with_audit<T>(&self, run: impl FnOnce(&mut RankAudit, bool) -> hicache_ranks::Result<T>) -> Result<T> {
        let mut inner = lock(&self.inner);
        let overdue = inner.overdue;
        let audit = inner.audit.as_mut();
        Ok(run(audit.ok_or_else(|| RankError::state("an audit that is not live has no rounds"))?, overdue)?)
    }
}

#[pymethods]
impl PyAuditRecords {
    #[new]
    #[pyo3(signature = (topology, rank, streams, *, live=false, run=None))]
    fn new(
        topology: &PyTopology,
        rank: u32,
        streams: Vec<String>,
        live: bool,
        run: Option<u64>,
    ) -> Result<Self> {
        topology.inner.coordinates(Rank(rank))?;
        let audit = live.then(|| RankAudit::new(&topology.inner, Rank(rank), streams.len())).transpose()?;
        let header = |run| LogHeader { rank: Rank(rank), ranks: topology.inner.ranks(), run };
        let log = run.map(|run| LogWriter::new(header(run)));
        Ok(PyAuditRecords { streams, inner: Mutex::new(Inner { audit, log, overdue: false }) })
    }

    /// Records a call, a return or a change of state.
    fn record(
        &self,
        stream: usize,
        step: u64,
        kind: &str,
        name: &str,
        fields: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let Some(&kind) = Kind::ALL.iter().find(|known| known.name() == kind) else {
            let message = format!("kind {kind:?}: expected called, returned or state");
            return Err(RankError::config(message).into());
        };
        let fields = fields.try_iter()?.map(|item| to_value(&item?, 0)).collect::<PyResult<_>>()?;
        self.add(stream, Record { step, kind, name: name.to_owned(), fields })
    }

    /// Records digests of the state.
    fn record_state(&self, stream: usize, step: u64, state: &PyStateDigest) -> Result<()> {
        let record = lock(&state.inner).record(step);
        self.add(stream, record)
    }

    /// Bytes of the log that are complete; with `flush`, of everything recorded so far.
    #[pyo3(signature = (*, flush=false))]
    fn take_log<'py>(&self, py: Python<'py>, flush: bool) -> Bound<'py, PyBytes> {
        let mut inner = lock(&self.inner);
        let bytes = inner.log.as_mut().map_or_else(Vec::new, |log| {
            if flush {
                log.flush();
            }
            log.take()
        });
        PyBytes::new(py, &bytes)
    }

    /// For each stream, how many records are known to be equal on all ranks, and how many wait to be compared.
    #[getter]
    fn progress(&self) -> Vec<(u64, usize)> {
        lock(&self.inner).audit.as_ref().map_or_else(Vec::new, |audit| audit.progress().collect())
    }

    /// Says whether by this rank's clock no round brought news for longer than the deadline.
    fn bring(&self, overdue: bool) {
        lock(&self.inner).overdue = overdue;
    }

    /// Begins a round.
    fn begin(&self) -> Result<Step> {
        Ok(self.with_audit(RankAudit::begin)?.into())
    }

    /// Goes on with the answer to an ask.
    fn resume(&self, answer: &Bound<'_, PyAny>) -> Result<Step> {
        let answer = to_answer(answer)?;
        Ok(self.with_audit(|audit, _| audit.resume(answer))?.into())
    }
}
