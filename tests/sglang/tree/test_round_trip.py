"""A prefix that was computed, stored and evicted comes back byte for byte, through the engine's own tree."""

from __future__ import annotations

import pytest
from harness.tree import CONFIGS, sequence

# Every layout that the engine accepts for these pools; recurrent state knows two.
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
CASES = [
    (name, layout)
    for name in CONFIGS
    for layout in LAYOUTS
    if name != "mamba" or layout in ("page_first", "page_first_direct")
]
INTERFACES = pytest.mark.parametrize("v1", [True, False], ids=["v1", "older"])


@INTERFACES
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_another_server_has_the_bytes(rank, name, layout, v1):
    tokens = sequence(6)
    first = rank(CONFIGS[name], layout=layout, v1=v1)
    held = first.store(tokens, seed=1)
    first.close()
    second = rank(CONFIGS[name], layout=layout, v1=v1)
    second.compute(sequence(3, start=900), seed=2)  # so that slots differ
    assert second.fetch(tokens) == len(tokens)
    assert second.bytes_of(tokens) == held


@INTERFACES
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_server_after_it_lost_everything(rank, name, v1):
    """`flush_cache` empties device and host, and leaves the store."""
    tokens = sequence(6)
    one = rank(CONFIGS[name], v1=v1)
    held = one.store(tokens, seed=1)
    for _ in range(2):
        one.forget()
        assert one.fetch(tokens) == len(tokens)
        assert one.bytes_of(tokens) == held


@INTERFACES
def test_a_longer_request_gets_what_is_there(rank, v1):
    one, other = rank(v1=v1), rank(v1=v1)
    held = one.store(sequence(6), seed=1)
    assert other.fetch(sequence(9)) == 24
    assert other.bytes_of(sequence(6)) == held


@pytest.mark.parametrize("name", ["full", "swa"])
def test_a_request_that_parts_ways_gets_the_common_pages(rank, name):
    one, other = rank(CONFIGS[name]), rank(CONFIGS[name])
    one.store(sequence(6), seed=1)
    fork = [*sequence(3), *sequence(3, start=500)]
    assert other.fetch(fork) == 12
    assert other.bytes_of(sequence(3)) == one.bytes_of(sequence(3))


def test_recurrent_state_is_there_at_its_end_only(rank):
    """Three pages of keys and values are stored, but no state after the third: nothing can be used."""
    one, other = rank(CONFIGS["mamba"]), rank(CONFIGS["mamba"])
    one.store(sequence(6), seed=1)
    fork = [*sequence(3), *sequence(3, start=500)]
    assert other.fetch(fork) == 0
    assert other.fetch(sequence(6)) == 24


def test_two_sequences_with_a_common_head(rank):
    one, other = rank(), rank()
    head = sequence(3)
    tails = [sequence(3, start=start) for start in (100, 200)]
    held = [one.store([*head, *tail], seed) for seed, tail in enumerate(tails)]
    again = [one.bytes_of([*head, *tail]) for tail in tails]
    for tail, expected in zip(tails, again, strict=True):
        assert other.fetch([*head, *tail]) == 24
        assert other.bytes_of([*head, *tail]) == expected
    assert held[1] == again[1]


@pytest.mark.parametrize("prefix_keys", [True, False], ids=["with-prefix-keys", "without"])
def test_a_chain_stored_and_read_in_pieces(rank, prefix_keys):
    """With and without the engine's option to tell what comes before."""
    given = {"hicache_storage_pass_prefix_keys": prefix_keys}
    one, other = rank(options=given), rank(options=given)
    for pages in (2, 4, 7):
        one.store(sequence(pages), seed=pages)
    for pages in (3, 7):
        assert other.fetch(sequence(pages)) == 4 * pages
    assert other.bytes_of(sequence(7)) == one.bytes_of(sequence(7))


def test_more_pages_than_one_call_carries(rank):
    """The controller cuts reads and writes into calls of 128 pages."""
    import dataclasses

    long = dataclasses.replace(CONFIGS["full"], kv_size=2048, max_context_len=2048)
    one, other = rank(long), rank(long)
    tokens = sequence(300)
    held = one.store(tokens, seed=1)
    assert other.fetch(tokens) == len(tokens)
    assert other.bytes_of(tokens) == held


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_v1_and_older_servers_share_pages(rank, layout):
    one, other = rank(layout=layout, v1=False), rank(layout=layout, v1=True)
    held = one.store(sequence(6), seed=1)
    assert other.fetch(sequence(6)) == 24
    assert other.bytes_of(sequence(6)) == held


def test_layouts_do_not_mix(rank):
    """D13 at this level: whatever another layout finds is what was stored, in its own order, or nothing."""
    one = rank(layout="page_first")
    held = one.store(sequence(6), seed=1)
    for layout in ("layer_first", "page_first_direct", "page_head"):
        other = rank(layout=layout)
        found = other.fetch(sequence(6))
        assert found in (0, 24)
        if found:
            assert other.bytes_of(sequence(6)) == held
