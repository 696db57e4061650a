"""Processes that share a root, from Python: room, eviction, age and conflicts are everybody's."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from backup_worker import NAMESPACE, PAGE_BYTES, PAGES, POOL, chain_bytes, chain_keys, open_view
from hicache_store import Store, Tile, View, page_keys
from hicache_store.exceptions import ConfigError, StoreClosedError, UnsupportedError

HERE = Path(__file__).parent
CAPACITY = 16 << 20
# More than the capacity holds: 512 KiB each.
CHAINS = 48

# Stores chain after chain, says what is then found of each and what it counted, lives until its input ends.
# Half of the root is free by then: nobody makes room ahead any more, and what it found stays.
WRITER = """
import json, sys
from backup_worker import *
store = Store.open(sys.argv[1])
view = open_view(store)
for number in range(1, int(sys.argv[2])):
    report = view.backup(chain_keys(number), chain_bytes(number), range(PAGES), depth=0)
    assert report.count("stored") == PAGES, report.reason
store.prune(int(sys.argv[3]))
store.close()
view = open_view(Store.open(sys.argv[1], read_only=True))
found = [view.match(chain_keys(number)).pages for number in range(int(sys.argv[2]))]
print(json.dumps([found, store.stats()]), flush=True)
sys.stdin.read()
"""


def backup(view: View, number: int, of: int | None = None) -> list[str]:
    """Outcomes of a backup of chain `number`, with the bytes of chain `of`."""
    memory = chain_bytes(number if of is None else of)
    return list(view.backup(chain_keys(number), memory, range(PAGES), depth=0).outcomes)


def restored(view: View, number: int) -> int:
    """Leading pages that a restore brings back, each of them exact."""
    memory = np.zeros(PAGES * PAGE_BYTES, np.uint8)
    outcomes = view.restore(chain_keys(number), memory, range(PAGES)).outcomes
    # page_first_direct keeps K of all pages before V of all pages: compare half pages.
    found, expected = memory.reshape(2, PAGES, -1), chain_bytes(number).reshape(2, PAGES, -1)
    for page, outcome in enumerate(outcomes):
        assert outcome != "restored" or np.array_equal(found[:, page], expected[:, page]), (number, page)
    return next((page for page, outcome in enumerate(outcomes) if outcome != "restored"), PAGES)


def counter(store: Store, name: str) -> int:
    """One of this process's totals."""
    return int(store.stats()["counters"][name])


def wait_until(what: Callable[[], bool], why: str) -> None:
    """Returns when `what` holds; slow machines get a minute."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


def test_what_one_process_evicts_another_misses_at_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path, capacity=CAPACITY)
    view = open_view(store)
    assert backup(view, 0) == ["stored"] * PAGES
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(CHAINS), str(CAPACITY // 2)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
    ) as writer:
        assert writer.stdout is not None
        found, stats = json.loads(writer.stdout.readline())
        assert 0 < sum(found) < CHAINS * PAGES
        assert found[-1] == PAGES
        # While the root was nearly full, this process may have made room ahead too.
        evicted = [stats["counters"]["evicted_objects"], counter(store, "evicted_objects")]
        assert evicted[0] > 0
        assert sum(evicted) == CHAINS * PAGES - sum(found)
        assert stats["used_bytes"] <= stats["capacity_bytes"] == CAPACITY
        assert [view.match(chain_keys(number)).pages for number in range(CHAINS)] == found
        assert [restored(view, number) for number in range(CHAINS)] == found
    assert writer.returncode == 0


def test_prune_is_seen_by_another_open_store(tmp_path: Path) -> None:
    store, other = Store.open(tmp_path, capacity="64MiB"), Store.open(tmp_path)
    view, there = open_view(store), open_view(other)
    for number in range(8):
        backup(view, number)
    used = store.stats()["used_bytes"]
    assert other.prune("1GiB") == 0
    assert other.prune_unused_for(3600) == 0
    # Half of what is stored leaves, and its room comes back.
    removed = other.prune(used - 4 * PAGES * PAGE_BYTES)
    assert 4 * PAGES <= removed < 8 * PAGES
    assert store.stats()["used_bytes"] <= used - 4 * PAGES * PAGE_BYTES
    left = [view.match(chain_keys(number)).pages for number in range(8)]
    assert sum(left) == 8 * PAGES - removed
    assert [restored(there, number) for number in range(8)] == left
    # A use counts from when it was told, which is a moment later.
    gone = 0

    def prunes_all() -> bool:
        nonlocal gone
        gone += store.prune_unused_for(0)
        return gone == sum(left)

    wait_until(prunes_all, "pages that nobody uses stay")
    assert [there.match(chain_keys(number)).pages for number in range(8)] == [0] * 8
    assert backup(view, 0) == ["stored"] * PAGES
    assert restored(there, 0) == PAGES


def test_resize_counts_for_another_open_store(tmp_path: Path) -> None:
    store, other = Store.open(tmp_path, capacity="64MiB"), Store.open(tmp_path)
    view = open_view(store)
    for number in range(CHAINS):
        assert backup(view, number) == ["stored"] * PAGES
    removed = other.resize("16MiB")
    assert removed > 0
    stats = store.stats()
    assert stats["used_bytes"] <= stats["capacity_bytes"] == CAPACITY
    # Somewhat more leaves on the side, so that the next writes find room.
    left = [restored(view, number) for number in range(CHAINS)]
    assert 0 < sum(left) <= CHAINS * PAGES - removed
    assert other.resize(1 << 30) == 0
    assert store.stats()["capacity_bytes"] == 1 << 30


def test_pages_expire_for_all_processes(tmp_path: Path) -> None:
    brief, other = Store.open(tmp_path, capacity="64MiB", time_to_live=1.0), Store.open(tmp_path)
    view = open_view(other)
    assert backup(view, 0) == ["stored"] * PAGES
    wait_until(lambda: view.match(chain_keys(0)).pages == 0, "pages never expired")
    # They are counted once their blocks are given back, a moment after everybody was told.
    wait_until(lambda: counter(brief, "expired_objects") == PAGES, "not all that expired were counted")
    assert counter(other, "expired_objects") == 0
    assert backup(view, 0) == ["stored"] * PAGES


@pytest.mark.parametrize("detects", [True, False])
def test_other_bytes_under_stored_keys_are_counted_and_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, detects: bool
) -> None:
    first, second = Store.open(tmp_path, capacity="64MiB"), Store.open(tmp_path, detect_conflicts=detects)
    assert backup(open_view(first), 0) == ["stored"] * PAGES
    view = open_view(second)
    assert backup(view, 0) == ["present"] * PAGES
    assert counter(second, "conflicting_objects") == 0
    caplog.clear()
    assert backup(view, 0, of=1) == ["present"] * PAGES
    assert counter(second, "conflicting_objects") == (PAGES if detects else 0)
    assert any("other bytes" in record.getMessage() for record in caplog.records) is detects
    assert restored(view, 0) == PAGES


def test_a_floor_above_the_free_space_refuses_and_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path, capacity="64MiB", free_space_floor="1000PiB")
    view = open_view(store)
    report = view.backup(chain_keys(0), chain_bytes(0), range(PAGES), depth=0)
    assert report.outcomes == ["refused"] * PAGES
    assert report.reason is not None
    assert "floor" in report.reason
    assert counter(store, "backup_refused_no_space_pages") == PAGES
    # The floor is each process's own.
    assert backup(open_view(Store.open(tmp_path, free_space_floor=0)), 0) == ["stored"] * PAGES


@pytest.mark.parametrize(
    "options",
    [
        {"time_to_live": 0.5},
        {"time_to_live": -1},
        {"time_to_live": float("nan")},
        {"time_to_live": float("inf")},
        {"free_space_floor": "much"},
        {"free_space_floor": -1},
        {"free_space_floor": 1 << 70},
        {"free_space_floor": 1.5},
    ],
    ids=str,
)
def test_bad_options_are_named_and_make_nothing(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path / "root", **options)  # type: ignore[arg-type]
    assert next(iter(options)).replace("_", " ") in str(caught.value).replace("_", " ")
    assert not (tmp_path / "root").exists()


def test_bad_sizes_and_times_change_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path, capacity="64MiB")
    view = open_view(store)
    backup(view, 0)
    for size in ("much", -1, 1 << 70, None):
        with pytest.raises(ConfigError):
            store.prune(size)  # type: ignore[arg-type]
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            store.prune_unused_for(seconds)
    for capacity in ("much", -1, 1 << 20, None):
        with pytest.raises(ConfigError):
            store.resize(capacity)  # type: ignore[arg-type]
    assert (restored(view, 0), store.stats()["capacity_bytes"]) == (PAGES, 64 << 20)
    reader = Store.open(tmp_path, read_only=True)
    store.close()
    for refusing, error in ((reader, UnsupportedError), (store, StoreClosedError)):
        for call in (
            lambda store: store.prune(0),
            lambda store: store.prune_unused_for(0),
            lambda store: store.resize("32MiB"),
        ):
            with pytest.raises(error):
                call(refusing)
    assert restored(open_view(reader), 0) == PAGES


def test_match_lets_other_threads_run(tmp_path: Path) -> None:
    """Python does not switch threads by itself here: another one runs only if `match` lets it."""
    view = Store.open(tmp_path, capacity="64MiB").view(
        NAMESPACE, POOL, tile=Tile(layers=(0, 1), heads=(0, 1)), layout="page_first"
    )
    keys = page_keys(list(range(4 * 256)), 4)
    memory = np.zeros(256 * PAGE_BYTES // 4, np.uint8)
    assert view.backup(keys, memory, range(256), depth=0).count("stored") == 256
    ticks, ends = [0], threading.Event()

    def tick() -> None:
        while not ends.is_set():
            ticks[0] += 1
            time.sleep(0)  # gives the interpreter back

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    other = threading.Thread(target=tick)
    try:
        other.start()
        first, matches = ticks[0], 0
        while ticks[0] < first + 10 and matches < 200_000:
            view.match(keys)
            matches += 1
        ran = ticks[0] - first
    finally:
        ends.set()
        sys.setswitchinterval(usual)
        other.join()
    assert ran >= 10, f"{matches} matches, and another thread went on {ran} times"
