"""Attach, detach, attach again, flush, clear: what an operator does to a running server."""

from __future__ import annotations

import threading
import time

import pytest
from harness.tree import CONFIGS, sequence


def storage_threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def assert_no_more_than(before: set[threading.Thread]) -> None:
    """No thread is left but those of before, some of which may have ended; an ending one takes a moment."""
    until = time.monotonic() + 60
    while storage_threads() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not storage_threads() - before


@pytest.mark.parametrize("name", CONFIGS)
def test_attach_detach_attach(rank, name):
    tokens = sequence(6)
    before = storage_threads()
    one = rank(CONFIGS[name], storage=False)
    assert one.attach() == (True, "Attached HiCache storage backend successfully.")
    held = one.store(tokens, seed=1)
    for _ in range(2):
        done, message = one.detach()
        assert done, message
        assert one.backend is None
        assert_no_more_than(before)
        done, message = one.attach()
        assert done, message
        one.forget()
        assert one.fetch(tokens) == len(tokens)
        assert one.bytes_of(tokens) == held


def test_detach_is_not_disturbed_by_what_runs(rank):
    one = rank()
    one.store(sequence(6), seed=1)
    one.forget()
    for start in (1, 100, 200):
        one.ask(sequence(6, start=start))
    done, message = one.detach()
    assert done, message
    free = one.host_slots_free()
    assert free == {"kv": one.controller.mem_pool_host.size}


def test_attach_on_a_tree_that_was_built_without_storage(rank):
    """The engine fills in the hashes of nodes that it has by then."""
    tokens = sequence(6)
    one = rank(storage=False)
    one.compute(tokens, seed=1)
    held = one.bytes_of(tokens)
    done, message = one.attach()
    assert done, message
    one.to_host(tokens)
    one.to_store(tokens)
    assert rank().fetch(tokens) == len(tokens)
    one.forget()
    assert one.fetch(tokens) == len(tokens)
    assert one.bytes_of(tokens) == held


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"capacty": "64MiB"}, "capacity"),
        ({"capacity": "64 bananas"}, "capacity"),
        ({"revision": None, "path": ""}, ""),
        ({"path": None}, "path"),
        ({"deadline": 60}, "deadline"),
    ],
    ids=["unknown-key", "bad-size", "empty-path", "no-path", "deadline-too-long"],
)
def test_bad_options_are_refused_at_attach_and_can_be_corrected(rank, wrong, said):
    before = storage_threads()
    one = rank(storage=False)
    good = dict(one.options)
    one.options |= wrong
    done, message = one.attach()
    assert not done
    assert said in message
    assert_no_more_than(before)
    one.options = good
    done, message = one.attach()
    assert done, message
    one.store(sequence(4), seed=1)


def test_bad_options_are_refused_at_start(rank):
    from hicache_store import ConfigError

    before = storage_threads()
    with pytest.raises(ConfigError, match="capacity"):
        rank(options={"capacty": "64MiB"})
    assert_no_more_than(before)


def test_flush_keeps_the_store(rank):
    tokens = sequence(6)
    one = rank()
    held = one.store(tokens, seed=1)
    for _ in range(3):
        one.forget()
        assert one.fetch(tokens) == len(tokens)
        assert one.bytes_of(tokens) == held


def test_clear_empties_the_store_and_the_server_goes_on(rank):
    tokens = sequence(6)
    one, other = rank(), rank()
    held = one.store(tokens, seed=1)
    assert one.tree.clear_storage_backend()
    one.forget()
    assert one.fetch(tokens) == 0
    assert other.fetch(tokens) == 0
    assert one.store(tokens, seed=1) == held
    assert other.fetch(tokens) == len(tokens)


def test_statistics_reach_the_engines_collector(rank):
    one = rank(metrics=True)
    tokens = sequence(6)
    one.store(tokens, seed=1)
    one.forget()
    seen = []
    one.tree.storage_metrics_collector.log_storage_metrics = seen.append
    one.prefetch(tokens)
    one.tree.check_hicache_events()
    pages = [page for stats in seen for page in stats.prefetch_pgs]
    assert sum(pages) == 6
    assert sum(page for stats in seen for page in stats.backup_pgs) == 6
