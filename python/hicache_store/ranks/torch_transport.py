"""The transport over `torch.distributed`: groups of its own over gloo, or groups that the engine has.

Every wait has a deadline. What passes it, and what the group itself breaks off, ends as `Expired` with the
rank to blame, which a heartbeat beside the groups finds (`heartbeat`). After that the transport answers
nothing else: a group that missed one collective has lost its count. Close it, and make another with the next
`epoch`.

This file is the only one of the package, outside `hicache_store.sglang`, that imports torch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist

from hicache_store._hicache_store import Ask, Expired, Topology
from hicache_store.exceptions import ConfigError
from hicache_store.ranks.exceptions import RankStalledError, StateError
from hicache_store.ranks.heartbeat import Heartbeat
from hicache_store.ranks.transport import FRAME, ROOM, Answer, check_frame, frame_of, tag_of

__all__ = ["MESSAGES", "TorchTransport"]

MESSAGES: Final = ("messages", "replica")
"""Name of the group that carries messages from stage to stage."""

_TAG: Final = 0x7070
_OPS: Final = {"min": dist.ReduceOp.MIN, "and": dist.ReduceOp.BAND}
# A group gives up a little later than the one who waits, so that there is one verdict, not a race of two.
_SLACK: Final = 0.25


class _FailedError(Exception):
    """A wait has passed its deadline, or the group broke off; `rank` is to blame."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class _Work(Protocol):
    """A collective or message under way."""

    def wait(self, timeout: timedelta, /) -> bool: ...


class _Group(Protocol):
    """A process group, of the engine or made here."""

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions, /) -> _Work: ...
    def send(self, tensors: list[torch.Tensor], to: int, tag: int, /) -> _Work: ...
    def recv(self, tensors: list[torch.Tensor], of: int, tag: int, /) -> _Work: ...
    def abort(self) -> None: ...


class _Pending:
    """A reduction under way: its work, the vector that it reduces, and what does not fit into the frame."""

    def __init__(
        self, ask: Ask, tag: int, work: _Work | None, frame: torch.Tensor, values: Sequence[int], due: float
    ) -> None:
        self.ask, self.tag, self.work, self.frame, self.values, self.due = ask, tag, work, frame, values, due


class TorchTransport:
    """Carries asks out over process groups.

    Attributes:
        reductions: Reductions carried out so far.
        messages: Messages sent so far.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        store: dist.Store,
        *,
        lanes: Iterable[str] = ("scheduler",),
        groups: Mapping[tuple[str, str], _Group] | None = None,
        deadline: float = 60.0,
        meeting: float | None = None,
        epoch: int = 0,
        host: str | None = None,
    ) -> None:
        """Meets the other ranks; all of them call it, with the same arguments except for `rank`.

        Args:
            topology: Sizes of the axes.
            rank: This rank.
            store: Where the ranks meet; not used afterwards. A prefix store keeps it apart from others' keys.
            lanes: Threads that will ask: "scheduler", "query", "progress", "outcome", "audit".
            groups: Groups of the engine by lane and scope ("stage", "replica"), and `MESSAGES`, each over CPU
                tensors with its ranks in ascending order, used by nobody else at the same time. What is
                missing here is made and owned by the transport.
            deadline: Seconds after which any wait ends.
            meeting: Seconds that ranks may come apart here; a minute, or the deadline where that is longer.
            epoch: Rises with every new transport between the same ranks on the same store.
            host: Address of this machine that the others reach; found by its name where it is not given.

        Raises:
            RankStalledError: A rank did not come in time.
            ConfigError: An unknown lane, or a deadline of no length.
        """
        if not deadline > 0:
            raise ConfigError(f"a deadline of {deadline} seconds, expected more than 0")
        self.rank = rank
        self.reductions = self.messages = 0
        self._topology, self._deadline, self._epoch = topology, deadline, epoch
        self._meeting = max(60.0, deadline) if meeting is None else meeting
        self._members = topology.members(rank, "replica")
        self._stage = topology.members(rank, "stage")
        self._groups: dict[tuple[str, str], _Group] = dict(groups or {})
        self._owned: list[tuple[str, str]] = []
        self._started: dict[str, _Pending] = {}
        self._sent: dict[int, tuple[list[_Work], list[torch.Tensor]]] = {}
        self._failed: int | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        interval = min(1.0, max(0.02, deadline / 20))
        self._heartbeat = Heartbeat(
            rank, self._members, interval=interval, silent_after=deadline / 2, host=host or _own_address()
        )
        try:
            self._connect(dist.PrefixStore(f"hicache/{epoch}/{self._members[0]}", store), tuple(lanes))
        except BaseException:
            self.close()
            raise

    # -- beginning and end -----------------------------------------------------------------------

    def _connect(self, store: dist.Store, lanes: Sequence[str]) -> None:
        until = time.monotonic() + self._meeting
        store.set(f"at/{self.rank}", json.dumps(self._heartbeat.address))
        peers = {}
        for member in self._members:
            key = f"at/{member}"
            try:
                store.wait([key], timedelta(seconds=max(0.01, until - time.monotonic())))
            except RuntimeError as error:
                raise _stalled("connect", member) from error
            host, port = json.loads(store.get(key))
            peers[member] = (host, port)
        self._heartbeat.start(peers, f"{self._epoch}/{sorted(peers.items())}")
        if len(self._members) == 1:
            return
        self._heartbeat.wait_for_all(max(0.01, until - time.monotonic()))
        for name in self._needed(lanes):
            if name not in self._groups:
                self._groups[name] = self._make(store, *name)
                self._owned.append(name)

    def _needed(self, lanes: Sequence[str]) -> list[tuple[str, str]]:
        needed = []
        for lane in lanes:
            if lane not in ("scheduler", "query", "progress", "outcome", "audit"):
                raise ConfigError(f"lane {lane!r}: expected scheduler, query, progress, outcome or audit")
            needed.append((lane, "replica"))
            if lane == "scheduler":
                needed += [(lane, "stage")] if len(self._stage) > 1 else []
                needed += [MESSAGES] if self._topology.pp > 1 else []
        return needed

    def _make(self, store: dist.Store, lane: str, scope: str) -> _Group:
        ranks = self._members if scope == "replica" else self._stage
        prefixed = dist.PrefixStore(f"{lane}/{scope}/{ranks[0]}", store)
        timeout = timedelta(seconds=self._meeting)
        others = self._others(ranks)
        due = time.monotonic() + self._deadline
        self._heartbeat.waits("connect", others)
        try:
            group: _Group = dist.ProcessGroupGloo(prefixed, ranks.index(self.rank), len(ranks), timeout)
        except RuntimeError as error:
            culprit = self._culprit("connect", others, due)
            self._heartbeat.blames(culprit)
            raise _stalled("connect", culprit) from error
        self._heartbeat.waits("connect", [])
        return group

    def close(self) -> None:
        """Gives back groups of its own, the heartbeat's thread and its socket. Closing twice is fine.

        A reduction that was begun and never collected, or a message that its receiver does not come for,
        holds it up for one deadline at most.
        """
        self._is_closed = True
        self._deliver()
        self._heartbeat.stop()
        self._started.clear()
        for name in self._owned:
            self._groups[name].abort()
        self._owned.clear()
        self._groups.clear()
        self._sent.clear()

    def _deliver(self) -> None:
        """Waits for what was sent last: a peer that is behind has not asked for it yet."""
        due = time.monotonic() + self._deadline
        for works, _ in self._sent.values() if self._failed is None else ():
            for work in works:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=max(0.001, due - time.monotonic())))

    # -- asks ------------------------------------------------------------------------------------

    def answer(self, ask: Ask) -> Answer:
        """Carries an ask out.

        Raises:
            ShapeError: Ranks of the group ask for different things.
            StateError: The result of a reduction that was not begun, or a lane without a group.
        """
        if self._failed is not None:
            return Expired(self._failed)
        try:
            return self._CARRY[ask.kind](self, ask)
        except _FailedError as failed:
            return Expired(failed.rank)

    def finished(self, lane: str) -> None:
        """Notes that a machine came to its end."""
        self._heartbeat.progressed(lane)

    def _reduce(self, ask: Ask) -> Answer:
        return self._collected(self._begun(ask))

    def _start(self, ask: Ask) -> Answer:
        self._started[ask.lane] = self._begun(ask)
        return None

    def _collect(self, ask: Ask) -> Answer:
        pending = self._started.pop(ask.lane, None)
        if pending is None:
            raise StateError(f"{ask.operation}: no reduction was begun", {"operation": ask.operation})
        # It was begun a step ago: what counts is how long the others keep this rank waiting now.
        pending.due = time.monotonic() + self._deadline
        return self._collected(pending)

    def _begun(self, ask: Ask) -> _Pending:
        values = ask.values or []
        tag = tag_of(ask, self._epoch, len(values))
        frame = torch.tensor(frame_of(tag, values), dtype=torch.int64)
        due = time.monotonic() + self._deadline
        return _Pending(ask, tag, self._issue(ask, frame, due), frame, values, due)

    def _issue(self, ask: Ask, tensor: torch.Tensor, due: float) -> _Work | None:
        """Begins a reduction; None in a group of one."""
        ranks = self._ranks(ask)
        if len(ranks) == 1:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[ask.op or "min"]
        options.timeout = timedelta(seconds=self._deadline + _SLACK)
        group = self._group(ask, (ask.lane, ask.scope or "replica"))
        self.reductions += 1
        try:
            return group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self._fail(ask, self._others(ranks), due) from error

    def _collected(self, pending: _Pending) -> list[int]:
        ask, ranks = pending.ask, self._ranks(pending.ask)
        self._wait(ask, self._others(ranks), pending.work, pending.due)
        reduced: list[int] = pending.frame.tolist()
        check_frame(ask, pending.tag, reduced)
        answer = reduced[FRAME - ROOM :][: len(pending.values)]
        rest = list(pending.values[ROOM:])
        if rest:
            # All ranks have just read that their lengths are equal.
            more = torch.tensor(rest, dtype=torch.int64)
            due = time.monotonic() + self._deadline
            self._wait(ask, self._others(ranks), self._issue(ask, more, due), due)
            answer += more.tolist()
        return answer

    def _send(self, ask: Ask) -> Answer:
        peer, values = _peer(ask), ask.values or []
        group = self._group(ask, MESSAGES)
        due = time.monotonic() + self._deadline
        for work in self._sent.pop(peer, ([], []))[0]:
            self._wait(ask, [peer], work, due)
        first = torch.tensor(frame_of(len(values), values), dtype=torch.int64)
        rest = [torch.tensor(values[ROOM:], dtype=torch.int64)] if len(values) > ROOM else []
        try:
            works = [group.send([part], self._members.index(peer), _TAG) for part in (first, *rest)]
        except RuntimeError as error:
            raise self._fail(ask, [peer], due) from error
        self._sent[peer] = (works, [first, *rest])
        self.messages += 1
        return None

    def _receive(self, ask: Ask) -> Answer:
        peer, length = _peer(ask), ask.length or 0
        due = time.monotonic() + self._deadline
        frame = self._received(ask, peer, FRAME, due)
        check_frame(ask, length, frame)
        values = frame[FRAME - ROOM :][:length]
        return values + self._received(ask, peer, length - ROOM, due) if length > ROOM else values

    def _received(self, ask: Ask, peer: int, words: int, due: float) -> list[int]:
        part = torch.zeros(words, dtype=torch.int64)
        try:
            work = self._group(ask, MESSAGES).recv([part], self._members.index(peer), _TAG)
        except RuntimeError as error:
            raise self._fail(ask, [peer], due) from error
        self._wait(ask, [peer], work, due)
        received: list[int] = part.tolist()
        return received

    def _wait_local(self, ask: Ask) -> Answer:
        # What this rank waits for may come from its other threads, which wait for other ranks.
        due = time.monotonic() + self._deadline
        self._heartbeat.waits(ask.lane, [self.rank])
        if not ask.wait(self._deadline):
            raise self._fail(ask, self._waited_for_elsewhere(ask.lane), due)
        self._heartbeat.waits(ask.lane, [])
        return None

    _CARRY: Final[Mapping[str, Callable[[TorchTransport, Ask], Answer]]] = {
        "reduce": _reduce,
        "start": _start,
        "collect": _collect,
        "send": _send,
        "receive": _receive,
        "wait": _wait_local,
    }

    # -- waits and their end ---------------------------------------------------------------------

    def _wait(self, ask: Ask, missing: Sequence[int], work: _Work | None, due: float) -> None:
        if work is None:
            return
        self._heartbeat.waits(ask.lane, missing)
        try:
            work.wait(timedelta(seconds=max(0.001, due - time.monotonic())))
        except RuntimeError as error:
            raise self._fail(ask, missing, due) from error
        self._heartbeat.waits(ask.lane, [])

    def _fail(self, ask: Ask, missing: Sequence[int], due: float) -> _FailedError:
        """Finds who is to blame, tells the others, and ends this transport."""
        if self._is_closed:
            raise StateError(f"{ask.operation}: the transport was closed meanwhile")
        self._heartbeat.waits(ask.lane, missing)
        culprit = self._culprit(ask.lane, missing, due)
        with self._lock:
            if self._failed is None:
                self._failed = culprit
            blamed = self._failed
        self._heartbeat.blames(blamed)
        return _FailedError(blamed)

    def _culprit(self, lane: str, missing: Sequence[int], due: float) -> int:
        """The rank that a wait for `missing` comes down to."""
        culprit = self._heartbeat.culprit(lane, missing, certain=True)
        # A group breaks off at once when a process dies. Whose it was shows in the heartbeats a little later.
        while culprit is None and time.monotonic() < due:
            time.sleep(0.01)
            culprit = self._heartbeat.culprit(lane, missing, certain=True)
        if culprit is None:
            culprit = self._heartbeat.culprit(lane, missing)
        return missing[0] if culprit is None else culprit

    def _waited_for_elsewhere(self, lane: str) -> list[int]:
        self._heartbeat.waits(lane, [])
        return self._heartbeat.waiting() or [self.rank]

    def _ranks(self, ask: Ask) -> list[int]:
        return self._stage if ask.scope == "stage" else self._members

    def _others(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank]

    def _group(self, ask: Ask, name: tuple[str, str]) -> _Group:
        group = self._groups.get(name)
        if group is None:
            raise StateError(f"{ask.operation}: there is no group for {name[0]} over a {name[1]}")
        return group


def _peer(ask: Ask) -> int:
    return 0 if ask.peer is None else ask.peer


def _stalled(operation: str, rank: int) -> RankStalledError:
    message = f"{operation}: no word from rank {rank} in time"
    return RankStalledError(message, {"operation": operation, "rank": str(rank)})


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
