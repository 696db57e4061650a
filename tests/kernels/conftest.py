"""Compiles the shim once for all tests."""

import shutil

import pytest
from segment_plan import CUDA, Shim, compile_host, link_shim

STRICT = ("-g", "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    """What stands behind the shim, compiled: the same for each version of the kernels."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernels for the CPU (Debian: apt-get install g++)")
    return compile_host(CUDA / "host_runtime.cpp", tmp_path_factory.mktemp("runtime") / "runtime.o", *STRICT)


@pytest.fixture(scope="session")
def shim(runtime, tmp_path_factory):
    """The kernels of this clone on the CPU."""
    folder = tmp_path_factory.mktemp("shim")
    kernels = compile_host(CUDA / "host_shim.cpp", folder / "kernels.o", *STRICT)
    return Shim(link_shim((runtime, kernels), folder / "shim.so"))
