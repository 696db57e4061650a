"""Host pools of every family, built from the engine's own classes around small device buffers.

A family is built for one layout. `filled` puts different random bytes everywhere; `page` reads one
page's bytes by a way of its own, so that a test never compares a backend with itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

CPU = torch.device("cpu")
PAGE = 4
PAGES = 24
TOKENS = PAGE * PAGES


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the pools of one deployment have in common."""

    layers: int = 3
    heads: int = 2
    dim: int = 8
    page: int = PAGE
    tokens: int = TOKENS
    dtype: torch.dtype = torch.bfloat16
    start_layer: int = 0
    drafts: int = 0


TINY = Shape()


def _pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _mha_info(shape: Shape, layers: int, v_dim: int) -> MHABufferInfo:
    def rows(dim):
        return tuple(
            torch.zeros(shape.tokens + shape.page, shape.heads, dim, dtype=shape.dtype) for _ in range(layers)
        )

    k, v = rows(shape.dim), rows(v_dim)
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD
    )
    return MHABufferInfo(
        buffers=buffers,
        page_size=shape.page,
        head_num=shape.heads,
        head_dim=shape.dim,
        v_head_dim=v_dim,
        dtype=shape.dtype,
        device=CPU,
    )


def mha(layout: str, shape: Shape = TINY, v_dim: int | None = None):
    """Keys and values; `v_dim` other than the keys' gives the asymmetric class."""
    cls = MHATokenToKVPoolHost if v_dim in (None, shape.dim) else AsymmetricMHATokenToKVPoolHost
    v_dim = v_dim or shape.dim
    return cls(
        _mha_info(shape, shape.layers, v_dim),
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=shape.page,
        layout=layout,
        device_capacity_tokens=shape.tokens,
        start_layer=shape.start_layer,
        end_layer=shape.start_layer + shape.layers,
        draft_buffer_infos=tuple(_mha_info(shape, 1, v_dim) for _ in range(shape.drafts)),
    )


def asymmetric(layout: str, shape: Shape = TINY):
    """Keys and values of different widths."""
    return mha(layout, shape, v_dim=2 * shape.dim)


def packed_draft(layout: str, shape: Shape = TINY):
    """Keys and values with the layers of a draft model behind those of the target."""
    return mha(layout, dataclasses.replace(shape, drafts=2))


def _mla_info(shape: Shape, layers: int) -> MLABufferInfo:
    rows = tuple(
        torch.zeros(shape.tokens + shape.page, 1, shape.dim + 4, dtype=shape.dtype) for _ in range(layers)
    )
    return MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=shape.page,
        kv_lora_rank=shape.dim,
        qk_rope_head_dim=4,
        kv_cache_dim=shape.dim + 4,
        dtype=shape.dtype,
        device=CPU,
    )


def mla(layout: str, shape: Shape = TINY):
    """Latent rows, equal on all tensor-parallel ranks."""
    return MLATokenToKVPoolHost(
        _mla_info(shape, shape.layers),
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=shape.page,
        layout=layout,
        draft_buffer_infos=tuple(_mla_info(shape, 1) for _ in range(shape.drafts)),
        device_capacity_tokens=shape.tokens,
        start_layer=shape.start_layer,
        end_layer=shape.start_layer + shape.layers,
        target_layer_num=shape.layers,
    )


def mamba(layout: str, shape: Shape = TINY):
    """Recurrent state: one slot is one state, so the pool's page is one slot."""
    slots = shape.tokens // shape.page
    info = MambaStateBufferInfo(
        temporal=torch.zeros(shape.layers, slots, 2, 4, 4, dtype=torch.float32),
        conv=(
            torch.zeros(shape.layers, slots, 6, 3, dtype=torch.bfloat16),
            torch.zeros(shape.layers, slots, 2, 3, dtype=torch.bfloat16),
        ),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, layout=layout)


def indexer(layout: str, shape: Shape = TINY, anchor=None):
    """Index keys with their scales, opaque bytes on the pages of the latent pool."""
    row = 16 + 4  # index key, and one fp32 scale for each quantisation block
    layers = shape.layers
    device = SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=shape.start_layer,
        end_layer=shape.start_layer + layers,
        layer_num=layers,
        layer_shard_enabled=False,
        index_head_dim=16,
        quant_block_size=16,
        index_page_size=shape.page,
        page_size=shape.page,
        skip_topk_layers=(False,) * layers,
        device="cpu",
        index_k_with_scale_buffer=[
            torch.zeros(shape.tokens // shape.page + 1, shape.page * row, dtype=torch.uint8)
            for _ in range(layers)
        ],
    )
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor or mla(layout, shape))


def v4_paged(layout: str, shape: Shape = TINY, name: PoolName = PoolName.DEEPSEEK_V4_C4):
    """A compressed side pool of DeepSeek-V4: one opaque row for each page and layer."""
    pages = shape.tokens // shape.page
    return DeepSeekV4PagedHostPool(
        pool_name=str(name),
        device_buffers=[torch.zeros(pages, 96, dtype=torch.uint8) for _ in range(shape.layers)],
        item_bytes=96,
        num_host_pages=pages,
        slot_page_size=shape.page,
        layout=layout,
        page_aligned_only=True,
    )


def v4_state(layout: str, shape: Shape = TINY):
    """The compressor's state of DeepSeek-V4: a ring of slots for each page."""
    pages = shape.tokens // shape.page

    def state():
        score = SimpleNamespace(kv_score=torch.zeros(2 * pages, 12, dtype=torch.float32))
        return SimpleNamespace(kv_score_buffer=score, ring_size=2)

    return DeepSeekV4StateHostPool(
        pool_name=str(PoolName.DEEPSEEK_V4_C4_STATE),
        state_pools=[state() for _ in range(shape.layers)],
        num_host_pages=pages,
        swa_page_size=shape.page,
        layout=layout,
    )


def logical(layout: str, shape: Shape = TINY):
    """The anchor of DeepSeek-V4: token slots without bytes."""
    return LogicalHostPool(shape.tokens, shape.page, layout=layout)


Build = Callable[[str], object]
PAGE_LAYOUTS = ("page_first", "page_first_direct")
ALL_LAYOUTS = ("layer_first", *PAGE_LAYOUTS)

FAMILIES: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "mha": (mha, (*ALL_LAYOUTS, "page_head")),
    "asymmetric": (asymmetric, PAGE_LAYOUTS),
    "packed_draft": (packed_draft, (*ALL_LAYOUTS, "page_head")),
    "mla": (mla, ALL_LAYOUTS),
    "mamba": (mamba, PAGE_LAYOUTS),
    "indexer": (indexer, ALL_LAYOUTS),
    "v4_paged": (v4_paged, ALL_LAYOUTS),
    "v4_state": (v4_state, ALL_LAYOUTS),
}
"""Families that hold bytes: how to build one, and the layouts that its class accepts."""

# The pool's name in the engine, where it is not the anchor.
SIDECAR_NAMES = {
    "mamba": PoolName.MAMBA,
    "indexer": PoolName.INDEXER,
    "v4_paged": PoolName.DEEPSEEK_V4_C4,
    "v4_state": PoolName.DEEPSEEK_V4_C4_STATE,
}


def build(family: str, layout: str, shape: Shape = TINY):
    """A pool of a family."""
    with host_memory_budget_scope(1 << 33):
        return FAMILIES[family][0](layout, shape)


def buffers(pool) -> list[torch.Tensor]:
    """Every tensor that holds bytes of the pool."""
    if isinstance(pool, LogicalHostPool):
        return []
    if isinstance(pool, DSAIndexerPoolHost):
        return [pool.index_k_with_scale_buffer]
    held = pool.kv_buffer
    return list(held) if isinstance(held, list | tuple) else [held]


def fill(pool, seed: int):
    """Puts random bytes into the whole pool; the same seed gives the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in buffers(pool):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def paint(pool, byte: int = 0xA5):
    """Puts one byte everywhere, to see what a call wrote."""
    for tensor in buffers(pool):
        tensor.view(torch.uint8).fill_(byte)
    return pool


def page(pool, slot: int) -> bytes:
    """The bytes of one page, cut out of the buffers by their shape alone. Slots count pages."""
    size, pages = pool.page_size, slot
    cuts = []
    for tensor in buffers(pool):
        raw = tensor.view(torch.uint8)
        if isinstance(
            pool, MambaPoolHost | DSAIndexerPoolHost | DeepSeekV4PagedHostPool | DeepSeekV4StateHostPool
        ):
            per_layer = isinstance(pool, DSAIndexerPoolHost) and pool.layout == "layer_first"
            cuts.append(raw[:, pages] if per_layer else raw[pages])
            continue
        paired = not isinstance(pool, MLATokenToKVPoolHost | AsymmetricMHATokenToKVPoolHost)
        axis = int(paired) + int(pool.layout == "layer_first")
        if pool.layout in ("page_first_direct", "page_head"):
            cuts.append(raw.narrow(axis, pages, 1))
        else:
            cuts.append(raw.narrow(axis, pages * size, size))
    return b"".join(cut.contiguous().numpy().tobytes() for cut in cuts)


def pages_of(pool, slots: Sequence[int]) -> list[bytes]:
    """The bytes of some pages."""
    return [page(pool, slot) for slot in slots]


def indices(pool, slots: Sequence[int]) -> torch.Tensor:
    """Token slots of these pages, as the engine gives them."""
    size = pool.page_size
    return torch.tensor([slot * size + i for slot in slots for i in range(size)], dtype=torch.int64)
