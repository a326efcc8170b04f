"""Logs of a training run, written by rank 0: JSON lines and TensorBoard.

trainer.fit(..., callbacks=[JsonLog("run.jsonl", every_steps=10), TensorBoardLog("runs/one")])
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidp.errors import InvalidArgumentError, MpidpError
from mpidp.training.callbacks import Callback, Step

if TYPE_CHECKING:
    from mpidp.training.reports import EpochReport, TrainingReport
    from mpidp.training.trainer import Trainer


class JsonLog(Callback):
    """Appends one line to `path` for each epoch, and for every `every_steps`-th step (0: none).

    An epoch's line holds the fields of `EpochReport` and `"event": "epoch"`; a step's line has
    `"event": "step"` and step, epoch, loss, learning_rate, gradient_norm and applied. What is not
    finite is written as null, so that any JSON reader takes it.
    """

    def __init__(self, path: str | Path, *, every_steps: int = 0) -> None:
        self._path = Path(path)
        self._every_steps = _checked(every_steps)

    def on_step(self, trainer: Trainer, step: Step) -> None:
        """See `Callback.on_step`."""
        if trainer.comm.rank == 0 and _is_due(step.number, self._every_steps):
            self._append({"event": "step", **step_record(step)})

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        """See `Callback.on_epoch`."""
        if trainer.comm.rank == 0:
            self._append({"event": "epoch", **asdict(report)})

    def _append(self, record: Mapping[str, Any]) -> None:
        # One write a line, so that a kill leaves no half of one behind.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")


class TensorBoardLog(Callback):
    """Writes scalars into `directory` for TensorBoard: each epoch, and every `every_steps`-th step.

    Needs the package tensorboard (pip install tensorboard); without it, creating one raises
    `MpidpError`. Steps are the x axis throughout.
    """

    def __init__(self, directory: str | Path, *, every_steps: int = 0) -> None:
        try:
            self._make_writer = importlib.import_module("tensorboard.summary").Writer
        except ImportError as error:
            raise MpidpError(
                f"TensorBoard logs need a package that is missing ({error.name}): "
                "pip install tensorboard"
            ) from error
        self._directory = str(directory)
        self._every_steps = _checked(every_steps)
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """See `Callback.on_start`."""
        if trainer.comm.rank == 0:
            self._writer = self._make_writer(self._directory)

    def on_step(self, trainer: Trainer, step: Step) -> None:
        """See `Callback.on_step`."""
        if self._writer is not None and _is_due(step.number, self._every_steps):
            record = step_record(step)
            for name in ("loss", "learning_rate", "gradient_norm"):
                self._add(f"step/{name}", record[name], step.number)

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        """See `Callback.on_epoch`."""
        if self._writer is None:
            return
        at = trainer.report.steps
        scalars = {
            "train/loss": report.loss,
            "test/loss": report.test_loss,
            "speed/samples_per_second": report.samples_per_second,
            "speed/communication_share": report.communication_share,
            "speed/overlap_ratio": report.overlap_ratio,
            **{f"train/{name}": value for name, value in report.metrics.items()},
            **{f"test/{name}": value for name, value in report.test_metrics.items()},
        }
        for name, value in scalars.items():
            self._add(name, value, at)
        self._writer.flush()

    def on_end(self, trainer: Trainer, report: TrainingReport) -> None:
        """See `Callback.on_end`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(name, value, step)


def step_record(step: Step) -> dict[str, Any]:
    """What the logs tell of one step; the loss is the mean over its samples."""
    result = step.report.result
    return {
        "step": step.number,
        "epoch": step.epoch,
        "loss": result.loss / result.weight if result.weight else None,
        "learning_rate": step.learning_rate,
        "gradient_norm": step.report.gradient_norm,
        "applied": step.report.applied,
    }


def _checked(every_steps: int) -> int:
    if every_steps < 0:
        raise InvalidArgumentError(f"every_steps={every_steps}: expected a number >= 0")
    return every_steps


def _is_due(number: int, every_steps: int) -> bool:
    return every_steps > 0 and (number + 1) % every_steps == 0


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
