"""What one call asks for: its pools and policies, its time, its way through the store's own memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from backup_worker import PAGE_BYTES, PAGES, chain_bytes, chain_keys, open_view
from hicache_store import (
    Component,
    ConfigError,
    HitPolicy,
    Namespace,
    Pool,
    PoolView,
    Store,
    Tile,
)

HERE = Path(__file__).parent
KEYS = chain_keys(0)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store", capacity="64MiB") as store:
        yield store


@pytest.fixture
def view(store):
    return open_view(store)


@pytest.fixture
def hybrid(store):
    """A view of `kv`, of which all pages are stored, and `state`, of which pages 1 and 5 are."""
    kv = Pool("kv", "state", "uint8", [Component("x", 64, "page")])
    state = Pool("state", "state", "uint8", [Component("x", 32, "page")])
    tile = Tile(layers=(0, 1), heads=(0, 1))
    pools = [PoolView(kv, tile), PoolView(state, tile)]
    view = store.view(Namespace("org/hybrid", revision="r1", page_size=4), pools)
    memory = {"kv": np.zeros(8 * 64, np.uint8), "state": np.ones(8 * 32, np.uint8)}
    held = [page if page in (1, 5) else -1 for page in range(PAGES)]
    assert view.backup(KEYS, memory, {"kv": range(PAGES), "state": held}).leading == PAGES
    return view


ALL, LAST = HitPolicy.all_pages(), HitPolicy.trailing_pages(1)


@pytest.mark.parametrize(
    ("policies", "pages", "hits"),
    [
        (None, 0, {"kv": 8, "state": 0}),
        ({"kv": ALL}, 8, {"kv": 8}),
        ({"kv": ALL, "state": None}, 8, {"kv": 8}),
        ({"kv": ALL, "state": LAST}, 6, {"kv": 8, "state": 6}),
        ({"state": LAST}, 6, {"state": 6}),
    ],
)
def test_a_look_up_consults_the_pools_it_names(hybrid, policies, pages, hits):
    answer = hybrid.match(KEYS, policies)
    assert (answer.pages, answer.hits) == (pages, hits)
    assert hybrid.match(KEYS, policies=policies).legal == answer.legal


@pytest.mark.parametrize(
    ("policies", "part"),
    [
        ({"swa": ALL}, "pools of kv, state, found the key 'swa'"),
        ({"kv": 3}, 'type int for "kv"'),
        ({1: ALL}, "the key 1"),
        ([ALL], "type list"),
        ({}, "at least one pool"),
        ({"kv": None, "state": None}, "at least one pool"),
    ],
)
def test_policies_that_make_no_sense_are_refused(hybrid, policies, part):
    with pytest.raises(ConfigError, match=part):
        hybrid.match(KEYS, policies)


def test_reports_have_flags(view):
    source, target = chain_bytes(0), np.zeros_like(chain_bytes(0))
    report = view.backup(KEYS, source, [0, 1, 2, -1, 4, 5, 6, 7], depth=0)
    assert report.flags() == [True, True, True, False, True, True, True, True]
    assert (report.leading, len(report)) == (3, PAGES)
    report = view.restore(KEYS, target, range(PAGES))
    assert report.flags() == [True, True, True, False, True, True, True, True]
    assert report.leading == 3
    assert [type(flag) for flag in report.flags()] == [bool] * PAGES
    assert view.restore([], target, []).flags() == []


@pytest.mark.parametrize("bounce", ["never", "auto", "always"])
def test_pages_come_back_in_time(store, view, bounce):
    source, target = chain_bytes(0), np.zeros_like(chain_bytes(0))
    report = view.backup(KEYS, source, range(PAGES), depth=0, timeout=60, bounce=bounce)
    assert report.outcomes == ["stored"] * PAGES
    assert view.restore(KEYS, target, range(PAGES), timeout=60, bounce=bounce).all_restored
    assert (target == source).all()
    counters = store.stats()["counters"]
    expected = PAGES if bounce == "always" else 0
    assert (counters["bounced_read_pages"], counters["bounced_write_pages"]) == (expected, expected)


@pytest.mark.parametrize("bounce", ["never", "auto", "always"])
def test_without_time_nothing_is_begun(store, view, bounce):
    view.backup(KEYS, chain_bytes(0), range(PAGES), depth=0)
    target = np.zeros_like(chain_bytes(0))
    assert view.restore(KEYS, target, range(PAGES), timeout=0, bounce=bounce).count("late") == PAGES
    assert not target.any()
    report = view.backup(chain_keys(1), chain_bytes(1), range(PAGES), depth=0, timeout=0, bounce=bounce)
    assert report.count("late") == PAGES
    assert report.reason == "the deadline had passed"
    assert view.match(chain_keys(1)).pages == 0
    counters = store.stats()["counters"]
    assert (counters["restore_late_pages"], counters["backup_late_pages"]) == (PAGES, PAGES)


def test_times_and_ways_that_make_no_sense_are_refused(view):
    memory = chain_bytes(0)
    for call in (view.backup, view.restore):
        with pytest.raises(ConfigError, match="not a number"):
            call(KEYS, memory, range(PAGES), timeout=float("nan"))
        with pytest.raises(ConfigError, match='never, auto or always, found "yes"'):
            call(KEYS, memory, range(PAGES), bounce="yes")


def test_stats_say_how_the_device_does(store, view):
    view.backup(KEYS, chain_bytes(0), range(PAGES), depth=0, timeout=60)
    view.restore(KEYS, np.zeros_like(chain_bytes(0)), range(PAGES), timeout=60)
    device = store.stats()["device"]
    assert set(device) == {
        "slow",
        "p99_read_seconds",
        "p99_write_seconds",
        "breaker",
        "abandoned_requests",
        "bounce_bytes",
    }
    assert (device["slow"], device["breaker"]) == (False, "closed")
    assert (device["abandoned_requests"], device["bounce_bytes"]) == (0, 0)
    assert 0 <= device["p99_read_seconds"] < 15
    assert 0 <= device["p99_write_seconds"] < 15
    counters = store.stats()["counters"]
    for name in ("breaker_openings", "breaker_refused_calls", "abandoned_requests", "calls_past_deadline"):
        assert counters[name] == 0


# Restores a chain of which one read is held, lets it go after the call, and says what was in the memory.
# Where the read had not begun when the time was over, it was the machine that was slow: the call gets more.
HOLDING = """
import sys, time
from pathlib import Path
import numpy as np
from backup_worker import *
control = Path(sys.argv[2])
held, go = Path(f"{control}.held"), Path(f"{control}.go")
store = Store.open(sys.argv[1])
view = open_view(store)
for seconds in (0.5, 5):
    target = np.full(PAGES * PAGE_BYTES, 0xA5, np.uint8)
    go.unlink(missing_ok=True)
    control.touch()
    report = view.restore(chain_keys(0), target, range(PAGES), timeout=seconds, bounce="always")
    was_held = held.exists()
    go.touch()
    while store.stats()["device"]["abandoned_requests"]:
        time.sleep(0.01)
    if was_held:
        break
control.unlink(missing_ok=True)
print(was_held, report.count("late"), bool((target == 0xA5).all()))
assert view.restore(chain_keys(0), target, range(PAGES), timeout=60, bounce="always").all_restored
assert (target == chain_bytes(0)).all()
"""


@pytest.mark.timeout(120)
def test_a_read_that_hangs_is_left_behind_by_the_store_as_it_is_shipped(tmp_path, store, view):
    view.backup(KEYS, chain_bytes(0), range(PAGES), depth=0)
    library = tmp_path / "slow_read.so"
    source = HERE.parent / "sglang" / "slow_read.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    control = tmp_path / "hold"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "SLOW_READ_CONTROL": str(control),
        "SLOW_READ_MIN_BYTES": str(PAGE_BYTES),
    }
    command = [sys.executable, "-c", HOLDING, str(store.path), str(control)]
    done = subprocess.run(command, env=environment, cwd=HERE, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["True", str(PAGES), "True"]
