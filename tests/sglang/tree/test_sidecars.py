"""Draft models, indexers and window pools ride along: all their bytes come back, or the prefix does not."""

from __future__ import annotations

import pytest
from harness import devices
from harness.tree import FULL, SWA, sequence

PAGES = 6


def packed(cfg):
    return {"packed": (devices.mha(cfg, 1), devices.mha(cfg, 1))}


def with_draft(cfg):
    return {"draft": devices.mha(cfg, 1)}


def latent(cfg):
    return {"device_pool": devices.mla}


def latent_with_draft(cfg):
    return {"device_pool": devices.mla, "draft": devices.mla(cfg, 1)}


def latent_with_other_draft(cfg):
    return {"device_pool": devices.mla, "draft": devices.mha(cfg, 1)}


def sparse(cfg):
    return {"device_pool": devices.sparse}


def sparse_with_draft(cfg):
    return {"device_pool": devices.sparse, "draft": devices.sparse(cfg, 1)}


def window_draft(cfg):
    return {"draft": devices.window(cfg)}


STACKS = {
    "packed-draft": (FULL, packed, ["kv"]),
    "draft": (FULL, with_draft, ["kv", "draft"]),
    "latent": (FULL, latent, ["kv"]),
    "latent-draft": (FULL, latent_with_draft, ["kv", "draft"]),
    "latent-mha-draft": (FULL, latent_with_other_draft, ["kv", "draft"]),
    "indexer": (devices.SPARSE, sparse, ["kv", "indexer"]),
    "draft-indexer": (devices.SPARSE, sparse_with_draft, ["kv", "indexer", "draft", "draft_indexer"]),
    "draft-swa": (SWA, window_draft, ["kv", "swa", "draft_swa"]),
}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("stack", STACKS)
def test_all_pools_come_back(rank, stack, layout):
    cfg, make, names = STACKS[stack]
    tokens = sequence(PAGES, page_size=cfg.page_size)
    one = rank(cfg, layout=layout, **make(cfg))
    assert [str(entry.name) for entry in one.controller.mem_pool_host.entries] == names
    held = one.store(tokens, seed=1)
    one.close()
    other = rank(cfg, layout=layout, **make(cfg))
    other.compute(sequence(2, start=9000, page_size=cfg.page_size), seed=2)  # so that slots differ
    assert other.fetch(tokens) == len(tokens)
    assert other.bytes_of(tokens) == held


@pytest.mark.parametrize("stack", ["packed-draft", "draft", "indexer", "draft-indexer", "draft-swa"])
def test_what_was_stored_without_the_sidecar_is_no_hit_with_it(rank, stack):
    """The target's pages are there, those of its draft or indexer are not: never restorable."""
    cfg, make, _ = STACKS[stack]
    bare = {"device_pool": devices.mla} if "indexer" in stack else {}
    tokens = sequence(PAGES, page_size=cfg.page_size)
    rank(cfg, **bare).store(tokens, seed=1)
    other = rank(cfg, **make(cfg))
    assert other.fetch(tokens) == 0
    held = other.store(tokens, seed=1)  # the same target computes the same bytes
    other.forget()
    assert other.fetch(tokens) == len(tokens)
    assert other.bytes_of(tokens) == held


def test_a_server_without_draft_uses_what_one_with_a_sidecar_draft_stored(rank):
    """The target's pool is the same pool."""
    tokens = sequence(PAGES)
    one = rank(FULL, **with_draft(FULL))
    held = one.store(tokens, seed=1)
    other = rank(FULL)
    assert other.fetch(tokens) == len(tokens)
    assert other.bytes_of(tokens) == held[: 2 * FULL.num_layers]


def test_a_packed_draft_never_feeds_a_target_without_it(rank):
    """Its pages hold more layers than the target has."""
    tokens = sequence(PAGES)
    rank(FULL, **packed(FULL)).store(tokens, seed=1)
    assert rank(FULL).fetch(tokens) == 0
