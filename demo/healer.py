"""Process 3: fresh, meets the damaged page, computes it again and backs it up."""

from pathlib import Path

from hicache_store import page_keys

from demo.model import CHUNK_TOKENS, SmolLM2
from demo.setting import DAMAGED_PAGE, check, host_pool, leave, open_view, run, store_root, take
from demo.text import PAGE_TOKENS, read_text


def main(work: Path) -> None:
    """Restores A/B without the damaged page, recomputes the chunk around it, completes the store."""
    original = take(work, "writer")["page_sha256"]
    model = SmolLM2.load()
    text = read_text(model.tokenizer)
    pool = host_pool(model.shape, text.pages)
    slots = list(range(text.pages))
    store, view = open_view(store_root(work), model.shape)
    keys = page_keys(text.history, PAGE_TOKENS)

    report = view.restore(keys, pool.array, slots)
    for page, outcome in enumerate(report.outcomes):
        if page == DAMAGED_PAGE:
            check(outcome != "restored", f"the damaged page is not served: page {page} is {outcome}")
        else:
            check(outcome == "restored", f"its neighbours are: page {page} is {outcome}")
            check(pool.sha256(page) == original[page], f"and are the original bytes: page {page}")
    match = view.match(keys)
    check(match.pages == DAMAGED_PAGE, f"from now on the page is missing: {match}")

    # A chunk is computed as in process 1: the same tokens behind the same state give the same bits.
    first = DAMAGED_PAGE * PAGE_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    tokens = text.history[first : first + CHUNK_TOKENS]
    cache = model.cache(first + len(tokens))
    for page in range(first // PAGE_TOKENS):
        cache.append(pool.read(page))
    model.forward(tokens, cache)
    pool.write(DAMAGED_PAGE, cache.page(DAMAGED_PAGE, PAGE_TOKENS))
    check(
        pool.sha256(DAMAGED_PAGE) == original[DAMAGED_PAGE],
        "the recomputed page is the original, byte for byte",
    )

    backup = view.backup(keys, pool.array, slots, depth=0)
    check(backup.outcomes[DAMAGED_PAGE] == "stored", f"the page is stored again: {backup.outcomes}")
    check(backup.count("present") == text.pages - 1, f"the others were not touched: {backup.outcomes}")
    healed = view.match(keys)
    check(healed.pages == text.pages, f"all pages match again: {healed}")
    store.close()
    leave(
        work,
        "healer",
        {
            "outcome": report.outcomes[DAMAGED_PAGE],
            "restored": report.count("restored"),
            "matched": match.pages,
            "limited_by": match.limited_by,
            "recomputed_tokens": len(tokens),
            "stored": backup.count("stored"),
            "present": backup.count("present"),
        },
    )


if __name__ == "__main__":
    run(main)
