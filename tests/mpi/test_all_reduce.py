"""all_reduce: every algorithm, wiring, dtype and op against the oracle, bit for bit."""

import itertools

import numpy as np
import pytest
from inputs import DTYPES, difference, has_op, placed, reduced, small_counts, values

from mpidp.config import OPS

# Every dtype and op on these, and the edges of sizes on all.
MAIN_PATHS = [
    ("memory", "auto"),
    ("memory", "ring"),
    ("memory", "recursive_halving"),
    ("memory", "recursive_doubling"),
    ("memory", "mpi"),
]
MORE_PATHS = [
    ("slots", "direct"),
    ("messages", "direct"),
    ("nodes", "hierarchical"),
    ("nodes", "auto"),
    ("nodes", "ring"),
    ("memory", "hierarchical"),
]
CUT_PATHS = [("pieces", name) for name in ("direct", "ring", "recursive_halving", "mpi")]

PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if has_op(dtype, op)]
FEW_PAIRS = [("float32", "sum"), ("bfloat16", "mean"), ("int16", "max"), ("complex64", "prod")]

# (in place, misaligned)
IN_AND_OUT = [(True, False), (False, True)]


def path_id(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


def wrong_results(comm, algorithm, dtype, op, counts, places=IN_AND_OUT, scale=None):
    """One line for each case whose result is not the oracle's; one case for each of places."""
    lines = []
    scales = None if scale is None else [scale] * comm.world_size
    for count, (turn, (in_place, misaligned)) in itertools.product(counts, enumerate(places)):
        given = values(dtype, count, comm.rank, op, salt=turn)
        x = placed(given, misaligned)
        out = None if in_place else placed(np.zeros_like(x), misaligned)
        result = comm.all_reduce(x, out=out, op=op, algorithm=algorithm, scale=scale)
        assert result is (x if in_place else out)
        wrong = difference(result, reduced(dtype, count, comm.world_size, op, scales, salt=turn))
        if not wrong and not in_place:
            wrong = difference(x, given) and "the input changed"
        if wrong:
            lines.append(f"{count=} {in_place=} {misaligned=} {turn=}: {wrong}")
    return "\n".join(lines)


@pytest.mark.mpi
@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=path_id)
@pytest.mark.parametrize("path", MAIN_PATHS, ids=path_id)
def test_every_dtype_and_op(communicators, path, dtype, op):
    comm = communicators(path[0])
    counts = small_counts(comm.world_size)
    if comm.world_size <= 4:
        assert not wrong_results(comm, path[1], dtype, op, counts)
        return
    # More ranks than most test machines have cores: each count in one place only.
    for place, some in zip(IN_AND_OUT, (counts[::2], counts[1::2]), strict=True):
        assert not wrong_results(comm, path[1], dtype, op, some, [place])


@pytest.mark.mpi
@pytest.mark.parametrize(("dtype", "op"), FEW_PAIRS, ids=path_id)
@pytest.mark.parametrize("path", MORE_PATHS + CUT_PATHS, ids=path_id)
def test_other_wirings(communicators, path, dtype, op):
    comm = communicators(path[0])
    assert not wrong_results(comm, path[1], dtype, op, small_counts(comm.world_size))


@pytest.mark.mpi
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("misaligned", [True, False])
@pytest.mark.parametrize("path", MAIN_PATHS + MORE_PATHS, ids=path_id)
def test_places(communicators, path, misaligned, in_place):
    comm = communicators(path[0])
    places = [(in_place, misaligned)] * 2
    for dtype in ("float32", "float16"):
        assert not wrong_results(comm, path[1], dtype, "sum", [333, 5003], places)


@pytest.mark.mpi
@pytest.mark.parametrize(("dtype", "op"), FEW_PAIRS[:3], ids=path_id)
@pytest.mark.parametrize("path", MAIN_PATHS + MORE_PATHS + CUT_PATHS, ids=path_id)
def test_counts_that_need_blocks_and_segments(communicators, path, dtype, op):
    comm = communicators(path[0])
    counts = [4097] if path[0] == "pieces" else [4097, 70_001]
    assert not wrong_results(comm, path[1], dtype, op, counts)


@pytest.mark.mpi
@pytest.mark.parametrize("path", MAIN_PATHS + MORE_PATHS, ids=path_id)
def test_a_million_and_three(communicators, path):
    comm = communicators(path[0])
    assert not wrong_results(comm, path[1], "float32", "sum", [1_000_003], [(True, False)])


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["bool", "float16", "complex128"])
def test_a_million_and_three_of_other_sizes(comm, dtype):
    assert not wrong_results(comm, "auto", dtype, "sum", [1_000_003], [(False, True)])


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 333, 5_000, 1_000_003])
@pytest.mark.parametrize("wiring", ["memory", "nodes", "slots", "messages"])
def test_registered_memory(communicators, wiring, count):
    comm = communicators(wiring)
    expected = reduced("float32", count, comm.world_size)
    x, out = comm.empty(count), comm.empty(count)
    for turn in range(2):
        x[:] = values("float32", count, comm.rank)
        comm.all_reduce(x, out=out)
        assert not difference(out, expected), turn
        comm.all_reduce(x)
        assert not difference(x, expected), turn


@pytest.mark.mpi
@pytest.mark.parametrize("count", [333, 100_001])
def test_registered_memory_on_some_ranks_only(comm, count):
    x = comm.empty(count, "float64") if comm.rank % 2 else np.empty(count)
    x[:] = values("float64", count, comm.rank)
    comm.all_reduce(x)
    assert not difference(x, reduced("float64", count, comm.world_size))


@pytest.mark.mpi
def test_part_of_registered_memory(comm):
    count = 50_001
    whole = comm.empty(3 * count)
    whole.fill(-1)
    # Each rank's part lies elsewhere in its memory.
    start = comm.rank % 3 * count // 2
    part = whole[start : start + count]
    part[:] = values("float32", count, comm.rank)
    comm.all_reduce(part)
    assert not difference(part, reduced("float32", count, comm.world_size))
    assert (whole[:start] == -1).all()
    assert (whole[start + count :] == -1).all()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("dtype", "op"), [("float16", "sum"), ("float32", "mean"), ("complex64", "sum")], ids=path_id
)
@pytest.mark.parametrize("path", MAIN_PATHS + MORE_PATHS, ids=path_id)
def test_scale_multiplies_the_input(communicators, path, dtype, op):
    comm = communicators(path[0])
    # Quarters stay exact, so the place of the rounding does not matter.
    assert not wrong_results(comm, path[1], dtype, op, [1, 333], scale=0.25)


@pytest.mark.mpi
@pytest.mark.parametrize("path", MAIN_PATHS + MORE_PATHS, ids=path_id)
def test_scale_may_differ_by_rank(communicators, path):
    comm = communicators(path[0])
    scales = [float(2**rank) for rank in range(comm.world_size)]
    x = values("float32", 333, comm.rank)
    comm.all_reduce(x, scale=scales[comm.rank], algorithm=path[1])
    assert not difference(x, reduced("float32", 333, comm.world_size, scales=scales))


@pytest.mark.mpi
def test_shapes_are_kept(comm):
    x = values("float32", 24, comm.rank).reshape(2, 3, 4)
    expected = reduced("float32", 24, comm.world_size)
    assert not difference(comm.all_reduce(x), expected.reshape(2, 3, 4))
    scalar = np.array(comm.rank + 1, np.int64)
    assert comm.all_reduce(scalar) == comm.world_size * (comm.world_size + 1) // 2
    assert scalar.shape == ()


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "dlpack"])
def test_arrays_that_are_not_numpys(comm, kind):
    total = comm.world_size * (comm.world_size + 1) // 2
    backing = np.full(16, comm.rank + 1, np.int32)
    if kind == "bytearray":
        x = bytearray([comm.rank + 1] * 16)
        assert comm.all_reduce(x) is x
        assert x == bytearray([total] * 16)
        return
    x = memoryview(backing)
    if kind == "dlpack":

        class Tensor:
            shape = backing.shape

            def __dlpack__(self, **options):
                return backing.__dlpack__(**options)

        x = Tensor()
    assert comm.all_reduce(x) is x
    assert (backing == total).all()
