//! First touch: every page gets its memory now, on several threads, and not while somebody waits for a copy.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use super::mapping::pointer;
use super::numa;

/// Bytes that a thread takes at once; a multiple of every usual huge page below 1 GiB.
const PIECE: usize = 64 << 20;

/// Touches every page of the range with up to `threads` threads, kept to `cpus` if there are any.
///
/// Bytes keep their values: pages that another process has filled are only mapped.
pub(super) fn touch(base: usize, len: usize, page: usize, threads: usize, cpus: &[usize]) -> io::Result<()> {
    let pieces = len.div_ceil(PIECE);
    let next = AtomicUsize::new(0);
    let can_populate = AtomicBool::new(true);
    let has_failed = AtomicBool::new(false);
    let failed = Mutex::new(None);
    let work = || {
        if !cpus.is_empty() {
            numa::keep_to(cpus);
        }
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return;
            }
            let start = base + piece * PIECE;
            if let Err(error) = touch_piece(start, PIECE.min(base + len - start), page, &can_populate) {
                has_failed.store(true, Ordering::Relaxed);
                next.store(pieces, Ordering::Relaxed);
                *failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
                return;
            }
        }
    };
    // Threads of their own, also for one: the caller's affinity stays as it is.
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, pieces.max(1)) {
            let started =
                std::thread::Builder::new().name("hicache-touch".to_owned()).spawn_scoped(scope, work);
            if let Err(error) = started {
                // Those that run do all of it; without any, the error is told.
                let mut failed = failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                failed.get_or_insert(error);
                break;
            }
        }
    });
    if next.load(Ordering::Relaxed) >= pieces && !has_failed.load(Ordering::Relaxed) {
        return Ok(());
    }
    failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
}

fn touch_piece(start: usize, len: usize, page: usize, can_populate: &AtomicBool) -> io::Result<()> {
    while can_populate.load(Ordering::Relaxed) {
        // SAFETY: the range is a part of the caller's mapping; the bytes keep their values.
        let done = unsafe { libc::madvise(pointer(start), len, libc::MADV_POPULATE_WRITE) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            Some(libc::EINVAL | libc::ENOSYS) => can_populate.store(false, Ordering::Relaxed),
            _ => return Err(error),
        }
    }
    // Before Linux 5.14. An atomic that changes nothing, since others may use shared memory already.
    for address in (start..start + len).step_by(page) {
        // SAFETY: one byte of the caller's mapping, alive through the call, and reached by atomics or not at all.
        let byte = unsafe { AtomicU8::from_ptr(pointer(address).cast()) };
        byte.fetch_or(0, Ordering::Relaxed);
    }
    Ok(())
}
