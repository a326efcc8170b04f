"""The oracle itself: against MPI's own collectives, and against numbers worked out by hand."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpidp
from oracle import NaiveCommunicator, accumulator_dtype, reduce_in_rank_order

WORLD = MPI.COMM_WORLD
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "barrier",
    "split",
    "empty",
    "broadcast_object",
    "all_gather_object",
)


@pytest.fixture(scope="module")
def naive():
    with NaiveCommunicator(WORLD) as communicator:
        yield communicator


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("dtype", "op", "values", "expected"),
    [
        ("float32", "sum", [1, 2, 4], 7),
        ("float32", "mean", [1, 2, 4], np.float32(7) / np.float32(3)),
        ("int8", "sum", [100, 100, 1], -55),
        ("uint8", "prod", [16, 16, 3], 0),
        ("bool", "sum", [0, 1, 0], True),
        ("bool", "prod", [1, 1, 0], False),
        ("bool", "min", [1, 0, 1], False),
        ("complex64", "prod", [1j, 1j, 2], -2),
        ("complex64", "mean", [3 + 6j, 0, 0], 1 + 2j),
        # Rank order: the small terms come first and count.
        ("float32", "sum", [1, 1, 2**25], 2**25 + 2),
        ("float32", "sum", [2**25, 1, 1], 2**25),
        # Accumulated in float32 and rounded once: term by term it would stay at 2048.
        ("float16", "sum", [2048, 1, 1], 2050),
        # Divided before the rounding: the sum alone overflows.
        ("float16", "mean", [60000, 60000, 60000], 60000),
    ],
)
def test_rank_order_by_hand(dtype, op, values, expected):
    total = reduce_in_rank_order([np.array([value], dtype) for value in values], op)
    assert total.dtype == dtype
    assert total[0] == expected


@pytest.mark.mpi
def test_bfloat16_by_hand():
    terms = [np.array([value], ml_dtypes.bfloat16) for value in (256, 1, 1)]
    assert reduce_in_rank_order(terms, "sum")[0] == 258
    assert reduce_in_rank_order(terms, "sum", wide=True).dtype == np.float64
    assert accumulator_dtype(terms[0].dtype) == np.float32


@pytest.mark.mpi
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_nan_stays(op, at):
    terms = [np.array([float(i)]) for i in range(3)]
    terms[at][0] = np.nan
    assert np.isnan(reduce_in_rank_order(terms, op)).all()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("dtype", "op", "scales"),
    [("int32", "mean", None), ("bool", "mean", None), ("complex64", "max", None),
     ("int32", "sum", [2.0]), ("float32", "average", None)],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(dtype, op, scales):
    with pytest.raises(mpidp.InvalidArgumentError):
        reduce_in_rank_order([np.ones(2, dtype)], op, scales)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("op", "mpi_op"), [("sum", MPI.SUM), ("prod", MPI.PROD), ("min", MPI.MIN), ("max", MPI.MAX)]
)
@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_reductions_are_those_of_mpi(naive, op, mpi_op, dtype):
    x = (np.arange(2 * naive.world_size) % 5 - 2 + naive.rank % 3).astype(dtype)
    expected = np.empty_like(x)
    WORLD.Allreduce(x, expected, mpi_op)
    assert (naive.all_reduce(x, out=np.empty_like(x), op=op) == expected).all()
    assert (
        naive.reduce_scatter(x, op=op) == np.split(expected, naive.world_size)[naive.rank]
    ).all()
    root = naive.world_size - 1
    result = naive.reduce(x.copy(), root=root, op=op)
    assert (result is None) == (naive.rank != root)
    assert result is None or (result == expected).all()
    assert (naive.all_reduce(x, op=op) == expected).all()


@pytest.mark.mpi
def test_moves_are_those_of_mpi(naive):
    x = np.arange(2.0 * naive.world_size) + 100 * naive.rank
    gathered = np.empty((naive.world_size, x.size))
    WORLD.Allgather(x, gathered)
    assert (naive.all_gather(x) == gathered).all()
    exchanged = np.empty_like(x)
    WORLD.Alltoall(x, exchanged)
    assert (naive.all_to_all(x) == exchanged).all()
    assert (naive.broadcast(x, root=0) == np.arange(x.size)).all()
    assert naive.broadcast_object(naive.rank, root=naive.world_size - 1) == naive.world_size - 1
    assert naive.all_gather_object(naive.rank) == list(range(naive.world_size))


@pytest.mark.mpi
def test_scale_may_differ_by_rank(naive):
    x = np.ones(3, np.float32)
    naive.all_reduce(x, scale=float(naive.rank))
    assert (x == naive.world_size * (naive.world_size - 1) / 2).all()


@pytest.mark.mpi
@pytest.mark.parametrize("name", COLLECTIVES)
def test_it_has_the_signatures_of_the_communicator(name):
    def parameters(kind):
        signature = inspect.signature(getattr(kind, name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(NaiveCommunicator) == parameters(mpidp.Communicator)
