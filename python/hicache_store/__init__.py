"""A page store for SGLang's KV cache: pages that any engine topology can write and any other can restore.

    from hicache_store import Namespace, Pool, Store, Tile, page_keys

    store = Store.open("/var/cache/hicache", capacity="500GiB")
    view = store.view(
        Namespace("org/model", revision="9f1c2d7", page_size=64),
        Pool("kv", "kv", "bfloat16", components={"k": 256, "v": 256}),
        tile=Tile(layers=(0, 32), heads=(0, 8)),
    )
    keys = page_keys(tokens, 64)
    view.backup(keys, host_pool, slots)    # an outcome for each page
    view.match(keys).pages                 # the longest prefix that can be restored
    view.restore(keys, host_pool, slots)   # each page is exact, or reported missing

What the store has to say goes to the logger `hicache_store`. Importing this package imports neither numpy nor
torch nor sglang.
"""

from hicache_store._hicache_store import (
    BackupReport,
    BackupTicket,
    Component,
    HitPolicy,
    HostEvent,
    HostPool,
    LayerTicket,
    LayerwiseRestore,
    Layout,
    Match,
    Namespace,
    Pool,
    PoolMember,
    PoolSet,
    PoolView,
    Region,
    RestoreReport,
    SlotLease,
    Store,
    Tile,
    TransferPlan,
    TransferPool,
    View,
    __version__,
    chain_seed,
    page_keys,
)
from hicache_store.exceptions import (
    ConfigError,
    CorruptError,
    DeviceError,
    FormatVersionError,
    GeometryError,
    HiCacheStoreError,
    LeaseError,
    NamespaceError,
    PoolExhaustedError,
    ResourceLimitError,
    StoreClosedError,
    StoreIOError,
    UnsupportedError,
)

__all__ = [
    "BackupReport",
    "BackupTicket",
    "Component",
    "ConfigError",
    "CorruptError",
    "DeviceError",
    "FormatVersionError",
    "GeometryError",
    "HiCacheStoreError",
    "HitPolicy",
    "HostEvent",
    "HostPool",
    "LayerTicket",
    "LayerwiseRestore",
    "Layout",
    "LeaseError",
    "Match",
    "Namespace",
    "NamespaceError",
    "Pool",
    "PoolExhaustedError",
    "PoolMember",
    "PoolSet",
    "PoolView",
    "Region",
    "ResourceLimitError",
    "RestoreReport",
    "SlotLease",
    "Store",
    "StoreClosedError",
    "StoreIOError",
    "Tile",
    "TransferPlan",
    "TransferPool",
    "UnsupportedError",
    "View",
    "__version__",
    "chain_seed",
    "page_keys",
]
