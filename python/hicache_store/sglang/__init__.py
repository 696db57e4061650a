"""The store as SGLang's external cache tier: `--hicache-storage-backend dynamic`.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "hicache_store", "module_path": "hicache_store.sglang",
        "class_name": "HiCacheStoreBackend", "interface_v1": true,
        "hicache_storage_pass_prefix_keys": true, "path": "/var/cache/hicache", "capacity": "500GiB"}'

`hicache-store sglang-config` prints that option; `docs/sglang.md` describes it. This package is the only one
here that imports the engine. What it has to say goes to the logger `hicache_store.sglang`.

The engine imports this package in each of its processes, for the plugins in `host_pool` and `rank_audit`;
the backend, with all that it imports of the engine, is loaded when it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_store.sglang.backend import HiCacheStoreBackend

__all__ = ["HiCacheStoreBackend"]


def __getattr__(name: str) -> object:
    """Imports the backend, and with it the engine, for who asks."""
    if name == "HiCacheStoreBackend":
        from hicache_store.sglang.backend import HiCacheStoreBackend

        return HiCacheStoreBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
