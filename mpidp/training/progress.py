"""Progress of a training run, shown by rank 0: a bar on a terminal, one line an epoch elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidp.training.adapter import BatchResult
    from mpidp.training.reports import EpochReport


class Progress:
    """Shows a run where `speaks` is true. `enabled` None means a bar if stdout is a terminal."""

    def __init__(self, *, enabled: bool | None, speaks: bool, total_epochs: int) -> None:
        self._speaks = speaks and enabled is not False
        self._total_epochs = total_epochs
        self._bar: Any = None
        self._task: Any = None
        wants_bar = sys.stdout.isatty() if enabled is None else enabled
        if self._speaks and wants_bar and sys.stdout.isatty():
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(transient=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin_epoch(self, epoch: int, steps: int) -> None:
        """A new epoch of `steps` steps."""
        if self._bar is not None:
            self._task = self._bar.add_task(f"epoch {epoch + 1}/{self._total_epochs}", total=steps)

    def advance(self, result: BatchResult) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def end_epoch(self, report: EpochReport) -> None:
        """Puts out the epoch's line."""
        if not self._speaks:
            return
        line = line_of(report, self._total_epochs)
        if self._bar is not None:
            self._bar.remove_task(self._task)
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)


def line_of(report: EpochReport, total_epochs: int) -> str:
    """One epoch in one line."""
    parts = [f"epoch {report.epoch + 1:3d}/{total_epochs}", f"loss {report.loss:.4f}"]
    parts += [f"{name} {value:.4f}" for name, value in report.metrics.items()]
    if report.test_loss is not None:
        parts.append(f"test loss {report.test_loss:.4f}")
    parts += [f"test {name} {value:.4f}" for name, value in report.test_metrics.items()]
    parts.append(f"{report.samples_per_second:,.0f} samples/s")
    parts.append(f"communication {report.communication_share:.0%}")
    if report.overlap_ratio is not None:
        parts.append(f"overlap {report.overlap_ratio:.0%}")
    if report.skipped_steps:
        parts.append(f"{report.skipped_steps} steps skipped")
    return "  ".join(parts)
