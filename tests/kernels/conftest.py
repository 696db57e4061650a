"""Compiles the shim once for all tests."""

import shutil

import pytest
from segment_plan import CUDA, Shim, build_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The kernels of this clone on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernels for the CPU (Debian: apt-get install g++)")
    return Shim(build_shim(CUDA, tmp_path_factory.mktemp("shim") / "shim.so"))
