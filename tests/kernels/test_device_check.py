"""The device check runs from end to end on a driver made of the kernels' source, and notices wrong bytes.

That the kernels are right on a GPU it does not say: there is none here.
"""

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
    image.write_bytes(build_image.write_image([(build_image.CUBIN, 90, b"code")]))
    return image


def check(folder, image, *more):
    command = (sys.executable, str(CHECK), "--image", str(image), "--out", str(folder / "out.json"), *more)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=environment, cwd=folder
    )
    out = folder / "out.json"
    return run, json.loads(out.read_text()) if out.exists() else {}


def test_all_stages_run_and_every_case_passes(tmp_path):
    build_driver(tmp_path)
    run, found = check(tmp_path, write_image(tmp_path), "--small")
    assert run.returncode == 0, run.stdout + run.stderr
    stages = {name: stage["result"] for name, stage in found.items() if isinstance(stage, dict)}
    passed = [name for name in stages if name not in ("sanitizer", "interference")]
    assert {stages[name] for name in passed} == {"passed"}, stages
    assert found["correctness"]["cases"] >= 30
    assert found["correctness"]["failures"] == {}
    assert found["rates"]["kernels"]
    assert found["rates"]["batches"]
    assert len(found["end_to_end"]["layers"]["arrivals_ms"]) == 5


def test_wrong_bytes_are_a_failure(tmp_path):
    sources = tmp_path / "cuda"
    shutil.copytree(CUDA, sources, ignore=shutil.ignore_patterns("__pycache__"))
    walk = sources / "segment_walk.h"
    wrong = walk.read_text().replace("slot * static_cast<", "(slot + 1) * static_cast<")
    walk.write_text(wrong)
    build_driver(tmp_path, sources)
    run, found = check(tmp_path, write_image(tmp_path), "--small", "--only", "correctness")
    assert run.returncode == 1, run.stdout + run.stderr
    assert found["correctness"]["result"] == "failed"
    assert "row 132 pages 3" in found["correctness"]["failures"]


def test_without_a_driver_it_says_so(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("no library")
    run, found = check(tmp_path, write_image(tmp_path))
    assert (run.returncode, found) == (2, {})
    assert "no GPU that can be used" in run.stderr


def test_a_stage_that_takes_too_long_is_ended(tmp_path):
    build_driver(tmp_path)
    # Rates of full size take minutes on a driver that is a processor.
    stages = ["--only", "rates", "--only", "end_to_end"]
    run, found = check(tmp_path, write_image(tmp_path), "--seconds", "4", *stages)
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["rates"]["result"] == "out of time"
    assert found["end_to_end"]["result"] == "left out"
