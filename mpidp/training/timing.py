"""How much of the communication the backward pass hides.

On a measured step, an exchange is under way from the call that starts it to its completion. The
step's communication time is the length of the union of these intervals. Its exposed part is what of
it this rank spent inside communication calls: starting exchanges, waiting for them, or in blocking
collectives. The rest was hidden behind computing, and

    overlap ratio = hidden time / communication time.

The time of an exchange includes waiting for ranks that come later, as seen from this rank.

Completion is noted by a thread that waits for the exchanges beside the training. That costs a few
context switches an exchange, so only some steps are measured.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

Interval = tuple[float, float]

_BLOCKING = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
_MEASURED = frozenset((*_BLOCKING, *(f"{name}_async" for name in _BLOCKING)))
# One step out of so many is measured, beginning with an epoch's second: the first may plan.
_PERIOD = 16
_FIRST = 1


class ExchangeTimer:
    """Stands in for a communicator, and measures some steps' exchanges on the way.

    Attributes that it does not measure are the communicator's own. Local; not thread-safe.

        timer = ExchangeTimer(comm)
        strategy.attach(adapter, timer)
        timer.begin_step(number)
        strategy.step(...)
        timer.end_step()
        timer.take_overlap_ratio()
    """

    def __init__(
        self, comm: Communicator, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._comm = comm
        self._clock = clock
        self._measuring = False
        self._exchanges: list[_TimedWork] = []
        self._blocked: list[Interval] = []
        self._hidden = 0.0
        self._total = 0.0
        self._watched: queue.SimpleQueue[_TimedWork | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None

    def begin_step(self, number: int) -> None:
        """Before step `number` of an epoch; decides whether it is measured."""
        self._measuring = self._comm.world_size > 1 and number % _PERIOD == _FIRST
        self._exchanges.clear()
        self._blocked.clear()

    def end_step(self) -> None:
        """After the step, whose exchanges have all been waited for."""
        if not self._measuring:
            return
        self._measuring = False
        now = self._clock()
        running = [work.interval(now) for work in self._exchanges]
        hidden, total = hidden_time(running, self._blocked)
        self._hidden += hidden
        self._total += total

    def take_overlap_ratio(self) -> float | None:
        """Over the steps measured since the last call; None where there were none."""
        hidden, total = self._hidden, self._total
        self._hidden = self._total = 0.0
        return hidden / total if total > 0 else None

    def close(self) -> None:
        """Ends the watching thread. Twice is fine; measuring again starts a new one."""
        self._measuring = False
        if self._watcher is not None:
            self._watched.put(None)
            self._watcher.join()
            self._watcher = None

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._comm, name)
        if not self._measuring or name not in _MEASURED:
            return attribute
        if name.endswith("_async"):
            return lambda *args, **kwargs: self._start(attribute, args, kwargs)
        return lambda *args, **kwargs: self._block(attribute, args, kwargs)

    def _start(self, call: Callable[..., Any], args: Any, kwargs: Any) -> _TimedWork:
        start = self._clock()
        inner = call(*args, **kwargs)
        work = _TimedWork(inner, start, self._clock, self._blocked)
        # Where MPI gives no threads the exchange ran inside the call.
        self._blocked.append((start, self._clock()))
        self._exchanges.append(work)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="mpidp-timing", daemon=True)
            self._watcher.start()
        self._watched.put(work)
        return work

    def _block(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        start = self._clock()
        try:
            return call(*args, **kwargs)
        finally:
            end = self._clock()
            self._blocked.append((start, end))
            self._exchanges.append(_TimedWork(None, start, self._clock, self._blocked, end))

    def _watch(self) -> None:
        while True:
            # Exchanges of one communicator complete in the order of their starts.
            work = self._watched.get()
            if work is None:
                return
            work.note_completion()


class _TimedWork:
    """A `Work` that takes the times of its completion and of waiting for it."""

    def __init__(
        self,
        inner: Any,
        start: float,
        clock: Callable[[], float],
        blocked: list[Interval],
        end: float | None = None,
    ) -> None:
        self._inner = inner
        self._start = start
        self._clock = clock
        self._blocked = blocked
        self._end = end

    def done(self) -> bool:
        """See `Work.done`."""
        return bool(self._inner.done())

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work.wait`."""
        start = self._clock()
        try:
            result = self._inner.wait(timeout)
        finally:
            now = self._clock()
            self._blocked.append((start, now))
        self._complete(now)
        return result

    @property
    def result(self) -> Any:
        """See `Work.result`."""
        return self.wait()

    def note_completion(self) -> None:
        """Waits and takes the time; errors are for the one who started the exchange."""
        try:
            self._inner.wait()
        except Exception:
            return
        self._complete(self._clock())

    def interval(self, now: float) -> Interval:
        """When it was under way, at the latest until `now`."""
        return self._start, now if self._end is None else self._end

    def _complete(self, now: float) -> None:
        # Waiter and watcher may both come here; the earlier is nearer to the truth.
        if self._end is None or now < self._end:
            self._end = now


def hidden_time(running: Sequence[Interval], blocked: Sequence[Interval]) -> tuple[float, float]:
    """(time in `running` but not in `blocked`, time in `running`); intervals may overlap.

    >>> hidden_time([(0, 4), (3, 6)], [(5, 7)])
    (5, 6)
    """
    merged = _union(running)
    total = sum(end - start for start, end in merged)
    exposed = sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in merged
        for other_start, other_end in _union(blocked)
    )
    return total - exposed, total


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
