"""Reads and promises from beginning to end, several threads of each rank, also over the engine's groups."""

from __future__ import annotations

import pytest
from harness import lifetimes, programs, worlds

SHAPES = [pytest.param(shape, id="pp{}-cp{}-tp{}".format(*shape)) for shape in worlds.SHAPES]
SEED, REQUESTS = 5, 12


def size(shape) -> int:
    pp, cp, tp = shape
    return pp * cp * tp


def expected_read(request, ranks):
    """Pages that are published, and taken for the request, with all ranks' data in one place."""
    told = [lifetimes.found(SEED, request, rank) for rank in range(ranks)]
    hit = min(local for local, _, _ in told)
    complete = []
    for _, batches, side in told:
        kv = 0
        for start in range(0, hit, lifetimes.BATCH):
            wanted = min(lifetimes.BATCH, hit - start)
            got = min(batches[start // lifetimes.BATCH], wanted)
            kv += got
            if got < wanted:
                break
        complete.append(min(kv, side))
    return min(complete), hit


@pytest.mark.parametrize("shape", SHAPES)
def test_i12_what_is_published_equals_brute_force_and_comes_in_the_same_step_everywhere(shape):
    answers = worlds.run(lifetimes.reads, size(shape), shape=shape, seed=SEED, requests=REQUESTS).values()
    assert all(answer == answers[0] for answer in answers)
    for request, (_, publish, free_to) in answers[0].items():
        assert (publish, free_to) == expected_read(request, size(shape)), request
    assert list(answers[0]) == list(range(REQUESTS))


@pytest.mark.parametrize("shape", SHAPES)
def test_i22_a_request_commits_or_fails_on_all_ranks_in_the_same_tick(shape):
    ranks, requests = size(shape), 30
    answers = worlds.run(lifetimes.promises, ranks, shape=shape, seed=SEED, requests=requests).values()
    for request in range(requests):
        courses = [lifetimes.course(SEED, request, rank) for rank in range(ranks)]
        ready = max(tick for tick, _ in courses)
        fails = min((tick for _, tick in courses if tick is not None), default=99)
        expected = ("fail", fails, []) if fails <= ready else ("commit", ready, [])
        assert [answer[request] for answer in answers] == [expected] * ranks, request


def test_what_a_stage_said_last_reaches_one_that_is_behind():
    world = worlds.run(programs.late_at_the_end, 2, shape=(2, 1, 1), deadline=10.0)
    assert world.values() == [[7], [7]]


def test_groups_of_the_engine_are_used_and_stay_the_engines():
    given = {"shape": (2, 1, 2), "deadline": 20.0, "sleeps": None}
    answers = worlds.run(lifetimes.engine_groups, 4, **given).values()
    assert answers == [([0, 1, 2, 3, 4], None)] * 4


def test_i25_a_rank_that_sleeps_is_named_over_groups_of_the_engine_too():
    given = {"shape": (2, 1, 2), "deadline": 4.0, "sleeps": 1}
    world = worlds.run(lifetimes.engine_groups, 4, dead=(1,), **given)
    answers = {rank: answer.value for rank, answer in world.answers.items() if rank != 1}
    assert [answers[rank][1] for rank in (0, 2, 3)] == [("RankStalledError", 1)] * 3
