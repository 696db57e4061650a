//! `probe`: what a disk and a machine can do, measured in a file that is gone at once.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use hicache_core::format::ProcessId;
use hicache_sys::file::{self, Access};
use hicache_sys::probe::{self, FileSystem};
use hicache_sys::{AlignedBuffer, DIRECT_ALIGNMENT};
use serde_json::{Value, json};

use crate::FINE;
use crate::failure::{Done, Failure};
use crate::output::{Output, size};
use crate::values::parse_size;

/// Longest time for one measurement.
const PATIENCE: Duration = Duration::from_millis(300);
/// Bytes of one read or write.
const BLOCKS: [usize; 3] = [64 << 10, 1 << 20, 4 << 20];
/// Times that a small write is synced.
const SYNCS: usize = 20;

/// Measures the disk that holds a folder, and suggests how to open a store there.
///
/// Writes one temporary file without a name, which is gone when the command ends. Takes a few seconds.
#[derive(Args)]
pub struct Probe {
    /// Folder on the disk
    path: PathBuf,
    /// Most bytes written and read
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    bytes: u64,
}

/// One measured speed.
struct Speed {
    access: &'static str,
    operation: &'static str,
    block_bytes: usize,
    bytes_per_second: f64,
}

/// What was found.
struct Found {
    file_system: FileSystem,
    direct: Result<(), String>,
    io_uring: Result<(), String>,
    cachestat: Result<(), String>,
    cores: usize,
    speeds: Vec<Speed>,
    sync_median: Option<Duration>,
}

impl Probe {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let found = self.measure()?;
        match output.is_json() {
            true => output.document("probe", self.document(&found)),
            false => self.say(&found, output),
        }
        Ok(FINE)
    }

    fn measure(&self) -> Result<Found, Failure> {
        let failed = |error: &std::io::Error| Failure::io("cannot probe", &self.path, error);
        let file_system = probe::file_system(&self.path).map_err(|error| failed(&error))?;
        let scratch = Scratch::new(&self.path).map_err(|error| failed(&error))?;
        // A probe must not fill the disk.
        let room = self.bytes.min(file_system.available_bytes / 4);
        let bytes = (room / BLOCKS[2] as u64 * BLOCKS[2] as u64).max(BLOCKS[2] as u64);
        let mut speeds = Vec::new();
        let files = [("buffered", Some(&scratch.buffered)), ("direct", scratch.direct.as_ref().ok())];
        for (access, file) in files {
            let Some(file) = file else { continue };
            for block_bytes in BLOCKS {
                let (write, read) = speed(file, bytes, block_bytes).map_err(|error| failed(&error))?;
                speeds.push(Speed { access, operation: "write", block_bytes, bytes_per_second: write });
                speeds.push(Speed { access, operation: "read", block_bytes, bytes_per_second: read });
            }
        }
        let cachestat = probe::cached_bytes(&scratch.buffered, 0, 4096);
        Ok(Found {
            file_system,
            sync_median: sync_median(&scratch.buffered).map_err(|error| failed(&error))?,
            direct: scratch.direct.map(|_| ()).map_err(|error| error.to_string()),
            io_uring: probe::io_uring().map_err(|error| error.to_string()),
            cachestat: cachestat.map(|_| ()).map_err(|error| error.to_string()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            speeds,
        })
    }

    fn document(&self, found: &Found) -> Value {
        let FileSystem { kind, is_local, total_bytes, available_bytes, total_inodes, free_inodes } =
            &found.file_system;
        let works =
            |found: &Result<(), String>| json!({"works": found.is_ok(), "error": found.as_ref().err()});
        let speeds: Vec<Value> = found
            .speeds
            .iter()
            .map(|speed| {
                json!({
                    "access": speed.access,
                    "operation": speed.operation,
                    "block_bytes": speed.block_bytes,
                    "bytes_per_second": speed.bytes_per_second.round(),
                })
            })
            .collect();
        let suggestion = Suggestion::of(found);
        json!({
            "path": self.path.to_string_lossy(),
            "file_system": {
                "kind": kind,
                "is_local": is_local,
                "total_bytes": total_bytes,
                "available_bytes": available_bytes,
                "total_inodes": total_inodes,
                "free_inodes": free_inodes,
            },
            "direct_io": works(&found.direct),
            "io_uring": works(&found.io_uring),
            "cachestat": works(&found.cachestat),
            "cores": found.cores,
            "speeds": speeds,
            "fdatasync_median_ns": found.sync_median.map(|time| time.as_nanos() as u64),
            "suggestion": {
                "is_usable": found.file_system.is_local,
                "io_mode": suggestion.io_mode,
                "capacity_bytes": suggestion.capacity_bytes,
            },
        })
    }

    fn say(&self, found: &Found, output: &mut Output<'_>) {
        let FileSystem { kind, is_local, total_bytes, available_bytes, total_inodes, free_inodes } =
            &found.file_system;
        let scope = if *is_local { "of this host alone" } else { "shared by hosts" };
        output.field("file system", &format!("{kind}, {scope}"));
        output.field("free", &format!("{} of {}", size(*available_bytes), size(*total_bytes)));
        match total_inodes {
            0 => output.field("inodes", "made as needed"),
            _ => output.field("inodes", &format!("{free_inodes} of {total_inodes} free")),
        }
        let works = |found: &Result<(), String>| match found {
            Ok(()) => "works".to_owned(),
            Err(error) => format!("does not work: {error}"),
        };
        output.field("direct I/O", &works(&found.direct));
        output.field("io_uring", &works(&found.io_uring));
        output.field("cachestat", &works(&found.cachestat));
        output.field("cores", &found.cores.to_string());
        if let Some(time) = found.sync_median {
            output.field("fdatasync", &format!("{:.2} ms after a write of 4 KiB", time.as_secs_f64() * 1e3));
        }
        let row = |speed: &Speed| {
            let mib_per_second = speed.bytes_per_second / f64::from(1 << 20);
            vec![
                speed.access.to_owned(),
                speed.operation.to_owned(),
                size(speed.block_bytes as u64),
                format!("{mib_per_second:.0}"),
            ]
        };
        let rows = found.speeds.iter().map(row).collect();
        output.table(&["access", "operation", "#block", "#MiB/s"], rows);
        if !is_local {
            return output
                .line("suggested: another disk; locks and caches of hosts that share one are not coherent");
        }
        let Suggestion { io_mode, capacity_bytes } = Suggestion::of(found);
        output.line(&format!("suggested: io_mode={io_mode} capacity={}", size(capacity_bytes)));
    }
}

/// How to open a store here.
struct Suggestion {
    io_mode: &'static str,
    capacity_bytes: u64,
}

impl Suggestion {
    /// Direct where the disk alone writes faster than the disk behind the page cache, else the store's own choice where
    /// it can choose; 80 % of the free space.
    fn of(found: &Found) -> Suggestion {
        let fastest = |access: &str| {
            let writes =
                found.speeds.iter().filter(|speed| speed.access == access && speed.operation == "write");
            writes.map(|speed| speed.bytes_per_second).fold(0.0, f64::max)
        };
        let is_direct = found.direct.is_ok() && fastest("direct") > fastest("buffered");
        Suggestion {
            io_mode: match (is_direct, &found.direct, &found.cachestat) {
                (true, ..) => "direct",
                (false, Ok(()), Ok(())) => "auto",
                (false, ..) => "buffered",
            },
            capacity_bytes: found.file_system.available_bytes / 5 * 4,
        }
    }
}

/// A file without a name, open twice.
struct Scratch {
    buffered: File,
    direct: std::io::Result<File>,
}

impl Scratch {
    fn new(folder: &Path) -> std::io::Result<Scratch> {
        let name = ProcessId::random().map_err(std::io::Error::other)?;
        let path = folder.join(format!("hicache-probe-{name}"));
        let buffered = file::create_new(&path)?;
        let direct = file::open_write(&path, Access::Direct);
        // From here on nothing is left behind, whatever happens.
        std::fs::remove_file(&path)?;
        let works = direct.and_then(|file| {
            // Some file systems refuse only the first transfer.
            file::write_all(&file, &AlignedBuffer::zeroed(DIRECT_ALIGNMENT), 0).map(|()| file)
        });
        Ok(Scratch { buffered, direct: works })
    }
}

/// Bytes a second, written (and on the disk) and read back, in blocks of this size.
fn speed(file: &File, most: u64, block_bytes: usize) -> std::io::Result<(f64, f64)> {
    let mut block = AlignedBuffer::zeroed(block_bytes);
    for (index, byte) in block.iter_mut().enumerate() {
        *byte = (index as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]; // not compressible away
    }
    let start = Instant::now();
    let mut written = 0;
    while written < most && start.elapsed() < PATIENCE {
        file::write_all(file, &block, written)?;
        written += block_bytes as u64;
    }
    file.sync_data()?;
    let write = written as f64 / start.elapsed().as_secs_f64().max(1e-9);
    let start = Instant::now();
    let mut read = 0;
    while read < written && start.elapsed() < PATIENCE {
        file::read_exact(file, &mut block, read)?;
        read += block_bytes as u64;
    }
    Ok((write, read as f64 / start.elapsed().as_secs_f64().max(1e-9)))
}

/// Median time of an `fdatasync` after a small write.
fn sync_median(file: &File) -> std::io::Result<Option<Duration>> {
    let (mut times, begin) = (Vec::with_capacity(SYNCS), Instant::now());
    while times.len() < SYNCS && begin.elapsed() < PATIENCE {
        file::write_all(file, &[times.len() as u8; 4096], 0)?;
        let start = Instant::now();
        file.sync_data()?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times.get(times.len() / 2).copied())
}
