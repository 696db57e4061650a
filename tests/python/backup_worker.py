"""Backs up chains until it is killed: `backup_worker.py ROOT FIRST`, a line of output for each one stored.

Chain `n` has 8 pages; what its pages hold follows from `n` alone, so that another process can check them.
"""

import sys

import numpy as np
from hicache_store import Namespace, Pool, Store, Tile, View, page_keys

PAGES = 8
NAMESPACE = Namespace("org/tiny", revision="r1", page_size=4)
# 2 layers x 2 heads x 4 tokens x K and V of 2,048 bytes: pages of 64 KiB, so that kills strike inside writes.
POOL = Pool("kv", "kv", "bfloat16", components={"k": 2048, "v": 2048})
PAGE_BYTES = 65536


def open_view(store: Store) -> View:
    """The view that both sides use."""
    return store.view(NAMESPACE, POOL, tile=Tile(layers=(0, 2), heads=(0, 2)), layout="page_first_direct")


def chain_keys(number: int) -> list[bytes]:
    """Keys of chain `number`."""
    return page_keys(list(range(4 * PAGES)), 4, extra_key=f"chain {number}")


def chain_bytes(number: int) -> np.ndarray:
    """Memory of chain `number`, page `i` in slot `i`."""
    return np.random.default_rng(number).integers(0, 256, PAGES * PAGE_BYTES, dtype=np.uint8)


def main() -> None:
    """Backs up chain after chain."""
    number = int(sys.argv[2])
    view = open_view(Store.open(sys.argv[1], capacity=1 << 30))
    while True:
        report = view.backup(chain_keys(number), chain_bytes(number), range(PAGES), depth=0)
        if report.count("stored") != PAGES:
            sys.exit(f"chain {number} was not stored: {report}")
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    main()
