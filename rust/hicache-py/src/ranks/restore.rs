//! A request on the decode side: what is promised to the prefill peer is restored, or the request fails.

use std::sync::Mutex;

use hicache_ranks::restore::{Fate, Found, Obligation, Phase, RestoreSession};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::ranks::ask::{PyAsk, to_answer};
use crate::ranks::lock;

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Matched => "matched",
        Phase::Promised => "promised",
        Phase::Prefetching => "prefetching",
        Phase::Loading => "loading",
        Phase::Ready => "ready",
        Phase::Committed => "committed",
        Phase::Failed => "failed",
        Phase::Aborted => "aborted",
    }
}

fn obligation_names(list: &[Obligation]) -> Vec<&'static str> {
    let name = |held: &Obligation| match held {
        Obligation::Lock => "lock",
        Obligation::SuffixSlots => "suffix_slots",
        Obligation::Load => "load",
        Obligation::Prefetch => "prefetch",
    };
    list.iter().map(name).collect()
}

/// One request on one rank.
#[pyclass(frozen, name = "RestoreSession", module = "hicache_store.ranks")]
pub(crate) struct PyRestoreSession {
    inner: Mutex<RestoreSession>,
}

#[pymethods]
impl PyRestoreSession {
    #[new]
    #[pyo3(signature = (request, *, prompt_tokens, page_tokens, device=0, host=0, storage=0))]
    fn new(
        request: u64,
        prompt_tokens: u64,
        page_tokens: u32,
        device: u32,
        host: u32,
        storage: u32,
    ) -> Result<Self> {
        let found = Found { device, host, storage };
        let session = RestoreSession::new(request, prompt_tokens, page_tokens, found)?;
        Ok(PyRestoreSession { inner: Mutex::new(session) })
    }

    /// Where the session stands.
    #[getter]
    fn phase(&self) -> &'static str {
        phase_name(lock(&self.inner).phase())
    }

    /// What has been promised, in tokens.
    #[getter]
    fn promised(&self) -> Option<(u64, u64)> {
        lock(&self.inner).promised().map(|promise| (promise.from, promise.to))
    }

    /// Tokens that are restored to the device on commit, half open.
    #[getter]
    fn restored(&self) -> Option<(u64, u64)> {
        lock(&self.inner).restored().map(|promise| (promise.from, promise.to))
    }

    /// What the session holds.
    #[getter]
    fn obligations(&self) -> Vec<&'static str> {
        obligation_names(lock(&self.inner).obligations())
    }

    /// The prefetch of the storage part was accepted or declined.
    fn prefetch(&self, accepted: bool) -> Result<()> {
        Ok(lock(&self.inner).prefetch(accepted)?)
    }

    /// Makes the promise.
    fn promise(&self) -> Result<(u64, u64)> {
        let promise = lock(&self.inner).promise()?;
        Ok((promise.from, promise.to))
    }

    /// What the peer is to send, whatever it has cached itself.
    fn transfer(&self, peer_match_tokens: u64) -> Option<(u64, u64)> {
        lock(&self.inner).transfer(peer_match_tokens).map(|promise| (promise.from, promise.to))
    }

    /// The prefetch has ended.
    fn prefetched(&self, pages: u32) -> Result<&'static str> {
        Ok(phase_name(lock(&self.inner).prefetched(pages)?))
    }

    /// The second look-up.
    fn rematched(&self, pages: u32) -> Result<&'static str> {
        Ok(phase_name(lock(&self.inner).rematched(pages)?))
    }

    /// The load to the device has been queued.
    #[pyo3(signature = (awaited=0))]
    fn loading(&self, awaited: u32) -> Result<()> {
        Ok(lock(&self.inner).loading(awaited)?)
    }

    /// A load of another request has ended that brought pages of this one.
    fn followed(&self) {
        lock(&self.inner).followed();
    }

    /// The own load has ended.
    #[pyo3(signature = (complete=true))]
    fn loaded(&self, complete: bool) -> Result<&'static str> {
        Ok(phase_name(lock(&self.inner).loaded(complete)?))
    }

    /// The suffix has arrived, or will not.
    #[pyo3(signature = (complete=true))]
    fn transferred(&self, complete: bool) {
        lock(&self.inner).transferred(complete);
    }

    /// This rank gives the request up.
    fn abort(&self) {
        lock(&self.inner).abort();
    }

    /// Whether this rank could run the request.
    #[getter]
    fn is_ready(&self) -> bool {
        lock(&self.inner).is_ready()
    }

    /// The poll of a tick.
    fn begin(&self) -> PyAsk {
        lock(&self.inner).poll().into()
    }

    /// Takes the answer to the poll.
    fn resume(&self, answer: &Bound<'_, PyAny>) -> Result<&'static str> {
        let answer = to_answer(answer)?;
        Ok(match lock(&self.inner).resume(answer)? {
            Fate::Pending => "pending",
            Fate::Commit => "commit",
            Fate::Fail => "fail",
        })
    }

    /// Gives back what can be given back now, each thing once.
    fn release(&self) -> Vec<&'static str> {
        obligation_names(&lock(&self.inner).release())
    }

    fn __repr__(&self) -> String {
        format!("<RestoreSession {}, holds {:?}>", self.phase(), self.obligations())
    }
}
