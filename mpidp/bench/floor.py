"""The memory floor: what moving the bytes of an all_reduce costs, with every rank at it at once.

In all_reduce, a rank that works on its peers' memory directly has to load n bytes and to store n
bytes, for a message of n bytes. So the floor is the time of an update in place of n bytes, one load
and one store for each, by all ranks together. It is measured by the fastest way known here: one
that is merely slow would flatter the collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidp.bench.timing import Statistics, summarize

Array = NDArray[Any]
# (x, iterations) -> the seconds of each update of x in place
Way = Callable[[Array, int], Sequence[float]]

# Below this size a call's own cost hides that of the memory, and latency rules anyway.
MIN_BYTES = 16 << 10


def by_numpy(x: Array, iterations: int) -> list[float]:
    """Seconds of each of `iterations` negations of x in place."""
    seconds = []
    for _ in range(iterations):
        start = time.perf_counter()
        np.negative(x, out=x)
        seconds.append(time.perf_counter() - start)
    return seconds


class FloorMeter:
    """Measures the floor of one size after the other, a few iterations at a time.

    `array` is float32 of the largest size, `barrier` lets all ranks begin together.

        meter = FloorMeter(array, [by_numpy], comm.barrier)
        meter.start(nbytes)
        meter.run(10)
        meter.fastest(slowest_rank_of(meter.nanoseconds))
    """

    def __init__(self, array: Array, ways: Sequence[Way], barrier: Callable[[], Any]) -> None:
        self._array = array
        self._x = array
        self._ways = list(ways)
        self._barrier = barrier
        self._times: list[list[int]] = []
        # Neither subnormal nor growing when it is updated again and again.
        array.fill(1)

    def start(self, nbytes: int) -> None:
        """Forgets what was measured; `nbytes` is the size from here on."""
        self._x = self._array[: nbytes // 4]
        self._times = [[] for _ in self._ways]

    def run(self, iterations: int) -> None:
        """Takes `iterations` more times in each way."""
        for way, times in zip(self._ways, self._times, strict=True):
            way(self._x, 1)  # brings the array back into cache
            for _ in range(iterations):
                # Without this, a rank that finished early would leave the memory to the others.
                self._barrier()
                times.append(round(way(self._x, 1)[0] * 1e9))

    @property
    def nanoseconds(self) -> list[int]:
        """This rank's times since `start`, one way after the other."""
        return [nanoseconds for times in self._times for nanoseconds in times]

    def fastest(self, seconds: NDArray[np.float64]) -> Statistics:
        """Of the fastest way; `seconds` are those of `nanoseconds`, but of the slowest rank."""
        of_ways = np.split(seconds, len(self._ways))
        return min(map(summarize, of_ways), key=lambda statistics: statistics.p50)
