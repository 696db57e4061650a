"""Every test that docs/cuda.md names is there."""

import re
from pathlib import Path

import pytest
import test_mutants

ROOT = Path(__file__).resolve().parents[2]
RUST = ROOT / "rust/hicache-sys"
FILES = {
    "plan": [RUST / "src/segment_plan/tests.rs"],
    "shim": [RUST / "tests/kernels/shim.rs"],
    "stub": [RUST / "tests/kernels/stub.rs"],
    "image": [RUST / "tests/kernels/image.rs", RUST / "src/cuda/image.rs"],
    "plan_stream": [RUST / "tests/kernels/plan_stream.rs"],
    "choose": [RUST / "src/cuda/choose.rs"],
    "kernels": [RUST / "src/cuda/kernels.rs"],
}
TEXT = (ROOT / "docs/cuda.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_]+)::(\w+)`", TEXT)))


def test_tests_are_named():
    assert len(NAMED) > 30


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_a_named_test_is_there(module, name):
    files = FILES.get(module, [Path(__file__).parent / f"test_{module}.py"])
    assert any(re.search(rf"\b(fn|def) {name}\(", file.read_text()) for file in files)


def test_planted_errors_are_counted_right():
    assert f"{len(test_mutants.MUTANTS)} planted errors" in TEXT
