"""What differs between SGLang's releases: the one file to change for a new one.

Names of the engine's classes and how its facts are asked for. Everything that a release may lack is asked for
with care, and its absence costs sharing between topologies, never correctness.
"""

import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

__all__ = [
    "AUDITED",
    "AUDITED_AFTER",
    "AUDITED_LOCKS",
    "AUDITED_STEP",
    "FAMILIES",
    "KV",
    "REFUSED",
    "TESTED",
    "Audited",
    "EngineFacts",
    "HiCacheStorage",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransferResult",
    "axes",
    "engine_facts",
    "family_of",
    "pool_name",
    "running",
    "storage_metrics",
]

TESTED: Final = "0.5.23"
"""The release that this adapter is tested against."""

KV: Final[str] = PoolName.KV.value
"""Name of the anchor pool, whose pages are the pages of the prefix."""

FAMILIES: Final[Mapping[str, str]] = {
    "MHATokenToKVPoolHost": "mha",
    "AsymmetricMHATokenToKVPoolHost": "mha",
    "MLATokenToKVPoolHost": "mla",
    "MHATokenToKOnlyPoolHost": "keys",
    "DSAIndexerPoolHost": "rows",
    "DeepSeekV4PagedHostPool": "rows",
    "DeepSeekV4StateHostPool": "rows",
    "MiniMaxM3Nvfp4IndexKPoolHost": "rows",
    "MiniMaxM3Nvfp4MainKVPoolHost": "rows",
    "MambaPoolHost": "mamba",
    "LogicalHostPool": "logical",
}
"""Families of host pools, see `binding`, by the engine's class; a class derived from one is of its family."""

REFUSED: Final[Mapping[str, str]] = {
    "MHATokenToKVPoolMXFP8Host": "the engine keeps the scales of MXFP8 pages out of reach",
    "PageInterleaveHostPool": "the engine refuses storage backends together with --enable-kv-cache-sharding",
    "UnifiedPageEnvelopeHostPool": 'pages that move in a shared arena: the engine gives them to "mori" alone',
}
"""Host pools that cannot be served, by the engine's class, and why."""


@dataclass(frozen=True)
class Audited:
    """A method of the tree, and what of its calls is equal on all ranks: selectors of `rank_consensus`."""

    method: str
    name: str
    params: Sequence[str] = ()
    result: Sequence[str] = ()


_KEY: Final = ("len(params.key)", "digest(params.key.token_ids)")
_TO_EVICT: Final = ("params.num_tokens", "params.swa_num_tokens", "params.mamba_num")
_EVICTED: Final = (
    "result.num_tokens_evicted",
    "result.swa_num_tokens_evicted",
    "result.mamba_num_evicted",
)

AUDITED: Final[Sequence[Audited]] = (
    Audited("match_prefix", "match", _KEY, ("result.device_prefix_len", "result.host_hit_length")),
    Audited("insert", "insert", _KEY, ("result.prefix_len",)),
    Audited("evict", "evict", _TO_EVICT, _EVICTED),
    Audited("evict_for_alloc", "evict", _TO_EVICT, _EVICTED),
    Audited("evict_host", "evict host", ("num_tokens",), ("result",)),
    Audited("prefetch_from_storage", "prefetch", ("request.rid", "len(new_input_tokens)"), ("result",)),
    Audited("load_back", "load back", ("node_id",), ("result",)),
    Audited("_execute_and_commit_kv_backup", "backup", ("action.node_ids",), ("result",)),
    Audited("write_backup_storage", "backup to storage", ("node_id",)),
)
"""What `rank_audit` records of the tree. A method that another release lacks is left out, with a warning."""

AUDITED_LOCKS: Final[Mapping[str, str]] = {
    "inc_lock_ref": "lock",
    "dec_lock_ref": "unlock",
    "inc_host_lock_ref": "lock host",
    "dec_host_lock_ref": "unlock host",
}
"""Methods of the tree that change locks, and the name of the change."""

AUDITED_STEP: Final = "check_hicache_events"
"""What the scheduler calls once a step."""

AUDITED_AFTER: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache"
"""After this a tree is complete."""

_log: Final = logging.getLogger("hicache_store.sglang")


@dataclass(frozen=True)
class EngineFacts:
    """What the engine knows of the model and no host pool tells; None and empty where it does not say."""

    model_path: str | None = None
    """Folder or hub name of the weights."""
    revision: str | None = None
    """Revision of the weights: the commit in the hub's cache, else as the operator named it."""
    total_layers: int | None = None
    """Layers with a cache, over all pipeline stages."""
    total_heads: Mapping[str, int] = field(default_factory=dict)
    """KV heads over all tensor-parallel ranks, by the name of the pool."""
    kv_dtype: str | None = None
    """Element type of the cache, where it is a float of 8 or 4 bits and the pools only say "bytes"."""
    draft_model: str | None = None
    """Folder or hub name of the draft model's weights, with revision and cache type where they were named."""
    overrides: str | None = None
    """What the operator changed of the model's own config, such as its rotary scaling."""


def axes() -> tuple[dict[str, int], dict[str, int]]:
    """Returns the sizes of the axes that ranks agree over, and this rank's place on each."""
    from sglang.srt.runtime_context import get_parallel

    at = get_parallel()
    names = {"pp": "pp", "cp": "attn_cp", "tp": "attn_tp", "dp": "attn_dp"}
    sizes = {axis: int(getattr(at, f"{name}_size")) for axis, name in names.items()}
    # A rank on an axis of one is 0, whether the engine has said so or not.
    place = {axis: int(getattr(at, f"{name}_rank")) if sizes[axis] > 1 else 0 for axis, name in names.items()}
    return sizes, place


def running() -> str:
    """Returns the version of the engine that is installed; "unknown" where it does not say."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def pool_name(name: Any) -> str:
    """Returns a name as text: the engine gives members of its enums, or text."""
    return str(getattr(name, "value", name))


def family_of(host_pool: Any) -> tuple[str | None, str]:
    """Returns the family of a host pool, None where it is unknown or refused, and the engine's class."""
    for cls in type(host_pool).__mro__:
        if not cls.__module__.startswith("sglang."):
            continue
        if cls.__name__ in REFUSED or cls.__name__ in FAMILIES:
            return FAMILIES.get(cls.__name__), cls.__name__
    return None, type(host_pool).__name__


def engine_facts() -> EngineFacts:
    """Asks the engine of this process; one that is not started, or another release, tells nothing."""
    try:
        args = _server_args()
        return EngineFacts() if args is None else _facts(args)
    except Exception as error:  # whatever another release does: less is shared then
        _log.info("the engine did not tell its model's facts: %s: %s", type(error).__name__, error)
        return EngineFacts()


def storage_metrics(
    prefetch_pages: list[int], prefetch_rates: list[float], backup_pages: list[int], backup_rates: list[float]
) -> Any:
    """Returns the engine's own record of operations: pages of each, and its GB/s."""
    from sglang.srt.observability.metrics_collector import StorageMetrics

    return StorageMetrics(
        prefetch_pgs=prefetch_pages,
        prefetch_bandwidth=prefetch_rates,
        backup_pgs=backup_pages,
        backup_bandwidth=backup_rates,
    )


def _server_args() -> Any:
    """The arguments that the engine of this process was started with, or None."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # before 0.5.2x
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        return get_server_args()
    except (ValueError, RuntimeError):
        return None


def _facts(args: Any) -> EngineFacts:
    model_path = _text(args, "model_path")
    layers: int | None = None
    heads: dict[str, int] = {}
    config = _model_config(args, model_path)
    if config is not None:
        layers = int(config.num_hidden_layers)
        if int(getattr(config, "num_attention_layers", layers)) != layers:
            layers = None  # stages are cut by other layers than the pools count
        heads[KV] = int(config.get_total_num_kv_heads())
        if hasattr(config, "get_swa_num_kv_heads"):
            heads[PoolName.SWA.value] = int(config.get_swa_num_kv_heads(1))
    draft = _text(args, "speculative_draft_model_path")
    if draft is not None:
        more = ("speculative_draft_model_revision", "speculative_draft_kv_cache_dtype")
        draft = "@".join(filter(None, (draft, *(_text(args, name) for name in more))))
    overrides = _text(args, "json_model_override_args")
    return EngineFacts(
        model_path=model_path,
        revision=_revision(model_path, _text(args, "revision")),
        total_layers=layers,
        total_heads={name: count for name, count in heads.items() if count > 0},
        kv_dtype=_kv_dtype(args),
        draft_model=draft,
        overrides=None if overrides in (None, "{}") else overrides,
    )


def _revision(model_path: str | None, named: str | None) -> str | None:
    """The commit of a model that the engine took from its hub's cache, else the revision as it was named."""
    if model_path is None or Path(model_path).exists():
        return named
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return named
    try:
        found = try_to_load_from_cache(model_path, "config.json", revision=named)
    except HFValidationError:  # no name of a hub
        return named
    return Path(found).parent.name if isinstance(found, str) else named


def _model_config(args: Any, model_path: str | None) -> Any:
    """The engine's model config if it was made already, or can be without asking a hub."""
    made = getattr(args, "_model_config", None)
    if made is not None or model_path is None or not Path(model_path, "config.json").is_file():
        return made
    from sglang.srt.runtime_context import process_model_config

    return process_model_config()


def _kv_dtype(args: Any) -> str | None:
    try:
        from sglang.srt.runtime_context import get_model

        chosen = str(get_model().kv_cache_dtype)
    except (ImportError, ValueError, AttributeError):
        chosen = str(getattr(args, "kv_cache_dtype", ""))
    if chosen.startswith("fp4"):
        return chosen
    if not chosen.startswith("fp8_"):
        return None  # "auto" may be an 8-bit float too, by the checkpoint: it does not say which
    from sglang.srt.utils import is_hip

    if is_hip():
        from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype

        return str(fp8_dtype).removeprefix("torch.")
    return {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(chosen)


def _text(args: Any, name: str) -> str | None:
    value = getattr(args, name, None)
    return value if isinstance(value, str) and value else None
