"""A read that the device does not complete: when the call returns, and what is in the host pool by then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def file_layer(tmp_path_factory):
    """A library that holds one read for 20 s, or until it is let go."""
    library = tmp_path_factory.mktemp("slow") / "slow_read.so"
    source = HERE.parent / "slow_read.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def restored(file_layer, tmp_path):
    """Runs `slow_device.py` with the held read; what it says."""

    def run(bounce, deadline):
        folder = tmp_path / str(deadline)
        folder.mkdir()
        control = folder / "hold"
        environment = {
            **os.environ,
            "LD_PRELOAD": str(file_layer),
            "SLOW_READ_CONTROL": str(control),
            "PYTHONPATH": str(HERE.parent),
        }
        program = [str(HERE / "slow_device.py"), str(folder / "root"), str(control), bounce, str(deadline)]
        command = [sys.executable, *program]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_bounced_call_leaves_a_held_read_behind_and_the_host_pool_alone(restored):
    said = restored("always", 0.5)
    if not said["was_held"]:  # the machine may have been too slow to begin a read in that time
        said = restored("always", 5.0)
    assert said["was_held"], "the call returned while the device still had the read"
    assert said["answer"] == [False] * 6
    assert said["untouched"]
    assert said["as_at_return"], "nothing was written after the call"


def test_a_device_that_was_slow_is_bounced_without_being_told(restored):
    said = restored("auto", 2.0)
    if not said["was_held"] or not all(said["came_late"]):  # the machine may have been slower than the device
        said = restored("auto", 8.0)
    assert said["came_late"] == [True] * 6
    assert said["was_held"], "the call returned while the device still had the read"
    assert said["answer"] == [False] * 6
    assert said["untouched"]
    assert said["as_at_return"], "nothing was written after the call"


def test_a_call_into_the_host_pool_ends_with_its_read_and_tells_the_truth(restored):
    said = restored("never", 0.5)
    assert not said["was_held"], "the read had ended when the call returned"
    assert said["as_at_return"], "nothing was written after the call"
    pages = zip(said["answer"], said["exact"], strict=True)
    assert all(is_exact for is_restored, is_exact in pages if is_restored)
