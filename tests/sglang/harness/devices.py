"""The engine's device pools, on a CPU, for trees of other kinds of models than the kit builds."""

from __future__ import annotations

import dataclasses

from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from harness.tree import FULL

# The sparse-attention pool takes pages of 64 tokens only.
SPARSE = dataclasses.replace(FULL, page_size=64, kv_size=1024, max_context_len=1024)


def _common(cfg: CacheConfig, layers: int, start: int) -> dict:
    return {
        "size": cfg.kv_size,
        "page_size": cfg.page_size,
        "dtype": cfg.dtype,
        "layer_num": layers,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": start,
        "end_layer": start + layers,
    }


def mha(cfg: CacheConfig, layers: int | None = None, start: int = 0) -> MHATokenToKVPool:
    """Keys and values; one layer for a draft model."""
    return MHATokenToKVPool(
        **_common(cfg, layers or cfg.num_layers, start), head_num=cfg.head_num, head_dim=cfg.head_dim
    )


def mla(cfg: CacheConfig, layers: int | None = None, start: int = 0) -> MLATokenToKVPool:
    """Latent rows, equal on all tensor-parallel ranks."""
    return MLATokenToKVPool(
        **_common(cfg, layers or cfg.num_layers, start), kv_lora_rank=12, qk_rope_head_dim=4
    )


def sparse(cfg: CacheConfig, layers: int | None = None, start: int = 0) -> DSATokenToKVPool:
    """Latent rows with an indexer's keys beside them."""
    # This class asks for the server's parallel widths, which exist once a server has told its arguments.
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=cfg.page_size))
    return DSATokenToKVPool(
        **_common(cfg, layers or cfg.num_layers, start),
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        kv_cache_dim=16,
        index_head_dim=128,
    )


def window(cfg: CacheConfig) -> SWAKVPool:
    """One layer of a draft model with a sliding window."""
    return SWAKVPool(
        size=cfg.kv_size,
        size_swa=cfg.kv_size,
        page_size=cfg.page_size,
        dtype=cfg.dtype,
        head_num=cfg.head_num,
        head_dim=cfg.head_dim,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[],
        device="cpu",
    )
