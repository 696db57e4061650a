"""SGLang's host pools in memory of this library: huge pages, near a device, registered, and reported.

    HICACHE_HOST_POOL=on python -m sglang.launch_server --enable-hierarchical-cache ...
    HICACHE_HOST_POOL='{"huge_pages": "require", "numa": "local"}' python -m sglang.launch_server ...

The engine finds `plugin` by the entry point `sglang.srt.plugins` and runs it in each of its processes.
Unless `HICACHE_HOST_POOL` asks for it, nothing is imported and nothing changes. Asked for, every host tensor
that the engine would map and register itself is a view of a `HostPool`, with the options given; where these
cannot be met the engine does not start, and says why. Memory that a storage backend allocates (mooncake, shm,
...) stays where it is.

Who registers also unregisters: the engine is told that nothing of a registered pool is its to undo. What our
driver calls could not register, the engine registers and unregisters as it does with its own memory.

Source: sglang 0.5.23, `srt/plugins/__init__.py` and `srt/mem_cache/pool_host/common.py`.
"""

import collections
import json
import logging
import math
import os
from collections.abc import Callable
from typing import Any, Final

from hicache_store import ConfigError, HostPool

__all__ = ["ENVIRONMENT", "options", "place", "placed", "plugin"]

ENVIRONMENT: Final = "HICACHE_HOST_POOL"
"""Variable that asks for it: `on`, or a JSON object with keywords of `HostPool`."""

SEAM: Final = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"
"""The engine's function that maps and registers host memory on devices that CUDA's driver serves."""

REGISTERED_RANGES: Final = "_sglang_cuda_host_registered_ranges"
"""Attribute of a tensor: what the engine has registered of it, and will unregister."""

logger = logging.getLogger("hicache_store.sglang")


def options(text: str) -> dict[str, Any] | None:
    """Keywords of `HostPool` that the variable's text asks for; None where it asks for nothing.

    Raises:
        ConfigError: The text is neither a switch nor a JSON object with keywords that can be chosen here.
    """
    word = text.strip()
    if word.lower() in {"", "0", "off", "no", "false"}:
        return None
    if word.lower() in {"1", "on", "yes", "true"}:
        return {}
    refusal = f"{ENVIRONMENT}: expected on, off or a JSON object with keywords of HostPool, found {text!r}"
    try:
        found = json.loads(word)
    except ValueError as error:
        raise ConfigError(refusal) from error
    if not isinstance(found, dict) or not found.keys() <= CHOICES:
        raise ConfigError(f"{refusal}; the keywords are {', '.join(sorted(CHOICES))}")
    return found


CHOICES: Final = frozenset(
    {
        "huge_page_bytes",
        "huge_pages",
        "lock",
        "numa",
        "numa_required",
        "prefault",
        "register",
        "register_piece",
        "touch_threads",
    }
)
"""Keywords that the variable may have; sharing and sizes are the engine's."""


_placed: Final[collections.deque[tuple[str, str, str]]] = collections.deque(maxlen=16)


def placed() -> list[tuple[str, str, str]]:
    """The latest tensors that `place` placed in this process: name, place and reason of each, in words."""
    return list(_placed)


def plugin() -> None:
    """Places the engine's host pools in `HostPool`, if `HICACHE_HOST_POOL` asks for it. Run by the engine.

    Raises:
        ConfigError: The variable's text means nothing. The engine logs it and goes on with its own memory.
    """
    asked = options(os.environ.get(ENVIRONMENT, ""))
    if asked is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return place(original, asked, *arguments, **keywords)

    HookRegistry.register(SEAM, around, HookType.AROUND)
    logger.info("host pools will be placed in memory of hicache_store, with %s", asked or "its usual options")


def place(
    original: Callable[..., Any],
    asked: dict[str, Any],
    dims: tuple[int, ...],
    dtype: Any,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    """Does what the engine's `alloc_with_host_register` does, in a pool of ours.

    Args:
        original: The engine's function, for memory that is not ours to place.
        asked: Keywords of `HostPool`.
        dims: Shape of the tensor.
        dtype: Its `torch.dtype`.
        device: Where it stands: "cpu".
        pin_memory: Whether devices must reach it.
        allocator: Who allocates; one of a storage backend's own is left alone.
        registration_granularity_bytes: Bytes of a copy page, which no registered piece cuts in two; None for
            a single piece.

    Returns:
        A CPU tensor of shape `dims`, zeroed, which keeps the pool.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import common

    nbytes = math.prod(dims) * dtype.itemsize
    if device != "cpu" or type(allocator) is not common.HostTensorAllocator or nbytes == 0:
        return original(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes)
    page = registration_granularity_bytes or nbytes
    pool = HostPool(-(-nbytes // page), page, **({"register": "try" if pin_memory else "off"} | asked))
    tensor = torch.frombuffer(pool, dtype=dtype, count=math.prod(dims)).reshape(dims)
    stats = pool.stats()
    if pin_memory and not stats["registered_pieces"]:
        common._cuda_host_register(tensor, registration_granularity_bytes)
    else:
        setattr(tensor, REGISTERED_RANGES, [])
    # The allocator is what the engine asks for shape and dtype afterwards.
    allocator.dtype, allocator.dims = dtype, dims
    got = ", ".join(pool.got) or "ordinary memory"
    reason = got + "".join(f"; not {line}" for line in stats["unmet"])
    logger.info("host pool of %.2f GiB: %s", nbytes / (1 << 30), reason)
    shape = f"{dtype} {list(dims)}"
    _placed.append(
        (f"host pool of {nbytes / (1 << 30):.2f} GiB", "hicache_store", f"{shape}: {reason[:500]}")
    )
    return tensor
