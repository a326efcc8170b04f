"""The trainer: reports that do not depend on the number of ranks, early stop, exact resume."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest
from test_conformance import assert_same_weights, digest, samples, weights

import mpidp
from mpidp.strategies import Synchronous


class Data:
    """Samples by number; `on_batch` is told before each batch."""

    def __init__(self, kit, count, on_batch=lambda: None):
        self._kit = kit
        self._x, self._y = samples(count, "float64", seed=9)
        self._on_batch = on_batch

    def __len__(self):
        return len(self._y)

    def __getitem__(self, indices):
        self._on_batch()
        return self._kit.batch(self._x[indices], self._y[indices])


def train(kit, comm, *, epochs=3, on_batch=lambda trainer: None, compression=None, **options):
    adapter = kit.adapter("momentum", "float64")
    trainer = mpidp.Trainer(adapter, comm, Synchronous(compression=compression))
    data = Data(kit, 53, lambda: on_batch(trainer))
    report = trainer.fit(data, 8, epochs, progress=False, **options)
    return adapter, report


@pytest.fixture
def shared_folder(comm, tmp_path):
    """One folder for all ranks."""
    folder = comm.broadcast_object(str(tmp_path))
    yield folder
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def test_reports_and_weights_equal_one_process(kit, comm, alone):
    test = Data(kit, 31)
    mine, report = train(kit, comm, test=test)
    reference, expected = train(kit, alone, test=test)
    assert_same_weights(weights(mine), weights(reference), "float64")
    for epoch, other in zip(report.epochs, expected.epochs, strict=True):
        assert epoch.samples == other.samples == 53
        assert epoch.steps == other.steps == 7
        assert epoch.metrics == other.metrics
        assert epoch.test_metrics == other.test_metrics
        np.testing.assert_allclose(epoch.loss, other.loss, rtol=1e-12)
        np.testing.assert_allclose(epoch.test_loss, other.test_loss, rtol=1e-12)


def test_schedule_sets_the_rate_of_each_step(kit, comm, alone):
    mine, _ = train(kit, comm, schedule=lambda step: 0.1 / (1 + step))
    reference, _ = train(kit, alone, schedule=lambda step: 0.1 / (1 + step))
    constant, _ = train(kit, alone)
    assert_same_weights(weights(mine), weights(reference), "float64")
    assert digest(reference) != digest(constant)


def test_one_rank_asking_to_stop_stops_all(kit, comm):
    calls = []

    def stop_in_second_epoch(trainer):
        calls.append(1)
        if comm.rank == comm.world_size - 1 and len(calls) == 9:
            trainer.stop()

    _, report = train(kit, comm, on_batch=stop_in_second_epoch)
    assert report.stopped
    assert len(report.epochs) == 1
    assert len(set(comm.all_gather_object(len(calls)))) == 1


def test_patience_and_callbacks_stop_all(kit, comm):
    _, report = train(
        kit, comm, epochs=50, callbacks=[lambda trainer, epoch: comm.rank == 0 and epoch.epoch == 1]
    )
    assert report.stopped
    assert len(report.epochs) == 2
    _, report = train(
        kit, comm, epochs=500, patience=2, test=Data(kit, 5), schedule=lambda step: 1.0
    )
    assert report.stopped


@pytest.mark.parametrize("compression", [None, "bfloat16"])
def test_resume_in_the_middle_of_an_epoch_is_bitwise(kit, comm, shared_folder, compression):
    calls = []

    def stop(trainer):
        calls.append(1)
        if len(calls) == 10:
            trainer.stop()

    whole, _ = train(kit, comm, compression=compression)
    train(kit, comm, compression=compression, on_batch=stop, checkpoint_dir=shared_folder)
    resumed, report = train(
        kit, comm, compression=compression, checkpoint_dir=shared_folder, resume=True
    )
    assert digest(resumed) == digest(whole)
    assert [epoch.epoch for epoch in report.epochs] == [0, 1, 2]


def test_resume_on_another_number_of_ranks(kit, comm, alone, shared_folder):
    calls = []

    def stop(trainer):
        calls.append(1)
        if len(calls) == 10:
            trainer.stop()

    train(kit, comm, on_batch=stop, checkpoint_dir=shared_folder)
    own = f"{shared_folder}-{comm.rank}"
    shutil.copytree(shared_folder, own)
    try:
        resumed, _ = train(kit, alone, checkpoint_dir=own, resume=True)
    finally:
        shutil.rmtree(own)
    whole, _ = train(kit, alone)
    assert_same_weights(weights(resumed), weights(whole), "float64")


def test_a_warning_signal_saves_and_stops(kit, comm, shared_folder):
    calls = []

    def warn(trainer):
        calls.append(1)
        if comm.rank == 0 and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGUSR1)

    _, report = train(kit, comm, on_batch=warn, checkpoint_dir=shared_folder)
    assert report.stopped
    resumed, report = train(kit, comm, checkpoint_dir=shared_folder, resume=True)
    whole, _ = train(kit, comm)
    assert digest(resumed) == digest(whole)


def test_log_has_one_line_an_epoch(kit, comm, shared_folder):
    log = f"{shared_folder}/log.jsonl"
    train(kit, comm, epochs=2, log=log)
    if comm.rank == 0:
        with open(log, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        assert [line["epoch"] for line in lines] == [0, 1]
        assert lines[0]["samples"] == 53


@pytest.mark.parametrize("bad", [{"epochs": -1}, {"accumulate": 0}, {"resume": True}])
def test_bad_arguments(kit, alone, bad):
    with pytest.raises(mpidp.InvalidArgumentError):
        train(kit, alone, **bad)
