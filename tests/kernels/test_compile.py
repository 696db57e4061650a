"""The kernels compile for every architecture, and what the compilers make of them keeps within its limits.

Needs the packages of requirements/cuda.txt in the folder HICACHE_CUDA_PACKAGES; `make test-kernels` sets it.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from segment_plan import CUDA

ARCHITECTURES = (80, 90, 100, 103, 120)
REGISTER_KERNELS = [f"hicache_segment_copy_v{width}" for width in (16, 8, 4, 2, 1)] + [
    "hicache_segment_copy_mixed"
]
KERNELS = [*REGISTER_KERNELS, "hicache_segment_copy_bulk", "hicache_index_check"]
PACKAGES = os.environ.get("HICACHE_CUDA_PACKAGES", "")
WHY_NOT = os.environ.get("HICACHE_CUDA_MISSING", "HICACHE_CUDA_PACKAGES is not set; run `make test-kernels`")

pytestmark = pytest.mark.skipif(not PACKAGES, reason=f"no compiler for the kernels: {WHY_NOT}")


@pytest.fixture(scope="module")
def build_image():
    """cuda/build_image.py as a module."""
    spec = importlib.util.spec_from_file_location("build_image", CUDA / "build_image.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nvrtc(build_image):
    """NVRTC of the toolkit that development machines have."""
    made = build_image.Nvrtc(Path(PACKAGES) / "nvidia/cu13/lib/libnvrtc.so.13")
    assert made.version == (13, 0)
    return made


def tool(name, *arguments):
    """Output of a tool of the toolkit."""
    folder = Path(PACKAGES) / "nvidia" / "cu13" / "bin"
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        (str(folder / name), *map(str, arguments)),
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    ).stdout


@pytest.fixture(scope="module", params=ARCHITECTURES)
def cubin(request, nvrtc, build_image, tmp_path_factory):
    """Of one architecture: its number, resources by kernel, and the machine code of each kernel as text."""
    file = tmp_path_factory.mktemp("cubin") / f"{request.param}.cubin"
    file.write_bytes(nvrtc.compile(build_image.CUBIN, request.param))
    _, *functions = re.split(r"\n\s+Function : ", tool("cuobjdump", "-sass", file))
    return request.param, tool("cuobjdump", "-res-usage", file), {text.split()[0]: text for text in functions}


def test_no_stack_no_local_memory_and_registers_for_a_full_block(cubin):
    _, usage, code = cubin
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert sorted(name for name, *_ in found) == sorted(KERNELS) == sorted(code)
    for name, registers, stack, local in found:
        assert (int(stack), int(local)) == (0, 0), name
        # 65,536 registers serve 1,024 threads of the register kernels; the bulk kernel has 32 threads.
        assert int(registers) <= 64, name
        assert not re.findall(r"\b(LDL|STL)\b", code[name]), name


def test_loads_and_stores_are_of_128_bits_four_loads_before_the_first_store(cubin):
    _, _, code = cubin
    for kernel in ("hicache_segment_copy_v16", "hicache_segment_copy_mixed"):
        accesses = re.findall(r"(LDG\.E\.NA\.128|STG\.E\.128\.STRONG\.GPU)", code[kernel])
        kinds = "".join("L" if access.startswith("LDG") else "S" for access in accesses)
        # Four in the loop, and up to three for the rest of a run.
        assert "LLLLSSSS" in kinds, kinds
        assert "LLLSSS" in kinds.replace("LLLLSSSS", "", 1), kinds


def divisions_of_64_bits(code):
    """They begin with the reciprocal of a number of that size, in a subroutine."""
    return re.findall(r"I2F\.U64", code)


def test_pages_are_found_without_a_division_of_64_bits(cubin):
    _, _, code = cubin
    assert not any(divisions_of_64_bits(text) for text in code.values())


def test_the_bulk_kernel_is_there_from_9_0_on_and_empty_before(cubin):
    architecture, _, code = cubin
    bulk = code["hicache_segment_copy_bulk"]
    # Copies in both directions, and barriers.
    found = bool(re.findall(r"UBLKCP", bulk)), bool(re.findall(r"SYNCS", bulk))
    assert found == ((True, True) if architecture >= 90 else (False, False))


def test_the_limits_notice_a_local_array_and_a_long_division(nvrtc, build_image, tmp_path):
    for name in build_image.SOURCES:
        text = (CUDA / name).read_text()
        if name == "segment_copy.cu":
            place = "  Row next = load_row(segment, worker, rows);"
            assert place in text
            text = text.replace(
                place,
                "  hicache_u64 ring[8];\n"
                "  for (int i = 0; i < 8; ++i) ring[i] = segment.source.base * i;\n"
                "  for (hicache_u32 i = 0; i < rows; ++i) ring[i % 8] += ring[(i * i) % 8];\n"
                "  if (segment.source.base / ring[rows % 8] == 77) return;\n" + place,
            )
        (tmp_path / name).write_text(text)
    file = tmp_path / "bad.cubin"
    file.write_bytes(nvrtc.compile(build_image.CUBIN, 90, tmp_path))
    usage = tool("cuobjdump", "-res-usage", file)
    assert any(int(stack) > 0 for stack in re.findall(r"STACK:(\d+)", usage))
    assert divisions_of_64_bits(tool("cuobjdump", "-sass", "-fun", "hicache_segment_copy_v8", file))


def test_an_image_is_made_whole(build_image, tmp_path):
    """By the NVRTC of releases, whose cubins load on older drivers."""
    out = tmp_path / "kernels.image"
    library = Path(PACKAGES) / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    command = (sys.executable, str(CUDA / "build_image.py"), str(out), "--nvrtc", str(library))
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    image = out.read_bytes()
    assert image.startswith(b"HCKERNEL\x01\0\0\0\x06\0\0\0")
    assert image.count(b"\x7fELF") >= 4
    assert image.count(b".version 8.8") == 2
    assert "NVRTC 12.9" in said


def test_errors_of_the_compiler_name_the_line(nvrtc, build_image, tmp_path):
    for name in build_image.SOURCES:
        (tmp_path / name).write_text(
            (CUDA / name).read_text() + ("\nint broken(" if name == "leaf.h" else "")
        )
    with pytest.raises(build_image.NvrtcError, match=r"leaf\.h|segment_walk\.h|segment_plan\.h"):
        nvrtc.compile(build_image.CUBIN, 90, tmp_path)
