"""The reducer without a framework: launch order, weights, accumulation, unused leaves, the tail."""

import numpy as np
import pytest

from mpidp.errors import MismatchError, MpidpError
from mpidp.reducer import Reducer
from mpidp.training.adapter import BatchResult, Leaf

pytestmark = pytest.mark.mpi

LEAVES = [
    Leaf("embedding", (40, 7), "float64"),
    Leaf("scale", (), "float64"),
    Leaf("weight", (33,), "float32"),
    Leaf("empty", (0, 3), "float64"),
    Leaf("bias", (5,), "float64"),
]
SMALL = {"bucket_bytes": 256, "first_bucket_bytes": 64}


def gradient(rank, leaf, salt=0):
    """Of one rank: small whole numbers, so that sums are exact in any order and dtype."""
    generator = np.random.default_rng([rank, leaf, salt])
    shape, dtype = LEAVES[leaf].shape, LEAVES[leaf].dtype
    return np.asarray(generator.integers(-50, 50, shape)).astype(dtype)


def backward(reducer, rank, order, salt=0, *, synchronize=True):
    reducer.begin(synchronize=synchronize)
    for leaf in order:
        reducer.gradient_views[leaf][...] += gradient(rank, leaf, salt)
        reducer.mark_ready(leaf)


def check(reducer, world_size, weight, uses=lambda rank, leaf: True, salts=(0,)):
    """The views hold sum / weight, and all ranks hold the same bits."""
    for leaf, view in enumerate(reducer.gradient_views):
        total = sum(
            (gradient(r, leaf, salt) for r in range(world_size) for salt in salts if uses(r, leaf)),
            np.zeros(LEAVES[leaf].shape, LEAVES[leaf].dtype),
        )
        np.testing.assert_array_equal(view, total / view.dtype.type(weight))


def bits(reducer):
    return b"".join(view.tobytes() for view in reducer.gradient_views)


@pytest.mark.parametrize("wiring", ["memory", "nodes", "messages"])
def test_ranks_may_complete_gradients_in_different_orders(communicators, wiring):
    comm = communicators(wiring)
    reducer = Reducer(comm, LEAVES, **SMALL)
    for step in range(4):
        reducer.zero()
        order = np.random.default_rng([comm.rank, step]).permutation(len(LEAVES))
        backward(reducer, comm.rank, order, step)
        reduced = reducer.finish(BatchResult(comm.rank + 1.0, 2.0, {"correct": 1.0}))
        weight = comm.world_size * (comm.world_size + 1) / 2
        assert reduced.result == BatchResult(
            weight, 2.0 * comm.world_size, {"correct": comm.world_size}
        )
        assert reduced.used.all()
        assert not reduced.stop
        check(reducer, comm.world_size, weight, salts=(step,))
        assert len(set(comm.all_gather_object(bits(reducer)))) == 1


def test_leaves_used_nowhere_or_on_one_rank_only(comm):
    reducer = Reducer(comm, LEAVES, **SMALL)
    last = comm.world_size - 1

    def uses(rank, leaf):
        return leaf != 0 and (leaf != 2 or rank == last)

    for step in range(3):
        reducer.zero()
        backward(reducer, comm.rank, [i for i in (4, 3, 2, 1, 0) if uses(comm.rank, i)], step)
        reduced = reducer.finish(BatchResult(1.0))
        check(reducer, comm.world_size, comm.world_size, uses, salts=(step,))
        assert reduced.used.tolist() == [False, True, True, True, True]


def test_ranks_without_data_keep_serving(comm):
    reducer = Reducer(comm, LEAVES, **SMALL)
    for step in range(3):
        source = step % comm.world_size  # in the first step too, where names are agreed
        reducer.zero()
        if comm.rank == source:
            backward(reducer, comm.rank, [4, 3, 2, 1, 0], step)
            reduced = reducer.finish(BatchResult(8.0, 3.0, {"correct": 5.0}))
        else:
            reducer.begin()
            reduced = reducer.finish(BatchResult())
        assert reduced.result == BatchResult(8.0, 3.0, {"correct": 5.0})
        check(reducer, comm.world_size, 8.0, lambda rank, _, s=source: rank == s, salts=(step,))


def test_a_step_without_any_data_leaves_zeros(comm):
    reducer = Reducer(comm, LEAVES, **SMALL)
    for _ in range(2):
        reducer.zero()
        reducer.begin()
        reduced = reducer.finish(BatchResult())
        assert reduced.result.weight == 0
        assert not reduced.used.any()
        assert reducer.squared_norm() == 0
    reducer.zero()
    backward(reducer, comm.rank, [4, 3, 2, 1, 0])
    reducer.finish(BatchResult(1.0))
    check(reducer, comm.world_size, comm.world_size)


def test_micro_batches_add_up_and_launch_nothing_early(comm):
    reducer = Reducer(comm, LEAVES, **SMALL)
    for step in range(2):
        reducer.zero()
        backward(reducer, comm.rank, [4, 3, 2, 1, 0], 2 * step, synchronize=False)
        np.testing.assert_array_equal(reducer.gradient_views[0], gradient(comm.rank, 0, 2 * step))
        backward(reducer, comm.rank, [0, 1, 2, 3, 4], 2 * step + 1)
        reducer.finish(BatchResult(2.0))
        check(reducer, comm.world_size, 2.0 * comm.world_size, salts=(2 * step, 2 * step + 1))


def test_a_leaf_of_an_earlier_micro_batch_alone_counts(comm):
    reducer = Reducer(comm, LEAVES, **SMALL)
    reducer.zero()
    backward(reducer, comm.rank, [4, 3, 2, 1, 0], synchronize=False)
    reducer.begin()  # an empty last micro-batch
    reduced = reducer.finish(BatchResult(2.0))
    assert reduced.used.all()
    check(reducer, comm.world_size, 2.0 * comm.world_size)


def test_one_rebuild_by_the_order_rank_0_saw(comm):
    reducer = Reducer(comm, LEAVES, bucket_bytes=64, first_bucket_bytes=64)
    order = [1, 0, 4, 2, 3]
    generations = []
    for step in range(4):
        reducer.zero()
        generations.append(reducer.generation)
        backward(reducer, comm.rank, order if comm.rank == 0 else order[::-1], step)
        reducer.finish(BatchResult(1.0))
        check(reducer, comm.world_size, comm.world_size, salts=(step,))
    assert generations == [1, 2, 2, 2]
    launched = [slot.leaf for bucket in reducer.plan.buckets for slot in bucket.slots]
    of_dtype = [leaf for leaf in order if LEAVES[leaf].dtype == "float64"]
    assert [leaf for leaf in launched if leaf in of_dtype] == of_dtype
    assert len(set(comm.all_gather_object(reducer.plan))) == 1


def test_equal_weights_is_the_mean_over_ranks(comm):
    reducer = Reducer(comm, LEAVES, equal_weights=True, **SMALL)
    for step in range(2):
        reducer.zero()
        backward(reducer, comm.rank, [4, 3, 2, 1, 0], step)
        reducer.finish(BatchResult(comm.rank * 100.0 + 1))
        for leaf, view in enumerate(reducer.gradient_views):
            total = sum(gradient(r, leaf, step) for r in range(comm.world_size))
            np.testing.assert_allclose(view, total / comm.world_size, rtol=1e-6)


def test_counts_are_exact_and_new_metrics_appear_late(comm):
    reducer = Reducer(comm, LEAVES[2:3])  # a float32 bucket could not hold these counts
    large = 2.0**40 + 1
    for metrics in ({}, {"a": 1.0}, {"a": large, **({"b": 2.0} if comm.rank == 0 else {})}, {}):
        reducer.zero()
        reducer.begin()
        reduced = reducer.finish(BatchResult(large, -large, metrics))
        assert reduced.result.weight == large * comm.world_size
        assert reduced.result.loss == -large * comm.world_size
        for name, value in metrics.items():
            times = 1 if name == "b" else comm.world_size
            assert reduced.result.metrics[name] == value * times


def test_one_rank_asking_to_stop_is_heard_by_all(comm):
    reducer = Reducer(comm, LEAVES)
    for step in range(3):
        reducer.zero()
        reducer.begin()
        stop = step == 1 and comm.rank == comm.world_size - 1
        assert reducer.finish(BatchResult(1.0), stop=stop).stop == (step == 1)


def test_squared_norm_is_of_the_average_and_shows_a_nan(comm):
    reducer = Reducer(comm, LEAVES, **SMALL)
    reducer.zero()
    backward(reducer, comm.rank, [4, 3, 2, 1, 0])
    reducer.finish(BatchResult(1.0))
    expected = sum(float(np.sum(v.astype(np.float64) ** 2)) for v in reducer.gradient_views)
    assert reducer.squared_norm() == pytest.approx(expected, rel=1e-13)
    assert len(set(comm.all_gather_object(reducer.squared_norm()))) == 1
    reducer.zero()
    backward(reducer, comm.rank, [4, 3, 2])
    if comm.rank == comm.world_size - 1:
        reducer.gradient_views[0][3, 3] = np.nan
    reducer.finish(BatchResult(1.0))
    assert np.isnan(reducer.squared_norm())


def test_two_gradients_in_one_backward_are_refused(comm):
    reducer = Reducer(comm, LEAVES)
    reducer.zero()
    reducer.begin()
    reducer.mark_ready(1)
    with pytest.raises(MpidpError, match="scale got two gradients"):
        reducer.mark_ready(1)


def test_a_step_after_an_abandoned_one_is_right(comm):
    """A backward that failed on all ranks, after some buckets went off, leaves nothing behind."""
    reducer = Reducer(comm, LEAVES, **SMALL)
    for step in range(3):
        reducer.zero()
        backward(reducer, comm.rank, [4, 3, 2], 10 + step)  # and then an exception, caught outside
        reducer.zero()
        backward(reducer, comm.rank, [4, 3, 2, 1, 0], step)
        reduced = reducer.finish(BatchResult(1.0))
        assert reduced.used.all()
        check(reducer, comm.world_size, comm.world_size, salts=(step,))


def test_models_that_differ_are_refused_on_all_ranks(comm):
    if comm.world_size == 1:
        Reducer(comm, LEAVES)  # alone there is nothing to differ from
        return
    odd = comm.world_size - 1
    mine = [*LEAVES[:-1], Leaf("bias", (6,), "float64")] if comm.rank == odd else LEAVES
    with pytest.raises(MismatchError, match=rf"rank {odd}: 5 parameters.*bias float64\[6\]"):
        Reducer(comm, mine)
    Reducer(comm, LEAVES)  # the communicator still works
