"""SGLang's own host pools in memory of ours, through its plugins, and who unregisters what."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import pools
from hicache_store import ConfigError, HostPool
from hicache_store.sglang import host_pool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.plugins.hook_registry import HookRegistry

FAMILIES = [(family, layouts[0]) for family, (_, layouts) in pools.FAMILIES.items() if family != "logical"]


@pytest.fixture
def asked(monkeypatch):
    """Runs the plugin as the engine does, with a value of the variable, and takes it away afterwards."""
    monkeypatch.setattr(common, "alloc_with_host_register", common.alloc_with_host_register)
    kept = dict(common.ALLOC_MEMORY_FUNCS)
    common.ALLOC_MEMORY_FUNCS.pop("cpu", None)  # the engine's start: nobody has asked yet
    hooks = dict(HookRegistry._hooks)

    def run(value):
        monkeypatch.setenv(host_pool.ENVIRONMENT, value)
        entries = importlib.metadata.entry_points(group="sglang.srt.plugins")
        (plugin,) = (entry for entry in entries if entry.value == "hicache_store.sglang.host_pool:plugin")
        plugin.load()()
        HookRegistry.apply_hooks()

    yield run
    common.ALLOC_MEMORY_FUNCS.clear()
    common.ALLOC_MEMORY_FUNCS.update(kept)
    HookRegistry._hooks.clear()
    HookRegistry._hooks.update(hooks)
    HookRegistry._patched.discard(host_pool.SEAM)


@pytest.fixture
def made(monkeypatch):
    """Ranges of addresses of the pools that the plugin makes."""
    ranges = []

    class Recorded(HostPool):
        def __new__(cls, *arguments, **keywords):
            pool = HostPool.__new__(cls, *arguments, **keywords)
            start = np.frombuffer(pool, np.uint8).__array_interface__["data"][0]
            ranges.append(range(start, start + pool.nbytes))
            return pool

    monkeypatch.setattr(host_pool, "HostPool", Recorded)
    return ranges


@pytest.fixture
def cudart(monkeypatch):
    """The engine believes to be on CUDA; what it asks of the runtime is noted."""
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, _flags: calls.append(("register", address, size)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)) or 0,
    )
    # The harness has replaced the engine's function: here is the one of its file.
    spec = importlib.util.find_spec(common.__name__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(common, "_cuda_host_register", fresh._cuda_host_register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(base, "_is_cuda", True)
    monkeypatch.setattr(base.HostKVCache, "pin_memory", True)
    return calls


def tensors(pool):
    """Tensors that the engine has allocated for the pool."""
    buffers = getattr(pool, "kv_buffer", None)
    if buffers is None:
        buffers = pool.index_k_with_scale_buffer
    return list(buffers) if isinstance(buffers, (list, tuple)) else [buffers]


def test_nothing_changes_unless_asked_for(asked, made):
    for value in ("", "off", "0"):
        asked(value)
        assert host_pool.SEAM not in HookRegistry._hooks
    pools.build("mha", "page_first")
    assert made == []


@pytest.mark.parametrize(("family", "layout"), FAMILIES)
def test_pools_of_every_family_stand_in_ours(asked, made, family, layout):
    asked("on")
    pool = pools.fill(pools.build(family, layout), 1)
    assert made
    for tensor in tensors(pool):
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1
        assert any(first in memory and last in memory for memory in made)


def test_pages_are_stored_from_it_and_restored_into_it(asked, made, rank, put, take, keys, slots, others):
    asked('{"huge_pages": "off"}')
    written = pools.fill(pools.build("mha", "page_first"), 1)
    blank = pools.paint(pools.build("mha", "page_first"))
    assert len(made) == 2
    assert put(rank(written), PoolName.KV, written, keys, slots)
    assert take(rank(blank), PoolName.KV, blank, keys, others) == len(keys)
    assert pools.pages_of(blank, others) == pools.pages_of(written, slots)


def test_stat_says_what_was_placed_and_what_was_got(asked, made, rank, put, keys, slots, tmp_path):
    asked('{"huge_pages": "off", "register": "off"}')
    written = pools.fill(pools.build("mha", "page_first"), 1)
    serving = rank(written)
    assert put(serving, PoolName.KV, written, keys, slots)
    command = [sys.executable, "-m", "hicache_store", "stat", tmp_path / "root", "--json"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    (process,) = json.loads(ran.stdout)["processes"]["list"]
    (*_, last) = process["pools"]
    (tensor,) = tensors(written)
    assert (last["place"], last["reason"]) == (
        "hicache_store",
        f"{tensor.dtype} {list(tensor.shape)}: prefaulted",
    )


def test_the_engine_does_not_unregister_what_we_registered(asked, monkeypatch, cudart):
    class Registered(HostPool):
        def stats(self):
            return super().stats() | {"registered_pieces": [self.nbytes], "unmet": []}

    monkeypatch.setattr(host_pool, "HostPool", Registered)
    asked("on")
    pool = pools.build("mha", "page_first")
    assert [getattr(tensor, host_pool.REGISTERED_RANGES) for tensor in tensors(pool)] == [[]]
    pool.destroy()
    assert cudart == []


def test_what_the_engine_registered_it_unregisters(asked, made, cudart):
    asked('{"register": "off"}')
    pool = pools.build("mha", "page_first")
    (tensor,) = tensors(pool)
    assert cudart == [("register", tensor.data_ptr(), tensor.nbytes)]
    pool.destroy()
    assert cudart[1:] == [("unregister", tensor.data_ptr())]


def test_memory_goes_with_its_last_tensor(asked, made):
    asked("on")
    pool = pools.build("mha", "page_first")
    (memory,) = made
    view = pool.kv_buffer[0]
    pool.destroy()
    del pool
    gc.collect()
    here = lambda: f"{memory.start:x}-" in Path("/proc/self/maps").read_text("utf-8")  # noqa: E731
    assert here()
    view.fill_(3)
    del view
    gc.collect()
    assert not here()


def test_memory_of_a_storage_backend_stays_where_it_is(asked, made):
    asked("on")
    allocator = common.ShmHostTensorAllocator()
    tensor = common.ALLOC_MEMORY_FUNCS["cpu"](
        (4, 1024), dtype=torch.uint8, device="cpu", pin_memory=False, allocator=allocator
    )
    assert made == []
    assert os.fstat(allocator.fd).st_size >= tensor.nbytes


def test_what_cannot_be_had_is_an_error_of_the_start(asked):
    asked('{"register": "require"}')
    with pytest.raises(Exception, match="no CUDA"):
        pools.build("mha", "page_first")


@pytest.mark.parametrize("text", ["maybe", "[1]", '{"slots": 3}', '{"shared": true}', "{"])
def test_a_value_that_means_nothing_is_refused(text):
    with pytest.raises(ConfigError, match="HICACHE_HOST_POOL"):
        host_pool.options(text)


def test_tensors_of_every_way_share_the_memory():
    pool = HostPool(4, 64, register="off")
    array = np.frombuffer(pool, np.uint8)
    for tensor in (
        torch.from_dlpack(pool),
        torch.frombuffer(pool, dtype=torch.uint8),
        torch.from_dlpack(pool.__dlpack__(dl_device=(1, 0))),
    ):
        tensor[7] += 1
        del array
        with pytest.raises(BufferError):
            pool.close()
        array = np.frombuffer(pool, np.uint8)
        del tensor
    assert array[7] == 3
    del array
    gc.collect()
    pool.close()
