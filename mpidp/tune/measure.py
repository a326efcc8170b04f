"""The measuring of `mpidp tune`: the link, the kernel, and every algorithm, in turns.

Times are the slowest rank's, the median over iterations, of float32 sums in registered memory, in
place where the collective allows it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidp import _core
from mpidp.bench.backends import MpidpBackend
from mpidp.bench.cases import Collective
from mpidp.bench.driver import Driver, Plan, Variant

_LINK_BYTES = 1 << 20
_REDUCE_BYTES = 256 << 10


@dataclass(frozen=True)
class TunePlan(Plan):
    """A plan that measures each collective one way only."""

    @property
    def table_entry(self) -> Collective:
        """Without the way out of place where there is one in place."""
        entry = super().table_entry
        return dataclasses.replace(entry, out_of_place=not entry.in_place)


def driver_for(comm: Any, mpi_comm: MPI.Comm, plan: Plan, algorithms: Sequence[str]) -> Driver:
    """A driver of one variant for each algorithm. MemoryError where they do not fit."""
    variants = [Variant(MpidpBackend(comm, name), "registered") for name in algorithms]
    return Driver(plan, comm, mpi_comm, variants)


def times_of(driver: Driver, algorithms: Sequence[str]) -> tuple[list[int], dict[str, list[float]]]:
    """(sizes in bytes, seconds by algorithm) by a `driver_for` them. Collective.

    The same on every rank.
    """
    report = driver.run()
    sizes = [row.case.nbytes for row in report.section(driver.variants[0])]
    seconds = {
        name: [row.measured()[0].statistics.p50 for row in report.section(variant)]
        for name, variant in zip(algorithms, driver.variants, strict=True)
    }
    return sizes, seconds


def link_costs(mpi_comm: MPI.Comm, node_rank: int, rounds: int = 20) -> tuple[float, float] | None:
    """(alpha in seconds, beta in seconds a byte) of a message, by ping-pong. Collective.

    Between rank 0 and the first rank of another node, or rank 1 where there is one node. None for a
    single rank.
    """
    nodes = mpi_comm.allgather(node_rank)
    if len(nodes) == 1:
        return None
    peer = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), 1)
    found = None
    if mpi_comm.rank in (0, peer):
        other = peer if mpi_comm.rank == 0 else 0
        small, large = np.zeros(8, np.uint8), np.zeros(_LINK_BYTES, np.uint8)
        alpha = _ping_pong(mpi_comm, other, small, rounds)
        beta = max(_ping_pong(mpi_comm, other, large, rounds) - alpha, 0.0) / large.nbytes
        found = (alpha, beta)
    result: tuple[float, float] = mpi_comm.bcast(found)
    return result


def reduce_cost(mpi_comm: MPI.Comm, rounds: int = 20) -> float:
    """gamma: seconds a byte to add two float32 arrays in cache; the slowest rank's. Collective."""
    a, b = np.ones(_REDUCE_BYTES // 4, np.float32), np.ones(_REDUCE_BYTES // 4, np.float32)
    out = np.empty_like(a)
    median = _median(lambda: _core.reduce_buffers([a, b], [out], "sum"), rounds)
    return float(mpi_comm.allreduce(median, MPI.MAX)) / _REDUCE_BYTES


def _ping_pong(comm: MPI.Comm, peer: int, data: Any, rounds: int) -> float:
    def both_ways() -> None:
        if comm.rank == 0:
            comm.Send(data, peer)
            comm.Recv(data, peer)
        else:
            comm.Recv(data, peer)
            comm.Send(data, peer)

    return _median(both_ways, rounds) / 2


def _median(call: Callable[[], Any], rounds: int) -> float:
    call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
