"""Ranks as real processes: forks of one process that has torch imported, so that each starts in no time.

Nothing here can hang: a world has a hard limit, after which its processes are killed and the test fails with
the ranks that had not come back.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

HERE = str(Path(__file__).parents[1])
# A process that starts looks at all others, also at those that another thread is closing.
_STARTING = threading.Lock()
SHAPES = ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2))


def context():
    """Processes that are forked from one that has torch imported."""
    paths = [HERE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["harness.preload"])
    return made


def warm() -> None:
    """Starts that process, which imports in the background."""
    context()
    multiprocessing.forkserver.ensure_running()


@functools.cache
def _imported() -> None:
    """Waits until that process has imported everything: the time is not that of the first world."""
    process = context().Process(target=os.getpid)
    with _STARTING:
        process.start()
        process.join()
        process.close()


@dataclass
class Answer:
    """What a rank came back with: a value, or an error."""

    value: Any = None
    error: str | None = None


@dataclass
class World:
    """Answers of the ranks that came back, and the seconds it took."""

    answers: dict[int, Answer] = field(default_factory=dict)
    seconds: float = 0.0

    def values(self) -> list[Any]:
        """What every rank returned; a rank that raised fails the test here."""
        for rank, answer in sorted(self.answers.items()):
            assert answer.error is None, f"rank {rank}: {answer.error}"
        return [answer.value for _, answer in sorted(self.answers.items())]


def _entry(
    function: Callable, rank: int, port: int, pipe: multiprocessing.connection.Connection, given: Mapping
) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=120))
    try:
        answer = Answer(value=function(rank, store, **given))
    except BaseException:
        answer = Answer(error=traceback.format_exc())
    pipe.send(answer)
    pipe.close()


def run(
    function: Callable, ranks: int, *, limit: float = 150.0, dead: tuple[int, ...] = (), **given
) -> World:
    """Calls `function(rank, store, **given)` on every rank; those in `dead` do not come back."""
    _imported()
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=120)
    )
    made, pipes = context(), {}
    processes = []
    world = World()
    began = time.monotonic()
    try:
        for rank in range(ranks):
            ours, theirs = made.Pipe(duplex=False)
            process = made.Process(target=_entry, args=(function, rank, store.port, theirs, given))
            with _STARTING:
                process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        expected = set(range(ranks)) - set(dead)
        while expected - set(world.answers):
            left = limit - (time.monotonic() - began)
            ready = multiprocessing.connection.wait(list(pipes), timeout=max(0.0, left))
            if not ready:
                late = sorted(expected - set(world.answers))
                for rank in late:  # where each of its threads stands, on standard error
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(processes[rank].pid, signal.SIGUSR1)
                time.sleep(0.5)
                raise AssertionError(f"ranks {late} did not come back in {limit} s")
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    world.answers[rank] = pipe.recv()
                except EOFError:
                    assert rank in dead, f"rank {rank} died"
                pipe.close()
        world.seconds = time.monotonic() - began
        return world
    finally:
        for process in processes:
            # Also one that is stopped dies of this. The fork server, its parent, may have buried it by now.
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
            with _STARTING:
                process.close()
        for pipe in pipes:
            pipe.close()
        del store
