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

    def run(bounce):
        control = tmp_path / "hold"
        environment = {
            **os.environ,
            "LD_PRELOAD": str(file_layer),
            "SLOW_READ_CONTROL": str(control),
            "PYTHONPATH": str(HERE.parent),
        }
        command = [sys.executable, str(HERE / "slow_device.py"), str(tmp_path / "root"), str(control), bounce]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_bounced_call_leaves_a_held_read_behind_and_the_host_pool_alone(restored):
    said = restored("always")
    assert said["was_held"], "the call returned while the device still had the read"
    assert said["answer"] == [False] * 6
    assert said["untouched"]
    assert said["as_at_return"], "nothing was written after the call"


def test_a_device_that_was_slow_is_bounced_without_being_told(restored):
    said = restored("auto")
    assert said["was_held"], "the call returned while the device still had the read"
    assert said["answer"] == [False] * 6
    assert said["untouched"]
    assert said["as_at_return"], "nothing was written after the call"


def test_a_call_into_the_host_pool_ends_with_its_read_and_tells_the_truth(restored):
    said = restored("never")
    assert not said["was_held"], "the read had ended when the call returned"
    assert said["as_at_return"], "nothing was written after the call"
    pages = zip(said["answer"], said["exact"], strict=True)
    assert all(is_exact for is_restored, is_exact in pages if is_restored)
