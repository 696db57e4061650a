"""Process 2: fresh, restores the history, computes only what is new, proves that nothing changed."""

import hashlib
from pathlib import Path
from time import perf_counter

from hicache_store import page_keys

from demo.model import SmolLM2
from demo.setting import (
    DAMAGED_PAGE,
    GENERATED_TOKENS,
    SAMPLE_BYTES,
    SPARE_SLOTS,
    check,
    host_pool,
    leave,
    open_view,
    run,
    store_root,
    take,
)
from demo.text import PAGE_TOKENS, read_text


def main(work: Path) -> None:
    """Matches A/B/E, restores A/B in another slot order, computes E, compares bytes and logits."""
    expected = take(work, "writer")
    start = perf_counter()
    model = SmolLM2.load()
    text = read_text(model.tokenizer)
    loaded = perf_counter() - start
    cache = model.cache(len(text.history) + len(text.branch_e) + GENERATED_TOKENS)
    pool = host_pool(model.shape, text.pages + SPARE_SLOTS)
    store, view = open_view(store_root(work), model.shape)

    start = perf_counter()
    keys = page_keys(text.history + text.branch_e, PAGE_TOKENS)
    match = view.match(keys)
    # Other slots than process 1 had: the last page first, with spare slots at both ends.
    slots = [pool.slots - 2 - page for page in range(match.pages)]
    report = view.restore(keys[: match.pages], pool.array, slots)
    restored = perf_counter() - start
    check(match.pages == text.pages, f"A/B matches, E does not: {match}")
    check(report.count("restored") == text.pages, f"every matched page is restored: {report.outcomes}")
    for slot in slots:
        cache.append(pool.read(slot))
    states = model.forward(text.branch_e, cache)
    first = int(model.logits(states[-1:]).argmax())
    ready = perf_counter() - start
    store.close()

    digests = [pool.sha256(slot) for slot in slots]
    wrong = [page for page, digest in enumerate(digests) if digest != expected["page_sha256"][page]]
    check(not wrong, f"restored pages equal the original bytes, but these do not: {wrong}")
    check(pool.untouched(slots), "no byte outside the restored slots is written")
    logits = model.logits(states)
    digest = hashlib.sha256(logits.tobytes()).hexdigest()
    check(digest == expected["logits_sha256"], "the logits of E are those of process 1, bit for bit")
    check(first == expected["first_token"], "the first token is the same")

    sample = pool.content(slots[DAMAGED_PAGE])
    inner = sample[len(sample) // 4 :][:SAMPLE_BYTES]
    leave(
        work,
        "reader",
        {
            "sample": {"key": keys[DAMAGED_PAGE].hex(), "bytes": inner.hex()},
            "asked": len(keys),
            "matched": match.pages,
            "limited_by": match.limited_by,
            "restored": len(digests),
            "bytes_verified": len(digests) * pool.page_bytes,
            "tokens_kept": match.pages * PAGE_TOKENS,
            "tokens": len(text.history) + len(text.branch_e),
            "logits_sha256": digest,
            "generated": model.generate(logits, cache, GENERATED_TOKENS),
            "seconds": {"load": loaded, "restore": restored, "first_token": ready},
        },
    )


if __name__ == "__main__":
    run(main)
