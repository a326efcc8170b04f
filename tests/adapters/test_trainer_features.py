"""What the trainer does besides the steps: limits, callbacks, logs, checkpoints, early stop."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
from test_conformance import digest
from test_trainer import Data, shared_folder, train  # noqa: F401 (a fixture)

import mpidp
from mpidp.strategies import Synchronous
from mpidp.training import checkpoint, lr, state
from mpidp.training.callbacks import Callback
from mpidp.training.checkpoint import CheckpointError
from mpidp.training.logs import JsonLog, TensorBoardLog
from mpidp.training.stopping import Patience


class Recorder(Callback):
    """Notes what it is told, and asks to stop at step `stop_at` on the last rank."""

    def __init__(self, stop_at=None):
        self.told = []
        self._stop_at = stop_at

    def on_start(self, trainer):
        self.told.append("start")

    def on_step(self, trainer, step):
        self.told.append((step.number, step.epoch, step.learning_rate))
        return step.number == self._stop_at and trainer.comm.rank == trainer.comm.world_size - 1

    def on_epoch(self, trainer, report):
        self.told.append(f"epoch {report.epoch}")

    def on_checkpoint(self, trainer, path):
        self.told.append(path.name)

    def on_end(self, trainer, report):
        self.told.append("end")


def test_callbacks_are_told_everything_in_order(kit, comm, shared_folder):  # noqa: F811
    recorder = Recorder()
    schedule = lr.linear(0.1, total_steps=16, warmup_steps=2)
    train(
        kit,
        comm,
        epochs=2,
        schedule=schedule,
        callbacks=[recorder],
        checkpoint_dir=shared_folder,
        checkpoint_every=4,
    )
    steps = [(number, number // 7, schedule(number)) for number in range(14)]
    assert recorder.told == [
        "start",
        *steps[:4],
        "step-0000000004.safetensors",
        *steps[4:7],
        "epoch 0",
        "step-0000000007.safetensors",
        *steps[7:8],
        "step-0000000008.safetensors",
        *steps[8:12],
        "step-0000000012.safetensors",
        *steps[12:],
        "epoch 1",
        "step-0000000014.safetensors",
        "end",
    ]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_checkpoints_are_kept(kit, comm, shared_folder, keep):  # noqa: F811
    train(kit, comm, epochs=1, checkpoint_dir=shared_folder, checkpoint_every=2, keep=keep)
    comm.barrier()
    steps = [int(path.name[5:15]) for path in checkpoint.files(shared_folder)]
    assert steps == [7, 6, 4][:keep]


def test_a_callback_on_one_rank_stops_all_after_the_next_step(kit, comm):
    recorder = Recorder(stop_at=8)
    _, report = train(kit, comm, callbacks=[recorder])
    assert (report.stop_reason, report.steps, len(report.epochs)) == ("asked", 10, 1)
    assert recorder.told[-1] == "end"


@pytest.mark.parametrize("steps", [5, 7, 10, 21, 30])
def test_steps_end_the_training_in_the_middle_of_an_epoch(kit, comm, steps):
    test = Data(kit, 5)
    _, report = train(kit, comm, epochs=3, steps=steps, test=test)
    done = min(steps, 21)
    assert (report.steps, report.stopped) == (done, False)
    assert sum(epoch.steps for epoch in report.epochs) == done
    assert [epoch.complete for epoch in report.epochs] == [
        done >= last for last in range(7, done + 7, 7)
    ]
    assert report.epochs[-1].test_loss is not None


def test_steps_alone_repeat_the_data(kit, comm):
    by_epochs, _ = train(kit, comm, epochs=2)
    by_steps, report = train(kit, comm, epochs=None, steps=14)
    assert digest(by_steps) == digest(by_epochs)
    assert len(report.epochs) == 2


def test_more_steps_go_on_where_fewer_ended(kit, comm, shared_folder):  # noqa: F811
    whole, expected = train(kit, comm, epochs=None, steps=17)
    train(kit, comm, epochs=None, steps=9, checkpoint_dir=shared_folder)
    mine, report = train(
        kit, comm, epochs=None, steps=17, checkpoint_dir=shared_folder, resume=True
    )
    assert digest(mine) == digest(whole)
    for found, epoch in zip(report.epochs, expected.epochs, strict=True):
        assert (found.loss, found.metrics, found.samples) == (
            epoch.loss,
            epoch.metrics,
            epoch.samples,
        )


def test_auto_resume_starts_anew_or_goes_on(kit, comm, shared_folder):  # noqa: F811
    options = {"checkpoint_dir": shared_folder, "resume": "auto"}
    train(kit, comm, epochs=1, **options)
    mine, report = train(kit, comm, epochs=3, **options)
    whole, _ = train(kit, comm, epochs=3)
    assert digest(mine) == digest(whole)
    assert [epoch.epoch for epoch in report.epochs] == [0, 1, 2]


def test_a_second_fit_starts_afresh(kit, comm):
    adapter = kit.adapter("sgd", "float64")
    strategy = Synchronous()
    trainer = mpidp.Trainer(adapter, comm, strategy)
    data = Data(kit, 20)
    first = trainer.fit(data, 8, 5, progress=False, callbacks=[lambda *_: True])
    assert first.stopped
    second = trainer.fit(data, 8, 2, progress=False)
    assert ([epoch.epoch for epoch in second.epochs], second.stopped) == ([0, 1], False)
    strategy.close()


def test_lack_of_patience_survives_a_resume(kit, comm, shared_folder):  # noqa: F811
    options = {
        "test": Data(kit, 5),
        "patience": 2,
        "schedule": lr.constant(3.0),
        "checkpoint_dir": shared_folder,
        "epochs": 200,
    }
    _, report = train(kit, comm, **options)
    assert report.stop_reason == "patience"
    losses = [epoch.test_loss for epoch in report.epochs]
    waiting = Patience(2)
    for epoch in report.epochs:
        assert not waiting.is_out
        waiting.add(epoch)
    assert waiting.is_out, losses
    _, again = train(kit, comm, resume=True, **options)
    assert (again.stop_reason, again.steps) == ("patience", report.steps)


def test_json_log_of_steps_and_epochs(kit, comm, shared_folder):  # noqa: F811
    log = f"{shared_folder}/log.jsonl"
    _, report = train(
        kit,
        comm,
        epochs=1,
        schedule=lr.constant(0.1),
        callbacks=[JsonLog(log, every_steps=3)],
    )
    comm.barrier()
    with open(log, encoding="utf-8") as file:
        lines = [json.loads(line, parse_constant=pytest.fail) for line in file]
    assert [line["event"] for line in lines] == ["step", "step", "epoch"]
    assert [line["step"] for line in lines[:2]] == [2, 5]
    assert lines[0]["learning_rate"] == 0.1
    assert lines[2]["loss"] == report.epochs[0].loss
    assert lines[2]["test_loss"] is None


def test_what_is_not_finite_is_null_in_the_log(kit, comm, shared_folder):  # noqa: F811
    log = f"{shared_folder}/log.jsonl"
    adapter = kit.adapter("sgd", "float64")
    strategy = Synchronous()
    trainer = mpidp.Trainer(adapter, comm, strategy)
    trainer.fit(Data(kit, 0), 8, 1, progress=False, log=log)
    strategy.close()
    comm.barrier()
    with open(log, encoding="utf-8") as file:
        (line,) = [json.loads(line, parse_constant=pytest.fail) for line in file]
    assert line["loss"] is None
    assert line["samples"] == 0


def test_tensorboard_log(kit, comm, shared_folder):  # noqa: F811
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    _, report = train(
        kit,
        comm,
        epochs=2,
        callbacks=[TensorBoardLog(f"{shared_folder}/tb", every_steps=7)],
    )
    if comm.rank == 0:
        import glob

        (path,) = glob.glob(f"{shared_folder}/tb/*")
        found = {
            (value.tag, event.step): value.tensor.float_val[0]
            for event in EventFileLoader(path).Load()
            for value in event.summary.value
        }
        for epoch, step in zip(report.epochs, (7, 14), strict=True):
            assert found["train/loss", step] == pytest.approx(epoch.loss, rel=1e-6)
            assert found["train/accuracy", step] == pytest.approx(epoch.metrics["accuracy"])
        assert ("step/loss", 6) in found
        assert ("step/gradient_norm", 13) in found


def test_without_tensorboard_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(mpidp.MpidpError, match="pip install tensorboard"):
        TensorBoardLog("unused")


def test_checkpoints_of_others_are_refused(kit, comm, shared_folder):  # noqa: F811
    checkpoint.save(comm, shared_folder, {"x": np.zeros(3)}, {"mine": True}, step=3)
    with pytest.raises(CheckpointError, match="not written by a Trainer"):
        train(kit, comm, checkpoint_dir=shared_folder, resume=True)
    train(kit, comm, epochs=1, checkpoint_dir=shared_folder)
    adapter = kit.adapter("momentum", "float64")
    strategy = Synchronous()
    trainer = mpidp.Trainer(adapter, comm, strategy)
    options = {"checkpoint_dir": shared_folder, "resume": True, "progress": False}
    with pytest.raises(mpidp.InvalidArgumentError, match="batch_size is 9, was 8"):
        trainer.fit(Data(kit, 53), 9, 2, **options)
    load = adapter.load_state_dict

    def refuse_on_the_last_rank(found):
        if comm.rank == comm.world_size - 1:
            raise ValueError("weight does not fit")
        load(found)

    adapter.load_state_dict = refuse_on_the_last_rank
    with pytest.raises(CheckpointError, match="ValueError: weight does not fit"):
        trainer.fit(Data(kit, 53), 8, 2, **options)
    strategy.close()


def test_random_generators_go_on_where_they_were():
    random.seed(5)
    np.random.seed(6)
    random.gauss(0, 1)
    np.random.normal(size=3)
    saved = state.random_state()
    expected = [random.gauss(0, 1), random.random(), *np.random.normal(size=4)]
    random.seed(1)
    np.random.seed(1)
    state.load_random_state(saved)
    assert [random.gauss(0, 1), random.random(), *np.random.normal(size=4)] == expected


def test_a_frameworks_generators_are_each_ranks_own(kit, comm, shared_folder):  # noqa: F811
    def with_generator():
        adapter = kit.adapter("sgd", "float64")
        adapter.value = comm.rank + 0.5
        adapter.random_state = lambda: {"value": np.array([adapter.value])}
        adapter.load_random_state = lambda found: setattr(adapter, "value", found["value"][0])
        return adapter, mpidp.Trainer(adapter, comm, Synchronous())

    _, trainer = with_generator()
    trainer.fit(Data(kit, 9), 8, 1, progress=False, checkpoint_dir=shared_folder)
    adapter, trainer = with_generator()
    adapter.value = -1.0
    trainer.fit(Data(kit, 9), 8, 1, progress=False, checkpoint_dir=shared_folder, resume=True)
    assert adapter.value == comm.rank + 0.5


def test_the_overlap_is_measured_where_there_are_peers(kit, comm):
    _, report = train(kit, comm, epochs=2)
    for epoch in report.epochs:
        if comm.world_size == 1:
            assert epoch.overlap_ratio is None
        else:
            assert 0 <= epoch.overlap_ratio <= 1
        assert 0 <= epoch.communication_share <= 1


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": None},
        {"steps": -1},
        {"keep": 0},
        {"checkpoint_every": 0},
        {"patience": 2},
        {"resume": "auto"},
        {"stop_signals": (9,)},
    ],
)
def test_bad_arguments(kit, alone, bad):
    with pytest.raises(mpidp.InvalidArgumentError):
        train(kit, alone, **bad)
