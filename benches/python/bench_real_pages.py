"""How much smaller are a real model's pages in the store with zstd level 1, in bfloat16 and in float16?

The KV of the demo's model on the demo's text, computed in float32 and rounded once: needs the environment of
the demo.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hicache_store import Namespace, Pool, Store, Tile, page_keys

from demo import model as demo_model
from demo.model import SmolLM2
from demo.pages import to_bf16
from demo.text import read_text

PAGES, PAGE_TOKENS = 4, 64


def real_kv(model: SmolLM2, tokens: list[int]) -> np.ndarray:
    """float32 `[layers, 2, heads, tokens, head_dim]`: the demo's cache without its rounding to bfloat16."""
    identity: Any = lambda values: values  # noqa: E731
    kept = demo_model.to_bf16, demo_model.from_bf16
    demo_model.to_bf16 = demo_model.from_bf16 = identity
    try:
        cache = model.cache(len(tokens))
        model.prefill(tokens, cache)
    finally:
        demo_model.to_bf16, demo_model.from_bf16 = kept
    return cache.data


def main() -> None:
    """Stores the pages twice and prints the ratios."""
    model = SmolLM2.load()
    text = read_text(model.tokenizer)
    tokens = text.history[: PAGES * PAGE_TOKENS]
    kv = real_kv(model, tokens)
    layers, _, heads, _, dim = kv.shape
    pages = np.ascontiguousarray(kv.transpose(1, 3, 0, 2, 4))  # [2, tokens, layers, heads, dim]: page_first
    keys = page_keys(tokens, PAGE_TOKENS)
    rounded = {"bfloat16": to_bf16(pages), "float16": pages.astype(np.float16).view(np.uint16)}
    for dtype, memory in rounded.items():
        with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder), capacity=1 << 30) as store:
            view = store.view(
                Namespace("bench/pages", revision="r1", page_size=PAGE_TOKENS),
                Pool("kv", "kv", dtype, components={"k": 2 * dim, "v": 2 * dim}),
                tile=Tile(layers=(0, layers), heads=(0, heads)),
                layout="page_first",
                codec="zstd:1",
            )
            report = view.backup(keys, memory, range(PAGES), depth=0)
            assert report.count("stored") == PAGES, report.reason
            ratio = report.raw_bytes / report.stored_bytes
            back = np.zeros_like(memory)
            assert view.restore(keys, back, range(PAGES)).count("restored") == PAGES
            assert np.array_equal(back, memory)
        print(
            f"RESULT: {PAGES} real pages in {dtype}, zstd level 1, byte planes: {ratio:.3f} x with directory"
        )


if __name__ == "__main__":
    main()
