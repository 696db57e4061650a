"""Each missing edge between streams is caught by wrong bytes; with all edges they are right in any order.

Three ranks own the pages of a prefix in turn. For each layer a rank loads its pages from the host and packs
them into its block of scratch slot `layer % 2`, all ranks gather blocks, attention reads the whole prefix:

    load     H2D(l) ............ -> loaded[l]
    comm     waits loaded[l] and read[l - 2]; pack(l), gather(l) -> ready[l]
    compute  waits ready[l]; attention(l) -> read[l]

A stream runs its work in order; which stream goes next is drawn by a seed, as is the speed of each.
"""

from collections import deque

import numpy as np
import pytest
from segment_plan import DESTINATION, IDENTITY, INDEX, PAGE, SOURCE, segment, side

RANKS, LAYERS, BLOCK, PAGE_SIZE, ROW = 3, 5, 3, 2, 48
PAGE_BYTES = PAGE_SIZE * ROW
POOL_PAGES, TRASH = 6, 0
EDGES = ("load", "ready", "slot reuse")


class Rank:
    """Memory of one rank: host and device rows of all layers, and two slots of scratch."""

    def __init__(self, rng, number):
        self.host = rng.integers(0, 256, (LAYERS, POOL_PAGES, PAGE_BYTES), dtype=np.uint8)
        self.device = rng.integers(0, 256, (LAYERS, POOL_PAGES, PAGE_BYTES), dtype=np.uint8)
        self.scratch = rng.integers(0, 256, (2, RANKS, BLOCK, PAGE_BYTES), dtype=np.uint8)
        # The last rank has a page less than the others: its block ends with the trash page.
        pages = BLOCK - (number == RANKS - 1)
        self.pages = 1 + rng.permutation(POOL_PAGES - 1)[:pages]
        self.padded = np.append(self.pages, [TRASH] * (BLOCK - pages)).astype(np.int64)
        self.streams = {name: deque() for name in ("load", "comm", "compute")}


def launch(shim, source, destination, index, pages):
    """One segment of whole pages, by the kernels' source. `index` is of the side that has one."""
    strides = (PAGE_BYTES, ROW, 0)

    def one(array, has_index):
        kind = PAGE if has_index else IDENTITY
        return side(kind, array.ctypes.data, strides, PAGE_SIZE, POOL_PAGES, index if has_index else None)

    is_pool = [array.shape == (POOL_PAGES, PAGE_BYTES) for array in (source, destination)]
    moved = segment(one(source, is_pool[0]), one(destination, is_pool[1]), pages * PAGE_SIZE, 1, ROW)
    lent = [(source, SOURCE), (destination, DESTINATION), (index, INDEX)]
    error, report, _ = shim.copy([moved], lent, grid=1, block=32)
    assert (error, report.violations) == (0, 0)


def gather(ranks, slot):
    """What the collective does: every block goes to every rank."""
    for sender, rank in enumerate(ranks):
        for receiver in ranks:
            receiver.scratch[slot, sender] = rank.scratch[slot, sender]


def submit(shim, ranks, missing, wrong):
    """Gives the work of all layers to the streams, without the edge `missing`."""
    for number, rank in enumerate(ranks):
        load, comm, compute = rank.streams.values()
        for layer in range(LAYERS):
            slot = layer % 2

            def run_load(rank=rank, layer=layer):
                launch(shim, rank.host[layer], rank.device[layer], rank.pages, len(rank.pages))

            def run_pack(rank=rank, layer=layer, number=number, slot=slot):
                launch(shim, rank.device[layer], rank.scratch[slot, number], rank.padded, BLOCK)

            def run_attention(rank=rank, layer=layer, slot=slot):
                for sender, owner in enumerate(ranks):
                    have = rank.scratch[slot, sender, : len(owner.pages)]
                    if not np.array_equal(have, owner.host[layer, owner.pages]):
                        wrong.append((layer, sender))

            load += [("run", run_load), ("record", (number, "loaded", layer))]
            if missing != "load":
                comm.append(("wait", (number, "loaded", layer)))
            if missing != "slot reuse" and layer >= 2:
                comm.append(("wait", (number, "read", layer - 2)))
            comm += [("run", run_pack), ("collective", layer), ("record", (number, "ready", layer))]
            if missing != "ready":
                compute.append(("wait", (number, "ready", layer)))
            compute += [("run", run_attention), ("record", (number, "read", layer))]


def pass_through(shim, seed, missing=None):
    """Runs everything in an order drawn by `seed`; the places where attention read wrong bytes."""
    rng = np.random.default_rng(seed)
    ranks = [Rank(rng, number) for number in range(RANKS)]
    wrong, done = [], set()
    submit(shim, ranks, missing, wrong)
    streams = [stream for rank in ranks for stream in rank.streams.values()]
    comms = [rank.streams["comm"] for rank in ranks]
    speed = rng.exponential(size=len(streams)) + 0.02

    def can_run(stream):
        kind, what = stream[0]
        if kind == "collective":
            return all(comm and comm[0] == (kind, what) for comm in comms)
        return kind != "wait" or what in done

    while any(streams):
        ready = [number for number, stream in enumerate(streams) if stream and can_run(stream)]
        stream = streams[rng.choice(ready, p=speed[ready] / speed[ready].sum())]
        kind, what = stream[0]
        if kind == "collective":
            gather(ranks, what % 2)
            for comm in comms:
                comm.popleft()
            continue
        stream.popleft()
        if kind == "run":
            what()
        elif kind == "record":
            done.add(what)
    return wrong


def test_case_d18_with_all_edges_the_bytes_are_right_in_any_order(shim):
    for seed in range(20):
        assert pass_through(shim, seed) == []


@pytest.mark.parametrize("missing", EDGES)
def test_case_d18_a_missing_edge_is_caught(shim, missing):
    caught = sum(bool(pass_through(shim, seed, missing)) for seed in range(20))
    assert caught >= 5, f"{missing}: wrong bytes in {caught} of 20 orders"
