"""How many pages a second does `View.match` look up from Python, with a million objects in the index?

Keys are a list of 32-byte digests, as an engine has them; lengths are random up to 2,000 pages, every tenth
chain has a hole at a random place, and every answer is checked.
"""

import hashlib
import random
import statistics
import tempfile
import time

import numpy as np
from hicache_store import Namespace, Pool, Store, Tile

OBJECTS = 1_000_000
LONGEST = 2_000
ROUNDS = 7


def main() -> None:
    """Fills a store and prints the rate."""
    chooser = random.Random(7)
    with tempfile.TemporaryDirectory() as folder, Store.open(folder, capacity=8 << 30) as store:
        pool = Pool("kv", "kv", "bfloat16", components={"k": 8, "v": 8})
        namespace = Namespace("bench/match", revision="r1", page_size=1)
        view = store.view(namespace, pool, tile=Tile(layers=(0, 1), heads=(0, 1)), layout="page_first")
        memory = np.zeros(16 * LONGEST, np.uint8)
        chains: list[tuple[list[bytes], int]] = []
        objects = 0
        while objects < OBJECTS:
            length = chooser.randint(1, LONGEST)
            keys = [hashlib.sha256(b"%d %d" % (len(chains), page)).digest() for page in range(length)]
            stored = chooser.randrange(length) if len(chains) % 10 == 9 else length
            slots = np.arange(length)
            slots[stored : stored + 1] = -1
            report = view.backup(keys, memory, slots, depth=0)
            assert report.reason is None, report.reason
            chains.append((keys, stored))
            objects += int((slots >= 0).sum())
        rates = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            pages = 0
            for keys, stored in chains:
                found = view.match(keys).pages
                assert found == stored
                pages += found
            rates.append(pages / (time.perf_counter() - started) / 1e6)
    spread = f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"
    print(f"RESULT: match from Python: {objects} objects, {len(chains)} chains: {spread} M pages/s (bar 2)")


if __name__ == "__main__":
    main()
