"""The two backends that the conformance suite compares, opened the way the engine opens them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from harness import pools

FILE, OURS = "hicache_file", "hicache_store"
KINDS = (FILE, OURS)

MODEL = "org/tiny"


def options(root: Path, **changes) -> dict:
    """Options of ours for small tests, with those of the engine that say how to call us.

    The deadline is the longest there is: what a loaded machine is late with is no fault.
    """
    given = {"path": str(root), "capacity": "64MiB", "revision": "r1", "interface_v1": True, "deadline": 9.0}
    return given | changes


def config(extra: Mapping | None = None, **changes) -> HiCacheStorageConfig:
    """What the engine tells a backend: one rank, nothing parallel, unless changed."""
    facts = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": MODEL,
        "extra_config": dict(extra or {}),
    }
    return HiCacheStorageConfig(**facts | changes)


def open_backend(
    kind: str,
    root: Path,
    anchor,
    sidecars: Mapping[PoolName, object] | None = None,
    *,
    extra: Mapping | None = None,
    **facts,
) -> HiCacheStorage:
    """A backend with its pools registered in the engine's order."""
    facts.setdefault("is_page_first_layout", anchor.layout == "page_first")
    if kind == FILE:
        root.mkdir(parents=True, exist_ok=True)
        backend = HiCacheFile(config(extra, **facts), file_path=str(root))
    else:
        from hicache_store.sglang import HiCacheStoreBackend

        given = options(
            root, total_layers=anchor.layer_num or 3, total_kv_heads=getattr(anchor, "head_num", 1)
        )
        backend = HiCacheStoreBackend(config({**given, **(extra or {})}, **facts), {})
    register(backend, anchor, sidecars)
    return backend


def register(backend: HiCacheStorage, anchor, sidecars: Mapping[PoolName, object] | None = None) -> None:
    """The burst of registrations of the hybrid controller."""
    backend.register_mem_pool_host(anchor)
    backend.register_mem_host_pool_v2(anchor, PoolName.KV)
    for name, pool in (sidecars or {}).items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()


def close(backend: HiCacheStorage) -> None:
    """HiCacheFile has nothing to close."""
    if hasattr(backend, "close"):
        backend.close()


def keys(count: int, seed: object = 0) -> list[str]:
    """A chain of page keys as the engine writes them: 64 hex digits, each over the one before."""
    chain, digest = [], str(seed).encode()
    for number in range(count):
        digest = hashlib.sha256(digest + number.to_bytes(4, "little")).digest()
        chain.append(digest.hex())
    return chain


def transfer(name: PoolName, pool, asked: Sequence[str], slots: Sequence[int]) -> PoolTransfer:
    """A transfer between the store and these pages of a host pool."""
    return PoolTransfer(name=name, host_indices=pools.indices(pool, slots), keys=list(asked))


def trailing(name: PoolName, window: int) -> PoolTransfer:
    """What an exists call carries for a pool of which only the last pages matter: placeholders."""
    return PoolTransfer(name=name, keys=["__placeholder__"] * window, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def every(name: PoolName) -> PoolTransfer:
    """What an exists call carries for a pool that needs every page."""
    return PoolTransfer(
        name=name, keys=None, hit_policy=PoolHitPolicy.ALL_PAGES, indices_from_pool=PoolName.KV
    )


def flat_pages(pool, slots: Iterable[int]) -> list[torch.Tensor]:
    """Pages as the engine hands them to the older calls."""
    return [pool.get_data_page(slot * pool.page_size, flat=True) for slot in slots]


def blank_pages(pool, count: int) -> list[torch.Tensor]:
    """Where the older calls put pages."""
    return [pool.get_dummy_flat_data_page() for _ in range(count)]


def dump(given: Mapping) -> str:
    """Options as the engine takes them on its command line."""
    return json.dumps(given)
