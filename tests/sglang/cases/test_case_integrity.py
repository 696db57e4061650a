"""D01, D09, D12, D14, D15, D18, D33: side state, damage, conflicts and what is told of them."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from harness import backends, pools, workers
from hicache_store import UnsupportedError
from hicache_store.sglang import versions
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName

EXTRA = HiCacheStorageExtraInfo(prefix_keys=None)


def snippet(pool, slot: int) -> bytes:
    """Bytes of a page that stand together in any layout: the first key row of its first head."""
    return pools.page(pool, slot)[:16]


# -- D01 -----------------------------------------------------------------------------------------


def test_case_d01_every_pool_has_a_say(open_backend, kind, put):
    """Keys and values to 6; one state legal at 2 and 5, the other at 2 and 4: the answer is 2, not 4 or 5."""
    keys = backends.keys(6)
    kv, state, window = (
        pools.fill(pools.build(family, "page_first"), seed)
        for seed, family in enumerate(["mha", "mamba", "mha"])
    )
    backend = open_backend(kind, kv, {PoolName.MAMBA: state, PoolName.SWA: window})
    put(backend, PoolName.KV, kv, keys, range(6))
    put(backend, PoolName.MAMBA, state, [keys[1], keys[4]], range(2))
    put(backend, PoolName.SWA, window, [keys[1], keys[3]], range(2))
    asked = [backends.trailing(PoolName.MAMBA, 1), backends.trailing(PoolName.SWA, 1)]
    found = backend.batch_exists_v2(keys, asked, EXTRA)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 5, PoolName.SWA: 4}


def test_case_d01_a_page_that_goes_between_question_and_read(open_backend, put):
    keys = backends.keys(4)
    kv, index = (pools.fill(pools.build(family, "page_first"), 1) for family in ("mha", "indexer"))
    backend = open_backend(backends.OURS, kv, {PoolName.INDEXER: index})
    put(backend, PoolName.KV, kv, keys, range(4))
    put(backend, PoolName.INDEXER, index, keys, range(4))
    assert backend.batch_exists_v2(keys, [backends.every(PoolName.INDEXER)], EXTRA).kv_hit_pages == 4
    open_backend(backends.OURS, pools.build("mha", "page_first")).clear()
    pools.paint(index)
    got = backend.batch_get_v2([backends.transfer(PoolName.INDEXER, index, keys, range(4))])
    assert got == {PoolName.INDEXER: [False] * 4}
    assert all(set(page) == {0xA5} for page in pools.pages_of(index, range(4)))
    assert backend.stats()["counters"]["promised_missing_pages/indexer"] >= 1


# -- D09 -----------------------------------------------------------------------------------------


def test_case_d09_payload_without_its_scales_is_no_hit(open_backend, put):
    """The indexer of DeepSeek-V4 in 4 bits keeps its scales in a pool of their own."""
    payload, scales = PoolName.DEEPSEEK_V4_C4_INDEXER, PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE
    keys = backends.keys(4)
    side = {
        name: pools.fill(pools.v4_paged("page_first", name=name), seed)
        for seed, name in enumerate((payload, scales))
    }
    backend = open_backend(backends.OURS, pools.logical("page_first"), side, is_mla_model=True)
    put(backend, payload, side[payload], keys, range(4))
    put(backend, scales, side[scales], keys[:2], range(2))
    asked = [backends.every(payload), backends.every(scales)]
    assert backend.batch_exists_v2(keys, asked, EXTRA).restorable_prefix_pages == [1, 2]
    put(backend, scales, side[scales], keys, range(4))
    assert backend.batch_exists_v2(keys, asked, EXTRA).kv_hit_pages == 4
    held = {name: pools.pages_of(pool, range(4)) for name, pool in side.items()}
    for pool in side.values():
        pools.paint(pool)  # junk in the slots, scales included
    got = backend.batch_get_v2([backends.transfer(name, pool, keys, range(4)) for name, pool in side.items()])
    assert got == {payload: [True] * 4, scales: [True] * 4}
    assert {name: pools.pages_of(pool, range(4)) for name, pool in side.items()} == held


def test_case_d09_scales_inside_the_row_come_back(open_backend, put):
    """Index keys of sparse attention carry their scales behind them."""
    keys = backends.keys(4)
    kv, index = (pools.fill(pools.build(family, "layer_first"), 1) for family in ("mla", "indexer"))
    backend = open_backend(backends.OURS, kv, {PoolName.INDEXER: index}, is_mla_model=True)
    put(backend, PoolName.INDEXER, index, keys, range(4))
    held = pools.pages_of(index, range(4))
    pools.paint(index)
    got = backend.batch_get_v2([backends.transfer(PoolName.INDEXER, index, keys, range(4))])
    assert got == {PoolName.INDEXER: [True] * 4}
    assert pools.pages_of(index, range(4)) == held


@pytest.mark.parametrize("family", ["mha", "mla"])
def test_case_d09_four_bit_rows_without_a_scale_buffer_are_refused_at_start(
    open_backend, put, monkeypatch, family
):
    """The engine's own host pools refuse them too, at present; one of another release may not."""
    pool = pools.build(family, "page_first", dataclasses.replace(pools.TINY, dtype=torch.uint8))
    args = SimpleNamespace(kv_cache_dtype="fp4_e2m1", model_path=None, _model_config=None)
    monkeypatch.setattr(versions, "_server_args", lambda: args)
    with pytest.raises(UnsupportedError, match="block scales"):
        open_backend(backends.OURS, pool, is_mla_model=family == "mla")
    monkeypatch.setattr(
        versions, "_server_args", lambda: SimpleNamespace(**vars(args) | {"kv_cache_dtype": "fp8_e4m3"})
    )
    backend = open_backend(backends.OURS, pool, is_mla_model=family == "mla")
    put(backend, PoolName.KV, pools.fill(pool, 1), backends.keys(2), range(2))


# -- D12, D15 ------------------------------------------------------------------------------------


def test_case_d12_a_page_that_failed_once_is_a_miss_until_it_is_stored_again(
    open_backend, kind, put, damage, request
):
    if kind == backends.FILE:
        request.applymarker(pytest.mark.xfail(reason="HiCacheFile: changed bytes are handed out as a hit"))
    keys = backends.keys(4)
    full = pools.fill(pools.build("mha", "page_first"), 1)
    backend = open_backend(kind, full)
    put(backend, PoolName.KV, full, keys, range(4))
    damage(snippet(full, 2))
    into = pools.paint(pools.build("mha", "page_first"))
    reader = open_backend(kind, into)
    got = reader.batch_get_v2([backends.transfer(PoolName.KV, into, keys, range(4))])[PoolName.KV]
    assert got[:3] == [True, True, False]
    other = open_backend(kind, pools.build("mha", "page_first"))
    for _ in range(10):
        assert reader.batch_exists(keys) == 2
        assert other.batch_exists(keys) == 2
    put(backend, PoolName.KV, full, [keys[2]], [2])
    assert reader.batch_exists(keys) == 4
    got = reader.batch_get_v2([backends.transfer(PoolName.KV, into, keys, range(4))])
    assert got == {PoolName.KV: [True] * 4}
    assert pools.pages_of(into, range(4)) == pools.pages_of(full, range(4))


def test_case_d15_what_is_reported_is_what_came(open_backend, put, damage):
    """The second of four reads fails: one page came, one is told, and nothing behind it was touched."""
    keys = backends.keys(4)
    full = pools.fill(pools.build("mha", "page_first"), 1)
    put(open_backend(backends.OURS, full), PoolName.KV, full, keys, range(4))
    damage(snippet(full, 1))
    into = pools.paint(pools.build("mha", "page_first"))
    reader = open_backend(backends.OURS, into)
    got = reader.batch_get_v1(keys, pools.indices(into, range(4)), EXTRA)
    length = [*got, False].index(False)
    assert length == 1
    assert pools.page(into, 0) == pools.page(full, 0)
    counters = reader.stats()["counters"]
    assert counters["missing_pages/kv/damaged"] == 1
    untouched = range(4, pools.PAGES)
    assert all(set(page) == {0xA5} for page in pools.pages_of(into, untouched))


# -- D14 -----------------------------------------------------------------------------------------


def everyone(root: str, number: int, first: int, count: int) -> int:
    """One of several processes that all say they are rank 0 of 1: stores its keys, then reads them."""
    from pathlib import Path

    pool = pools.fill(pools.build("mha", "page_first"), 77)
    backend = backends.open_backend(backends.OURS, Path(root), pool, dp_rank=number)
    slots = list(range(20))
    for at in range(first, first + count):
        keys = backends.keys(20, f"{number} {at}")
        assert backend.batch_set_v1(keys, pools.indices(pool, slots)) == [True] * 20
    backend.close()
    return count


def check_all(root: str, numbers: int, upto: int) -> int:
    """Reads what all of them stored; pages that are exact."""
    from pathlib import Path

    full = pools.fill(pools.build("mha", "page_first"), 77)
    into = pools.paint(pools.build("mha", "page_first"))
    backend = backends.open_backend(backends.OURS, Path(root), into)
    exact = 0
    for number in range(numbers):
        for at in range(upto):
            keys = backends.keys(20, f"{number} {at}")
            assert backend.batch_get_v1(keys, pools.indices(into, range(20))) == [True] * 20
            assert pools.pages_of(into, range(20)) == pools.pages_of(full, range(20))
            exact += 20
    return exact


@pytest.mark.timeout(300)
def test_case_d14_many_processes_with_one_rank_number(tmp_path):
    """As under data parallelism: all are rank 0 of 1, none loses a page to another, also after a restart."""
    import concurrent.futures

    processes = 4
    for first in (0, 5):
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=workers.context()) as pool:
            done = [pool.submit(everyone, str(tmp_path), number, first, 5) for number in range(processes)]
            assert [one.result(120) for one in done] == [5] * processes
    assert workers.run(check_all, str(tmp_path), processes, 10) == processes * 10 * 20


def test_case_d14_two_writers_of_different_bytes_for_one_key(open_backend, put):
    keys = backends.keys(3)
    pages = [pools.fill(pools.build("mha", "page_first"), seed) for seed in (1, 2)]
    writers = [open_backend(backends.OURS, page, extra={"detect_conflicts": True}) for page in pages]
    for writer, page in zip(writers, pages, strict=True):
        put(writer, PoolName.KV, page, keys, range(3))
    counters = writers[1].stats()["store"]["counters"]
    assert sum(count for name, count in counters.items() if "conflict" in name) == 3
    into = pools.paint(pools.build("mha", "page_first"))
    reader = open_backend(backends.OURS, into)
    assert reader.batch_get_v1(keys, pools.indices(into, range(3))) == [True] * 3
    assert pools.pages_of(into, range(3)) == pools.pages_of(pages[0], range(3))


# -- D18, the part without a GPU -----------------------------------------------------------------


@pytest.mark.parametrize("bounce", ["never", "always"])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_case_d18_memory_is_the_engines_again_when_a_call_returns(open_backend, put, layout, bounce):
    """Nothing writes into its pages after a get, and nothing reads them after a set."""
    keys = backends.keys(20)
    full = pools.fill(pools.build("mha", layout), 1)
    held = pools.pages_of(full, range(20))
    writer = open_backend(backends.OURS, full)
    put(writer, PoolName.KV, full, keys, range(20))
    pools.fill(full, 2)  # at once
    into = pools.paint(pools.build("mha", layout))
    reader = open_backend(backends.OURS, into, extra={"bounce": bounce})
    for _ in range(20):
        assert reader.batch_get_v1(keys, pools.indices(into, range(20))) == [True] * 20
        assert pools.pages_of(into, range(20)) == held
        pools.paint(into)
        before = [tensor.clone() for tensor in pools.buffers(into)]
        time.sleep(0.005)
        for tensor, kept in zip(pools.buffers(into), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), kept.view(torch.uint8))


# -- D33 -----------------------------------------------------------------------------------------


def test_case_d33_one_of_each_outcome(open_backend, put, damage):
    full = pools.fill(pools.build("mha", "page_first"), 1)
    keys = backends.keys(4)
    writer = open_backend(backends.OURS, full)
    put(writer, PoolName.KV, full, keys[:3], range(3))
    damage(snippet(full, 2))
    into = pools.paint(pools.build("mha", "page_first"))
    reader = open_backend(backends.OURS, into)
    slots = pools.indices(into, [0])
    assert reader.batch_get_v1([keys[0]], slots) == [True]  # a hit
    assert reader.batch_get_v1([keys[3]], slots) == [False]  # never stored
    assert reader.batch_get_v1([keys[2]], slots) == [False]  # damaged
    assert reader.batch_get_v1([keys[1]], slots[:-1]) == [False]  # does not fit
    assert reader.batch_set_v1(["no key"], slots) == [False]  # refused
    told = reader.stats()["counters"]
    assert told["restored_pages/kv"] == 1
    assert told["missing_pages/kv/absent"] == 1
    assert told["missing_pages/kv/damaged"] == 1
    assert sum(count for name, count in told.items() if name.startswith("missing_pages/")) == 3
    assert (
        sum(count for name, count in told.items() if name.startswith(("refused_pages/", "faults/set/"))) == 1
    )
    for _ in range(100):
        assert reader.batch_get_v1([keys[0]], slots) == [True]
    again = reader.stats()["counters"]
    assert again.pop("restored_pages/kv") == 101
    for name in ("missing_pages/kv/absent", "missing_pages/kv/damaged"):
        assert again[name] == told[name]
