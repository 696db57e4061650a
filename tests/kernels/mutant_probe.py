"""A short run of the kernel tests on one library: exit status 0 if all pass, 1 at the first failure.

    python mutant_probe.py SHIM.so

Run in a process of its own: the sanitizer ends it at undefined behaviour.
"""

import sys

import numpy as np
import test_indices
import test_layouts
import test_packed
import test_rows
from segment_plan import Shim

CHECKS = [
    lambda shim: test_indices.test_padding_is_skipped_and_not_an_error(shim, None, np.int32),
    lambda shim: test_indices.test_past_the_limit_is_skipped_and_reported_by_either_side(shim, 8),
    lambda shim: test_indices.test_past_the_limit_is_skipped_and_reported_by_either_side(shim, 2**32 + 3),
    lambda shim: test_indices.test_case_d25_the_index_check_finds_what_numpy_finds(shim, np.int64, 3),
    test_packed.test_sixteen_segments_each_report_their_own_indices,
    lambda shim: test_rows.test_case_d25_rows_of_any_size_make_the_round_trip(shim, 132, 3),
    lambda shim: test_rows.test_rows_shorter_than_their_strides(shim, 20),
    lambda shim: test_layouts.test_named_layouts_to_device_rows_and_back(shim, "page_head", 3),
    lambda shim: test_packed.test_target_draft_indexer_and_state_are_one_launch(
        shim, "mixed", 4, 656, 132, 37
    ),
    lambda shim: test_layouts.test_the_result_does_not_depend_on_the_order_of_threads(shim, 4),
    *(
        lambda shim, seed=seed: test_layouts.test_random_layouts_both_ways(shim, seed)
        for seed in (0, 1, 2, 3, 5, 6)
    ),
]


def main():
    shim = Shim(sys.argv[1])
    for check in CHECKS:
        try:
            check(shim)
        except AssertionError:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
