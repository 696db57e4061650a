"""The consensus checker: off costs nothing, selectors are no code, the first difference is named."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import types
import weakref
from array import array

import pytest
from harness import programs, worlds
from hicache_store import ConfigError
from hicache_store.ranks import RankAudit, Topology, rank_consensus


def diff(*args) -> subprocess.CompletedProcess:
    """`hicache-store ranks diff`."""
    command = [sys.executable, "-c", "from hicache_store._tool import main; main()", "ranks", "diff"]
    return subprocess.run([*command, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.fixture
def logs(tmp_path):
    """Audits of two ranks, which write logs; and their files after closing."""
    audits = [RankAudit(Topology(tp=2), rank, log=tmp_path, run=7, interval=0.01) for rank in (0, 1)]
    yield audits
    for audit in audits:
        audit.close()


def both(audits, *args):
    for audit in audits:
        audit.record(*args)


def files(audits, folder):
    for audit in audits:
        audit.close()
    return [folder / f"rank-{rank}.audit" for rank in (0, 1)]


# -- the decorator ---------------------------------------------------------------------------------


def test_off_the_decorator_returns_the_function_object_itself():
    def function(pages):
        return pages

    assert rank_consensus(params=("pages",), result=("result",))(function) is function


def test_a_selector_follows_attributes_and_items_and_runs_no_code(logs, tmp_path):
    request = types.SimpleNamespace(rid="r1", key=types.SimpleNamespace(tokens=[5, 6, 7]), sizes={"kv": 3})

    @rank_consensus(
        params=(
            "request.rid",
            "request.key.tokens[-1]",
            "request.sizes['kv']",
            "len(request.key.tokens)",
            "depth",
        ),
        result=("result[0]", "sorted(result)", "result.nothing"),
        name="match",
        audit=logs[0],
    )
    def match(request, depth=9):
        return [2, 1]

    assert match(request) == [2, 1]
    both(logs[1:], "called", "match", ["r1", 7, 3, 3, 9])
    both(logs[1:], "returned", "match", [2, [1, 2], "<AttributeError>"])
    done = diff(*files(logs, tmp_path))
    assert done.stdout == "2 ranks agree in all 2 records\n", done.stdout + done.stderr
    for bad in ("__import__('os')", "len(tokens) + 1", "request.", "other", "eval(request)", "request[x]"):
        with pytest.raises(ConfigError):
            rank_consensus(params=(bad,), audit=logs[0])(match)
    with pytest.raises(ConfigError, match="begin with result"):
        rank_consensus(result=("request",), audit=logs[0])(match)


def test_a_watched_function_behaves_as_before_also_where_it_raises(logs, tmp_path):
    @rank_consensus(params=("pages", "force"), audit=logs[0], name="free")
    def free(pages, *, force=False):
        if not pages:
            raise ValueError("none")
        return pages

    assert free([1], force=True) == [1]
    assert free(pages=[2]) == [2]
    with pytest.raises(ValueError, match="none"):
        free([])
    assert free.__name__ == "free"
    text = diff(*files(logs, tmp_path)).stdout
    assert "called free([1], true)" in text


class Numbers(list):
    """A list by another name."""


class Tensor:
    """What has `tolist`, as arrays and tensors do."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


class Index:
    """What can stand for a number, or raises where it should."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_a_digest_is_of_the_values_whatever_holds_them(logs, tmp_path):
    values = (
        ([5, -6, 1 << 40, True], array("q", [5, -6, 1 << 40, 1]).tobytes()),
        ((5, 6), array("q", [5, 6]).tobytes()),
        ([], b""),
        (Numbers([5, 6]), array("q", [5, 6]).tobytes()),
        (array("q", [5, 6]), array("q", [5, 6]).tobytes()),
        (Tensor([5, 6]), array("q", [5, 6]).tobytes()),
        (memoryview(bytes((5, 6, 7, 8)))[::2], array("q", [5, 7]).tobytes()),
        ([Index(5)], array("q", [5]).tobytes()),
        (Tensor(5), b"5"),
        ([1.5, 2], b"[1.5, 2]"),
        ([1 << 63], b"[9223372036854775808]"),
        ([[1], ["a"]], b"[[1], ['a']]"),
        (bytearray(b"ab"), b"ab"),
        ("ab", b"'ab'"),
        (17, b"17"),
        (None, b"None"),
        (object(), b""),
        ([Index(KeyError("x"))], "<KeyError>"),
        (Tensor([Index(ZeroDivisionError())]), "<ZeroDivisionError>"),
    )
    for number, (value, field) in enumerate(values):
        name = f"value {number}"
        watched = rank_consensus(params=("digest(value)",), name=name, audit=logs[0])(lambda value: value)
        assert watched(value) is value
        both(logs[1:], "called", name, [field])
        both(logs[1:], "returned", name, [])
    done = diff(*files(logs, tmp_path))
    assert done.returncode == 0, done.stdout


def test_arguments_are_found_by_place_by_name_and_by_default(logs, tmp_path):
    selectors = ("first", "second", "third", "named")

    @rank_consensus(params=selectors, name="call", audit=logs[0])
    def call(first, second=2, /, third=3, *more, named=4, **others):
        return first, second, third, more, named, others

    assert call(1) == (1, 2, 3, (), 4, {})
    assert call(5, 6, 7, 8, named=9) == (5, 6, 7, (8,), 9, {})
    assert call(5, third=6, first=0) == (5, 2, 6, (), 4, {"first": 0})
    with pytest.raises(TypeError, match="missing 1 required"):
        call()
    for fields in ([1, 2, 3, 4], [5, 6, 7, 9], [5, 2, 6, 4]):
        both(logs[1:], "called", "call", fields)
        both(logs[1:], "returned", "call", [])
    both(logs[1:], "called", "call", [None, 2, 3, 4])
    both(logs[1:], "returned", "call", ["raised", "TypeError"])
    done = diff(*files(logs, tmp_path))
    assert done.returncode == 0, done.stdout


def test_of_an_argument_that_changes_what_it_was_at_the_call_is_recorded(logs, tmp_path):
    @rank_consensus(params=("pages",), result=("result",), name="take", audit=logs[0])
    def take(pages):
        pages.append(3)
        return pages

    take([1, 2])
    both(logs[1:], "called", "take", [[1, 2]])
    both(logs[1:], "returned", "take", [[1, 2, 3]])
    assert diff(*files(logs, tmp_path)).returncode == 0


def test_records_of_a_function_go_to_its_stream_or_to_that_of_the_thread(tmp_path):
    audits = [
        RankAudit(Topology(tp=2), rank, log=tmp_path, streams=("scheduler", "io"), interval=60)
        for rank in (0, 1)
    ]
    plain, named = (
        rank_consensus(params=("page",), name=name, stream=stream, audit=audits[0])(lambda page: page)
        for name, stream in (("plain", None), ("named", "io"))
    )
    plain(1)
    named(2)
    audits[0].step(5)
    with audits[0].of_thread("io"):
        plain(3)
    for step, name, page, stream in (
        (0, "plain", 1, "scheduler"),
        (0, "named", 2, "io"),
        (5, "plain", 3, "io"),
    ):
        audits[1].step(step)
        audits[1].record("called", name, [page], stream)
        audits[1].record("returned", name, [], stream)
    done = diff(*files(audits, tmp_path))
    assert done.returncode == 0, done.stdout


def test_a_record_that_cannot_be_made_is_lost_and_the_function_goes_on(logs, caplog):
    class Broken(list):
        def __iter__(self):
            raise ValueError("broken")

    def free(pages):
        return 7

    for result, stream, kind in ((("result",), None, ValueError), ((), "nowhere", ConfigError)):
        caplog.clear()
        watched = rank_consensus(params=("pages",), result=result, name="free", stream=stream, audit=logs[0])(
            free
        )
        assert watched(Broken()) == 7
        assert {record.getMessage() for record in caplog.records} == {"a record of free was lost"}
        assert {record.exc_info[0] for record in caplog.records} == {kind}


def test_an_interrupt_while_a_selector_is_followed_reaches_the_caller(logs):
    class Slow:
        @property
        def rid(self):
            raise KeyboardInterrupt

    def called_with(request):
        called.append(request)

    called = []
    with pytest.raises(KeyboardInterrupt):
        rank_consensus(params=("request.rid",), audit=logs[0])(called_with)(Slow())
    assert not called


def test_a_watched_function_that_nobody_has_any_more_is_freed(logs):
    class Default:
        """Has the function of which it is a default."""

    def function(request=Default()):  # noqa: B008
        return request

    watched = rank_consensus(params=("request",), audit=logs[0])(function)
    default = watched()
    default.function = watched
    gone = weakref.ref(default)
    del function, watched, default
    gc.collect()
    assert gone() is None


def test_values_are_recorded_as_they_were_and_addresses_never(logs, tmp_path):
    pages = [1, 2]
    both(logs, "called", "free", [pages, object(), list(range(1000)), b"\x00" * 99, 1 << 80, 2.5, None])
    pages.append(3)
    assert diff(*files(logs, tmp_path)).returncode == 0


# -- logs afterwards -------------------------------------------------------------------------------


def test_diff_shows_both_sides_with_what_stands_around_them(logs, tmp_path):
    for audit in logs:
        audit.step(4)
    for number in range(8):
        both(logs, "called", "match", [number])
    both(logs[:1], "state", "unlock", [17])
    both(logs, "called", "evict", [64])
    both(logs[1:], "state", "unlock", [17])
    paths = files(logs, tmp_path)
    done = diff("--context", 2, *reversed(paths))
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "stream scheduler: ranks differ from record 8 on",
        "  all ranks       6  step 4 called match(6)",
        "  all ranks       7  step 4 called match(7)",
        "> rank 0          8  step 4 state unlock(17)",
        "  rank 0          9  step 4 called evict(64)",
        "> rank 1          8  step 4 called evict(64)",
        "  rank 1          9  step 4 state unlock(17)",
    ]
    told = json.loads(diff("--json", *paths).stdout)
    assert (told["command"], told["is_equal"], told["ranks"]) == ("ranks diff", False, 2)
    sides = told["difference"]["sides"]
    assert [side["record"]["name"] for side in sides] == ["unlock", "evict"]
    assert sides[0]["record"] == {"step": 4, "kind": "state", "name": "unlock", "fields": [17]}


def test_a_log_of_a_killed_rank_tells_what_it_recorded(tmp_path):
    worlds.run(programs.recorded_and_killed, 2, dead=(1,), folder=str(tmp_path))
    done = diff(*(tmp_path / f"rank-{rank}.audit" for rank in (0, 1)))
    assert done.returncode == 1
    assert "ranks differ from record 100 on" in done.stdout
    assert "> rank 1        100  nothing more" in done.stdout


def test_diff_refuses_what_are_no_logs_of_one_run(logs, tmp_path):
    paths = files(logs, tmp_path)
    (tmp_path / "text").write_text("hello")
    other = RankAudit(Topology(tp=2), 1, log=tmp_path / "other", run=8)
    other.close()
    for args, word in (
        ((paths[0], tmp_path / "text"), "audit log"),
        ((paths[0], tmp_path / "none"), "cannot read"),
        ((paths[0], paths[0]), "2 logs of 1 ranks"),
        ((paths[0], tmp_path / "other" / "rank-1.audit"), "run"),
    ):
        done = diff(*args)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert word in done.stderr


# -- live ------------------------------------------------------------------------------------------


def test_i17_live_the_first_differing_record_is_named_on_all_ranks():
    answers = worlds.run(programs.watched_live, 4, what="differ").values()
    assert {answer["kind"] for answer in answers} == {"RankDisagreementError"}
    assert {answer["index"] for answer in answers} == {"40"}
    for answer in answers:
        assert answer["records"] == {
            rank: f"step 0 state unlock({41 if rank == 2 else 40})" for rank in range(4)
        }


def test_i17_live_the_silent_rank_is_named_on_all_ranks():
    answers = worlds.run(programs.watched_live, 3, what="silent").values()
    assert [(answer["kind"], answer["rank"]) for answer in answers] == [("RankStalledError", 1)] * 3


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_i17_live_a_rank_whose_process_is_gone_is_named(what):
    world = worlds.run(programs.watched_live, 3, what=what, dead=(1,))
    told = {rank: (answer.value["kind"], answer.value["rank"]) for rank, answer in world.answers.items()}
    assert told == {0: ("RankStalledError", 1), 2: ("RankStalledError", 1)}


def test_live_ranks_that_agree_end_together_and_leave_nothing():
    answers = worlds.run(programs.watched_live, 3, what="equal").values()
    assert [answer["kind"] for answer in answers] == [None] * 3


def test_a_record_costs_little(tmp_path):
    """Not a measurement: that a record takes a bounded number of bytes, and no thread waits for it."""
    audit = RankAudit(Topology(tp=2), 0, log=tmp_path, interval=60)
    for number in range(20_000):
        audit.record("state", "unlock", (number,))
    audit.close()
    assert (tmp_path / "rank-0.audit").stat().st_size < 20_000 * 12
