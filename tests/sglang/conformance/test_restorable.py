"""Which prefixes can be restored, against a model that looks at each page of each pool."""

from __future__ import annotations

import itertools

import pytest
from harness import backends, pools
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName

PAGES = 9
SIDECARS = (PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER)
number = itertools.count()


def legal(present: set[int], length: int, window: int | None) -> bool:
    """Whether a prefix of this length needs no page that the pool lacks; no window: it needs them all."""
    first = 0 if window is None else max(0, length - window)
    return all(page in present for page in range(first, length))


def model(kv: set[int], asked: dict[PoolName, tuple[set[int], int | None]]):
    """The final length, the hits by pool and the legal lengths, by looking at every length."""
    longest = next((page for page in range(PAGES) if page not in kv), PAGES)
    lengths = range(1, longest + 1)
    of_pool = {
        name: [length for length in lengths if legal(present, length, window)]
        for name, (present, window) in asked.items()
    }
    restorable = [length for length in lengths if all(length in own for own in of_pool.values())]
    hits = {PoolName.KV: longest} | {name: max(own, default=0) for name, own in of_pool.items()}
    return max(restorable, default=0), {name: hit for name, hit in hits.items() if hit}, restorable


@pytest.fixture
def stack():
    return pools.build("mha", "page_first"), {
        PoolName.SWA: pools.build("mha", "page_first"),
        PoolName.MAMBA: pools.build("mamba", "page_first"),
        PoolName.INDEXER: pools.build("indexer", "page_first"),
    }


pages = st.sets(st.integers(0, PAGES - 1))
# Mostly present: else the first gap of the first pool hides everything behind it.
dense = st.sets(st.integers(0, PAGES - 1), max_size=2).map(lambda gaps: set(range(PAGES)) - gaps)
some = pages | dense


@pytest.mark.timeout(300)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(data=st.data())
def test_restorable_prefixes(open_backend, kind, stack, data):
    anchor, sidecars = stack
    if not hasattr(open_backend, "kept"):
        open_backend.kept = open_backend(kind, anchor, sidecars)
    backend = open_backend.kept
    keys = backends.keys(PAGES, f"restorable {next(number)}")

    stored = {PoolName.KV: data.draw(some, "kv")}
    for name in SIDECARS:
        stored[name] = data.draw(some, str(name))
    windows = {
        PoolName.SWA: data.draw(st.integers(1, 4), "window"),
        PoolName.MAMBA: 1,
        PoolName.INDEXER: None,
    }
    chosen = data.draw(st.permutations(SIDECARS))[: data.draw(st.integers(1, 3), "pools")]

    for name, present in stored.items():
        slots = sorted(present)
        pool = anchor if name is PoolName.KV else sidecars[name]
        asked = backends.transfer(name, pool, [keys[page] for page in slots], slots)
        assert backend.batch_set_v2([asked]) == {name: [True] * len(slots)}

    transfers = [
        backends.every(name) if windows[name] is None else backends.trailing(name, windows[name])
        for name in chosen
    ]
    found = backend.batch_exists_v2(keys, transfers, HiCacheStorageExtraInfo(prefix_keys=None))
    final, hits, restorable = model(
        stored[PoolName.KV], {name: (stored[name], windows[name]) for name in chosen}
    )
    assert found.restorable_prefix_pages == restorable or (
        not restorable and not found.restorable_prefix_pages
    )
    assert found.kv_hit_pages == final
    if kind == backends.FILE and not restorable:
        return  # HiCacheFile stops at the first pool that leaves nothing, and so reports fewer pools
    assert found.extra_pool_hit_pages == hits


def test_placeholders_say_how_many_pages_not_which(open_backend, kind, stack):
    """The last two pages of a window pool, and the last state: lengths 4 and 5 lack one of them."""
    anchor, sidecars = stack
    backend = open_backend(kind, anchor, sidecars)
    keys = backends.keys(6)
    for name, present in (
        (PoolName.KV, range(6)),
        (PoolName.SWA, [1, 2, 4, 5]),
        (PoolName.MAMBA, [2, 3, 5]),
    ):
        pool = anchor if name is PoolName.KV else sidecars[name]
        backend.batch_set_v2([backends.transfer(name, pool, [keys[page] for page in present], list(present))])
    asked = [backends.trailing(PoolName.SWA, 2), backends.trailing(PoolName.MAMBA, 1)]
    found = backend.batch_exists_v2(keys, asked, HiCacheStorageExtraInfo(prefix_keys=None))
    assert found.restorable_prefix_pages == [3, 6]
    assert found.kv_hit_pages == 6
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 6, PoolName.MAMBA: 6}
    shorter = backend.batch_exists_v2(keys[:5], asked, HiCacheStorageExtraInfo(prefix_keys=None))
    assert shorter.restorable_prefix_pages == [3]
