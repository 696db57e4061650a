"""Look-ups: which lengths of a prefix can be restored in all pools that an operation needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache_store import HitPolicy, View
from hicache_store.sglang.guard import count
from hicache_store.sglang.serving import State
from hicache_store.sglang.versions import KV, PoolHitPolicy, pool_name

__all__ = ["Found", "find", "leading"]


@dataclass(frozen=True)
class Found:
    """What a look-up found, in pages from the first key on."""

    pages: int = 0
    """The longest length at which every pool can be restored."""
    hits: dict[str, int] = field(default_factory=dict)
    """Each pool's own longest length; pools with none are left out."""
    legal: list[int] = field(default_factory=list)
    """Every length at which all pools can be restored, shortest first."""
    limited_by: str | None = None
    """The pool that set the end, where there is one."""


@dataclass
class _Asked:
    """What the transfers of one operation ask for."""

    windows: dict[str, int] = field(default_factory=dict)
    """Trailing pages that a pool needs; 0 for every page."""
    groups: dict[str, HitPolicy] = field(default_factory=dict)
    """Pools whose verdict is told and limits nothing."""
    unserved: str | None = None
    """A pool that is needed and not served."""


def leading(state: State, keys: list[str]) -> Found:
    """Looks up `keys` in the anchor pool alone; leaves out `legal`, every length up to `pages`."""
    anchor = state.served.get(KV)
    if anchor is None or not keys:
        return Found(limited_by=KV)
    if anchor.pages is None:
        return Found(pages=len(keys))
    answer = anchor.pages.view.match(keys)
    return Found(pages=answer.pages, limited_by=KV if answer.pages < len(keys) else None)


def find(state: State, keys: list[str], transfers: Sequence[Any]) -> Found:
    """Looks up `keys` in the anchor pool and in the pools of `transfers`.

    Args:
        state: The pools that are served.
        keys: The chain's pages.
        transfers: The engine's `PoolTransfer` for each further pool: policy, and as many keys as a trailing
            window
            has pages. What the keys say does not matter.
    """
    anchor = state.served.get(KV)
    if anchor is None or not keys:
        return Found(limited_by=KV)
    asked = _read(state, transfers)
    # Of a logical anchor every page is there: the other pools decide.
    hits = {KV: len(keys)}
    policies: dict[str, HitPolicy | None] = {} if anchor.pages is None else {KV: HitPolicy.all_pages()}
    for name, window in asked.windows.items():
        policies[name] = HitPolicy.trailing_pages(window) if window else HitPolicy.all_pages()
    pages, legal, limit = len(keys), None, None
    if policies and state.lookups is not None:
        answer = state.lookups.match(keys, policies)
        pages, legal, limit = answer.pages, answer.legal, answer.limited_by
        hits |= _own_hits(state.lookups, keys, asked, answer.hits)
    for name, policy in asked.groups.items():
        if state.lookups is not None:
            hits[name] = state.lookups.match(keys, {name: policy}).hits[name]
    if asked.unserved is not None:
        pages, legal, limit = 0, [], asked.unserved
    return Found(
        pages=pages,
        hits={name: hit for name, hit in hits.items() if hit},
        legal=list(range(1, pages + 1)) if legal is None else legal,
        limited_by=None if limit is None else limit.partition(":")[0],
    )


def _own_hits(lookups: View, keys: list[str], asked: _Asked, hits: dict[str, int]) -> dict[str, int]:
    """Each pool's own longest length within the anchor's, whatever the other pools have."""
    longest = hits.get(KV, len(keys))
    own = {name: min(hit, longest) for name, hit in hits.items()}
    every = [own[name] for name, window in asked.windows.items() if not window]
    if min(every, default=longest) == longest:
        return own
    # A pool of which every page must be there ends before the anchor, and the store ended the windows with
    # it.
    for name, window in asked.windows.items():
        if window:
            policy = HitPolicy.trailing_pages(window)
            own[name] = lookups.match(keys[:longest], {name: policy}).hits[name] if longest else 0
    return own


def _read(state: State, transfers: Sequence[Any]) -> _Asked:
    asked = _Asked()
    for transfer in transfers:
        name, policy = pool_name(transfer.name), pool_name(transfer.hit_policy)
        served = state.served.get(name)
        if policy == PoolHitPolicy.BLOCK_GROUPS.value:
            if served is not None and served.pages is not None:
                asked.groups[name] = HitPolicy.block_groups(transfer.block_pages, transfer.group_pages)
        elif served is None:
            asked.unserved = name
        elif served.pages is not None and name != KV:
            every = policy == PoolHitPolicy.ALL_PAGES.value
            window = 0 if every else max(1, count(transfer.keys))
            # Of two transfers for one pool: every page if one needs that, else the wider window.
            known = asked.windows.get(name, window)
            asked.windows[name] = max(known, window) if known and window else 0
    return asked
