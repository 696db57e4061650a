"""RankAudit, the rank consensus checker: finds the first decision in which ranks differ.

    audit = RankAudit(topology, rank, streams=("scheduler", "io"), log=folder, run=7, transport=transport)
    audit.activate()                     # functions decorated with rank_consensus from now on report to it
    ...
    audit.check()                        # raises where ranks have parted
    audit.close()

Records go to a log of this rank, which `hicache-store ranks diff` compares with the others' afterwards, or
are compared while the engine runs, on a thread of its own and over a group of its own, or both.
`docs/ranks.md` says what is compared.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from hicache_store._hicache_store import Ask, AuditRecords, Expired, StateDigest, Topology, Verdict
from hicache_store.exceptions import ConfigError
from hicache_store.ranks import consensus
from hicache_store.ranks.exceptions import RankDisagreementError, RankError, RankStalledError
from hicache_store.ranks.transport import Transport, drive

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RankAudit"]

_log: Final = logging.getLogger("hicache_store.ranks")

Kind = Literal["called", "returned", "state"]


class _Streams(threading.local):
    """The stream of each thread, by its place."""

    place = 0


class _NamedStream:
    """The stream of a function that names its own."""

    def __init__(self, audit: RankAudit, name: str) -> None:
        self._audit, self._name = audit, name

    @functools.cached_property
    def place(self) -> int:
        """Its place. Of an unknown one each record is lost, as one by `RankAudit.record` is."""
        return self._audit._place(self._name)


class RankAudit:
    """The checker of one rank. It never raises into the functions that it watches."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        *,
        streams: Sequence[str] = ("scheduler",),
        log: str | PathLike[str] | None = None,
        run: int = 0,
        transport: Transport | None = None,
        interval: float = 1.0,
        deadline: float = 60.0,
        on_verdict: Callable[[RankError], object] | None = None,
    ) -> None:
        """Starts the checker.

        Args:
            topology: Sizes of the axes.
            rank: This rank.
            streams: One for each thread that records, the same on all ranks. A thread belongs to the first
                one unless it says otherwise, see `of_thread`.
            log: Folder of the logs, where one is to be written: `rank-<rank>.audit` in it.
            run: A number that all logs of one run of the engine share.
            transport: Where records are to be compared live: one with the lane "audit", for nothing else.
            interval: Seconds between rounds, and after which records are in the log.
            deadline: A rank that records nothing more for so many seconds while others do is named.
            on_verdict: Called once, on the checker's thread, when ranks have parted or one is silent.

        Raises:
            ConfigError: No stream, neither log nor transport, or a rank outside of the topology.
            OSError: The log cannot be written.
        """
        if not streams:
            raise ConfigError("an audit of 0 streams")
        if log is None and transport is None:
            raise ConfigError("an audit needs a log, a transport, or both")
        self._streams = {name: place for place, name in enumerate(streams)}
        self._names = list(streams)
        self._records = AuditRecords(
            topology, rank, self._names, live=transport is not None, run=None if log is None else run
        )
        self._file = None
        if log is not None:
            folder = Path(log)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank}.audit").open("wb", buffering=0)
        self._transport, self._interval, self._deadline = transport, interval, deadline
        self._on_verdict = on_verdict
        self._step = 0
        self._thread_stream = _Streams()
        self._verdict: RankError | None = None
        self._ends = threading.Event()
        self._writing = threading.Lock()
        self._write()
        self._thread = threading.Thread(target=self._run, name="hicache-audit", daemon=True)
        self._thread.start()

    # -- records ---------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Says which step of the engine records belong to from now on."""
        self._step = number

    @contextlib.contextmanager
    def of_thread(self, stream: str) -> Iterator[None]:
        """Has what this thread records meanwhile in a stream.

        Raises:
            ConfigError: The audit has no such stream.
        """
        place = self._place(stream)
        before = self._thread_stream.place
        self._thread_stream.place = place
        try:
            yield
        finally:
            self._thread_stream.place = before

    def record(self, kind: Kind, name: str, fields: Iterable[Any], stream: str | None = None) -> None:
        """Records something; what it is must be equal on all ranks, and in this order.

        Args:
            kind: A call, its return, or a change of state.
            name: The function, or the part of the state.
            fields: None, bools, ints, text, bytes (as a digest), lists of these; of anything else the type.
            stream: The stream, where it is not the thread's.
        """
        try:
            place = self._thread_stream.place if stream is None else self._place(stream)
            self._records.record(place, self._step, kind, name, fields)
        except Exception:
            self._lost(name)

    def state(self, state: StateDigest, stream: str | None = None) -> None:
        """Records digests of locks, LRU order, free lists and bases."""
        place = self._thread_stream.place if stream is None else self._place(stream)
        self._records.record_state(place, self._step, state)

    def _lost(self, name: str) -> None:
        """Tells of a record that could not be made; called where the exception is handled."""
        _log.exception("a record of %s was lost", name)

    def _belongs(self, stream: str | None) -> _Streams | _NamedStream:
        """What has the place of a function's stream: that of the calling thread unless it names one."""
        return self._thread_stream if stream is None else _NamedStream(self, stream)

    def _place(self, stream: str) -> int:
        try:
            return self._streams[stream]
        except KeyError:
            raise ConfigError(f"stream {stream!r}: expected one of {', '.join(self._names)}") from None

    # -- verdicts --------------------------------------------------------------------------------

    @property
    def verdict(self) -> RankError | None:
        """What the checker found; None as long as all ranks agree."""
        return self._verdict

    def check(self) -> None:
        """Raises what the checker found.

        Raises:
            RankDisagreementError: Ranks have parted; the error has the first differing record of each.
            RankStalledError: A rank records nothing more, or does not come to the rounds.
        """
        if self._verdict is not None:
            raise self._verdict

    def activate(self) -> Self:
        """Has functions that are decorated from now on report to this audit."""
        consensus.activate(self)
        return self

    def close(self) -> None:
        """Compares what is left, ends the thread and closes the log. Closing twice is fine.

        The first rank that closes ends live comparison on all of them, after one more round.
        """
        if consensus.active() is self:
            consensus.activate(None)
        self._ends.set()
        self._thread.join()
        with self._writing:
            if self._file is not None:
                self._file.write(self._records.take_log(flush=True))
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        number, is_live = 0, self._transport is not None
        # When each stream last had news: records that all ranks turned out to share, or none that wait.
        news = [(0, time.monotonic()) for _ in self._names]
        while is_live or not self._ends.is_set():
            self._ends.wait(self._interval)
            self._write()
            if not is_live:
                continue
            number += 1
            try:
                is_live = self._goes_on(number)
                now = time.monotonic()
                self._records.bring(any(now - heard > self._deadline for _, heard in news))
                self._judge(drive(self._records, self._live()))
            except RankError as error:
                self._found(error)
            except Exception:
                _log.exception("the rank audit ends: round %d failed", number)
                is_live = False
            is_live = is_live and self._verdict is None
            now = time.monotonic()
            for place, (verified, waiting) in enumerate(self._records.progress):
                if waiting == 0 or verified != news[place][0]:
                    news[place] = (verified, now)

    def _live(self) -> Transport:
        assert self._transport is not None  # noqa: S101
        return self._transport

    def _goes_on(self, number: int) -> bool:
        """Whether every rank wants more rounds after this one."""
        ask = Ask.reduce(
            [0 if self._ends.is_set() else 1], name="whether the audit goes on", number=number, lane="audit"
        )
        answer = self._live().answer(ask)
        if isinstance(answer, Expired):
            raise RankStalledError(
                f"audit round {number}: no word from rank {answer.rank} in time",
                {"operation": f"audit round {number}", "rank": str(answer.rank)},
            )
        return bool(answer and answer[0])

    def _judge(self, verdict: Verdict) -> None:
        if verdict.kind == "equal" or verdict.stream is None:
            return
        stream = self._names[verdict.stream]
        if verdict.kind == "silent":
            message = f"stream {stream}: rank {verdict.rank} recorded nothing after record {verdict.index}"
            facts = {"stream": stream, "rank": str(verdict.rank), "operation": "audit"}
            self._found(RankStalledError(message, facts))
            return
        told = "; ".join(f"rank {rank}: {text}" for rank, text in verdict.records)
        message = f"stream {stream}: ranks differ from record {verdict.index} on: {told}"
        facts = {"stream": stream, "index": str(verdict.index)}
        self._found(
            RankDisagreementError(message, facts | {f"rank {r}": text for r, text in verdict.records})
        )

    def _found(self, error: RankError) -> None:
        self._verdict = error
        _log.error("%s", error)
        if self._on_verdict is not None:
            try:
                self._on_verdict(error)
            except Exception:
                _log.exception("on_verdict raised")

    def _write(self) -> None:
        with self._writing:
            if self._file is not None:
                try:
                    self._file.write(self._records.take_log(flush=True))
                except OSError:
                    _log.exception("the log of the rank audit ends here")
                    self._file.close()
                    self._file = None
