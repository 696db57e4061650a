"""Every family of host pools in every layout: bytes out of one pool, into another one by another backend."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from harness import backends, pools
from hicache_store import UnsupportedError
from sglang.srt.mem_cache.device_pool_info import (
    MambaStateBufferInfo,
    MLABufferInfo,
    MLASplitBuffers,
    PageRowBufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

CASES = [(family, layout) for family, (_, layouts) in pools.FAMILIES.items() for layout in layouts]
# The engine gives sidecars to the calls of version 2 only.
ANCHORS = [case for case in CASES if case[0] not in pools.SIDECAR_NAMES]
# The older interface, and K and V rows of one width, where the engine makes flat pages of them.
FLAT = [case for case in CASES if case[0] in ("mha", "packed_draft", "mla")]


def anchor_of(family, layout):
    if family in pools.SIDECAR_NAMES:
        return pools.build("mla", "page_first" if layout == "page_head" else layout)
    return None


def same_everywhere_else(pool, slots, byte=0xA5):
    """Whether nothing was written but the pages of these slots."""
    rest = [slot for slot in range(pools.PAGES) if slot not in slots]
    return all(set(page) == {byte} for page in pools.pages_of(pool, rest))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_bytes_come_back(rank, put, take, keys, slots, others, family, layout):
    written = pools.fill(pools.build(family, layout), 1)
    blank = pools.paint(pools.build(family, layout))
    name = pools.SIDECAR_NAMES.get(family, PoolName.KV)
    for pool, step in ((written, "put"), (blank, "take")):
        anchor = anchor_of(family, layout)
        backend = rank(anchor, {name: pool}) if anchor is not None else rank(pool)
        if step == "put":
            assert put(backend, name, pool, keys, slots)
        else:
            assert take(backend, name, pool, keys, others) == len(keys)
    assert pools.pages_of(blank, others) == pools.pages_of(written, slots)
    assert same_everywhere_else(blank, others)


@pytest.mark.parametrize(("family", "layout"), ANCHORS)
def test_pages_of_the_zero_copy_calls(rank, keys, slots, others, family, layout):
    written = pools.fill(pools.build(family, layout), 2)
    blank = pools.paint(pools.build(family, layout))
    assert rank(written).batch_set_v1(keys, pools.indices(written, slots)) == [True] * 6
    reader = rank(blank)
    assert reader.batch_exists(keys) == 6
    assert reader.batch_get_v1(keys, pools.indices(blank, others)) == [True] * 6
    assert pools.pages_of(blank, others) == pools.pages_of(written, slots)
    assert same_everywhere_else(blank, others)


@pytest.mark.parametrize(("family", "layout"), FLAT)
def test_flat_pages_are_the_same_pages(rank, keys, slots, others, family, layout):
    written = pools.fill(pools.build(family, layout), 3)
    older, newer = pools.paint(pools.build(family, layout)), pools.paint(pools.build(family, layout))
    assert rank(written).batch_set(keys, backends.flat_pages(written, slots)) is True
    reader = rank(newer)
    assert reader.batch_get_v1(keys, pools.indices(newer, others)) == [True] * 6
    for slot, page in zip(others, reader.batch_get(keys, backends.blank_pages(older, 6)), strict=True):
        older.set_from_flat_data_page(slot * older.page_size, page)
    assert pools.pages_of(newer, others) == pools.pages_of(older, others) == pools.pages_of(written, slots)


def test_single_calls_are_calls_of_one_page(rank, keys):
    pool = pools.fill(pools.build("mha", "page_first"), 4)
    backend = rank(pool)
    page, target = pool.get_data_page(0), pool.get_dummy_flat_data_page()
    assert backend.get(keys[0], target) is None
    assert backend.set(keys[0], page) is True
    assert backend.exists(keys[0]) is True
    assert backend.exists(keys[1]) is False
    assert backend.get(keys[0], target) is target
    assert torch.equal(target.view(torch.uint8), page.view(torch.uint8))
    assert torch.equal(backend.get(keys[0]).view(torch.uint8), page.view(torch.uint8))


# -- families that the common set does not build --------------------------------------------------------
def keys_only(layout, anchor):
    """Index keys without values (MiniMax)."""
    device = SimpleNamespace(
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=2,
        head_num=2,
        head_dim=8,
        layer_num=2,
        device="cpu",
        k_buffer=[torch.zeros(4, 2, 8, dtype=torch.bfloat16) for _ in range(2)],
    )
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKOnlyPoolHost(device, anchor, layout)


def states(side_states):
    """A Mamba pool with side states, and no temporal state."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, pools.PAGES, 0),
        conv=(torch.zeros(3, pools.PAGES, 6, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=tuple(
            torch.zeros(pools.PAGES, 3 + index, dtype=torch.float32) for index in range(side_states)
        ),
    )
    with host_memory_budget_scope(1 << 30):
        return MambaPoolHost(info, 1.0, 0, device_capacity=pools.PAGES, layout="page_first")


def split_latents(anchor):
    """Latent rows and index keys in buffers of their own, the latter of one layer only (NPU)."""
    pages, shape = anchor.page_num, (anchor.page_num + 1, pools.PAGE, 1)
    native = MLASplitBuffers(
        k=torch.zeros(2, *shape, 8, dtype=torch.bfloat16),
        v=torch.zeros(2, *shape, 4, dtype=torch.bfloat16),
        index_k=torch.zeros(1, *shape, 6, dtype=torch.bfloat16),
        index_scales=None,
        index_layer_indices=(0,),
        k_width=8,
        v_width=4,
        index_width=6,
    )
    info = MLABufferInfo(
        buffers=native,
        data_ptrs=None,
        layer_indices=(0, 1),
        device_layer_num=2,
        page_size=pools.PAGE,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        kv_cache_dim=12,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        return MLATokenToKVPoolHost(
            info,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=pools.PAGE,
            layout="page_first_kv_split",
            device_capacity_tokens=pages * pools.PAGE,
            start_layer=0,
            end_layer=2,
            target_layer_num=2,
        )


def nvfp4(layout):
    """An anchor of page rows that hold everything of a page, heads of this rank included (MiniMax)."""
    slab = torch.zeros(2, pools.PAGES, 80, dtype=torch.uint8)
    info = PageRowBufferInfo(
        slab=slab, rows=tuple(slab), row_bytes=80, page_size=pools.PAGE, num_pages=pools.PAGES
    )
    with host_memory_budget_scope(1 << 30):
        return MiniMaxM3Nvfp4MainKVPoolHost(
            info,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=pools.PAGE,
            layout=layout,
            device_capacity_tokens=pools.TOKENS,
            start_layer=0,
            end_layer=2,
        )


def buffers(pool):
    """Tensors `[pages, ...]` that a page of these pools is put together from."""
    if isinstance(pool, MambaPoolHost):
        held = pool.kv_buffer
    elif isinstance(pool, MiniMaxM3Nvfp4MainKVPoolHost | QSAIndexerPoolHost):
        held = [pool.kv_buffer.transpose(0, 1) if pool.layout == "layer_first" else pool.kv_buffer]
    elif isinstance(pool, MHATokenToKOnlyPoolHost):
        held = [pool.k_buffer.transpose(0, 1) if pool.layout == "layer_first" else pool.k_buffer]
        if pool.layout != "page_first_direct":
            held = [held[0].unflatten(0, (-1, pool.page_size))]
    else:
        held = [pool.k_buffer, pool.v_buffer, pool.index_k_buffer]
    return [tensor.view(torch.uint8) for tensor in held]


def fill(pool, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in buffers(pool):
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8))
    return pool


def pages_of(pool, slots):
    return [
        b"".join(tensor[slot].contiguous().numpy().tobytes() for tensor in buffers(pool)) for slot in slots
    ]


def qsa(layout, anchor):
    """Compressed index keys: a row of all groups of a page (Qwen)."""
    keys = [torch.zeros(4 * anchor.page_num, 2, 6, dtype=torch.bfloat16) for _ in range(2)]
    device = SimpleNamespace(qsa_compress_ratio=anchor.page_size // 2, qsa_compressed_k_buffer_pool=keys)
    with host_memory_budget_scope(1 << 30):
        pool = QSAIndexerPoolHost(device, anchor)
    assert pool.layout == layout
    return pool


MORE = {
    "keys, page_first": (PoolName.INDEXER, lambda anchor: keys_only("page_first", anchor)),
    "keys, page_first_direct": (PoolName.INDEXER, lambda anchor: keys_only("page_first_direct", anchor)),
    "keys, layer_first": (PoolName.INDEXER, lambda anchor: keys_only("layer_first", anchor)),
    "compressed index keys": (PoolName.INDEXER, lambda anchor: qsa("page_first", anchor)),
    "state without a temporal part": (PoolName.MAMBA, lambda _: states(0)),
    "side states": (PoolName.MAMBA, lambda _: states(3)),
    "more side states than components": (PoolName.MAMBA, lambda _: states(20)),
    "split latents": (PoolName.DRAFT, split_latents),
}


@pytest.mark.parametrize("case", MORE)
def test_more_families(rank, put, take, keys, slots, others, case):
    name, build = MORE[case]
    anchor = pools.build("mla", "page_first")
    written, blank = fill(build(anchor), 1), fill(build(anchor), 2)
    before = pages_of(blank, range(pools.PAGES))
    assert put(rank(anchor, {name: written}), name, written, keys, slots)
    assert take(rank(anchor, {name: blank}), name, blank, keys, others) == 6
    assert pages_of(blank, others) == pages_of(written, slots)
    rest = [slot for slot in range(pools.PAGES) if slot not in others]
    assert pages_of(blank, rest) == [before[slot] for slot in rest]


def test_an_anchor_of_split_latents(rank, keys, slots, others):
    """The engine makes no flat pages of it; all tensor-parallel ranks hold the same."""
    shape = pools.build("mla", "page_first")
    written, blank = fill(split_latents(shape), 1), fill(split_latents(shape), 2)
    with pytest.raises(UnsupportedError, match="interface_v1"):
        rank(written, extra={"interface_v1": None})
    facts = {"is_mla_model": True, "tp_size": 2}
    assert rank(written, tp_rank=0, **facts).batch_set_v1(keys, pools.indices(written, slots)) == [True] * 6
    reader = rank(blank, tp_rank=1, **facts)
    assert reader.batch_get_v1(keys, pools.indices(blank, others)) == [True] * 6
    assert pages_of(blank, others) == pages_of(written, slots)


@pytest.mark.parametrize("layout", pools.ALL_LAYOUTS)
def test_an_anchor_of_page_rows(rank, keys, slots, others, layout):
    written, blank = fill(nvfp4(layout), 1), fill(nvfp4("page_first"), 2)
    assert rank(written, tp_rank=0, tp_size=2).batch_set_v1(keys, pools.indices(written, slots)) == [True] * 6
    reader = rank(blank, tp_rank=0, tp_size=2)
    assert reader.batch_get_v1(keys, pools.indices(blank, others)) == [True] * 6
    assert pages_of(blank, others) == pages_of(written, slots)
    # Its heads are in the rows, and nothing tells which.
    assert rank(blank, tp_rank=1, tp_size=2).batch_exists(keys) == 0
    assert rank(blank).batch_exists(keys) == 0


@pytest.mark.parametrize("layout", pools.ALL_LAYOUTS)
def test_the_logical_anchor_leaves_it_to_its_sidecars(rank, put, keys, slots, layout):
    side = pools.fill(pools.build("v4_paged", layout), 5)
    backend = rank(pools.logical(layout), {PoolName.DEEPSEEK_V4_C4: side}, is_mla_model=True)
    indices = pools.indices(pools.logical(layout), slots)
    every = [backends.every(PoolName.DEEPSEEK_V4_C4)]
    assert backend.batch_exists_v2(keys, every).kv_hit_pages == 0
    assert backend.batch_set_v1(keys, indices) == backend.batch_get_v1(keys, indices) == [True] * 6
    assert backend.batch_set(keys, [torch.empty(0, dtype=torch.uint8)] * 6) is True
    assert [page.numel() for page in backend.batch_get(keys, [torch.empty(0)] * 6)] == [0] * 6
    assert put(backend, PoolName.DEEPSEEK_V4_C4, side, keys[:4], slots[:4])
    found = backend.batch_exists_v2(keys, every)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.DEEPSEEK_V4_C4: 4}


SIDES = {
    "indexer": PoolName.INDEXER,
    "v4_paged": PoolName.DEEPSEEK_V4_C4,
    "v4_state": PoolName.DEEPSEEK_V4_C4_STATE,
}


@pytest.mark.parametrize("layout", pools.ALL_LAYOUTS)
@pytest.mark.parametrize("family", SIDES)
def test_page_rows_of_one_layout_are_read_in_every_other(
    rank, put, take, keys, slots, others, family, layout
):
    name = SIDES[family]
    written = pools.fill(pools.build(family, layout), 7)
    assert put(rank(pools.build("mla", layout), {name: written}), name, written, keys, slots)
    for other in pools.ALL_LAYOUTS:
        blank = pools.paint(pools.build(family, other))
        assert take(rank(pools.build("mla", other), {name: blank}), name, blank, keys, others) == 6
        for before, after in zip(slots, others, strict=True):
            page = blank.get_data_page(after * pools.PAGE)
            assert torch.equal(page, written.get_data_page(before * pools.PAGE))


def test_packed_draft_bytes_are_no_pages_of_the_target(rank, put, take, keys, slots):
    both = pools.fill(pools.build("packed_draft", "page_first"), 6)
    assert put(rank(both), PoolName.KV, both, keys, slots)
    target = pools.build("mha", "page_first")
    longer = pools.build("mha", "page_first", dataclasses.replace(pools.TINY, layers=5))
    for pool in (target, longer):
        reader = rank(pool)
        assert reader.batch_exists(keys) == 0
        assert take(reader, PoolName.KV, pool, keys, slots) == 0
