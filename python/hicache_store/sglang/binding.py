"""From one of the engine's host pools to a pool of the store: identity, tile, layout and memory.

One function for each family of pools says what it holds (`_Held`); `bind` adds where this rank stands.
Shapes, for `P` host pages of `S` tokens, `L` layers, `H` heads, rows of `D` elements:

| family | engine's class | buffers |
| --- | --- | --- |
| mha | `MHATokenToKVPoolHost`, asymmetric | `[2, L, T, H, D]` and its permutations, or K and V apart |
| mla | `MLATokenToKVPoolHost` | `[L, T, 1, W]` and its permutations |
| keys | `MHATokenToKOnlyPoolHost` | as one half of mha |
| rows | DSA and QSA indexers, DeepSeek-V4, MiniMax NVFP4 | `[L, P, R]`, `[P, L, R]`, `[P, L, 1, R]`, or `L`
times `[P, R]` |
| mamba | `MambaPoolHost` | `[P, L, 1, ...]` for each array, `[P, ...]` for each side state |
| logical | `LogicalHostPool`, pools without memory | none |

What a release changes here is seen at once: shapes are compared with what they must be, and page sizes with
what the engine computes. A pool that differs is refused, never guessed at.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from hicache_store import Component, GeometryError, Pool, PoolView, Region, Tile, UnsupportedError
from hicache_store.sglang.staging import StagedMemory
from hicache_store.sglang.topology import Topology
from hicache_store.sglang.versions import KV, REFUSED, EngineFacts, PoolName, family_of

__all__ = ["Binding", "Body", "bind"]

_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")
# Most components of a pool in the store; a pool of more buffers is staged as one.
_MOST_COMPONENTS: Final = 16
_LONGEST_ROW_FORMAT: Final = 100

_KINDS: Final[Mapping[str, str]] = {
    PoolName.SWA.value: "swa",
    PoolName.AUXILIARY_SWA.value: "swa",
    PoolName.MAMBA.value: "state",
    PoolName.INDEXER.value: "indexer",
    PoolName.DRAFT.value: "draft",
    PoolName.DRAFT_SWA.value: "draft_swa",
    PoolName.DRAFT_INDEXER.value: "draft_indexer",
}
_DRAFTS: Final = frozenset((PoolName.DRAFT.value, PoolName.DRAFT_SWA.value, PoolName.DRAFT_INDEXER.value))


@dataclass(frozen=True)
class Body:
    """The bytes of a pool: identity, place in the model, order in memory, and the memory."""

    pool: PoolView
    """Identity, tile and layout."""
    memory: Region | list[Region] | StagedMemory
    """The engine's memory, wrapped once."""
    page_bytes: int
    """Bytes of one page on this rank."""
    flat_dtype: torch.dtype | None
    """Element type of the engine's flat pages; None where it makes none."""


@dataclass(frozen=True)
class Binding:
    """One registered pool as the store sees it."""

    name: str
    """The engine's name of the pool."""
    page_size: int
    """Token slots of one page in the engine's indices; 1 where a slot is a whole state."""
    body: Body | None = None
    """What it holds; None for a pool without bytes, of which every page is there."""
    bound: tuple[str, ...] = ()
    """Why the pool's pages are not shared with deployments of another shape."""
    orphaned: str | None = None
    """Why the engine never writes this rank's part, where it does not."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return 0 if self.body is None else self.body.page_bytes

    def described(self) -> dict[str, Any]:
        """Returns the pool in words, for `stats`."""
        pool = None if self.body is None else self.body.pool
        return {
            "page_bytes": self.page_bytes,
            "identity": None if pool is None else json.loads(pool.pool.to_json()),
            "tile": None if pool is None else repr(pool.tile),
            "layout": None if pool is None else pool.layout,
            "read_by_all": pool is not None and pool.read_by_all,
            "bound": list(self.bound),
        }


@dataclass(frozen=True)
class _Held:
    """What a rank's host pool holds, before anything is said of other ranks."""

    kind: str
    dtype: str
    components: list[Component]
    layers: int
    heads: int | None
    """KV heads on this rank; None where rows have none."""
    layout: str
    memory: list[torch.Tensor]
    """A buffer with all components, or one for each."""
    page_bytes: int
    target_layers: int = 0
    formats: tuple[str, ...] = ()
    flat_dtype: torch.dtype | None = None
    is_state: bool = False
    """Whether tensor-parallel ranks hold different parts of it, whatever the model."""
    is_latent: bool = False
    """Whether tensor-parallel ranks hold the same, whatever the model."""
    staged: list[torch.Tensor] = field(default_factory=list)
    """Buffers `[P, bytes]` of which a page is put together."""
    tokens: tuple[int, int, int] | None = None
    has_stage: bool = False
    """Whether the pool's `start_layer` and `end_layer` are layers of the model."""


def bind(
    name: str, host_pool: Any, topology: Topology, facts: EngineFacts, draft_mark: str | None
) -> Binding:
    """Describes a host pool to the store.

    Args:
        name: The engine's name of the pool.
        host_pool: The engine's object.
        topology: Where this rank stands.
        facts: What the engine or the operator told of the model.
        draft_mark: What stands for the draft model's weights.

    Raises:
        UnsupportedError: A pool that this adapter, or the engine, cannot store.
        GeometryError: The pool is not what its class promises.
    """
    family, cls = family_of(host_pool)
    if family is None:
        raise UnsupportedError(REFUSED.get(cls, f"host pools of the class {cls} are not known here"))
    if any(getattr(host_pool, name, None) for name in ("stores_page_envelope", "shared_allocation_domain")):
        raise UnsupportedError(REFUSED["UnifiedPageEnvelopeHostPool"])
    page_size = int(getattr(host_pool, "logical_page_size", None) or host_pool.page_size)
    if family == "logical" or _has_no_memory(host_pool):
        return Binding(name, page_size)
    if topology.cp_kind == "replicated" and getattr(host_pool, "_layer_shard_enabled", False):
        raise UnsupportedError(
            'context-parallel ranks hold different layers of this pool: "cp_kind" must be "sharded"'
        )
    held = _FAMILIES[family](name, host_pool, facts)
    layers, heads, scope, bound = _place(name, host_pool, held, topology, facts)
    formats = list(held.formats)
    if tag := getattr(host_pool, "storage_format_tag", None):
        formats.append(str(tag))
    if draft_mark is not None and (name in _DRAFTS or 0 < held.target_layers < held.layers):
        formats.append(f"draft {draft_mark}")
    pool = Pool(name, held.kind, held.dtype, held.components, _row_format([*formats, *scope]))
    tile = Tile(layers, heads, held.tokens)
    read_by_all = _is_read_by_all(name, held, topology, facts)
    view = PoolView(pool, tile, held.layout, page_bytes=held.page_bytes, read_by_all=read_by_all)
    is_replicated = held.heads is None and not held.is_state
    orphaned = None
    if not topology.is_kv_writer and not is_replicated and name != PoolName.MAMBA.value:
        orphaned = "the engine writes it on one rank only, and this rank needs a part of its own"
    memory = StagedMemory(held.staged) if held.staged else _regions(held.memory)
    body = Body(view, memory, held.page_bytes, held.flat_dtype)
    return Binding(name, page_size, body, tuple(bound), orphaned)


def _has_no_memory(host_pool: Any) -> bool:
    """Whether the pool keeps slots only: a logical anchor, or the copy of a rank that another one feeds."""
    buffers = ("kv_buffer", "k_buffer", "index_k_with_scale_buffer")
    found = [vars(host_pool)[name] for name in buffers if name in vars(host_pool)]
    return bool(found) and all(buffer is None for buffer in found)


def _row_format(parts: Sequence[str]) -> str | None:
    text = "; ".join(parts)
    if len(text.encode()) > _LONGEST_ROW_FORMAT:
        text = f"{text[:60]}... {hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return text or None


def _regions(buffers: list[torch.Tensor]) -> Region | list[Region]:
    regions = [Region(buffer) for buffer in buffers]
    return regions if len(regions) > 1 else regions[0]


# -- where the rows stand in the model ------------------------------------------------------------------
def _place(
    name: str, host_pool: Any, held: _Held, topology: Topology, facts: EngineFacts
) -> tuple[tuple[int, int], tuple[int, int], list[str], list[str]]:
    """Layers and heads of the model that a pool holds, what else keeps it apart, and why."""
    scope, bound = [], []
    if topology.cp_scope is not None:
        scope.append(topology.cp_scope)
        bound.append(f"{topology.cp_scope}: context-parallel ranks hold different parts of a page")
    layers, total_layers = _layers(host_pool, held, topology, facts)
    if total_layers is None:
        scope.append(f"{topology.pp_scope} of {held.layers} layers")
        bound.append(_why_no_layers(name, held, topology, facts))
    elif held.target_layers:
        scope.append(f"{total_layers} layers")
    heads = (0, 1)
    if held.heads is not None:
        placed, total_heads = _heads(name, held, topology, facts)
        heads = placed or (0, held.heads)
        if placed is None:
            scope.append(f"{topology.tp_scope} of {held.heads} heads")
            bound.append(_why_no_heads(name, topology, facts))
        else:
            scope.append(f"{total_heads} heads")
    elif topology.tp_scope is not None and (held.is_state or not (topology.replicated or held.is_latent)):
        scope.append(topology.tp_scope)
        bound.append(f"{topology.tp_scope}: nothing tells how the rows of pool {name!r} are dealt to ranks")
    return layers, heads, scope, bound


def _layers(
    host_pool: Any, held: _Held, topology: Topology, facts: EngineFacts
) -> tuple[tuple[int, int], int | None]:
    """The pool's layers, and how many the model has; None for that where the layers are the stage's own."""
    own = (0, held.layers)
    if topology.pp_size == 1:
        return own, held.target_layers or held.layers
    start, end = int(host_pool.start_layer), int(host_pool.end_layer)
    # A pool of some layers of a stage (full attention beside windows or states) numbers them from 0, on every
    # stage, and its `end_layer` is the engine's default then, which is no end. Packed drafts follow the
    # stage's last layer.
    is_whole_stage = end - start == held.layers == held.target_layers
    total = facts.total_layers
    if not (held.has_stage and is_whole_stage) or total is None or end > total:
        return own, None
    return (start, end), total


def _why_no_layers(name: str, held: _Held, topology: Topology, facts: EngineFacts) -> str:
    if facts.total_layers is None and held.target_layers == held.layers:
        return f'{topology.pp_scope}: the model\'s number of layers is unknown, "total_layers" would tell'
    return f"{topology.pp_scope}: pool {name!r} holds some of its stage's layers, and does not tell which"


def _heads(
    name: str, held: _Held, topology: Topology, facts: EngineFacts
) -> tuple[tuple[int, int] | None, int | None]:
    """The pool's heads, and how many the model has; None where nobody tells."""
    count = held.heads or 0
    if topology.tp_size == 1:
        return (0, count), count
    total = facts.total_heads.get(name)
    return (None, None) if total is None else (topology.heads(count, total), total)


def _is_read_by_all(name: str, held: _Held, topology: Topology, facts: EngineFacts) -> bool:
    """Whether ranks beside this one hold, and so read, the very same pages of the pool."""
    if topology.cp_kind == "replicated":
        return True
    if topology.tp_size == 1 or held.is_state:
        return False
    if held.heads is None:
        return topology.replicated or held.is_latent
    # With fewer heads than ranks, neighbours hold the same one.
    return facts.total_heads.get(name, topology.tp_size) < topology.tp_size


def _why_no_heads(name: str, topology: Topology, facts: EngineFacts) -> str:
    if name == KV and KV not in facts.total_heads:
        return f'{topology.tp_scope}: the model\'s number of KV heads is unknown, "total_kv_heads" would tell'
    return f"{topology.tp_scope}: nothing tells which heads pool {name!r} holds"


# -- families -------------------------------------------------------------------------------------------
def _mha(name: str, host_pool: Any, facts: EngineFacts) -> _Held:
    layout = _layout(host_pool)
    layers, heads = int(host_pool.layer_num), int(host_pool.head_num)
    widths = {"k": int(host_pool.head_dim), "v": int(host_pool.v_head_dim)}
    buffers = host_pool.kv_buffer
    is_split = isinstance(buffers, list | tuple)
    memory = list(buffers) if is_split else [buffers]
    shapes = [_shape(host_pool, layout, heads, width) for width in widths.values()]
    if is_split:
        _expect([list(buffer.shape) for buffer in memory], shapes, "K and V")
    elif shapes[0] == shapes[1]:
        _expect([list(buffers.shape)], [[2, *shapes[0]]], "K and V")
    else:
        raise GeometryError("expected buffers of their own for K and V rows of different width, found one")
    dtype, formats = _dtype(host_pool.dtype, facts, "as written by the engine")
    device_layout = _device_layout(host_pool)
    itemsize = int(host_pool.dtype.itemsize)
    return _Held(
        kind=_KINDS.get(name, "kv"),
        dtype=dtype,
        components=[Component(part, width * itemsize) for part, width in widths.items()],
        layers=layers,
        heads=heads,
        layout=layout,
        memory=memory,
        page_bytes=int(host_pool.size_per_token) * int(host_pool.page_size),
        target_layers=int(host_pool.target_layer_num),
        formats=(*_packed_drafts(host_pool), *formats, *device_layout),
        flat_dtype=None if is_split else host_pool.dtype,
        has_stage=name == KV,
    )


def _mla(name: str, host_pool: Any, facts: EngineFacts) -> _Held:
    if host_pool.layout == "page_first_kv_split":
        return _split_mla(name, host_pool)
    layout = _layout(host_pool, _LAYOUTS[:3])
    width = int(host_pool.kv_cache_dim)
    _expect([list(host_pool.kv_buffer.shape)], [_shape(host_pool, layout, 1, width)], "latent rows")
    packed = bool(getattr(host_pool, "dsa_kv_cache_store_fp8", False))
    opaque = (
        f"packed fp8 {host_pool.kv_lora_rank}+{host_pool.qk_rope_head_dim}"
        if packed
        else "as written by the engine"
    )
    dtype, formats = _dtype(host_pool.dtype, EngineFacts() if packed else facts, opaque)
    tokens = None
    if int(host_pool.dcp_size) > 1:
        tokens = (int(host_pool.dcp_rank), int(host_pool.dcp_size), int(host_pool.page_size))
    return _Held(
        kind=_KINDS.get(name, "latent") if name != PoolName.SWA.value else "swa",
        dtype=dtype,
        components=[Component("latent", width * int(host_pool.dtype.itemsize))],
        layers=int(host_pool.layer_num),
        heads=None,
        layout=layout,
        memory=[host_pool.kv_buffer],
        page_bytes=int(host_pool.size_per_token) * int(host_pool.page_size),
        target_layers=int(host_pool.target_layer_num),
        formats=(*_packed_drafts(host_pool), *formats),
        flat_dtype=host_pool.dtype,
        is_latent=True,
        tokens=tokens,
        has_stage=name == KV,
    )


def _split_mla(name: str, host_pool: Any) -> _Held:
    """Latent rows and index keys in buffers of their own, with layers of their own: whole pages, not rows."""
    names = ["k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer"]
    if getattr(host_pool, "dsa_kv_cache_store_fp8", False):
        names.remove("v_buffer")  # the engine packs V into K there, and never fills it
    buffers = {part: buffer for part in names if (buffer := getattr(host_pool, part, None)) is not None}
    if int(host_pool.dcp_size) > 1:
        raise UnsupportedError(
            "the engine does not store page_first_kv_split pools with decode context parallelism"
        )
    pages = int(host_pool.page_num)
    formats = ("page_first_kv_split", *_packed_drafts(host_pool))
    whole = _whole_pages(_KINDS.get(name, "latent"), buffers, pages, formats)
    return replace(whole, is_latent=True, flat_dtype=None)


def _keys(name: str, host_pool: Any, facts: EngineFacts) -> _Held:
    layout = _layout(host_pool, _LAYOUTS[:3])
    heads, width = int(host_pool.head_num), int(host_pool.head_dim)
    _expect([list(host_pool.k_buffer.shape)], [_shape(host_pool, layout, heads, width)], "keys")
    dtype, formats = _dtype(host_pool.dtype, facts, "as written by the engine")
    return _Held(
        kind=_KINDS.get(name, "indexer"),
        dtype=dtype,
        components=[Component("k", width * int(host_pool.dtype.itemsize))],
        layers=int(host_pool.layer_num),
        heads=heads,
        layout=layout,
        memory=[host_pool.k_buffer],
        page_bytes=int(host_pool.size_per_token) * int(host_pool.page_size),
        target_layers=int(host_pool.layer_num),
        formats=formats,
        flat_dtype=host_pool.dtype,
    )


def _rows(name: str, host_pool: Any, _facts: EngineFacts) -> _Held:
    layout = _layout(host_pool, _LAYOUTS[:3])
    layers = int(host_pool.layer_num)
    buffers = getattr(host_pool, "index_k_with_scale_buffer", None)
    if buffers is None:
        buffers = host_pool.kv_buffer
    staged: list[torch.Tensor] = []
    if isinstance(buffers, list | tuple):
        shapes = {tuple(buffer.shape) for buffer in buffers}
        if len(shapes) != 1 or len(buffers) != layers or layout != "layer_first":
            raise GeometryError(
                f"expected {layers} equal buffers of page rows, found the shapes {sorted(shapes)}"
            )
        memory, row_bytes = [], _nbytes(buffers[0].shape[1:], buffers[0])
        staged, layout = list(buffers), "page_first"
    else:
        memory = [buffers]
        axis = 0 if layout == "layer_first" else 1
        row_bytes = _nbytes(buffers.shape[2:], buffers)
        if buffers.shape[axis] != layers or buffers.dim() not in (3, 4):
            raise GeometryError(
                f"expected page rows of {layers} layers in {layout}, found the shape {list(buffers.shape)}"
            )
    return _Held(
        kind=_row_kind(name),
        dtype="uint8",
        components=[Component("rows", row_bytes, "page")],
        layers=layers,
        heads=None,
        layout=layout,
        memory=memory,
        page_bytes=layers * row_bytes,
        target_layers=int(getattr(host_pool, "target_layer_num", layers)),
        formats=_packed_drafts(host_pool),
        flat_dtype=torch.uint8,
        staged=staged,
        has_stage=name == PoolName.INDEXER.value and hasattr(host_pool, "index_k_with_scale_buffer"),
    )


def _mamba(name: str, host_pool: Any, _facts: EngineFacts) -> _Held:
    buffers = {"temporal": host_pool.temporal_buffer}
    buffers |= {f"conv_{index}": buffer for index, buffer in enumerate(host_pool.conv_buffer)}
    buffers |= {f"side_{index}": buffer for index, buffer in enumerate(host_pool.slot_state_buffers)}
    held = {part: buffer for part, buffer in buffers.items() if buffer.numel() > 0}
    drafts = len(getattr(host_pool, "mtp_draft_buffer_infos", ()))
    formats = [f"{host_pool.num_mamba_layers - drafts} state layers"]
    if drafts:
        formats.append(f"draft-layers:{drafts}")
    return _whole_pages(_KINDS.get(name, "state"), held, int(host_pool.size), tuple(formats), is_state=True)


def _whole_pages(
    kind: str,
    buffers: Mapping[str, torch.Tensor],
    pages: int,
    formats: tuple[str, ...],
    *,
    is_state: bool = False,
) -> _Held:
    """Pages of several buffers `[P, ...]`, of which nothing but their bytes is known."""
    for part, buffer in buffers.items():
        if buffer.shape[0] != pages or not buffer.is_contiguous():
            raise GeometryError(f"expected {pages} pages in {part}, found the shape {list(buffer.shape)}")
    sizes = {part: _nbytes(buffer.shape[1:], buffer) for part, buffer in buffers.items()}
    total = sum(sizes.values())
    staged: list[torch.Tensor] = []
    if len(buffers) > _MOST_COMPONENTS:
        components = [Component("state", total, "page")]
        staged = list(buffers.values())
        formats = (*formats, hashlib.sha256(repr(sizes).encode()).hexdigest()[:16])
    else:
        components = [
            Component(part, size, "page", _name(buffers[part].dtype)) for part, size in sizes.items()
        ]
    return _Held(
        kind=kind,
        dtype="uint8",
        components=components,
        layers=1,
        heads=None,
        layout="page_first",
        memory=[] if staged else list(buffers.values()),
        page_bytes=total,
        formats=formats,
        flat_dtype=torch.uint8,
        is_state=is_state,
        staged=staged,
    )


_FAMILIES: Final[Mapping[str, Callable[[str, Any, EngineFacts], _Held]]] = {
    "mha": _mha,
    "mla": _mla,
    "keys": _keys,
    "rows": _rows,
    "mamba": _mamba,
}


def _layout(host_pool: Any, known: Sequence[str] = _LAYOUTS) -> str:
    layout = str(host_pool.layout)
    if layout not in known:
        raise UnsupportedError(
            f"host layout {layout!r}: the engine itself gives storage backends no pages of this pool, "
            f"expected --hicache-mem-layout {', '.join(known)}"
        )
    return layout


def _shape(host_pool: Any, layout: str, heads: int, width: int) -> list[int]:
    """What the engine's buffer of one component must look like."""
    layers, tokens, pages, page = (
        int(getattr(host_pool, name)) for name in ("layer_num", "size", "page_num", "page_size")
    )
    if tokens != pages * page:
        raise GeometryError(f"expected {pages} whole pages of {page} tokens, found {tokens} tokens")
    return {
        "layer_first": [layers, tokens, heads, width],
        "page_first": [tokens, layers, heads, width],
        "page_first_direct": [pages, layers, page, heads, width],
        "page_head": [pages, heads, page, layers, width],
    }[layout]


def _expect(found: list[list[int]], wanted: list[list[int]], what: str) -> None:
    if found != wanted:
        raise GeometryError(f"expected buffers of the shapes {wanted} for {what}, found {found}")


def _nbytes(shape: Sequence[int], buffer: torch.Tensor) -> int:
    return math.prod(shape) * int(buffer.element_size())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(dtype: torch.dtype, facts: EngineFacts, opaque: str) -> tuple[str, tuple[str, ...]]:
    """The element type: the engine keeps 8-bit floats in bytes, and says elsewhere which they are."""
    if dtype != torch.uint8:
        return _name(dtype), ()
    if (facts.kv_dtype or "").startswith("fp4"):
        raise UnsupportedError(
            f"rows of {facts.kv_dtype} keep their block scales in a buffer of their own, and this host pool "
            "has none: a restored page would be read with the scales of another"
        )
    return ("uint8", (opaque,)) if facts.kv_dtype is None else (facts.kv_dtype, ())


def _device_layout(host_pool: Any) -> tuple[str, ...]:
    """How the device orders a row's elements where that is unusual: the host keeps that order."""
    for info in getattr(host_pool, "_buffer_infos", ()):
        layout = str(getattr(info.buffers.layout, "value", "nhd"))
        if layout not in ("nhd", "paged_nhd"):
            return (f"device {layout}",)
    return ()


def _packed_drafts(host_pool: Any) -> tuple[str, ...]:
    """Names the draft's layers behind the target's: such pages are never those of a target alone."""
    layers = int(host_pool.layer_num)
    drafts = layers - int(getattr(host_pool, "target_layer_num", layers))
    return (f"draft-layers:{drafts}",) if drafts > 0 else ()


def _row_kind(name: str) -> str:
    if name in _KINDS:
        return _KINDS[name]
    if name.endswith("_state"):
        return "state"
    return "indexer" if "indexer" in name else "latent"
