"""The storage backend against SGLang's HiCacheFile, on the controller's own path, in one run on one machine.

Both backends get the same host pool and the same calls that SGLang's controller makes:
`_generic_page_set` and `_generic_page_get` for HiCacheFile, the zero-copy ones for ours, in batches of
128 pages, always verified here. Runs alternate, and each figure is the median of the rounds. Cold: the
files are written back and dropped from the page cache before the run. Warm: the third pass over the same
pages, after a second one that is not measured. Needs the environment of `make
sglang-env`; run from the repository's root:

    . scripts/env.sh sglang; python benches/python/bench_sglang.py [--small] [--rounds N] [--strict]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

# Before torch: the tests' own setting, one thread, would slow HiCacheFile's copies.
os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sglang"))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from harness import backends, pools
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import (
        STORAGE_BATCH_SIZE,
        HiCacheStorageExtraInfo,
        PoolName,
    )

GIB = 1 << 30
TOKENS = 64


@dataclass(frozen=True)
class Size:
    """A size of page, as a model of that shape has it, and how many pages a run moves."""

    name: str
    shape: pools.Shape
    pages: int


def size(name: str, layers: int, heads: int, dim: int, pages: int) -> Size:
    shape = pools.Shape(layers=layers, heads=heads, dim=dim, page=TOKENS, tokens=TOKENS * (2 * pages))
    return Size(name, shape, pages)


SIZES = [
    size("64 KiB", 2, 2, 64, 2048),
    size("1 MiB", 8, 4, 128, 512),
    size("4.5 MB", 36, 4, 128, 128),
    size("8 MiB", 32, 8, 128, 128),
]


@dataclass
class Run:
    """What one pass took."""

    seconds: float
    cpu: float
    extra_rss: int


@dataclass
class Runs:
    """All passes of one kind of work by one backend."""

    taken: list[Run] = field(default_factory=list)

    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.taken)

    def cpu(self) -> float:
        return statistics.median(run.cpu for run in self.taken)

    def extra_rss(self) -> int:
        return max(run.extra_rss for run in self.taken)


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def measured(work: Callable[[], None]) -> Run:
    """Time, processor time of all threads, and how far resident memory rose above where it was."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    cpu, started = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return Run(seconds, time.process_time() - cpu, max(0, status("VmHWM") - before))


def chain(pages: int, seed: object) -> list[str]:
    keys, digest = [], str(seed).encode()
    for _ in range(pages):
        digest = hashlib.sha256(digest).digest()
        keys.append(digest.hex())
    return keys


class Controller:
    """The controller's calls around one backend."""

    def __init__(self, kind: str, root: Path, pool, extra: dict | None = None):
        self.kind, self.root, self.pool = kind, root, pool
        given = {"capacity": "16GiB", **(extra or {})} if kind == backends.OURS else (extra or {})
        self.backend = backends.open_backend(kind, root, pool, extra=given)
        self.it = SimpleNamespace(
            storage_backend=self.backend, storage_host_pool=pool, page_size=pool.page_size
        )
        self.operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        if kind == backends.OURS:
            self.set_func, self.get_func = (
                HiCacheController._page_set_zero_copy,
                HiCacheController._page_get_zero_copy,
            )
        else:
            self.set_func, self.get_func = (
                HiCacheController._generic_page_set,
                HiCacheController._generic_page_get,
            )

    def batches(self, keys: list[str], first: int) -> Iterator[tuple[list[str], torch.Tensor, object]]:
        slots = torch.arange(first * TOKENS, (first + len(keys)) * TOKENS, dtype=torch.int64)
        for at in range(0, len(keys), STORAGE_BATCH_SIZE):
            some = keys[at : at + STORAGE_BATCH_SIZE]
            info = HiCacheStorageExtraInfo(prefix_keys=keys[:at])
            yield some, slots[at * TOKENS : (at + len(some)) * TOKENS], info

    def set(self, keys: list[str], first: int) -> None:
        for some, slots, info in self.batches(keys, first):
            assert self.set_func(self.it, some, slots, info)

    def get(self, keys: list[str], first: int) -> None:
        for some, slots, info in self.batches(keys, first):
            assert self.get_func(self.it, self.operation, some, slots, info) == len(some)

    def close(self) -> None:
        backends.close(self.backend)


def settle(root: Path) -> None:
    """Everything is written back, so that one run does not pay for the one before."""
    os.sync()
    del root


def forget(root: Path) -> None:
    """Written back, and dropped from the page cache."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def move(one: Size, folder: Path, rounds: int, io_mode: str) -> dict[tuple[str, str], Runs]:
    """Set, cold get and warm get of one size by both backends, in turn; ours with this I/O mode."""
    pool = pools.build("mha", "page_first", one.shape)
    generator = torch.Generator().manual_seed(1)
    flat = pool.kv_buffer.view(-1)
    for start in range(0, flat.numel(), 1 << 24):
        piece = flat[start : start + (1 << 24)]
        piece.copy_(torch.randn(piece.numel(), generator=generator))
    runs = {(kind, work): Runs() for kind in backends.KINDS for work in ("set", "cold", "warm")}
    for number in range(rounds):
        for kind in backends.KINDS if number % 2 else reversed(backends.KINDS):
            root = folder / f"{kind}-{number}"
            extra = {"io_mode": io_mode} if kind == backends.OURS else None
            controller = Controller(kind, root, pool, extra)
            keys = chain(one.pages, f"{one.name} {number}")
            settle(root)
            runs[kind, "set"].taken.append(measured(lambda c=controller, k=keys: c.set(k, 0)))
            for work in ("cold", "warm"):
                pool.kv_buffer[:, one.pages * TOKENS :].zero_()
                if work == "cold":
                    forget(root)
                else:
                    controller.get(keys, one.pages)
                runs[kind, work].taken.append(measured(lambda c=controller, k=keys: c.get(k, one.pages)))
                halves = pool.kv_buffer[:, : 2 * one.pages * TOKENS].unflatten(1, (2, -1))
                assert torch.equal(halves[:, 0].view(torch.int16), halves[:, 1].view(torch.int16))
            controller.close()
            shutil.rmtree(root)
    return runs


def look_up(folder: Path, present: int, asked: int, rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of one `batch_exists_v2` of a long prompt with many pages stored, and files on disk."""
    shape = pools.Shape(layers=1, heads=1, dim=1, page=1, tokens=STORAGE_BATCH_SIZE)
    pool = pools.fill(pools.build("mha", "page_first", shape), 1)
    slots = torch.arange(STORAGE_BATCH_SIZE, dtype=torch.int64)
    prompts = [chain(asked, f"prompt {number}") for number in range(present // asked)]
    files, seconds = {}, {}
    variants = {
        "ours": (backends.OURS, {}),
        "its v2 path": (backends.FILE, {}),
        "its metadata cache": (backends.FILE, {"enable_metadata_cache": True, "metadata_ttl": -1}),
    }
    opened = {}
    for name, (kind, extra) in variants.items():
        root = folder / f"look-{kind}"
        controller = opened[name] = Controller(kind, root, pool, extra)
        if kind not in files:
            for keys in prompts:
                for at in range(0, asked, STORAGE_BATCH_SIZE):
                    some = keys[at : at + STORAGE_BATCH_SIZE]
                    info = HiCacheStorageExtraInfo(prefix_keys=keys[:at])
                    assert controller.set_func(controller.it, some, slots[: len(some)], info)
            files[kind] = sum(1 for path in root.rglob("*") if path.is_file())
        seconds[name] = []
    for number in range(rounds):
        keys = prompts[number % len(prompts)]
        for name, controller in opened.items():
            started = time.perf_counter()
            found = controller.backend.batch_exists_v2(keys, [], HiCacheStorageExtraInfo())
            seconds[name].append(time.perf_counter() - started)
            assert found.kv_hit_pages == asked
            assert found.extra_pool_hit_pages[PoolName.KV] == asked
    for controller in opened.values():
        controller.close()
    return {name: statistics.median(taken) for name, taken in seconds.items()}, files


class Table:
    """Rows of what was measured, with the bar and whether it holds."""

    def __init__(self) -> None:
        self.missed = 0
        self.rows: list[tuple[str, ...]] = [("what", "HiCacheFile", "ours", "ratio", "bar", "verdict")]

    def add(
        self, what: str, theirs: str, ours: str, value: float, bar: float, *, least: bool, unit: str
    ) -> None:
        holds = value >= bar if least else value <= bar
        self.missed += not holds
        sign = ">=" if least else "<="
        self.rows.append(
            (
                what,
                theirs,
                ours,
                f"{value:.2f}{unit}",
                f"{sign} {bar:g}{unit}",
                "holds" if holds else "MISSED",
            )
        )

    def show(self) -> None:
        widths = [max(len(row[column]) for row in self.rows) for column in range(6)]
        for number, row in enumerate(self.rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("| " + " | ".join(cells) + " |")
            if number == 0:
                print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


SPEED_BARS = {
    "64 KiB": {"set": 4.0, "cold": 4.0},
    "1 MiB": {"set": 3.0, "cold": 2.2, "warm": 1.5},
    "4.5 MB": {"set": 4.0, "cold": 2.2, "warm": 1.5},
    "8 MiB": {"set": 4.0, "cold": 2.2, "warm": 1.5},
}


def main() -> int:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a sixteenth of the pages, to try the program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--root", type=Path, help="where to put the stores (default: a new folder in /var/tmp)"
    )
    parser.add_argument("--only", choices=[*SPEED_BARS, "exists"], help="one part alone")
    parser.add_argument("--io-mode", default="auto", help="of our store: auto, buffered or direct")
    parser.add_argument("--strict", action="store_true", help="exit status 1 when a bar is missed")
    given = parser.parse_args()
    scale = 16 if given.small else 1
    table = Table()
    worst_rss = 0
    with tempfile.TemporaryDirectory(dir=given.root or "/var/tmp") as name:  # noqa: S108
        folder = Path(name)
        for one in SIZES:
            if given.only not in (None, one.name):
                continue
            pages = one.pages // scale
            one = replace(one, pages=pages, shape=replace(one.shape, tokens=2 * pages * TOKENS))
            runs = move(one, folder, given.rounds, given.io_mode)
            volume = pages * TOKENS * one.shape.layers * one.shape.heads * one.shape.dim * 4
            for work in ("set", "cold", "warm"):
                theirs, ours = runs[backends.FILE, work], runs[backends.OURS, work]
                label = f"{one.name} {'set' if work == 'set' else 'get ' + work}"
                rates = [f"{volume / which.seconds() / 1e9:.2f} GB/s" for which in (theirs, ours)]
                bar = SPEED_BARS[one.name].get(work)
                ratio = theirs.seconds() / ours.seconds()
                if bar is not None:
                    table.add(label, *rates, ratio, bar, least=True, unit=" x")
                else:
                    table.rows.append((label, *rates, f"{ratio:.2f} x", "", ""))
                costs = [f"{which.cpu() / (volume / 1e9):.2f} s/GB" for which in (theirs, ours)]
                share = ours.cpu() / theirs.cpu()
                if work != "warm":
                    table.add(f"{label}, processor", *costs, share, 0.25, least=False, unit=" x")
                worst_rss = max(worst_rss, ours.extra_rss())
            gc.collect()
        if given.only != "exists":
            table.add(
                "extra resident memory, a batch", "", f"{worst_rss >> 20} MiB", worst_rss / (1 << 20), 64,
                least=False, unit=" MiB",
            )  # fmt: skip
        if given.only in (None, "exists"):
            present, asked = 100_000 // scale, 2_000
            seconds, files = look_up(folder, present, asked, 15)
            for other, bar in (("its v2 path", 15.0), ("its metadata cache", 6.0)):
                table.add(
                    f"batch_exists_v2 of {asked}, {present} present, {other}",
                    f"{seconds[other] * 1e3:.2f} ms", f"{seconds['ours'] * 1e3:.2f} ms",
                    seconds[other] / seconds["ours"], bar, least=True, unit=" x",
                )  # fmt: skip
            ours = files[backends.OURS]
            table.add(
                f"files for {present} pages", str(files[backends.FILE]), str(ours), ours, 1000,
                least=False, unit="",
            )  # fmt: skip
    table.show()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    bars = sum(1 for row in table.rows[1:] if row[5])
    print(f"RESULT: SGLang backend: {bars - table.missed} of {bars} bars hold (peak memory {peak} MiB)")
    return 1 if given.strict and table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
