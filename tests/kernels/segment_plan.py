"""The segment plan in ctypes, and the shim that runs the kernels: see cuda/segment_plan.h."""

import ctypes as c
import subprocess
from pathlib import Path

import numpy as np

CUDA = Path(__file__).resolve().parents[2] / "cuda"
ABI = 1
TOKEN, PAGE, IDENTITY = range(3)
SOURCE, DESTINATION, INDEX, ERROR = 1, 2, 4, 8
MIXED, BULK = 0, 32
WIDTHS = (16, 8, 4, 2, 1)


class Side(c.Structure):
    """One side of a segment."""

    _fields_ = (
        ("base", c.c_uint64),
        ("page_stride", c.c_int64),
        ("slot_stride", c.c_int64),
        ("group_stride", c.c_int64),
        ("index", c.c_uint64),
        ("limit", c.c_uint32),
        ("page_size", c.c_uint32),
        ("page_magic", c.c_uint32),
        ("page_shift", c.c_uint32),
        ("index_kind", c.c_uint32),
        ("index_bytes", c.c_uint32),
    )


class Segment(c.Structure):
    """Runs of one component of one layer."""

    _fields_ = (
        ("source", Side),
        ("destination", Side),
        ("items", c.c_uint32),
        ("groups", c.c_uint32),
        ("run_bytes", c.c_uint32),
        ("lanes_log2", c.c_uint32),
    )


class Plan(c.Structure):
    """Up to 16 segments of one launch."""

    _fields_ = (
        ("abi", c.c_uint32),
        ("segments", c.c_uint32),
        ("error", c.c_uint64),
        ("segment", Segment * 16),
    )


class Report(c.Structure):
    """What the shim saw."""

    _fields_ = (
        ("violations", c.c_uint64),
        ("first_address", c.c_uint64),
        ("first_bytes", c.c_uint32),
        ("first_access", c.c_uint32),
        ("rewritten", c.c_uint64),
    )


class IndexReport(c.Structure):
    """What the index check found."""

    _fields_ = (
        ("least", c.c_int64),
        ("most", c.c_int64),
        ("padding", c.c_uint32),
        ("past_limit", c.c_uint32),
        ("duplicates", c.c_uint32),
        ("reserved", c.c_uint32),
    )


def side(kind, base, strides, page_size, limit=0, index=None):
    """A side; `strides` of page, slot and group in bytes, `index` a numpy vector of int32 or int64."""
    shift = (page_size - 1).bit_length()
    magic = -(-(1 << (31 + shift)) // page_size)
    address, width = (0, 8) if index is None else (index.ctypes.data, index.itemsize)
    return Side(base, *strides, address, limit, page_size, magic, shift, kind, width)


def vector_bytes(segment):
    """The widest vector that divides everything in use."""
    bits = segment.run_bytes | 16
    for s in (segment.source, segment.destination):
        bits |= s.base | s.page_stride
        bits |= s.slot_stride if s.page_size > 1 else 0
        bits |= s.group_stride if segment.groups > 1 else 0
    return bits & -bits


def segment(source, destination, items, groups, run_bytes):
    """A segment with the number of lanes that the Rust side would choose."""
    made = Segment(source, destination, items, groups, run_bytes, 0)
    made.lanes_log2 = min(5, max(1, run_bytes // vector_bytes(made) // 4).bit_length() - 1)
    return made


class Shim:
    """The kernels on the CPU."""

    def __init__(self, library):
        self.library = c.CDLL(str(library))
        self.library.shim_report.restype = Report
        self.library.shim_lend.argtypes = (c.c_uint64, c.c_uint64, c.c_uint32)
        self.library.shim_copy.argtypes = (
            c.c_void_p,
            c.c_uint32,
            c.c_uint32,
            c.c_uint32,
            c.c_uint64,
            c.c_uint32,
        )
        self.library.shim_index_check.argtypes = (
            *(c.c_uint64, c.c_uint32, c.c_uint32, c.c_uint32),
            *(c.c_void_p, c.c_void_p, c.c_uint32, c.c_uint32, c.c_uint64),
        )

    def copy(self, segments, lent, *, width=None, grid=2, block=64, seed=1, stage_bytes=2048):
        """One launch. `lent` holds pairs of an array (or base and bytes) and what it is lent for.

        Returns the error word, the shim's report and the width of the vectors, the widest unless given.
        """
        plan = Plan(ABI, len(segments))
        for i, one in enumerate(segments):
            plan.segment[i] = one
        error = np.zeros(1, np.uint32)
        plan.error = error.ctypes.data
        self.library.shim_reset()
        for memory, access in (*lent, (error, ERROR)):
            base, size = memory if isinstance(memory, tuple) else (memory.ctypes.data, memory.nbytes)
            self.library.shim_lend(base, size, access)
        if width is None:
            width = min(vector_bytes(one) for one in segments)
        assert self.library.shim_copy(c.byref(plan), width, grid, block, seed, stage_bytes) == 0
        return int(error[0]), self.library.shim_report(), width

    def check_index(self, index, limit, *, grid=2, block=64, seed=1):
        """One launch of the index check."""
        self.library.shim_reset()
        self.library.shim_lend(index.ctypes.data, index.nbytes, INDEX)
        seen = np.zeros(limit // 32 + 1, np.uint32)
        self.library.shim_lend(seen.ctypes.data, -(-limit // 32) * 4, ERROR)
        found = IndexReport(2**63 - 1, -(2**63))
        self.library.shim_index_check(
            index.ctypes.data,
            index.itemsize,
            len(index),
            limit,
            seen.ctypes.data,
            c.byref(found),
            grid,
            block,
            seed,
        )
        assert self.library.shim_report().violations == 0
        return found


FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover=all")


def compile_host(source, out, *flags):
    """Compiles one C++ file of the shim into an object."""
    subprocess.run(("g++", *FLAGS, *flags, "-c", str(source), "-o", str(out)), check=True)
    return out


def link_shim(objects, out):
    """Links objects into the library that `Shim` loads."""
    subprocess.run(("g++", "-shared", "-fsanitize=undefined", *map(str, objects), "-o", str(out)), check=True)
    return out
