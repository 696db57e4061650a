"""What the kernels make of padding and of indices past the limit, and what the index check says."""

import numpy as np
import pytest
from segment_plan import DESTINATION, INDEX, MIXED, PAGE, SOURCE, TOKEN, segment, side

LIMIT = 8


def copy(shim, source_index, destination_index, **launch):
    """Rows of 24 bytes; the error word, and the numbers of the rows that arrived, -1 where none did."""
    source = np.repeat(np.arange(LIMIT, dtype=np.uint8)[:, None], 24, axis=1)
    destination = np.full((LIMIT, 24), 255, np.uint8)
    one = segment(
        side(TOKEN, source.ctypes.data, (24, 0, 0), 1, LIMIT, source_index),
        side(PAGE, destination.ctypes.data, (24, 0, 0), 1, LIMIT, destination_index),
        *(len(source_index), 1, 24),
    )
    lent = [(source, SOURCE), (destination, DESTINATION), (source_index, INDEX), (destination_index, INDEX)]
    error, report, _ = shim.copy([one], lent, **launch)
    assert report.violations == 0
    assert (destination == destination[:, :1]).all()
    return error, [int(row) if row != 255 else -1 for row in destination[:, 0]]


@pytest.mark.parametrize("width", [None, MIXED, 1])
@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_padding_is_skipped_and_not_an_error(shim, width, index_type):
    most_negative = np.iinfo(index_type).min
    from_index = np.array([5, -1, 2, most_negative, 7, 0], index_type)
    to_index = np.array([0, 1, -1, 3, 4, -7], index_type)
    assert copy(shim, from_index, to_index, width=width) == (0, [5, -1, -1, -1, 7, -1, -1, -1])


@pytest.mark.parametrize("past", [LIMIT, LIMIT + 1, 2**31 - 1, 2**31, 2**32, 2**32 + 3, 2**63 - 1])
def test_past_the_limit_is_skipped_and_reported_by_either_side(shim, past):
    good, bad = np.array([1, 2, 3]), np.array([1, past, 3])
    assert copy(shim, bad, good) == (1, [-1, 1, -1, 3, -1, -1, -1, -1])
    assert copy(shim, good, bad) == (1, [-1, 1, -1, 3, -1, -1, -1, -1])
    # Also where the other side has padding there: each side reports its own.
    padding = np.array([1, -1, 3])
    assert copy(shim, bad, padding)[0] == 1
    assert copy(shim, padding, bad)[0] == 1


def test_the_shim_sees_two_writes_of_one_row(shim):
    twice, good = np.array([4, 4]), np.array([1, 2])
    source = np.zeros((LIMIT, 24), np.uint8)
    one = segment(
        side(TOKEN, source.ctypes.data, (24, 0, 0), 1, LIMIT, good),
        side(PAGE, source.ctypes.data, (24, 0, 0), 1, LIMIT, twice),
        *(2, 1, 24),
    )
    lent = [(source, SOURCE | DESTINATION), (good, INDEX), (twice, INDEX)]
    assert shim.copy([one], lent)[1].rewritten == 24


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
@pytest.mark.parametrize("grid", [1, 3])
def test_case_d25_the_index_check_finds_what_numpy_finds(shim, index_type, grid):
    rng = np.random.default_rng(grid)
    for limit in (1, 31, 32, 33, 1000):
        index = rng.integers(-3, limit + 3, 500).astype(index_type)
        found = shim.check_index(index, limit, grid=grid, seed=limit)
        valid = index[(index >= 0) & (index < limit)]
        assert found.padding == (index < 0).sum()
        assert found.past_limit == (index >= limit).sum()
        assert found.duplicates == len(valid) - len(np.unique(valid))
        assert (found.least, found.most) == (index[index >= 0].min(), index[index >= 0].max())


def test_case_d25_the_index_check_of_unique_indices_finds_none(shim):
    found = shim.check_index(np.random.default_rng(0).permutation(4096), 4096)
    assert (found.duplicates, found.padding, found.past_limit) == (0, 0, 0)
    assert (found.least, found.most) == (0, 4095)
