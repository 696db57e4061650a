"""Rows of any size, any number of pages, offsets past 2^31: exact, and nothing beside them is touched."""

import ctypes
import mmap

import numpy as np
import pytest
from pools import Index, Pool, copy_layer
from segment_plan import DESTINATION, INDEX, MIXED, PAGE, SOURCE, TOKEN, segment, side

MAP_NORESERVE = 0x4000  # of Linux; the mmap module has no name for it

ROWS = (1, 2, 15, 16, 48, 64, 128, 132, 576, 656, 1024, 4097)


@pytest.mark.parametrize("pages", [0, 1, 3, 1000])
@pytest.mark.parametrize("row", ROWS)
def test_case_d25_rows_of_any_size_make_the_round_trip(shim, row, pages):
    rng = np.random.default_rng(row + pages)
    # A thousand pages of large rows are a test of the row count: smaller pages keep it short.
    page_size = 1 if pages == 1000 else 4
    held = pages + 2
    sizes = {"c": 1, "l": 1, "p": held, "s": page_size, "g": 1, "d": row}
    host, device, back = (Pool(rng, "cpslgd", sizes) for _ in range(3))
    chosen = rng.permutation(held)[:pages]
    on_host = Index(rng, PAGE, page_size, held, chosen)
    on_device = Index(rng, TOKEN, page_size, held, rng.permutation(held)[:pages])
    items = pages * page_size
    launch = {"grid": 2, "block": 1024 if pages == 1000 else 96}
    assert copy_layer(shim, host, device, (on_host, on_device), 0, items, **launch) == 0
    assert copy_layer(shim, device, back, (on_device, on_host), 0, items, **launch, width=MIXED) == 0
    assert np.array_equal(back.view()[0, 0, chosen], host.view()[0, 0, chosen])


@pytest.mark.parametrize("row", [2, 20, 24, 31, 36, 700])
def test_rows_shorter_than_their_strides(shim, row):
    """Strides that are multiples of 16 say nothing about the rows."""
    rng = np.random.default_rng(row)
    whole = -(-row // 16) * 16
    sizes = {"c": 2, "l": 1, "p": 3, "s": 2, "g": 2, "d": row}
    host, device = (Pool(rng, axes, sizes, row_stride=whole) for axes in ("cpslgd", "clpsgd"))
    on_host, on_device = (Index(rng, kind, 2, 3, rng.permutation(3)) for kind in (PAGE, TOKEN))
    for width in (None, MIXED):
        assert copy_layer(shim, host, device, (on_host, on_device), 0, 6, width=width) == 0


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
@pytest.mark.parametrize("row", [16, 656, 4097])
def test_case_d25_offsets_past_two_to_the_31(shim, row, index_type):
    # 5 GiB of addresses of which a few pages are touched.
    whole = 5 << 30
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    host = np.frombuffer(memory, np.uint8)
    rng = np.random.default_rng(row)
    page_bytes, pages = 1 << 20, 5000
    index = np.array([4999, 2047, 2048, 4096, 0], index_type)
    rows = rng.integers(0, 256, (len(index), 2, row), dtype=np.uint8)
    for page, two in zip(index, rows, strict=True):
        for slot in range(2):
            host[int(page) * page_bytes + slot * 8192 :][:row] = two[slot]
    device = np.zeros((len(index) + 1, 2, row), np.uint8)
    identity = np.arange(2 * len(index), dtype=index_type)
    far = side(PAGE, host.ctypes.data, (page_bytes, 8192, 0), 2, pages, index)
    near = side(TOKEN, device.ctypes.data, (2 * row, row, 0), 2, 2 * len(index), identity)
    lent = [
        ((host.ctypes.data, pages * page_bytes), SOURCE),
        (device, DESTINATION),
        (index, INDEX),
        (identity, INDEX),
    ]
    error, report, _ = shim.copy([segment(far, near, 10, 1, row)], lent)
    assert (error, report.violations, report.rewritten) == (0, 0, 0)
    assert np.array_equal(device[:-1], rows)
    assert not device[-1].any()
    # And back, to places of which only those are lent that may be written.
    wanted = [
        (host.ctypes.data + int(page) * page_bytes + slot * 8192, row) for page in index for slot in range(2)
    ]
    for address, _ in wanted:
        ctypes.memset(address, 0, row)
    lent = [*((place, DESTINATION) for place in wanted), (device, SOURCE), (index, INDEX), (identity, INDEX)]
    error, report, _ = shim.copy([segment(near, far, 10, 1, row)], lent)
    assert (error, report.violations, report.rewritten) == (0, 0, 0)
    for page, two in zip(index, rows, strict=True):
        for slot in range(2):
            assert np.array_equal(host[int(page) * page_bytes + slot * 8192 :][:row], two[slot])
    del host
    memory.close()
