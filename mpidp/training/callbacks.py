"""What a training run tells its user while it runs.

class Printer(mpidp.training.callbacks.Callback):
    def on_step(self, trainer, step):
        print(step.number, step.report.gradient_norm)

trainer.fit(dataset, 128, epochs=3, callbacks=[Printer(), lambda trainer, epoch: epoch.loss < 0.1])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidp.strategies.base import StepReport
    from mpidp.training.reports import EpochReport, TrainingReport
    from mpidp.training.trainer import Trainer


@dataclass(frozen=True)
class Step:
    """One step: its number (from 0 over the whole training), epoch, learning rate and outcome."""

    number: int
    epoch: int
    learning_rate: float | None
    report: StepReport


class Callback:
    """Base of callbacks; every method runs on every rank, in the same order.

    A true return of `on_step` or `on_epoch` on any rank stops the training on all of them: after
    the next step, or at once.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, after a resume."""

    def on_step(self, trainer: Trainer, step: Step) -> bool | None:
        """After each step."""

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> bool | None:
        """After each complete epoch and its evaluation."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint was written."""

    def on_end(self, trainer: Trainer, report: TrainingReport) -> None:
        """When the training is over or stopped; not after an exception."""


# A plain function is taken for an `on_epoch`.
EpochFunction = Callable[["Trainer", "EpochReport"], "bool | None"]


class _OnEpoch(Callback):
    def __init__(self, function: EpochFunction) -> None:
        self._function = function

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> bool | None:
        return self._function(trainer, report)


def as_callback(given: Any) -> Callback:
    """A `Callback` itself, or one that calls the function `given` after each epoch."""
    return given if isinstance(given, Callback) else _OnEpoch(given)
