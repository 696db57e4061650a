"""Each error planted in the kernels' source is caught by the tests, and the source itself passes them."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from segment_plan import CUDA, compile_host, link_shim

PROBE = Path(__file__).parent / "mutant_probe.py"

# The first test waits for all of them.
pytestmark = pytest.mark.timeout(1800)

# (file, text, what it becomes)
MUTANTS = {
    "a slot too far": ("segment_walk.h", "slot * static_cast<", "(slot + 1) * static_cast<"),
    "groups in one place": ("segment_walk.h", "group * static_cast<", "0u * static_cast<"),
    "pages in one place": ("segment_walk.h", "page * static_cast<", "0u * static_cast<"),
    "items counted by groups": ("segment_walk.h", "r / segment.items", "r / segment.groups"),
    "division without its factor": ("segment_walk.h", "number << 1", "number"),
    "division without its shift": ("segment_walk.h", ">> side.page_shift", ">> (side.page_shift & 1)"),
    "limit included": ("segment_walk.h", "index < static_cast<", "index <= static_cast<"),
    "limit of 32 bits": (
        "segment_walk.h",
        "if (index < static_cast<hicache_i64>(side.limit))",
        "if (static_cast<hicache_u32>(index) < side.limit)",
    ),
    "padding not skipped": ("segment_walk.h", "if (index < 0) return false;", ""),
    "limit not reported": ("segment_walk.h", "past_limit = true;", ""),
    "reported as the first segment": ("segment_walk.h", "1u << number);", "1u);"),
    "destination does not skip": ("segment_walk.h", "return source && destination;", "return source;"),
    "source does not skip": ("segment_walk.h", "return source && destination;", "return destination;"),
    "destination not looked at": (
        "segment_walk.h",
        "const bool destination = takes",
        "const bool destination = source && takes",
    ),
    "a page index for each item": (
        "segment_walk.h",
        "SEGMENT_INDEX_PAGE ? page_of(side, item) : item",
        "99 ? 0 : item",
    ),
    "indices of the other width": ("segment_walk.h", "bytes == 4 ? words", "bytes == 8 ? words"),
    "page of a token": (
        "segment_walk.h",
        "SEGMENT_INDEX_PAGE ? static_cast<hicache_u32>(index) : quotient",
        "SEGMENT_INDEX_TOKEN ? static_cast<hicache_u32>(index) : quotient",
    ),
    "run left out of the width": ("segment_walk.h", "segment.run_bytes | 16u", "16u"),
    "base left out of the width": ("segment_walk.h", "bits |= sides[i]->base | ", "bits |= "),
    "one side left out of the width": ("segment_walk.h", "i < 2; ++i", "i < 1; ++i"),
    "a round too many": ("segment_copy.cu", "at + 3 * lanes < vectors", "at + 3 * lanes <= vectors"),
    "third of the rest not stored": (
        "segment_copy.cu",
        "if (third) store(to + at + 2 * lanes, c);",
        "(void)third;",
    ),
    "second of the rest too far": (
        "segment_copy.cu",
        "second = at + lanes < vectors",
        "second = at + lanes <= vectors",
    ),
    "two vectors swapped": (
        "segment_copy.cu",
        "store(to + at + lanes, b);\n    store",
        "store(to + at + lanes, c);\n    store",
    ),
    "lane of another run": ("segment_copy.cu", "lane = thread & (lanes - 1)", "lane = thread & lanes"),
    "blocks repeat each other": (
        "segment_copy.cu",
        "blockIdx.x * blockDim.x + threadIdx.x;\n  const hicache_u32 lanes",
        "threadIdx.x;\n  const hicache_u32 lanes",
    ),
    "the next row's index past the end": (
        "segment_walk.h",
        "row.item, r < rows);\n  row.destination",
        "row.item, true);\n  row.destination",
    ),
    "the next row is the same": (
        "segment_copy.cu",
        "load_row(segment, r + workers, rows)",
        "load_row(segment, r, rows)",
    ),
    "the last segment forgotten": (
        "segment_copy.cu",
        "number < plan.segments; ++number) copy",
        "number + 1 < plan.segments; ++number) copy",
    ),
    "the last mixed segment forgotten": (
        "segment_copy.cu",
        "number < plan.segments; ++number) {",
        "number + 1 < plan.segments; ++number) {",
    ),
    "eight bytes as sixteen": (
        "segment_copy.cu",
        "case 8: copy_segment<Vector8>",
        "case 8: copy_segment<Vector16>",
    ),
    "bulk pieces of whole stages": (
        "segment_bulk.h",
        "left < stage_bytes ? left : stage_bytes",
        "stage_bytes",
    ),
    "bulk pieces in one place": (
        "segment_bulk.h",
        "piece.source = places.source + offset;",
        "piece.source = places.source;",
    ),
    "bulk lanes that do not work": (
        "segment_bulk.h",
        "blockIdx.x * shape.lanes",
        "blockIdx.x * BULK_MAX_LANES",
    ),
    "duplicates of other words": ("segment_copy.cu", "seen + v / 32", "seen + v / 64"),
    "limit counted as valid": (
        "segment_copy.cu",
        "if (v >= static_cast<hicache_i64>(limit))",
        "if (v > static_cast<hicache_i64>(limit))",
    ),
}


def passes(folder, runtime):
    """Whether the probe passes on the sources in `folder`. A crash is a failure as well as a wrong byte."""
    kernels = compile_host(folder / "host_shim.cpp", folder / "kernels.o", "-w")
    library = link_shim((runtime, kernels), folder / "shim.so")
    command = (sys.executable, str(PROBE), str(library))
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode in (0, 1) or run.returncode < 0 or "runtime error" in run.stderr, run.stderr
    return run.returncode == 0


@pytest.fixture(scope="module")
def verdicts(runtime, tmp_path_factory):
    """Whether the tests pass on each mutant, and on the source itself under the name None."""
    sources = [file for file in CUDA.iterdir() if file.suffix in (".h", ".cu", ".cpp")]

    def verdict(name):
        folder = tmp_path_factory.mktemp("mutant")
        for file in sources:
            shutil.copy(file, folder)
        if name is not None:
            file, text, other = MUTANTS[name]
            source = (folder / file).read_text()
            if source.count(text) != 1:
                return f"expected {text!r} once in {file}"
            (folder / file).write_text(source.replace(text, other))
        return passes(folder, runtime)

    names = [None, *MUTANTS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(verdict, names), strict=True))


def test_the_source_itself_passes(verdicts):
    assert verdicts[None] is True


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_caught(verdicts, name):
    assert verdicts[name] is False
