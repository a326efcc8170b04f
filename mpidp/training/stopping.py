"""Reasons to stop before the end: a batch system's warning, no progress, somebody's wish."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from mpidp.errors import InvalidArgumentError
from mpidp.training.reports import EpochReport

# sysexits.h calls it EX_TEMPFAIL: try again later. What `mpidp train` returns after a warning
# signal, so that a job script can tell "resubmit me" from success and from failure.
EXIT_STATUS_WARNED = 75

# By rank order of weight: where ranks have several reasons at once, the last of them counts.
REASONS = ("asked", "patience", "signal")

DEFAULT_SIGNALS = (signal.SIGUSR1,)


@contextmanager
def warned_by(signals: Sequence[int], warn: Callable[[], None]) -> Iterator[None]:
    """While the block runs, each of `signals` calls `warn` in place of what it did before.

    Batch systems warn before they kill (Slurm: `--signal=USR1@60`). Python delivers signals to the
    main thread only; elsewhere this does nothing. Raises InvalidArgumentError for a signal that
    cannot be caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    wakeup_fd = -1
    try:
        for number in signals:
            try:
                previous[number] = signal.signal(number, lambda *_: warn())
            except (OSError, ValueError) as error:
                raise InvalidArgumentError(f"signal {number} cannot be a warning") from error
        if signal.SIGTERM in previous:
            # mpidp.launch listens there for SIGTERM, and would end the job at once.
            wakeup_fd = signal.set_wakeup_fd(-1)
        yield
    finally:
        if wakeup_fd != -1:
            signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        for number, handler in previous.items():
            # None: it was not installed from Python, and cannot be restored from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Patience:
    """Says when the test loss has not become better for `epochs` epochs. A NaN is never better."""

    def __init__(self, epochs: int | None) -> None:
        if epochs is not None and epochs < 1:
            raise InvalidArgumentError(f"patience={epochs}: expected a number >= 1, or None")
        self._epochs = epochs
        self._best = math.inf
        self._since_best = 0

    def add(self, report: EpochReport) -> None:
        """Takes note of one epoch, of this run or of the one that is resumed."""
        if report.test_loss is not None and report.test_loss < self._best:
            self._best, self._since_best = report.test_loss, 0
        else:
            self._since_best += 1

    @property
    def is_out(self) -> bool:
        """Whether it is time to stop."""
        return self._epochs is not None and self._since_best >= self._epochs
