//! Starts worker processes, speaks with them, stops and kills them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long a test waits for what must come before it gives up. Long: a slow machine is no failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

const SIGKILL: i32 = 9;

/// A worker process. It is killed when dropped.
pub struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// Its identity in the root.
    pub process: String,
}

impl Worker {
    /// Starts a worker that opens `root`; `options` are those of the worker's command line.
    pub fn start(root: &Path, options: &str) -> Worker {
        Worker::spawn(Command::new(env!("CARGO_BIN_EXE_worker")).arg(root), options)
    }

    /// Starts a worker that may have so many descriptors open.
    pub fn start_with_descriptors(root: &Path, most: u32, options: &str) -> Worker {
        let script = format!("ulimit -n {most} && exec \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_worker")]).arg(root);
        Worker::spawn(&mut command, options)
    }

    /// Starts a worker in a process namespace of its own, where it is process number 1.
    pub fn start_as_number_one(root: &Path, options: &str) -> Worker {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child=KILL", "sh", "-c"]);
        command.args(["test $$ -eq 1 && exec \"$@\"", "sh", env!("CARGO_BIN_EXE_worker")]).arg(root);
        Worker::spawn(&mut command, options)
    }

    fn spawn(command: &mut Command, options: &str) -> Worker {
        let command = command.args(options.split_whitespace());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (send, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let input = child.stdin.take();
        let mut worker = Worker { child, input, lines, process: String::new() };
        let opened = worker.answer("opened");
        worker.process = opened;
        worker
    }

    /// Says a line, and does not wait for the answer.
    pub fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().expect("a worker that listens");
        // A worker that is dead is found out by its answer.
        let _ = writeln!(input, "{line}").and_then(|()| input.flush());
    }

    /// The next line; `None` when the worker is dead and said everything.
    pub fn line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(checked(line)),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("worker {} says nothing", self.child.id()),
        }
    }

    /// The rest of the next line, which begins with `word`.
    pub fn answer(&mut self, word: &str) -> String {
        let Some(line) = self.line() else {
            panic!("expected {word:?}, the worker is dead: {:?}", self.child.wait())
        };
        match line.split_once(' ').unwrap_or((&line, "")) {
            (first, rest) if first == word => rest.to_owned(),
            _ => panic!("expected {word:?}, found {line:?}"),
        }
    }

    /// Says a line and takes the answer, which begins with `word`.
    pub fn ask(&mut self, line: &str, word: &str) -> String {
        self.tell(line);
        self.answer(word)
    }

    /// Lines that are there by now.
    pub fn lines_by_now(&mut self) -> Vec<String> {
        self.lines.try_iter().map(checked).collect()
    }

    /// Backs up pages of a chain; a letter for each.
    pub fn backup(&mut self, chain: u64, pages: std::ops::Range<usize>) -> String {
        let answer = self.ask(&format!("backup {chain} {} {}", pages.start, pages.end), "backed");
        Backed::parse(&answer).letters
    }

    /// Leading pages of a chain that can be had.
    pub fn matched(&mut self, chain: u64, pages: usize) -> usize {
        self.ask(&format!("match {chain} {pages}"), "matched").parse().unwrap()
    }

    /// Restores pages of a chain, checked by the worker; a letter for each.
    pub fn restore(&mut self, chain: u64, pages: std::ops::Range<usize>) -> String {
        self.ask(&format!("restore {chain} {} {}", pages.start, pages.end), "restored")
    }

    /// One of the worker's totals.
    pub fn counter(&mut self, name: &str) -> u64 {
        value(&self.ask("counters", "counters"), name)
    }

    /// Number of the process for the kernel.
    pub fn number(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL. Lines that it said before can still be read.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(SIGKILL), "killed");
    }

    /// SIGSTOP; returns when it has stopped.
    pub fn stop(&mut self) {
        self.signal("STOP");
        self.wait_until_stopped();
    }

    /// Returns when a fault has stopped it.
    pub fn wait_until_stopped(&mut self) {
        wait_until("a worker stops", || self.is_stopped());
    }

    /// Whether it stands still.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.number())).unwrap_or_default();
        // The state follows the name, which is in brackets.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    }

    /// SIGCONT.
    pub fn go_on(&self) {
        self.signal("CONT");
    }

    /// Waits for its end by a fault; everything that it said before.
    pub fn wait_until_dead(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        while let Some(line) = self.line() {
            said.push(line);
        }
        assert_eq!(self.child.wait().unwrap().signal(), Some(SIGKILL), "it dies at its fault");
        said
    }

    /// Whether it has ended, and how.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Lets it close its store and end.
    pub fn close(mut self) {
        self.tell("close");
        while self.line().is_some_and(|line| line != "closed") {}
        assert!(self.child.wait().unwrap().success());
    }

    /// How many descriptors it has open.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.number())).unwrap().count()
    }

    /// Whether it has this file open right now.
    pub fn has_open(&self, path: &Path) -> bool {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{}/fd", self.number())) else { return false };
        entries.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|open| open == path))
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.number().to_string()).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line of a worker that says what must not be fails the test.
fn checked(line: String) -> String {
    assert!(!line.starts_with("FAILED"), "{line}");
    line
}

/// What a backup came to.
#[derive(Debug, Clone)]
pub struct Backed {
    /// The chain.
    pub chain: u64,
    /// Its first page of the call.
    pub first: usize,
    /// Name of the segment's file where pages were stored and it is known.
    pub segment: Option<String>,
    /// A letter for each page.
    pub letters: String,
}

impl Backed {
    /// Of a line, without its first word.
    pub fn parse(line: &str) -> Backed {
        let mut words = line.splitn(5, ' ');
        let mut word = || words.next().unwrap_or_default().to_owned();
        Backed {
            chain: word().parse().unwrap(),
            first: word().parse().unwrap(),
            segment: Some(word()).filter(|name| name != "-"),
            letters: word(),
        }
    }

    /// Of a line of a worker that works; `None` for its other lines.
    pub fn of_line(line: &str) -> Option<Backed> {
        line.strip_prefix("backed ").map(Backed::parse)
    }

    /// Numbers of the pages that this call stored.
    pub fn stored(&self) -> impl Iterator<Item = usize> + '_ {
        let letters = self.letters.chars().enumerate();
        letters.filter(|(_, letter)| *letter == 's').map(|(page, _)| self.first + page)
    }
}

/// The value in `name=value` words.
pub fn value(words: &str, name: &str) -> u64 {
    let found = words.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no {name} in {words:?}")).parse().unwrap()
}

/// Waits for what must come.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes that the files below `root` take on disk, as far as they do not vanish meanwhile.
pub fn taken_bytes(root: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let (mut taken, mut folders) = (0, vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => folders.push(entry.path()),
                Ok(metadata) => taken += metadata.blocks() * 512,
                Err(_) => {}
            }
        }
    }
    taken
}

/// Whether the long versions are wanted, as `tests/full.py` does.
pub fn is_full_size() -> bool {
    std::env::var_os("HICACHE_FULL_SIZE").is_some()
}

/// The short figure, or the one of the long version.
pub fn sized<N>(short: N, long: N) -> N {
    if is_full_size() { long } else { short }
}
