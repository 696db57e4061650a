"""Heartbeats beside the engine's collectives: who waits for whom, and who is silent.

Every rank tells all others a few times a second, in one datagram, how far it is and whom it misses. It takes
one thread and one socket, never blocks, and does not depend on any rank being alive; a datagram that is lost
is made up for by the next. After a failure the last words stay: they say whom that rank found to blame, so
that those who fail later name the same rank instead of the first victim.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hicache_store._hicache_store import Watch
from hicache_store.ranks.exceptions import RankStalledError

__all__ = ["Heartbeat"]

_MAX_DATAGRAM: Final = 60_000
_LAST_WORDS: Final = 3


class Heartbeat:
    """The heartbeat of one rank. Start it once all addresses are known, stop it at the end."""

    def __init__(
        self, rank: int, members: Sequence[int], *, interval: float, silent_after: float, host: str
    ) -> None:
        """Opens the socket.

        Args:
            rank: This rank.
            members: All ranks, this one included.
            interval: Seconds between beats.
            silent_after: A rank that was not heard for so many seconds is silent.
            host: Address of this machine that the other ranks reach.
        """
        self.rank = rank
        self._others = [member for member in members if member != rank]
        self._interval = interval
        self._silent_after = silent_after
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self._token = ""
        self._peers: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._heard_of_all = threading.Condition(self._lock)
        self._missing: dict[str, list[int]] = {}
        self._progress: dict[str, int] = {}
        self._blamed: int | None = None
        self._beats: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, float] = {}
        self._listened = 0.0
        self._sent = 0
        self._ends = False
        self._thread: threading.Thread | None = None

    def start(self, peers: Mapping[int, tuple[str, int]], token: str) -> None:
        """Begins to tell and to listen; datagrams without the run's `token` are not heard."""
        self._peers = {rank: peers[rank] for rank in self._others}
        self._token = token
        self._thread = threading.Thread(target=self._run, name="hicache-heartbeat", daemon=True)
        self._thread.start()

    def wait_for_all(self, seconds: float) -> None:
        """Waits until every rank was heard.

        Raises:
            RankStalledError: One was not.
        """
        with self._heard_of_all:
            self._heard_of_all.wait_for(lambda: len(self._heard) == len(self._others), seconds)
            missing = [rank for rank in self._others if rank not in self._heard]
        if missing:
            raise RankStalledError(
                f"connect: no heartbeat of rank {missing[0]} in time",
                {"operation": "connect", "rank": str(missing[0])},
            )

    # -- what this rank says ---------------------------------------------------------------------

    def waits(self, lane: str, missing: Iterable[int]) -> None:
        """Says for whom the thread of a lane waits; for nobody: it works."""
        with self._lock:
            self._missing[lane] = list(missing)

    def waiting(self) -> list[int]:
        """Returns for whom any thread of this rank waits."""
        with self._lock:
            return sorted({rank for missing in self._missing.values() for rank in missing})

    def progressed(self, lane: str) -> None:
        """Says that the thread of a lane finished something that all ranks do equally often."""
        with self._lock:
            self._progress[lane] = self._progress.get(lane, 0) + 1

    def blames(self, culprit: int) -> None:
        """Says, at once and for good, that this rank ends because of another."""
        with self._lock:
            if self._blamed is None:
                self._blamed = culprit
        self._tell()

    # -- what the others say ---------------------------------------------------------------------

    def culprit(self, lane: str, missing: Sequence[int], *, certain: bool = False) -> int | None:
        """Returns the rank that a wait for `missing` comes down to.

        Args:
            lane: Which thread waits.
            missing: For whom.
            certain: Only a rank that is silent, or that another rank that has failed found to blame. Before
                the deadline has passed, one that works is no culprit.
        """
        watch = Watch()
        blamed, silent = set(), set()
        with self._lock:
            watch.beat(self.rank, self._progress.get(lane, 0), self._missing.get(lane, []))
            for rank in self._others:
                beat = self._beats.get(rank, {})
                failed = beat.get("blames")
                if failed is not None:
                    blamed.add(failed)
                told = [failed] if failed is not None else _members(beat.get("missing", {}).get(lane, "0"))
                watch.beat(rank, beat.get("progress", {}).get(lane, 0), told)
                is_last = failed is not None or beat.get("left", False)
                # What came since this rank last listened is not known: the silence may be its own.
                silence = self._listened - self._heard.get(rank, self._listened)
                if not is_last and silence > self._silent_after:
                    watch.silence(rank)
                    silent.add(rank)
                if beat.get("left", False) and failed is None:
                    silent.add(rank)
        # Those who have failed because of this rank know better than it does: it was asleep.
        found = self.rank if self.rank in blamed else watch.culprit(list(missing))
        return found if not certain or found in silent or found in blamed else None

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        next_beat = looked = time.monotonic()
        while not self._ends:
            now = time.monotonic()
            if now - looked > self._silent_after:
                # This process was stopped: the others were not silent, it was deaf.
                with self._lock:
                    self._heard = dict.fromkeys(self._heard, now)
            looked = now
            if now >= next_beat:
                self._tell()
                next_beat = now + self._interval
            if poll.poll(1000 * max(0.0, next_beat - now)):
                self._listen()
            with self._lock:
                self._listened = time.monotonic()

    def _tell(self, left: bool = False) -> None:
        with self._lock:
            self._sent += 1
            beat = {
                "token": self._token,
                "rank": self.rank,
                "number": self._sent,
                "progress": self._progress,
                "missing": {lane: _mask(ranks) for lane, ranks in self._missing.items()},
                "blames": self._blamed,
                "left": left,
            }
            datagram = json.dumps(beat).encode()
        for _ in range(_LAST_WORDS if left or self._blamed is not None else 1):
            for address in self._peers.values():
                # A full buffer, or a host that is gone: the next one counts.
                with contextlib.suppress(OSError):
                    self._socket.sendto(datagram, address)

    def _listen(self) -> None:
        while True:
            try:
                datagram = self._socket.recv(_MAX_DATAGRAM)
            except OSError:  # nothing more; or a peer's port is closed, which its silence will say
                return
            try:
                beat = json.loads(datagram)
                rank, number = int(beat["rank"]), int(beat["number"])
                known = beat["token"] == self._token and rank in self._peers
            except (ValueError, KeyError, TypeError):
                continue
            if not known:
                continue
            with self._heard_of_all:
                if number > self._beats.get(rank, {}).get("number", 0):
                    self._beats[rank] = beat
                self._heard[rank] = time.monotonic()
                self._heard_of_all.notify_all()

    def stop(self) -> None:
        """Says good-bye, ends the thread and closes the socket. Stopping twice is fine."""
        if self._ends:
            return
        self._ends = True
        if self._thread is not None:
            self._tell(left=True)
            with contextlib.suppress(OSError):
                self._socket.sendto(b"", self.address)  # wakes the thread
            self._thread.join()
        self._socket.close()


def _mask(ranks: Iterable[int]) -> str:
    return f"{sum(1 << rank for rank in set(ranks)):x}"


def _members(mask: str) -> list[int]:
    bits = int(mask, 16)
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
