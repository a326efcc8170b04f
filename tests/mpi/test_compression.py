"""Codecs: nothing is lost (sent + residual == gradient), equal bits on all ranks, no overflow."""

import numpy as np
import pytest

import mpidp
from mpidp.buffers import numpy_dtype
from mpidp.errors import InvalidArgumentError
from mpidp.reducer import Reducer
from mpidp.reducer.compression import NAMES, codec_named
from mpidp.training.adapter import BatchResult, Leaf

pytestmark = pytest.mark.mpi

COUNT = 1000
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_sent_and_residual_make_the_gradient(comm, name, scale):
    codec = codec_named(name)
    given = draw(comm.rank, 0, 0)
    old = draw(comm.rank, 1, 0, 1e-3)
    residual, bucket = old.copy(), given.copy()
    exchange = codec.start(comm, bucket, residual, scale, False)
    # What a rank sends is the rounded value, so it can be told from outside.
    wanted = given + old
    sent = (wanted / np.float32(scale)).astype(numpy_dtype(name)).astype("float32")
    sent *= np.float32(scale)
    np.testing.assert_array_equal(sent + residual, wanted)
    assert exchange.wire_bytes == given.nbytes // 2
    exchange.wait()
    parts = comm.all_gather_object(sent)
    bound = {"float16": 2e-3, "bfloat16": 2e-2}[name] * comm.world_size
    np.testing.assert_allclose(bucket, np.sum(parts, axis=0), rtol=0, atol=4 * bound)
    assert len({x.tobytes() for x in comm.all_gather_object(bucket)}) == 1


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
    exact = sum(draw(r, 0, 0).astype("float64") for r in range(comm.world_size))
    exact /= comm.world_size
    steps = 32
    total = np.zeros(COUNT)
    first = None
    for _ in range(steps):
        one_step(reducer, comm.rank, 0)
        total += reducer.gradient_views[0]
        first = np.abs(total - exact).max() if first is None else first
    # A lone rank's sums are not rounded again on the way; others' are, without feedback.
    factor = 4 / steps if comm.world_size == 1 else 1
    assert np.abs(total / steps - exact).max() <= factor * first


@pytest.mark.parametrize("name", NAMES)
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
        reducer.gradient_views[leaf][...] = 1 / 3 + comm.rank
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
            codec.start(other, bucket, residual, 1.0, False).wait()
            expected = sum(range(comm.world_size)) + step * comm.world_size
            np.testing.assert_array_equal(bucket, np.float32(expected))


@pytest.mark.parametrize("name", NAMES)
def test_half_the_bytes_go_over_the_wire(comm, name):
    def sent(codec):
        reducer = Reducer(comm, LEAVES[:1], codec=codec)
        one = BatchResult(1.0)
        reducer.zero()
        reducer.begin()
        return reducer.finish(one).wire_bytes

    assert sent(None) - sent(codec_named(name)) >= COUNT * 2


def test_names():
    assert codec_named(None) is None
    with pytest.raises(InvalidArgumentError, match="compression 'int3': expected one of float16"):
        codec_named("int3")
