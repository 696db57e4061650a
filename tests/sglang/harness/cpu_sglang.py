"""The real SGLang on a machine without an accelerator.

Import this before anything of `sglang`. Nothing of the installed engine is changed on disk. Three
things stand between its cache code and a CPU, and each is answered here:

- it imports packages at module level that the cache never uses (`STANDINS`): a stand-in module serves them;
- it pins host memory and reserves 10 GiB of it: no pinning, no reserve;
- it copies between device and host with CUDA kernels: `patch_engine` does the same by indexing, for every
  family of pools that these tests build.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from typing import ClassVar

STANDINS = ("datasets", "pandas", "torchvision")

# One thread for each operator: the tests share two cores, and a forked child inherits no pool of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class _Nothing:
    """Can be constructed, called, subclassed and asked for any attribute; does nothing."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __init_subclass__(cls, **_kwargs):
        pass

    def __call__(self, *_args, **_kwargs):
        return _Nothing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _StandinModule(types.ModuleType):
    __version__ = "0.0.0"
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Nothing,), {})
        setattr(self, name, made)
        return made


class _StandinFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: a package that is installed wins."""

    def find_spec(self, fullname, _path=None, _target=None):
        if fullname.partition(".")[0] in STANDINS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandinModule(spec.name)

    def exec_module(self, module):
        pass


def _install_standins() -> None:
    if any(isinstance(finder, _StandinFinder) for finder in sys.meta_path):
        return
    # transformers looks once whether torchvision is there; it has to find that it is not.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers.image_utils  # noqa: F401
    sys.meta_path.append(_StandinFinder())


# -- copies between "device" and host ------------------------------------------------------------


def _paged(host, layer_rows):
    """One layer's rows as [page, token of the page, ...], a view, whatever the layout."""
    if host.layout == "page_first_direct":
        return layer_rows
    if host.layout == "page_head":  # [page, head, token, dim]
        return layer_rows.transpose(1, 2)
    return layer_rows.unflatten(0, (-1, host.page_size))


def _mha_layer(host, buffer, layer):
    """Layer `layer` of K or V, [page, token of the page, head, dim]."""
    axis = {"layer_first": 0, "page_first": 1, "page_first_direct": 1, "page_head": 3}[host.layout]
    return _paged(host, buffer.select(axis, layer))


def _mla_layer(host, layer):
    return _paged(host, host.kv_buffer.select(0 if host.layout == "layer_first" else 1, layer))


def _place(host, indices):
    """Token slots as page and token of the page."""
    return indices // host.page_size, indices % host.page_size


def _mha_to_host(self, device_pool, host_indices, device_indices, io_backend):
    at = _place(self, host_indices)
    for layer in range(len(self.device_k_buffers)):
        _mha_layer(self, self.k_buffer, layer)[at] = self.device_k_buffers[layer][device_indices]
        _mha_layer(self, self.v_buffer, layer)[at] = self.device_v_buffers[layer][device_indices]


def _mha_to_device(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    at = _place(self, host_indices)
    self.device_k_buffers[layer_id][device_indices] = _mha_layer(self, self.k_buffer, layer_id)[at]
    self.device_v_buffers[layer_id][device_indices] = _mha_layer(self, self.v_buffer, layer_id)[at]


def _mla_to_host(self, device_pool, host_indices, device_indices, io_backend):
    at = _place(self, host_indices)
    for layer, rows in enumerate(self.device_kv_buffers):
        _mla_layer(self, layer)[at] = rows[device_indices]


def _mla_to_device(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    if layer_id not in self._buffer_index_by_layer:
        return
    rows = self.device_kv_buffers[self._buffer_index_by_layer[layer_id]]
    layer = self._host_layer_by_controller[layer_id]
    rows[device_indices] = _mla_layer(self, layer)[_place(self, host_indices)]


def _indexer_layer(host, layer):
    buffer = host.index_k_with_scale_buffer
    return buffer[layer] if host.layout == "layer_first" else buffer[:, layer, 0]


def _indexer_to_host(self, device_pool, host_indices, device_indices, io_backend):
    to, of = self._get_indexer_page_indices(host_indices, device_indices)
    for layer, rows in enumerate(self.packed_device_index_buffers):
        _indexer_layer(self, layer)[to] = rows[of]


def _indexer_to_device(
    self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False
):
    if not is_draft and not self._is_device_layer_owned(device_pool, layer_id):
        return
    of, to = self._get_indexer_page_indices(host_indices, device_indices)
    layer = self._draft_host_layer(layer_id) if is_draft else self._host_layer_index(layer_id)
    rows = device_pool.index_k_with_scale_buffer[0 if is_draft else layer_id]
    rows[to] = _indexer_layer(self, layer)[of]


def _page_rows(host, layer):
    """One layer of a DeepSeek-V4 side pool, [page, bytes]."""
    if host.layout == "layer_first":
        return host.kv_buffer[layer]
    rows = host.kv_buffer[:, layer]
    return rows[:, 0] if host.layout == "page_first_direct" else rows


def _side_to_host(device_rows):
    def copy(self, device_pool, host_indices, device_indices, io_backend):
        if host_indices is None or device_indices is None or host_indices.numel() == 0:
            return
        to, of = self._to_page_indices(host_indices), self._to_page_indices(device_indices)
        for layer, rows in enumerate(getattr(self, device_rows)):
            _page_rows(self, layer)[to] = rows[of]

    return copy


def _side_to_device(device_rows):
    def copy(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
        if host_indices is None or device_indices is None or host_indices.numel() == 0:
            return
        of, to = self._to_page_indices(host_indices), self._to_page_indices(device_indices)
        getattr(self, device_rows)[layer_id][to] = _page_rows(self, layer_id)[of]

    return copy


def _state_layers(host):
    """Device rows, and the host's rows, of each array and layer of a Mamba pool."""
    for layer, rows in enumerate(host.temporal_device_layers):
        yield layer, rows, host.temporal_buffer[:, layer, 0]
    for array, layers in enumerate(host.conv_device_layers):
        for layer, rows in enumerate(layers):
            yield layer, rows, host.conv_buffer[array][:, layer, 0]


def _mamba_to_host(self, device_pool, host_indices, device_indices, io_backend="kernel"):
    for _, rows, host_rows in _state_layers(self):
        host_rows[host_indices] = rows[device_indices]
    for rows, host_rows in zip(self.slot_state_device_tensors, self.slot_state_buffers, strict=True):
        host_rows[host_indices] = rows[device_indices]


def _mamba_to_device(
    self, device_pool, host_indices, device_indices, layer_id, io_backend="kernel", *, is_draft=False
):
    for layer, rows, host_rows in _state_layers(self):
        if layer == layer_id:
            rows[device_indices] = host_rows[host_indices]
    if layer_id == 0:
        for rows, host_rows in zip(self.slot_state_device_tensors, self.slot_state_buffers, strict=True):
            rows[device_indices] = host_rows[host_indices]


def patch_engine() -> None:
    """Lets the engine's cache code run here, for the rest of this process. Safe to call again."""
    from sglang.srt.mem_cache import memory_pool_host as v4
    from sglang.srt.mem_cache.pool_host import base, common, dsa, mamba, mha, mla

    if base.HICACHE_HOST_MEMORY_RESERVE_BYTES == 0:
        return
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    # Said once for all families: their constructors default to pinned memory, and read it again later.
    base.HostKVCache.pin_memory = property(lambda _pool: False, lambda _pool, _value: None)
    common._cuda_host_register = lambda *_args, **_kwargs: None

    for pool, to_host, to_device in (
        (mha.MHATokenToKVPoolHost, _mha_to_host, _mha_to_device),
        (mha.AsymmetricMHATokenToKVPoolHost, _mha_to_host, _mha_to_device),
        (mla.MLATokenToKVPoolHost, _mla_to_host, _mla_to_device),
        (dsa.DSAIndexerPoolHost, _indexer_to_host, _indexer_to_device),
        (mamba.MambaPoolHost, _mamba_to_host, _mamba_to_device),
        (v4.DeepSeekV4PagedHostPool, _side_to_host("device_buffers"), _side_to_device("device_buffers")),
        (
            v4.DeepSeekV4StateHostPool,
            _side_to_host("device_page_views"),
            _side_to_device("device_page_views"),
        ),
    ):
        pool.backup_from_device_all_layer = to_host
        pool.load_to_device_per_layer = to_device


_install_standins()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    patch_engine()
