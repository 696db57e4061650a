"""Makes the image of compiled kernels that a release embeds, by NVRTC alone: no nvcc, no GPU.

    python cuda/build_image.py OUT.image [--nvrtc LIBRARY] [--keep FOLDER]

The format is that of rust/hicache-sys/src/cuda/image.rs. Without --nvrtc the library is looked for among the
installed packages, the older major version first: what it makes also loads on older drivers. --keep writes
each cubin and PTX into files of that folder, for the tools that read them.
"""

from __future__ import annotations

import argparse
import ctypes as c
import re
import struct
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The list and order of SOURCES in image.rs; the first is compiled and includes the others.
SOURCES = ("segment_copy.cu", "leaf.h", "segment_bulk.h", "segment_plan.h", "segment_walk.h")
OPTIONS = ("--std=c++17", "-default-device")
CUBIN, PTX = 1, 2
CUBINS = (80, 90, 100, 120)
PTX_TARGETS = (80, 90)
LIBRARIES = ("nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cu13/lib/libnvrtc.so.13")


class NvrtcError(RuntimeError):
    """NVRTC refused something; the message holds its log."""


class Nvrtc:
    """NVRTC through ctypes."""

    def __init__(self, library: Path) -> None:
        """Opens the library, its part with the built-in functions first: it looks for that by name only."""
        self.path = library
        for part in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
            c.CDLL(str(part), mode=c.RTLD_GLOBAL)
        self.library = c.CDLL(str(library))
        major, minor = c.c_int(), c.c_int()
        self._check(self.library.nvrtcVersion(c.byref(major), c.byref(minor)))
        self.version = (major.value, minor.value)

    def _check(self, code: int, log: str = "") -> None:
        if code:
            self.library.nvrtcGetErrorString.restype = c.c_char_p
            raise NvrtcError(f"{self.library.nvrtcGetErrorString(code).decode()}\n{log}")

    def _bytes(self, program: c.c_void_p, what: str) -> bytes:
        size = c.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, c.byref(size)))
        buffer = c.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw[: size.value]

    def compile(self, kind: int, architecture: int, folder: Path = HERE) -> bytes:
        """The kernels in `folder` as a cubin or PTX; PTX ends with a zero byte."""
        texts = [(folder / name).read_bytes() for name in SOURCES]
        headers = len(SOURCES) - 1
        header_texts = (c.c_char_p * headers)(*texts[1:])
        header_names = (c.c_char_p * headers)(*(name.encode() for name in SOURCES[1:]))
        program = c.c_void_p()
        self._check(
            self.library.nvrtcCreateProgram(
                c.byref(program), texts[0], SOURCES[0].encode(), headers, header_texts, header_names
            )
        )
        target = f"--gpu-architecture={'sm' if kind == CUBIN else 'compute'}_{architecture}"
        options = [option.encode() for option in (target, *OPTIONS)]
        code = self.library.nvrtcCompileProgram(program, len(options), (c.c_char_p * len(options))(*options))
        log = self._bytes(program, "ProgramLog").decode(errors="replace")
        self._check(code, log)
        made = self._bytes(program, "CUBIN" if kind == CUBIN else "PTX")
        self._check(self.library.nvrtcDestroyProgram(c.byref(program)))
        return made


def find_nvrtc() -> Path:
    """The library among the installed packages."""
    packages = Path(sysconfig.get_path("purelib"))
    for library in LIBRARIES:
        if (packages / library).exists():
            return packages / library
    raise FileNotFoundError(f"no NVRTC in {packages}: it comes with the packages of requirements/cuda.txt")


def hash_more(state: int, data: bytes) -> int:
    """FNV-1a of 64 bits, as in rust/hicache-sys/src/cuda/hash.rs."""
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


HASH_START = 0xCBF29CE484222325


def source_hash(folder: Path = HERE) -> int:
    """Hash of the names and texts of the sources, each ended by a zero byte."""
    state = HASH_START
    for name in SOURCES:
        state = hash_more(state, name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return state


def write_image(entries: list[tuple[int, int, bytes]], folder: Path = HERE) -> bytes:
    """The image of entries (kind, architecture, code)."""
    found = re.search(r"#define SEGMENT_PLAN_ABI (\d+)u", (folder / "segment_plan.h").read_text())
    if found is None:
        raise ValueError("no SEGMENT_PLAN_ABI in segment_plan.h")
    offset = 32 + 24 * len(entries)
    table = b""
    for kind, architecture, code in entries:
        table += struct.pack("<IIQQ", kind, architecture, offset, len(code))
        offset += len(code)
    body = table + b"".join(code for _, _, code in entries)
    count = struct.pack("<I", len(entries))
    head = struct.pack("<8sI", b"HCKERNEL", int(found[1])) + count
    return (
        head + struct.pack("<QQ", source_hash(folder), hash_more(hash_more(HASH_START, count), body)) + body
    )


def main() -> int:
    """Makes the image and says what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--nvrtc", type=Path)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    nvrtc = Nvrtc(arguments.nvrtc or find_nvrtc())
    entries = [(CUBIN, a, nvrtc.compile(CUBIN, a)) for a in CUBINS]
    entries += [(PTX, a, nvrtc.compile(PTX, a)) for a in PTX_TARGETS]
    image = write_image(entries)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_bytes(image)
    print(f"{arguments.out}: {len(image)} bytes, NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}")
    for kind, architecture, code in entries:
        name = f"sm_{architecture}.cubin" if kind == CUBIN else f"compute_{architecture}.ptx"
        print(f"  {name}: {len(code)} bytes")
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / name).write_bytes(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
