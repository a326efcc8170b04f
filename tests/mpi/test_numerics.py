"""Bits: equal on all ranks, equal when repeated, in rank order where asked, NaN kept."""

import hashlib

import numpy as np
import pytest

from mpidp.buffers import numpy_dtype

pytestmark = pytest.mark.mpi

PATHS = [
    ("memory", "auto"),
    ("memory", "ring"),
    ("memory", "recursive_halving"),
    ("memory", "recursive_doubling"),
    ("messages", "direct"),
    ("slots", "direct"),
    ("nodes", "hierarchical"),
]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64"]


def random_values(comm, dtype, count, seed=0):
    generator = np.random.default_rng((seed, comm.rank))
    numbers = generator.normal(size=count) * 10.0 ** generator.integers(-3, 3, count)
    if dtype == "complex64":
        numbers = numbers + 1j * generator.normal(size=count)
    return numbers.astype(numpy_dtype(dtype))


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_all_ranks_and_all_repeats_have_the_same_bits(communicators, path, op, dtype):
    comm = communicators(path[0])
    found = set()
    for _ in range(2):
        x = random_values(comm, dtype, 20_011)
        comm.all_reduce(x, op=op, algorithm=path[1])
        found.update(comm.all_gather_object(digest(x)))
    assert len(found) == 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wiring", ["memory", "messages", "slots", "nodes", "pieces"])
def test_deterministic_is_the_sum_in_rank_order(communicators, wiring, dtype):
    comm = communicators(wiring)
    for count in (5, 4099):
        x = random_values(comm, dtype, count)
        wide = np.float32 if dtype in ("float16", "bfloat16") else x.dtype
        everybody = comm.all_gather(x)
        total = everybody[0].astype(wide)
        for one in everybody[1:]:
            total = total + one.astype(wide)
        comm.all_reduce(x, deterministic=True)
        assert digest(x) == digest(total.astype(x.dtype))


def test_deterministic_bits_do_not_depend_on_the_layout(communicators):
    comm = communicators("memory")
    x = random_values(comm, "float32", 30_000)
    whole = comm.all_reduce(x.copy(), deterministic=True)
    parts = x.copy()
    for part in np.array_split(parts, 7):
        comm.all_reduce(part, deterministic=True)
    registered = comm.empty(30_000)
    registered[:] = x
    comm.all_reduce(registered, deterministic=True)
    assert digest(whole) == digest(parts) == digest(registered)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_half_precision_rounds_once_per_hop_at_most(communicators, path, dtype):
    comm = communicators(path[0])
    x = np.abs(random_values(comm, dtype, 8_000))
    exact = comm.all_gather(x).astype(np.float64).sum(axis=0)
    result = comm.all_reduce(x.copy(), algorithm=path[1]).astype(np.float64)
    # Half a unit in the last place for each rounding; all terms are positive, so nothing cancels.
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    hops = 1 if path[1] in ("auto", "direct") else comm.world_size
    finite = exact < 60_000
    assert (
        np.abs(result - exact)[finite] <= exact[finite] * ((1 + unit) ** hops - 1) * 1.001
    ).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("path", [*PATHS, ("memory", "mpi")], ids=lambda path: "-by-".join(path))
def test_min_and_max_keep_nan_wherever_it_sits(communicators, path, op, dtype):
    comm = communicators(path[0])
    x = random_values(comm, dtype, 1000)
    # Rank r has its NaNs at r, r + P, ...; so every place has exactly one, but the first hundred.
    x[100 + comm.rank :: comm.world_size] = np.nan
    comm.all_reduce(x, op=op, algorithm=path[1])
    nan = np.isnan(x.astype(np.float64))
    assert nan[100:].all()
    assert not nan[:100].any()


def test_mean_divides_before_the_last_rounding(comm):
    # 60000 from each of several ranks leaves float16's range as a sum, but not as a mean.
    x = np.full(500, 60_000, np.float16)
    comm.all_reduce(x, op="mean")
    assert (x == 60_000).all()


def test_integers_wrap(comm):
    x = np.full(100, 100, np.int8)
    comm.all_reduce(x)
    assert (x == np.int64(100 * comm.world_size).astype(np.int8)).all()
