"""How a machine gets its answers: the loop that drives it, and what every transport does with a vector.

A machine says what it needs as an `Ask` and goes on with the answer. `drive` is the only loop. A transport
carries asks out; it decides nothing.

A reduction goes out as one frame of fixed length, whatever is asked: ranks that ask for different things, or
for vectors of different lengths, read so in the header of the frame instead of tearing the group down. What
does not fit into a frame follows in a second reduction, after all ranks have seen that they agree on its
length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar, cast

from hicache_store._hicache_store import Apply, Ask, Expired
from hicache_store.ranks.exceptions import ShapeError, StateError

__all__ = ["Answer", "Machine", "NullTransport", "Transport", "drive"]

Answer: TypeAlias = Sequence[int] | Expired | None
"""A vector, the news that a deadline passed, or None for what has merely been done."""

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Transport(Protocol):
    """Carries out what machines ask for. Each lane is used by one thread at a time."""

    def answer(self, ask: Ask) -> Answer:
        """Carries an ask out; comes back within the transport's deadline, with `Expired` where it passed.

        Raises:
            ShapeError: Ranks of the group ask for different things.
        """

    def finished(self, lane: str) -> None:
        """Notes that a machine came to its end: how far this rank is, for those who wait for it."""

    def close(self) -> None:
        """Gives back every group, thread and socket that the transport made. Closing twice is fine."""


class Machine(Protocol[T_co]):
    """What `drive` drives: a vote, a step of pp_sync, a poll, a round of the checker."""

    def begin(self) -> Ask | Apply | T_co:
        """Begins; what is needed first, or the result."""

    def resume(self, answer: Answer, /) -> Ask | Apply | T_co:
        """Goes on with an answer, or with None after an entry was applied."""


def drive(machine: Machine[T], transport: Transport, apply: Callable[[Apply], object] | None = None) -> T:
    """Drives a machine to its end.

    Args:
        machine: What is driven.
        transport: Who carries out what it asks for.
        apply: Called with each entry that pp_sync consumes, in order, before anything else happens. When it
            raises, the machine is left where it is and refuses work until `restart`.

    Returns:
        What the machine ends with.

    Raises:
        RankStalledError: A deadline passed; the error names the operation and the rank that did not come.
        RankDisagreementError: Ranks differ in what must be equal.
        ShapeError: Ranks ask for different things.
    """
    lane = None
    step = machine.begin()
    while True:
        if isinstance(step, Ask):
            lane = step.lane
            step = machine.resume(transport.answer(step))
        elif isinstance(step, Apply):
            if apply is not None:
                apply(step)
            step = machine.resume(None)
        else:
            if lane is not None:
                transport.finished(lane)
            return step


FRAME: Final = 64
"""Words of a frame. A step of pp_sync over two dozen logs fits."""
_HEADER: Final = 2
ROOM: Final = FRAME - _HEADER
"""Words of a vector that travel in the first frame."""


def tag_of(ask: Ask, epoch: int, length: int) -> int:
    """Returns a number of 62 bits that stands for what is asked; equal on ranks that ask for the same."""
    text = f"{epoch} {ask.lane} {ask.scope} {ask.op} {ask.name} {ask.number} {length}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def frame_of(tag: int, values: Sequence[int]) -> list[int]:
    """Returns the frame: the tag and its complement, which prove equality under minimum and bitwise and."""
    body = list(values[:ROOM])
    return [tag, ~tag, *body, *([0] * (ROOM - len(body)))]


def check_frame(ask: Ask, tag: int, frame: Sequence[int]) -> None:
    """Refuses a reduced frame to which ranks brought different tags.

    Raises:
        ShapeError: They did.
    """
    if frame[0] != tag or frame[1] != ~tag:
        raise ShapeError(
            f"{ask.operation}: ranks of the group ask for different operations or lengths",
            {"operation": ask.operation},
        )


class NullTransport:
    """A world of one rank: reductions are their own answers, and there is nobody to send to."""

    def __init__(self, deadline: float = 60.0) -> None:
        """Makes it; `deadline` bounds the wait for transfers of this rank, in seconds."""
        self._deadline = deadline
        self._started: dict[str, list[int]] = {}

    def answer(self, ask: Ask) -> Answer:
        """Carries an ask out.

        Raises:
            StateError: A message, or the result of a reduction that was not begun.
        """
        if ask.kind == "reduce":
            return ask.values
        if ask.kind == "start":
            self._started[ask.lane] = cast("list[int]", ask.values)
            return None
        if ask.kind == "wait":
            return None if ask.wait(self._deadline) else Expired(0)
        if ask.kind == "collect" and ask.lane in self._started:
            return self._started.pop(ask.lane)
        raise StateError(
            f"{ask.operation}: a {ask.kind} in a world of one rank", {"operation": ask.operation}
        )

    def finished(self, lane: str) -> None:
        """Nobody asks how far this rank is."""

    def close(self) -> None:
        """There is nothing to give back."""
