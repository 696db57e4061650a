"""D02, D03, D04, D13, D22, D32: who may read what, and who may remove it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import hicache_store
import pytest
import torch
from harness import backends, pools
from hicache_store import ConfigError
from sglang.srt.mem_cache.hicache_storage import PoolName

KEYS = backends.keys(4)
SLOTS = [3, 0, 7, 9]


def pool(layout="page_first", seed=None, **changes):
    made = pools.build("mha", layout, dataclasses.replace(pools.TINY, layers=2, **changes))
    return pools.paint(made) if seed is None else pools.fill(made, seed)


def wrong(kind, request, fault):
    if kind == backends.FILE:
        request.applymarker(pytest.mark.xfail(reason=f"HiCacheFile: {fault}"))


def restored(backend, into) -> int:
    """Pages of the leading run that a read gives."""
    asked = [backends.transfer(PoolName.KV, into, KEYS, SLOTS)]
    return [*backend.batch_get_v2(asked)[PoolName.KV], False].index(False)


def test_case_d02_another_dtype_of_the_same_size(open_backend, kind, put, request):
    wrong(kind, request, "keys do not hold the dtype")
    full = pool(seed=1)
    put(open_backend(kind, full), PoolName.KV, full, KEYS, SLOTS)
    other = pool(dtype=torch.float16)
    reader = open_backend(kind, other)
    assert reader.batch_exists(KEYS) == 0
    assert restored(reader, other) == 0
    assert set(pools.page(other, SLOTS[0])) == {0xA5}


def test_case_d02_bytes_and_halves(open_backend, put):
    """fp8 pools reach the backend as bytes: half as many."""
    full = pool(seed=1)
    writer = open_backend(backends.OURS, full)
    put(writer, PoolName.KV, full, KEYS, SLOTS)
    other = pool(dtype=torch.uint8)
    reader = open_backend(backends.OURS, other)
    assert reader.batch_exists(KEYS) == 0
    assert restored(reader, other) == 0
    again = pool()
    first = open_backend(backends.OURS, again)
    assert first.batch_exists(KEYS) == 4
    assert restored(first, again) == 4
    assert pools.pages_of(again, SLOTS) == pools.pages_of(full, SLOTS)


def test_case_d03_the_same_name_with_other_weights(open_backend, put):
    full = pool(seed=1)
    put(open_backend(backends.OURS, full), PoolName.KV, full, KEYS, SLOTS)
    other = pool()
    reader = open_backend(backends.OURS, other, extra={"revision": "r2"})
    assert reader.batch_exists(KEYS) == 0
    assert restored(reader, other) == 0
    again = pool()
    first = open_backend(backends.OURS, again, extra={"revision": "r1"})
    assert restored(first, again) == 4
    assert pools.pages_of(again, SLOTS) == pools.pages_of(full, SLOTS)


def test_case_d03_without_a_revision_the_server_does_not_start(open_backend):
    with pytest.raises(ConfigError, match="revision"):
        open_backend(backends.OURS, pool(), extra={"revision": None})


@pytest.mark.parametrize("family", ["mha", "mla"])
def test_case_d04_pipeline_stages(open_backend, kind, put, family):
    latent = {"is_mla_model": family == "mla"}
    stages = []
    for stage in range(2):
        shape = dataclasses.replace(pools.TINY, layers=2, start_layer=2 * stage)
        full = pools.fill(pools.build(family, "page_first", shape), stage)
        facts = {"pp_rank": stage, "pp_size": 2, **latent}
        if kind == backends.OURS:
            facts["extra"] = {"total_layers": 4}
        backend = open_backend(kind, full, **facts)
        put(backend, PoolName.KV, full, KEYS, SLOTS)
        stages.append((full, shape, facts))
    for full, shape, facts in stages:
        into = pools.paint(pools.build(family, "page_first", shape))
        assert restored(open_backend(kind, into, **facts), into) == 4
        assert pools.pages_of(into, SLOTS) == pools.pages_of(full, SLOTS)


@pytest.mark.parametrize("family", ["mha", "mla"])
def test_case_d04_another_split_gets_its_own_layers_or_nothing(open_backend, put, family):
    """Layers 0-1 and 2-3 were written; 0-2 and 3 are asked for, byte for byte."""
    facts = {"pp_size": 2, "is_mla_model": family == "mla", "extra": {"total_layers": 4}}
    by_layer: dict[int, list[bytes]] = {}
    for stage, (first, count) in enumerate([(0, 2), (2, 2)]):
        shape = dataclasses.replace(pools.TINY, layers=count, start_layer=first)
        full = pools.fill(pools.build(family, "page_first_direct", shape), stage)
        put(open_backend(backends.OURS, full, pp_rank=stage, **facts), PoolName.KV, full, KEYS, SLOTS)
        by_layer |= {first + own: layer_of(full, own) for own in range(count)}
    for stage, (first, count) in enumerate([(0, 3), (3, 1)]):
        shape = dataclasses.replace(pools.TINY, layers=count, start_layer=first)
        into = pools.paint(pools.build(family, "page_first_direct", shape))
        reader = open_backend(backends.OURS, into, pp_rank=stage, **facts)
        found = restored(reader, into)
        assert found == reader.batch_exists(KEYS)
        for own in range(count if found else 0):
            assert layer_of(into, own)[:found] == by_layer[first + own][:found]


def layer_of(held, layer: int) -> list[bytes]:
    """One layer's bytes of each page, in the layout that has layers outside tokens."""
    buffer = held.kv_buffer.view(torch.uint8)
    axis = buffer.dim() - 5
    return [buffer.select(axis, slot).select(axis, layer).numpy().tobytes() for slot in SLOTS]


@pytest.mark.parametrize("other", ["layer_first", "page_first_direct", "page_head"])
def test_case_d13_another_layout_of_the_same_size(open_backend, kind, put, other, request):
    wrong(kind, request, "keys do not hold the layout, and bytes come back in the order of the writer")
    full = pool(seed=1)
    put(open_backend(kind, full), PoolName.KV, full, KEYS, SLOTS)
    into = pool(other)
    reader = open_backend(kind, into)
    found = restored(reader, into)
    assert found == reader.batch_exists(KEYS)
    tokens = pools.indices(full, SLOTS[:found])
    for layer in range(2 if found else 0):
        for theirs, mine in zip((full.k_buffer, full.v_buffer), (into.k_buffer, into.v_buffer), strict=True):
            axis = {"layer_first": 0, "page_first_direct": 1, "page_head": 3}[other]
            rows = mine.select(axis, layer)
            if other == "page_head":
                rows = rows.transpose(1, 2)
            if other != "layer_first":
                rows = rows.flatten(0, 1)
            expected = theirs[:, layer][tokens].view(torch.int16)
            assert torch.equal(rows[tokens].view(torch.int16), expected)


HASHES = """
import hicache_store
keys = hicache_store.page_keys(list(range(64)), 4)
keys += hicache_store.page_keys(list(range(64)), 4, extra_key="lora", cache_salt="tenant")
print("\\n".join(key.hex() for key in keys))
"""


def test_case_d22_keys_do_not_depend_on_the_process():
    """And are the engine's own."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    answers = set()
    for seed in (None, "0", "random"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", HASHES], env=environment, capture_output=True, text=True, check=True
        )
        answers.add(done.stdout)
    (answer,) = answers
    assert answer.split()[:16] == get_storage_hash_str(list(range(64)), None, page_size=4)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_case_d22_keys_are_those_of_the_engine(page_size):
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = [(7919 * position) % 151_936 for position in range(4 * page_size)]
    tokens[-1] = (1 << 32) + 5  # a token that does not fit into 32 bits is hashed another way
    ours = [key.hex() for key in hicache_store.page_keys(tokens, page_size)]
    assert ours == get_storage_hash_str(tokens, None, page_size=page_size)
    half = get_storage_hash_str(tokens[2 * page_size :], ours[1], page_size=page_size)
    assert half == ours[2:]


def test_case_d32_clear_removes_this_deployments_pages_alone(open_backend, kind, put, tmp_path, request):
    wrong(kind, request, "clear removes every file in the folder")
    full = pool(seed=1)
    names = ["llama", "llama-2", "org/llama"]
    servers = {name: open_backend(kind, full, model_name=name) for name in names}
    for server in servers.values():
        put(server, PoolName.KV, full, KEYS, SLOTS)
    notes = tmp_path / "root" / "notes.txt"
    notes.write_text("of somebody else")
    onlooker = open_backend(kind, pool(), model_name="llama")
    assert onlooker.batch_exists(KEYS) == 4
    servers["llama"].clear()
    assert {name: server.batch_exists(KEYS) for name, server in servers.items()} == {
        "llama": 0,
        "llama-2": 4,
        "org/llama": 4,
    }
    assert notes.read_text() == "of somebody else"
    assert onlooker.batch_exists(KEYS) == 0
    into = pool()
    assert restored(open_backend(kind, into, model_name="llama-2"), into) == 4


def test_case_d32_clear_by_every_rank_is_clear_once(open_backend, put):
    """The engine calls it on all of them."""
    ranks = []
    for rank in range(2):
        full = pool(seed=rank)
        extra = {"total_layers": 2, "total_kv_heads": 4}
        ranks.append((full, open_backend(backends.OURS, full, extra=extra, tp_rank=rank, tp_size=2)))
        put(ranks[-1][1], PoolName.KV, full, KEYS, SLOTS)
    for _, backend in ranks:
        backend.clear()
    assert [backend.batch_exists(KEYS) for _, backend in ranks] == [0, 0]
    for full, backend in ranks:
        put(backend, PoolName.KV, full, KEYS, SLOTS)
    assert [backend.batch_exists(KEYS) for _, backend in ranks] == [4, 4]
