"""Between a failure and the engine: an answer that says "missed", a counter, and one line of log."""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from hicache_store import HiCacheStoreError, StoreClosedError
from hicache_store.sglang.metrics import Counters

__all__ = ["Trouble", "all_false", "all_none", "count", "never_raises", "no_transfer"]

_Answer = TypeVar("_Answer")
_log: Final = logging.getLogger("hicache_store.sglang")
# Different lines that are told once each; more are a flood.
_MOST_LINES: Final = 1000


class Trouble:
    """Tells each thing once, and counts failures. Thread-safe."""

    def __init__(self, counters: Counters) -> None:
        """Counts in `counters`."""
        self._counters = counters
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def once(
        self, what: str, level: int, text: str, *args: object, error: BaseException | None = None
    ) -> None:
        """Logs `text % args` unless `what` was told before."""
        with self._lock:
            if what in self._told or len(self._told) >= _MOST_LINES:
                return
            self._told.add(what)
        _log.log(level, text, *args, exc_info=error)

    def failed(self, call: str, error: BaseException) -> None:
        """Notes that a call of the engine ended in `error`, whatever it is."""
        kind = error.kind if isinstance(error, HiCacheStoreError) else "internal"
        self._counters.add("faults", 1, call, kind)
        if isinstance(error, StoreClosedError):  # a call that was under way when the engine let go
            return
        level = logging.ERROR if kind == "internal" else logging.WARNING
        text = f"{type(error).__name__}: {error}"
        self.once(f"{call} {text}", level, "%s failed, answered as a miss: %s", call, text, error=error)


class _HasTrouble(Protocol):
    _trouble: Trouble


def never_raises(
    call: str, missed: Callable[..., _Answer]
) -> Callable[[Callable[..., _Answer]], Callable[..., _Answer]]:
    """Makes a method answer `missed(*args, **kwargs)` where it fails; `call` is its name in counters."""

    def decorate(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
        @functools.wraps(method)
        def answer(self: _HasTrouble, *args: Any, **kwargs: Any) -> _Answer:
            try:
                return method(self, *args, **kwargs)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a Rust panic is no Exception
                self._trouble.failed(call, error)
                return missed(*args, **kwargs)

        return answer

    return decorate


def count(keys: Any) -> int:
    """Returns the number of keys; 0 where these are no keys at all."""
    try:
        return len(keys)
    except TypeError:
        return 0


def all_false(keys: Any = (), *_args: object, **_kwargs: object) -> list[bool]:
    """Returns a miss for each key."""
    return [False] * count(keys)


def all_none(keys: Any = (), *_args: object, **_kwargs: object) -> list[Any]:
    """Returns None for each key."""
    return [None] * count(keys)


def no_transfer(transfers: Any = (), *_args: object, **_kwargs: object) -> dict[str, list[bool]]:
    """Returns a miss for each key of each transfer."""
    try:
        return {transfer.name: all_false(transfer.keys) for transfer in transfers}
    except (TypeError, AttributeError):  # not transfers at all
        return {}
