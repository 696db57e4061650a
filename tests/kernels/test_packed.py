"""One launch moves the parts of packed pages and of sidecars, each with its own unit, stride and row size."""

import numpy as np
import pytest
from pools import RED_ZONE, Index, Pool
from segment_plan import BULK, DESTINATION, INDEX, MIXED, PAGE, SOURCE, TOKEN, segment, side


class Packed:
    """Host pages that hold the parts of several pools one behind the other, 4 KiB pages."""

    def __init__(self, rng, pages, part_bytes):
        self.offsets = np.cumsum([0, *part_bytes])
        self.page_bytes = -(-int(self.offsets[-1]) // 4096) * 4096
        self.raw = rng.integers(0, 256, pages * self.page_bytes + 2 * RED_ZONE + 64, dtype=np.uint8)
        self.start = -self.raw.ctypes.data % 64 + RED_ZONE
        self.pages = pages

    def part(self, number, raw=None):
        """Bytes of one part: [page, byte]."""
        raw = self.raw if raw is None else raw
        pages = raw[self.start :][: self.pages * self.page_bytes].reshape(self.pages, self.page_bytes)
        return pages[:, self.offsets[number] : self.offsets[number + 1]]

    def lent(self, access):
        return (self.raw.ctypes.data + self.start, self.pages * self.page_bytes), access


def device_rows(rng, pages, page_size, row):
    return Pool(rng, "clpsgd", {"c": 1, "l": 1, "p": pages, "s": page_size, "g": 1, "d": row})


@pytest.mark.parametrize("kernel", ["widest", "mixed", "bulk"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(("latent", "indexer", "state"), [(1152, 132, 4096), (656, 132, 37), (576, 48, 528)])
def test_target_draft_indexer_and_state_are_one_launch(shim, kernel, page_size, latent, indexer, state):
    rng = np.random.default_rng(page_size * latent + state)
    layers, layer, draft, pages, device_pages, count = 3, 1, 256, 6, 9, 4
    # Parts in the page: latents of all layers, K and V of one draft layer, indexer rows of a page, a state.
    part_bytes = [
        layers * page_size * latent,
        page_size * draft,
        page_size * draft,
        page_size * indexer,
        state,
    ]
    # Parts begin at multiples of 16, as packed pages do.
    part_bytes = [-(-n // 16) * 16 for n in part_bytes]
    host = Packed(rng, pages, part_bytes)
    on_host = rng.permutation(pages)[:count].astype(np.int64)
    tokens = Index(rng, TOKEN, page_size, device_pages, rng.permutation(device_pages)[:count])
    in_pages = Index(rng, PAGE, page_size, device_pages, rng.permutation(device_pages)[:count])
    base = host.part(0).ctypes.data
    rows = [latent, draft, draft, page_size * indexer, state]
    # Rows of a token, or of a page: (host offset, slots of a page, device pool, device index).
    parts = [
        (layer * page_size * latent, page_size, device_rows(rng, device_pages, page_size, latent), tokens),
        (host.offsets[1], page_size, device_rows(rng, device_pages, page_size, draft), in_pages),
        (host.offsets[2], page_size, device_rows(rng, device_pages, page_size, draft), in_pages),
        (host.offsets[3], 1, device_rows(rng, device_pages, 1, rows[3]), None),
        (host.offsets[4], 1, device_rows(rng, device_pages, 1, state), None),
    ]
    whole = rng.permutation(device_pages)[:count].astype(np.int32)
    segments, wants = [], []
    for (offset, slots, pool, index), row in zip(parts, rows, strict=True):
        source = side(PAGE, base + int(offset), (host.page_bytes, row, 0), slots, pages, on_host)
        if index is None:
            to = side(PAGE, pool.view().ctypes.data, (row, 0, 0), 1, device_pages, whole)
        else:
            to = pool.side(0, 0, index)
        segments.append(segment(source, to, count * slots, 1, row))
        want = pool.raw.copy()
        pages_there, slots_there = (
            (whole, np.zeros(count, int)) if index is None else (index.page, index.slot)
        )
        for item in range(count * slots):
            at = on_host[item // slots] * host.page_bytes + int(offset) + (item % slots) * row
            pool.view(want)[0, 0, pages_there[item], slots_there[item], 0] = host.raw[host.start + at :][:row]
        wants.append(want)
    if kernel == "bulk":
        # Bulk copies need multiples of 16: the others go by themselves.
        segments = [one for one, row in zip(segments, rows, strict=True) if row % 16 == 0]
    lent = [host.lent(SOURCE), (on_host, INDEX), (whole, INDEX), *tokens.lent(), *in_pages.lent()]
    lent += [pool.lent(DESTINATION) for _, _, pool, _ in parts]
    width = {"widest": None, "mixed": MIXED, "bulk": BULK}[kernel]
    error, report, _ = shim.copy(segments, lent, width=width, grid=2, block=128, seed=5)
    assert (error, report.violations, report.rewritten) == (0, 0, 0)
    for (_, _, pool, _), want, row in zip(parts, wants, rows, strict=True):
        if kernel != "bulk" or row % 16 == 0:
            assert np.array_equal(pool.raw, want)


def test_sixteen_segments_each_report_their_own_indices(shim):
    rng = np.random.default_rng(3)
    source, destination = device_rows(rng, 64, 1, 32), device_rows(rng, 64, 1, 32)
    want = destination.raw.copy()
    past = {3: 64, 7: 2**31 - 1, 15: 1000}
    four = np.arange(4)
    vectors, segments = [four], []
    for number in range(16):
        vector = np.arange(4 * number, 4 * number + 4, dtype=np.int32)
        vector[2] = past.get(number, vector[2])
        vectors.append(vector)
        first = source.view().ctypes.data + 4 * 32 * number
        from_four = side(TOKEN, first, (32, 0, 0), 1, 4, four)
        to = side(PAGE, destination.view().ctypes.data, (32, 0, 0), 1, 64, vector)
        segments.append(segment(from_four, to, 4, 1, 32))
    for row in range(64):
        if row % 4 != 2 or row // 4 not in past:
            destination.view(want)[0, 0, row] = source.view()[0, 0, row]
    lent = [source.lent(SOURCE), destination.lent(DESTINATION), *((vector, INDEX) for vector in vectors)]
    error, report, _ = shim.copy(segments, lent)
    assert error == sum(1 << number for number in past)
    assert (report.violations, report.rewritten) == (0, 0)
    assert np.array_equal(destination.raw, want)
