//! What goes wrong in a worker, at a chosen point of its I/O.

use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Mutex;

use hicache_core::store::io::{IoCall, IoHook};

/// A step of the store's I/O, as its hook sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Point {
    /// The header of a new segment: its file is there and empty.
    Header,
    /// Payload of a unit.
    Payload,
    /// The directory after the payload, or a seal.
    Directory,
    /// The frame that publishes a unit whose directory is written.
    Frame,
    /// Any other frame.
    Word,
    /// Payload or directory, read.
    Read,
}

/// What happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// SIGKILL; the transfer does not happen.
    Die,
    /// SIGKILL after half of the transfer's place holds other bytes.
    Tear,
    /// SIGSTOP; the transfer happens when somebody continues the process.
    Stop,
    /// Fails with this error of the system, so many times.
    Fail { errno: i32, times: u64 },
}

/// A fault that waits for its point.
#[derive(Debug)]
struct Fault {
    point: Option<Point>,
    action: Action,
    /// Transfers of this kind that pass before.
    after: u64,
}

/// The worker's hook.
pub struct Faults {
    page_bytes: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    armed: Option<Fault>,
    has_unpublished: bool,
}

impl Faults {
    /// Nothing goes wrong until [`Faults::arm`].
    pub fn new(page_bytes: u64) -> Self {
        Faults { page_bytes, state: Mutex::default() }
    }

    /// Arms a fault: point, action and how many such transfers pass before. Points: header, payload, directory,
    /// frame, word, read, any. Actions: die, tear, stop, `<errno>` or `<errno>*<times>`.
    pub fn arm(&self, words: &[&str]) -> Result<(), String> {
        let [point, action, rest @ ..] = words else {
            return Err(format!("expected a point and an action, found {words:?}"));
        };
        let point = match *point {
            "header" => Some(Point::Header),
            "payload" => Some(Point::Payload),
            "directory" => Some(Point::Directory),
            "frame" => Some(Point::Frame),
            "word" => Some(Point::Word),
            "read" => Some(Point::Read),
            "any" => None,
            other => return Err(format!("expected a point, found {other:?}")),
        };
        let number =
            |text: &str| text.parse::<u64>().map_err(|_| format!("expected a number, found {text:?}"));
        let action = match *action {
            "die" => Action::Die,
            "tear" => Action::Tear,
            "stop" => Action::Stop,
            errno => {
                let (errno, times) = errno.split_once('*').unwrap_or((errno, "1"));
                Action::Fail { errno: number(errno)? as i32, times: number(times)? }
            }
        };
        let after = rest.first().map_or(Ok(0), |text| number(text))?;
        self.lock().armed = Some(Fault { point, action, after });
        Ok(())
    }

    /// Nothing goes wrong any more.
    pub fn disarm(&self) {
        self.lock().armed = None;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn point(&self, state: &mut State, call: &IoCall<'_>) -> Point {
        if !call.is_write {
            return Point::Read;
        }
        let is_journal = call.path.extension().is_some_and(|end| end == "idx");
        if is_journal {
            let is_publication = std::mem::take(&mut state.has_unpublished);
            return if is_publication { Point::Frame } else { Point::Word };
        }
        match call.offset {
            ..4096 => Point::Header,
            _ if call.len.is_multiple_of(self.page_bytes) => Point::Payload,
            _ => {
                state.has_unpublished = true;
                Point::Directory
            }
        }
    }

    /// What is to happen at this transfer.
    fn due(&self, call: &IoCall<'_>) -> Option<Action> {
        let mut state = self.lock();
        let point = self.point(&mut state, call);
        let fault = state.armed.as_mut().filter(|fault| fault.point.is_none_or(|wanted| wanted == point))?;
        if fault.after > 0 {
            fault.after -= 1;
            return None;
        }
        let action = fault.action;
        match &mut fault.action {
            Action::Fail { times, .. } if *times > 1 => *times -= 1,
            _ => state.armed = None,
        }
        Some(action)
    }
}

impl IoHook for Faults {
    fn before(&self, call: IoCall<'_>) -> io::Result<()> {
        match self.due(&call) {
            None => Ok(()),
            Some(Action::Fail { errno, .. }) => Err(io::Error::from_raw_os_error(errno)),
            Some(Action::Stop) => {
                signal("STOP");
                Ok(())
            }
            Some(Action::Die) => die(),
            Some(Action::Tear) => {
                tear(&call);
                die()
            }
        }
    }
}

/// Leaves the beginning of what lies before it, as a write that was cut off: the magic is right, the rest is not.
fn tear(call: &IoCall<'_>) {
    let Ok(file) = std::fs::File::options().read(true).write(true).open(call.path) else { return };
    let half = (call.len / 2).min(call.offset);
    let mut bytes = vec![0; half as usize];
    // Nothing depends on it: without a torn write this is a plain death.
    let _ = file
        .read_exact_at(&mut bytes, call.offset - half)
        .and_then(|()| file.write_all_at(&bytes, call.offset));
}

/// Ends this process the way the kernel ends it: no destructor runs, this thread goes no step further.
fn die() -> ! {
    signal("KILL");
    loop {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

/// Sends this process a signal.
fn signal(name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(std::process::id().to_string()).status();
    if !sent.is_ok_and(|status| status.success()) {
        let _ = writeln!(io::stderr(), "cannot send SIG{name}");
        std::process::exit(5);
    }
}
