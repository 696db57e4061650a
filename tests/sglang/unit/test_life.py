"""A backend's life: registrations in any order, many threads, close while calls run, attach again, clear."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref

import pytest
from harness import backends, pools
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

KV = PoolName.KV


def build():
    return pools.fill(pools.build("mha", "page_first"), 1)


def test_a_detached_backend_is_attached_again(rank, keys, slots, others):
    pool = build()
    first = rank(pool)
    assert first.batch_set_v1(keys, pools.indices(pool, slots)) == [True] * 6
    first.close()
    second = rank(pool)
    assert first.batch_exists(keys) == 0
    assert second.batch_exists(keys) == 6
    assert second.batch_get_v1(keys, pools.indices(pool, others)) == [True] * 6
    assert pools.pages_of(pool, others) == pools.pages_of(pool, slots)


def test_closing_twice_is_fine_and_lets_go_of_the_engines_memory(rank):
    pool = build()
    backend = rank(pool, {PoolName.SWA: build()})
    held = weakref.ref(pool.kv_buffer)
    backend.close()
    backend.close()
    del pool
    gc.collect()
    assert held() is None


def test_the_anchor_is_registered_again_under_its_name(rank, keys, slots):
    pool = build()
    backend = rank(pool)
    view = backend._serving.state.lookups
    backend.register_mem_host_pool_v2(pool, KV)
    backend.register_mem_host_pool_v2(pool, "kv")
    assert backend._serving.state.lookups is view


def test_pools_that_come_before_the_anchor_wait_for_it(rank, put, keys, slots):
    anchor, swa = build(), build()
    backend = rank(None)
    backend.register_mem_host_pool_v2(swa, PoolName.SWA)
    one = backends.transfer(PoolName.SWA, swa, keys, slots)
    assert backend.batch_set_v2([one]) == {PoolName.SWA: [False] * 6}
    backend.register_mem_pool_host(anchor)
    assert put(backend, PoolName.SWA, swa, keys, slots)


def test_the_anchor_may_come_by_the_newer_call_alone(rank, put, keys, slots):
    pool = build()
    backend = rank(None)
    backend.register_mem_host_pool_v2(pool, KV)
    assert put(backend, KV, pool, keys, slots)
    assert backend.batch_exists(keys) == 6


def test_a_pool_that_comes_later_is_served(rank, put, keys, slots):
    anchor = build()
    backend = rank(anchor)
    assert put(backend, KV, anchor, keys, slots)
    draft = pools.fill(pools.build("mha", "page_first_direct"), 2)
    assert backend.batch_exists_v2(keys, [backends.every(PoolName.DRAFT)]).kv_hit_pages == 0
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    assert put(backend, PoolName.DRAFT, draft, keys, slots)
    assert backend.batch_exists_v2(keys, [backends.every(PoolName.DRAFT)]).kv_hit_pages == 6


def test_an_anchor_of_another_page_size_needs_a_new_backend(rank):
    backend = rank(build())
    larger = pools.build("mha", "page_first", dataclasses.replace(pools.TINY, page=8))
    with pytest.raises(NotImplementedError, match="attach"):
        backend.register_mem_pool_host(larger)


def test_clear_forgets_this_deployments_pages_alone(rank, keys, slots):
    pool = build()
    mine, other = rank(pool), rank(pool, extra={"revision": "r2"})
    indices = pools.indices(pool, slots)
    for backend in (mine, other):
        assert backend.batch_set_v1(keys, indices) == [True] * 6
    assert mine.clear() is None
    assert (mine.batch_exists(keys), other.batch_exists(keys)) == (0, 6)
    assert mine.batch_set_v1(keys, indices) == [True] * 6
    assert mine.batch_exists(keys) == 6


def test_calls_of_all_threads_at_once(rank, keys):
    """The engine's threads look up, read and write at once, beside the main thread's calls."""
    pool = build()
    backend = rank(pool, {PoolName.SWA: build()})
    stop, wrong, done = threading.Event(), [], []

    def forever(call):
        rounds = 0
        while not stop.is_set():
            rounds += 1
            try:
                call(rounds)
            except BaseException as error:
                wrong.append(repr(error))
                return
        done.append(rounds)

    def write(number):
        chain = backends.keys(4, f"chain {number % 8}")
        assert backend.batch_set_v1(chain, pools.indices(pool, range(4))) == [True] * 4

    def read(number):
        chain = backends.keys(4, f"chain {number % 8}")
        flags = backend.batch_get_v1(chain, pools.indices(pool, range(8, 12)))
        if all(flags):
            assert pools.pages_of(pool, range(8, 12)) == written

    def look(number):
        chain = backends.keys(4, f"chain {number % 8}")
        assert backend.batch_exists(chain) in range(5)
        found = backend.batch_exists_v2(chain, [backends.trailing(PoolName.SWA, 2)])
        assert found.kv_hit_pages == 0

    def main(number):
        backend.get_stats()
        backend.stats()
        if number % 50 == 0:
            backend.clear()

    written = pools.pages_of(pool, range(4))
    threads = [threading.Thread(target=forever, args=(call,)) for call in (write, read, look, main)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert len(done) == 4
    assert not [name for name in backend.stats()["counters"] if name.startswith("faults")]


def await_more(answers, so_far):
    """Waits until some more calls have ended, of whichever thread."""
    until = time.monotonic() + 60
    while len(answers) < so_far + 30:
        assert time.monotonic() < until, "calls have come to a stop"
        time.sleep(0.005)
    return len(answers)


def test_close_while_calls_run(rank, keys):
    for _ in range(5):
        pool = build()
        backend = rank(pool)
        started, stop, answers = threading.Barrier(4), threading.Event(), []

        def call(backend=backend, pool=pool, started=started, stop=stop, answers=answers):
            number = 0
            started.wait()
            while not stop.is_set():
                number += 1
                chain = backends.keys(3, f"{threading.get_ident()} {number}")
                indices = pools.indices(pool, range(3))
                answers.append(backend.batch_set_v1(chain, indices))
                answers.append(backend.batch_get_v1(chain, indices))
                answers.append([True] * 3 if backend.batch_exists(chain) in (0, 3) else [])

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        so_far = await_more(answers, 0)
        backend.close()
        await_more(answers, so_far)
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert {tuple(answer) for answer in answers} <= {(True,) * 3, (False,) * 3}
        assert backend.batch_exists(backends.keys(3)) == 0
        faults = {name for name in backend.stats()["counters"] if name.startswith("faults")}
        assert faults <= {f"faults/{call}/closed" for call in ("get", "set", "exists")}


# -- look-ups over several pools --------------------------------------------------------------------
def test_a_pools_own_hit_does_not_depend_on_the_others(rank, put, keys, slots):
    anchor, swa, index = build(), build(), pools.build("indexer", "page_first")
    backend = rank(anchor, {PoolName.SWA: swa, PoolName.INDEXER: index})
    assert put(backend, KV, anchor, keys[:5], slots[:5])
    assert put(backend, PoolName.SWA, swa, keys, slots)
    assert put(backend, PoolName.INDEXER, index, keys[:2], slots[:2])
    asked = [backends.trailing(PoolName.SWA, 2), backends.every(PoolName.INDEXER)]
    found = backend.batch_exists_v2(keys, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert found.extra_pool_hit_pages == {KV: 5, PoolName.SWA: 5, PoolName.INDEXER: 2}


def test_two_windows_of_one_pool_are_the_wider_one(rank, put, keys, slots):
    anchor, swa = build(), build()
    backend = rank(anchor, {PoolName.SWA: swa})
    assert put(backend, KV, anchor, keys, slots)
    assert put(backend, PoolName.SWA, swa, keys[3:5], slots[3:5])
    for asked, legal in (([1], [4, 5]), ([2], [5]), ([1, 2], [5]), ([2, 1], [5])):
        windows = [backends.trailing(PoolName.SWA, window) for window in asked]
        assert backend.batch_exists_v2(keys, windows).restorable_prefix_pages == legal
    both = [backends.trailing(PoolName.SWA, 1), backends.every(PoolName.SWA)]
    assert backend.batch_exists_v2(keys, both).restorable_prefix_pages == []


def test_groups_are_told_and_limit_nothing(rank, put, keys, slots):
    anchor, side = build(), build()
    backend = rank(anchor, {PoolName.SWA: side})
    assert put(backend, KV, anchor, keys, slots)
    groups = PoolTransfer(
        name=PoolName.SWA, keys=[], hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=1
    )
    found = backend.batch_exists_v2(keys, [groups])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (6, {KV: 6})
    assert put(backend, PoolName.SWA, side, [keys[1], keys[3]], slots[:2])
    found = backend.batch_exists_v2(keys, [groups])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (6, {KV: 6, PoolName.SWA: 4})


def test_a_look_up_never_says_more_than_it_was_asked(rank, put, keys, slots):
    anchor = build()
    backend = rank(anchor)
    assert put(backend, KV, anchor, keys, slots)
    for count in range(7):
        assert backend.batch_exists(keys[:count]) == count
        found = backend.batch_exists_v2(keys[:count], [])
        assert found.kv_hit_pages == count
        assert found.restorable_prefix_pages == list(range(1, count + 1))
