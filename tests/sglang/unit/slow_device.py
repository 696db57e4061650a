"""Restores six pages while the file layer holds one read, and says what was in the host pool when. A program.

LD_PRELOAD=slow_read.so SLOW_READ_CONTROL=CONTROL python slow_device.py ROOT CONTROL always|never|auto SECONDS

A call has a deadline of so many seconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from harness import backends, pools
    from hicache_store.sglang import HiCacheStoreBackend

FROM, TO = (5, 2, 9, 0, 7, 3), (1, 4, 6, 8, 10, 12)


def opened(root, pool, **extra):
    backend = HiCacheStoreBackend(backends.config(backends.options(root) | extra), {})
    backends.register(backend, pool)
    return backend


def main() -> None:
    root, control, bounce, deadline = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    held, go = Path(f"{control}.held"), Path(f"{control}.go")
    keys = backends.keys(6)
    source = pools.fill(pools.build("mha", "page_first"), 1)
    target = pools.paint(pools.build("mha", "page_first"))

    writer = opened(root, source)
    assert all(writer.batch_set_v1(keys, pools.indices(source, FROM)))
    writer.close()

    before = pools.pages_of(target, TO)
    reader = opened(root, target, deadline=deadline, bounce=bounce)

    returned = threading.Event()

    def hold_for(seconds):
        def let_go():
            while not held.exists() and not returned.is_set():
                time.sleep(0.01)
            time.sleep(seconds)
            go.touch()

        control.touch()
        thread = threading.Thread(target=let_go, daemon=True)
        thread.start()
        return thread

    came = None
    if bounce == "never":
        # The read goes to the host pool itself: the call cannot end before it.
        hold_for(3 * deadline)
    elif bounce == "auto":
        # A device that takes more than a quarter of the deadline for a read, and no more than that.
        slow = hold_for(0.4 * deadline)
        came = reader.batch_get_v1(keys, pools.indices(target, FROM))
        returned.set()  # perhaps before it came to read
        slow.join()
        go.unlink()
        control.touch()
    else:
        control.touch()
    answer = reader.batch_get_v1(keys, pools.indices(target, TO))
    was_held = held.exists()
    at_return = pools.pages_of(target, TO)
    go.touch()
    while held.exists() or reader.stats()["store"]["device"]["abandoned_requests"]:
        time.sleep(0.01)
    print(
        json.dumps(
            {
                "came_late": came,
                "answer": answer,
                "was_held": was_held,
                "untouched": at_return == before,
                "as_at_return": pools.pages_of(target, TO) == at_return,
                "exact": [
                    got == stored for got, stored in zip(at_return, pools.pages_of(source, FROM), strict=True)
                ],
            }
        )
    )
    reader.close()


if __name__ == "__main__":
    main()
