//! A stream of the host: a thread that carries out copies in the order in which they were issued.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::cpu::CpuCopies;
use super::event::{Event, HostEvent};
use super::executor::Executor;
use super::plan::LayerPlan;
use super::slots::Slots;
use crate::{Error, ErrorKind, Result};

enum Op {
    Wait(Event),
    Copy(Arc<LayerPlan>, Arc<Slots>),
    Record(Arc<HostEvent>),
}

/// Copies of the processor behind a queue, so that whoever issues them goes on. Dropping it ends the thread when it has
/// done what was issued.
#[derive(Debug)]
pub struct HostStream {
    queue: Sender<Op>,
    /// A forked child has the queue, but not the thread.
    process: u32,
}

impl HostStream {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Io` where no thread can be had.
    pub fn new(copies: CpuCopies) -> Result<HostStream> {
        let (queue, ops) = channel();
        std::thread::Builder::new()
            .name("hicache-stream".into())
            .spawn(move || carry_out(&copies, &ops))
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot start a stream: {error}")))?;
        Ok(HostStream { queue, process: hicache_sys::process_number() })
    }

    fn issue(&self, op: Op) -> Result<()> {
        if self.process != hicache_sys::process_number() {
            return Err(Error::new(ErrorKind::Closed, "the stream belongs to another process"));
        }
        self.queue.send(op).map_err(|_| Error::new(ErrorKind::Io, "the thread of a stream has ended"))
    }
}

/// After a failure nothing more is copied, and every event from then on says so: bytes after a gap are not announced.
fn carry_out(copies: &CpuCopies, ops: &Receiver<Op>) {
    let mut failure: Option<String> = None;
    for op in ops {
        let done = match (op, &failure) {
            (Op::Record(event), None) => {
                event.set();
                Ok(())
            }
            (Op::Record(event), Some(reason)) => {
                event.fail(reason.clone());
                Ok(())
            }
            (_, Some(_)) => Ok(()),
            (Op::Wait(event), None) => event.wait_until(None).map(|_| ()),
            (Op::Copy(plan, slots), None) => copies.copy_now(&plan, &slots),
        };
        if let Err(error) = done {
            failure = Some(error.message().to_owned());
        }
    }
}

impl Executor for HostStream {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.issue(Op::Wait(Arc::clone(event)))
    }

    fn copy(&self, plan: &Arc<LayerPlan>, slots: &Arc<Slots>) -> Result<()> {
        self.issue(Op::Copy(Arc::clone(plan), Arc::clone(slots)))
    }

    fn record(&self, _step: Option<u32>) -> Result<Event> {
        let event = HostEvent::new();
        self.issue(Op::Record(Arc::clone(&event)))?;
        Ok(event)
    }
}
