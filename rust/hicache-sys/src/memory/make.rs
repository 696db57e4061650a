//! The first half of making memory: what is asked for is checked, and mapped on the pages that can be had.

use std::os::fd::AsFd;
use std::path::Path;

use super::error::{MemoryError, MemoryErrorKind};
use super::mapping::{Advice, Backing, Mapping, hugetlb_page_bytes, page_bytes, transparent_page_bytes};
use super::numa::{self, node_cpus, nodes_with_memory};
use super::options::{MemoryOptions, MemoryReport, Node, PageKind, Wish};
use super::{Result, limits, share};
use crate::fork::Guarded;

/// Checks what can be checked before anything is taken.
pub(super) fn check(len: usize, options: &MemoryOptions) -> Result<()> {
    let invalid = |message: String| Err(MemoryError::new(MemoryErrorKind::Invalid, message));
    if len == 0 || len > isize::MAX as usize / 2 {
        return invalid(format!("expected 1 to {} bytes, found {len}", isize::MAX / 2));
    }
    if options.copy_page_bytes == 0 || options.register_piece_bytes == 0 {
        return invalid("expected copy pages and pieces of at least 1 byte, found 0".to_owned());
    }
    if let Some(size) =
        options.huge_page_bytes.filter(|size| !size.is_power_of_two() || *size <= page_bytes())
    {
        return invalid(format!("expected huge pages of a power of two bytes, found {size}"));
    }
    if options.huge_pages == Wish::Require && !options.prefault {
        return invalid(
            "huge pages are required, which is known only after the touch: expected prefault".to_owned(),
        );
    }
    Ok(())
}

/// A report of memory that is mapped, and nothing else yet.
pub(super) fn report(mapped_bytes: usize, page_bytes: usize, shared: bool) -> MemoryReport {
    MemoryReport {
        mapped_bytes,
        pages: PageKind::Ordinary,
        page_bytes,
        huge_bytes: 0,
        node: None,
        prefaulted: false,
        locked: false,
        registered_pieces: Vec::new(),
        shared,
        unmet: Vec::new(),
    }
}

/// Maps memory of hugetlb pages, or else of the system's, where huge ones can grow.
pub(super) fn map(len: usize, options: &MemoryOptions) -> Result<(Mapping, Option<Guarded>, MemoryReport)> {
    let mut unmet = Vec::new();
    let hugetlb = options.huge_page_bytes.or_else(hugetlb_page_bytes);
    if let Some(page) = hugetlb.filter(|&page| options.huge_pages != Wish::Off && len >= page) {
        match map_pages(len.next_multiple_of(page), page, Some(page), options.shared) {
            Ok((mapping, file)) => {
                let mut report = report(mapping.len(), page, options.shared);
                report.pages = PageKind::Hugetlb;
                return Ok((mapping, file, report));
            }
            Err(error) => unmet.push(format!("hugetlb pages of {page} bytes: {error}")),
        }
    }
    // Pages of the hugetlb pool were set aside; any others are taken from what is left.
    if options.prefault {
        limits::check_memory(Path::new("/"), len as u64)?;
    }
    let page = page_bytes();
    let transparent = transparent_page_bytes().filter(|&size| options.huge_pages != Wish::Off && len >= size);
    // Rounded up where that is little, so that the last part is huge too.
    let unit = transparent.filter(|&size| len / 16 >= size).unwrap_or(page);
    let rounded = len.next_multiple_of(unit);
    let (mapping, file) = map_pages(rounded, transparent.unwrap_or(page), None, options.shared)
        .map_err(|error| MemoryError::system(&format!("mmap {rounded} bytes"), error))?;
    if transparent.is_some()
        && let Err(error) = mapping.advise(Advice::HugePages)
    {
        unmet.push(format!("transparent huge pages: {error}"));
    }
    if options.huge_pages == Wish::Off {
        // Where they are always on this is what keeps them off; where there are none it is refused, rightly.
        let _ = mapping.advise(Advice::OrdinaryPages);
    }
    let mut report = report(rounded, page, options.shared);
    report.unmet = unmet;
    Ok((mapping, file, report))
}

fn map_pages(
    len: usize,
    alignment: usize,
    huge_page: Option<usize>,
    shared: bool,
) -> std::io::Result<(Mapping, Option<Guarded>)> {
    if !shared {
        return Ok((Mapping::new(len, alignment, Backing::Private(huge_page))?, None));
    }
    let file = share::create(len, huge_page)?;
    let mapping = Mapping::new(len, alignment, Backing::Shared(file.as_fd()))?;
    Ok((mapping, Some(file)))
}

/// The node that is asked for, if one is.
pub(super) fn wanted_node(options: &MemoryOptions) -> Result<Option<u32>> {
    let node = match options.node {
        Node::Any => return Ok(None),
        Node::Number(node) => node,
        Node::Local => numa::current_node().map_err(|error| MemoryError::system("getcpu", error))?,
    };
    let nodes = nodes_with_memory();
    if !nodes.is_empty() && !nodes.contains(&node) {
        return Err(MemoryError::new(
            MemoryErrorKind::Invalid,
            format!("expected a NUMA node with memory, one of {nodes:?}, found {node}"),
        ));
    }
    // The memory of some devices is a node without CPUs.
    if !nodes.is_empty() && node_cpus(node).is_ok_and(|cpus| cpus.is_empty()) {
        return Err(MemoryError::new(
            MemoryErrorKind::Invalid,
            format!("expected a NUMA node with CPUs, found node {node}, which has none"),
        ));
    }
    Ok(Some(node))
}

/// Threads that touch `len` bytes on a node of `cpus` CPUs; 0 for no node.
pub(super) fn touch_threads(options: &MemoryOptions, len: usize, cpus: usize) -> usize {
    if options.touch_threads > 0 {
        return options.touch_threads;
    }
    let machine = std::thread::available_parallelism().map_or(1, usize::from);
    let machine = if cpus == 0 { machine } else { machine.min(cpus) };
    machine.min(16).min(len.div_ceil(256 << 20)).max(1)
}

/// Bytes of a registered piece: a multiple of the copy page and of the memory's own pages, or all of it.
pub(super) fn piece_bytes(len: usize, page: usize, options: &MemoryOptions) -> usize {
    let unit = least_common_multiple(options.copy_page_bytes, page).filter(|&unit| unit < len).unwrap_or(len);
    (options.register_piece_bytes / unit).max(1).saturating_mul(unit).min(len)
}

fn least_common_multiple(a: usize, b: usize) -> Option<usize> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_on_copy_pages_and_on_memory_pages() {
        let options = |copy_page_bytes, register_piece_bytes| MemoryOptions {
            copy_page_bytes,
            register_piece_bytes,
            ..MemoryOptions::default()
        };
        assert_eq!(piece_bytes(1 << 30, 4096, &options(3 * 4096, 100_000)), 8 * 3 * 4096);
        assert_eq!(piece_bytes(1 << 30, 4096, &options(36_864, 1)), 36_864);
        // 7 bytes and 4 KiB meet every 28 KiB.
        assert_eq!(piece_bytes(1 << 20, 4096, &options(7, 30_000)), 28_672);
        // Where they do not meet inside, one piece.
        assert_eq!(piece_bytes(8192, 4096, &options(4097, 4096)), 8192);
        assert_eq!(piece_bytes(8192, 4096, &options(usize::MAX, 4096)), 8192);
    }
}
