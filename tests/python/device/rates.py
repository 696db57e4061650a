"""Stages that measure: bytes moved over the time between two events, median and 90th percentile.

Every rate stands beside the ceiling of the copy engine measured in the same run: in a virtual machine the
figures of a data sheet say nothing.
"""

import ctypes as c
import mmap
import os
import platform
import resource
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
from mover import NAMES
from segment_plan import ABI, BULK, PAGE, Plan, segment, side, vector_bytes

RUNS = (128, 256, 512, 576, 656, 1152, 2048, 8192, 65536)
BLOCKS = (1, 2, 4, 8)
STREAM_ORDER, ANY_ORDER, PREFER_OVERLAP = 1, 3, 1


def text(*command):
    if shutil.which(command[0]) is None:
        return None
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=15).stdout


def identity(found, driver, mover):
    """What the rest is measured on."""
    smi = text("nvidia-smi", "-q") or ""
    wanted = ("Driver Version", "CUDA Version", "Product Name", "Bus Id", "Current", "Max", "Link")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found.update(
        device=driver.name(),
        capability=driver.capability,
        multiprocessors=driver.attribute(16),
        driver=driver.version,
        loaded=mover.tried,
        nvidia_smi=[line.strip() for line in smi.splitlines() if any(word in line for word in wanted)][:60],
        numa=sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*")),
        huge_pages=huge.read_text().strip() if huge.exists() else None,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        cpus=os.cpu_count(),
        kernel=platform.release(),
        python=platform.python_version(),
    )


class Bench:
    """A pinned host buffer and a device buffer of `size` bytes, and indices in device memory."""

    def __init__(self, driver, size, small):
        self.driver, self.size = driver, size
        self.warm, self.times = (1, 2) if small else (5, 30)
        self.host, self.host_address = driver.host_memory(size)
        self.device = driver.device_memory(size)
        self.index = driver.device_memory(8 << 20)
        self.events = driver.new_event(), driver.new_event()
        self.rng = np.random.default_rng(0)

    def rate(self, start, moved):
        """GB/s of `start()`, which gives work that moves `moved` bytes to the stream."""
        milliseconds = []
        for i in range(self.warm + self.times):
            self.driver.record(self.events[0])
            start()
            self.driver.record(self.events[1])
            taken = max(self.driver.milliseconds(*self.events), 1e-6)
            if i >= self.warm:
                milliseconds.append(taken)
        median, slow = np.percentile(milliseconds, [50, 90])
        return {"gb_s": round(moved / median / 1e6, 2), "gb_s_p90": round(moved / slow / 1e6, 2)}

    def shuffle(self, count):
        order = self.rng.permutation(count).astype(np.int64)
        self.driver.copy(self.index, order.ctypes.data, order.nbytes)
        self.driver.wait()

    def plan(self, run, to_device):
        """Runs of `run` bytes at random places on the host, one behind the other on the device."""
        count = min(self.size // run, 1 << 20)
        self.shuffle(count)
        host = side(PAGE, self.host_address, (run, 0, 0), 1, count)
        host.index, host.index_bytes = self.index, 8
        device = side(2, self.device, (run, 0, 0), 1)
        pair = (host, device) if to_device else (device, host)
        plan = Plan(ABI, 1)
        plan.segment[0] = segment(*pair, count, 1, run)
        return plan, count * run


def ceilings(bench):
    """The copy engine on one long copy, and on one of each direction at once (bytes of both)."""
    host, device, size = bench.host_address, bench.device, bench.size
    driver, half, other = bench.driver, bench.size // 2, bench.driver.new_stream()
    fork, join = driver.new_event(), driver.new_event()

    def both():
        driver.record(fork)
        driver.wait_event(fork, other)
        driver.copy(device, host, half)
        driver.copy(host + half, device + half, half, other)
        driver.record(join, other)
        driver.wait_event(join, driver.stream)

    return {
        "both_at_once": bench.rate(both, 2 * half),
        "h2d": bench.rate(lambda: bench.driver.copy(device, host, size), size),
        "d2h": bench.rate(lambda: bench.driver.copy(host, device, size), size),
    }


def rates(found, driver, mover, small):
    """Ceilings, kernels by run, blocks and direction, batches of copies by size."""
    bench = Bench(driver, (1 if small else 64) << 20, small)
    found["ceiling"] = ceilings(Bench(driver, (1 if small else 1024) << 20, small))
    found["kernels"] = []
    for run in RUNS[::4] if small else RUNS:
        for direction in ("h2d", "d2h"):
            plan, moved = bench.plan(run, direction == "h2d")
            for width in (vector_bytes(plan.segment[0]), BULK):
                if width not in mover.widths() or (width == BULK and run % 16):
                    continue
                stage = min(-(-run // 128) * 128, 24 << 10)
                for blocks in BLOCKS[:2] if small else BLOCKS:
                    measured = bench.rate(
                        lambda plan=plan, width=width, blocks=blocks, stage=stage: mover.start(
                            plan, width, blocks, 32 if width == BULK else 1024, stage
                        ),
                        moved,
                    )
                    share = measured["gb_s"] / found["ceiling"][direction]["gb_s"]
                    found["kernels"].append(
                        {"run": run, "way": direction, "kernel": NAMES[width], "blocks": blocks}
                        | measured
                        | {"of_ceiling": round(share, 3)}
                    )
    found["batches"] = batches(bench, driver, small)


def batches(bench, driver, small):
    """cuMemcpyBatchAsync, in the form of CUDA 13 or of 12.8."""
    newer = getattr(driver.library, "cuMemcpyBatchAsync_v2", None) if driver.version >= 13000 else None
    if newer is None and not (driver.version >= 12080 and hasattr(driver.library, "cuMemcpyBatchAsync")):
        return {"left out": f"driver {driver.version} has no batches of copies"}
    measured = []
    for piece in (4096, 65536) if small else (4096, 16384, 65536, 131072, 524288, 2 << 20):
        count = bench.size // piece
        offsets = np.arange(count, dtype=np.uint64) * piece
        order = bench.rng.permutation(count)
        to, source = bench.device + offsets, bench.host_address + offsets[order]
        sizes, first = np.full(count, piece, np.uint64), c.c_size_t(0)
        for access, flags in ((STREAM_ORDER, 0), (ANY_ORDER, 0), (ANY_ORDER, PREFER_OVERLAP)):
            attributes = (c.c_int * 6)(access, 0, 0, 0, 0, flags)
            arrays = [c.c_void_p(array.ctypes.data) for array in (to, source, sizes)]
            tail = [c.c_size_t(count), attributes, c.byref(first), c.c_size_t(1)]
            if newer is None:
                tail.append(c.byref(c.c_size_t(0)))
            name = "cuMemcpyBatchAsync" if newer is None else "cuMemcpyBatchAsync_v2"

            def start(name=name, arrays=arrays, tail=tail):
                driver.call(name, *arrays, *tail, driver.stream)

            point = {"piece": piece, "order": access, "flags": flags}
            measured.append(point | bench.rate(start, count * piece))
    return measured


def layer_plans(bench, layers, tokens, row, components):
    """Plans of a restore, one a layer: pages of 64 tokens, page_first on the host, rows on the device."""
    page = 64
    pages = min(tokens // page, bench.size // (components * layers * page * row))
    bench.shuffle(pages)
    part = pages * page * row
    plans = []
    for layer in range(layers):
        plan = Plan(ABI, components)
        for component in range(components):
            at = bench.host_address + (component * pages * page * layers + layer) * row
            host = side(PAGE, at, (page * layers * row, layers * row, 0), page, pages)
            host.index, host.index_bytes = bench.index, 8
            rows = side(2, bench.device + (layer * components + component) * part, (page * row, row, 0), page)
            plan.segment[component] = segment(host, rows, pages * page, 1, row)
        plans.append(plan)
    return plans, components * part


def by_layer(driver, mover, small, plans, moved):
    """A restore with an event behind each layer: when each came, and the rate of the whole."""
    begin, events = driver.new_event(), [driver.new_event() for _ in plans]
    for _ in range(2 if small else 6):  # the last one counts
        driver.record(begin)
        start = time.perf_counter()
        for plan, event in zip(plans, events, strict=True):
            mover.start(plan, 16, 2, 1024)
            driver.record(event)
        submitted = time.perf_counter() - start
        arrivals = [driver.milliseconds(begin, event) for event in events]
    return {
        "bytes_per_layer": moved,
        "arrivals_ms": [round(ms, 3) for ms in arrivals],
        "gb_s": round(moved * len(plans) / max(arrivals[-1], 1e-6) / 1e6, 2),
        "submitted_ms_python": round(1e3 * submitted, 3),
    }


def end_to_end(found, driver, mover, small):
    """Restores layer by layer with an event each; and the parts of a page in one launch against one each."""
    bench = Bench(driver, (4 if small else 1024) << 20, small)
    # 61 layers of latents of 576 elements of 2 bytes; 64 layers of K and V of 8 heads of 128 such elements.
    models = {
        "latents": ((5, 256) if small else (61, 8192), 1152, 1),
        "mha": ((5, 128) if small else (64, 8192), 2048, 2),
    }
    for name, (size, row, components) in models.items():
        found[name] = by_layer(driver, mover, small, *layer_plans(bench, *size, row, components))
    # Latents, draft K and V, indexer: the same rows as one launch, as one each, and the largest alone.
    parts = []
    for place, row in enumerate((1152, 256, 256, 132 * 64)):
        plan, size = bench.plan(row, True)
        part = plan.segment[0]
        part.items = min(part.items, (4 << 20 if not small else 1 << 16) // row)
        part.destination.base += place * (bench.size // 4)
        parts.append((part, part.items * row))
        assert size >= part.items * row
    packed = Plan(ABI, len(parts))
    for place, (part, _) in enumerate(parts):
        packed.segment[place] = part

    def alone(place):
        plan = Plan(ABI, 1)
        plan.segment[0] = parts[place][0]
        return plan

    singles = [alone(place) for place in range(len(parts))]
    total = sum(size for _, size in parts)

    def one_launch():
        mover.start(packed, 16, 4, 1024)

    def one_each():
        for plan in singles:
            mover.start(plan, 16, 4, 1024)

    found["packed"] = {
        "one_launch": bench.rate(one_launch, total),
        "one_each": bench.rate(one_each, total),
        "parts": [
            bench.rate(lambda p=p: mover.start(p, 16, 4, 1024), parts[i][1]) for i, p in enumerate(singles)
        ],
    }


def interference(found, driver, mover, small):
    """What a restore costs a product of matrices that runs beside it."""
    try:
        import torch
    except ModuleNotFoundError:
        found.update(result="left out", why="no torch")
        return
    if small or not torch.cuda.is_available():
        found.update(result="left out", why="torch has no device here")
        return
    bench = Bench(driver, 256 << 20, small)
    plan, _ = bench.plan(1152, True)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    compute = torch.cuda.Stream()

    def products(beside):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(compute):
            start.record()
            for _ in range(20):
                beside()
                a @ a
            end.record()
        end.synchronize()
        driver.wait()
        return start.elapsed_time(end) / 20

    products(lambda: None)
    found["alone_ms"] = products(lambda: None)
    for blocks in BLOCKS:
        found[f"register_{blocks}_ms"] = products(lambda blocks=blocks: mover.start(plan, 16, blocks, 1024))
    found["copy_engine_ms"] = products(lambda: driver.copy(bench.device, bench.host_address, bench.size))


def registration(found, driver, small):
    """Time to pin memory that was there already, with and without huge pages."""
    size = (8 if small else 4096) << 20
    for name, advice in (("small_pages", 15), ("huge_pages", 14)):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
        whole = np.frombuffer(memory, np.uint8)
        address = c.c_void_p(whole.ctypes.data)
        start = time.perf_counter()
        whole[:: mmap.PAGESIZE] = 1
        touched = time.perf_counter()
        driver.call("cuMemHostRegister_v2", address, c.c_size_t(size), 3)
        registered = time.perf_counter()
        driver.call("cuMemHostUnregister", address)
        found[name] = {
            "bytes": size,
            "touch_s": round(touched - start, 3),
            "register_s": round(registered - touched, 3),
        }
        del whole
        memory.close()
