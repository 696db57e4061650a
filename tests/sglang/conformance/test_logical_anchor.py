"""DeepSeek-V4: the anchor pool has no bytes, its side pools decide; and the same from a fresh process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import backends, pools, workers
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName

CHAIN = 6
KEYS = backends.keys(CHAIN, "v4")
FROM, TO = [3, 9, 1, 0, 12, 5], [8, 2, 4, 10, 6, 11]
EXTRA = HiCacheStorageExtraInfo(prefix_keys=None)
PAGED, INDEXER, STATE = (
    PoolName.DEEPSEEK_V4_C4,
    PoolName.DEEPSEEK_V4_C4_INDEXER,
    PoolName.DEEPSEEK_V4_C4_STATE,
)


def stack(layout: str, seed: int | None = None):
    """The anchor, and the side pools that follow its slots or those of its window."""
    sidecars = {
        PAGED: pools.build("v4_paged", layout),
        INDEXER: pools.v4_paged(layout, name=INDEXER),
        STATE: pools.build("v4_state", layout),
    }
    for number, pool in enumerate(sidecars.values()):
        pools.paint(pool) if seed is None else pools.fill(pool, seed + number)
    return pools.logical(layout), sidecars


def transfers(sidecars, keys, slots, window):
    """All pages of the compressed pools, the last pages of the state."""
    return [
        backends.transfer(PAGED, sidecars[PAGED], keys, slots),
        backends.transfer(INDEXER, sidecars[INDEXER], keys, slots),
        backends.transfer(STATE, sidecars[STATE], keys[-window:], slots[-window:]),
    ]


def question(window):
    return [backends.every(PAGED), backends.every(INDEXER), backends.trailing(STATE, window)]


def read(root: str, layout: str) -> dict[str, list[bytes]]:
    """In a fresh process: what the store has for this request."""
    anchor, sidecars = stack(layout)
    backend = backends.open_backend(backends.OURS, Path(root), anchor, sidecars, is_mla_model=True)
    found = backend.batch_exists_v2(KEYS, question(2), EXTRA)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (CHAIN, [CHAIN])
    assert backend.batch_get_v1(KEYS, pools.indices(anchor, TO)) == [True] * CHAIN
    got = backend.batch_get_v2(transfers(sidecars, KEYS, TO, 2))
    assert got == {PAGED: [True] * CHAIN, INDEXER: [True] * CHAIN, STATE: [True] * 2}
    backend.close()
    return {
        str(PAGED): pools.pages_of(sidecars[PAGED], TO),
        str(INDEXER): pools.pages_of(sidecars[INDEXER], TO),
        str(STATE): pools.pages_of(sidecars[STATE], TO[-2:]),
    }


@pytest.mark.parametrize("layout", pools.ALL_LAYOUTS)
def test_a_fresh_process_has_the_bytes(open_backend, tmp_path, layout):
    anchor, sidecars = stack(layout, seed=1)
    backend = open_backend(backends.OURS, anchor, sidecars, is_mla_model=True)
    written = backend.batch_set_v2(transfers(sidecars, KEYS, FROM, 2))
    assert written == {PAGED: [True] * CHAIN, INDEXER: [True] * CHAIN, STATE: [True] * 2}
    assert backend.batch_set_v1(KEYS, pools.indices(anchor, FROM)) == [True] * CHAIN
    assert workers.run(read, str(tmp_path / "root"), layout) == {
        str(PAGED): pools.pages_of(sidecars[PAGED], FROM),
        str(INDEXER): pools.pages_of(sidecars[INDEXER], FROM),
        str(STATE): pools.pages_of(sidecars[STATE], FROM[-2:]),
    }


def test_side_pools_decide(open_backend):
    anchor, sidecars = stack("page_first", seed=1)
    backend = open_backend(backends.OURS, anchor, sidecars, is_mla_model=True)
    nothing = backend.batch_exists_v2(KEYS, question(1), EXTRA)
    assert nothing.kv_hit_pages == 0
    assert not nothing.restorable_prefix_pages
    backend.batch_set_v2([backends.transfer(PAGED, sidecars[PAGED], KEYS, FROM)])
    backend.batch_set_v2([backends.transfer(INDEXER, sidecars[INDEXER], KEYS[:4], FROM[:4])])
    backend.batch_set_v2([backends.transfer(STATE, sidecars[STATE], [KEYS[1], KEYS[3], KEYS[5]], FROM[:3])])
    found = backend.batch_exists_v2(KEYS, question(1), EXTRA)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: CHAIN, PAGED: CHAIN, INDEXER: 4, STATE: CHAIN}


def test_every_call_on_the_anchor_succeeds_and_stores_nothing(open_backend):
    anchor, sidecars = stack("page_first", seed=1)
    backend = open_backend(backends.OURS, anchor, sidecars, is_mla_model=True)
    slots = pools.indices(anchor, FROM)
    assert backend.batch_set_v1(KEYS, slots) == [True] * CHAIN
    assert backend.batch_get_v1(KEYS, slots) == [True] * CHAIN
    assert backend.batch_exists(KEYS) == CHAIN
    flat = [torch.empty(0, dtype=torch.uint8)] * CHAIN
    assert backend.batch_set(KEYS, flat) is True
    got = backend.batch_get(KEYS, flat)
    assert len(got) == CHAIN
    assert all(page is not None for page in got)
    on_anchor = [backends.transfer(PoolName.KV, anchor, KEYS, FROM)]
    assert backend.batch_set_v2(on_anchor) == {PoolName.KV: [True] * CHAIN}
    assert backend.batch_get_v2(on_anchor) == {PoolName.KV: [True] * CHAIN}
    assert backend.stats()["store"]["counters"].get("backup_stored_pages", 0) == 0
    assert backend.batch_set_v1(KEYS, slots[:-1]) == [False] * CHAIN
