"""The rank audit around the engine's own tree, on two ranks over gloo."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
from harness import audited
from harness.workers import Deployment
from hicache_store.sglang import rank_audit


@pytest.fixture
def run(tmp_path):
    """Runs a deployment with the audit's log in `tmp_path / "audit"`; what each audit says."""

    def run(plant, environment=None, **shape):
        given = {rank_audit.FOLDER: str(tmp_path / "audit")} if environment is None else environment
        return audited.run(Deployment(tmp_path / "root", **shape), tmp_path / "meeting", given, plant)

    return run


def diff(folder) -> dict:
    logs = [str(folder / f"rank-{rank}.audit") for rank in (0, 1)]
    code = "from hicache_store._tool import main; main()"
    command = [sys.executable, "-c", code, "ranks", "diff", *logs, "--context", "10000", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_ranks_that_agree_have_equal_logs_of_everything_that_is_watched(run, tmp_path):
    run("nothing", pp=2)
    told = diff(tmp_path / "audit")
    assert told["is_equal"], told["difference"]
    assert [log["records"] > 50 for log in told["logs"]] == [True, True]


def test_example_of_section_12_with_pp_sync_off_the_first_difference_is_a_lock_release(run, tmp_path):
    run("pp_sync off", pp=2)
    found = diff(tmp_path / "audit")["difference"]
    sides = [[side["record"], *side["after"]] for side in found["sides"]]
    kinds = [(side[0]["kind"], side[0]["name"]) for side in sides]
    assert ("state", "unlock") in kinds, kinds
    # Evictions and matches differ too, each later than that.
    for kind, name in (("returned", "evict"), ("returned", "match")):
        answers = [
            [(r["step"], r["fields"]) for r in side if (r["kind"], r["name"]) == (kind, name)]
            for side in sides
        ]
        differing = [pair for pair in zip(*answers, strict=False) if pair[0][1] != pair[1][1]]
        assert differing, f"no {name} differs"
        assert min(step for step, _ in differing[0]) >= min(side[0]["step"] for side in sides)


def test_live_a_planted_eviction_is_named_on_both_ranks(run):
    answers = run("evicts more", {rank_audit.LIVE: "30"}, tp=2)
    assert answers[0] == answers[1]
    assert "rank 0: step 4 called evict(4, 0, 0); rank 1: step 4 called evict(8, 0, 0)" in answers[0]


def test_off_nothing_of_the_engine_is_touched(run):
    assert run("nothing", {}, pp=2) == [None, None]


def test_the_engine_finds_the_plugin_by_its_entry_point():
    found = importlib.metadata.entry_points(group="sglang.srt.plugins")
    assert [entry.load() for entry in found if entry.name == "hicache_rank_audit"] == [rank_audit.register]
