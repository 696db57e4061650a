//! On random plans the Rust walk and the kernels' own source leave the same bytes and the same error bits.

use std::ffi::{CString, c_int, c_void};
use std::mem::offset_of;
use std::sync::OnceLock;

use hicache_sys::Region;
use hicache_sys::segment_plan::{
    self, IndexSlice, IndexVector, IndexWidth, Memory, Segment, SegmentPlan, SegmentSide, Strides, run_on_cpu,
};

use crate::build::{cuda, scratch, shared_library};

#[repr(C)]
struct Report {
    violations: u64,
    first_address: u64,
    first_bytes: u32,
    first_access: u32,
    rewritten: u64,
}

const SOURCE: u32 = 1;
const DESTINATION: u32 = 2;
const INDEX: u32 = 4;
const ERROR: u32 = 8;

/// Bytes of the memory on each side; larger plans are left out.
const BYTES: usize = 1 << 18;

struct Shim {
    lend: unsafe extern "C" fn(u64, u64, u32),
    reset: unsafe extern "C" fn(),
    report: unsafe extern "C" fn() -> Report,
    copy: unsafe extern "C" fn(*const SegmentPlan, u32, u32, u32, u64, u32) -> c_int,
    layout: unsafe extern "C" fn(u32) -> u32,
}

impl Shim {
    fn get() -> Option<&'static Shim> {
        static SHIM: OnceLock<Option<Shim>> = OnceLock::new();
        SHIM.get_or_init(Shim::load).as_ref()
    }

    fn load() -> Option<Shim> {
        let out = scratch("shim").join("shim.so");
        let sources = ["host_shim.cpp", "host_runtime.cpp"].map(|name| cuda().join(name));
        let flags = ["-std=c++17", "-fsanitize=undefined", "-fno-sanitize-recover=all"];
        if !shared_library("g++", &flags, &sources, &out) {
            return None;
        }
        let path = CString::new(out.to_str()?).ok()?;
        // SAFETY: a library of this repository, whose initialisers only prepare its own data.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "{} does not load", out.display());
        let entry = |name: &str| -> *mut c_void {
            let name = CString::new(name).unwrap();
            // SAFETY: an open library and a terminated name.
            let address = unsafe { libc::dlsym(library, name.as_ptr()) };
            assert!(!address.is_null(), "no {name:?}");
            address
        };
        type Copy = unsafe extern "C" fn(*const SegmentPlan, u32, u32, u32, u64, u32) -> c_int;
        Some(Shim {
            // SAFETY: the function of this name has this type, see cuda/host_runtime.cpp.
            lend: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64, u64, u32)>(entry("shim_lend"))
            },
            // SAFETY: as above.
            reset: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(entry("shim_reset")) },
            // SAFETY: as above.
            report: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> Report>(entry("shim_report"))
            },
            // SAFETY: as above, see cuda/host_shim.cpp.
            copy: unsafe { std::mem::transmute::<*mut c_void, Copy>(entry("shim_copy")) },
            // SAFETY: as above.
            layout: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u32) -> u32>(entry("shim_layout"))
            },
        })
    }

    /// One launch; the error word.
    fn run(&self, plan: &SegmentPlan, lent: &[(u64, u64, u32)], width: u32, seed: u64) -> u32 {
        let mut error = 0_u32;
        let mut plan = *plan;
        plan.error = (&raw mut error) as u64;
        // SAFETY: forgets what an earlier launch was lent.
        unsafe { (self.reset)() };
        for &(base, bytes, access) in lent.iter().chain([&(plan.error, 4, ERROR)]) {
            // SAFETY: notes a range.
            unsafe { (self.lend)(base, bytes, access) };
        }
        let (grid, block) = (1 + seed as u32 % 3, [32, 64, 1024][seed as usize % 3]);
        // SAFETY: a whole plan; the shim touches only what was lent, which is alive.
        let code = unsafe { (self.copy)(&raw const plan, width, grid, block, seed, 256) };
        assert_eq!(code, 0);
        // SAFETY: returns numbers.
        let report = unsafe { (self.report)() };
        assert_eq!((report.violations, report.rewritten), (0, 0), "at {:#x}", report.first_address);
        error
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) ^ (self.0 >> 12)) % bound
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    fn fill(&mut self, region: &Region) {
        let bytes: Vec<u8> = (0..region.len()).map(|_| self.below(256) as u8).collect();
        region.copy_in(0, &bytes).unwrap();
    }
}

/// Strides of pages, slots and groups in a random order of nesting, with gaps, and the bytes that they span.
fn strides(random: &mut Random, counts: [u64; 3], run: u64) -> (Strides, u64) {
    let unit = random.pick(&[16, 16, 8, 4, 1]);
    let mut order = [0, 1, 2];
    for last in [2, 1] {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    let mut span = run;
    let mut strides = [0_i64; 3];
    for axis in order {
        let gap = if random.below(3) == 0 { unit * random.below(3) } else { 0 };
        let stride = span.next_multiple_of(unit) + gap;
        strides[axis] = stride as i64;
        span += stride * (counts[axis] - 1);
    }
    let [page, slot, group] = strides;
    (Strides { page, slot, group }, span)
}

/// An index vector that outlives the plan.
enum Index {
    Four(Vec<i32>),
    Eight(Vec<i64>),
}

impl Index {
    fn new(values: Vec<i64>, narrow: bool) -> Index {
        match narrow {
            true => Index::Four(
                values.iter().map(|&value| value.clamp(i32::MIN.into(), i32::MAX.into()) as i32).collect(),
            ),
            false => Index::Eight(values),
        }
    }

    fn slice(&self) -> IndexSlice<'_> {
        match self {
            Index::Four(values) => IndexSlice::Four(values),
            Index::Eight(values) => IndexSlice::Eight(values),
        }
    }

    fn vector(&self) -> IndexVector {
        let width = match self {
            Index::Four(_) => IndexWidth::Four,
            Index::Eight(_) => IndexWidth::Eight,
        };
        IndexVector { address: self.slice().address(), width }
    }

    fn lent(&self) -> (u64, u64, u32) {
        let bytes = match self {
            Index::Four(values) => values.len() * 4,
            Index::Eight(values) => values.len() * 8,
        };
        (self.slice().address(), bytes as u64, INDEX)
    }
}

/// One side over `items` items in pages of `size`: side, its index, and the bytes from its base that it may touch.
fn side(
    random: &mut Random,
    base: u64,
    size: u32,
    items: u32,
    groups: u32,
    run: u32,
) -> (SegmentSide, Option<Index>, u64) {
    let pages = items.div_ceil(size) + random.below(3) as u32;
    let kind = random.below(3);
    let (strides, span) = strides(random, [pages.into(), size.into(), groups.into()], run.into());
    if kind == 2 {
        return (SegmentSide::identity(base, strides, size).unwrap(), None, span);
    }
    let (count, limit) = if kind == 0 { (items, pages * size) } else { (items.div_ceil(size), pages) };
    let mut values: Vec<i64> = (0..i64::from(limit)).collect();
    for last in (1..values.len()).rev() {
        values.swap(last, random.below(last as u64 + 1) as usize);
    }
    values.truncate(count as usize);
    let bad = random.below(3) == 0;
    for value in &mut values {
        if bad && random.below(5) == 0 {
            *value = random.pick(&[-1, i64::MIN, limit.into(), i64::from(limit) + 7, i64::MAX]);
        }
    }
    let index = Index::new(values, random.below(2) == 0);
    let made = match kind {
        0 => SegmentSide::tokens(base, strides, size, limit, index.vector()),
        _ => SegmentSide::pages(base, strides, size, limit, index.vector()),
    };
    (made.unwrap(), Some(index), span)
}

#[test]
fn the_rust_walk_and_the_kernels_leave_the_same_bytes() {
    let Some(shim) = Shim::get() else { return };
    let (mut random, mut errors, mut widths) = (Random(5), 0, std::collections::BTreeSet::new());
    for case in 0..200 {
        let (mut segments, mut indices) = (vec![], vec![]);
        let (source, destination) = (Region::owned(BYTES), Region::owned(BYTES));
        let (mut from_end, mut to_end) = (source.address() as u64, destination.address() as u64);
        for _ in 0..1 + random.below(4) {
            let size = random.pick(&[1, 2, 3, 5, 8, 16]);
            let items = 1 + random.below(40) as u32;
            let groups = random.pick(&[1, 1, 2, 3]);
            let run = random.pick(&[1, 2, 7, 16, 48, 64, 128, 132, 576, 656]);
            let other = random.pick(&[size, 1, 4]);
            let offset = random.pick(&[0, 0, 0, 8, 3]);
            let (from, index, span) = side(&mut random, from_end + offset, size, items, groups, run);
            from_end = (from_end + offset + span).next_multiple_of(64);
            indices.extend(index);
            let (to, index, span) = side(&mut random, to_end + offset, other, items, groups, run);
            to_end = (to_end + offset + span).next_multiple_of(64);
            indices.extend(index);
            segments.push(Segment::new(from, to, items, groups, run).unwrap());
        }
        let (source_base, destination_base) = (source.address() as u64, destination.address() as u64);
        if (from_end - source_base).max(to_end - destination_base) > BYTES as u64 {
            continue;
        }
        random.fill(&source);
        random.fill(&destination);
        let all = |region: &Region| region.with_bytes(0, region.len() as u64, <[u8]>::to_vec).unwrap();
        let before = all(&destination);
        let plan = SegmentPlan::new(&segments).unwrap();
        let slices: Vec<_> = indices.iter().map(Index::slice).collect();
        let memory = Memory { source: &[&source], destination: &[&destination], index: &slices };
        let want_error = run_on_cpu(&plan, &memory).unwrap_or_else(|error| panic!("case {case}: {error}"));
        let want = all(&destination);
        errors += u32::from(want_error != 0);

        let region = |region: &Region, access| (region.address() as u64, region.len() as u64, access);
        let mut lent = vec![region(&source, SOURCE), region(&destination, DESTINATION)];
        lent.extend(indices.iter().map(Index::lent));
        let widest = segments.iter().map(Segment::vector_bytes).min().unwrap();
        widths.insert(widest);
        let bulk = if widest == 16 { 32 } else { 0 };
        for (plan, width) in [(plan, widest), (plan, 0), (plan.compact(), 0), (plan, bulk)] {
            destination.copy_in(0, &before).unwrap();
            let error = shim.run(&plan, &lent, width, 1 + random.below(1 << 30));
            assert!(all(&destination) == want, "case {case}, width {width}");
            assert_eq!(error, want_error, "case {case}, width {width}");
        }
    }
    assert!(errors > 20, "only {errors} plans had an index past its limit");
    assert!(widths.contains(&16) && widths.contains(&1) && widths.len() >= 4, "{widths:?}");
}

#[test]
fn sizes_and_offsets_are_those_of_c() {
    let Some(shim) = Shim::get() else { return };
    let rust = [
        segment_plan::ABI as usize,
        segment_plan::MAX_SEGMENTS,
        size_of::<SegmentSide>(),
        size_of::<Segment>(),
        size_of::<SegmentPlan>(),
        offset_of!(SegmentSide, page_stride),
        offset_of!(SegmentSide, slot_stride),
        offset_of!(SegmentSide, group_stride),
        offset_of!(SegmentSide, index),
        offset_of!(SegmentSide, limit),
        offset_of!(SegmentSide, page_size),
        offset_of!(SegmentSide, page_magic),
        offset_of!(SegmentSide, page_shift),
        offset_of!(SegmentSide, index_kind),
        offset_of!(SegmentSide, index_bytes),
        offset_of!(Segment, destination),
        offset_of!(Segment, items),
        offset_of!(Segment, groups),
        offset_of!(Segment, run_bytes),
        offset_of!(Segment, lanes_log2),
        offset_of!(SegmentPlan, segments),
        offset_of!(SegmentPlan, error),
        offset_of!(SegmentPlan, segment),
    ];
    for (place, value) in rust.into_iter().enumerate() {
        // SAFETY: returns a number.
        assert_eq!(unsafe { (shim.layout)(place as u32) } as usize, value, "place {place}");
    }
}
