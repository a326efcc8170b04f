"""What every adapter owes: P ranks train exactly as one process on the whole batch."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from kits import CLASSES, INPUTS, OPTIMIZERS

import mpidp
from mpidp.strategies import Synchronous
from mpidp.training.adapter import BatchResult, broadcast_state

RTOL = {"float64": 1e-12, "float32": 1e-5}
STEPS = 5


def samples(count, dtype, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, INPUTS)).astype(dtype)
    return x, generator.integers(0, CLASSES, size=count)


def cut(count, world_size, how, seed):
    """Bounds of the ranks' parts of `count` samples."""
    if how == "even":
        return [count * rank // world_size for rank in range(world_size + 1)]
    if how == "last_rank_has_all":
        return [0] * world_size + [count]
    generator = np.random.default_rng(seed)  # uneven, some parts empty
    return [0, *sorted(generator.integers(0, count + 1, world_size - 1)), count]


def weights(adapter):
    return [np.array(adapter.read_leaf(i)) for i in range(len(adapter.leaves()))]


def assert_same_weights(mine, reference, dtype):
    scale = max(np.abs(value).max() for value in reference)
    for value, expected in zip(mine, reference, strict=True):
        np.testing.assert_allclose(value, expected, rtol=RTOL[dtype], atol=RTOL[dtype] * scale)


def digest(adapter):
    state = hashlib.sha256()
    for value in weights(adapter):
        state.update(np.ascontiguousarray(value).tobytes())
    return state.hexdigest()


def run(
    kit,
    comm,
    *,
    optimizer="momentum",
    dtype="float64",
    how="even",
    accumulate=1,
    seed=0,
    wrap=lambda adapter: adapter,
    each_step=lambda adapter: None,
    **strategy_options,
):
    """STEPS steps on `comm`; returns the weights and the step reports."""
    adapter = wrap(kit.adapter(optimizer, dtype))
    strategy = Synchronous(bucket_bytes=256, first_bucket_bytes=64, **strategy_options)
    strategy.attach(adapter, comm)
    reports = []
    for step in range(STEPS):
        micro_batches = []
        for part in range(accumulate):
            # Sizes differ by step and part, as sequences of tokens do.
            count = 7 + 3 * step + 5 * part
            x, y = samples(count, dtype, seed=100 * step + part)
            bounds = cut(count, comm.world_size, how, seed=seed + 10 * step + part)
            mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
            micro_batches.append(kit.batch(x[mine], y[mine]))
        reports.append(strategy.step(micro_batches))
        each_step(adapter)
    result = weights(adapter)
    strategy.close()
    return result, reports


@pytest.mark.parametrize("how", ["even", "uneven", "last_rank_has_all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ranks_equal_one_process(kit, comm, alone, dtype, optimizer, how):
    mine, reports = run(kit, comm, dtype=dtype, optimizer=optimizer, how=how)
    expected, expected_reports = run(kit, alone, dtype=dtype, optimizer=optimizer)
    assert_same_weights(mine, expected, dtype)
    for report, reference in zip(reports, expected_reports, strict=True):
        assert report.result.weight == reference.result.weight
        assert report.result.metrics == reference.result.metrics
        np.testing.assert_allclose(report.result.loss, reference.result.loss, rtol=RTOL[dtype])
        np.testing.assert_allclose(report.gradient_norm, reference.gradient_norm, rtol=RTOL[dtype])


@pytest.mark.parametrize("how", ["even", "uneven"])
def test_accumulation_weighs_every_sample_alike(kit, comm, alone, how):
    mine, _ = run(kit, comm, how=how, accumulate=3)
    expected, _ = run(kit, alone, accumulate=3)
    assert_same_weights(mine, expected, "float64")


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"clip_value": 0.05}])
def test_clipping_equals_one_process(kit, comm, alone, options):
    mine, reports = run(kit, comm, how="uneven", **options)
    expected, _ = run(kit, alone, **options)
    unclipped, _ = run(kit, alone)
    assert reports[0].gradient_norm > 0.1
    assert_same_weights(mine, expected, "float64")
    assert not np.allclose(expected[0], unclipped[0])


class Shuffled:
    """Reports gradients after the backward, in an order that differs by rank and step."""

    def __init__(self, adapter, rank):
        self._adapter = adapter
        self._random = np.random.default_rng(rank)
        self._callback = None

    def __getattr__(self, name):
        return getattr(self._adapter, name)

    def on_gradient_ready(self, callback):
        self._callback = callback

    def compute_gradients(self, batch):
        ready = []
        self._adapter.on_gradient_ready(ready.append)
        result = self._adapter.compute_gradients(batch)
        self._random.shuffle(ready)
        for leaf in ready:
            self._callback(leaf)
        return result


def test_hooks_may_fire_in_any_order(kit, comm, alone):
    mine, _ = run(kit, comm, how="uneven", wrap=lambda adapter: Shuffled(adapter, comm.rank))
    expected, _ = run(kit, alone)
    assert_same_weights(mine, expected, "float64")


@pytest.mark.parametrize("compression", [None, *mpidp.reducer.compression.NAMES])
def test_replicas_stay_bit_identical(kit, comm, compression):
    def check(adapter):
        assert len(set(comm.all_gather_object(digest(adapter)))) == 1

    run(kit, comm, how="uneven", dtype="float32", each_step=check, compression=compression)


@pytest.mark.parametrize("compression", mpidp.reducer.compression.NAMES)
def test_compressed_training_stays_near(kit, comm, alone, compression):
    mine, reports = run(kit, comm, dtype="float32", optimizer="sgd", compression=compression)
    expected, plain = run(kit, alone, dtype="float32", optimizer="sgd")
    # One unit in the last place of the codec per step, of gradients of the order of one.
    resolution = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(compression, 0.1)
    for value, reference in zip(mine, expected, strict=True):
        assert np.abs(value - reference).max() < STEPS * 0.1 * 2 * resolution
    assert reports[0].wire_bytes < plain[0].wire_bytes


class Poisoned:
    """Adds a NaN to one rank's first gradient in one step."""

    def __init__(self, adapter, poisons):
        self._adapter = adapter
        self._poisons = poisons
        self._calls = 0
        self._views = None

    def __getattr__(self, name):
        return getattr(self._adapter, name)

    def bind_gradients(self, views):
        self._views = views
        self._adapter.bind_gradients(views)

    def compute_gradients(self, batch):
        if self._poisons and self._calls == 2:
            self._views[0].reshape(-1)[:1] = float("nan")
        self._calls += 1
        return self._adapter.compute_gradients(batch)


@pytest.mark.parametrize("compression", [None, "float16"])
def test_nan_on_one_rank_skips_the_step_on_all(kit, comm, compression):
    def wrap(adapter):
        return Poisoned(adapter, comm.rank == comm.world_size - 1)

    mine, reports = run(kit, comm, dtype="float32", wrap=wrap, compression=compression)
    assert [report.applied for report in reports] == [True, True, False, True, True]
    assert all(np.isfinite(value).all() for value in mine)


def test_nan_raises_on_all_where_asked(kit, comm):
    with pytest.raises(mpidp.MpidpError, match="not finite"):
        run(kit, comm, wrap=lambda a: Poisoned(a, comm.rank == 0), nonfinite="raise")


def test_nan_is_applied_where_asked(kit, comm):
    mine, _ = run(kit, comm, wrap=lambda a: Poisoned(a, comm.rank == 0), nonfinite="apply")
    assert np.isnan(mine[0]).any()


def test_an_error_in_a_backward_reaches_the_caller(kit, comm, alone):
    class Failing(Shuffled):
        def compute_gradients(self, batch):
            self._callback = lambda leaf: 1 / 0
            return super().compute_gradients(batch)

    with pytest.raises(ZeroDivisionError):
        run(kit, alone, wrap=lambda adapter: Failing(adapter, 0))


def test_replicas_start_equal(kit, comm):
    adapter = kit.adapter("momentum", "float64")
    for index in range(len(adapter.leaves())):
        adapter.write_leaf(index, adapter.read_leaf(index) + float(comm.rank))
    broadcast_state(adapter, comm, root=comm.world_size - 1)
    assert len(set(comm.all_gather_object(digest(adapter)))) == 1
    reference = kit.adapter("momentum", "float64").read_leaf(0) + (comm.world_size - 1)
    np.testing.assert_array_equal(adapter.read_leaf(0), reference)


def test_models_that_differ_are_refused_with_a_table(kit, comm):
    if comm.world_size == 1:
        return
    adapter = kit.adapter("sgd", "float32" if comm.rank == 1 else "float64")
    with pytest.raises(mpidp.MismatchError, match="rank 1: 4 parameters") as caught:
        Synchronous().attach(adapter, comm)
    assert caught.value.ranks == [1]


def test_state_round_trip_is_bitwise(kit, alone):
    one, two = kit.adapter("adam", "float32"), kit.adapter("adam", "float32")
    strategies = []
    for adapter in (one, two):
        strategies.append(Synchronous())
        strategies[-1].attach(adapter, alone)
    strategies[0].step([kit.batch(*samples(9, "float32"))])
    two.load_state_dict(one.state_dict())
    for strategy in strategies:
        strategy.step([kit.batch(*samples(11, "float32", seed=5))])
    assert digest(one) == digest(two)


def test_an_empty_batch_changes_nothing(kit, comm):
    adapter = kit.adapter("momentum", "float64")
    strategy = Synchronous()
    strategy.attach(adapter, comm)
    before = digest(adapter)
    report = strategy.step([kit.batch(*samples(0, "float64"))])
    assert report.result == BatchResult()
    assert digest(adapter) == before
