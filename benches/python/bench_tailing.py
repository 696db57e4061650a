"""What does it cost a `View.match` that 63 other processes have journals in the root?

Each call looks at every journal of a live process. Timed is the match of a short stored prefix: alone in the
root, with 63 other stores open in seven other processes, each with a journal of its own, and alone again when
they have closed.
"""

import hashlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from hicache_store import Namespace, Pool, Store, Tile, View

PAGES = 4
OTHERS = 7
STORES_IN_EACH = 9
ROUNDS = 9
CALLS = 2_000
MOST_REFUSALS = 100


def open_view(folder: str) -> tuple[Store, View]:
    """Opens the root as everybody here does."""
    store = Store.open(folder, capacity=1 << 30, io_threads=1)
    pool = Pool("kv", "kv", "bfloat16", components={"k": 8, "v": 8})
    namespace = Namespace("bench/tailing", revision="r1", page_size=1)
    view = store.view(namespace, pool, tile=Tile(layers=(0, 1), heads=(0, 1)), layout="page_first")
    return store, view


def backup(view: View, name: str) -> tuple[list[bytes], int]:
    """Stores a chain, so that the store has a journal. Its keys, and how often the store refused."""
    keys = [hashlib.sha256(f"{name} {page}".encode()).digest() for page in range(PAGES)]
    memory, slots = np.zeros(16 * PAGES, np.uint8), np.arange(PAGES)
    refused = 0
    # When all begin at once, some find the budget's ledger locked for longer than the store waits.
    while (reason := view.backup(keys, memory, slots, depth=0).reason) is not None:
        assert refused < MOST_REFUSALS, reason
        refused += 1
    return keys, refused


def other(folder: str, number: str) -> None:
    """In a process of its own: some stores, open until the input ends."""
    stores = [open_view(folder) for _ in range(STORES_IN_EACH)]
    refused = sum(backup(view, f"{number} {index}")[1] for index, (_, view) in enumerate(stores))
    print(refused, flush=True)
    sys.stdin.read()
    for store, _ in stores:
        store.close()


def measure(view: View, keys: list[bytes]) -> list[float]:
    """Microseconds of a call, the median of each round."""
    medians = []
    for _ in range(ROUNDS):
        figures = []
        for _ in range(CALLS):
            started = time.perf_counter_ns()
            found = view.match(keys)
            figures.append((time.perf_counter_ns() - started) / 1e3)
            assert found.pages == PAGES
        medians.append(statistics.median(figures))
    return medians


def in_words(figures: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(figures):.1f} ({min(figures):.1f} to {max(figures):.1f})"


def main() -> None:
    """Prints the times of a call, and the difference."""
    with tempfile.TemporaryDirectory() as folder:
        store, view = open_view(folder)
        keys, _ = backup(view, "own")
        alone = measure(view, keys)
        command = [sys.executable, __file__, folder]
        others = [
            subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for number in range(OTHERS)
        ]
        refused = 0
        for process in others:
            assert process.stdout is not None
            refused += int(process.stdout.readline())
        together = measure(view, keys)
        for process in others:
            process.communicate()
        after = measure(view, keys)
        store.close()
    journals = 1 + OTHERS * STORES_IN_EACH
    difference = statistics.median(together) - statistics.median(alone)
    print(
        f"RESULT: tailing from Python: a match of {PAGES} pages takes {in_words(alone)} us with one journal, "
        f"{in_words(together)} us with {journals} of live processes: {difference:.1f} us more (bar 20); "
        f"{in_words(after)} us after the others closed; {refused} backups refused while the others began"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        other(*sys.argv[1:])
    else:
        main()
