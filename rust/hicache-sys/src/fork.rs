//! Files that a forked child must not keep.
//!
//! `fork` gives the child every descriptor of the parent, and both share what is behind it: a lock taken with
//! `flock` is held until the last of them closes, so a child would keep its parent alive in the eyes of others, and
//! a writer's file would have two writers. [`Guarded`] files are taken from the child before its `fork` returns:
//! each number is made to stand for a descriptor that can do nothing. The number stays taken, so that a value that
//! the child inherited closes that, and never a file that the child opened meanwhile.
//!
//! Between the start of `fork` and the child's handler, some microseconds, the child still has what its parent has.
//!
//! Children made by `vfork` or `posix_spawn` run no handlers and need none: the files close when they `exec`.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// Most files that are guarded at once.
pub const MAX_GUARDED: usize = 4096;

const FREE: i32 = -1;
const FORKING: i32 = -1;

/// Descriptors of the guarded files. The child may neither allocate nor wait for a lock that a thread held which it
/// does not have: a table of numbers is all it looks at.
static TABLE: [AtomicI32; MAX_GUARDED] = [const { AtomicI32::new(FREE) }; MAX_GUARDED];

/// Slots of the table that were ever used: the child need not look at the others.
static USED_SLOTS: AtomicUsize = AtomicUsize::new(0);

/// How many threads are between opening and registering a file, or between unregistering and closing one; or
/// `FORKING`. A fork in between would give the child a file that the table does not have.
static GATE: AtomicI32 = AtomicI32::new(0);

/// Raised in each forked child: slots of an older generation are not the child's to free.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A file of which a forked child keeps nothing.
#[derive(Debug)]
pub struct Guarded {
    /// `None` only while it is dropped.
    file: Option<File>,
    slot: usize,
    generation: u32,
}

impl Guarded {
    /// Guards the file that `open` opens. `open` should do no more than that: a fork waits for it.
    ///
    /// # Errors
    /// Those of `open`, and `QuotaExceeded` when [`MAX_GUARDED`] files are guarded already.
    pub fn open(open: impl FnOnce() -> io::Result<File>) -> io::Result<Guarded> {
        install()?;
        let _gate = enter();
        let file = open()?;
        let slot = take_slot(&TABLE, file.as_raw_fd())?;
        USED_SLOTS.fetch_max(slot + 1, Ordering::AcqRel);
        Ok(Guarded { file: Some(file), slot, generation: GENERATION.load(Ordering::Acquire) })
    }
}

/// A number that is another one in each forked child.
///
/// # Errors
/// `ENOMEM` where the handlers that count cannot be installed.
pub fn generation() -> io::Result<u32> {
    install()?;
    Ok(GENERATION.load(Ordering::Acquire))
}

/// The number as it is now, of somebody who has asked [`generation`] before.
pub(crate) fn current_generation() -> u32 {
    GENERATION.load(Ordering::Acquire)
}

impl Deref for Guarded {
    type Target = File;

    fn deref(&self) -> &File {
        match &self.file {
            Some(file) => file,
            None => unreachable!("a guarded file has its file until it is dropped"),
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _gate = enter();
        if self.generation == GENERATION.load(Ordering::Acquire) {
            TABLE[self.slot].store(FREE, Ordering::Release);
        }
        self.file = None;
    }
}

fn take_slot(table: &[AtomicI32], descriptor: i32) -> io::Result<usize> {
    let is_taken = |slot: &AtomicI32| {
        slot.compare_exchange(FREE, descriptor, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    table.iter().position(is_taken).ok_or_else(|| {
        let most = table.len();
        io::Error::new(
            io::ErrorKind::QuotaExceeded,
            format!("expected at most {most} locked and written files in a process, found one more"),
        )
    })
}

/// Keeps forks out while the value lives.
struct Gate;

impl Drop for Gate {
    fn drop(&mut self) {
        GATE.fetch_sub(1, Ordering::AcqRel);
    }
}

fn enter() -> Gate {
    wait_until(|| {
        GATE.fetch_update(Ordering::AcqRel, Ordering::Acquire, |inside| {
            (inside != FORKING).then(|| inside + 1)
        })
        .is_ok()
    });
    Gate
}

/// Waits without a lock: the child has none of the threads that could release one.
fn wait_until(mut done: impl FnMut() -> bool) {
    while !done() {
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Installs the handlers, once in the life of the process and of its children.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<i32> = OnceLock::new();
    let code = *INSTALLED.get_or_init(|| {
        // SAFETY: the three functions live as long as the library, and do in a child only what is safe there.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) }
    });
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

extern "C" fn before_fork() {
    wait_until(|| GATE.compare_exchange(0, FORKING, Ordering::AcqRel, Ordering::Acquire).is_ok());
}

extern "C" fn after_fork() {
    GATE.store(0, Ordering::Release);
}

/// Async-signal-safe: atomics and four system calls.
extern "C" fn in_child() {
    // With O_PATH nothing can be read, written or locked through it. Opened here: a descriptor kept from before
    // could have been closed by a daemon's clean-up, and be another file by now.
    // SAFETY: a constant, terminated path.
    let nothing = unsafe { libc::open(c"/".as_ptr(), libc::O_PATH | libc::O_CLOEXEC) };
    for slot in &TABLE[..USED_SLOTS.load(Ordering::Acquire)] {
        let descriptor = slot.swap(FREE, Ordering::AcqRel);
        if descriptor == FREE {
            continue;
        }
        // SAFETY: dup3 of two numbers; what the second stood for was the parent's, and is not used here.
        let replaced =
            nothing >= 0 && unsafe { libc::dup3(nothing, descriptor, libc::O_CLOEXEC) } == descriptor;
        if !replaced {
            // Out of descriptors: rather a number that is free than the parent's lock.
            // SAFETY: closing a number that this process has.
            unsafe { libc::close(descriptor) };
        }
    }
    if nothing >= 0 {
        // SAFETY: opened above, closed once.
        unsafe { libc::close(nothing) };
    }
    GENERATION.fetch_add(1, Ordering::AcqRel);
    GATE.store(0, Ordering::Release);
}

/// Held by tests that fork, and by tests of locks: until a child's handler has run it has its parent's locks.
#[cfg(test)]
pub(crate) static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{FileLock, is_locked};

    /// Exit status of `child`, run in a forked child. It may only do what is safe after a fork.
    fn in_fork(child: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child calls only `child`, which the tests below keep to system calls, and `_exit`.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let status = child();
            // SAFETY: ends the child at once, without the destructors of the parent's values.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above and writes one integer.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert!(libc::WIFEXITED(status));
        libc::WEXITSTATUS(status)
    }

    fn scratch(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("hicache-sys-fork-{}-{name}", std::process::id()))
    }

    #[test]
    fn a_child_keeps_no_lock_and_cannot_write() {
        let _alone = ONE_AT_A_TIME.lock();
        let (locked, written) = (scratch("lock"), scratch("written"));
        let lock = FileLock::try_exclusive(&locked).unwrap().expect("a free lock");
        let file = Guarded::open(|| crate::file::create_new(&written)).unwrap();
        let status = in_fork(|| {
            let one = [1_u8];
            // SAFETY: one byte from a live buffer.
            let wrote = unsafe { libc::pwrite(file.as_raw_fd(), one.as_ptr().cast(), 1, 0) };
            // SAFETY: asks for flags of a number.
            let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) };
            // The number still stands for something, which goes at exec and takes no byte.
            i32::from(wrote == -1) + 2 * i32::from(flags == libc::FD_CLOEXEC)
        });
        assert_eq!(status, 3);
        crate::file::write_all(&file, b"parent", 0).unwrap();
        assert!(is_locked(&locked).unwrap(), "the parent lost its lock");

        // A child that lives on does not hold what the parent lets go.
        let (mut ends, mut hold) = ([0; 2], [0; 2]);
        // SAFETY: writes two descriptors into each array.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::pipe2(hold.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: the child only writes to one pipe, reads from another and exits.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let mut byte = [0_u8];
            // SAFETY: writes one byte from a live buffer.
            unsafe { libc::write(ends[1], byte.as_ptr().cast(), 1) };
            // SAFETY: reads one byte into a live buffer.
            unsafe { libc::read(hold[0], byte.as_mut_ptr().cast(), 1) };
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        // The child's fork returned: a moment earlier it still has what the parent had.
        let mut byte = [0_u8];
        // SAFETY: reads one byte into a live buffer.
        assert_eq!(unsafe { libc::read(ends[0], byte.as_mut_ptr().cast(), 1) }, 1);
        drop(lock);
        let is_free = !is_locked(&locked).unwrap();
        // SAFETY: wakes the child with one byte.
        unsafe { libc::write(hold[1], [1_u8].as_ptr().cast(), 1) };
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
        for descriptor in [ends, hold].as_flattened() {
            // SAFETY: each was opened above and is closed once.
            unsafe { libc::close(*descriptor) };
        }
        std::fs::remove_file(&locked).unwrap();
        std::fs::remove_file(&written).unwrap();
        assert!(is_free, "the child holds the parent's lock");
    }

    #[test]
    fn forks_while_files_come_and_go_leave_the_child_none() {
        let _alone = ONE_AT_A_TIME.lock();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let stop = &stop;
                scope.spawn(move || {
                    let path = scratch(&format!("race-{thread}"));
                    while !stop.load(Ordering::Relaxed) {
                        let _lock = FileLock::try_exclusive(&path).unwrap();
                    }
                    std::fs::remove_file(&path).unwrap();
                });
            }
            for _ in 0..200 {
                // In the child no number is a file that somebody could lock: each lock file has this name.
                let kept = in_fork(|| {
                    let mut link = [0_u8; 256];
                    let found = (3..64).any(|descriptor| {
                        let mut name = *b"/proc/self/fd/\0\0\0";
                        name[14] = b'0' + (descriptor / 10) as u8;
                        name[15] = b'0' + (descriptor % 10) as u8;
                        if descriptor < 10 {
                            name[14] = name[15];
                            name[15] = 0;
                        }
                        // SAFETY: a terminated path, and a live buffer of the length given.
                        let len = unsafe {
                            libc::readlink(name.as_ptr().cast(), link.as_mut_ptr().cast(), link.len())
                        };
                        len > 0 && link[..len as usize].windows(6).any(|part| part == b"-race-")
                    });
                    i32::from(found)
                });
                if kept != 0 {
                    stop.store(true, Ordering::Relaxed);
                }
                assert_eq!(kept, 0, "a child kept a file that was about to be locked");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn many_are_guarded_and_one_too_many_is_an_error() {
        let table: Vec<AtomicI32> = (0..MAX_GUARDED).map(|_| AtomicI32::new(FREE)).collect();
        for slot in 0..MAX_GUARDED {
            assert_eq!(take_slot(&table, 7).unwrap(), slot);
        }
        let error = take_slot(&table, 7).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert!(error.to_string().contains("4096"), "{error}");
        table[40].store(FREE, Ordering::Release);
        assert_eq!(take_slot(&table, 7).unwrap(), 40);
    }
}
