"""One rank is killed, stopped or asleep: the others say so in time, name it, and leak nothing.

What leaks is checked where it would: `programs.connected` compares threads and file descriptors of each
survivor. A world in which somebody waits for longer than its limit fails.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import programs, worlds

# A rank that was not heard for half of it counts as silent: a loaded machine may leave a process aside for a
# second or two.
DEADLINE = 6.0
SHAPES = [pytest.param(shape, id="pp{}-cp{}-tp{}".format(*shape)) for shape in worlds.SHAPES]


def strike(shape, what, whom):
    """What each survivor says."""
    pp, cp, tp = shape
    given = {"shape": shape, "deadline": DEADLINE, "what": what, "whom": whom, "at": 3}
    # The one that sleeps is not waited for either.
    world = worlds.run(programs.struck, pp * cp * tp, dead=(whom,), **given)
    for rank, answer in world.answers.items():
        assert answer.error is None, f"rank {rank}: {answer.error}"
    return {rank: answer.value for rank, answer in world.answers.items() if rank != whom}


@pytest.mark.parametrize("shape", SHAPES)
def test_i25_survivors_name_the_rank_that_did_not_come(shape):
    pp, cp, tp = shape
    last = pp * cp * tp - 1
    whom = (0, last // 2, last) if last > 1 else (0, last)
    cases = [(what, one) for one in whom for what in ("kill", "stop", "sleep")]
    with ThreadPoolExecutor(5) as pool:
        told = list(pool.map(lambda case: strike(shape, *case), cases))
    for (what, whom), answers in zip(cases, told, strict=True):
        assert len(answers) == last, (what, whom, answers)
        for rank, answer in answers.items():
            assert answer is not None, f"rank {rank} noticed nothing of {what} of {whom}"
            kind, named, operation = answer
            assert (kind, named) == ("RankStalledError", whom), f"{what}: {answers}"
            assert operation, answer


def test_i25_a_rank_in_the_middle_of_a_pipeline_is_named_by_all():
    for what in ("kill", "stop"):
        answers = strike((4, 1, 1), what, 2)
        assert {answer[1] for answer in answers.values()} == {2}, answers


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_i25_a_rank_that_is_gone_while_it_waits_is_named_not_whom_it_waited_for(what):
    world = worlds.run(programs.dies_while_it_waits, 3, dead=(1,), deadline=DEADLINE, what=what)
    told = {rank: answer.value[:2] for rank, answer in world.answers.items()}
    assert told == dict.fromkeys((0, 2), ("RankStalledError", 1))


def test_i25_after_a_pause_all_ranks_go_on_in_a_new_epoch():
    answers = worlds.run(programs.resumed, 3, shape=(1, 1, 3), deadline=DEADLINE / 2, whom=1).values()
    # The one that slept finds its group gone and names itself.
    assert [answer[0] for answer in answers] == [1, 1, 1]
    assert [answer[1] for answer in answers] == [[1, 2, 3]] * 3


def test_a_rank_that_never_comes_is_named_when_ranks_meet():
    world = worlds.run(programs.missing_at_the_start, 3, whom=1, deadline=DEADLINE)
    answers = world.values()
    assert [answers[0], answers[2]] == [("RankStalledError", 1, "connect")] * 2


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_i25_a_rank_that_is_gone_while_groups_are_made_is_named(what):
    given = {"what": what, "whom": 1, "deadline": DEADLINE / 2}
    world = worlds.run(programs.gone_while_groups_are_made, 3, dead=(1,), **given)
    told = {rank: answer.value for rank, answer in world.answers.items()}
    assert told == dict.fromkeys((0, 2), ("RankStalledError", 1, "connect"))


@pytest.mark.parametrize("how", ["number", "length", "op", "long"])
def test_i10_ranks_that_ask_for_different_things_learn_so_and_live(how):
    answers = worlds.run(programs.different_asks, 3, how=how).values()
    assert answers == ["ShapeError"] * 3


def test_i25_a_wait_for_an_own_transfer_ends_too_and_names_the_rank_itself():
    answers = worlds.run(programs.own_transfer_hangs, 2, deadline=DEADLINE / 2).values()
    assert [answer[:2] for answer in answers] == [("RankStalledError", 1)] * 2
    assert answers[1][2] == "write 1"
