"""What survives a process: kills at any instruction, restarts, and news from one process to another."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from backup_worker import PAGE_BYTES, PAGES, chain_bytes, chain_keys, open_view
from hicache_store import Store, View
from hicache_store.exceptions import StoreClosedError

WORKER = Path(__file__).with_name("backup_worker.py")
CANARY = 0xA5


def restore(view: View, number: int) -> tuple[list[str], np.ndarray]:
    """Outcomes and memory of a restore of chain `number`."""
    memory = np.full(PAGES * PAGE_BYTES, CANARY, np.uint8)
    report = view.restore(chain_keys(number), memory, range(PAGES))
    return list(report.outcomes), memory


def assert_exact_or_missing(view: View, number: int, *, stored: bool) -> None:
    """A restored page is exact; all pages of a chain that was reported stored are restored."""
    outcomes, memory = restore(view, number)
    # page_first_direct keeps K of all pages before V of all pages: compare half pages.
    found, expected = memory.reshape(2, PAGES, -1), chain_bytes(number).reshape(2, PAGES, -1)
    for page, outcome in enumerate(outcomes):
        if outcome == "restored":
            assert np.array_equal(found[:, page], expected[:, page]), f"chain {number} page {page}"
        else:
            assert outcome == "absent", f"chain {number} page {page}: {outcome}"
            assert (found[:, page] == CANARY).all()
    if stored:
        assert outcomes == ["restored"] * PAGES, f"chain {number} was reported stored"


def run_until_killed(root: Path, first: int, seconds: float) -> list[int]:
    """Starts a worker, kills it `seconds` after its first chain; the chains that it reported."""
    command = [sys.executable, str(WORKER), str(root), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        time.sleep(seconds)
        worker.send_signal(signal.SIGKILL)
        lines = [line, *worker.stdout.readlines()]
    assert worker.returncode == -signal.SIGKILL
    return [int(line) for line in lines if line.endswith("\n")]


def test_case_d16_the_source_may_change_as_soon_as_backup_returned(tmp_path: Path) -> None:
    view = open_view(Store.open(tmp_path / "root", capacity=1 << 30))
    memory = chain_bytes(0)
    assert view.backup(chain_keys(0), memory, range(PAGES), depth=0).count("stored") == PAGES
    memory[:] = 0
    assert_exact_or_missing(view, 0, stored=True)


@pytest.mark.timeout(300)
def test_case_d16_kills_at_random_points_leave_exact_pages_or_none(tmp_path: Path) -> None:
    chooser = random.Random(16)
    stored: list[int] = []
    begun: list[int] = []
    kills = int(os.environ.get("HICACHE_KILLS", "10"))
    for _ in range(kills):
        first = begun[-1] + 1 if begun else 0
        reported = run_until_killed(tmp_path, first, chooser.uniform(0, 0.05))
        stored += reported
        begun += [*reported, reported[-1] + 1]
        store = Store.open(tmp_path)
        view = open_view(store)
        assert view.match(chain_keys(reported[-1])).pages == PAGES
        for number in [*reported, reported[-1] + 1]:
            assert_exact_or_missing(view, number, stored=number in reported)
        store.close()
    view = open_view(Store.open(tmp_path))
    for number in stored:
        assert_exact_or_missing(view, number, stored=True)
    print(f"RESULT: {kills} kills at random points, all {len(stored)} published chains exact afterwards")


def test_case_d19_a_killed_writers_pages_are_hits_in_the_next_process(tmp_path: Path) -> None:
    root = tmp_path / "root"
    stored = run_until_killed(root, 0, 0.05)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(root, moved)
    for path in [*moved.glob("journal/*.idx"), *moved.glob("ns/*/manifest.json"), moved / "root.json"]:
        script = (
            "import sys; from backup_worker import *; from hicache_store import Store;"
            "view = open_view(Store.open(sys.argv[1]));"
            "print(min(view.match(chain_keys(int(n))).pages for n in sys.argv[2:]))"
        )
        command = [sys.executable, "-c", script, str(moved), *map(str, stored)]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(WORKER.parent), "USER": "other"}
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        assert output.strip() == str(PAGES), f"before {path.name} was deleted"
        path.unlink()
    view = open_view(Store.open(moved))
    for number in stored:
        assert_exact_or_missing(view, number, stored=True)


def test_case_d12_a_second_process_learns_of_a_failed_read(tmp_path: Path) -> None:
    run_until_killed(tmp_path, 0, 0)
    here, there = Store.open(tmp_path), Store.open(tmp_path)
    view, other = open_view(here), open_view(there)
    assert other.match(chain_keys(0)).pages == PAGES
    segment = next(tmp_path.glob("ns/*/*.seg"))
    content = bytearray(segment.read_bytes())
    wanted = chain_bytes(0).reshape(2, PAGES, -1)[0, 2].tobytes()
    place = content.find(wanted[:4096])
    assert place > 0
    with segment.open("r+b") as file:
        file.seek(place + 100)
        file.write(bytes([content[place + 100] ^ 1]))
    outcomes, _ = restore(view, 0)
    assert outcomes == ["restored"] * 2 + ["damaged"] + ["restored"] * 5
    for _ in range(10):
        assert view.match(chain_keys(0)).pages == 2
        assert other.match(chain_keys(0)).pages == 2
    report = view.backup(chain_keys(0), chain_bytes(0), range(PAGES), depth=0)
    assert list(report.outcomes) == ["present"] * 2 + ["stored"] + ["present"] * 5
    assert other.match(chain_keys(0)).pages == PAGES
    assert_exact_or_missing(other, 0, stored=True)


def test_a_forked_child_cannot_use_its_parents_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path, capacity=1 << 30)
    view = open_view(store)
    child = os.fork()
    if child == 0:
        try:
            view.backup(chain_keys(0), chain_bytes(0), range(PAGES))
        except StoreClosedError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert view.backup(chain_keys(1), chain_bytes(1), range(PAGES)).count("stored") == PAGES


def test_the_log_names_identity_and_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hicache_store"):
        view = open_view(Store.open(tmp_path, capacity=1 << 30, io_mode="buffered"))
    line = next(record.getMessage() for record in caplog.records if record.levelno == logging.INFO)
    assert all(word in line for word in (view.fingerprint, "r1", "kv", "buffered", str(1 << 30)))
