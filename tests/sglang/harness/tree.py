"""One rank of an engine: radix tree, controller, pools and the storage backend, without a model or a GPU.

`Rank` drives the engine's own classes through the steps that a scheduler takes: insert what was
computed, back it up to the host and from there to the store, look a request up in the store, load it
back. `Rank.bytes_of` reads the device's rows of every pool, so that what comes back can be compared
with what went in.
"""

from __future__ import annotations

import contextlib
import json
import time
import unittest
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self
from unittest import mock

import torch
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_hicache_draft_sidecars
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from harness import backends, pools

PAGE = 4

FULL = CacheConfig(page_size=PAGE, components=(ComponentType.FULL,), num_layers=3, head_dim=8)
SWA = CacheConfig(
    page_size=PAGE,
    components=(ComponentType.FULL, ComponentType.SWA),
    sliding_window_size=2 * PAGE,
    num_layers=6,
    full_attention_layer_ids=(1, 4),
    head_dim=8,
)
MAMBA = CacheConfig(
    page_size=PAGE,
    components=(ComponentType.FULL, ComponentType.MAMBA),
    num_layers=6,
    full_attention_layer_ids=(1, 4),
    enable_mamba_extra_buffer=True,
    mamba_cache_size=60,
    head_dim=8,
)
CONFIGS = {"full": FULL, "swa": SWA, "mamba": MAMBA}

fixtures.get_device = lambda *_args: "cpu"


class _Kit(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """The steps that ship with the engine for its own tests."""

    def runTest(self):  # noqa: N802
        raise AssertionError


class Rank:
    """One rank, with its store at `root`. Close it, or use it in a `with` block."""

    def __init__(
        self,
        root: Path,
        cfg: CacheConfig = FULL,
        *,
        kind: str = backends.OURS,
        layout: str = "page_first",
        v1: bool = True,
        options: Mapping | None = None,
        policy: str = "wait_complete",
        write_policy: str = "write_through",
        storage: bool = True,
        metrics: bool = False,
        device_pool: Callable[[CacheConfig], object] | None = None,
        packed: Sequence[object] = (),
        draft: object | None = None,
        params: Mapping | None = None,
        parallel: Mapping | None = None,
    ):
        self.root, self.cfg, self.kind, self.layout, self.v1 = root, cfg, kind, layout, v1
        self.policy, self.write_policy = policy, write_policy
        self.options = dict(options or {})
        self.packed, self.draft = tuple(packed), draft
        self._kit = _Kit()
        self._kit.cfg = cfg
        self._requests = 0
        self._closed = False
        self._parallel = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, **(parallel or {})}
        self._enter(get_parallel().override(**self._parallel))

        with contextlib.ExitStack() as patches:
            if device_pool is not None:
                made = device_pool(cfg)
                patches.enter_context(mock.patch.object(fixtures, "MHATokenToKVPool", return_value=made))
            real = fixtures.CacheInitParams
            extra = {"enable_metrics": metrics, "mtp_draft_device_pools": self.packed, **(params or {})}
            patches.enter_context(
                mock.patch.object(fixtures, "CacheInitParams", lambda **given: real(**{**given, **extra}))
            )
            self.tree, self.allocator, self.requests = fixtures.build_fixture(cfg)

        self._start(storage, metrics)
        if draft is not None:
            made = build_hicache_draft_sidecars(draft_device_pools=(draft,), tree_cache=self.tree)
            for spec, entry in zip(*made, strict=True):
                self.tree.register_sidecar_pool(spec, entry)

    # -- life ------------------------------------------------------------------------------------

    def _enter(self, context):
        context.__enter__()
        self._kit.addCleanup(context.__exit__, None, None, None)

    def extra_config(self) -> dict:
        """The JSON of the command line, options of ours and of the engine."""
        given = {"prefetch_threshold": 1, "hicache_storage_pass_prefix_keys": True}
        if self.kind == backends.OURS:
            heads, layers = self.cfg.head_num, self.cfg.num_layers
            given |= backends.options(self.root, total_layers=layers, total_kv_heads=heads)
            given |= {
                "backend_name": "hicache_store",
                "module_path": "hicache_store.sglang",
                "class_name": "HiCacheStoreBackend",
            }
            given |= self.options
            if not self.v1:
                given.pop("interface_v1")
        else:
            given["file_storage_path"] = str(self.root)
        return given

    def _start(self, storage: bool, metrics: bool) -> None:
        backend = None
        if storage:
            backend = "dynamic" if self.kind == backends.OURS else "file"
        args = ServerArgs(
            model_path="dummy",
            served_model_name=backends.MODEL,
            page_size=self.cfg.page_size,
            hicache_io_backend="direct" if self.layout == "page_first_direct" else "kernel",
            hicache_mem_layout=self.layout,
            hicache_write_policy=self.write_policy,
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps(self.extra_config()) if storage else None,
            hicache_storage_prefetch_policy=self.policy,
            enable_metrics=metrics,
        )
        args._mamba_cache_chunk_size = max(CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(args)
        self.tree.init_hicache(args, self.tree.cache_init_params)
        self._kit.addCleanup(fixtures.drop_hicache_atexit_pin, self.tree)
        self._kit.addCleanup(self.tree.release_host_resources)
        self.tree.write_through_threshold = 1 << 30
        self.tree.load_back_threshold = 0
        self.controller = self.tree.cache_controller
        self._allow_prefetch()
        assert self.controller.mem_pool_host.layout == self.layout

    def _allow_prefetch(self) -> None:
        # Host and device pools are of one size here, which would leave a prefetch no room at all.
        if self.tree.enable_storage:
            self.controller.prefetch_capacity_limit = self.controller.mem_pool_host.size

    def attach(self) -> tuple[bool, str]:
        """What an operator does on a running server."""
        done = self.tree.attach_storage_backend(
            storage_backend="dynamic",
            storage_backend_extra_config_json=json.dumps(self.extra_config()),
            served_model_name=backends.MODEL,
            hicache_storage_prefetch_policy=self.policy,
        )
        self._allow_prefetch()
        return done

    def detach(self) -> tuple[bool, str]:
        """What an operator does on a running server."""
        return self.tree.detach_storage_backend()

    @property
    def backend(self):
        """The storage backend as the controller holds it."""
        return self.controller.storage_backend

    def close(self) -> None:
        """Ends threads and the backend."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.controller.storage_backend is not None:
                self.controller.detach_storage_backend()
        finally:
            self._kit.doCleanups()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    # -- steps of a scheduler --------------------------------------------------------------------

    def compute(self, tokens: Sequence[int], seed: int = 0) -> None:
        """Inserts a sequence as if it had been computed: rows that are new hold random bytes."""
        known = fixtures.match_prefix(self.tree, list(tokens)).device_prefix_len
        self._kit._insert(self.tree, self.allocator, self.requests, list(tokens))
        generator = torch.Generator().manual_seed(seed)
        for rows, at in self._rows(tokens, known):
            fresh = rows[at].contiguous().view(torch.uint8)
            rows[at] = torch.randint(0, 256, fresh.shape, generator=generator, dtype=torch.uint8).view(
                rows.dtype
            )

    def to_host(self, tokens: Sequence[int]) -> None:
        """Backs a sequence up to the host pools."""
        node = fixtures.match_prefix(self.tree, list(tokens)).last_device_node
        self._kit._backup_node(self.tree, node)

    def to_store(self, tokens: Sequence[int], timeout: float = 60.0) -> None:
        """Writes a sequence, backed up before, to the store, and waits for it."""
        node = fixtures.match_prefix(self.tree, list(tokens)).last_host_node
        self._kit._write_path_to_l3(self.tree, node)
        self._kit._flush_l3_backups(self.tree, timeout=timeout)

    def store(self, tokens: Sequence[int], seed: int = 0) -> dict[str, bytes]:
        """Computes a sequence and takes it all the way to the store.

        A node without its recurrent state is not written by the engine.
        """
        self.compute(tokens, seed)
        held = self.bytes_of(tokens)
        self.to_host(tokens)
        self.to_store(tokens)
        return held

    def ask(self, tokens: Sequence[int]) -> CacheRequestHandle:
        """Starts a prefetch from the store, for a request that begins with these tokens."""
        self._requests += 1
        handle = CacheRequestHandle(f"request-{self._requests}", 0)
        self.tree.prefetch_from_storage(
            handle, self.tree.root_node_handle(), array("q", tokens), None, [], matched_prefix_tokens=[]
        )
        return handle

    def prefetch(self, tokens: Sequence[int], timeout: float = 60.0) -> int:
        """Looks a request up in the store and reads what is there; tokens that came to the host."""
        handle = self.ask(tokens)
        self._kit._run_prefetch_to_completion(self.tree, handle, timeout=timeout)
        return self.tree.pop_prefetch_loaded_tokens(handle)

    def load_back(self, tokens: Sequence[int]) -> int:
        """Brings from the host to the device what a prefetch fetched; tokens that the device then has."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        if match.host_hit_length:
            request = self._kit._make_req(self.requests) if self.cfg.has_mamba else None
            self._kit._load_back_node(self.tree, match.best_match_node, req=request)
        return fixtures.match_prefix(self.tree, list(tokens)).device_prefix_len

    def fetch(self, tokens: Sequence[int]) -> int:
        """Prefetch and load back: tokens that the device has afterwards."""
        self.prefetch(tokens)
        return self.load_back(tokens)

    def forget(self) -> None:
        """What `flush_cache` does: device and host are free, and a sequence is in the store alone."""
        self.tree.reset()
        self.requests.clear()
        self.allocator.clear()
        for entry in self.controller.mem_pool_host.entries:
            for rows in pools.buffers(entry.host_pool):
                rows.view(torch.uint8).fill_(0xA5)

    def pump(self, until: Callable[[], bool], timeout: float = 60.0) -> None:
        """Polls events like a scheduler loop until something holds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.tree.check_hicache_events()
            if until():
                return
            time.sleep(0.005)
        raise AssertionError("this did not come about in time")

    def host_slots_free(self) -> dict[str, int]:
        """Free slots of every host pool that allocates."""
        free = {}
        for entry in self.controller.mem_pool_host.entries:
            with contextlib.suppress(NotImplementedError):
                free[str(entry.name)] = entry.host_pool.available_size()
        return free

    # -- bytes -----------------------------------------------------------------------------------

    def _rows(self, tokens: Sequence[int], first: int = 0):
        """Device rows of every pool, and those of this sequence; a window pool's last window only."""
        match = fixtures.match_prefix(self.tree, list(tokens))
        path = self.tree.path_device_indices(match.last_device_node)
        slots = path[first:]
        pool = self.allocator.get_kvcache()
        for full in (getattr(pool, "full_kv_pool", pool), *self.packed):
            yield from _rows_of(full, slots)
        if self.cfg.has_swa:
            mapped = self.allocator.full_to_swa_index_mapping[path]
            mapped = mapped[max(first, len(path) - self.cfg.sliding_window_size) :]
            yield from _rows_of(pool.swa_kv_pool, mapped)
        if self.draft is not None:
            window = getattr(self.draft, "swa_kv_pool", None)
            yield from _rows_of(self.draft, slots) if window is None else _rows_of(window, mapped)
        if self.cfg.has_mamba:
            state = fixtures.node_device_value(self.tree, match.last_device_node, ComponentType.MAMBA)
            if state is not None:
                cache = self.requests.mamba_pool.mamba_cache
                for arrays in (*cache.conv, cache.temporal):
                    for layer in arrays:
                        yield layer, state

    def bytes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """The device's bytes of a sequence, one entry for each layer of each pool."""
        return [rows[at].contiguous().view(torch.uint8).numpy().tobytes() for rows, at in self._rows(tokens)]


def _rows_of(pool, slots: torch.Tensor):
    """Tensors of a device pool, rows first, with the rows of these slots; an indexer's rows are pages."""
    kv = [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else pool.kv_buffer
    for rows in kv:
        yield rows, slots
    for rows in getattr(pool, "index_k_with_scale_buffer", None) or ():
        yield rows, slots[:: pool.page_size] // pool.page_size


def sequence(pages: int, start: int = 1, page_size: int = PAGE) -> list[int]:
    """Token ids of some whole pages."""
    return list(range(start, start + pages * page_size))
