"""The sampler: every sample once, the same global order for any number of ranks, exact resume."""

import numpy as np
import pytest

from mpidp.errors import InvalidArgumentError
from mpidp.training.sampler import GlobalBatchSampler


def samplers(world_size, num_samples=103, batch_size=16, **options):
    return [
        GlobalBatchSampler(num_samples, batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def global_batches(world_size, **options):
    """The epoch's global batches, put together from all ranks' parts."""
    epochs = [list(sampler) for sampler in samplers(world_size, **options)]
    assert len({len(epoch) for epoch in epochs}) == 1
    return [np.concatenate(parts) for parts in zip(*epochs, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_exactly_once(world_size, shuffle):
    everything = np.concatenate(global_batches(world_size, shuffle=shuffle))
    assert sorted(everything) == list(range(103))


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 40])
def test_order_does_not_depend_on_the_number_of_ranks(world_size):
    for mine, reference in zip(global_batches(world_size), global_batches(1), strict=True):
        np.testing.assert_array_equal(mine, reference)


def test_parts_differ_by_one_sample_at_most():
    for parts in zip(*samplers(5), strict=True):
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_epochs_advance_by_themselves_and_differ():
    (sampler,) = samplers(1)
    first, second = np.concatenate(list(sampler)), np.concatenate(list(sampler))
    assert sampler.epoch == 2
    assert not np.array_equal(first, second)
    assert sorted(first) == sorted(second)


def test_seeds_differ():
    assert not np.array_equal(global_batches(1, seed=1)[0], global_batches(1, seed=2)[0])


def test_drop_last_leaves_out_only_the_last_batch():
    kept = global_batches(3, drop_last=True)
    assert [len(batch) for batch in kept] == [16] * 6


@pytest.mark.parametrize("position", [0, 1, 4, 6])
@pytest.mark.parametrize("other_world_size", [1, 2, 7])
def test_resume_in_the_middle_of_an_epoch_on_other_ranks(position, other_world_size):
    (sampler,) = samplers(1)
    list(sampler)  # stop in the second epoch
    running = iter(sampler)
    for _ in range(position):
        next(running)
    state = sampler.state_dict()
    expected = list(running)
    resumed = samplers(other_world_size)
    for one in resumed:
        one.load_state_dict(state)
        assert one.batches_left == 7 - position
    parts = zip(*resumed, strict=True)
    for reference, found in zip(expected, parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(found), reference)


def test_state_is_small_and_refuses_other_data():
    (sampler,) = samplers(1)
    assert all(isinstance(value, int) for value in sampler.state_dict().values())
    other = GlobalBatchSampler(104, 16, rank=0, world_size=1)
    with pytest.raises(InvalidArgumentError, match="num_samples is 104, was 103"):
        other.load_state_dict(sampler.state_dict())


def test_no_samples_and_fewer_samples_than_ranks():
    assert list(GlobalBatchSampler(0, 4, rank=0, world_size=1)) == []
    parts = [next(iter(s)) for s in samplers(5, num_samples=2, batch_size=2)]
    assert [len(part) for part in parts] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "bad", [{"num_samples": -1}, {"batch_size": 0}, {"rank": 2}, {"rank": -1}, {"seed": -1}]
)
def test_bad_arguments(bad):
    arguments = {"num_samples": 4, "batch_size": 2, "rank": 0, "world_size": 2, **bad}
    with pytest.raises(InvalidArgumentError):
        GlobalBatchSampler(arguments.pop("num_samples"), arguments.pop("batch_size"), **arguments)
