//! What a machine asks of the world, and the answer that is no list of numbers.

use std::sync::Arc;
use std::time::Duration;

use hicache_ranks::{Answer, Ask, Lane, Operation, Rank, RankError, Reduce, ReduceOp};
use pyo3::prelude::*;

use crate::arguments::to_integers;
use crate::errors::Result;
use crate::ranks::ack::SharedLog;
use crate::ranks::intern;
use crate::ranks::topology::{scope_name, to_scope};

/// Names of the lanes, in the order of `Lane::ALL`.
const LANES: [&str; 5] = ["scheduler", "query", "progress", "outcome", "audit"];

fn lane_name(lane: Lane) -> &'static str {
    let place = Lane::ALL.iter().position(|&known| known == lane);
    place.map_or("scheduler", |place| LANES[place])
}

fn to_lane(name: &str) -> Result<Lane> {
    let place = LANES.iter().position(|&known| known == name);
    let unknown = || RankError::config(format!("lane {name:?}: expected one of {}", LANES.join(", ")));
    Ok(Lane::ALL[place.ok_or_else(unknown)?])
}

/// What a machine needs before it can go on.
#[pyclass(frozen, name = "Ask", module = "hicache_store.ranks")]
pub(crate) struct PyAsk {
    ask: Ask,
    /// The log whose front is waited for.
    log: Option<Arc<SharedLog>>,
}

impl PyAsk {
    pub(crate) fn new(ask: Ask, logs: &[Arc<SharedLog>]) -> Self {
        let log = match &ask {
            Ask::Wait { log, .. } => logs.get(*log).cloned(),
            _ => None,
        };
        PyAsk { ask, log }
    }

    fn reduction(&self) -> Option<&Reduce> {
        match &self.ask {
            Ask::Reduce(reduce) | Ask::Start(reduce) => Some(reduce),
            _ => None,
        }
    }
}

impl From<Ask> for PyAsk {
    fn from(ask: Ask) -> Self {
        PyAsk::new(ask, &[])
    }
}

#[pymethods]
impl PyAsk {
    /// A reduction that no machine of this package asks for.
    #[staticmethod]
    #[pyo3(signature = (values, *, name, number=0, lane="scheduler", scope="replica", op="min"))]
    fn reduce(
        values: &Bound<'_, PyAny>,
        name: &str,
        number: u64,
        lane: &str,
        scope: &str,
        op: &str,
    ) -> Result<Self> {
        let op = match op {
            "min" => ReduceOp::Min,
            "and" => ReduceOp::And,
            _ => return Err(RankError::config(format!("op {op:?}: expected min or and")).into()),
        };
        let operation = Operation { name: intern(name), number };
        let (scope, lane) = (to_scope(scope)?, to_lane(lane)?);
        let values = to_integers("values", values)?;
        Ok(Ask::Reduce(Reduce { scope, lane, op, operation, values }).into())
    }

    /// What is asked for.
    #[getter]
    fn kind(&self) -> &'static str {
        match &self.ask {
            Ask::Reduce(_) => "reduce",
            Ask::Start(_) => "start",
            Ask::Collect { .. } => "collect",
            Ask::Send { .. } => "send",
            Ask::Receive { .. } => "receive",
            Ask::Wait { .. } => "wait",
        }
    }

    /// Which thread asks.
    #[getter]
    fn lane(&self) -> &'static str {
        match &self.ask {
            Ask::Reduce(reduce) | Ask::Start(reduce) => lane_name(reduce.lane),
            Ask::Collect { lane, .. } => lane_name(*lane),
            Ask::Send { .. } | Ask::Receive { .. } | Ask::Wait { .. } => lane_name(Lane::Scheduler),
        }
    }

    /// Which ranks reduce.
    #[getter]
    fn scope(&self) -> Option<&'static str> {
        self.reduction().map(|reduce| scope_name(reduce.scope))
    }

    /// How elements are combined.
    #[getter]
    fn op(&self) -> Option<&'static str> {
        self.reduction().map(|reduce| match reduce.op {
            ReduceOp::Min => "min",
            ReduceOp::And => "and",
        })
    }

    /// What it is for, in words.
    #[getter]
    fn name(&self) -> &'static str {
        self.ask.operation().name
    }

    /// Step, request or round.
    #[getter]
    fn number(&self) -> u64 {
        self.ask.operation().number
    }

    /// Name and number.
    #[getter]
    fn operation(&self) -> String {
        self.ask.operation().to_string()
    }

    /// This rank's vector, or the message.
    #[getter]
    fn values(&self) -> Option<Vec<i64>> {
        match &self.ask {
            Ask::Reduce(reduce) | Ask::Start(reduce) => Some(reduce.values.clone()),
            Ask::Send { values, .. } => Some(values.clone()),
            Ask::Collect { .. } | Ask::Receive { .. } | Ask::Wait { .. } => None,
        }
    }

    /// To whom a message goes, or from whom it comes.
    #[getter]
    fn peer(&self) -> Option<u32> {
        match &self.ask {
            Ask::Send { to: peer, .. } | Ask::Receive { from: peer, .. } => Some(peer.0),
            Ask::Reduce(_) | Ask::Start(_) | Ask::Collect { .. } | Ask::Wait { .. } => None,
        }
    }

    /// Words of a message that is received.
    #[getter]
    fn length(&self) -> Option<usize> {
        match &self.ask {
            Ask::Receive { len, .. } => Some(*len),
            _ => None,
        }
    }

    /// Waits for the front entry of the log that is asked about; whether it is there and finished.
    fn wait(&self, py: Python<'_>, seconds: f64) -> bool {
        let Some(log) = &self.log else { return true };
        let time = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        py.detach(|| log.wait(time))
    }

    fn __repr__(&self) -> String {
        format!("<Ask {} of {}: {}>", self.kind(), self.lane(), self.operation())
    }
}

/// The deadline passed.
#[pyclass(frozen, eq, hash, get_all, name = "Expired", module = "hicache_store.ranks")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyExpired {
    /// The rank that everyone waits for in the end.
    rank: u32,
}

#[pymethods]
impl PyExpired {
    #[new]
    fn new(rank: u32) -> Self {
        PyExpired { rank }
    }

    fn __repr__(&self) -> String {
        format!("Expired(rank={})", self.rank)
    }
}

/// The answer that an object stands for.
pub(crate) fn to_answer(object: &Bound<'_, PyAny>) -> Result<Answer> {
    if object.is_none() {
        return Ok(Answer::Done);
    }
    if let Ok(expired) = object.cast::<PyExpired>() {
        return Ok(Answer::Expired { culprit: Rank(expired.get().rank) });
    }
    Ok(Answer::Values(to_integers("answer", object)?))
}
