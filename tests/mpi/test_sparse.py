"""Rows of a large table, summed over the ranks: against the dense sum, in every dtype."""

import numpy as np
import pytest

from mpidp.buffers import numpy_dtype
from mpidp.errors import InvalidArgumentError
from mpidp.reducer.sparse import SparseRows, all_reduce_rows, coalesce

pytestmark = pytest.mark.mpi

ROWS = 500
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64"]


def draw(rank, count, dtype, shape=(3,), num_rows=ROWS):
    """Whole numbers that any of the dtypes can add up exactly; indices repeat."""
    generator = np.random.default_rng([rank, count])
    indices = generator.integers(0, num_rows, count)
    values = generator.integers(-3, 4, (count, *shape)).astype("float32")
    return indices, values.astype(numpy_dtype(dtype))


def dense(indices, values, num_rows=ROWS):
    table = np.zeros((num_rows, *values.shape[1:]), np.complex128)
    np.add.at(table, indices, values.astype(np.complex128))
    return table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_coalesce(dtype, shape, count):
    indices, values = draw(1, count, dtype, shape, num_rows=20)
    rows = coalesce(20, indices, values)
    assert rows.values.dtype == values.dtype
    assert (np.diff(rows.indices) > 0).all()
    assert set(rows.indices) == set(indices)
    np.testing.assert_array_equal(
        rows.to_dense().astype(np.complex128), dense(indices, values, num_rows=20)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", ["even", "one", "none", "many"])
@pytest.mark.parametrize("wiring", ["memory", "messages"])
def test_the_sum_is_the_dense_one(communicators, wiring, dtype, counts):
    comm = communicators(wiring)

    def count_of(rank):
        return {"even": 10 + rank, "one": 20 * (rank == 0), "none": 0, "many": 900}[counts]

    for _ in range(2):
        reduced = all_reduce_rows(
            comm, coalesce(ROWS, *draw(comm.rank, count_of(comm.rank), dtype))
        )
        every = [draw(rank, count_of(rank), dtype) for rank in range(comm.world_size)]
        exact = sum(dense(*one) for one in every)
        np.testing.assert_array_equal(reduced.rows.to_dense().astype(np.complex128), exact)
        assert reduced.rows.values.dtype == every[0][1].dtype
        bits = reduced.rows.indices.tobytes() + reduced.rows.values.tobytes()
        assert len(set(comm.all_gather_object(bits))) == 1
        # One rank alone moves nothing either way; few rows are cheaper sparse up to 8 ranks.
        assert reduced.densified == (counts == "many" and comm.world_size > 1)
        if not reduced.densified:
            assert set(reduced.rows.indices) == {i for indices, _ in every for i in indices}
            largest = max(len(set(indices)) for indices, _ in every)
            assert reduced.wire_bytes == 8 + largest * (8 + every[0][1][:1].nbytes)


def test_rounding_is_in_rank_order(comm):
    """The sum that adds rank 0's row first: other orders give other bits."""
    generator = np.random.default_rng(2)
    rows = (generator.normal(size=(comm.world_size, 64)) * 1e3).astype("float32")
    mine = SparseRows(10**6, np.array([77]), rows[comm.rank][None])
    expected = np.zeros(64, "float32")
    for row in rows:
        expected += row
    reduced = all_reduce_rows(comm, mine)
    assert not reduced.densified
    np.testing.assert_array_equal(reduced.rows.values[0], expected)


def test_half_sums_round_once():
    ones = np.full((3000, 1), 1, "float16")  # float16 stops counting at 2048
    rows = coalesce(4, np.full(3000, 2), ones)
    assert rows.values.tolist() == [[3000.0]]


@pytest.mark.parametrize(
    ("indices", "values", "match"),
    [
        ([0, 1], np.zeros((3, 2)), "expected"),
        ([[0]], np.zeros((1, 2)), "expected"),
        ([4], np.zeros((1, 2)), "outside of the 4 rows"),
        ([-1], np.zeros((1, 2)), "outside of the 4 rows"),
    ],
)
def test_bad_rows(indices, values, match):
    with pytest.raises(InvalidArgumentError, match=match):
        coalesce(4, indices, values)
