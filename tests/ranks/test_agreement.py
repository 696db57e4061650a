"""Results of the protocols over gloo equal what one would compute with all ranks' data in one place."""

from __future__ import annotations

import pytest
from harness import programs, worlds
from hicache_store.ranks import Lengths

SHAPES = [pytest.param(shape, id="pp{}-cp{}-tp{}".format(*shape)) for shape in worlds.SHAPES]


def size(shape) -> int:
    pp, cp, tp = shape
    return pp * cp * tp


def common(span, votes) -> list[int]:
    """Lengths that are legal on every rank for one pool, by trying each."""

    def legal(vote, length):
        if vote is None:
            return True
        return length in vote if isinstance(vote, Lengths) else length <= vote

    return [length for length in range(span + 1) if all(legal(vote, length) for vote in votes)]


@pytest.mark.parametrize("shape", SHAPES)
def test_votes_equal_brute_force(shape):
    ranks = size(shape)
    answers = worlds.run(programs.votes, ranks, shape=shape, seed=7, rounds=25).values()
    for request in range(25):
        told = [programs.has(7, request, rank) for rank in range(ranks)]
        span, masks, pools = told[0][0], told[0][1], len(told[0][2])
        by_pool = [common(span, [votes[pool] for _, _, votes in told]) for pool in range(pools)]
        both = set.intersection(*map(set, by_pool))
        expected = (max(both), [max(lengths) for lengths in by_pool])
        assert [answer[request] for answer in answers] == [expected] * ranks, (request, span, masks)


@pytest.mark.parametrize("mode", ["now", "lagged"])
@pytest.mark.parametrize("shape", SHAPES)
def test_i09_all_ranks_consume_the_same_in_every_step(shape, mode):
    answers = worlds.run(programs.steps, size(shape), shape=shape, seed=11, count=30, mode=mode).values()
    consumed = [answer[0] for answer in answers]
    assert all(other == consumed[0] for other in consumed)
    assert sum(map(len, consumed[0])) > 10
    assert [answer[2] for answer in answers] == [[0, 0]] * size(shape)


def test_one_reduction_for_each_step_however_many_logs():
    shape = (1, 2, 4)
    for logs in (1, 12, 40):
        answers = worlds.run(programs.steps, 8, shape=shape, seed=3, count=10, logs=logs).values()
        assert [answer[1] for answer in answers] == [(10, 0)] * 8


def test_a_pipeline_takes_one_message_for_each_step_and_only_stage_0_reduces():
    answers = worlds.run(programs.steps, 4, shape=(2, 1, 2), seed=3, count=10).values()
    assert [answer[1] for answer in answers] == [(10, 10)] * 2 + [(0, 0)] * 2


def test_all_ranks_use_the_smallest_capacity():
    pages = [[100, 7], [90, 9], [120, 8], [95, 7]]
    answers = worlds.run(programs.capacities, 4, shape=(2, 1, 2), pages=pages).values()
    assert answers == [[90, 7]] * 4
