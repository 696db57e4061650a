"""Edges between streams of the device: with all of them every byte is exact, without one it shows.

Prefix: the pages of each layer belong to several owners, simulated on one device. Three streams, as in
tests/kernels/test_edges.py:

    load     H2D(l) ............ -> loaded[l]
    comm     waits loaded[l] and read[l - 2]; pack(l), gather(l) into scratch slot l % 2 -> ready[l]
    compute  waits ready[l]; reads the prefix of layer l -> read[l]

Step (field case D18): a slow step still fills the pages with 0xEE when they are restored, and layer 1 is read
right after its event while layer 2 is delayed:

    step     fills the pages -> written
    load     waits written; restore of layer 1 -> loaded[1]; delay; restore of layer 2 -> loaded[2]
    read     waits loaded[1]; reads layer 1; waits loaded[2]; reads layer 2

Each round has one stream late, by long copies ahead of it. What is missing shows where the other streams do
not wait for the late one.
"""

import ctypes as c
import time

import numpy as np
from segment_plan import ABI, IDENTITY, PAGE, Plan, segment, side

FILL = 0xEE
DEVICE, HOST = "copies within the device", "copies from the host"
# Which stream is late when the edge is left out.
PREFIX = {"load": "load", "ready": "comm", "slot reuse": "compute"}
STEP = {"step": "step", "loaded": "load"}
TRIES, ROUNDS = 8, 1000


class Pinned:
    """Pinned memory as an array of numpy, and its address on the device."""

    def __init__(self, driver, shape, kind=np.uint8):
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        host, self.address = driver.host_memory(size)
        self.array = np.ctypeslib.as_array((c.c_uint8 * size).from_address(host)).view(kind).reshape(shape)
        self.host = host


class Delay:
    """Long copies that come first on a stream, of about so many milliseconds."""

    def __init__(self, driver, size, milliseconds):
        self.driver, self.size = driver, size
        self.device = [driver.device_memory(size) for _ in range(2)]
        self.pinned, self.host = driver.host_memory(size)
        self.copies = {}
        events = driver.new_event(), driver.new_event()
        for kind in (DEVICE, HOST):
            for _ in range(2):  # the first is not measured
                driver.record(events[0])
                self.copy(kind, driver.stream)
                driver.record(events[1])
                taken = driver.milliseconds(*events)
            self.copies[kind] = int(min(100, max(2, milliseconds / max(taken, 1e-3))))

    def copy(self, kind, stream):
        source = self.device[1] if kind == DEVICE else self.host
        self.driver.copy(self.device[0], source, self.size, stream)

    def start(self, stream, kind, short=False):
        for _ in range(1 if short else self.copies[kind]):
            self.copy(kind, stream)


class Scene:
    """Streams, events and pages. A subclass gives the work to the streams, and says what is right."""

    def __init__(self, driver, mover, delay, streams):
        self.driver, self.mover, self.delay = driver, mover, delay
        self.streams = {name: driver.new_stream() for name in streams}
        self.events, self.filled = {}, []

    def device(self, *shape):
        """Memory that every round finds filled."""
        size = int(np.prod(shape))
        self.filled.append((self.driver.device_memory(size), size))
        return self.filled[-1][0]

    def record(self, name, stream):
        event = self.events.setdefault(name, self.driver.new_event())
        self.driver.record(event, self.streams[stream])

    def wait(self, name, stream, missing=False):
        if not missing:
            self.driver.wait_event(self.events[name], self.streams[stream])

    def launch(self, sides, items, run, stream):
        """One launch with a segment for each pair of sides."""
        plan = Plan(ABI, len(sides))
        for number, pair in enumerate(sides):
            plan.segment[number] = segment(*pair, items, 1, run)
        self.mover.start(plan, 16, 2, 256, stream=self.streams[stream])

    def round(self, late, kind, missing=None, short=False):
        """Layers that were read wrong."""
        for address, size in self.filled:
            self.driver.fill(address, FILL, size)
        self.prepare()
        self.driver.wait()
        self.delay.start(self.streams[late], kind, short)
        self.submit(missing)
        # The late one last: the others have no reason to wait for it but their edges.
        for name in sorted(self.streams, key=late.__eq__):
            self.driver.wait(self.streams[name])
        return self.wrong()

    def prepare(self):
        """What is new in each round."""


class Prefix(Scene):
    """Owners of the pages of a prefix, a pool on the host and rows on the device each."""

    def __init__(self, driver, mover, delay, small):
        super().__init__(driver, mover, delay, ("load", "comm", "compute"))
        self.owners, self.layers, self.slots, self.row = 3, 6, 2 if small else 16, 48 if small else 1152
        self.block, self.pages = (3, 6) if small else (8, 12)
        rng = np.random.default_rng(0)
        self.page = self.slots * self.row
        self.host = Pinned(driver, (self.owners, self.layers, self.pages, self.page))
        self.host.array[:] = rng.integers(0, 256, self.host.array.shape, np.uint8)
        self.index = Pinned(driver, (self.owners, self.block), np.int64)
        for owner in range(self.owners):
            self.index.array[owner] = rng.permutation(self.pages)[: self.block]
        self.rows = self.device(*self.host.array.shape)
        self.packed = self.device(2, self.owners, self.block, self.page)
        self.scratch = self.device(2, self.owners, self.block, self.page)
        self.read = self.device(self.layers, self.owners, self.block, self.page)
        self.seen = Pinned(driver, (self.layers, self.owners, self.block, self.page))

    def pool(self, base, owner, layer):
        """The pages of an owner's block, of its pool of a layer."""
        at = base + (owner * self.layers + layer) * self.pages * self.page
        one = side(PAGE, at, (self.page, self.row, 0), self.slots, self.pages)
        one.index, one.index_bytes = self.index.address + 8 * owner * self.block, 8
        return one

    def submit(self, missing):
        part = self.block * self.page
        whole, items = self.owners * part, self.block * self.slots
        for layer in range(self.layers):
            slot = layer % 2
            pools = [
                [self.pool(base, owner, layer) for owner in range(self.owners)]
                for base in (self.host.address, self.rows)
            ]
            blocks = [
                side(
                    IDENTITY, self.packed + slot * whole + owner * part, (self.page, self.row, 0), self.slots
                )
                for owner in range(self.owners)
            ]
            self.launch(list(zip(*pools, strict=True)), items, self.row, "load")
            self.record(("loaded", layer), "load")
            self.wait(("loaded", layer), "comm", missing == "load")
            if layer >= 2:
                self.wait(("read", layer - 2), "comm", missing == "slot reuse")
            self.launch(list(zip(pools[1], blocks, strict=True)), items, self.row, "comm")
            for at in range(slot * whole, (slot + 1) * whole, part):
                self.driver.copy(self.scratch + at, self.packed + at, part, self.streams["comm"])
            self.record(("ready", layer), "comm")
            self.wait(("ready", layer), "compute", missing == "ready")
            source = self.scratch + slot * whole
            self.driver.copy(self.read + layer * whole, source, whole, self.streams["compute"])
            self.record(("read", layer), "compute")

    def wrong(self):
        self.driver.copy(self.seen.address, self.read, self.seen.array.nbytes)
        self.driver.wait()
        right = [self.host.array[owner][:, self.index.array[owner]] for owner in range(self.owners)]
        same = self.seen.array == np.stack(right, axis=1)
        return [layer for layer in range(self.layers) if not same[layer].all()]


class Step(Scene):
    """Pages of two layers that a step still fills."""

    def __init__(self, driver, mover, delay, small):
        super().__init__(driver, mover, delay, ("step", "load", "read"))
        self.rng = np.random.default_rng(1)
        self.pages, self.slots, self.row = 2, 2 if small else 64, 48 if small else 1152
        self.layer_bytes = self.pages * self.slots * self.row
        self.host, self.seen = (Pinned(driver, (2, self.layer_bytes)) for _ in range(2))
        self.rows, self.read = self.device(2, self.layer_bytes), self.device(2, self.layer_bytes)

    def prepare(self):
        self.host.array[:] = self.rng.integers(0, 256, self.host.array.shape, np.uint8)

    def submit(self, missing):
        strides, size = (self.slots * self.row, self.row, 0), self.layer_bytes
        self.driver.fill(self.rows, FILL, 2 * size, self.streams["step"])
        self.record("written", "step")
        self.wait("written", "load", missing == "step")
        for layer in range(2):
            if layer:
                self.delay.start(self.streams["load"], DEVICE, short=True)
            pair = (
                side(IDENTITY, base + layer * size, strides, self.slots)
                for base in (self.host.address, self.rows)
            )
            self.launch([tuple(pair)], self.pages * self.slots, self.row, "load")
            self.record(("loaded", layer), "load")
            self.wait(("loaded", layer), "read", missing == "loaded")
            self.driver.copy(self.read + layer * size, self.rows + layer * size, size, self.streams["read"])

    def wrong(self):
        # The pages at the end as well: the step may come after the restore that did not wait for it.
        found = []
        for base in (self.read, self.rows):
            self.driver.copy(self.seen.address, base, self.seen.array.nbytes)
            self.driver.wait()
            same = self.seen.array == self.host.array
            found += [layer for layer in range(2) if not same[layer].all()]
        return found


def exact(found, scene, rounds, until, short):
    """Rounds with all edges, each stream late in turn."""
    turns = [(late, kind) for late in scene.streams for kind in (DEVICE, HOST)]
    found.update(rounds=0, wrong={})
    while found["rounds"] < rounds and time.monotonic() < until:
        late, kind = turns[found["rounds"] % len(turns)]
        wrong = scene.round(late, kind, short=short)
        if wrong:
            found["wrong"].setdefault(f"{late} late by {kind}", wrong)
        found["rounds"] += 1


def without(scene, edges):
    """Each edge left out in turn, tried until wrong bytes show."""
    shown = {}
    for edge, late in edges.items():
        for tries in range(1, TRIES + 1):
            kind = (DEVICE, HOST)[tries % 2]
            wrong = scene.round(late, kind, missing=edge)
            shown[edge] = {"tries": tries, "late": f"{late} by {kind}", "wrong layers": wrong}
            if wrong:
                break
    return shown


def run(found, driver, mover, small):
    """Fails for a wrong byte with all edges; "not shown" where one without an edge was not seen."""
    start = time.monotonic()
    delay = Delay(driver, 4096 if small else 64 << 20, 2 if small else 10)
    found["delay"] = {"bytes": delay.size, "copies": delay.copies}
    wrong, unseen = [], []
    scenes = {
        "prefix": (Prefix, PREFIX, 12, 10 if small else 3, False),
        "D18": (Step, STEP, 50 if small else ROUNDS, 10, True),
    }
    for name, (kind, edges, rounds, seconds, short) in scenes.items():
        found[name] = one = {}
        scene = kind(driver, mover, delay, small)
        one["without"] = without(scene, edges)
        exact(one, scene, rounds, time.monotonic() + seconds, short)
        wrong += [f"{name}: {late}" for late in one["wrong"]]
        unseen += [f"{name}: {edge}" for edge, tries in one["without"].items() if not tries["wrong layers"]]
    found["took_s"] = round(time.monotonic() - start, 2)
    if wrong:
        raise AssertionError(f"wrong bytes with all edges: {wrong}")
    if unseen:
        found.update(result="not shown", why=f"bytes were right without {unseen}")
