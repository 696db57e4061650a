//! NUMA nodes: which there are, which CPUs they have, and memory that is asked to come from one.

use std::fs;
use std::io;

use super::mapping::pointer;

const NODES: &str = "/sys/devices/system/node";

/// Most nodes that can be named.
const MAX_NODES: usize = 1024;

const MPOL_PREFERRED: i32 = 1;
const MPOL_BIND: i32 = 2;

/// Pages of which the node is asked after the touch.
const SAMPLES: usize = 64;

/// CPUs of a node; none for one that is memory only, such as a GPU's.
pub fn node_cpus(node: u32) -> io::Result<Vec<usize>> {
    Ok(parse_list(&fs::read_to_string(format!("{NODES}/node{node}/cpulist"))?))
}

/// Nodes that have memory.
pub fn nodes_with_memory() -> Vec<u32> {
    let text = fs::read_to_string(format!("{NODES}/has_memory")).unwrap_or_default();
    parse_list(&text).into_iter().map(|node| node as u32).collect()
}

/// The node of the CPU that this thread runs on.
pub fn current_node() -> io::Result<u32> {
    let (mut cpu, mut node) = (0_u32, 0_u32);
    let (cpu, place) = (&raw mut cpu, &raw mut node);
    // SAFETY: writes two integers; the third argument has no meaning any more.
    let done = unsafe { libc::syscall(libc::SYS_getcpu, cpu, place, std::ptr::null_mut::<u8>()) };
    if done == 0 { Ok(node) } else { Err(io::Error::last_os_error()) }
}

/// Asks that pages of the range, none of which was touched yet, come from `node`: only, or rather.
pub(super) fn bind(base: usize, len: usize, node: u32, only: bool) -> io::Result<()> {
    let mut mask = [0_u64; MAX_NODES / 64];
    let (word, bit) = (node as usize / 64, node % 64);
    *mask.get_mut(word).ok_or(io::ErrorKind::InvalidInput)? = 1 << bit;
    let policy = if only { MPOL_BIND } else { MPOL_PREFERRED };
    // The kernel takes the number of bits plus one.
    let bits = MAX_NODES + 1;
    // SAFETY: the range is a mapping of the caller; the mask is read, in the length given.
    let done = unsafe { libc::syscall(libc::SYS_mbind, pointer(base), len, policy, mask.as_ptr(), bits, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Of some touched pages all over the range: how many are on `node`, of how many.
pub(super) fn sample(base: usize, len: usize, page: usize, node: u32) -> io::Result<(usize, usize)> {
    let step = (len / SAMPLES).next_multiple_of(page).max(page);
    let addresses: Vec<usize> = (base..base + len).step_by(step).take(SAMPLES).collect();
    let mut nodes = vec![-1_i32; addresses.len()];
    let (count, places) = (addresses.len(), nodes.as_mut_ptr());
    let nowhere = std::ptr::null::<i32>();
    // SAFETY: without nodes to move to nothing is moved; one integer is written for each address.
    let done =
        unsafe { libc::syscall(libc::SYS_move_pages, 0, count, addresses.as_ptr(), nowhere, places, 0) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((nodes.iter().filter(|&&found| u32::try_from(found) == Ok(node)).count(), count))
}

/// Keeps this thread to `cpus`, as far as the process may use them.
pub(super) fn keep_to(cpus: &[usize]) {
    // SAFETY: a set of bits, for which zero is the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: sets one bit, whose number is inside the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: reads one set. Where the process may use none of these CPUs, nothing changes: touching is only slower.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

/// Numbers of a list such as `0-3,8`.
fn parse_list(text: &str) -> Vec<usize> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            numbers.extend(first..=last.min(first + MAX_NODES * 64));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(parse_list("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(parse_list("5"), [5]);
        assert_eq!(parse_list("\n"), []);
    }
}
