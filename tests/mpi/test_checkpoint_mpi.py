"""Checkpoints of several ranks: each gets its own part back, and all hear of a failure."""

import shutil

import numpy as np
import pytest

from mpidp.training import checkpoint
from mpidp.training.adapter import BatchResult
from mpidp.training.checkpoint import CheckpointError
from mpidp.training.metrics import reduce_result

pytest.importorskip("safetensors")


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    shared = comm.broadcast_object(str(tmp_path))
    yield shared
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(shared, ignore_errors=True)


def test_each_rank_gets_rank_0s_arrays_and_its_own_part(comm, folder):
    mine = {"residual": np.full(comm.rank, comm.rank + 0.5), "scalar": np.array(comm.rank)}
    checkpoint.save(comm, folder, {"w": np.full(3, comm.rank)}, {"a": comm.rank}, per_rank=mine)
    loaded = checkpoint.load(comm, folder)
    np.testing.assert_array_equal(loaded.arrays["w"], np.zeros(3))
    assert loaded.meta == {"a": 0, "world_size": comm.world_size}
    assert loaded.per_rank.keys() == mine.keys()
    for name, value in mine.items():
        assert loaded.per_rank[name].shape == value.shape
        np.testing.assert_array_equal(loaded.per_rank[name], value)


def test_parts_of_some_ranks_only(comm, folder):
    last = comm.world_size - 1
    part = {"x": np.ones(2)} if comm.rank == last else None
    checkpoint.save(comm, folder, {}, {}, per_rank=part)
    assert list(checkpoint.load(comm, folder).per_rank) == (["x"] if comm.rank == last else [])


@pytest.mark.parametrize("bad", [np.ones(2, np.complex128), np.array(["a"])])
def test_all_ranks_hear_that_an_array_cannot_be_written(comm, folder, bad):
    with pytest.raises(CheckpointError, match="cannot write"):
        checkpoint.save(comm, folder, {"bad": bad}, {})
    checkpoint.save(comm, folder, {"good": np.ones(1)}, {})  # the communicator still works


def test_all_ranks_hear_of_an_unforeseen_fault_in_reading(comm, folder, monkeypatch):
    def fail(directory):
        raise KeyError("unforeseen")

    monkeypatch.setattr(checkpoint, "_newest_whole", fail)
    with pytest.raises(CheckpointError, match="unforeseen"):
        checkpoint.load(comm, folder)


def test_all_ranks_hear_of_an_empty_folder(comm, folder):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.load(comm, folder)


def test_results_are_summed_over_ranks(comm):
    mine = BatchResult(comm.rank, 0.5, {"correct": 2.0} if comm.rank == 0 else {})
    total = reduce_result(comm, mine)
    assert total.weight == sum(range(comm.world_size))
    assert total.loss == 0.5 * comm.world_size
    assert total.metrics == {"correct": 2.0}
