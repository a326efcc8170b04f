"""Sums over all ranks, in float64, so that means do not depend on how samples were split."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpidp.training.adapter import BatchResult

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


def sum_results(results: Iterable[BatchResult]) -> BatchResult:
    """The sum, each number correctly rounded (math.fsum), so independent of the order."""
    results = list(results)
    names: dict[str, None] = {}
    for result in results:
        names.update(dict.fromkeys(result.metrics))
    return BatchResult(
        math.fsum(result.weight for result in results),
        _sum(result.loss for result in results),
        {name: _sum(result.metrics.get(name, 0.0) for result in results) for name in names},
    )


def reduce_result(comm: Communicator, result: BatchResult) -> BatchResult:
    """The sum of every rank's `result`, on every rank. Collective.

    Ranks without samples need not know the metrics' names.
    """
    return sum_results(comm.all_gather_object(result))


def _sum(values: Iterable[float]) -> float:
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or too large a sum
        return sum(values)
