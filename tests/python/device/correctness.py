"""The tests of the kernels' sources, run on the device: every byte of every case is compared with numpy."""

import importlib
import sys
import types

import numpy as np


def stand_in_for_pytest():
    """Where pytest is missing a stand-in does, since only the functions of the tests are used."""
    try:
        importlib.import_module("pytest")
    except ModuleNotFoundError:
        stand_in = types.ModuleType("pytest")

        def keep(*_arguments, **_named):
            return lambda function: function

        stand_in.fixture = keep
        stand_in.mark = types.SimpleNamespace(parametrize=keep, timeout=keep, skipif=keep)
        sys.modules["pytest"] = stand_in


def tests():
    """The test modules."""
    stand_in_for_pytest()
    names = ("test_layouts", "test_rows", "test_packed", "test_indices", "test_edges")
    return [importlib.import_module(name) for name in names]


def cases(small):
    """Pairs of a name and a function of the mover."""
    layouts, rows, packed, indices, edges = tests()
    for layout in layouts.LAYOUTS:
        for page_size in (1, 3) if small else (1, 3, 64):
            yield (
                f"layout {layout} {page_size}",
                lambda mover, layout=layout, page_size=page_size: (
                    layouts.test_named_layouts_to_device_rows_and_back(mover, layout, page_size)
                ),
            )
    for row in (16, 132, 656) if small else rows.ROWS:
        for pages in (0, 3) if small else (0, 1, 3, 1000):
            yield (
                f"row {row} pages {pages}",
                lambda mover, row=row, pages=pages: rows.test_case_d25_rows_of_any_size_make_the_round_trip(
                    mover, row, pages
                ),
            )
    for kernel in ("widest", "mixed", "bulk"):
        yield (
            f"packed {kernel}",
            lambda mover, kernel=kernel: packed.test_target_draft_indexer_and_state_are_one_launch(
                mover, kernel, 4, 656, 132, 37
            ),
        )
    yield "sixteen segments", packed.test_sixteen_segments_each_report_their_own_indices
    yield "padding", lambda mover: indices.test_padding_is_skipped_and_not_an_error(mover, None, np.int32)
    for past in (8, 2**31, 2**32 + 3):
        yield (
            f"past the limit {past}",
            lambda mover, past=past: indices.test_past_the_limit_is_skipped_and_reported_by_either_side(
                mover, past
            ),
        )
    yield (
        "index check",
        lambda mover: indices.test_case_d25_the_index_check_finds_what_numpy_finds(mover, np.int64, 3),
    )
    yield "gather with all edges", lambda mover: compare(edges.pass_through(mover, 1), [])
    for seed in range(4 if small else 120):
        yield (
            f"random {seed}",
            lambda mover, seed=seed: layouts.test_random_layouts_both_ways(mover, seed),
        )


def compare(found, expected):
    assert found == expected, found


def run(found, mover, small):
    """All cases; names those that fail, and fails if there are any."""
    found.update(cases=0, failures={})

    def run_case(name, case):
        try:
            case(mover)
        except AssertionError as error:
            found["failures"][name] = str(error)[:300]
        found["cases"] += 1

    for name, case in cases(small):
        run_case(name, case)
    found["launches"] = {str(width): count for width, count in mover.launches.items()}
    unused = [width for width in mover.widths() if width not in mover.launches]
    # One case by each other entry of the image that this device loads: PTX among them.
    packed = importlib.import_module("test_packed")
    for number in range(mover.first + 1, len(mover.entries)):
        if mover.use(number) == "loaded":
            run_case(
                f"entry {mover.tried[-1][:2]}", packed.test_sixteen_segments_each_report_their_own_indices
            )
    mover.use(mover.first)
    found["entries"] = mover.tried
    if found["failures"]:
        raise AssertionError(f"wrong bytes in {len(found['failures'])} of {found['cases']} cases")
    if unused and not small:
        raise AssertionError(f"kernels that no case has launched: {unused}")
