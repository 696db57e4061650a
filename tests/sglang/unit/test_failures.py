"""Nothing raises into the engine: whatever happens is an answer of full length that says "missed"."""

from __future__ import annotations

import logging

import pytest
import torch
from harness import backends, pools
from hicache_store import ConfigError, UnsupportedError
from hicache_store.sglang import transfers
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer

KV = PoolName.KV


@pytest.fixture
def pool():
    return pools.fill(pools.build("mha", "page_first"), 1)


@pytest.fixture
def backend(rank, pool):
    return rank(pool)


def answers(backend, keys, indices, pages=None):
    """What every call of the engine says to these arguments."""
    one = PoolTransfer(name=KV, keys=keys, host_indices=indices)
    return {
        "exists": backend.batch_exists(keys),
        "exists_v2": backend.batch_exists_v2(keys, [backends.trailing(PoolName.SWA, 1)]).kv_hit_pages,
        "get_v1": backend.batch_get_v1(keys, indices),
        "set_v1": backend.batch_set_v1(keys, indices),
        "get_v2": backend.batch_get_v2([one]),
        "set_v2": backend.batch_set_v2([one]),
        "get": backend.batch_get(keys, pages),
        "set": backend.batch_set(keys, pages),
    }


def all_missed(count):
    return {
        "exists": 0,
        "exists_v2": 0,
        "get_v1": [False] * count,
        "set_v1": [False] * count,
        "get_v2": {KV: [False] * count},
        "set_v2": {KV: [False] * count},
        "get": [None] * count,
        "set": False,
    }


class Panic(BaseException):
    """What a Rust panic looks like: no Exception."""


@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("at store.rs"), MemoryError()])
def test_a_failure_inside_is_a_miss(monkeypatch, backend, pool, keys, slots, error, caplog):
    def broken(*_args, **_kwargs):
        raise error

    for name in ("get", "set", "get_flat", "set_flat"):
        monkeypatch.setattr(transfers.Transfers, name, broken)
    for name in ("find", "leading"):
        monkeypatch.setattr(f"hicache_store.sglang.backend.{name}", broken)
    pages = backends.blank_pages(pool, 6)
    assert answers(backend, keys, pools.indices(pool, slots), pages) == all_missed(6)
    assert answers(backend, keys, pools.indices(pool, slots), pages) == all_missed(6)
    counters = backend.stats()["counters"]
    assert [counters[f"faults/{call}/internal"] for call in ("exists", "get", "set")] == [4, 6, 6]
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 3  # once for each call, not for each failure
    assert all(record.name == "hicache_store.sglang" and record.exc_info for record in told)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_who_stops_the_process_is_not_stopped(monkeypatch, backend, keys, stop):
    def stopped(*_args):
        raise stop

    monkeypatch.setattr("hicache_store.sglang.backend.leading", stopped)
    with pytest.raises(stop):
        backend.batch_exists(keys)


def test_a_closed_backend_misses_everything(backend, pool, keys, slots):
    backend.close()
    pages = backends.blank_pages(pool, 6)
    assert answers(backend, keys, pools.indices(pool, slots), pages) == all_missed(6)
    assert backend.clear() is None
    assert backend.get_stats() is None
    assert backend.stats()["store"] is None
    backend.register_mem_host_pool_v2(pool, PoolName.SWA)
    backend.close()


@pytest.mark.parametrize("garbage", ["", "00", "z" * 64, "__placeholder__", None, 7, b"\x00"])
def test_garbage_keys_are_missed(backend, pool, keys, slots, garbage):
    indices = pools.indices(pool, slots)
    assert backend.batch_set_v1(keys, indices) == [True] * 6
    asked = [*keys[:2], garbage, *keys[3:]]
    missed = all_missed(6)
    told = answers(backend, asked, indices, backends.blank_pages(pool, 6))
    for call in ("get_v1", "set_v1", "get_v2", "set_v2", "get", "set"):
        assert told[call] == missed[call]
    assert told["exists"] in (0, 2)


@pytest.mark.parametrize("keys", [None, 7, {}, object()])
def test_no_keys_at_all(backend, pool, keys):
    assert backend.batch_exists(keys) == 0
    assert backend.batch_exists_v2(keys).kv_hit_pages == 0
    for answer in (
        backend.batch_get_v1(keys, None),
        backend.batch_set_v1(keys, None),
        backend.batch_get(keys),
    ):
        assert answer == []
    assert backend.batch_set(keys, None) is False
    assert backend.batch_get_v2(None) == backend.batch_set_v2([object()]) == {}
    assert backend.batch_get_v2([PoolTransfer(name=KV)]) == {KV: []}


def test_an_empty_batch_is_answered_emptily(backend):
    none = torch.empty(0, dtype=torch.int64)
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], none) == backend.batch_set_v1([], none) == backend.batch_get([]) == []
    assert backend.batch_set([], []) is True


def wrong(pool, slots):
    """Indices that do not name whole pages of the pool, one for each of six keys."""
    good = pools.indices(pool, slots)
    shifted = good + 1
    torn = good.clone()
    torn[pool.page_size - 1] += pool.page_size
    outside = pools.indices(pool, [*slots[:5], pools.PAGES + 9])
    before = good - pool.page_size * (min(slots) + 1)
    return {
        "none": None,
        "too few": good[:-1],
        "a page too few": good[: -pool.page_size],
        "a page too many": torch.cat([good, good[: pool.page_size]]),
        "not on a page": shifted,
        "a torn page": torn,
        "outside the pool": outside,
        "before the pool": before,
        "a slot twice": pools.indices(pool, [*slots[:5], slots[0]]),
    }


@pytest.mark.parametrize("what", list(wrong(pools.build("mha", "page_first"), range(6))))
def test_indices_that_do_not_fit_are_missed(rank, backend, pool, keys, slots, what):
    assert backend.batch_set_v1(keys, pools.indices(pool, slots)) == [True] * 6
    blank = pools.paint(pools.build("mha", "page_first"))
    reader = rank(blank)
    indices = wrong(blank, slots)[what]
    transfer = PoolTransfer(name=KV, keys=keys, host_indices=indices)
    assert reader.batch_get_v1(keys, indices) == [False] * 6
    assert reader.batch_get_v2([transfer]) == {KV: [False] * 6}
    other = backends.keys(6, "other")
    assert reader.batch_set_v1(other, indices) == [False] * 6
    assert reader.batch_exists(other) == 0
    assert {byte for page in pools.pages_of(blank, range(pools.PAGES)) for byte in page} == {0xA5}


def test_a_wrong_transfer_does_not_touch_the_others(backend, pool, keys, slots):
    good = backends.transfer(KV, pool, keys, slots)
    unknown = backends.transfer(PoolName.INDEXER, pool, keys, slots)
    assert backend.batch_set_v2([unknown, good, object()]) == {}
    assert backend.batch_set_v2([unknown, good]) == {PoolName.INDEXER: [False] * 6, KV: [True] * 6}
    assert backend.batch_get_v2([unknown, good]) == {PoolName.INDEXER: [False] * 6, KV: [True] * 6}


def test_two_transfers_of_one_pool_are_both_needed(backend, pool, keys, slots):
    first = backends.transfer(KV, pool, keys[:4], slots[:4])
    assert backend.batch_set_v2([first]) == {KV: [True] * 4}
    rest = backends.transfer(KV, pool, keys[3:], slots[3:])
    assert backend.batch_get_v2([first, rest]) == {KV: [True, False, False, True]}
    assert backend.batch_get_v2([rest, first]) == {KV: [True, False, False, True]}
    assert backend.batch_set_v2([first, rest]) == {KV: [True] * 4}


def test_pages_behind_an_absent_one_are_not_read(backend, rank, pool, keys, slots, others):
    indices = pools.indices(pool, slots)
    size = pool.page_size
    assert backend.batch_set_v1(keys[:2], indices[: 2 * size]) == [True] * 2
    assert backend.batch_set_v1(keys[3:], indices[3 * size :]) == [True] * 3
    blank = pools.paint(pools.build("mha", "page_first"))
    reader = rank(blank)
    assert reader.batch_get_v1(keys, pools.indices(blank, others)) == [True, True, False, False, False, False]
    assert pools.pages_of(blank, others[:2]) == pools.pages_of(pool, slots[:2])
    assert {byte for page in pools.pages_of(blank, others[2:]) for byte in page} == {0xA5}
    counters = reader.stats()["counters"]
    assert (counters["missing_pages/kv/absent"], counters["missing_pages/kv/after_absent"]) == (1, 3)
    assert counters["promised_missing_pages/kv"] == 1
    got = reader.batch_get(keys, backends.blank_pages(pool, 6))
    assert [page is not None for page in got] == [True, True, False, False, False, False]


@pytest.mark.parametrize("what", ["short", "long", "none", "too few"])
def test_flat_pages_that_do_not_fit_are_refused(backend, pool, keys, what):
    page = pool.get_data_page(0)
    pages = {
        "short": [page] * 5 + [page[:-1]],
        "long": [page] * 5 + [torch.cat([page, page])],
        "none": [page] * 5 + [None],
        "too few": [page] * 5,
    }[what]
    assert backend.batch_set(keys, pages) is False
    assert backend.stats()["counters"] == {"refused_pages/kv/misuse": 6}
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set(keys, None) is False
    assert backend.get(keys[0], page[:-1]) is None
    assert backend.batch_get(keys, [page[:-1]] * 6) == [None] * 6


# -- pools that cannot be served ------------------------------------------------------------------------
def test_an_anchor_that_cannot_be_stored_stops_the_engine(rank):
    page_unified = pools.build("mha", "layer_first")
    page_unified.layout = "page_unified"
    backend = rank(None)
    with pytest.raises(UnsupportedError, match="page_unified"):
        backend.register_mem_pool_host(page_unified)
    with pytest.raises(UnsupportedError, match="not known"):
        rank(None).register_mem_pool_host(object.__new__(type("StrangePoolHost", (), {"page_size": 4})))


def test_refused_classes_say_why(rank):
    for name, reason in (("MHATokenToKVPoolMXFP8Host", "scales"), ("PageInterleaveHostPool", "sharding")):
        cls = type(name, (), {"__module__": "sglang.srt.mem_cache.pool_host", "page_size": 4})
        with pytest.raises(UnsupportedError, match=reason):
            rank(None).register_mem_pool_host(cls())


def test_pages_of_a_shared_arena_are_refused(rank, pool):
    pool.stores_page_envelope = True
    with pytest.raises(UnsupportedError, match="arena"):
        rank(None).register_mem_pool_host(pool)


def test_a_pool_of_another_shape_than_its_class_is_refused(rank, pool):
    pool.kv_buffer = pool.kv_buffer[..., :4].contiguous()
    with pytest.raises(ValueError, match="shapes"):
        rank(None).register_mem_pool_host(pool)


def test_asymmetric_rows_need_the_newer_interface(rank):
    wide = pools.build("asymmetric", "page_first")
    with pytest.raises(UnsupportedError, match="interface_v1"):
        rank(None, extra={"interface_v1": None}).register_mem_pool_host(wide)


def test_a_sidecar_that_cannot_be_stored_is_a_miss(rank, pool, keys, slots, caplog):
    strange = pools.build("mha", "layer_first")
    strange.layout = "page_unified"
    backend = rank(pool, {PoolName.DRAFT: strange})
    assert backend.batch_set_v1(keys, pools.indices(pool, slots)) == [True] * 6
    found = backend.batch_exists_v2(keys, [backends.every(PoolName.DRAFT)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert found.extra_pool_hit_pages == {KV: 6}
    one = backends.transfer(PoolName.DRAFT, pool, keys, slots)
    assert backend.batch_get_v2([one]) == backend.batch_set_v2([one]) == {PoolName.DRAFT: [False] * 6}
    assert "page_unified" in backend.stats()["refused"]["draft"]
    assert [record.levelno for record in caplog.records if "'draft'" in record.message] == [logging.ERROR]
    assert backend.stats()["counters"]["lookups_limited/draft"] == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capcity": "1GiB"}, "capacity"),
        ({"deadline": 20}, "deadline"),
        ({"bounce": "maybe"}, "bounce"),
        ({"path": None}, "path"),
    ],
)
def test_bad_options_stop_the_engine(rank, options, named):
    with pytest.raises(ConfigError, match=named):
        rank(None, extra=options)


def test_what_the_engine_reads_itself_is_passed_over(rank, pool):
    loader = {"backend_name": "b", "module_path": "m", "class_name": "c", "allocator": "shm"}
    rank(pool, extra=loader | {"prefetch_threshold": 1, "hicache_storage_pass_prefix_keys": True})


def test_context_parallel_ranks_must_be_told_apart(rank, pool):
    with pytest.raises(ConfigError, match="cp_kind"):
        rank(pool, attn_cp_size=2)


def test_dealt_layers_are_no_replicas(rank):
    latent = pools.build("mla", "page_first")
    latent._layer_shard_enabled = True
    backend = rank(None, extra={"cp_kind": "replicated"}, attn_cp_size=2, is_mla_model=True)
    with pytest.raises(UnsupportedError, match="sharded"):
        backend.register_mem_pool_host(latent)


# -- warnings -------------------------------------------------------------------------------------------
def test_a_missing_interface_is_said_once_with_the_fix(rank, pool, caplog):
    rank(pool, extra={"interface_v1": None})
    (told,) = [record for record in caplog.records if "interface_v1" in record.message]
    assert '"interface_v1": true' in told.message
    assert told.levelno == logging.WARNING


def test_missing_prefix_keys_are_said_once_with_the_fix(backend, pool, keys, slots, caplog):
    indices = pools.indices(pool, slots)
    for prefix in ([], None, None):
        info = HiCacheStorageExtraInfo(prefix_keys=prefix)
        backend.batch_set_v1(keys, indices, info)
        backend.batch_get_v1(keys, indices, info)
    (told,) = [record for record in caplog.records if "prefix_keys" in record.message]
    assert '"hicache_storage_pass_prefix_keys": true' in told.message
    assert told.levelno == logging.WARNING


def test_prefix_keys_that_are_given_say_nothing(backend, pool, keys, slots, caplog):
    indices = pools.indices(pool, slots)
    half = len(indices) // 2
    assert backend.batch_set_v1(keys[:3], indices[:half], HiCacheStorageExtraInfo([])) == [True] * 3
    assert backend.batch_set_v1(keys[3:], indices[half:], HiCacheStorageExtraInfo(keys[:3])) == [True] * 3
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    # Nothing was guessed: the store was told what comes before.
    assert backend.stats()["store"]["counters"]["backup_unknown_parent_runs"] == 0


def test_another_capacity_is_said_with_the_command(rank, pool, caplog):
    path = rank(pool, extra={"capacity": 64 << 20}).stats()["store"]["path"]
    for same in (64 << 20, "64MiB", "65536 KiB", "0.0625GiB", None):
        rank(pool, extra={"capacity": same})
    assert not [record for record in caplog.records if "resize" in record.message]
    for other in (128 << 20, "128MiB", "64 MB"):
        rank(pool, extra={"capacity": other})
        told = [record.message for record in caplog.records if "resize" in record.message]
        assert told[-1].endswith(f"hicache-store resize {path} {other}")
    assert len(told) == 3


def test_another_release_is_said(monkeypatch, rank, pool, caplog):
    monkeypatch.setattr("hicache_store.sglang.versions.running", lambda: "9.9")
    rank(pool)
    assert [record.levelno for record in caplog.records if "9.9" in record.message] == [logging.WARNING]
