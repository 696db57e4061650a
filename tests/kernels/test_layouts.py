"""Kernels move exactly the rows that numpy moves: layouts, geometries, indices, thread orders."""

import itertools

import numpy as np
import pytest
from pools import LAYOUTS, Index, Pool, copy_layer
from segment_plan import BULK, IDENTITY, MIXED, PAGE, TOKEN, WIDTHS, segment, vector_bytes


def launches(rng, segments_width):
    """Ways to launch a plan whose widest vector is given: narrower vectors do as well."""
    kernels = [None, MIXED, *(width for width in WIDTHS if width < segments_width)]
    if segments_width == 16:
        kernels.append(BULK)
    width = kernels[rng.integers(len(kernels))]
    return {
        "width": width,
        "grid": int(rng.integers(1, 4)),
        # Of the bulk kernel: how many lanes of a warp work.
        "block": int(rng.choice([3, 8, 32] if width == BULK else [32, 64, 96, 1024])),
        "seed": int(rng.integers(1, 2**32)),
        "stage_bytes": int(rng.choice([128, 256, 2048])),
    }


def geometry(rng):
    """Sizes of the axes for a random pool: heads of 7 to 576 elements of 1, 2, 4 or 8 bytes."""
    element_bytes = int(rng.choice([1, 2, 4, 8]))
    head_dim = int(rng.choice([7, 20, 33, 64, 72, 100, 128, 192, 256, 576]))
    page_size = int(rng.choice([1, 2, 3, 5, 7, 8, 16, 33]))
    heads_together = int(rng.choice([1, 1, 2, 3]))
    groups = int(rng.choice([1, 1, 2, 3, 5]))
    return {
        "c": int(rng.choice([1, 2])),
        "l": int(rng.integers(1, 4)),
        "p": int(rng.integers(2, 7)),
        "s": page_size,
        "g": groups,
        "d": element_bytes * head_dim * heads_together,
    }


def chosen_pages(rng, pages, count):
    return rng.permutation(pages)[:count]


@pytest.mark.parametrize("seed", range(240))
def test_random_layouts_both_ways(shim, seed):
    rng = np.random.default_rng(seed)
    sizes = geometry(rng)
    other = sizes | {"p": int(rng.integers(2, 9))}
    random_axes = "".join(rng.permutation(list("clpsg"))) + "d"
    host_axes = str(rng.choice([*LAYOUTS.values(), random_axes]))
    # A device buffer keeps tokens together; it may be a view into something larger.
    offset = int(rng.choice([0, 0, 0, 8, 4, 2, 1]))
    gaps = [a for a in "clpsg" if rng.random() < 0.15]
    host = Pool(rng, host_axes, sizes, gaps, offset)
    device = Pool(
        rng, str(rng.choice(["clpsgd", "lcpsgd", random_axes])), other, (), int(rng.choice([0, 0, 16, 4]))
    )

    count = int(rng.integers(1, min(sizes["p"], other["p"]) + 1))
    kinds = [int(rng.choice([TOKEN, PAGE])), int(rng.choice([TOKEN, PAGE, IDENTITY]))]
    rng.shuffle(kinds)
    indices = []
    for kind, pool in zip(kinds, (host, device), strict=True):
        pages = pool.sizes["p"]
        chosen = np.arange(count) if kind == IDENTITY else chosen_pages(rng, pages, count)
        rates = (0.0, 0.0) if kind == IDENTITY else rng.choice([(0, 0), (0, 0), (0.2, 0), (0.2, 0.2)])
        indices.append(Index(rng, kind, sizes["s"], pages, chosen, *rates))
    items = count * sizes["s"]
    if rng.random() < 0.3:
        items = int(rng.integers(1, items + 1))
    expected = any(
        index.bad[: items if index.kind == TOKEN else -(-items // sizes["s"])].any() for index in indices
    )
    all_bits = (1 << sizes["c"]) - 1
    for layer in range(sizes["l"]):
        for source, destination, pair in ((host, device, indices), (device, host, indices[::-1])):
            first = [
                p.side(k, layer, i)
                for p, i in zip((source, destination), pair, strict=True)
                for k in range(sizes["c"])
            ]
            bits = sizes["d"] | 16
            for s in first:
                bits |= s.base | s.page_stride | s.slot_stride | s.group_stride
            launch = launches(rng, bits & -bits)
            assert copy_layer(shim, source, destination, pair, layer, items, **launch) == (
                all_bits if expected else 0
            )


@pytest.mark.parametrize(("layout", "page_size"), list(itertools.product(LAYOUTS, [1, 3, 64])))
def test_named_layouts_to_device_rows_and_back(shim, layout, page_size):
    rng = np.random.default_rng(page_size)
    groups = {"page_head": 4, "page_unified": 2}.get(layout, 1)
    sizes = {"c": 2, "l": 3, "p": 5, "s": page_size, "g": groups, "d": 256 // groups}
    host, device = Pool(rng, LAYOUTS[layout], sizes), Pool(rng, "clpsgd", sizes | {"p": 7})
    on_host = Index(rng, PAGE, page_size, 5, chosen_pages(rng, 5, 4))
    on_device = Index(rng, TOKEN, page_size, 7, chosen_pages(rng, 7, 4))
    for layer in range(3):
        assert copy_layer(shim, host, device, (on_host, on_device), layer, 4 * page_size) == 0
        assert copy_layer(shim, device, host, (on_device, on_host), layer, 4 * page_size) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_result_does_not_depend_on_the_order_of_threads(shim, seed):
    rng = np.random.default_rng(99)
    sizes = {"c": 2, "l": 1, "p": 4, "s": 5, "g": 2, "d": 160}
    host, device = Pool(rng, "pglcsd", sizes), Pool(rng, "clpsgd", sizes)
    pair = [Index(rng, kind, 5, 4, chosen_pages(rng, 4, 4)) for kind in (PAGE, TOKEN)]
    assert vector_bytes_of(host, device, pair) == 16
    for width, block in ((16, 64), (4, 64), (MIXED, 96), (BULK, 32), (BULK, 5)):
        copy_layer(
            shim, host, device, pair, 0, 20, width=width, grid=3, block=block, seed=seed, stage_bytes=128
        )


def vector_bytes_of(source, destination, pair):
    sizes = source.sizes
    return vector_bytes(
        segment(source.side(0, 0, pair[0]), destination.side(0, 0, pair[1]), 1, sizes["g"], sizes["d"])
    )
