"""`rank_consensus`: records what a function was called with and what it returned, where an audit is on.

Selectors say which part of an argument or result is recorded. They are paths, not code:

    "step"  "request.rid"  "pages[0]"  "lengths['kv']"  "len(tokens)"  "digest(tokens)"  "sorted(owners)"

The first name of a parameter selector is a parameter of the function, that of a result selector is `result`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from hicache_store.exceptions import ConfigError

if TYPE_CHECKING:
    from hicache_store.ranks.audit import RankAudit

__all__ = ["rank_consensus"]

P = ParamSpec("P")
R = TypeVar("R")

_active: RankAudit | None = None

_PATH: Final = re.compile(r"[A-Za-z_]\w*")
_PART: Final = re.compile(r"\.([A-Za-z_]\w*)|\[(-?\d+)\]|\[(?:'([^']*)'|\"([^\"]*)\")\]")
_CALL: Final = re.compile(r"(\w+)\((.*)\)")


def activate(audit: RankAudit | None) -> None:
    """Makes `audit` the one that functions decorated from now on report to; None for no audit."""
    global _active
    _active = audit


def active() -> RankAudit | None:
    """Returns the audit that functions decorated now report to."""
    return _active


def rank_consensus(
    params: Sequence[str] = (),
    result: Sequence[str] = (),
    *,
    name: str | None = None,
    stream: str | None = None,
    audit: RankAudit | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Has calls of a function recorded and compared between ranks.

    What is off costs nothing: without an audit the decorator returns the very function that it was given.

    Args:
        params: Selectors of arguments that are recorded before the call.
        result: Selectors of the result that are recorded after it. Of an exception the type is recorded.
        name: Name of the function in records, equal on all ranks; its qualified name where it is not given.
        stream: The audit's stream, where it is not the one of the calling thread.
        audit: The audit that is reported to; the active one where it is not given.

    Returns:
        The decorator.

    Raises:
        ConfigError: A selector that is no path, or names no parameter.
    """
    audit = audit or _active

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if audit is None:
            return function
        return _watched(function, audit, params, result, name or function.__qualname__, stream)

    return decorate


def _watched(
    function: Callable[P, R],
    audit: RankAudit,
    params: Sequence[str],
    result: Sequence[str],
    name: str,
    stream: str | None,
) -> Callable[P, R]:
    signature = inspect.signature(function)
    before = [_argument(selector, signature, name) for selector in params]
    after = [_result(selector, name) for selector in result]
    record = audit.record

    @functools.wraps(function)
    def watched(*args: P.args, **named: P.kwargs) -> R:
        record("called", name, [pick(args, named) for pick in before], stream)
        try:
            answer = function(*args, **named)
        except BaseException as error:
            record("returned", name, ["raised", type(error).__name__], stream)
            raise
        record("returned", name, [_follow(steps, answer) if steps else answer for steps in after], stream)
        return answer

    return cast("Callable[P, R]", watched)


# -- selectors -------------------------------------------------------------------------------------


def _argument(
    selector: str, signature: inspect.Signature, name: str
) -> Callable[[Sequence[object], Mapping[str, object]], object]:
    first, steps = _parse(selector)
    parameters = list(signature.parameters.values())
    place = next((place for place, known in enumerate(parameters) if known.name == first), None)
    if place is None:
        known = ", ".join(signature.parameters)
        raise ConfigError(
            f"selector {selector!r} of {name}: {first!r} is no parameter, expected one of {known}"
        )
    kind, default = parameters[place].kind, parameters[place].default
    is_named_only = kind is inspect.Parameter.KEYWORD_ONLY
    if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise ConfigError(f"selector {selector!r} of {name}: {first!r} stands for any number of arguments")
    missing = None if default is inspect.Parameter.empty else default

    def pick(args: Sequence[object], named: Mapping[str, object]) -> object:
        is_given = not is_named_only and len(args) > place
        value = args[place] if is_given else named.get(first, missing)
        return _follow(steps, value) if steps else value

    return pick


def _result(selector: str, name: str) -> Sequence[Callable[[Any], Any]]:
    first, steps = _parse(selector)
    if first != "result":
        raise ConfigError(f"selector {selector!r} of {name}: expected it to begin with result")
    return steps


def _parse(selector: str) -> tuple[str, Sequence[Callable[[Any], Any]]]:
    """The first name of a selector, and the steps that lead from there to the value."""
    call = _CALL.fullmatch(selector.strip())
    path = call.group(2).strip() if call else selector.strip()
    first = _PATH.match(path)
    if first is None or (call and call.group(1) not in _CALLS):
        raise ConfigError(f"selector {selector!r}: expected a path such as request.rid or len(tokens)")
    steps: list[Callable[[Any], Any]] = []
    at = first.end()
    while at < len(path):
        part = _PART.match(path, at)
        if part is None:
            raise ConfigError(f"selector {selector!r}: cannot read {path[at:]!r}")
        attribute, index, single, double = part.groups()
        if attribute is not None:
            steps.append(operator.attrgetter(attribute))
        else:
            key: Any = int(index) if index is not None else single if single is not None else double
            steps.append(operator.itemgetter(key))
        at = part.end()
    if call:
        steps.append(_CALLS[call.group(1)])

    return first.group(), steps


def _follow(steps: Sequence[Callable[[Any], Any]], value: object) -> object:
    try:
        for step in steps:
            value = step(value)
    except Exception as error:  # the engine goes on, whatever a selector meets
        return f"<{type(error).__name__}>"
    return value


def _digest(value: object) -> bytes:
    """Bytes that are equal where the values are, for arrays, tensors and long lists."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        value = tolist()
    if isinstance(value, (list, tuple)):
        try:
            return array("q", value).tobytes()
        except (TypeError, OverflowError):
            return repr(value).encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return repr(value).encode() if isinstance(value, (str, int, float, bool, type(None))) else b""


_CALLS: Final[dict[str, Callable[[Any], Any]]] = {"len": len, "digest": _digest, "sorted": sorted}
