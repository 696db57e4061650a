"""The structures are the same in C and in the Python of these tests; a Rust test compares those of Rust."""

import ctypes

from segment_plan import ABI, Plan, Segment, Side


def test_sizes_and_offsets_are_equal(shim):
    c_layout = [shim.library.shim_layout(i) for i in range(23)]
    sizes = [ctypes.sizeof(kind) for kind in (Side, Segment, Plan)]
    names = {
        Side: [name for name, _ in Side._fields_][1:],
        Segment: ["destination", "items", "groups", "run_bytes", "lanes_log2"],
        Plan: ["segments", "error", "segment"],
    }
    offsets = [getattr(kind, name).offset for kind, fields in names.items() for name in fields]
    assert c_layout == [ABI, 16, *sizes, *offsets]
    assert shim.library.shim_layout(23) == 0
