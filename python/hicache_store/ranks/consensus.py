"""`rank_consensus`: records what a function was called with and what it returned, where an audit is on.

Selectors say which part of an argument or result is recorded. They are paths, not code:

    "step"  "request.rid"  "pages[0]"  "lengths['kv']"  "len(tokens)"  "digest(tokens)"  "sorted(owners)"

The first name of a parameter selector is a parameter of the function, that of a result selector is `result`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, ParamSpec, TypeAlias, TypeVar, cast

from hicache_store._hicache_store import AuditedFunction
from hicache_store.exceptions import ConfigError

if TYPE_CHECKING:
    from hicache_store.ranks.audit import RankAudit

__all__ = ["rank_consensus"]

P = ParamSpec("P")
R = TypeVar("R")

_Steps: TypeAlias = Sequence[tuple[Literal["attribute", "item"], str | int]]
_Call: TypeAlias = Literal["len", "digest", "sorted"]

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
    recorded = AuditedFunction(audit._records, name, before, after)
    called, returned, record, lost = recorded.called, recorded.returned, audit.record, audit._lost
    belongs = audit._belongs(stream)

    @functools.wraps(function)
    def watched(*args: P.args, **named: P.kwargs) -> R:
        try:
            called(belongs.place, audit._step, args, named)
        except Exception:
            lost(name)
        try:
            answer = function(*args, **named)
        except BaseException as error:
            record("returned", name, ["raised", type(error).__name__], stream)
            raise
        try:
            returned(belongs.place, audit._step, answer)
        except Exception:
            lost(name)
        return answer

    return cast("Callable[P, R]", watched)


# -- selectors -------------------------------------------------------------------------------------


def _argument(
    selector: str, signature: inspect.Signature, name: str
) -> tuple[int | None, str, object, _Steps, _Call | None]:
    """What `AuditedFunction` follows: place, name and default of a parameter, and the path from there."""
    first, steps, call = _parse(selector)
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
    return None if is_named_only else place, first, missing, steps, call


def _result(selector: str, name: str) -> tuple[_Steps, _Call | None]:
    first, steps, call = _parse(selector)
    if first != "result":
        raise ConfigError(f"selector {selector!r} of {name}: expected it to begin with result")
    return steps, call


def _parse(selector: str) -> tuple[str, _Steps, _Call | None]:
    """The first name of a selector, the steps that lead from there to the value, and what is asked of it."""
    match = _CALL.fullmatch(selector.strip())
    path = match.group(2).strip() if match else selector.strip()
    first = _PATH.match(path)
    call = _CALLS.get(match.group(1)) if match else None
    if first is None or (match and call is None):
        raise ConfigError(f"selector {selector!r}: expected a path such as request.rid or len(tokens)")
    steps: list[tuple[Literal["attribute", "item"], str | int]] = []
    at = first.end()
    while at < len(path):
        part = _PART.match(path, at)
        if part is None:
            raise ConfigError(f"selector {selector!r}: cannot read {path[at:]!r}")
        attribute, index, single, double = part.groups()
        if attribute is not None:
            steps.append(("attribute", attribute))
        else:
            steps.append(
                ("item", int(index) if index is not None else single if single is not None else double)
            )
        at = part.end()
    return first.group(), steps, call


_CALLS: Final[dict[str, _Call]] = {"len": "len", "digest": "digest", "sorted": "sorted"}
