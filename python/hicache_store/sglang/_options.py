"""Options as a dict, until the extension parses them."""

import json
from typing import Any

from hicache_store import ConfigError

_DEFAULTS: dict[str, Any] = {
    "path": None,
    "capacity": None,
    "free_space_floor": None,
    "time_to_live": None,
    "revision": None,
    "salt": None,
    "codec": "none",
    "durable": False,
    "verify": True,
    "io_mode": "auto",
    "io_threads": None,
    "deadline": 5.0,
    "cp_kind": None,
    "model": None,
    "model_path": None,
    "total_layers": None,
    "total_kv_heads": None,
    "bounce": "auto",
    "metrics": None,
    "detect_conflicts": False,
    "interface_v1": False,
}
_ENGINE = {
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "tp_lcm_size",
    "file_storage_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
}


def parse(text: str) -> dict[str, Any]:
    """Fills in the defaults."""
    given = json.loads(text)
    unknown = [key for key in given if key not in _DEFAULTS and key not in _ENGINE]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}")
    if not given.get("path"):
        raise ConfigError('the option "path" is missing')
    options = _DEFAULTS | {key: value for key, value in given.items() if key in _DEFAULTS}
    options["interface_v1"] = bool(given.get("interface_v1"))
    return options
