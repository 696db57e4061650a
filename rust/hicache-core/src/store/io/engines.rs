//! Who carries out batches: a pool of threads, or the calling thread.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;

use super::{IoEngine, Read, ReadDone, Transfers, Write, WritePrepare};

/// A pool of threads that call `preadv` and `pwritev`.
pub struct ThreadEngine {
    transfers: Arc<Transfers>,
    workers: Arc<rayon::ThreadPool>,
}

impl ThreadEngine {
    /// An engine on these threads.
    pub fn new(transfers: Arc<Transfers>, workers: Arc<rayon::ThreadPool>) -> Self {
        ThreadEngine { transfers, workers }
    }
}

impl IoEngine for ThreadEngine {
    fn name(&self) -> String {
        format!("{}, {} threads", self.transfers.mode_name(), self.workers.current_num_threads())
    }

    fn read_batch(&self, reads: &[Read<'_>], deadline: Option<Instant>, done: ReadDone<'_>) {
        if let [read] = reads {
            return self.transfers.carry_out_read(0, read, deadline, done); // not worth waking a thread
        }
        self.workers.install(|| {
            let one = |(index, read): (usize, &Read<'_>)| {
                self.transfers.carry_out_read(index, read, deadline, done);
            };
            reads.par_iter().with_max_len(1).enumerate().for_each(one);
        });
    }

    fn threads(&self) -> usize {
        self.workers.current_num_threads()
    }

    fn write_batch(
        &self,
        writes: &[Write<'_>],
        deadline: Option<Instant>,
        prepare: WritePrepare<'_>,
    ) -> io::Result<()> {
        let with_first = |end: &mut usize, writes| {
            *end += <[Write<'_>]>::len(writes);
            Some((*end - writes.len(), writes))
        };
        let stretches: Vec<(usize, &[Write<'_>])> =
            writes.chunk_by(|one, next| self.transfers.excludes(one, next)).scan(0, with_first).collect();
        let one_after_the_other = |&(first, writes): &(usize, &[Write<'_>])| {
            let mut writes = (first..).zip(writes);
            writes.try_for_each(|(index, write)| {
                self.transfers.carry_out_write(index, write, deadline, prepare)
            })
        };
        if let [all] = &*stretches {
            return one_after_the_other(all); // not worth waking a thread
        }
        self.workers.install(|| {
            let ended: Vec<io::Result<()>> =
                stretches.par_iter().with_max_len(1).map(one_after_the_other).collect();
            ended.into_iter().collect()
        })
    }
}

/// The calling thread, one transfer after the other: for threads that may hang without harm to others.
pub struct InlineEngine {
    transfers: Arc<Transfers>,
}

impl InlineEngine {
    /// An engine without threads of its own.
    pub fn new(transfers: Arc<Transfers>) -> Self {
        InlineEngine { transfers }
    }
}

impl IoEngine for InlineEngine {
    fn name(&self) -> String {
        format!("{}, inline", self.transfers.mode_name())
    }

    fn read_batch(&self, reads: &[Read<'_>], deadline: Option<Instant>, done: ReadDone<'_>) {
        for (index, read) in reads.iter().enumerate() {
            self.transfers.carry_out_read(index, read, deadline, done);
        }
    }

    fn threads(&self) -> usize {
        1
    }

    fn write_batch(
        &self,
        writes: &[Write<'_>],
        deadline: Option<Instant>,
        prepare: WritePrepare<'_>,
    ) -> io::Result<()> {
        let mut writes = writes.iter().enumerate();
        writes.try_for_each(|(index, write)| self.transfers.carry_out_write(index, write, deadline, prepare))
    }
}
