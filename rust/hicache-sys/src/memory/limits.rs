//! Limits that memory meets, asked before it is taken: what goes beyond a container's is ended without a word.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::{MemoryError, MemoryErrorKind};

/// `CAP_IPC_LOCK`: who has it may lock as much as there is.
const CAN_LOCK: u64 = 1 << 14;

/// Refuses to lock `need` bytes beyond RLIMIT_MEMLOCK.
pub(super) fn check_lock(need: u64) -> Result<(), MemoryError> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = field(&status, "CapEff:").and_then(|text| u64::from_str_radix(text, 16).ok());
    if capabilities.is_some_and(|capabilities| capabilities & CAN_LOCK != 0) {
        return Ok(());
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let locked = kib(&status, "VmLck:").unwrap_or(0);
    check_lock_limit(need, limit, locked)
}

fn check_lock_limit(need: u64, limit: Option<u64>, locked: u64) -> Result<(), MemoryError> {
    let Some(limit) = limit else { return Ok(()) };
    if locked.checked_add(need).is_some_and(|sum| sum <= limit) {
        return Ok(());
    }
    Err(MemoryError::new(
        MemoryErrorKind::Limit,
        format!(
            "RLIMIT_MEMLOCK: expected room to lock {need} bytes, found a limit of {limit} bytes of which {locked} are taken: raise it with `ulimit -l`, LimitMEMLOCK= of the service, or --ulimit memlock= of the container"
        ),
    ))
}

/// Refuses `need` new bytes where a memory cgroup of this process, or the machine, does not have them.
/// `root` is `/`, or a folder with files of the same names in tests.
pub(super) fn check_memory(root: &Path, need: u64) -> Result<(), MemoryError> {
    for group in groups(root) {
        if group.available() < need {
            let Group { file, limit, used, reclaimable } = &group;
            return Err(MemoryError::new(
                MemoryErrorKind::Limit,
                format!(
                    "cgroup memory: expected {need} bytes, found {} of a limit of {limit} ({used} used, {reclaimable} of them page cache): raise {}, or the container's memory limit",
                    group.available(),
                    file.display()
                ),
            ));
        }
    }
    let text = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    if let Some(available) = kib(&text, "MemAvailable:").filter(|&available| available < need) {
        return Err(MemoryError::new(
            MemoryErrorKind::Limit,
            format!(
                "memory of the machine: expected {need} bytes, found {available} available (MemAvailable in /proc/meminfo)"
            ),
        ));
    }
    Ok(())
}

/// A memory cgroup with a limit.
#[derive(Debug)]
struct Group {
    file: PathBuf,
    limit: u64,
    used: u64,
    /// Page cache, which the kernel gives back before it refuses.
    reclaimable: u64,
}

impl Group {
    fn available(&self) -> u64 {
        self.limit.saturating_sub(self.used.saturating_sub(self.reclaimable))
    }
}

/// Cgroups of this process that limit memory, from its own up to the root.
fn groups(root: &Path) -> Vec<Group> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut found = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, names) = if controllers.is_empty() {
            ("sys/fs/cgroup", ["memory.max", "memory.current", "file "])
        } else if controllers.split(',').any(|name| name == "memory") {
            ("sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache "])
        } else {
            continue;
        };
        let top = root.join(mount);
        // In a container with a view of its own the path may lead nowhere: the top is what it has.
        let mut folder = top.join(path.trim_start_matches('/'));
        loop {
            found.extend(group(&folder, names));
            if folder == top || !folder.pop() || !folder.starts_with(&top) {
                break;
            }
        }
    }
    found
}

fn group(folder: &Path, [limit, used, cache]: [&str; 3]) -> Option<Group> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let file = folder.join(limit);
    let limit = number(limit)?; // "max" is no limit
    let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = statistics.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse().ok());
    Some(Group { file, limit, used: number(used).unwrap_or(0), reclaimable: reclaimable.unwrap_or(0) })
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn kib(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that looks like `/` to this module; removed at the end.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str, files: &[(&str, &str)]) -> Root {
            let root = std::env::temp_dir().join(format!("hicache-limits-{}-{name}", std::process::id()));
            for (file, text) in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Root(root)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_lock_limit_says_what_there_is_and_where_to_raise_it() {
        check_lock_limit(4096, None, 0).unwrap();
        check_lock_limit(4096, Some(8192), 4096).unwrap();
        let error = check_lock_limit(4097, Some(8192), 4096).unwrap_err();
        assert_eq!(error.kind(), MemoryErrorKind::Limit);
        for part in ["RLIMIT_MEMLOCK", "4097", "8192", "4096", "ulimit -l", "LimitMEMLOCK="] {
            assert!(error.message().contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_limit_above_the_own_cgroup_counts_and_page_cache_is_room() {
        let root = Root::new(
            "v2",
            &[
                ("proc/self/cgroup", "0::/pod/job\n"),
                ("proc/meminfo", "MemTotal: 99 kB\nMemAvailable:    2000000 kB\n"),
                ("sys/fs/cgroup/pod/job/memory.max", "max\n"),
                ("sys/fs/cgroup/pod/memory.max", "1000000\n"),
                ("sys/fs/cgroup/pod/memory.current", "900000\n"),
                ("sys/fs/cgroup/pod/memory.stat", "anon 500000\nfile 400000\n"),
            ],
        );
        check_memory(&root.0, 500_000).unwrap();
        let error = check_memory(&root.0, 500_001).unwrap_err();
        assert_eq!(error.kind(), MemoryErrorKind::Limit);
        for part in ["cgroup", "500001", "found 500000", "1000000", "pod/memory.max"] {
            assert!(error.message().contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn the_older_cgroups_and_the_machine_are_asked_too() {
        let root = Root::new(
            "v1",
            &[
                ("proc/self/cgroup", "7:blkio:/\n4:cpuset,memory:/elsewhere\n"),
                ("proc/meminfo", "MemAvailable: 20 kB\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096\n"),
            ],
        );
        check_memory(&root.0, 4096).unwrap();
        assert!(check_memory(&root.0, 4097).unwrap_err().message().contains("memory.limit_in_bytes"));
        fs::write(root.0.join("sys/fs/cgroup/memory/memory.limit_in_bytes"), "9223372036854771712").unwrap();
        assert!(check_memory(&root.0, 20481).unwrap_err().message().contains("MemAvailable"));
    }
}
