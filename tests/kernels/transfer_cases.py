"""What `test_transfer.py` starts, each in a process that finds the fake driver.

Transfers between host pools and a device, plan by plan and layer by layer.

The device's memory is numpy's, handed over by `__cuda_array_interface__` as torch's CUDA tensors do it.
"""

import ctypes
import gc
import os
import re
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
from hicache_store import (
    Component,
    ConfigError,
    DeviceError,
    GeometryError,
    HostEvent,
    HostPool,
    LayerwiseRestore,
    Layout,
    Namespace,
    Pool,
    Store,
    StoreClosedError,
    Tile,
    TransferPlan,
    TransferPool,
    UnsupportedError,
    page_keys,
)

CANARY, LAYERS, HEADS, TOKENS = 0xA5, 3, 4, 4
STREAM = 0x57
ROWS = {"kv": [("k", 24), ("v", 40)], "latent": [("c", 96)], "odd": [("c", 7)], "long": [("c", 16 << 10)]}
LAYOUTS = (
    "layer_first",
    "page_first",
    "page_first_direct",
    "page_head",
    "page_unified(4)",
    "page_unified(2)",
)
# Axes of a host buffer of one component: pages, layers, heads, tokens; then the row.
AXES = {"layer_first": "lpth", "page_first": "ptlh", "page_first_direct": "plth", "page_head": "phtl"}

fake = ctypes.CDLL("libcuda.so.1")


class OnDevice:
    """An array that says it is on a device."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        flags = not self.array.flags.writeable
        return {
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.array.ctypes.data, flags),
            "strides": None,
            "version": 3,
        }


def make_pool(name):
    components = [Component(part, row, "token") for part, row in ROWS[name]]
    return Pool("kv", "kv" if len(components) == 2 else "latent", "uint8", components)


def host_views(layout, name, pages, buffer):
    """Each component as `[pages, layers, heads, tokens, row]`, by numpy's own strides."""
    sizes = {"p": pages, "l": LAYERS, "h": HEADS, "t": TOKENS}
    rows, views, start = [row for _, row in ROWS[name]], [], 0
    if layout.startswith("page_unified"):
        group = int(layout[len("page_unified(") : -1])
        cells = buffer.reshape(pages, HEADS // group, LAYERS, TOKENS * group * sum(rows))
        for row in rows:
            part = cells[..., start : start + TOKENS * group * row]
            part = part.reshape(pages, HEADS // group, LAYERS, TOKENS, group, row)
            start += TOKENS * group * row
            views.append(part.transpose(0, 2, 1, 4, 3, 5).reshape(pages, LAYERS, HEADS, TOKENS, row))
        return views
    for row in rows:
        shape = [sizes[axis] for axis in AXES[layout]] + [row]
        part = buffer[start : start + int(np.prod(shape))].reshape(shape)
        start += part.size
        views.append(part.transpose([AXES[layout].index(axis) for axis in "plht"] + [4]))
    return views


class Sides:
    """A host pool, and a device tensor for each layer and component: `[slots, tokens, heads, row]`."""

    def __init__(self, name="kv", layout="page_first", slots=5, pages=6, seed=1, **options):
        random = np.random.default_rng(seed)
        self.name, self.layout, self.slots = name, layout, slots
        pool, tile = make_pool(name), Tile((0, LAYERS), (0, HEADS), (0, 1, TOKENS))
        self.host_pool = HostPool(slots, pool.page_bytes(tile), huge_pages="off", register="require")
        self.host = np.frombuffer(self.host_pool, np.uint8)
        self.host[:] = random.integers(0, 256, self.host.size, np.uint8)
        self.rows = [
            [np.full((pages, TOKENS, HEADS, row), CANARY, np.uint8) for _, row in ROWS[name]]
            for _ in range(LAYERS)
        ]
        device = []
        for layer, tensors in enumerate(self.rows):
            one = Tile((layer, layer + 1), (0, HEADS), (0, 1, TOKENS))
            placed = Layout.host("layer_first", pool, one, pages, split_buffers=True)
            device.append((placed, [OnDevice(tensor) for tensor in tensors]))
        host = (Layout.host(layout, pool, tile, slots), self.host_pool)
        self.plan = TransferPlan([TransferPool("kv", host, device)], **options)

    def expected(self, host_slots, device_slots):
        """The device rows after a restore, by numpy."""
        values = host_views(self.layout, self.name, self.slots, self.host)
        rows = [[tensor.copy() for tensor in tensors] for tensors in self.rows]
        for here, there in zip(host_slots, device_slots, strict=True):
            for layer in range(LAYERS):
                for tensor, value in zip(rows[layer], values, strict=True):
                    if here >= 0 and there >= 0:
                        tensor[there] = value[here, layer].transpose(1, 0, 2)
        return rows

    def is_exact(self, expected, layers=range(LAYERS)):
        return all(
            (a == b).all() for layer in layers for a, b in zip(self.rows[layer], expected[layer], strict=True)
        )


def new_event():
    handle = ctypes.c_void_p()
    assert fake.cuEventCreate(ctypes.byref(handle), 2) == 0
    return handle.value


def log():
    return Path(os.environ["FAKE_LOG"]).read_text("utf-8").splitlines()


def plans(way):
    """Every layout and row, forth and back; nothing is touched before the device comes to it."""
    host_slots, device_slots = [4, 0, -1, 2, 1], [1, 5, 3, -1, 2]
    for name in ROWS:
        for layout in LAYOUTS:
            sides = Sides(name, layout, way=way)
            expected = sides.expected(host_slots, device_slots)
            moved = sides.plan.restore(host_slots, device_slots, stream=STREAM)
            assert moved == 3 * sides.plan.page_bytes
            assert fake.fake_pending() > 0
            assert all((tensor == CANARY).all() for tensors in sides.rows for tensor in tensors)
            sides.plan.wait()
            assert sides.is_exact(expected), (name, layout)
            before = sides.host.copy()
            sides.host[:] = CANARY
            sides.plan.backup([4, 0, 1], [1, 5, 2], stream=STREAM)
            sides.plan.wait()
            slots = sides.slots
            views = [host_views(layout, name, slots, one) for one in (sides.host, before)]
            for found, value in zip(*views, strict=True):
                assert (found[[4, 0, 1]] == value[[4, 0, 1]]).all(), (name, layout)
                assert (found[[2, 3]] == CANARY).all(), (name, layout)
            report = sides.plan.report()
            # Runs of 128 KiB and more, tokens of a page together on both sides, are worth a descriptor each.
            are_long = name == "long" and layout in ("layer_first", "page_first_direct", "page_unified(4)")
            expected_way = "copy_engine" if way == "copy_engine" or (way == "auto" and are_long) else "kernel"
            other = {"kernel": "copy_engine", "copy_engine": "kernel"}[expected_way]
            assert report[f"{expected_way}_layers"] == 2 * LAYERS, report
            assert report[f"{other}_layers"] == 0, report
            assert report["device"] == 0
            assert report["last"]


def without_kernels():
    """Where there are none, everything goes to the copy engine, and the report says why."""
    sides = Sides()
    expected = sides.expected([0, 3], [2, 4])
    sides.plan.restore([0, 3], [2, 4], stream=0)
    sides.plan.wait()
    assert sides.is_exact(expected)
    report = sides.plan.report()
    assert report["by"] == "the copy engine"
    assert report["copy_engine_layers"] == LAYERS
    assert "no kernels" in report["last"], report
    assert ("the copy engine", "HICACHE_CUDA_KERNELS is dma") in report["tried"], report
    assert not [line for line in log() if line.startswith(("launch", "batch"))]
    assert "copy stream (nil)" in log(), "stream 0 is the device's default stream"


def order():
    """The stream waits, copies, records; one event of ours for each layer, none waited for."""
    sides = Sides()
    before, ends = new_event(), [new_event() for _ in range(LAYERS)]
    host = HostEvent()
    host.set()
    start = len(log())
    sides.plan.restore([0], [0], stream=STREAM, after=[before, host], events=ends)
    calls = [line.split()[0] for line in log()[start:]]
    assert calls == ["wait", *["launch", "record", "record"] * LAYERS], calls
    assert all(f"stream {STREAM:#x}" in line for line in log()[start:])
    for event in ends:
        assert fake.cuEventSynchronize(ctypes.c_void_p(event)) == 0
    assert sides.is_exact(sides.expected([0], [0]))
    # Once blocks are there, nothing is registered any more, whatever is submitted and waited for.
    registered = log().count("register")
    for _ in range(5):
        sides.plan.restore([0, 1, 2], [0, 1, 2], stream=STREAM)
        sides.plan.wait()
    assert log().count("register") == registered


def held():
    """What a plan touches is kept until the device is done, though nobody else keeps it."""
    sides = Sides()
    let_go = []
    for tensors in sides.rows:
        for tensor in tensors:
            weakref.finalize(tensor, lambda: let_go.append(fake.fake_pending()))
    sides.plan.restore([0, 1], [0, 1], stream=STREAM)
    plan, sides.plan = sides.plan, None
    pool = sides.host_pool
    host = sides.host
    del sides, tensors, tensor, host
    gc.collect()
    assert let_go == []
    assert fake.fake_pending() > 0
    del plan
    gc.collect()
    assert set(let_go) == {0}, let_go
    pool.close()
    assert "unregister while the device is at work" not in log()


def refusals():
    sides = Sides()
    memory = np.zeros(sides.host.size, np.uint8)
    tile = Tile((0, LAYERS), (0, HEADS), (0, 1, TOKENS))
    placed = (Layout.host("page_first", make_pool("kv"), tile, 5), memory)
    on_device = (placed[0], OnDevice(np.zeros_like(memory)))
    plan = TransferPlan([TransferPool("kv", placed, on_device)])
    refused(ConfigError, "HostPool with register", plan.restore, [0], [0], stream=STREAM)
    plan = sides.plan
    refused(
        ConfigError,
        "handles of driver events",
        plan.restore,
        [0],
        [0],
        events=[HostEvent() for _ in range(3)],
    )
    refused(ConfigError, "recorded once, found 0", plan.restore, [0], [0], after=[0])
    gone = HostEvent().handle
    refused(ConfigError, f"live host event, found {gone}", plan.restore, [0], [0], after=[gone])
    refused(ConfigError, "PER_THREAD", plan.restore, [0], [0], stream=2)
    refused(ConfigError, "stream is -1", plan.restore, [0], [0], stream=-1)
    refused(GeometryError, "named twice", plan.restore, [0, 1], [1, 1], stream=STREAM)
    frozen = np.zeros_like(memory)
    frozen.flags.writeable = False
    host = (placed[0], sides.host_pool)
    plan = TransferPlan([TransferPool("kv", host, (placed[0], OnDevice(frozen)))])
    refused(GeometryError, "read-only", plan.restore, [0], [0], stream=STREAM)
    other = (placed[0], (1 << 40, memory.nbytes, "npu"))
    plan = TransferPlan([TransferPool("kv", host, other)])
    refused(UnsupportedError, "memory of a device", plan.restore, [0], [0], stream=STREAM)
    strided = OnDevice(np.zeros((4, 4), np.uint8))
    strided.array = strided.array[:, :2]
    interface = type(
        "Strided", (), {"__cuda_array_interface__": strided.__cuda_array_interface__ | {"strides": (4, 1)}}
    )
    refused(GeometryError, "contiguous", TransferPool, "kv", host, (placed[0], interface()))
    assert not [line for line in log() if line.startswith(("launch", "copy", "batch"))]


def refused(kind, words, call, *arguments, **keywords):
    with pytest.raises(kind, match=re.escape(words)):
        call(*arguments, **keywords)


def forked():
    """A forked child is refused, and what it lets go is left to the parent."""
    sides = Sides()
    sides.plan.restore([0], [0], stream=STREAM)
    before = len(log())
    child = os.fork()
    if child == 0:
        refused(DeviceError, "forked child", sides.plan.restore, [0], [0], stream=STREAM)
        refused(DeviceError, "forked child", sides.plan.wait)
        sides.plan = None
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(log()) == before, log()[before:]
    expected = sides.expected([0], [0])
    sides.plan.wait()
    assert sides.is_exact(expected)


def error_word():
    """An index that is past its limit on the device is told when the work has been done, and from then on."""
    sides = Sides()
    sides.plan.restore([0, 1], [0, 1], (0, 1), stream=STREAM)
    refused(DeviceError, "0b11", sides.plan.wait)
    refused(DeviceError, "0b11", sides.plan.restore, [0], [0], stream=STREAM)


def refused_launch():
    """Where the driver refuses a layer, the call says so; what was given before is done as ever."""
    sides = Sides()
    expected = sides.expected([0, 1], [3, 5])
    refused(DeviceError, "cuLaunchKernel", sides.plan.restore, [0, 1], [3, 5], stream=STREAM)
    assert fake.fake_pending() > 0
    sides.plan.wait()
    assert sides.is_exact(expected, [0])
    assert all((tensor == CANARY).all() for tensors in sides.rows[1:] for tensor in tensors)


def debug():
    sides = Sides()
    if os.environ.get("FAKE_DUPLICATE"):
        words = "below 6, each once, found 1 duplicates and 0 at or past the limit"
        refused(DeviceError, words, sides.plan.restore, [0, 1], [3, 5], stream=STREAM)
        assert not [line for line in log() if "segment_copy" in line]
        return
    expected = sides.expected([0, 1], [3, 5])
    sides.plan.restore([0, 1], [3, 5], stream=STREAM)
    sides.plan.wait()
    assert sides.is_exact(expected)
    checks = [line for line in log() if "index_check" in line]
    assert len(checks) == (LAYERS if os.environ.get("HICACHE_CUDA_DEBUG") == "1" else 0), log()


def layerwise(way):
    """Store to host pool to device rows, each layer exact when it is ready; and back."""
    for layout in LAYOUTS:
        for ring in (False, True):
            with tempfile.TemporaryDirectory() as root, Store.open(root, capacity="64MiB") as store:
                layerwise_case(store, way, layout, ring)


def layerwise_case(store, way, layout, ring):
    pages, sides = 5, Sides("kv", layout, slots=2 if ring else 5, way=way)
    tile = Tile((0, LAYERS), (0, HEADS), (0, 1, TOKENS))
    namespace = Namespace("org/tiny", revision="r1", page_size=TOKENS)
    view = store.view(namespace, make_pool("kv"), tile=tile, layout=layout)
    keys = page_keys(range(pages * TOKENS), TOKENS)
    truth = np.random.default_rng(3).integers(0, 256, pages * view.page_bytes["kv"], np.uint8)
    assert view.backup(keys, truth, range(pages)).count("stored") == pages
    values = host_views(layout, "kv", pages, truth)
    slots, there = list(range(sides.slots)), [4, 2, 0, 1, 5]

    def is_exact(layer):
        return all(
            (tensor[there] == value[:, layer].transpose(0, 2, 1, 3)).all()
            for tensor, value in zip(sides.rows[layer], values, strict=True)
        )

    transfers = LayerwiseRestore(view, sides.plan)
    assert transfers.executor == "kernel"
    if os.environ.get("FAKE_REFUSE"):
        ticket = transfers.start(keys, slots, there, stream=STREAM)
        with pytest.raises(DeviceError, match="cuLaunchKernel"):
            ticket.finish()
        assert fake.fake_pending() == 0, "what was given before is waited for"
        with pytest.raises(StoreClosedError, match="given up"):
            ticket.read(0)
        return
    ready, free = new_event(), HostEvent()
    free.set()
    ticket = transfers.start(keys, slots, there, host_free=[free, ready], device_free=[ready], stream=STREAM)
    for layer in range(LAYERS):
        assert ticket.hold_back(layer, STREAM + 8, 60)
        assert ticket.wait(layer, 60)
        assert is_exact(layer), (layout, layer)
    assert ticket.finish().all_restored
    assert ticket.wait_drained(60)
    assert f"wait stream {STREAM + 8:#x}" in log()

    again = page_keys(range(1000, 1000 + pages * TOKENS), TOKENS)
    ends = [new_event() for _ in range(LAYERS)]
    backup = transfers.start_backup(
        again, slots, there, depth=0, ready=[ready], layer_ready=ends, stream=STREAM
    )
    assert backup.finish().count("stored") == pages
    for tensors in sides.rows:
        for tensor in tensors:
            tensor[:] = CANARY
    assert transfers.start(again, slots, there, stream=STREAM).finish().all_restored
    assert all(is_exact(layer) for layer in range(LAYERS))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("done")
