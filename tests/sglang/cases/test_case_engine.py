"""D06, D21, D23: ranks that disagree, host slots and failing disks, through the engine's own tree."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from harness import workers
from harness.tree import FULL, SWA, Rank, sequence
from harness.workers import Deployment, Step

TOKENS = list(range(1, 25))
ROUNDS = 240


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_case_d06_a_rank_that_knows_nothing_makes_all_miss_and_none_hang(tmp_path, shape):
    """Its store is closed under it: it contributes nothing, and all ranks agree on that, again and again."""
    deployment = Deployment(tmp_path / "root", **shape)
    steps = [
        Step("store", TOKENS, 1),
        Step("forget"),
        Step("lose", seed=1),
        Step("fetch", TOKENS),
        Step("fetch", TOKENS),
        Step("fetch", list(range(500, 524))),
    ]
    answers = workers.deploy(deployment, steps, tmp_path / "meeting")
    assert [[answer[0] for answer in rank[3:]] for rank in answers] == [[0, 0, 0]] * 2
    again = workers.deploy(deployment, [Step("fetch", TOKENS)], tmp_path / "meeting")
    assert [rank[0] for rank in again] == [(24, rank[0]) for rank in answers]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def segments(root: Path) -> Iterator[int]:
    """Descriptors of this process for segments under `root`."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has closed it
            file = entry.readlink()
            if file.is_relative_to(root) and file.suffix == ".seg":
                yield int(entry.name)


@contextlib.contextmanager
def unreadable(root: Path) -> Iterator[None]:
    """Reads of this process from the segments under `root` fail with EIO, by the kernel's own word.

    For a while their descriptors stand for this process's memory, which has nothing at such addresses.
    """
    held = list(segments(root))
    assert held
    kept = [os.dup(fd) for fd in held]
    nothing = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for fd in held:
            os.dup2(nothing, fd, inheritable=False)
        yield
    finally:
        for fd, real in zip(held, kept, strict=True):
            os.dup2(real, fd, inheritable=False)
            os.close(real)
        os.close(nothing)


@pytest.mark.parametrize("cfg", [FULL, SWA], ids=["full", "swa"])
def test_case_d21_no_host_slot_is_lost_by_requests_that_end_early(rank, cfg):
    """A third is cancelled, a third meets EIO, of the last a fourth raises in Python and the rest is fine.

    Smaller than the case: 240 rounds for 10,000, as one takes some 50 ms, most of it waiting for the
    engine's threads; and 2 MiB of growth for 1 MiB, as the log that pytest keeps is in it.
    """
    order = random.Random(21)
    one = rank(cfg)
    one.store(TOKENS, seed=1)
    one.forget()
    free = one.host_slots_free()
    memory = handles = 0

    def all_come_back():
        one.pump(lambda: not one.tree.ongoing_prefetch and one.host_slots_free() == free)

    for number in range(ROUNDS):
        if number == ROUNDS // 4:
            memory, handles = resident(), open_files()
        match number % 3:
            case 0:
                handle = one.ask(TOKENS)
                for _ in range(order.randrange(3)):
                    one.tree.check_hicache_events()
                one.tree.release_aborted_request(handle)
                all_come_back()
            case 1:
                # The store gives up what it could not read: each time a chain of its own.
                chain = sequence(6, start=100 * number + 100)
                one.store(chain, seed=number)
                one.forget()
                with unreadable(one.root):
                    assert one.prefetch(chain) == 0
                all_come_back()
            case 2 if number % 4 == 0:
                raising = mock.Mock(side_effect=RuntimeError("a test"))
                with mock.patch.object(one.backend, "batch_get_v1", raising):
                    assert one.prefetch(TOKENS) == 0
                raising.assert_called_once()
                all_come_back()
            case 2:
                assert one.prefetch(TOKENS) == 24
                one.forget()
    all_come_back()
    assert one.controller.prefetch_tokens_occupied == 0
    assert one.backend.stats()["counters"]["missing_pages/kv/error"] == 6 * ROUNDS // 3
    one.pump(lambda: open_files() <= handles)  # threads open some for a moment
    assert resident() - memory < 2 << 20


def fill_disk_and_heal(root: str) -> list:
    """In a process of its own: no file may grow for a while, as on a full disk; then it heals."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    told = []
    with Rank(Path(root), FULL) as one:
        free = one.host_slots_free()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            for number in range(4):
                one.store(sequence(5, start=1000 * number), seed=number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        told.append(one.controller.backup_thread.is_alive())
        told.append(one.backend.stats()["counters"].get("refused_pages/kv/refused", 0))
        held = [one.store(sequence(5, start=10_000 + 1000 * number), seed=number) for number in range(4)]
        one.forget()
        told.append(one.host_slots_free() == free)
        told.append([one.fetch(sequence(5, start=1000 * number)) for number in range(4)])
        for number, expected in enumerate(held):
            tokens = sequence(5, start=10_000 + 1000 * number)
            told.append((one.fetch(tokens), one.bytes_of(tokens) == expected))
    return told


@pytest.mark.timeout(300)
def test_case_d23_failing_writes_do_not_end_persistence(tmp_path):
    """Each page is refused and counted, the thread lives, slots come back, later writes are there."""
    alive, refused, back, lost, *kept = workers.run(fill_disk_and_heal, str(tmp_path / "root"))
    assert alive
    assert back
    assert lost == [0] * 4
    assert refused >= 4 * 5  # the engine may offer a page more than once
    assert kept == [(20, True)] * 4
