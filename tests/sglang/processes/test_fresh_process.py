"""Every stack of pools: stored by one process, reloaded by a fresh one, bytes equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import devices, workers
from harness.tree import FULL, MAMBA, SWA, Rank, sequence

STACKS = {
    "full": (FULL, lambda _cfg: {}),
    "swa": (SWA, lambda _cfg: {}),
    "mamba": (MAMBA, lambda _cfg: {}),
    "packed-draft": (FULL, lambda cfg: {"packed": (devices.mha(cfg, 1), devices.mha(cfg, 1))}),
    "draft": (FULL, lambda cfg: {"draft": devices.mha(cfg, 1)}),
    "draft-swa": (SWA, lambda cfg: {"draft": devices.window(cfg)}),
    "indexer": (devices.SPARSE, lambda _cfg: {"device_pool": devices.sparse}),
    "draft-indexer": (
        devices.SPARSE,
        lambda cfg: {"device_pool": devices.sparse, "draft": devices.sparse(cfg, 1)},
    ),
}


def rank_of(root: str, stack: str, layout: str) -> Rank:
    cfg, extra = STACKS[stack]
    return Rank(Path(root), cfg, layout=layout, **extra(cfg))


def store(root: str, stack: str, layout: str) -> list[bytes]:
    with rank_of(root, stack, layout) as rank:
        return rank.store(sequence(5, page_size=rank.cfg.page_size), seed=1)


def fetch(root: str, stack: str, layout: str) -> tuple[int, list[bytes]]:
    with rank_of(root, stack, layout) as rank:
        tokens = sequence(5, page_size=rank.cfg.page_size)
        return rank.fetch(tokens) // rank.cfg.page_size, rank.bytes_of(tokens)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("stack", STACKS)
def test_a_fresh_process_reloads_what_another_one_wrote(tmp_path, stack, layout):
    held = workers.run(store, str(tmp_path), stack, layout)
    assert workers.run(fetch, str(tmp_path), stack, layout) == (5, held)
