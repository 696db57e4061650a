"""Transfers between host pools and a device, by a driver that runs the kernels' own source on the CPU.

That they are right on a GPU this does not say: there is none here.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_device_check import build_driver

HERE = Path(__file__).resolve().parent
NVRTC = HERE.parents[1] / "rust" / "hicache-sys" / "tests" / "kernels" / "stub_nvrtc.c"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The fake driver, and a compiler whose code it takes: it does not look at it."""
    folder = tmp_path_factory.mktemp("driver")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, which compiles the stub of the compiler (Debian: apt-get install gcc)")
    build_driver(folder)
    command = ("gcc", "-O1", "-shared", "-fPIC", str(NVRTC), "-o", str(folder / "libnvrtc.so"))
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run(driver, tmp_path):
    def run(*case, late=True, **variables):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HICACHE_CUDA_")
        }
        environment |= {"LD_LIBRARY_PATH": str(driver), "HICACHE_NVRTC": str(driver / "libnvrtc.so")}
        environment |= {"FAKE_LOG": str(tmp_path / "log"), "STUB_LOG": str(tmp_path / "nvrtc")}
        environment |= {"HICACHE_CACHE_DIR": str(tmp_path / "cache"), **variables}
        if late:
            environment["FAKE_LATE"] = "1"
        command = (sys.executable, str(HERE / "transfer_cases.py"), *case)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=280, env=environment
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr

    return run


@pytest.mark.parametrize("way", ["kernel", "copy_engine", "auto"])
def test_a_plan_moves_what_numpy_slices(run, way):
    run("plans", way)


@pytest.mark.parametrize("way", ["kernel", "copy_engine"])
def test_a_restore_and_its_backup_are_exact_layer_by_layer(run, way):
    run("layerwise", way)


def test_without_kernels_the_copy_engine_moves_the_bytes(run):
    run("without_kernels", HICACHE_CUDA_KERNELS="dma")


def test_a_stream_waits_copies_and_records_and_nothing_is_allocated_once_warm(run):
    run("order")


def test_what_a_plan_touches_is_held_until_the_device_is_done(run):
    run("held")


def test_what_cannot_be_is_refused_and_nothing_is_submitted(run):
    run("refusals")


def test_a_forked_child_has_no_part_in_a_plan(run):
    run("forked")


def test_an_index_past_its_limit_is_told_when_the_device_is_done(run):
    run("error_word", FAKE_PAST="1")


def test_a_launch_that_the_driver_refuses_is_an_error_and_nothing_is_let_go_early(run):
    run("refused_launch", FAKE_REFUSE="2")


def test_a_restore_whose_launch_is_refused_is_given_up_when_the_device_is_done(run):
    run("layerwise", "kernel", FAKE_REFUSE="2")


def test_the_debug_check_refuses_destinations_named_twice(run):
    run("debug", HICACHE_CUDA_DEBUG="1", FAKE_DUPLICATE="1")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_the_debug_check_runs_only_when_asked(run, debug):
    run("debug", HICACHE_CUDA_DEBUG=debug)
