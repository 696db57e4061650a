"""Errors of ranks: a rank must not go on as it is, or can no longer know that it acts like the others.

What a rank meets in normal work (a miss, a full pool, a second completion) is a value, never an error.
`docs/ranks.md` has one row for each class.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

from hicache_store.exceptions import ConfigError, CorruptError, FormatVersionError, HiCacheStoreError

__all__ = [
    "AckOrderError",
    "OwnershipError",
    "RankDisagreementError",
    "RankError",
    "RankStalledError",
    "ShapeError",
    "StateError",
]


class RankError(HiCacheStoreError):
    """Every error that only ranks have."""

    kind: ClassVar[str] = "rank"

    @property
    def rank(self) -> int | None:
        """The rank that is missing or differs, where one is known."""
        rank = self.context.get("rank")
        return None if rank is None else int(rank)


class OwnershipError(RankError, ValueError):
    """A page, layer or copy that does not belong to the rank that asked."""

    kind: ClassVar[str] = "ownership"


class AckOrderError(RankError, RuntimeError):
    """An acknowledgement that is unknown, repeated or out of its order."""

    kind: ClassVar[str] = "ack_order"


class RankDisagreementError(RankError, RuntimeError):
    """Ranks differ in something that must be equal on all of them."""

    kind: ClassVar[str] = "rank_disagreement"


class RankStalledError(RankError, TimeoutError):
    """A deadline passed; `rank` names who did not come, `context["operation"]` what was waited for."""

    kind: ClassVar[str] = "rank_stalled"


class ShapeError(RankError, ValueError):
    """A message or vector of another operation, step or length."""

    kind: ClassVar[str] = "shape"


class StateError(RankError, RuntimeError):
    """A call that the state of the machine does not allow."""

    kind: ClassVar[str] = "state"


# What the extension raises, by name of the kind.
BY_KIND: Final[Mapping[str, type[HiCacheStoreError]]] = {
    error.kind: error
    for error in (
        ConfigError,
        OwnershipError,
        AckOrderError,
        RankDisagreementError,
        RankStalledError,
        ShapeError,
        StateError,
        CorruptError,
        FormatVersionError,
    )
}
