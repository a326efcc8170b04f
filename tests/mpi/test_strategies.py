"""The synchronous strategy on a model of known gradients: clipping, skipping, attaching."""

import math

import numpy as np
import pytest

from mpidp.errors import InvalidArgumentError, MpidpError
from mpidp.strategies import Synchronous
from mpidp.training.adapter import BatchResult, Leaf

pytestmark = pytest.mark.mpi

LEAVES = (Leaf("weight", (6, 5), "float64"), Leaf("bias", (5,), "float64"))


class Known:
    """An adapter whose batch is (weight, gradients): it adds them, and steps by plain descent."""

    def __init__(self):
        self.values = [np.zeros(leaf.shape) for leaf in LEAVES]
        self.views = None
        self.callback = None
        self.steps = 0

    def leaves(self):
        return LEAVES

    def read_leaf(self, index):
        return self.values[index]

    def write_leaf(self, index, value):
        self.values[index][...] = value

    def bind_gradients(self, views):
        self.views = views

    def on_gradient_ready(self, callback):
        self.callback = callback

    def compute_gradients(self, batch):
        weight, gradients = batch
        for leaf, value in reversed(list(enumerate(gradients))):
            self.views[leaf] += value
            self.callback(leaf)
        return BatchResult(weight, 2.0 * weight)

    def apply_gradients(self, learning_rate=None):
        self.steps += 1
        for value, view in zip(self.values, self.views, strict=True):
            value -= (1.0 if learning_rate is None else learning_rate) * view


def batch(rank, salt=0):
    """Of weight rank + 1; whole numbers, so that sums are exact."""
    generator = np.random.default_rng([rank, salt])
    return rank + 1.0, [generator.integers(-9, 9, leaf.shape).astype(float) for leaf in LEAVES]


def average(world_size, salt=0):
    batches = [batch(rank, salt) for rank in range(world_size)]
    total = sum(weight for weight, _ in batches)
    return [sum(g[leaf] for _, g in batches) / total for leaf in range(len(LEAVES))]


def norm_of(gradients):
    return math.sqrt(sum(float(np.sum(g * g)) for g in gradients))


@pytest.fixture
def attached(comm):
    """A function that attaches a strategy to a new adapter; closes it after the test."""
    made = []

    def attach(**options):
        adapter, strategy = Known(), Synchronous(**options)
        strategy.attach(adapter, comm)
        made.append(strategy)
        return adapter, strategy

    yield attach
    for strategy in made:
        strategy.close()


def test_a_step_is_the_weighted_average(comm, attached):
    adapter, strategy = attached()
    report = strategy.step([batch(comm.rank)], learning_rate=0.5)
    expected = average(comm.world_size)
    for value, gradient in zip(adapter.values, expected, strict=True):
        np.testing.assert_array_equal(value, -0.5 * gradient)
    weight = comm.world_size * (comm.world_size + 1) / 2
    assert report.result == BatchResult(weight, 2 * weight)
    assert report.applied
    assert report.gradient_norm == pytest.approx(norm_of(expected), rel=1e-13)
    assert len(set(comm.all_gather_object(report.gradient_norm))) == 1


@pytest.mark.parametrize("clip_norm", [0.01, 1e9])
def test_clipping_by_the_global_norm(comm, attached, clip_norm):
    adapter, strategy = attached(clip_norm=clip_norm)
    report = strategy.step([batch(comm.rank)])
    expected = average(comm.world_size)
    norm = norm_of(expected)
    factor = min(1.0, clip_norm / (norm + 1e-6))
    for value, gradient in zip(adapter.values, expected, strict=True):
        np.testing.assert_allclose(value, -factor * gradient, rtol=1e-12)
    assert report.gradient_norm == pytest.approx(norm, rel=1e-13)  # that before clipping


def test_clipping_by_value(comm, attached):
    adapter, strategy = attached(clip_value=0.25)
    strategy.step([batch(comm.rank)])
    for value, gradient in zip(adapter.values, average(comm.world_size), strict=True):
        np.testing.assert_array_equal(value, -np.clip(gradient, -0.25, 0.25))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("nonfinite", ["skip", "apply", "raise"])
def test_a_bad_value_on_one_rank_is_met_alike_by_all(comm, attached, nonfinite, bad):
    adapter, strategy = attached(nonfinite=nonfinite)
    weight, gradients = batch(comm.rank)
    if comm.rank == comm.world_size - 1:
        gradients[0][2, 2] = bad
    if nonfinite == "raise":
        with pytest.raises(MpidpError, match="not finite"):
            strategy.step([(weight, gradients)])
    else:
        report = strategy.step([(weight, gradients)])
        assert report.applied == (nonfinite == "apply")
        assert not math.isfinite(report.gradient_norm)
    assert adapter.steps == (nonfinite == "apply")
    # The strategy goes on, with nothing of the bad step left in the gradients.
    for value in adapter.values:
        value[...] = 0
    assert strategy.step([batch(comm.rank, 1)]).applied
    for value, gradient in zip(adapter.values, average(comm.world_size, 1), strict=True):
        np.testing.assert_array_equal(value, -gradient)


def test_no_data_anywhere_steps_no_optimizer(attached):
    adapter, strategy = attached()
    report = strategy.step([(0.0, [])])
    assert report.result.weight == 0
    assert adapter.steps == 0


def test_a_step_of_no_batches_serves_the_others(comm, attached):
    adapter, strategy = attached()
    for salt in range(2):
        for value in adapter.values:
            value[...] = 0
        strategy.step([batch(0, salt)] if comm.rank == 0 else [])
        for value, gradient in zip(adapter.values, batch(0, salt)[1], strict=True):
            np.testing.assert_array_equal(value, -gradient)


def test_stop_is_heard_by_all(comm, attached):
    _, strategy = attached()
    assert not strategy.step([batch(comm.rank)]).stop
    assert strategy.step([batch(comm.rank)], stop=comm.rank == comm.world_size - 1).stop


@pytest.mark.parametrize("compression", ["float16", "bfloat16"])
def test_state_restores_the_residuals(comm, attached, compression):
    first, strategy = attached(compression=compression)
    strategy.step([batch(comm.rank)])
    second, other = attached(compression=compression)
    other.step([batch(comm.rank, 5)])  # has agreed on a scale, and has residuals of its own
    other.load_state_dict(strategy.state_dict())
    for theirs, mine in zip(second.values, first.values, strict=True):
        theirs[...] = mine
    strategy.step([batch(comm.rank, 1)])
    other.step([batch(comm.rank, 1)])
    for theirs, mine in zip(second.values, first.values, strict=True):
        np.testing.assert_array_equal(theirs, mine)


def test_no_codec_no_state(attached):
    assert not attached()[1].state_dict()


@pytest.mark.parametrize("compression", [None, "float16"])
def test_attach_again_after_close(comm, compression):
    strategy = Synchronous(compression=compression)
    for _ in range(2):
        adapter = Known()
        strategy.attach(adapter, comm)
        assert strategy.step([batch(comm.rank)]).applied
        strategy.close()
        strategy.close()
        assert adapter.views is None
        assert adapter.callback is None
    with pytest.raises(MpidpError, match="not attached"):
        strategy.step([batch(comm.rank)])


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.0}, {"clip_norm": math.nan}, {"clip_value": -1}, {"nonfinite": "ignore"}],
)
def test_bad_options(options):
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        Synchronous(**options)
