"""What a training run reports: one record for each epoch, and how the run ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mpidp.training.adapter import BatchResult

# Fields that are this rank's and of this process: not kept across a resume, not equal over ranks.
TIMES = ("seconds", "samples_per_second", "communication_share", "overlap_ratio")


@dataclass
class EpochReport:
    """One epoch, the same on every rank but for the times, which are this rank's.

    Losses and metrics are means over samples (or tokens, where those are the batches' weights).
    `complete` is false where the run stopped before the epoch's end. `seconds` and what follows
    from it count the part since this process started or resumed.

    `communication_share` is the part of the epoch that this rank spent waiting for exchanges that
    computing did not hide. `overlap_ratio` is the part of the exchanges' time that was hidden
    behind the backward pass, from 0 (every exchange was waited for from its start to its end) to 1
    (none was waited for), as measured on some steps: see `mpidp.training.timing`. It is None where
    nothing was measured, as with one rank.
    """

    epoch: int
    steps: int = 0
    skipped_steps: int = 0
    samples: float = 0.0
    loss: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    test_loss: float | None = None
    test_metrics: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    complete: bool = True
    seconds: float = 0.0
    samples_per_second: float = 0.0
    communication_share: float = 0.0
    overlap_ratio: float | None = None
    wire_bytes: int = 0


@dataclass
class TrainingReport:
    """What `fit` did: one entry for each complete epoch, and whether and why it stopped early.

    `steps` counts the steps of the whole training, with those before a resume. `stop_reason` is
    "signal" (a warning signal of the batch system), "patience", "asked" (`Trainer.stop` or a
    callback) or None; it is the same on every rank.
    """

    epochs: list[EpochReport] = field(default_factory=list)
    steps: int = 0
    stopped: bool = False
    stop_reason: str | None = None


@dataclass
class Running:
    """The sums of an epoch under way; what a checkpoint in its middle must hold."""

    total: BatchResult = field(default_factory=BatchResult)
    steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0

    def add(self, result: BatchResult, *, applied: bool, wire_bytes: int) -> None:
        """Books one step."""
        self.total = self.total + result
        self.steps += 1
        self.skipped_steps += not applied
        self.wire_bytes += wire_bytes

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint; every float comes back bit for bit."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Running:
        """What `to_json` gave."""
        return cls(**{**record, "total": BatchResult(**record["total"])})


def means(total: BatchResult) -> tuple[float, dict[str, float]]:
    """(mean loss, mean metrics); NaN and none where there was no sample."""
    if total.weight == 0:
        return float("nan"), {}
    return total.loss / total.weight, {k: v / total.weight for k, v in total.metrics.items()}
