"""Reads and writes of one pool's pages, between the store and the engine's memory."""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache_store import BackupReport, Region, RestoreReport, View
from hicache_store.sglang.guard import Trouble, all_none
from hicache_store.sglang.metrics import Counters, Operations
from hicache_store.sglang.serving import Pages, Served
from hicache_store.sglang.staging import StagedMemory

__all__ = ["NOBODY_TOLD", "Before", "Transfers"]

# Page numbers, int64 [pages].
_Slots: TypeAlias = npt.NDArray[np.int64]
_Memory: TypeAlias = Region | list[Region] | torch.Tensor
# Key of the page before the first one, and pages before it; None where nobody told.
Before: TypeAlias = tuple[str | None, int | None]
NOBODY_TOLD: Final[Before] = (None, None)

# Bytes of flat pages joined for one write of the older interface.
_JOINED_BYTES: Final = 32 << 20
_MISSES: Final = ("absent", "evicted", "late", "error", "foreign", "damaged")


class Transfers:
    """Carries out the engine's reads and writes, each within the deadline. Thread-safe."""

    def __init__(
        self, options: Mapping[str, Any], counters: Counters, operations: Operations, trouble: Trouble
    ) -> None:
        """Takes `deadline` and `bounce` of the options."""
        self._deadline, self._bounce = float(options["deadline"]), str(options["bounce"])
        self._counters, self._operations, self._trouble = counters, operations, trouble

    def get(self, served: Served, keys: list[str], host_indices: Any) -> list[bool]:
        """Restores pages into the pool: for each key whether it came.

        Nothing after the first absent page is read.
        """
        slots = _slots(served, keys, host_indices)
        if slots is None:
            return self.missing(served.binding.name, len(keys), "misuse")
        if served.pages is None or not keys:
            return [True] * len(keys)
        begun, name = time.monotonic(), served.pages.name
        there = served.pages.view.match(keys).pages
        flags, nbytes = self._restore(served.pages, keys[:there], slots[:there], begun) if there else ([], 0)
        self._note_read(name, sum(flags), nbytes, begun)
        self._note_absent(name, len(keys) - there)
        return flags + [False] * (len(keys) - there)

    def set(self, served: Served, keys: list[str], host_indices: Any, before: Before) -> list[bool]:
        """Stores pages of the pool: for each key whether it is stored now."""
        slots = _slots(served, keys, host_indices)
        if slots is None:
            return self.refused(served.binding.name, len(keys), "misuse")
        if served.pages is None or not keys:
            return [True] * len(keys)
        if len(once := dict(zip(keys, slots.tolist(), strict=True))) < len(keys):
            return self._set_once(served, keys, once, before)
        begun, pages, memory = time.monotonic(), served.pages, served.pages.body.memory
        if not isinstance(memory, StagedMemory):
            return self._backup(pages.view, pages.name, keys, memory, slots, before, begun)
        flags: list[bool] = []
        for part in _batches(len(keys), memory.batch_pages):
            joined = memory.gather(torch.from_numpy(slots[part]))
            flags += self._backup(pages.view, pages.name, keys[part], joined, _rows(joined), before, begun)
            if not all(flags):
                break
            before = _after(before, keys[part])
        return flags + [False] * (len(keys) - len(flags))

    def _set_once(self, served: Served, keys: list[str], once: dict[str, int], before: Before) -> list[bool]:
        """Stores pages of which some stand twice: the store takes each once."""
        page = served.binding.page_size
        tokens = torch.tensor(list(once.values())).repeat_interleave(page) * page
        offsets = torch.arange(page).repeat(len(once))
        stored = dict(zip(once, self.set(served, list(once), tokens + offsets, before), strict=True))
        return [stored[key] for key in keys]

    def get_flat(self, served: Served, keys: list[str]) -> list[torch.Tensor | None]:
        """Returns flat pages, rows of memory made for this call; None from the first missing one on."""
        pages = served.pages
        if pages is None or pages.flat is None or pages.body.flat_dtype is None:
            self.missing(served.binding.name, len(keys), "unserved")
            return all_none(keys)
        begun, rows = time.monotonic(), list[torch.Tensor | None]()
        there = pages.flat.match(keys).pages if keys else 0
        if there:
            scratch = torch.empty((there, pages.body.page_bytes), dtype=torch.uint8)
            report = self._read(pages.flat, pages.name, keys[:there], scratch, _rows(scratch), begun)
            self._note_read(pages.name, report.leading, report.bytes, begun)
            rows += scratch.view(pages.body.flat_dtype)[: report.leading].unbind(0)
        self._note_absent(pages.name, len(keys) - there)
        return rows + all_none(keys[len(rows) :])

    def set_flat(self, served: Served, keys: list[str], given: Any) -> bool:
        """Stores flat pages, a tensor for each key; returns whether all are stored."""
        name, page_bytes = served.binding.name, served.binding.page_bytes
        flat = None if served.pages is None else served.pages.flat
        fits = given is not None and len(given) == len(keys)
        if flat is None or not fits or any(page is None or page.nbytes != page_bytes for page in given):
            self.refused(name, len(keys), "misuse")
            return False
        begun, before = time.monotonic(), NOBODY_TOLD
        for part in _batches(len(keys), max(1, _JOINED_BYTES // page_bytes)):
            joined = torch.stack([page.reshape(-1).view(torch.uint8) for page in given[part]])
            if not all(self._backup(flat, name, keys[part], joined, _rows(joined), before, begun)):
                return False
            before = _after(before, keys[part])
        return True

    def missing(self, name: str, pages: int, reason: str) -> list[bool]:
        """Notes pages that are not even asked for; returns a miss for each."""
        self._counters.add("missing_pages", pages, name, reason)
        self._note_misuse(name, reason)
        return [False] * pages

    def refused(self, name: str, pages: int, reason: str) -> list[bool]:
        """Notes pages that are not even tried to be stored; returns False for each."""
        self._counters.add("refused_pages", pages, name, reason)
        self._note_misuse(name, reason)
        return [False] * pages

    def _restore(self, pages: Pages, keys: list[str], slots: _Slots, begun: float) -> tuple[list[bool], int]:
        memory, name = pages.body.memory, pages.name
        if not isinstance(memory, StagedMemory):
            report = self._read(pages.view, name, keys, memory, slots, begun)
            return report.flags(), report.bytes
        flags: list[bool] = []
        nbytes = 0
        for part in _batches(len(keys), memory.batch_pages):
            scratch = memory.scratch(len(keys[part]))
            report = self._read(pages.view, name, keys[part], scratch, _rows(scratch), begun)
            came = torch.tensor(report.flags())
            memory.scatter(scratch[came], torch.from_numpy(slots[part])[came])
            flags, nbytes = flags + report.flags(), nbytes + report.bytes
            if not report.all_restored:
                break
        return flags + [False] * (len(keys) - len(flags)), nbytes

    def _read(
        self, view: View, name: str, keys: list[str], memory: _Memory, slots: _Slots, begun: float
    ) -> RestoreReport:
        report = view.restore(keys, memory, slots, timeout=self._left(begun), bounce=self._bounce)
        if not report.all_restored:
            for reason in _MISSES:
                self._counters.add("missing_pages", report.count(reason), name, reason)
            gone = report.count("absent") + report.count("evicted")
            self._counters.add("promised_missing_pages", gone, name)
            self._counters.add("late_calls", int(report.count("late") > 0), "get")
        return report

    def _backup(
        self,
        view: View,
        name: str,
        keys: list[str],
        memory: _Memory,
        slots: _Slots,
        before: Before,
        begun: float,
    ) -> list[bool]:
        started = time.monotonic()
        left, bounce = self._left(begun), self._bounce
        report: BackupReport = view.backup(keys, memory, slots, *before, timeout=left, bounce=bounce)
        stored = report.count("stored")
        self._operations.wrote(stored, report.raw_bytes, time.monotonic() - started)
        self._counters.add("stored_pages", stored, name)
        self._counters.add("present_pages", report.count("present"), name)
        if report.leading < len(keys):
            for outcome in ("refused", "late", "error"):
                self._counters.add("refused_pages", report.count(outcome), name, outcome)
            self._counters.add("late_calls", int(report.count("late") > 0), "set")
            reason = report.reason
            self._trouble.once(f"refused {reason}", logging.WARNING, "pages are not stored: %s", reason)
        return report.flags()

    def _left(self, begun: float) -> float:
        """Seconds that a call that began then still has."""
        return self._deadline - (time.monotonic() - begun)

    def _note_read(self, name: str, pages: int, nbytes: int, begun: float) -> None:
        self._operations.read(pages, nbytes, time.monotonic() - begun)
        self._counters.add("restored_pages", pages, name)
        self._counters.add("restored_bytes", nbytes, name)

    def _note_absent(self, name: str, pages: int) -> None:
        """Notes the first absent page and those behind it, which nobody looked for."""
        if not pages:
            return
        self._counters.add("missing_pages", 1, name, "absent")
        self._counters.add("missing_pages", pages - 1, name, "after_absent")
        self._counters.add("promised_missing_pages", 1, name)

    def _note_misuse(self, name: str, reason: str) -> None:
        if reason == "misuse":
            self._trouble.once(
                f"misuse {name}",
                logging.ERROR,
                "a transfer of pool %r does not name whole pages, one for each key: answered as a miss",
                name,
            )


def _slots(served: Served, keys: list[str], host_indices: Any) -> _Slots | None:
    """The host page of each key; None where the indices are not whole pages, one for each key."""
    page = served.binding.page_size
    if host_indices is None or host_indices.numel() != len(keys) * page:
        return None
    tokens = host_indices.detach().cpu().numpy()
    first, last = tokens[::page], tokens[page - 1 :: page]
    # The store takes -1 for "no page here": from the engine it is a mistake.
    is_whole = (first >= 0).all() and (first % page == 0).all() and (last == first + (page - 1)).all()
    if not is_whole:
        return None
    slots: _Slots = first // page
    return slots


def _rows(pages: torch.Tensor) -> _Slots:
    """The slots of pages that lie one behind the other."""
    return np.arange(pages.shape[0], dtype=np.int64)


def _batches(pages: int, most: int) -> Iterator[slice]:
    return (slice(first, min(first + most, pages)) for first in range(0, pages, most))


def _after(before: Before, keys: list[str]) -> Before:
    return keys[-1], None if before[1] is None else before[1] + len(keys)
