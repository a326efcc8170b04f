"""Codecs: nothing is lost (sent + residual == gradient), equal bits on all ranks, no overflow."""

import numpy as np
import pytest

import mpidp
from mpidp.buffers import numpy_dtype
from mpidp.errors import InvalidArgumentError
from mpidp.reducer import Reducer
from mpidp.reducer.compression import (
    NAMES,
    Exchange,
    Int8,
    Part,
    Piece,
    PowerSGD,
    Sign,
    TopK,
    codec_named,
)
from mpidp.reducer.compression.powersgd import orthonormal
from mpidp.training.adapter import BatchResult, Leaf

pytestmark = pytest.mark.mpi

COUNT = 1000
CASTS = ("float16", "bfloat16")
# What one element may be off where all ranks send gradients of the order of one.
COARSE = {"float16": 1e-2, "bfloat16": 5e-2, "int8": 0.1}
LEAVES = [Leaf("a", (COUNT,), "float32"), Leaf("b", (10, 10), "float64")]


def draw(rank, step, leaf, size=1.0):
    generator = np.random.default_rng([rank, step, leaf])
    return (size * generator.normal(size=LEAVES[leaf].shape)).astype(LEAVES[leaf].dtype)


def one_step(reducer, rank, step, size=1.0, weight=1.0):
    reducer.zero()
    reducer.begin()
    for leaf in (1, 0):
        reducer.gradient_views[leaf][...] += draw(rank, step, leaf, size)
        reducer.mark_ready(leaf)
    return reducer.finish(BatchResult(weight))


def gradients(reducer):
    """Copies, in a dtype that NumPy computes with exactly enough."""
    wide = [v if v.dtype.kind == "c" else v.astype("float64") for v in reducer.gradient_views]
    return [value.copy() for value in wide]


def residuals_of(reducer, leaves):
    found = reducer.residuals()
    return [found[leaf.name] for leaf in leaves]


def exchange(codec, part, scale=1.0):
    under_way = Exchange(codec, part, scale, False)
    while under_way.advance():
        pass
    return under_way.wire_bytes


def part_of(comm, rank, dtype="float32", seed=0):
    """A matrix, a vector and an empty leaf with gaps between them, as a bucket has; and a residual.

    The same for every caller that gives the same rank.
    """
    pieces = (Piece("m", 0, 40, 30), Piece("v", 1216, 77, 1), Piece("e", 1296, 0, 1))
    array, residual = np.zeros(1296, dtype), np.zeros(1296, dtype)
    generator = np.random.default_rng([rank, seed])
    for piece in pieces:
        place = slice(piece.offset, piece.offset + piece.count)
        array[place] = generator.normal(size=piece.count)
        residual[place] = 0.1 * generator.normal(size=piece.count)
    return Part(comm, array, residual, pieces)


CODECS = [*NAMES, TopK(0.001), TopK(1.0), PowerSGD(1), PowerSGD(100)]


@pytest.mark.parametrize(
    "codec", CODECS, ids=lambda c: c if isinstance(c, str) else type(c).__name__
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_and_residuals_make_the_gradients(comm, codec, dtype):
    """Over all ranks, in a first step and in one that starts warm."""
    codec = codec_named(codec)
    part = part_of(comm, comm.rank, dtype)
    for step in range(2):
        part.array[...] = part_of(comm, comm.rank, dtype, step).array
        wanted = [part.array + part.residual for part in comm.all_gather_object(part_copy(part))]
        exchange(codec, part, 4.0)
        residuals = comm.all_gather_object(part.residual)
        exact = np.sum(np.asarray(wanted, "float64"), axis=0)
        found = part.array.astype("float64") + np.sum(np.asarray(residuals, "float64"), axis=0)
        bound = 1e-6 if dtype == "float32" else 1e-14
        if isinstance(codec, type(codec_named("float16"))):  # the sum is rounded on the way
            bound = 5e-2
        np.testing.assert_allclose(found, exact, rtol=0, atol=10 * comm.world_size * bound)
        assert len({a.tobytes() for a in comm.all_gather_object(part.array)}) == 1
        gaps = np.ones(part.array.shape, bool)
        for piece in part.pieces:
            gaps[piece.offset : piece.offset + piece.count] = False
        assert not part.array[gaps].any()
        assert not part.residual[gaps].any()


def part_copy(part):
    return Part(None, part.array.copy(), part.residual.copy())


def sent_by_cast(name, scale):
    def sent(wanted, part):
        rounded = (wanted / np.float32(scale)).astype(numpy_dtype(name)).astype("float32")
        return rounded * np.float32(scale)

    return sent


def sent_by_topk(wanted, part):
    largest = np.argsort(-np.abs(wanted), kind="stable")[: -(-wanted.size // 20)]
    sent = np.zeros_like(wanted)
    sent[largest] = wanted[largest]
    return sent


def sent_by_sign(wanted, part):
    sent = np.zeros_like(wanted)
    for piece in part.pieces:
        place = slice(piece.offset, piece.offset + piece.count)
        if piece.count:
            scale = np.mean(np.abs(wanted[place]))
            sent[place] = np.where(wanted[place] >= 0, scale, -scale)
    return sent


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("name", [*CASTS, "topk", "sign"])
def test_what_a_rank_sends_can_be_told_from_outside(comm, name, scale):
    """These encode once, so sent + residual is the gradient on each rank by itself."""
    oracle = {"topk": sent_by_topk, "sign": sent_by_sign}.get(name) or sent_by_cast(name, scale)
    part = part_of(comm, comm.rank)
    wanted = part.array + part.residual
    sent = oracle(wanted, part)
    exchange(codec_named(name), part, scale)
    np.testing.assert_array_equal(part.residual, wanted - sent)
    total = np.sum(np.asarray(comm.all_gather_object(sent), "float64"), axis=0)
    bound = COARSE.get(name, 1e-6) * comm.world_size
    np.testing.assert_allclose(part.array, total, rtol=0, atol=4 * bound)


def test_int8_is_near_in_every_block(comm):
    part = part_of(comm, comm.rank)
    part.array[:256] *= 1000  # must not cost the other blocks their resolution
    wanted = part.array + part.residual
    exact = np.sum(np.asarray(comm.all_gather_object(wanted), "float64"), axis=0)
    exchange(Int8(), part)
    error = np.abs(part.array - exact)
    chunk = -(-wanted.size // comm.world_size)
    for owner in range(comm.world_size):
        for first in range(owner * chunk, min((owner + 1) * chunk, wanted.size), 256):
            block = slice(first, min(first + 256, (owner + 1) * chunk))
            each = max(np.abs(x[block]).max() for x in comm.all_gather_object(wanted))
            # Half a step of each rank, and half a step of the sum.
            assert error[block].max() <= 1.001 * comm.world_size * each / 127


def test_powersgd_finds_a_matrix_of_low_rank(comm):
    """A sum of rank 2 is found by the second step: the power method has converged on its space."""
    generator = np.random.default_rng(3)
    left, right = generator.normal(size=(40, 2)), generator.normal(size=(2, 30))
    pieces = (Piece("m", 0, 40, 30),)
    part = Part(comm, np.zeros(1200), np.zeros(1200), pieces)
    for _ in range(2):
        part.array[...] = (left @ right).reshape(-1) * (comm.rank + 1)
        part.residual[...] = 0
        nbytes = exchange(PowerSGD(2), part)
    total = comm.world_size * (comm.world_size + 1) / 2
    np.testing.assert_allclose(part.array.reshape(40, 30), total * left @ right, rtol=0, atol=1e-9)
    assert nbytes == 2 * (40 + 30) * 8


@pytest.mark.parametrize("shape", [(50, 4), (3, 3), (7, 1), (4, 6)])
def test_orthonormal_columns(shape):
    generator = np.random.default_rng(5)
    matrix = generator.normal(size=shape) * 10.0 ** generator.integers(-30, 30, shape[1])
    columns = orthonormal(matrix)
    rank = min(shape)
    np.testing.assert_allclose(
        columns.T @ columns, np.diag([1.0] * rank + [0.0] * (shape[1] - rank)), atol=1e-12
    )
    same = orthonormal(np.repeat(matrix[:, :1], 3, axis=1))
    assert not same[:, 1:].any()
    assert not orthonormal(np.zeros(shape)).any()
    matrix[0, 0] = np.nan
    assert np.isnan(orthonormal(matrix)).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "complex128"])
def test_half_and_complex_gradients(comm, name, dtype):
    leaves = [Leaf("m", (20, 12), dtype), Leaf("v", (9,), dtype), Leaf("s", (), dtype)]
    reducer = Reducer(comm, leaves, codec=codec_named(name))
    generator = np.random.default_rng(comm.rank)
    for _ in range(2):
        reducer.zero()
        reducer.begin()
        for view in reducer.gradient_views:
            values = generator.normal(size=view.shape)
            if view.dtype.kind == "c":
                values = values + 1j * generator.normal(size=view.shape)
            view[...] = values
        wanted = [
            v + r for v, r in zip(gradients(reducer), residuals_of(reducer, leaves), strict=True)
        ]
        for leaf in range(len(leaves)):
            reducer.mark_ready(leaf)
        reducer.finish(BatchResult(1.0))
        found = [
            v * comm.world_size + sum(comm.all_gather_object(r))
            for v, r in zip(gradients(reducer), residuals_of(reducer, leaves), strict=True)
        ]
        for value, mine in zip(found, wanted, strict=True):
            exact = sum(comm.all_gather_object(mine))
            np.testing.assert_allclose(value, exact, rtol=0, atol=0.1 * comm.world_size)
        assert (
            len(set(comm.all_gather_object(b"".join(v.tobytes() for v in reducer.gradient_views))))
            == 1
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wiring", ["memory", "nodes", "messages"])
def test_every_rank_gets_the_same_bits(communicators, wiring, name):
    comm = communicators(wiring)
    reducer = Reducer(comm, LEAVES, codec=codec_named(name))
    for step in range(4):
        one_step(reducer, comm.rank, step)
        bits = [view.tobytes() for view in reducer.gradient_views]
        assert all(other == bits for other in comm.all_gather_object(bits))


@pytest.mark.parametrize("name", NAMES)
def test_what_rounding_took_is_sent_later(comm, name):
    """The same gradient again and again: the mean of what arrives goes to it, as 1 / steps."""
    reducer = Reducer(comm, LEAVES, codec=codec_named(name))
    exact = sum(draw(r, 0, 1) for r in range(comm.world_size)) / comm.world_size
    total = np.zeros_like(exact)
    errors = {}
    last = 320 if name == "sign" else 160  # its residuals take longest to stop growing
    for step in range(1, last + 1):
        one_step(reducer, comm.rank, 0)
        total += reducer.gradient_views[1]
        errors[step] = np.abs(total / step - exact).max()
    if name in CASTS and comm.world_size > 1:  # sums are rounded on the way, without feedback
        assert errors[last] <= errors[1]
    else:
        assert errors[last] <= 0.5 * errors[40]


@pytest.mark.parametrize("name", COARSE)
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_large_batches_stay_in_range(comm, name, size):
    """Sums over a large batch are far from the average's size; the wire carries the latter's."""
    weight = size * 1000.0
    reducer = Reducer(comm, LEAVES, codec=codec_named(name))
    for step in range(3):
        one_step(reducer, comm.rank, step, size=weight, weight=weight)
        exact = np.mean([draw(r, step, 1) for r in range(comm.world_size)], axis=0)
        np.testing.assert_allclose(reducer.gradient_views[1], exact, rtol=0, atol=0.1)


def test_a_value_out_of_range_saturates_and_never_becomes_infinite(comm):
    reducer = Reducer(comm, LEAVES, codec=codec_named("float16"))
    one_step(reducer, comm.rank, 0)
    reducer.zero()
    reducer.begin()
    reducer.gradient_views[0][5] = 1e6 * comm.world_size  # the same on all ranks
    reducer.finish(BatchResult(1.0))
    assert np.isfinite(reducer.squared_norm())
    assert reducer.gradient_views[0][5] > 1e4
    sent_later = float(reducer.residuals()["a"][5])
    assert 1e5 < sent_later < 1e6 * comm.world_size  # the excess, kept for the next steps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_shows_once_and_does_not_stay(comm, name, bad):
    reducer = Reducer(comm, LEAVES, codec=codec_named(name))
    one_step(reducer, comm.rank, 0)
    reducer.zero()
    reducer.begin()
    if comm.rank == comm.world_size - 1:
        reducer.gradient_views[0][7] = bad
    reducer.finish(BatchResult(1.0))
    assert not np.isfinite(reducer.squared_norm())
    one_step(reducer, comm.rank, 1)
    assert np.isfinite(reducer.squared_norm())


@pytest.mark.parametrize("name", NAMES)
def test_residuals_survive_a_rebuild_and_a_round_trip(comm, name):
    leaves = [*LEAVES, Leaf("c", (3,), "float32")]
    reducer = Reducer(comm, leaves, codec=codec_named(name), bucket_bytes=64, first_bucket_bytes=64)
    reducer.zero()
    reducer.begin()
    for leaf in (0, 2, 1):  # not the planned order
        reducer.gradient_views[leaf][...] = draw(comm.rank, 0, leaf) if leaf < 2 else 1 / 3
        reducer.mark_ready(leaf)
    reducer.finish(BatchResult(1.0))
    kept = reducer.residuals()
    assert set(kept) == {"a", "b", "c"}
    assert any(value.any() for value in kept.values())
    generation = reducer.generation
    reducer.zero()
    assert reducer.generation == generation + 1
    for leaf_name, value in reducer.residuals().items():
        np.testing.assert_array_equal(value, kept[leaf_name])
    other = Reducer(comm, leaves, codec=codec_named(name))  # planned otherwise
    other.load_residuals(kept)
    for leaf_name, value in other.residuals().items():
        np.testing.assert_array_equal(value, kept[leaf_name])
    other.load_residuals({})
    assert not any(value.any() for value in other.residuals().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_may_move_to_another_communicator(comm, name):
    """Wire memory belongs to a communicator, and must not outlive it in the codec."""
    codec = codec_named(name)
    bucket, residual = np.empty(COUNT, "float32"), np.zeros(COUNT, "float32")
    for step in range(3):
        with mpidp.Communicator(timeout=30.0) as other:
            bucket[...] = comm.rank + step
            residual[...] = 0
            part = Part(other, bucket, residual, (Piece("w", 0, COUNT, 1),))
            exchange(codec, part)
            expected = sum(range(comm.world_size)) + step * comm.world_size
            total = bucket + sum(comm.all_gather_object(residual))
            np.testing.assert_allclose(total, np.float32(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("codec", "share"),
    [
        ("float16", 0.5),
        ("bfloat16", 0.5),
        ("int8", 0.52),
        ("topk", 0.11),
        ("sign", 0.04),
        ("powersgd", 0.1),
        (TopK(0.01), 0.03),
        (PowerSGD(1), 0.03),
    ],
)
def test_bytes_over_the_wire(comm, codec, share):
    """Against float32; int8 besides hands out the sums again, one chunk a rank."""
    leaves = [Leaf("m", (120, 100), "float32")]

    def sent(codec):
        reducer = Reducer(comm, leaves, codec=codec)
        reducer.zero()
        reducer.begin()
        return reducer.finish(BatchResult(1.0)).wire_bytes - tail

    tail = 0
    tail = sent(None) - 4 * 12000
    assert 0 < tail < 200
    assert sent(codec_named(codec)) <= 4 * 12000 * share + 64


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_bit_for_bit(comm, name):
    """Of a reducer that has planned anew, into one that has not, and whose ranks know less."""
    leaves = [*LEAVES, Leaf("c", (30, 20), "float32"), Leaf("d", (3,), "float32")]
    small = {"bucket_bytes": 3000, "first_bucket_bytes": 64}

    def run(reducer, steps):
        for step in steps:
            reducer.zero()
            reducer.begin()
            for leaf in (0, 2, 1, 3):  # not the planned order
                shape, dtype = leaves[leaf].shape, leaves[leaf].dtype
                generator = np.random.default_rng([comm.rank, step, leaf])
                reducer.gradient_views[leaf][...] = generator.normal(size=shape).astype(dtype)
                reducer.mark_ready(leaf)
            reducer.finish(BatchResult(comm.rank + 1.0 + step))
        return b"".join(view.tobytes() for view in reducer.gradient_views)

    for saved_after in (1, 3):
        one = Reducer(comm, leaves, codec=codec_named(name), **small)
        run(one, range(saved_after))
        two = Reducer(comm, leaves, codec=codec_named(name), **small)
        two.load_state_dict(one.state_dict())
        steps = range(saved_after, saved_after + 3)
        assert run(one, steps) == run(two, steps)
    state = one.state_dict() if comm.rank == 0 else {}  # as with more ranks than before
    two.load_state_dict(state)
    assert (comm.rank == 0) == any(value.any() for value in two.residuals().values())
    bits = run(two, range(9, 11))
    assert len(set(comm.all_gather_object(bits))) == 1
    two.load_state_dict({})
    assert not any(value.any() for value in two.residuals().values())


def test_residuals_follow_the_loss_scale(comm):
    reducer = Reducer(comm, LEAVES, codec=Sign())
    one_step(reducer, comm.rank, 0)
    before = reducer.residuals()
    reducer.loss_scale = 8.0
    for name, value in reducer.residuals().items():
        np.testing.assert_array_equal(value, 8 * before[name])
    plain = Reducer(comm, LEAVES)
    plain.loss_scale = 8.0
    one_step(plain, comm.rank, 0, size=8.0)
    exact = np.mean([draw(r, 0, 1) for r in range(comm.world_size)], axis=0)
    np.testing.assert_allclose(plain.gradient_views[1], exact, rtol=1e-14, atol=1e-16)


def test_names():
    assert codec_named(None) is None
    codec = TopK(0.5)
    assert codec_named(codec) is codec
    assert isinstance(codec_named("bf16"), type(codec_named("bfloat16")))
    with pytest.raises(InvalidArgumentError, match="compression 'int3': expected one of float16"):
        codec_named("int3")
    with pytest.raises(InvalidArgumentError, match="compression 3"):
        codec_named(3)
    for fraction in (0.0, 1.1, float("nan")):
        with pytest.raises(InvalidArgumentError, match="fraction"):
            TopK(fraction)
    with pytest.raises(InvalidArgumentError, match="rank=0"):
        PowerSGD(0)
