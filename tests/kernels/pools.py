"""Pools of random layout with red zones around them, and the bytes that a copy must leave behind."""

import numpy as np
from segment_plan import DESTINATION, IDENTITY, INDEX, PAGE, SOURCE, TOKEN, segment, side

# Axes: component, layer, page, slot (token of a page), group of heads, bytes of a group. The last stays last.
CANONICAL = "clpsgd"
LAYOUTS = {
    "layer_first": "clpsgd",
    "page_first": "cpslgd",
    "page_first_direct": "cplsgd",
    "page_head": "cpgsld",
    "page_unified": "pglcsd",
}
RED_ZONE = 256


class Pool:
    """Rows of all layers and components: random bytes, in the order of `axes`, perhaps with gaps."""

    def __init__(self, rng, axes, sizes, gaps=(), offset=0, row_stride=None):
        shape = [sizes[a] + (a in gaps) for a in axes]
        shape[-1] = row_stride or sizes["d"]
        self.raw = rng.integers(0, 256, int(np.prod(shape)) + 2 * RED_ZONE + 128, dtype=np.uint8)
        self.start = -self.raw.ctypes.data % 64 + RED_ZONE + offset
        self.axes, self.shape, self.sizes = axes, shape, sizes

    def view(self, raw=None):
        """Bytes as [component, layer, page, slot, group, byte], of this pool or of a copy of its memory."""
        raw = self.raw if raw is None else raw
        whole = raw[self.start :][: int(np.prod(self.shape))].reshape(self.shape)
        used = whole[tuple(slice(self.sizes[a]) for a in self.axes)]
        return used.transpose([self.axes.index(a) for a in CANONICAL])

    def lent(self, access):
        """The memory between the red zones."""
        return (self.raw.ctypes.data + self.start, int(np.prod(self.shape))), access

    def side(self, component, layer, index):
        """One component of one layer, by numpy's own strides."""
        rows = self.view()[component, layer]
        strides = rows.strides[:3]
        size, pages = self.sizes["s"], self.sizes["p"]
        limit = {TOKEN: pages * size, PAGE: pages, IDENTITY: 0}[index.kind]
        return side(index.kind, rows.ctypes.data, strides, size, limit, index.vector)


class Index:
    """Which page and slot each of `items` items is, or why it is none."""

    def __init__(self, rng, kind, page_size, pages, chosen, padding=0.0, past_limit=0.0):
        width = rng.choice([np.int32, np.int64])
        self.kind = kind
        units = chosen if kind == PAGE else (chosen[:, None] * page_size + np.arange(page_size)).ravel()
        if kind == TOKEN and rng.random() < 0.5:
            # Tokens of a batch need not come page by page.
            units = rng.permutation(units)
        limit = pages if kind == PAGE else pages * page_size
        units = units.astype(width)
        self.bad = np.zeros(len(units), bool)
        for i in range(len(units)):
            if rng.random() < padding:
                units[i] = rng.choice([-1, np.iinfo(width).min])
            elif rng.random() < past_limit:
                units[i] = rng.choice([limit, limit + 1, np.iinfo(width).max])
                self.bad[i] = True
        self.vector = None if kind == IDENTITY else units
        each = page_size if kind == PAGE else 1
        value = np.repeat(units.astype(np.int64), each)
        self.valid = (value >= 0) & (value < limit)
        if kind == PAGE:
            self.page, self.slot = value, np.tile(np.arange(page_size), len(units))
        else:
            self.page, self.slot = value // page_size, value % page_size

    def lent(self):
        """Its memory, if it has any."""
        return [] if self.vector is None else [(self.vector, INDEX)]


def copy_layer(shim, source, destination, indices, layer, items, **launch):
    """All components of one layer in one launch; compares every byte. Returns the error word."""
    from_index, to_index = indices
    sizes = source.sizes
    segments = [
        segment(
            source.side(k, layer, from_index),
            destination.side(k, layer, to_index),
            items,
            sizes["g"],
            sizes["d"],
        )
        for k in range(sizes["c"])
    ]
    # Nothing may be there already: an earlier copy of the same rows.
    np.invert(destination.raw, out=destination.raw)
    want, before = destination.raw.copy(), source.raw.copy()
    both = from_index.valid[:items] & to_index.valid[:items]
    chosen = [part[:items][both] for part in (from_index.page, from_index.slot, to_index.page, to_index.slot)]
    to = destination.view(want)
    to[:, layer, chosen[2], chosen[3]] = source.view()[:, layer, chosen[0], chosen[1]]
    lent = [source.lent(SOURCE), destination.lent(DESTINATION), *from_index.lent(), *to_index.lent()]
    error, report, _ = shim.copy(segments, lent, **launch)
    assert report.violations == 0, bytes(report)
    assert report.rewritten == 0
    assert np.array_equal(destination.raw, want)
    assert np.array_equal(source.raw, before)
    return error
