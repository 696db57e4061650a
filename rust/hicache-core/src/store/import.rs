//! Taking archived units into a root: verified whole, written like a backup, published the same way.

use std::sync::Arc;

use crate::format::archive::split_unit;
use crate::format::directory::{self, Entry, ReadRun};
use crate::format::frame::short_key;
use crate::namespace::Namespace;
use crate::pool::Pool;
use crate::store::index::Interest;
use crate::store::namespace_state::NamespaceState;
use crate::store::publish::consecutive;
use crate::store::stored_run::{self, Stretch};
use crate::store::{Handle, Inner, Store};
use crate::{Error, ErrorKind, Result};

/// What became of imported objects.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ImportReport {
    /// Objects written.
    pub stored: u64,
    /// Objects that were there already.
    pub present: u64,
    /// Objects in the archive that are not whole.
    pub damaged: u64,
    /// Runs in the archive of which not even the number of objects is known.
    pub damaged_runs: u64,
}

/// Takes archived units of one namespace into a root.
pub struct Importer {
    inner: Arc<Inner>,
    _handle: Arc<Handle>,
    state: Arc<NamespaceState>,
    report: ImportReport,
}

impl Store {
    /// Starts taking units of `namespace` in; `pools` are described beside its segments.
    ///
    /// # Errors
    /// `Closed`, `Unsupported` on a read-only store, `Io`.
    pub fn importer(&self, namespace: Namespace, pools: &[Pool]) -> Result<Importer> {
        self.inner.check_open()?;
        if self.inner.options.read_only {
            return Err(Error::new(ErrorKind::Unsupported, "the store is open for reading only"));
        }
        let state = self.inner.namespace(&namespace);
        state.describe(self.inner.process, &pools.iter().collect::<Vec<_>>())?;
        let (inner, _handle) = (Arc::clone(&self.inner), Arc::clone(&self.handle));
        Ok(Importer { inner, _handle, state, report: ImportReport::default() })
    }
}

impl Importer {
    /// Takes one unit in: what is whole and not there yet.
    ///
    /// # Errors
    /// `Corrupt` when it is no unit of this namespace; `Io` when there is no room or the system says no. What was
    /// taken in before stays.
    pub fn unit(&mut self, bytes: &[u8]) -> Result<()> {
        let (payload, directory) =
            split_unit(bytes).ok_or_else(|| Error::corrupt("an archived unit is cut short"))?;
        let directory = directory::decode(directory)
            .map_err(|damage| Error::corrupt(format!("an archived unit does not decode: {damage}")))?;
        if directory.header.namespace != self.state.fingerprint {
            return Err(Error::corrupt(format!(
                "expected a unit of namespace {}, found one of {}",
                self.state.fingerprint, directory.header.namespace
            )));
        }
        self.report.damaged_runs += u64::from(directory.damaged_runs);
        for read in &directory.runs {
            self.run(payload, read)?;
        }
        Ok(())
    }

    /// What became of the objects so far.
    pub fn report(&self) -> ImportReport {
        self.report
    }

    fn run(&mut self, payload: &[u8], read: &ReadRun) -> Result<()> {
        let form = read.run.form;
        let pool = Pool::from_canonical_bytes(&read.run.pool_bytes)
            .ok()
            .filter(|pool| pool.fingerprint() == form.pool);
        let Some(pool) = pool else {
            self.report.damaged += read.entries.len() as u64;
            return Ok(());
        };
        self.state.describe(self.inner.process, &[&pool])?;
        let interest = Interest { pool: form.pool, tile: form.tile };
        self.state.add_interests(&[interest], &self.inner.counters, &self.inner.notices);
        self.state.refresh(&self.inner.counters);
        let mut wanted = Vec::with_capacity(read.entries.len());
        for entry in &read.entries {
            let stored = entry.as_ref().and_then(|entry| self.whole(payload, read, entry));
            let is_present = entry
                .as_ref()
                .is_some_and(|entry| self.state.index().has_form(&short_key(&entry.key), &form));
            self.report.damaged += u64::from(stored.is_none());
            self.report.present += u64::from(stored.is_some() && is_present);
            wanted.push(stored.is_some() && !is_present);
        }
        for pages in consecutive(&wanted, 0..wanted.len()) {
            let mut unit_payload = Vec::new();
            for entry in read.entries[pages.clone()].iter().flatten() {
                unit_payload.extend_from_slice(self.whole(payload, read, entry).unwrap_or_default());
            }
            let stretch = Stretch::new(read, pages.clone(), unit_payload);
            stored_run::publish(&self.inner, &self.state, vec![stretch], None).map_err(|refused| {
                let folder = self.inner.paths.namespace(&self.state.fingerprint);
                Error::io("cannot write to", &folder, refused.into())
            })?;
            self.report.stored += pages.len() as u64;
        }
        Ok(())
    }

    /// Stored bytes of an entry, if every block verifies.
    fn whole<'a>(&self, payload: &'a [u8], read: &ReadRun, entry: &Entry) -> Option<&'a [u8]> {
        let start = usize::try_from(entry.payload_offset).ok()?;
        let end = start.checked_add(usize::try_from(entry.stored_bytes()).ok()?)?;
        let stored = payload.get(start..end)?;
        stored_run::is_whole(&self.state.fingerprint, &read.run, entry, stored).then_some(stored)
    }
}
