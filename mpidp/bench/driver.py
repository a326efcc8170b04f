"""Runs a sweep: checks, times and checks again every contestant of every case.

A contestant is one backend with one kind of memory, out of place or in place. The contestants of a
case take turns, a part of their iterations at a time, so that noise on the machine hits all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpidp.bench import timing
from mpidp.bench.arenas import Arena, DeviceArena
from mpidp.bench.backends import Backend, Call
from mpidp.bench.cases import COLLECTIVES, Case, Collective, op_fits, sizes
from mpidp.bench.floor import MIN_BYTES, FloorMeter, Way, by_numpy
from mpidp.bench.patterns import Exact
from mpidp.buffers import numpy_dtype
from mpidp.errors import InvalidArgumentError

Array = NDArray[Any]

MEMORIES = ("registered", "plain", "device")
MODES = ("out_of_place", "in_place")


@dataclass(frozen=True)
class Plan:
    """What to measure. Sizes in bytes; None for iterations and warmup fits them to the time."""

    collective: str = "all_reduce"
    min_bytes: int = 8
    max_bytes: int = 64 << 20
    factor: int | None = 4
    step: int | None = None
    iterations: int | None = None
    warmup: int | None = None
    dtypes: tuple[str, ...] = ("float32",)
    ops: tuple[str, ...] = ("sum",)
    root: int = 0
    check: bool = True
    cadence: str = "isolated"

    @property
    def table_entry(self) -> Collective:
        """The collective's entry in the table."""
        return COLLECTIVES[self.collective]

    def undefined(self) -> list[tuple[str, str]]:
        """(dtype, op) pairs that were asked for and make no sense."""
        if not self.table_entry.reduces:
            return []
        return [(d, op) for d in self.dtypes for op in self.ops if not op_fits(op, d)]

    def cases(self, world_size: int) -> Iterator[Case]:
        """Every row of the table. Sizes that round to the same count make one row."""
        entry = self.table_entry
        if self.collective == "barrier":
            yield Case(entry, "none", "none", -1, 0, 1, world_size)
            return
        root = self.root if entry.rooted else -1
        for dtype in self.dtypes:
            itemsize = numpy_dtype(dtype).itemsize
            for op in self.ops if entry.reduces else ("none",):
                if entry.reduces and not op_fits(op, dtype):
                    continue
                counts = dict.fromkeys(
                    entry.count_for(nbytes, itemsize, world_size)
                    for nbytes in sizes(self.min_bytes, self.max_bytes, self.factor, self.step)
                )
                for count in counts:
                    yield Case(entry, dtype, op, root, count, itemsize, world_size)


@dataclass(frozen=True)
class Variant:
    """A backend on one kind of memory: one section of the report."""

    backend: Backend
    memory: str

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.backend.name} {self.memory}"


@dataclass(frozen=True)
class Measurement:
    """One contestant's result.

    `wrong` counts elements over all ranks, in the worse of the checks before and after the timing;
    None where there was no check.
    """

    statistics: timing.Statistics
    wrong: int | None


@dataclass
class Row:
    """One line of a section; a mode that was not measured is None, and `note` may say why."""

    case: Case
    variant: Variant
    out_of_place: Measurement | None = None
    in_place: Measurement | None = None
    note: str = ""

    def measured(self) -> list[Measurement]:
        """The measurements that there are."""
        return [m for m in (self.out_of_place, self.in_place) if m is not None]


@dataclass
class Report:
    """Everything a run found; the same on every rank."""

    rows: list[Row] = field(default_factory=list)
    floors: dict[Case, timing.Statistics] = field(default_factory=dict)

    def section(self, variant: Variant) -> list[Row]:
        """The rows of one variant."""
        return [row for row in self.rows if row.variant is variant]


def out_of_bounds(rows: Sequence[Row]) -> int:
    """Wrong elements in all of `rows`."""
    return sum(m.wrong or 0 for row in rows for m in row.measured())


def average_bus_bandwidth(rows: Sequence[Row]) -> float:
    """Mean busbw in GB/s over all measurements, out of place and in place, as nccl-tests does."""
    found = [row.case.bandwidths(m.statistics.p50)[1] for row in rows for m in row.measured()]
    return sum(found) / len(found) if found else 0.0


@dataclass
class _Contestant:
    variant: Variant
    mode: str
    call: Call
    arena: Arena
    x: Array
    result: Array
    warmup: int = 0
    iterations: int = 0
    nanoseconds: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)  # of each check


class Driver:
    """Measures a plan on `comm`, which has the API of `mpidp.Communicator`.

    `mpi_comm` carries the benchmark's own bookkeeping. `floor_ways` are ways to measure the memory
    floor, beside NumPy's. Creation allocates the arrays, and raises MemoryError where it cannot.

        driver = Driver(plan, comm, mpi_comm, [Variant(MpidpBackend(comm, "auto"), "plain")])
        report = driver.run()
    """

    def __init__(
        self,
        plan: Plan,
        comm: Any,
        mpi_comm: MPI.Comm,
        variants: Sequence[Variant],
        floor_ways: Sequence[Way] = (),
    ) -> None:
        self.plan = plan
        self.variants = list(variants)
        self._comm = comm
        self._mpi_comm = mpi_comm
        self._cases = list(plan.cases(comm.world_size))
        input_bytes = max((c.input_count * c.itemsize for c in self._cases), default=0)
        output_bytes = max((c.output_count * c.itemsize for c in self._cases), default=0)
        allocators = {"registered": self._registered, "plain": self._plain}
        self._arenas = {
            memory: (
                DeviceArena(comm, input_bytes, output_bytes)
                if memory == "device"
                else Arena(allocators[memory], input_bytes, output_bytes)
            )
            for memory in dict.fromkeys(variant.memory for variant in self.variants)
        }
        largest = max((case.nbytes for case in self._cases), default=0)
        self._floor: FloorMeter | None = None
        # A single rank has nothing to move, and a GPU another memory.
        on_host = not self.variants or self.variants[0].memory != "device"
        reduces = plan.collective == "all_reduce"
        if on_host and reduces and comm.world_size > 1 and largest >= MIN_BYTES:
            # In the memory that the first contestant uses: the kind of page matters.
            allocate = allocators[self.variants[0].memory]
            array = allocate(largest // 4 * 4).view(np.float32)
            self._floor = FloorMeter(array, [*floor_ways, by_numpy], comm.barrier)

    def _registered(self, nbytes: int) -> Array:
        array: Array = self._comm.empty((nbytes,), "uint8")
        return array

    @staticmethod
    def _plain(nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    @property
    def num_cases(self) -> int:
        """How many cases `run` will go through."""
        return len(self._cases)

    def run(
        self,
        on_case: Callable[[Case], None] | None = None,
        on_row: Callable[[Row], None] | None = None,
    ) -> Report:
        """Measures everything. Collective. The callbacks run on every rank.

        Raises `InvalidArgumentError` where a case of a plan of one dtype and one op is refused.
        """
        report = Report()
        for case in self._cases:
            if on_case is not None:
                on_case(case)
            for row in self._measure(case, report):
                report.rows.append(row)
                if on_row is not None:
                    on_row(row)
        return report

    def _measure(self, case: Case, report: Report) -> list[Row]:
        rows = [Row(case, variant) for variant in self.variants]
        contestants: list[_Contestant] = []
        for row in rows:
            row.note = row.variant.backend.unsupported(case) or ""
            if not row.note:
                contestants += self._contestants(case, row)
        exact = None
        if contestants and case.count:
            exact = Exact(case, self._comm.rank, contestants[0].x.dtype)
        self._check(contestants, exact)
        self._settle_iterations(contestants)
        for contestant in contestants:
            if exact is not None:
                exact.fill_for_timing(contestant.x)
                contestant.arena.push(contestant.x)
        floor = self._floor if case.nbytes >= MIN_BYTES else None
        self._time(case, contestants, floor)
        self._check(contestants, exact)
        self._collect(case, contestants, rows, floor, report)
        return rows

    def _contestants(self, case: Case, row: Row) -> list[_Contestant]:
        """Those of one row, each having run once; none, and a note, where the case is refused."""
        found = []
        arena = self._arenas[row.variant.memory]
        x, out = arena.views(case) if case.count else (_NOTHING, _NOTHING)
        given, wanted = arena.operands(x, out) if case.count else (x, out)
        modes = {"out_of_place": case.collective.out_of_place, "in_place": case.collective.in_place}
        try:
            for mode in MODES:
                if not modes[mode]:
                    continue
                in_place = mode == "in_place"
                bound = row.variant.backend.bind(case, given, None if in_place else wanted)
                call = bound if row.variant.memory != "device" else _finished(bound, arena)
                call()
                result = x if in_place else out
                found.append(_Contestant(row.variant, mode, call, arena, x, result))
        except InvalidArgumentError as error:
            # Refused before anything was sent, and alike on every rank.
            if len(self.plan.dtypes) == 1 and len(self.plan.ops) == 1:
                raise
            row.note = str(error)
            return []
        return found

    def _check(self, contestants: Sequence[_Contestant], exact: Exact | None) -> None:
        if not self.plan.check or exact is None:
            return
        for contestant in contestants:
            if contestant.result is not contestant.x:
                exact.poison(contestant.result)
                contestant.arena.push(contestant.result)
            exact.fill(contestant.x)
            contestant.arena.push(contestant.x)
            contestant.call()
            contestant.arena.pull(contestant.result)
            contestant.wrong.append(exact.count_wrong(contestant.result))

    def _settle_iterations(self, contestants: Sequence[_Contestant]) -> None:
        """The same numbers on every rank, from the time that the slowest needs."""
        plan = self.plan
        slowest: Sequence[int] = [0] * len(contestants)
        if plan.iterations is None or plan.warmup is None:
            isolated = plan.cadence == "isolated"
            mine = [
                timing.cost_of_iteration(c.call, self._comm.barrier, isolated) for c in contestants
            ]
            slowest = self._slowest(mine).tolist()
        for contestant, nanoseconds in zip(contestants, slowest, strict=True):
            warmup, iterations = timing.choose_iterations(nanoseconds * 1e-9)
            contestant.warmup = warmup if plan.warmup is None else plan.warmup
            contestant.iterations = iterations if plan.iterations is None else plan.iterations

    def _time(
        self, case: Case, contestants: Sequence[_Contestant], floor: FloorMeter | None
    ) -> None:
        """Runs the iterations of all, in turns."""
        isolated = self.plan.cadence == "isolated"
        barrier = self._comm.barrier
        shares = [timing.split_rounds(c.iterations) for c in contestants]
        floor_share = timing.split_rounds(max((c.iterations for c in contestants), default=0))
        if floor is not None:
            floor.start(case.nbytes)
        with timing.no_garbage_collection():
            for contestant in contestants:
                for _ in range(contestant.warmup):
                    contestant.call()
            for turn in range(timing.ROUNDS):
                for contestant, share in zip(contestants, shares, strict=True):
                    if share[turn] == 0:
                        continue
                    contestant.call()  # brings this contestant's arrays back into cache
                    contestant.nanoseconds += timing.time_calls(
                        contestant.call, barrier, share[turn], isolated
                    )
                if floor is not None and floor_share[turn]:
                    floor.run(floor_share[turn])

    def _collect(
        self,
        case: Case,
        contestants: Sequence[_Contestant],
        rows: Sequence[Row],
        floor: FloorMeter | None,
        report: Report,
    ) -> None:
        """Combines what the ranks saw, in one exchange after the timing."""
        mine = [time for c in contestants for time in c.nanoseconds]
        if floor is not None:
            mine += floor.nanoseconds
        seconds = np.array(self._slowest(mine), np.float64) * 1e-9
        checked = self.plan.check and case.count > 0
        wrong = np.array([c.wrong for c in contestants], np.int64)
        if wrong.size:
            self._mpi_comm.Allreduce(MPI.IN_PLACE, wrong)
        begin = 0
        for contestant, of_checks in zip(contestants, wrong.tolist(), strict=True):
            end = begin + len(contestant.nanoseconds)
            statistics = timing.summarize(seconds[begin:end])
            row = next(row for row in rows if row.variant is contestant.variant)
            measurement = Measurement(statistics, max(of_checks) if checked else None)
            setattr(row, contestant.mode, measurement)
            begin = end
        if floor is not None and begin < seconds.size:
            report.floors[case] = floor.fastest(seconds[begin:])

    def _slowest(self, nanoseconds: Sequence[int]) -> Array:
        values = np.array(nanoseconds, np.int64)
        if values.size:
            self._mpi_comm.Allreduce(MPI.IN_PLACE, values, MPI.MAX)
        return values


def _finished(call: Call, arena: Arena) -> Call:
    """The call with the wait for its end on the GPU, which is what it costs there."""

    def call_and_finish() -> None:
        call()
        arena.finish()

    return call_and_finish


_NOTHING: Array = np.empty(0, np.uint8)
