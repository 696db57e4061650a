//! Copies of strided runs between regions: the one place where the processor moves rows.
//!
//! Bounds are checked once for all runs of a call, at the corners, and each run is then moved by the widest loads
//! and stores that its length allows.

use crate::region::{OutOfBounds, Region};

/// Steps of equal distance on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    /// How many, at least 1.
    pub count: u64,
    /// Bytes from one to the next in the source.
    pub src: u64,
    /// Bytes from one to the next in the destination.
    pub dst: u64,
}

impl Axis {
    /// One step: no axis.
    pub const ONE: Axis = Axis { count: 1, src: 0, dst: 0 };
}

/// Runs of equal length at even distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// Offset of the first one in the source region.
    pub src: u64,
    /// Offset of the first one in the destination region.
    pub dst: u64,
    /// Bytes of each.
    pub len: u64,
    /// How they repeat, innermost axis first.
    pub axes: [Axis; 4],
}

impl Runs {
    /// Bytes from the first byte of the first run to the end of the last one, on the side that `stride` says.
    fn span(&self, stride: impl Fn(&Axis) -> u64) -> Option<u64> {
        self.axes.iter().try_fold(self.len, |span, axis| {
            span.checked_add(stride(axis).checked_mul(axis.count.checked_sub(1)?)?)
        })
    }
}

/// Copies runs from `src` to `dst`. Where runs overlap each other the bytes there are those of any of them.
///
/// # Errors
/// A run that leaves its region; nothing was copied then.
///
/// # Panics
/// If `dst` was lent for reading only: callers check [`Region::is_writable`] first.
pub fn copy_runs(src: &Region, dst: &Region, runs: &Runs) -> Result<(), OutOfBounds> {
    copy_runs_with(src, dst, runs, Wide::here())
}

/// [`copy_runs`] by plain copies of the standard library, whatever the processor: the twin that the wide one must equal.
///
/// # Errors
/// As [`copy_runs`].
pub fn copy_runs_portably(src: &Region, dst: &Region, runs: &Runs) -> Result<(), OutOfBounds> {
    copy_runs_with(src, dst, runs, Wide::No)
}

/// Which loads and stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wide {
    /// Those of the standard library.
    No,
    /// 32 bytes at a time.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Wide {
    fn here() -> Wide {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return Wide::Avx2;
        }
        Wide::No
    }
}

fn copy_runs_with(src: &Region, dst: &Region, runs: &Runs, wide: Wide) -> Result<(), OutOfBounds> {
    assert!(dst.is_writable(), "a region lent for reading only");
    let all = |span: Option<u64>| span.unwrap_or(u64::MAX);
    let from = src.pointer(runs.src, all(runs.span(|axis| axis.src)))?.cast_const();
    let to = dst.pointer(runs.dst, all(runs.span(|axis| axis.dst)))?;
    let len = runs.len as usize;
    let [a, b, c, d] = &runs.axes;
    for k in 0..d.count {
        for j in 0..c.count {
            for i in 0..b.count {
                let from = from.wrapping_add((k * d.src + j * c.src + i * b.src) as usize);
                let to = to.wrapping_add((k * d.dst + j * c.dst + i * b.dst) as usize);
                // SAFETY: with the counts and strides of the other axes every run of this row lies between the first
                // byte and the end of the last run, which were found to be inside both regions above.
                unsafe { copy_row(from, to, len, a, wide) };
            }
        }
    }
    Ok(())
}

/// Copies `axis.count` runs of `len` bytes.
///
/// # Safety
/// Every run must be inside memory valid for reads at `from` and for writes at `to`.
unsafe fn copy_row(from: *const u8, to: *mut u8, len: usize, axis: &Axis, wide: Wide) {
    match wide {
        #[cfg(target_arch = "x86_64")]
        Wide::Avx2 if (32..=LONGEST_WIDE_BYTES).contains(&len) => {
            // SAFETY: the caller's promise; the processor has AVX2, since `Wide::here` said so.
            unsafe { copy_row_avx2(from, to, len, axis) }
        }
        _ => {
            for i in 0..axis.count as usize {
                let from = from.wrapping_add(i * axis.src as usize);
                let to = to.wrapping_add(i * axis.dst as usize);
                // SAFETY: run `i` is inside valid memory, by the caller's promise; the two may overlap.
                unsafe { std::ptr::copy(from, to, len) };
            }
        }
    }
}

/// Longer runs are left to the standard library, which knows the processor's own string moves.
#[cfg(target_arch = "x86_64")]
const LONGEST_WIDE_BYTES: usize = 2048;

/// [`copy_row`] by vectors of 32 bytes, the last one of a run overlapping the one before.
///
/// # Safety
/// As [`copy_row`], with runs of at least 32 bytes, on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_row_avx2(from: *const u8, to: *mut u8, len: usize, axis: &Axis) {
    type Vector = std::arch::x86_64::__m256i;
    let last = len - 32;
    for i in 0..axis.count as usize {
        let from = from.wrapping_add(i * axis.src as usize);
        let to = to.wrapping_add(i * axis.dst as usize);
        // SAFETY: the last 32 bytes of the run, inside valid memory by the caller's promise; unaligned by type.
        let end = unsafe { from.wrapping_add(last).cast::<Vector>().read_unaligned() };
        let mut at = 0;
        while at < last {
            // SAFETY: `at + 32` is below `len`: inside the run.
            let vector = unsafe { from.wrapping_add(at).cast::<Vector>().read_unaligned() };
            // SAFETY: as above, in the destination.
            unsafe { to.wrapping_add(at).cast::<Vector>().write_unaligned(vector) };
            at += 32;
        }
        // SAFETY: the last 32 bytes of the run in the destination.
        unsafe { to.wrapping_add(last).cast::<Vector>().write_unaligned(end) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut state = seed | 1;
        move |limit| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % limit
        }
    }

    fn filled(bytes: usize, next: &mut impl FnMut(u64) -> u64) -> (Region, Vec<u8>) {
        let content: Vec<u8> = (0..bytes).map(|_| next(256) as u8).collect();
        let region = Region::owned(bytes);
        region.copy_in(0, &content).unwrap();
        (region, content)
    }

    fn content(region: &Region) -> Vec<u8> {
        let mut out = vec![0; region.len()];
        region.copy_out(0, &mut out).unwrap();
        out
    }

    #[test]
    fn wide_and_portable_copies_give_the_same_bytes() {
        let mut next = numbers(7);
        for round in 0..2000 {
            let len = match round % 3 {
                0 => 1 + next(40),
                1 => 1 + next(600),
                _ => 2000 + next(100),
            };
            let axes: [Axis; 4] = std::array::from_fn(|_| Axis {
                count: 1 + next(3),
                src: next(2 * len),
                dst: len + next(len),
            });
            let (mut stride, mut axes) = (len + next(9), axes);
            for axis in &mut axes {
                // Runs of the destination lie apart, so that the order in which they are copied does not matter.
                axis.dst = stride;
                stride = stride * axis.count + next(5);
            }
            let runs = Runs { src: next(50), dst: next(50), len, axes };
            let need = |start: u64, span: Option<u64>| (start + span.unwrap()) as usize;
            let (src, from) = filled(need(runs.src, runs.span(|axis| axis.src)), &mut next);
            let (wide, before) = filled(need(runs.dst, runs.span(|axis| axis.dst)), &mut next);
            let portable = Region::owned(before.len());
            portable.copy_in(0, &before).unwrap();
            let mut expected = before;
            let [a, b, c, d] = axes;
            for (h, i, j, k) in (0..d.count).flat_map(|h| {
                (0..c.count).flat_map(move |i| {
                    (0..b.count).flat_map(move |j| (0..a.count).map(move |k| (h, i, j, k)))
                })
            }) {
                let at = (runs.src + h * d.src + i * c.src + j * b.src + k * a.src) as usize;
                let to = (runs.dst + h * d.dst + i * c.dst + j * b.dst + k * a.dst) as usize;
                expected[to..to + len as usize].copy_from_slice(&from[at..at + len as usize]);
            }
            copy_runs(&src, &wide, &runs).unwrap();
            copy_runs_portably(&src, &portable, &runs).unwrap();
            assert!(content(&wide) == expected, "wide, {runs:?}");
            assert!(content(&portable) == expected, "portable, {runs:?}");
        }
    }

    #[test]
    fn a_run_that_leaves_its_region_is_refused_before_a_byte_is_copied() {
        let (src, dst) = (Region::owned(1000), Region::owned(1000));
        src.copy_in(0, &[1; 1000]).unwrap();
        let axis = |count, src, dst| Axis { count, src, dst };
        let good = Runs {
            src: 100,
            dst: 200,
            len: 100,
            axes: [axis(3, 200, 100), axis(5, 100, 125), Axis::ONE, Axis::ONE],
        };
        assert_eq!(good.span(|axis| axis.src), Some(900));
        assert_eq!(good.span(|axis| axis.dst), Some(800));
        let mut bad = [good; 9];
        bad[0].src += 1;
        bad[1].dst += 1;
        bad[2].len += 1;
        bad[3].axes[0].src += 1;
        bad[4].axes[1].dst += 1;
        bad[5].axes[2] = axis(2, 1, 0);
        bad[6].axes[3] = axis(u64::MAX, u64::MAX, 0);
        bad[7].axes[2].count = 0;
        bad[8].src = u64::MAX;
        for (i, runs) in bad.iter().enumerate() {
            assert!(copy_runs(&src, &dst, runs).is_err(), "case {i}");
        }
        assert!(content(&dst) == [0; 1000]);
        copy_runs(&src, &dst, &good).unwrap();
        assert!(content(&dst)[200..] == [1; 800]);
    }
}
