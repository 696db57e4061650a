"""Pages come back byte for byte, from every family of pools, in every layout, by every family of calls."""

from __future__ import annotations

import pytest
import torch
from harness import backends, pools
from sglang.srt.mem_cache.hicache_storage import PoolName

CASES = [(family, layout) for family, (_, layouts) in pools.FAMILIES.items() for layout in layouts]
ANCHORS = [case for case in CASES if case[0] not in pools.SIDECAR_NAMES]
FLAT = [case for case in ANCHORS if case[0] != "asymmetric"]

FROM, TO = [7, 2, 11, 3, 19], [4, 0, 15, 22, 9]


def stack(family, layout, seed):
    """An anchor with one sidecar where the family is a sidecar, and the pool and name under test."""
    if family not in pools.SIDECAR_NAMES:
        pool = pools.fill(pools.build(family, layout), seed)
        return pool, {}, pool, PoolName.KV
    anchor = pools.fill(pools.build("mla" if family == "indexer" else "mha", layout), seed + 1)
    pool = pools.fill(pools.build(family, layout), seed)
    return anchor, {pools.SIDECAR_NAMES[family]: pool}, pool, pools.SIDECAR_NAMES[family]


def both(open_backend, kind, family, layout):
    """A writer with random pages, and a reader of its own whose pool is painted."""
    source, given, full, name = stack(family, layout, seed=1)
    target, taken, blank, _ = stack(family, layout, seed=2)
    facts = {"is_mla_model": family in ("mla", "indexer")}
    writer = open_backend(kind, source, given, **facts)
    reader = open_backend(kind, target, taken, **facts)
    return writer, reader, full, pools.paint(blank), name


def assert_restored(full, blank):
    assert pools.pages_of(blank, TO) == pools.pages_of(full, FROM)
    untouched = [slot for slot in range(pools.PAGES) if slot not in TO]
    for page in pools.pages_of(blank, untouched):
        assert page == b"\xa5" * len(page)


@pytest.mark.parametrize(("family", "layout"), ANCHORS)
def test_zero_copy_calls(open_backend, kind, family, layout, request):
    if kind == backends.FILE:
        request.applymarker(
            pytest.mark.xfail(reason="HiCacheFile: the zero-copy calls do nothing, and answer None")
        )
    writer, reader, full, blank, _ = both(open_backend, kind, family, layout)
    keys = backends.keys(len(FROM))
    assert writer.batch_set_v1(keys, pools.indices(full, FROM)) == [True] * len(keys)
    assert reader.batch_exists(keys) == len(keys)
    assert reader.batch_get_v1(keys, pools.indices(blank, TO)) == [True] * len(keys)
    assert_restored(full, blank)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_calls_of_version_2(open_backend, kind, family, layout, request):
    if kind == backends.FILE and family == "asymmetric":
        request.applymarker(
            pytest.mark.xfail(reason="HiCacheFile: keys and values of different widths raise")
        )
    writer, reader, full, blank, name = both(open_backend, kind, family, layout)
    keys = backends.keys(len(FROM))
    assert writer.batch_set_v2([backends.transfer(name, full, keys, FROM)]) == {name: [True] * len(keys)}
    assert reader.batch_get_v2([backends.transfer(name, blank, keys, TO)]) == {name: [True] * len(keys)}
    assert_restored(full, blank)


@pytest.mark.parametrize(("family", "layout"), FLAT)
def test_older_calls(open_backend, kind, family, layout):
    writer, reader, full, blank, _ = both(open_backend, kind, family, layout)
    keys = backends.keys(len(FROM))
    assert writer.batch_set(keys, backends.flat_pages(full, FROM)) is True
    got = reader.batch_get(keys, backends.blank_pages(blank, len(keys)))
    assert len(got) == len(keys)
    for slot, page in zip(TO, got, strict=True):
        blank.set_from_flat_data_page(slot * blank.page_size, page)
    assert_restored(full, blank)


@pytest.mark.parametrize(("family", "layout"), FLAT)
@pytest.mark.parametrize("older_writes", [True, False], ids=["older-writes", "older-reads"])
def test_older_and_zero_copy_calls_share_pages(open_backend, family, layout, older_writes):
    """A server whose option `interface_v1` was forgotten, and later added, keeps its pages."""
    writer, reader, full, blank, _ = both(open_backend, backends.OURS, family, layout)
    keys = backends.keys(len(FROM))
    if older_writes:
        assert writer.batch_set(keys, backends.flat_pages(full, FROM)) is True
        assert reader.batch_get_v1(keys, pools.indices(blank, TO)) == [True] * len(keys)
    else:
        assert writer.batch_set_v1(keys, pools.indices(full, FROM)) == [True] * len(keys)
        got = reader.batch_get(keys, backends.blank_pages(blank, len(keys)))
        for slot, page in zip(TO, got, strict=True):
            blank.set_from_flat_data_page(slot * blank.page_size, page)
    assert_restored(full, blank)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_single_key_calls(open_backend, kind, layout):
    """The engine's controllers never use them; its base class builds on them."""
    writer, reader, full, blank, _ = both(open_backend, kind, "mha", layout)
    (key,) = backends.keys(1)
    assert not reader.exists(key)
    assert reader.get(key, blank.get_dummy_flat_data_page()) is None
    assert writer.set(key, full.get_data_page(FROM[0] * full.page_size, flat=True)) is True
    assert reader.exists(key)
    page = reader.get(key, blank.get_dummy_flat_data_page())
    blank.set_from_flat_data_page(TO[0] * blank.page_size, page)
    assert pools.page(blank, TO[0]) == pools.page(full, FROM[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8], ids=str)
def test_element_types(open_backend, kind, dtype):
    """fp8 pools reach a backend as bytes."""
    import dataclasses

    shape = dataclasses.replace(pools.TINY, dtype=dtype)
    full = pools.fill(pools.build("mha", "page_first", shape), 1)
    blank = pools.paint(pools.build("mha", "page_first", shape))
    writer, reader = open_backend(kind, full), open_backend(kind, blank)
    keys = backends.keys(len(FROM))
    assert writer.batch_set_v2([backends.transfer(PoolName.KV, full, keys, FROM)])[PoolName.KV] == [True] * 5
    assert reader.batch_get_v2([backends.transfer(PoolName.KV, blank, keys, TO)])[PoolName.KV] == [True] * 5
    assert_restored(full, blank)


def test_split_heads(open_backend):
    """Rank 0 of two with heads cut for four: the pages are those of rank 0, whoever cuts."""
    full = pools.fill(pools.build("mha", "page_head"), 1)
    blank = pools.paint(pools.build("mha", "page_head"))
    plain = {"tp_size": 2, "extra": {"total_kv_heads": 4}}
    writer = open_backend(backends.OURS, full, tp_lcm_size=4, should_split_heads=True, **plain)
    reader = open_backend(backends.OURS, blank, **plain)
    keys = backends.keys(len(FROM))
    assert writer.batch_set_v1(keys, pools.indices(full, FROM)) == [True] * len(keys)
    assert reader.batch_get_v1(keys, pools.indices(blank, TO)) == [True] * len(keys)
    assert_restored(full, blank)
