//! Whether two families of equally spaced runs can touch each other, decided without counting them out.

/// Runs of `len` bytes at `start` plus any sum of steps along the axes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Runs {
    start: i128,
    /// Positive stride and count above 1, the largest stride first; the first `axes_used` count.
    axes: [(i128, i128); 3],
    axes_used: usize,
    len: i128,
}

impl Runs {
    /// Runs from `start` on; an axis of a negative stride is walked from its other end.
    pub(super) fn new(start: i128, axes: [(i64, u32); 3], run_bytes: u32) -> Runs {
        let mut runs = Runs { start, axes: [(0, 1); 3], axes_used: 0, len: run_bytes.into() };
        for (stride, count) in axes.into_iter().filter(|axis| axis.1 > 1) {
            let (stride, steps) = (i128::from(stride), i128::from(count) - 1);
            runs.start += steps * stride.min(0);
            runs.axes[runs.axes_used] = (stride.abs(), steps + 1);
            runs.axes_used += 1;
        }
        runs.axes[..runs.axes_used].sort_unstable_by_key(|axis| std::cmp::Reverse(axis.0));
        runs
    }

    /// The lowest address of a run.
    pub(super) fn first(&self) -> i128 {
        self.start
    }

    /// One past the highest byte of a run.
    pub(super) fn end(&self) -> i128 {
        self.start + span(self.axes(), self.len)
    }

    /// Whether each step is at least as long as all that it steps over: then no two runs touch.
    pub(super) fn nested(&self) -> bool {
        let axes = self.axes();
        (0..axes.len()).all(|axis| axes[axis].0 >= span(&axes[axis + 1..], self.len))
    }

    /// True only if no run touches a run of `other`; both must be nested. False also where that cannot be told: when
    /// their ranges mix and their strides differ.
    pub(super) fn apart(&self, other: &Runs) -> bool {
        apart((self.start, self.axes(), self.len), (other.start, other.axes(), other.len))
    }

    fn axes(&self) -> &[(i128, i128)] {
        &self.axes[..self.axes_used]
    }
}

/// Bytes from the first to the end of the last run along `axes`.
fn span(axes: &[(i128, i128)], len: i128) -> i128 {
    axes.iter().map(|(stride, count)| stride * (count - 1)).sum::<i128>() + len
}

type View<'a> = (i128, &'a [(i128, i128)], i128);

fn apart((a, a_axes, a_len): View<'_>, (b, b_axes, b_len): View<'_>) -> bool {
    if a + span(a_axes, a_len) <= b || b + span(b_axes, b_len) <= a {
        return true;
    }
    let outer = |axes: &[(i128, i128)]| axes.first().map_or(0, |axis| axis.0);
    let stride = outer(a_axes).max(outer(b_axes));
    if stride == 0 {
        return false;
    }
    // Both repeat by this stride, or lie within one step of it: what counts is where they are within the step.
    let inner = |axes: &[(i128, i128)]| usize::from(outer(axes) == stride);
    let (a_axes, b_axes) = (&a_axes[inner(a_axes)..], &b_axes[inner(b_axes)..]);
    if span(a_axes, a_len).max(span(b_axes, b_len)) > stride {
        return false;
    }
    let offset = (b - a).rem_euclid(stride);
    [offset, offset - stride].into_iter().all(|b| apart((0, a_axes, a_len), (b, b_axes, b_len)))
}
