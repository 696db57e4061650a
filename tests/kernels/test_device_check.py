"""The device check runs from end to end on a driver made of the kernels' source, and notices wrong bytes.

That the kernels are right on a GPU it does not say: there is none here.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from segment_plan import CUDA

HERE = Path(__file__).resolve().parent
CHECK = HERE.parent / "python" / "device" / "check.py"
NVRTC = HERE.parents[1] / "rust" / "hicache-sys" / "tests" / "kernels" / "stub_nvrtc.c"


def build_driver(folder, sources=CUDA):
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernels for the CPU (Debian: apt-get install g++)")
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{sources}")
    subprocess.run(
        ("g++", *flags, str(HERE / "fake_libcuda.cpp"), "-o", str(folder / "libcuda.so.1")), check=True
    )


def write_image(folder):
    """An image that the fake driver takes: it does not look at the code."""
    sys.path.insert(0, str(CUDA))
    try:
        import build_image
    finally:
        sys.path.remove(str(CUDA))
    image = folder / "kernels.image"
    image.write_bytes(
        build_image.write_image([(build_image.CUBIN, 90, b"code"), (build_image.PTX, 80, b"text")])
    )
    return image


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with the driver, an image, and a compiler whose code the driver takes."""
    folder = tmp_path_factory.mktemp("driver")
    build_driver(folder)
    write_image(folder)
    command = ("gcc", "-O1", "-shared", "-fPIC", str(NVRTC), "-o", str(folder / "libnvrtc.so"))
    subprocess.run(command, check=True)
    return folder


def check(driver, folder, *more, script=CHECK, **variables):
    """Runs the check with the driver in a folder; what it came to, and its JSON."""
    image, out = driver / "kernels.image", folder / "out.json"
    command = (sys.executable, str(script), "--image", str(image), "--out", str(out), *more)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HICACHE_CUDA_")}
    environment |= {"LD_LIBRARY_PATH": str(driver), "HICACHE_NVRTC": str(driver / "libnvrtc.so")}
    environment |= {"STUB_LOG": str(folder / "nvrtc"), "HICACHE_CACHE_DIR": str(folder / "cache")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **variables}
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env=environment, cwd=folder
    )
    return run, json.loads(out.read_text()) if out.exists() else {}


def test_all_stages_run_and_every_case_passes(driver, tmp_path):
    run, found = check(driver, tmp_path, "--small", FAKE_LATE="streams")
    assert run.returncode == 0, run.stdout + run.stderr
    stages = {name: stage["result"] for name, stage in found.items() if isinstance(stage, dict)}
    passed = [name for name in stages if name not in ("sanitizer", "interference")]
    assert {stages[name] for name in passed} == {"passed"}, stages
    assert found["correctness"]["cases"] >= 30
    assert found["correctness"]["failures"] == {}
    assert [entry[:2] for entry in found["correctness"]["entries"][:2]] == [["cubin", 90], ["PTX", 80]]
    assert found["rates"]["kernels"]
    assert found["rates"]["batches"]
    assert set(found["rates"]["ceiling"]) == {"h2d", "d2h", "both_at_once"}
    for model in ("latents", "mha"):
        assert len(found["end_to_end"][model]["arrivals_ms"]) == 5


def test_wrong_bytes_are_a_failure(driver, tmp_path):
    sources = tmp_path / "cuda"
    shutil.copytree(CUDA, sources, ignore=shutil.ignore_patterns("__pycache__"))
    walk = sources / "segment_walk.h"
    wrong = walk.read_text().replace("slot * static_cast<", "(slot + 1) * static_cast<")
    walk.write_text(wrong)
    build_driver(tmp_path, sources)
    write_image(tmp_path)
    shutil.copy(driver / "libnvrtc.so", tmp_path)
    run, found = check(tmp_path, tmp_path, "--small", "--only", "correctness", "--only", "transfers")
    assert run.returncode == 1, run.stdout + run.stderr
    assert found["correctness"]["result"] == "failed"
    assert "row 132 pages 3" in found["correctness"]["failures"]
    assert found["transfers"]["result"] == "failed"
    assert "kernel: latent page_first" in found["transfers"]["failures"]


def test_case_d18_each_edge_left_out_shows_and_with_all_of_them_the_bytes_are_right(driver, tmp_path):
    run, found = check(driver, tmp_path, "--small", "--only", "edges", FAKE_LATE="streams")
    assert (run.returncode, found["edges"]["result"]) == (0, "passed"), run.stdout + run.stderr
    edges = {"prefix": {"load", "ready", "slot reuse"}, "D18": {"step", "loaded"}}
    for name, left_out in edges.items():
        scene = found["edges"][name]
        assert (scene["wrong"], scene["rounds"] >= 12) == ({}, True)
        assert {edge for edge, tries in scene["without"].items() if tries["wrong layers"]} == left_out


def test_a_device_that_never_shows_a_missing_edge_is_not_passed(driver, tmp_path):
    """A driver that does everything at once keeps every order, with edges and without."""
    run, found = check(driver, tmp_path, "--small", "--only", "edges", "--only", "transfers")
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["edges"]["result"] == "not shown"
    assert "prefix: slot reuse" in found["edges"]["why"]
    assert found["transfers"]["result"] == "not shown"


@pytest.mark.parametrize(
    "lost",
    [
        '"loaded", layer), "comm"',
        '"read", layer - 2), "comm"',
        '"ready", layer), "compute"',
        '"written", "load"',
    ],
)
def test_an_edge_that_is_lost_is_a_failure(driver, tmp_path, lost):
    """The check's own rounds with all edges, one of which is not given to the driver."""
    folder = tmp_path / "python" / "device"
    shutil.copytree(CHECK.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernels").symlink_to(HERE)
    scenes = folder / "edges.py"
    text = scenes.read_text()
    line = next(
        line for line in text.splitlines() if f"self.wait({lost}" in line or f"self.wait(({lost}" in line
    )
    scenes.write_text(text.replace(line, line[: line.index("self")] + "pass"))
    run, found = check(
        driver, tmp_path, "--small", "--only", "edges", script=folder / "check.py", FAKE_LATE="streams"
    )
    assert (run.returncode, found["edges"]["result"]) == (1, "failed"), run.stdout + run.stderr
    assert "wrong bytes with all edges" in found["edges"]["why"]


def test_the_wheel_transfers_both_ways_and_through_the_store(driver, tmp_path):
    run, found = check(driver, tmp_path, "--small", "--only", "transfers", FAKE_LATE="streams")
    transfers = found["transfers"]
    assert (run.returncode, transfers["result"]) == (0, "passed"), run.stdout + run.stderr
    assert transfers["reports"]["kernel"]["kernel_layers"] == 6
    assert transfers["reports"]["copy_engine"]["copy_engine_layers"] == 6
    assert transfers["without_after"] == {"kernel": "wrong bytes", "copy_engine": "wrong bytes"}


def test_a_way_that_cannot_be_had_is_left_out_and_the_other_runs(driver, tmp_path):
    run, found = check(driver, tmp_path, "--small", "--only", "transfers", HICACHE_CUDA_KERNELS="dma")
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["transfers"]["result"] == "left out"
    assert "found none" in found["transfers"]["unavailable"]["kernel"]
    assert list(found["transfers"]["reports"]) == ["copy_engine"]


def test_without_the_wheel_transfers_are_left_out(driver, tmp_path):
    (tmp_path / "hicache_store.py").write_text("raise ImportError('none here')")
    run, found = check(driver, tmp_path, "--small", "--only", "transfers", PYTHONPATH=str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["transfers"]["result"] == "left out"
    assert "no wheel: none here" in found["transfers"]["why"]


def test_without_a_driver_it_says_so(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("no library")
    write_image(tmp_path)
    run, found = check(tmp_path, tmp_path)
    assert (run.returncode, found) == (2, {})
    assert "no GPU that can be used" in run.stderr


def test_a_stage_that_takes_too_long_is_ended(driver, tmp_path):
    # Rates of full size take minutes on a driver that is a processor.
    stages = ["--only", "rates", "--only", "end_to_end"]
    run, found = check(driver, tmp_path, "--seconds", "12", *stages)
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["rates"]["result"] == "out of time"
    assert "not done after" in found["rates"]["why"]
    assert found["end_to_end"]["result"] == "out of time"


@pytest.mark.parametrize("stage", ["correctness", "edges", "transfers"])
def test_a_stage_of_bytes_that_has_no_time_is_not_good(driver, tmp_path, stage):
    run, found = check(driver, tmp_path, "--seconds", "0.1", "--only", stage, "--only", "identity")
    assert run.returncode == 1, run.stdout + run.stderr
    assert {found[name]["result"] for name in ("identity", stage)} == {"out of time"}


@pytest.mark.parametrize(
    ("stage", "good"),
    [
        ("correctness", {"passed"}),
        ("edges", {"passed", "not shown"}),
        ("transfers", {"passed", "not shown", "left out"}),
        ("rates", {"passed", "not shown", "left out", "out of time"}),
    ],
)
def test_the_exit_status_is_good_where_every_byte_was_right(monkeypatch, stage, good):
    monkeypatch.syspath_prepend(str(CHECK.parent))
    module = importlib.import_module("check")
    results = ("passed", "not shown", "left out", "out of time", "failed")
    found = {result: module.status({"format": 1, stage: {"result": result}}) for result in results}
    assert found == {result: int(result not in good) for result in results}


def test_a_device_that_never_answers_ends_the_check(driver, tmp_path):
    run, found = check(driver, tmp_path, "--seconds", "10", "--only", "correctness", FAKE_STUCK="1")
    assert run.returncode == 1, run.stdout + run.stderr
    assert found["correctness"]["why"] == "the device does not answer"
