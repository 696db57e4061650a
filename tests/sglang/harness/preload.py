"""What every worker needs, imported once by the process that they are forked from."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    from harness import backends, devices, pools, tree

__all__ = ["backends", "devices", "pools", "tree"]

# Loads, and if need be compiles, the engine's hash before there is more than one process.
assert get_storage_hash_str([1], None, page_size=1)
