"""Timing loops and their statistics. Pure but for the clock.

Isolated: a barrier before each iteration, so that each starts with all ranks present. Streaming:
iterations back to back. The time of an iteration is the slowest rank's, and what is reported is the
median over iterations.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CADENCES = ("isolated", "streaming")

ROUNDS = 4  # how often a comparison goes round its contestants
_BUDGET = 0.25  # seconds for the timed iterations of one contestant, where -n is not given
_FEWEST, _MOST = 5, 1000
_WARMUP_SHARE = 0.1


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the collector from running inside; it runs once before."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def time_calls(
    call: Callable[[], Any], barrier: Callable[[], Any], iterations: int, isolated: bool
) -> list[int]:
    """Nanoseconds that each of `iterations` calls took on this rank."""
    clock = time.perf_counter_ns
    nanoseconds = [0] * iterations
    barrier()
    for i in range(iterations):
        if isolated:
            barrier()
        start = clock()
        call()
        nanoseconds[i] = clock() - start
    return nanoseconds


def cost_of_iteration(
    call: Callable[[], Any], barrier: Callable[[], Any], isolated: bool, tries: int = 3
) -> int:
    """Nanoseconds that one more iteration takes out of the benchmark's time, barrier included."""
    start = time.perf_counter_ns()
    time_calls(call, barrier, tries, isolated)
    return (time.perf_counter_ns() - start) // tries


def choose_iterations(seconds: float, budget: float = _BUDGET) -> tuple[int, int]:
    """(warm-up, timed) iterations that fit `budget` when one takes `seconds`."""
    fitting = budget / max(seconds, 1e-9)
    timed = int(min(max(fitting, _FEWEST), _MOST))
    warmup = int(min(max(fitting * _WARMUP_SHARE, 1), 50))
    return warmup, timed


def split_rounds(iterations: int, rounds: int = ROUNDS) -> list[int]:
    """`iterations` in `rounds` parts that differ by at most one; parts may be 0."""
    return [iterations // rounds + (i < iterations % rounds) for i in range(rounds)]


@dataclass(frozen=True)
class Statistics:
    """Of the slowest rank's seconds per iteration."""

    iterations: int
    min: float
    max: float
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    stdev: float


def summarize(seconds: NDArray[np.float64]) -> Statistics:
    """Statistics of at least one time. Percentiles other than the median are observed times."""
    ordered = np.sort(seconds)
    number = ordered.size

    def percentile(percent: int) -> float:
        return float(ordered[max(0, math.ceil(number * percent / 100) - 1)])

    return Statistics(
        iterations=number,
        min=float(ordered[0]),
        max=float(ordered[-1]),
        mean=float(ordered.mean()),
        p50=float(np.median(ordered)),
        p90=percentile(90),
        p95=percentile(95),
        p99=percentile(99),
        stdev=float(ordered.std()),
    )
