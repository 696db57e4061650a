"""Requests that end early, slow and failing stores: no slot is lost, no thread dies, no byte is wrong."""

from __future__ import annotations

import contextlib
import random

import pytest
from harness.tree import CONFIGS, sequence
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector


@pytest.fixture
def injector(monkeypatch):
    """The engine's own failure injector, for ranks that start inside; it draws the same in every run."""
    drawn = random.Random(7)
    monkeypatch.setattr(HiCacheStorageFailureInjector, "_thread_local_random", lambda _self: drawn)

    @contextlib.contextmanager
    def inject(failure: float | None = None, delay: float | None = None):
        with contextlib.ExitStack() as stack:
            if failure is not None:
                stack.enter_context(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(failure))
            if delay is not None:
                stack.enter_context(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(delay))
            yield

    return inject


def assert_sound(one, free):
    """All threads live, nothing is in flight, and every host slot that the tree does not hold is free."""
    controller = one.controller
    one.pump(lambda: not one.tree.ongoing_prefetch and not one.tree.ongoing_backup)
    for thread in (controller.prefetch_thread, controller.prefetch_io_aux_thread, controller.backup_thread):
        assert thread.is_alive()
    one.pump(lambda: one.host_slots_free() == free)
    assert controller.prefetch_tokens_occupied == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_cancel_at_any_moment(rank, name):
    order = random.Random(5)
    one = rank(CONFIGS[name])
    tokens = sequence(6)
    one.store(tokens, seed=1)
    one.forget()
    free = one.host_slots_free()
    for _ in range(40):
        handle = one.ask(tokens)
        for _ in range(order.randrange(4)):
            one.tree.check_hicache_events()
        one.tree.release_aborted_request(handle)
    assert_sound(one, free)
    assert one.fetch(tokens) == len(tokens)


@pytest.mark.parametrize("name", CONFIGS)
def test_cancel_while_the_store_is_slow(rank, injector, name):
    with injector(delay=0.05):
        one = rank(CONFIGS[name])
    tokens = sequence(6)
    held = one.store(tokens, seed=1)
    one.forget()
    free = one.host_slots_free()
    for _ in range(8):
        one.tree.release_aborted_request(one.ask(tokens))
    assert_sound(one, free)
    assert one.fetch(tokens) == len(tokens)
    assert one.bytes_of(tokens) == held


def test_timeout_policy_gives_up_and_loses_nothing(rank, injector):
    """The limit of a request is far below the time of one call."""
    quick = {"prefetch_timeout_base": 0.01, "prefetch_timeout_per_ki_token": 0.0}
    one = rank(policy="timeout", options=quick)
    tokens = sequence(6)
    held = one.store(tokens, seed=1)
    one.close()
    with injector(delay=1.0):
        slow = rank(policy="timeout", options=quick)
    free = slow.host_slots_free()
    handle = slow.ask(tokens)
    slow.pump(lambda: slow.tree.check_prefetch_progress(handle))
    loaded = slow.tree.pop_prefetch_loaded_tokens(handle)
    assert loaded in range(len(tokens) + 1)
    if loaded:
        assert slow.load_back(tokens) == loaded
        assert slow.bytes_of(tokens[:loaded]) == held
    else:
        assert_sound(slow, free)


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_every_prefetch_policy(rank, policy):
    tokens = sequence(6)
    patient = {"prefetch_timeout_base": 60.0}
    held = rank(policy=policy, options=patient).store(tokens, seed=1)
    other = rank(policy=policy, options=patient)
    handle = other.ask(tokens)
    if policy == "best_effort":  # ends at the first look, whatever has come by then
        other.pump(lambda: other.tree.check_prefetch_progress(handle))
        assert other.tree.pop_prefetch_loaded_tokens(handle) in range(len(tokens) + 1)
        return
    other.pump(lambda: other.tree.check_prefetch_progress(handle))
    assert other.tree.pop_prefetch_loaded_tokens(handle) == len(tokens)
    assert other.load_back(tokens) == len(tokens)
    assert other.bytes_of(tokens) == held


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("v1", [True, False], ids=["v1", "older"])
def test_failures_at_random(rank, injector, name, v1):
    """What is restored is exact; the rest is computed again."""
    cfg = CONFIGS[name]
    sure = rank(cfg, v1=v1)
    chains = [sequence(5, start=1000 * number) for number in range(1, 7)]
    held = [sure.store(chain, seed) for seed, chain in enumerate(chains)]
    sure.close()
    with injector(failure=0.4):
        one = rank(cfg, v1=v1)
    free = one.host_slots_free()
    came = 0
    for _ in range(4):
        for chain, expected in zip(chains, held, strict=True):
            got = one.fetch(chain)
            came += got
            if got == len(chain):
                assert one.bytes_of(chain) == expected
        one.forget()
        assert one.host_slots_free() == free
    assert came > 0
    assert_sound(one, free)


def test_failing_writes_are_misses_later(rank, injector):
    with injector(failure=0.5):
        one = rank()
    chains = [sequence(4, start=1000 * number) for number in range(1, 9)]
    held = [one.store(chain, seed) for seed, chain in enumerate(chains)]
    assert one.controller.backup_thread.is_alive()
    other = rank()
    lengths = [other.fetch(chain) for chain in chains]
    for chain, expected, length in zip(chains, held, lengths, strict=True):
        assert length in (0, 16)
        if length:
            assert other.bytes_of(chain) == expected
    assert 0 < sum(lengths) < 16 * len(chains)
