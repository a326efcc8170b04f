"""Checkpoints: whole or refused, the previous good one kept, nothing executed on load."""

import numpy as np
import pytest
from mpi4py import MPI

import mpidp
from mpidp.training import checkpoint
from mpidp.training.checkpoint import CheckpointError

pytest.importorskip("safetensors")

ARRAYS = {
    "weight": np.arange(12.0).reshape(3, 4),
    "steps": np.array([3], dtype=np.int64),
    "none": np.zeros((0, 2), dtype=np.float32),
    "scalar": np.array(5, dtype=np.int64),
    "transposed": np.arange(6.0).reshape(2, 3).T,
}


@pytest.fixture(scope="module")
def comm():
    with mpidp.Communicator(MPI.COMM_SELF) as communicator:
        yield communicator


def test_round_trip_is_bitwise(comm, tmp_path):
    residuals = {"residual": np.array([np.nextafter(0, 1), -0.0, np.inf])}
    path = checkpoint.save(
        comm, tmp_path, ARRAYS, {"epoch": 2, "name": "x"}, per_rank=residuals, step=7
    )
    assert path.name == "step-0000000007.safetensors"
    loaded = checkpoint.load(comm, tmp_path)
    assert loaded.path == path
    assert loaded.meta == {"epoch": 2, "name": "x", "world_size": 1}
    assert loaded.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded.arrays[name].dtype == array.dtype
        assert loaded.arrays[name].shape == array.shape
        assert loaded.arrays[name].tobytes() == array.tobytes()
    assert loaded.per_rank["residual"].tobytes() == residuals["residual"].tobytes()


def test_only_the_newest_are_kept(comm, tmp_path):
    for step in (1, 2, 3, 10):
        checkpoint.save(comm, tmp_path, ARRAYS, {}, step=step, keep=2)
    assert [path.name for path in checkpoint.files(tmp_path)] == [
        "step-0000000010.safetensors",
        "step-0000000003.safetensors",
    ]


@pytest.mark.parametrize("kept_bytes", [0, 1, 7, 100, -1])
def test_a_truncated_file_is_passed_over(comm, tmp_path, kept_bytes):
    checkpoint.save(comm, tmp_path, {"weight": np.zeros(2)}, {"epoch": 1}, step=1)
    newest = checkpoint.save(comm, tmp_path, ARRAYS, {"epoch": 2}, step=2)
    newest.write_bytes(newest.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=newest.name):
        checkpoint.read(newest)
    assert checkpoint.load(comm, tmp_path).meta["epoch"] == 1


def test_one_flipped_bit_is_found(comm, tmp_path):
    path = checkpoint.save(comm, tmp_path, ARRAYS, {}, step=1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.load(comm, tmp_path)


def test_a_foreign_file_is_refused(comm, tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3)}, tmp_path / "step-0000000001.safetensors")
    with pytest.raises(CheckpointError, match="no mpidp checkpoint"):
        checkpoint.load(comm, tmp_path)


def test_an_empty_or_missing_folder_says_so(comm, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.load(comm, tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.load(comm, tmp_path / "missing")


def test_a_failed_write_keeps_the_previous_one(comm, tmp_path, monkeypatch):
    checkpoint.save(comm, tmp_path, ARRAYS, {"epoch": 1}, step=1)

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.save(comm, tmp_path, ARRAYS, {"epoch": 2}, step=2)
    monkeypatch.undo()
    assert checkpoint.load(comm, tmp_path).meta["epoch"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001.safetensors"]


def test_remains_of_a_killed_write_are_cleared(comm, tmp_path):
    stray = tmp_path / ".step-0000000001.safetensors.4711.tmp"
    stray.write_bytes(b"half")
    checkpoint.save(comm, tmp_path, ARRAYS, {}, step=2)
    assert not stray.exists()


def test_metadata_must_be_json(comm, tmp_path):
    with pytest.raises(CheckpointError, match="cannot write"):
        checkpoint.save(comm, tmp_path, ARRAYS, {"bad": object()})


def test_bytes_of_another_order_keep_their_values(comm, tmp_path):
    checkpoint.save(comm, tmp_path, {"x": np.array([1.5, -2.0], dtype=">f8")}, {})
    np.testing.assert_array_equal(checkpoint.load(comm, tmp_path).arrays["x"], [1.5, -2.0])


@pytest.mark.parametrize("bad", [np.ones(2, np.complex128), np.array(["a"]), np.array([None])])
def test_arrays_that_the_format_lacks_are_refused(comm, tmp_path, bad):
    with pytest.raises(CheckpointError, match="cannot write"):
        checkpoint.save(comm, tmp_path, {"bad": bad}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2])
def test_a_new_run_in_a_used_folder_keeps_its_own_files(comm, tmp_path, keep):
    for step in (99, 100):
        checkpoint.save(comm, tmp_path, ARRAYS, {"run": "old"}, step=step)
    path = checkpoint.save(comm, tmp_path, ARRAYS, {"run": "new"}, step=1, keep=keep)
    assert checkpoint.files(tmp_path) == [path]
    assert checkpoint.load(comm, tmp_path).meta["run"] == "new"
    aside = tmp_path / "step-0000000100.safetensors.superseded"
    assert checkpoint.read(aside)[1]["run"] == "old"


def test_a_run_resumed_before_a_damaged_file_keeps_what_it_writes(comm, tmp_path):
    checkpoint.save(comm, tmp_path, ARRAYS, {"epoch": 1}, step=1)
    damaged = checkpoint.save(comm, tmp_path, ARRAYS, {"epoch": 5}, step=5)
    damaged.write_bytes(b"half")
    assert checkpoint.load(comm, tmp_path).meta["epoch"] == 1
    path = checkpoint.save(comm, tmp_path, ARRAYS, {"epoch": 2}, step=2, keep=1)
    assert checkpoint.load(comm, tmp_path).path == path
