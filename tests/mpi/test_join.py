"""Exact join: ranks with unequal numbers of batches, against one process on the whole batches."""

import numpy as np
import pytest
from mpi4py import MPI

import mpidp
from mpidp.reducer import Reducer, join
from mpidp.reducer.compression import codec_named
from mpidp.strategies import LossScale, Synchronous
from mpidp.training.adapter import BatchResult, Leaf

pytestmark = pytest.mark.mpi

LEAVES = (Leaf("weight", (12, 11), "float64"), Leaf("bias", (5,), "float64"))


def batches_of(rank, how):
    """Each a (weight, gradients) pair of whole numbers, so that sums are exact."""
    number = {"growing": 2 * rank, "falling": 5 - rank, "none": 0, "one": 3 * (rank == 0)}[how]
    generator = np.random.default_rng([rank, 7])
    return [
        (
            float(generator.integers(1, 9)),
            [generator.integers(-9, 9, leaf.shape).astype(float) for leaf in LEAVES],
        )
        for _ in range(max(0, number))
    ]


def expected_values(world_size, how):
    """Plain descent in one process: step i takes every rank's batch i, where it has one."""
    values = [np.zeros(leaf.shape) for leaf in LEAVES]
    lists = [batches_of(rank, how) for rank in range(world_size)]
    for step in range(max(map(len, lists))):
        taken = [batches[step] for batches in lists if step < len(batches)]
        weight = sum(w for w, _ in taken)
        for leaf, value in enumerate(values):
            value -= 0.5 * sum(g[leaf] for _, g in taken) / weight
    return values


def backward(reducer, gradients, *, synchronize=True):
    reducer.begin(synchronize=synchronize)
    for leaf in reversed(range(len(LEAVES))):
        reducer.gradient_views[leaf][...] += gradients[leaf]
        reducer.mark_ready(leaf)


def descend(values, reducer):
    for value, view in zip(values, reducer.gradient_views, strict=True):
        value -= 0.5 * view


@pytest.mark.parametrize("how", ["growing", "falling", "none", "one"])
@pytest.mark.parametrize("wiring", ["memory", "messages"])
def test_a_plain_loop_equals_one_process(communicators, wiring, how):
    comm = communicators(wiring)
    reducer = Reducer(comm, LEAVES, bucket_bytes=64, first_bucket_bytes=64)
    values = [np.zeros(leaf.shape) for leaf in LEAVES]
    served = []

    def apply(step):
        served.append(step.active)
        descend(values, reducer)

    for _ in range(2):  # and again, with the same reducer
        for value in values:
            value[...] = 0
        mine = batches_of(comm.rank, how)
        served.clear()
        with join(reducer, apply):
            for weight, gradients in mine:
                reducer.zero()
                backward(reducer, gradients)
                reducer.finish(BatchResult(weight))
                descend(values, reducer)
        longest = max(comm.all_gather_object(len(mine)))
        assert len(served) == longest - len(mine)
        assert all(0 < active < comm.world_size for active in served)
        for value, expected in zip(values, expected_values(comm.world_size, how), strict=True):
            np.testing.assert_array_equal(value, expected)


def test_micro_batches_left_over_count(comm):
    """A rank whose data end within an accumulation window gives what it has accumulated."""
    reducer = Reducer(comm, LEAVES)
    values = [np.zeros(leaf.shape) for leaf in LEAVES]
    weight, gradients = batches_of(0, "one")[0]
    has_left_over = comm.rank == comm.world_size - 1
    left_over = BatchResult()

    def prepare():
        nonlocal left_over
        found, left_over = left_over, BatchResult()
        if found.weight:
            return found
        reducer.zero()
        return None

    with join(reducer, lambda _: descend(values, reducer), prepare=prepare):
        reducer.zero()
        if has_left_over:
            backward(reducer, gradients, synchronize=False)
            left_over = BatchResult(weight)
    for value, gradient in zip(values, gradients, strict=True):
        np.testing.assert_array_equal(value, -0.5 * gradient / weight)


def test_an_exception_passes_through(comm):
    reducer = Reducer(comm, LEAVES)
    with pytest.raises(ZeroDivisionError), join(reducer, lambda _: None):
        raise ZeroDivisionError
    reducer.zero()
    backward(reducer, [np.ones(leaf.shape) for leaf in LEAVES])
    assert reducer.finish(BatchResult(1.0)).active == comm.world_size


class Known:
    """An adapter whose batch is (weight, gradients)."""

    def __init__(self):
        self.values = [np.zeros(leaf.shape) for leaf in LEAVES]
        self.views = self.callback = None
        self.scale = 1.0

    def leaves(self):
        return LEAVES

    def bind_gradients(self, views):
        self.views = views

    def on_gradient_ready(self, callback):
        self.callback = callback

    def set_loss_scale(self, scale):
        self.scale = scale

    def compute_gradients(self, batch):
        weight, gradients = batch
        for leaf in reversed(range(len(LEAVES))):
            self.views[leaf] += self.scale * gradients[leaf]
            self.callback(leaf)
        return BatchResult(weight)

    def apply_gradients(self, learning_rate=None):
        for value, view in zip(self.values, self.views, strict=True):
            value -= learning_rate * view


@pytest.mark.parametrize("how", ["growing", "falling", "none", "one"])
@pytest.mark.parametrize("options", [{}, {"loss_scale": LossScale(4.0, growth_interval=2)}])
def test_the_strategy_equals_one_process(comm, how, options):
    adapter, strategy = Known(), Synchronous(bucket_bytes=64, first_bucket_bytes=64, **options)
    strategy.attach(adapter, comm)
    with strategy.join(learning_rate=0.5):
        for batch in batches_of(comm.rank, how):
            strategy.step([batch], learning_rate=0.5)
    for value, expected in zip(adapter.values, expected_values(comm.world_size, how), strict=True):
        np.testing.assert_array_equal(value, expected)
    strategy.close()


@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd", "sign"])
def test_replicas_stay_equal_under_a_codec(comm, compression):
    """A rank that serves goes on sending its residual, and its replica stays equal."""
    reducer = Reducer(comm, LEAVES, codec=codec_named(compression))
    values = [np.zeros(leaf.shape) for leaf in LEAVES]
    with join(reducer, lambda _: descend(values, reducer)):
        for weight, gradients in batches_of(comm.rank, "falling"):
            reducer.zero()
            backward(reducer, gradients)
            reducer.finish(BatchResult(weight))
            descend(values, reducer)
    assert any(value.any() for value in values) or comm.world_size > 5
    assert len(set(comm.all_gather_object(b"".join(value.tobytes() for value in values)))) == 1


def test_join_alone():
    with mpidp.Communicator(MPI.COMM_SELF, timeout=30) as alone:
        reducer = Reducer(alone, LEAVES)
        with join(reducer, lambda _: pytest.fail("nobody else has data")):
            reducer.zero()
            backward(reducer, [np.ones(leaf.shape) for leaf in LEAVES])
            reducer.finish(BatchResult(1.0))
