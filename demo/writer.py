"""Process 1: computes a history and its branches, backs up, leaves what the next processes must match."""

import hashlib
from pathlib import Path
from time import perf_counter

from hicache_store import page_keys

from demo.model import SmolLM2
from demo.setting import check, host_pool, leave, open_view, run, store_root
from demo.text import PAGE_TOKENS, read_text


def main(work: Path) -> None:
    """Prefills A/B, goes on with E and with C from the live state, backs up the pages of A/B and A/B/C."""
    start = perf_counter()
    model = SmolLM2.load()
    text = read_text(model.tokenizer)
    loaded = perf_counter() - start

    cache = model.cache(len(text.history) + max(len(text.branch_c), len(text.branch_e)))
    start = perf_counter()
    model.prefill(text.history, cache)
    states = model.forward(text.branch_e, cache)
    first = int(model.logits(states[-1:]).argmax())
    cold = perf_counter() - start
    logits = model.logits(states)

    cache.tokens = len(text.history)  # back to where the branches part
    model.forward(text.branch_c, cache)

    keys = page_keys(text.history + text.branch_c, PAGE_TOKENS)
    pool = host_pool(model.shape, len(keys))
    slots = list(range(len(keys)))
    for slot in slots:
        pool.write(slot, cache.page(slot, PAGE_TOKENS))

    store, view = open_view(store_root(work), model.shape)
    start = perf_counter()
    history = view.backup(keys[: text.pages], pool.array, slots[: text.pages], depth=0)
    branch = view.backup(keys, pool.array, slots, depth=0)
    backup = perf_counter() - start
    store.close()
    check(history.count("stored") == text.pages, f"all pages of A/B are stored: {history.outcomes}")
    check(branch.count("present") == text.pages, f"A/B is not stored twice: {branch.outcomes}")
    check(branch.count("stored") == len(keys) - text.pages, f"the pages of C are stored: {branch.outcomes}")

    leave(
        work,
        "writer",
        {
            "page_sha256": [pool.sha256(slot) for slot in slots[: text.pages]],
            "page_bytes": pool.page_bytes,
            "logits_sha256": hashlib.sha256(logits.tobytes()).hexdigest(),
            "first_token": first,
            "tokens": {"A/B": len(text.history), "C": len(text.branch_c), "E": len(text.branch_e)},
            "pages": {"A/B": text.pages, "C": len(keys) - text.pages},
            "seconds": {"load": loaded, "cold": cold, "backup": backup},
        },
    )


if __name__ == "__main__":
    run(main)
