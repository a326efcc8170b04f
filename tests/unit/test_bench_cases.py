"""The table of collectives, the sizes of a sweep, and the exact inputs."""

from __future__ import annotations

from functools import lru_cache, reduce

import numpy as np
import pytest

from mpidp.bench.cases import COLLECTIVES, Case, op_fits, sizes
from mpidp.bench.driver import Plan
from mpidp.bench.patterns import PERIOD, Exact, count_unequal, input_block, reduced_block
from mpidp.buffers import DTYPES, numpy_dtype
from mpidp.config import OPS

NARROW = ("bool", "int8", "uint8", "float16", "bfloat16")
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if op_fits(op, dtype)]


def make_case(name="all_reduce", dtype="float32", op="sum", count=8, world_size=4, root=0):
    itemsize = numpy_dtype(dtype).itemsize
    return Case(COLLECTIVES[name], dtype, op, root, count, itemsize, world_size)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_gather", 3 / 4),
        ("all_to_all", 3 / 4),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ],
)
def test_bus_factor(name, factor):
    assert COLLECTIVES[name].bus_factor(4) == factor


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_bus_factor_of_one_rank_is_zero(name):
    assert COLLECTIVES[name].bus_factor(1) == 0


@pytest.mark.parametrize("name", sorted(set(COLLECTIVES) - {"barrier"}))
@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize("nbytes", [1, 8, 60, 1 << 20])
def test_size_never_exceeds_what_was_asked_but_for_one_element(name, world_size, nbytes):
    entry = COLLECTIVES[name]
    count = entry.count_for(nbytes, 4, world_size)
    size = entry.size(count, 4, world_size)
    assert count >= 1
    assert size <= nbytes or count == 1
    assert entry.size(count + 1, 4, world_size) > nbytes


def test_bandwidths():
    case = make_case(count=1_000_000, world_size=4)
    algorithm, bus = case.bandwidths(1e-3)
    assert algorithm == pytest.approx(4.0)  # 4e6 bytes in a millisecond
    assert bus == pytest.approx(6.0)


def test_sizes_by_factor_and_by_step():
    assert list(sizes(8, 1000, 4, None)) == [8, 32, 128, 512]
    assert list(sizes(8, 24, None, 8)) == [8, 16, 24]
    assert list(sizes(8, 8, 2, None)) == [8]


def test_plan_drops_sizes_that_round_to_the_same_count():
    plan = Plan("all_gather", min_bytes=1, max_bytes=64, factor=2)
    assert [case.count for case in plan.cases(5)] == [1, 3]
    assert [case.nbytes for case in plan.cases(5)] == [20, 60]


def test_plan_leaves_out_what_is_not_defined():
    plan = Plan(dtypes=("int32", "float32"), ops=("sum", "mean"), min_bytes=8, max_bytes=8)
    assert [(c.dtype, c.op) for c in plan.cases(2)] == [
        ("int32", "sum"),
        ("float32", "sum"),
        ("float32", "mean"),
    ]
    assert plan.undefined() == [("int32", "mean")]


def test_plan_of_a_barrier_is_one_row():
    (case,) = Plan("barrier").cases(3)
    assert (case.nbytes, case.count, case.root) == (0, 0, -1)


def fold_left(blocks, combine):
    return reduce(combine, blocks)


def fold_right(blocks, combine):
    return reduce(combine, blocks[::-1])


def fold_as_a_tree(blocks, combine):
    while len(blocks) > 1:
        pairs = [
            combine(*blocks[i : i + 2]) if i + 1 < len(blocks) else blocks[i]
            for i in range(0, len(blocks), 2)
        ]
        blocks = pairs
    return blocks[0]


@lru_cache(maxsize=1)
def blocks_and_result(dtype, op, world_size):
    # The first thousand elements tell as much as all, and bfloat16 is slow in NumPy.
    case = make_case(dtype=dtype, op=op, world_size=world_size)
    found = numpy_dtype(dtype)
    blocks = [input_block(case, rank, found)[:1000] for rank in range(world_size)]
    return blocks, reduced_block(case, found)[:1000]


@pytest.mark.parametrize(
    ("dtype", "op", "world_size"),
    [(*pair, world_size) for pair in REDUCTIONS for world_size in (1, 2, 3, 5, 8)]
    + [(*pair, 40) for pair in REDUCTIONS if pair[0] in NARROW],
)
@pytest.mark.parametrize("fold", [fold_left, fold_right, fold_as_a_tree])
def test_any_order_in_the_dtype_itself_gives_the_expected_bits(fold, dtype, op, world_size):
    found = numpy_dtype(dtype)
    blocks, expected = blocks_and_result(dtype, op, world_size)
    combine = {
        "sum": np.logical_or if dtype == "bool" else np.add,
        "mean": np.add,
        "prod": np.logical_and if dtype == "bool" else np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }[op]
    total = fold(blocks, combine)
    if op == "mean":
        total = (total / found.type(world_size)).astype(found)
    assert total.dtype == found
    assert np.array_equal(total, expected)
    # Integers must not wrap on the way.
    if found.kind in "iu" and op in ("sum", "prod"):
        wide = fold([block.astype(object) for block in blocks], combine)
        assert np.array_equal(total.astype(object), wide)


@pytest.mark.parametrize(("dtype", "op"), [("bfloat16", "mean"), ("int8", "sum")])
def test_more_ranks_than_the_dtype_can_count(dtype, op):
    case = make_case(dtype=dtype, op=op, world_size=300)
    found = numpy_dtype(dtype)
    expected = reduced_block(case, found).astype(np.float64)
    assert np.any(expected != 0)
    assert np.all(np.isfinite(expected))


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
@pytest.mark.parametrize("world_size", [2, 5])
def test_no_rank_can_be_left_out_or_counted_twice(dtype, op, world_size):
    case = make_case(dtype=dtype, op=op, world_size=world_size)
    found = numpy_dtype(dtype)
    expected = reduced_block(case, found)
    blocks = [input_block(case, rank, found) for rank in range(world_size)]
    for rank, block in enumerate(blocks):
        assert not np.array_equal(block, np.roll(block, 1)), "the values differ by index"
        assert not np.array_equal(block, blocks[rank - 1]), "the values differ by rank"
        assert not np.array_equal(block, expected)


@pytest.mark.parametrize("name", sorted(set(COLLECTIVES) - {"barrier"}))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, PERIOD + 3])
def test_count_wrong_counts_exactly_what_was_spoilt(name, dtype, count):
    world_size, rank = 3, 1
    case = make_case(name, dtype, "max", count, world_size, root=1)
    found = numpy_dtype(dtype)
    exact = Exact(case, rank, found)
    out = np.empty(case.output_count, found)
    begin = 0
    for block, first, covered in exact.expected:
        out[begin : begin + covered] = block[(first + np.arange(covered)) % PERIOD]
        begin += covered
    assert begin == out.size
    assert exact.count_wrong(out) == 0
    exact.poison(out[-1:])
    assert exact.count_wrong(out) == 1
    exact.poison(out)
    assert exact.count_wrong(out) >= 0.99 * out.size


def test_inputs_of_the_moving_collectives_line_up():
    world_size, count = 3, PERIOD // 2
    case = make_case("all_to_all", "int32", "none", count, world_size)
    dtype = np.dtype(np.int32)
    inputs = []
    for rank in range(world_size):
        x = np.empty(world_size * count, dtype)
        Exact(case, rank, dtype).fill(x)
        inputs.append(x.reshape(world_size, count))
    for rank in range(world_size):
        received = np.concatenate([x[rank] for x in inputs])
        assert Exact(case, rank, dtype).count_wrong(received) == 0


def test_only_the_root_of_a_reduce_has_something_to_check():
    dtype = np.dtype(np.float32)
    case = make_case("reduce", root=2)
    assert Exact(case, 2, dtype).expected
    assert not Exact(case, 1, dtype).expected


def test_a_nan_is_wrong():
    block = np.zeros(PERIOD, np.float32)
    array = np.zeros(10, np.float32)
    array[3] = np.nan
    assert count_unequal(array, block) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_products_can_be_repeated_in_place_without_subnormals(dtype):
    found = numpy_dtype(dtype)
    case = make_case(dtype=dtype, op="prod")
    x = np.empty(case.count, found)
    Exact(case, 0, found).fill_for_timing(x)
    assert np.array_equal(x, np.ones(case.count, found))
