"""Agreement of ranks from Python, as far as it needs neither torch nor a second process."""

import copy
import json
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import hicache_store.ranks
import numpy as np
import pytest
from hicache_store import ConfigError, Namespace, Pool, Store, Tile, _hicache_store, page_keys
from hicache_store.ranks import (
    AckLog,
    AckOrderError,
    Apply,
    Ask,
    ClassedPool,
    Expired,
    HitVote,
    LayerGate,
    Lengths,
    NullTransport,
    OutcomeVote,
    Ownership,
    OwnershipError,
    Placement,
    PpSync,
    Prefetch,
    ProgressVote,
    RankDisagreementError,
    RankStalledError,
    Reading,
    RestoreSession,
    ScratchBudget,
    ScratchSize,
    Spread,
    StateDigest,
    StateError,
    TierLedger,
    Topology,
    Watch,
    drive,
    exceptions,
)
from hicache_store.ranks.heartbeat import Heartbeat


def test_public_names_are_there_sorted_and_say_where_they_are_found():
    names = hicache_store.ranks.__all__
    assert sorted(names) == names
    for name in names:
        value = getattr(hicache_store.ranks, name)
        if isinstance(value, type):
            assert value.__name__ == name
            assert value.__module__.startswith("hicache_store.ranks"), name


# -- errors ----------------------------------------------------------------------------------------


def test_kinds_and_classes_are_equal_in_number_and_name():
    assert list(exceptions.BY_KIND) == _hicache_store._rank_error_kinds()
    own = [error.__name__ for error in exceptions.BY_KIND.values() if issubclass(error, exceptions.RankError)]
    assert {*exceptions.__all__} == {"RankError", *own}


def test_the_table_in_the_documentation_is_complete():
    text = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (?:`(\w+)`)? ?\|", text, re.MULTILINE)
    own = {
        kind: error for kind, error in exceptions.BY_KIND.items() if issubclass(error, exceptions.RankError)
    }
    built_in = [
        next((base.__name__ for base in error.__mro__ if base.__module__ == "builtins"), "")
        for error in own.values()
    ]
    expected = [
        (kind, error.__name__, "" if base == "Exception" else base)
        for (kind, error), base in zip(own.items(), built_in, strict=True)
    ]
    assert rows == expected


def test_an_error_names_the_rank_and_the_operation_and_pickles():
    vote = HitVote(7, 4, [3])
    with pytest.raises(RankStalledError, match="hit of request 7: no word from rank 3 in time") as caught:
        vote.resume(Expired(3))
    for error in (caught.value, copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):  # noqa: S301
        assert (error.rank, error.context["operation"]) == (3, "hit of request 7")
        assert isinstance(error, TimeoutError)


# -- machines --------------------------------------------------------------------------------------


def test_topology_numbers_ranks_as_the_engine_does():
    topology = Topology(2, 2, 4, cp_kind="page", dp=2, dcp=2)
    assert (topology.ranks, topology.dp, topology.owners) == (32, 2, 2)
    at = topology.coordinates(topology.rank(pp=1, dp=1, cp=1, tp=3))
    assert (at.pp, at.dp, at.cp, at.tp, at.dcp) == (1, 1, 1, 3, 1)
    assert topology.members(0, "stage") == list(range(8))
    assert topology.members(0) == [*range(8), *range(16, 24)]
    assert (topology.next_stage(3), topology.previous_stage(19), topology.next_stage(19)) == (19, 3, None)
    with pytest.raises(ConfigError, match="page, layer, token or replicated"):
        Topology(cp=2)


def test_i03_a_backup_keeps_the_owners_of_its_pages():
    placement = Placement(owners=3, page_tokens=4)
    device, host, rules = ClassedPool(placement, 4), ClassedPool(placement, 6), Ownership(placement)
    device.alloc_cyclic(0, 4)
    pages = device.alloc_cyclic(rules.new_chain(device), 5)
    copied = rules.allocate_backup(host, pages)
    assert [page % 3 for page in copied] == [page % 3 for page in pages]
    shares = [rules.own_share(owner, pages, copied) for owner in range(3)]
    assert sorted(pair for share in shares for pair in share) == sorted(zip(pages, copied, strict=True))
    with pytest.raises(OwnershipError, match="would move"):
        rules.own_share(0, [0], [1])
    plan = rules.gather([pages])
    assert (plan.block, plan.scratch_pages) == (2, 6)
    placed = [plan.scratch_page(page) for page in pages]
    assert len(set(placed)) == 5
    assert plan.scratch_page(99) is None
    before = host.digest
    assert not any(map(host.is_free, copied))
    host.free(copied)
    assert all(map(host.is_free, copied))
    assert not host.is_free(host.total)
    with pytest.raises(OwnershipError):
        host.free(copied)
    assert host.digest != before


def test_i19_writers_are_elected_and_hold_what_they_write():
    topology, spread = Topology(2, 2, 4, cp_kind="replicated"), Spread.even(7, 2, 2)
    writers = [rank for rank in range(16) if spread.is_writer(topology, rank)]
    assert writers == [0, 2, 8, 10]
    holding = spread.holding(topology, 10)
    assert (holding.layers, holding.heads, holding.tokens, holding.owner) == ((4, 7), (1, 2), (0, 1), None)


def test_a_step_in_a_world_of_one_consumes_the_leading_run_and_waits_for_nothing_else():
    log = AckLog("write")
    sync, seen = PpSync(Topology(), 0, [log]), []
    tickets = [log.append(number) for number in (10, 11, 12)]
    log.finish(tickets[0])
    log.finish(tickets[2], complete=False)
    end = drive(sync, NullTransport(), lambda entry: seen.append((entry.ack.operation, entry.ack.complete)))
    assert (seen, end.expired, len(log), log.ready) == ([(10, True)], 0, 2, 0)
    assert log.finish(tickets[1]) is True
    assert log.finish(tickets[1]) is False
    drive(sync, NullTransport(), lambda entry: seen.append((entry.ack.operation, entry.ack.complete)))
    assert seen[1:] == [(11, True), (12, False)]
    with pytest.raises(AckOrderError):
        log.finish(99)
    with pytest.raises(ConfigError, match="twice"):
        PpSync(Topology(), 0, [log, log])


def test_example_of_section_12_stage_1_keeps_what_stage_0_has_not():
    topology = Topology(pp=2)
    logs = [AckLog("write"), AckLog("write")]
    first, second = (PpSync(topology, rank, [log]) for rank, log in enumerate(logs))
    for log in logs:
        log.append(0xA)
        log.append(0xB)
    logs[0].finish(0)
    logs[1].finish(0)
    logs[1].finish(1)
    sent = first.begin()
    assert (sent.kind, sent.peer) == ("send", 1)
    step = first.resume(None)
    assert isinstance(step, Apply)
    assert step.ack.operation == 0xA
    asked = second.begin()
    assert (asked.kind, asked.peer, asked.length) == ("receive", 0, len(sent.values))
    step = second.resume(sent.values)
    assert step.ack.operation == 0xA
    second.resume(None)
    assert (len(logs[1]), logs[1].ready) == (1, 1)


def test_a_wait_for_an_entry_ends_when_another_thread_finishes_it():
    topology = Topology(pp=2)
    log = AckLog("load")
    other, sync = PpSync(topology, 0, [AckLog("load")]), PpSync(topology, 1, [log])
    values = other.begin().values
    values[-1] = 1  # stage 0 chose one entry
    ticket = log.append(5)
    sync.begin()
    ask = sync.resume(values)
    assert (ask.kind, ask.wait(0.01)) == ("wait", False)
    thread = threading.Thread(target=log.finish, args=(ticket,))
    thread.start()
    assert ask.wait(30)
    thread.join()
    assert sync.resume(None).ack.operation == 5


def test_a_voted_entry_is_ready_when_its_outcome_is_agreed():
    log = AckLog("write", voted=True)
    ticket = log.append_finished(1)
    assert (log.ready, log.next_vote(), log.next_vote()) == (0, (ticket, True), None)
    assert drive(OutcomeVote(ticket, True), NullTransport()) is True
    assert OutcomeVote(ticket, True).resume([*OutcomeVote(ticket, True).begin().values[:2], 0]) is False
    log.decide(ticket, False)
    assert log.ready == 1


def test_i13_lengths_are_intersected_not_their_longest():
    ours, theirs = Lengths(9, [3, 7]), Lengths(9, [3, 8])
    assert (ours.longest, ours.intersect(theirs).longest, 7 in ours, 4 in ours) == (7, 3, True, False)


def test_i12_completed_is_at_most_the_hit_and_every_read_reports_as_often():
    def read(pages):
        reading, scheduler = Reading(1, 6, 4, side_pools=True), Prefetch(1, 8, 6)
        parts, publication = [], None
        while reading.next_part:
            parts.append(reading.next_part)
            report = drive(ProgressVote(reading.report(next(pages))), NullTransport())
            publication = scheduler.consume(report)
        return parts, publication.publish, publication.free_to

    parts = ["progress", "progress", "side_pools", "done"]
    assert read(iter([4, 9, 6, 0])) == (parts, 6, 6)
    assert read(iter([4, 1, 3, 0])) == (parts, 3, 6)
    assert read(iter([0, 0, 0, 0])) == (parts, 0, 6)


def test_a_read_knows_its_number_and_what_was_asked_for():
    scheduler = Prefetch(7, span=8, hit=6)
    assert (scheduler.operation, scheduler.span, scheduler.hit) == (7, 8, 6)


def test_i07_scratch_is_reserved_rolled_back_and_refused():
    size = ScratchSize(Placement(4, 64), contexts=8, context=131072, chunk=8192)
    assert round(size.bytes(708) / 2**30, 2) == 1.39
    budget = ScratchBudget(ScratchSize(Placement(2, 4), contexts=1, context=16, chunk=8))
    assert budget.reserve(1, 3)
    mark = budget.mark()
    assert budget.used == (8, 4)
    assert budget.reserve(2, 4)
    assert not budget.reserve(1, 1)
    budget.rollback(mark)
    assert budget.used == (8, 4)
    with pytest.raises(ConfigError, match="do not fit"):
        budget.reserve(9, 1)
    with pytest.raises(StateError):
        budget.rollback(9)


def test_i06_a_read_of_a_layer_that_is_not_live_is_refused():
    gate = LayerGate(3)
    waits = [gate.gather().waits for _ in range(3)]
    assert waits == [[("loaded", 0, 0)], [("loaded", 0, 1)], [("loaded", 0, 2), ("read_ended", 0, 0)]]
    assert gate.read(0, 2) == [("gathered", 0, 2)]
    with pytest.raises(OwnershipError):
        gate.read(0, 0)


def test_i21_a_promise_that_cannot_be_kept_fails_the_request():
    session = RestoreSession(3, prompt_tokens=50, page_tokens=4, device=2, host=1, storage=4)
    with pytest.raises(StateError, match="before the prefetch was decided"):
        session.promise()
    session.prefetch(True)
    assert session.promise() == (28, 50)
    assert session.transfer(peer_match_tokens=12) == (28, 50)
    assert session.prefetched(3) == "failed"
    assert session.resume([*session.begin().values]) == "fail"
    assert session.release() == ["lock", "suffix_slots"]
    assert session.release() == []


@pytest.fixture
def account():
    """An account of 100 tokens that adds up, with rows of 128 bytes."""
    ledger = TierLedger(100)
    for tier, tokens in {"device": 20, "host": 30, "storage": 8, "recomputed": 42}.items():
        ledger.take(tier, tokens)
    stages = {"promised": 16, "agreed": 12, "completed": 8, "materialized": 8, "consumed": 8}
    for stage, tokens in stages.items():
        ledger.reach(stage, tokens)
    ledger.shortfall("another rank had less", 4)
    ledger.shortfall("a page was damaged", 4)
    ledger.copied(38, 38 * 128)
    ledger.check(128)
    return ledger


def test_i23_an_account_counts_what_it_is_told(account):
    account.take("host", 5)
    account.reach("agreed", 3)
    assert [account.tier(tier) for tier in ("device", "host", "storage", "recomputed")] == [20, 35, 8, 42]
    stages = ("promised", "agreed", "completed", "materialized", "consumed")
    assert [account.stage(stage) for stage in stages] == [16, 15, 8, 8, 8]
    assert repr(account) == "TierLedger(prompt=100, device=20, host=35, storage=8, recomputed=42)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ledger: ledger.take("host", 1), "tiers hold 101 tokens, the prompt has 100"),
        (lambda ledger: ledger.reach("completed", 5), "13 tokens Completed, but only 12 Agreed"),
        (lambda ledger: ledger.shortfall("no reason", 1), "8 promised tokens were not consumed, 9 have"),
        (lambda ledger: ledger.copied(1, 127), "4991 bytes moved for 39 rows"),
        (lambda ledger: [ledger.take("host", more) for more in (2**64 - 1, 1)], "the prompt has 100"),
    ],
)
def test_i23_an_account_that_does_not_add_up_says_where(account, change, words):
    change(account)
    with pytest.raises(RankDisagreementError, match=words):
        account.check(128)


def test_i23_an_account_has_four_tiers_and_five_stages(account):
    with pytest.raises(ConfigError, match="expected one of device, host, storage, recomputed"):
        account.take("disk", 1)
    with pytest.raises(
        ConfigError, match="expected one of promised, agreed, completed, materialized, consumed"
    ):
        account.reach("lost", 1)


def test_the_culprit_is_at_the_end_of_the_waits():
    watch = Watch()
    watch.beat(2, 7, [1])
    watch.beat(1, 7, [0])
    watch.beat(0, 6, [])
    assert watch.culprit([2]) == 0
    watch.silence(1)
    assert watch.culprit([2]) == 1
    assert watch.culprit([]) is None


@pytest.fixture
def heartbeats():
    """Heartbeats of three ranks that have heard each other."""
    beats = [Heartbeat(rank, range(3), interval=0.02, silent_after=60, host="127.0.0.1") for rank in range(3)]
    for beat in beats:
        beat.start({other.rank: other.address for other in beats}, "run")
    for beat in beats:
        beat.wait_for_all(30)
    yield beats
    for beat in beats:
        beat.stop()
        beat.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-heartbeat"]


def test_whom_a_rank_blames_in_one_lane_is_to_blame_in_all(heartbeats):
    _, waiting, failed = heartbeats
    failed.waits("query", [0])
    waiting.waits("scheduler", [2])
    assert waiting.culprit("scheduler", [2], certain=True) is None
    failed.blames(0)
    until = time.monotonic() + 30
    while waiting.culprit("scheduler", [2], certain=True) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert waiting.culprit("scheduler", [2], certain=True) == 0


def test_silent_is_who_says_nothing_to_one_that_listens():
    beats = [Heartbeat(rank, range(2), interval=0.02, silent_after=2, host="127.0.0.1") for rank in range(2)]
    deaf, hears = threading.Event(), threading.Event()
    try:
        for beat in beats:
            beat.start({rank: other.address for rank, other in enumerate(beats)}, "run")
        for beat in beats:
            beat.wait_for_all(60)
        # As on a machine that has no time for its thread.
        beats[0]._listen = lambda: deaf.set() or hears.wait()
        assert deaf.wait(60)
        time.sleep(3)
        assert beats[0].culprit("audit", [1], certain=True) is None
        del beats[0]._listen
        hears.set()
        beats[1]._tell = lambda **_: None
        until = time.monotonic() + 60
        while beats[0].culprit("audit", [1], certain=True) is None and time.monotonic() < until:
            time.sleep(0.02)
        assert beats[0].culprit("audit", [1], certain=True) == 1
    finally:
        hears.set()
        for beat in beats:
            beat.stop()


def test_datagrams_that_are_no_heartbeats_of_this_run_are_not_heard(heartbeats):
    beat = {"token": "other", "rank": 1, "number": 10**9, "progress": {}, "missing": {}, "blames": 2}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign:
        for datagram in (b"", b"\xff{", b"[]", b"{}", json.dumps(beat).encode()):
            foreign.sendto(datagram, heartbeats[0].address)
    heartbeats[1].blames(1)
    until = time.monotonic() + 30
    while heartbeats[0].culprit("audit", [1], certain=True) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert heartbeats[0].culprit("audit", [1], certain=True) == 1


def test_state_digests_follow_changes_and_their_undoing():
    state = StateDigest()
    empty = state.combined
    state.lock(5)
    assert state.combined != empty
    state.unlock(5)
    assert state.combined == empty


def test_a_world_of_one_has_nobody_to_send_to():
    transport = NullTransport()
    ask = Ask.reduce([3], name="x", op="and")
    assert (ask.kind, ask.scope, ask.op, ask.operation) == ("reduce", "replica", "and", "x 0")
    assert transport.answer(ask) == [3]
    with pytest.raises(StateError, match="a send in a world of one"):
        transport.answer(PpSync(Topology(pp=2), 0, []).begin())
    for bad in ({"op": "sum"}, {"lane": "main"}, {"scope": "all"}):
        with pytest.raises(ConfigError):
            Ask.reduce([1], name="x", **bad)


def test_the_plugin_of_the_engine_imports_nothing_of_it_as_long_as_it_is_off():
    code = """
import os, sys
os.environ.pop("HICACHE_RANK_AUDIT", None), os.environ.pop("HICACHE_RANK_AUDIT_LIVE", None)
from hicache_store.sglang.rank_audit import register
register()
assert not {"sglang", "torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the store under several ranks -----------------------------------------------------------------

PAGE = 4
POOL = Pool("kv", "kv", "bfloat16", components={"k": 16, "v": 16})
TILE = Tile(layers=(0, 2), heads=(0, 2))


def test_i20_any_differing_field_of_the_namespace_is_a_miss_on_all_ranks(tmp_path):
    facts = {"model": "org/tiny", "revision": "r1", "page_size": PAGE, "salt": "a"}
    other = {"model": "org/tiny2", "revision": "r2", "page_size": 2 * PAGE, "salt": "b"}
    keys = page_keys(range(6 * PAGE), PAGE)
    with Store.open(tmp_path, capacity="64MiB") as store:

        def view(pool=POOL, **changed):
            return store.view(Namespace(**facts | changed), pool, tile=TILE)

        assert view().backup(keys, np.zeros((2, 6, PAGE, 2, 2, 8), np.uint16), range(6)).leading == 6
        mine = view().match(keys).pages
        assert mine == 6
        changed = [view(**{name: value}) for name, value in other.items()]
        changed.append(view(Pool("kv", "kv", "float16", components={"k": 16, "v": 16})))
        changed.append(view(Pool("kv", "kv", "bfloat16", components={"k": 32, "v": 16})))
        for theirs in changed:
            # A rank that was started with another field finds nothing, so nobody uses anything.
            votes = [HitVote(1, 6, [mine]), HitVote(1, 6, [theirs.match(keys).pages])]
            values = [min(words) for words in zip(*(vote.begin().values for vote in votes), strict=True)]
            assert [vote.resume(values).pages for vote in votes] == [0, 0]


def test_i20_no_torn_object_is_ever_visible(tmp_path):
    """A segment that was cut anywhere gives whole pages or none."""
    keys = page_keys(range(6 * PAGE), PAGE)
    pages = np.random.default_rng(5).integers(0, 2**16, (2, 6, PAGE, 2, 2, 8), np.uint16)
    namespace = Namespace("org/tiny", revision="r1", page_size=PAGE)
    with Store.open(tmp_path / "whole", capacity="64MiB") as store:
        assert store.view(namespace, POOL, tile=TILE).backup(keys, pages, range(6)).leading == 6
    (segment,) = (tmp_path / "whole").rglob("*.seg")
    size = segment.stat().st_size
    seen = set()
    for cut in sorted({0, 1, 4095, 4096, 4097, size // 3, size // 2, size - 700, size - 1, size}):
        root = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "whole", root)
        with (root / segment.relative_to(tmp_path / "whole")).open("r+b") as file:
            file.truncate(cut)
        with Store.open(root, capacity="64MiB") as store:
            target = np.zeros_like(pages)
            flags = store.view(namespace, POOL, tile=TILE).restore(keys, target, range(6)).flags()
        for page, is_whole in enumerate(flags):
            if is_whole:
                np.testing.assert_array_equal(target[:, page], pages[:, page])
        seen.add(sum(flags))
    assert {0, 6} <= seen


def test_every_test_that_the_documentation_names_is_there():
    root = Path(__file__).parents[2]
    text = (root / "docs" / "ranks.md").read_text("utf-8")
    named = set(re.findall(r"\b((?:test|case|example|i\d\d)_\w{12,}|(?:a|every)_\w{20,})\b(?!\.py)", text))
    sources = [*(root / "tests").rglob("*.py"), *(root / "rust/hicache-ranks/src/tests").glob("*.rs")]
    defined = set(re.findall(r"\b(?:fn|def) (\w+)", "".join(path.read_text("utf-8") for path in sources)))
    assert len(named) > 80
    assert named <= defined, sorted(named - defined)
