"""A forked child has no part in its parent's store: it cannot write, nor keep its parent alive for others."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from backup_worker import PAGES, chain_bytes, chain_keys, open_view
from hicache_store import Store
from hicache_store.exceptions import StoreClosedError

HERE = Path(__file__).parent

# A writing process whose forked child says its number; both go on until they are killed.
PARENT = """
import os, sys, time
from backup_worker import *
store = Store.open(sys.argv[1], capacity=1 << 30)
view = open_view(store)
view.backup(chain_keys(0), chain_bytes(0), range(PAGES), depth=0)
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def backup(view: object, number: int) -> int:
    """Pages of chain `number` that were stored."""
    report = view.backup(chain_keys(number), chain_bytes(number), range(PAGES), depth=0)  # type: ignore[attr-defined]
    return int(report.count("stored"))


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_child_of_a_writer_cannot_write_and_its_parent_goes_on(tmp_path: Path) -> None:
    store = Store.open(tmp_path, capacity=1 << 30)
    view = open_view(store)
    assert backup(view, 0) == PAGES
    child = os.fork()
    if child == 0:
        status = 1
        try:
            backup(view, 1)
        except StoreClosedError:
            store.close()  # changes nothing for the parent
            status = 7
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    (lock,) = tmp_path.glob("journal/*.lock")
    assert is_locked(lock), "the child ended its parent's process"
    assert backup(view, 2) == PAGES
    other = open_view(Store.open(tmp_path))
    assert [other.match(chain_keys(number)).pages for number in range(3)] == [PAGES, 0, PAGES]


@pytest.mark.timeout(120)
def test_a_child_does_not_keep_its_killed_parent_alive(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            (lock,) = tmp_path.glob("journal/*.lock")
            assert is_locked(lock)
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            os.kill(child, 0)  # it lives
            assert not is_locked(lock), "the child holds its dead parent's lock"
        finally:
            os.kill(child, signal.SIGKILL)
    assert open_view(Store.open(tmp_path)).match(chain_keys(0)).pages == PAGES
