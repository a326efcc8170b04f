"""One run of `mpidp bench`: makes the communicator, measures, and puts the report out."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from mpi4py import MPI

import mpidp
from mpidp import _core
from mpidp.bench import document, plot, text
from mpidp.bench.backends import MpiBackend, MpidpBackend, StagedMpiBackend
from mpidp.bench.driver import Driver, Plan, Report, Row, Variant, out_of_bounds
from mpidp.bench.text import size_label
from mpidp.cli.console import fail_together
from mpidp.errors import InvalidArgumentError, MismatchError


class BenchRun:
    """One benchmark on a communicator that it makes and closes.

    `make_comm` takes the place of `mpidp.Communicator`.
    """

    def __init__(
        self,
        plan: Plan,
        algorithm: str,
        memories: Sequence[str],
        backends: Sequence[str],
        world: MPI.Comm,
        make_comm: Callable[[MPI.Comm], Any] | None = None,
    ) -> None:
        self.plan = plan
        self.algorithm = algorithm
        self.memories = memories
        self.backends = backends
        self.world = world
        self._make_comm = make_comm or _make_communicator

    def measure_and_report(
        self, started: str, json_path: Path | None, plot_path: Path | None
    ) -> int:
        """Returns the exit status."""
        mpi_comm = self.world.Dup()
        with self._make_comm(self.world) as comm:
            variants = self._variants(comm, mpi_comm)
            algorithms = [self._shown_algorithm(comm, variant) for variant in variants]
            if "device" in self.memories:
                # The first collective on a GPU decides the transport, which the header names.
                comm.all_reduce(comm.empty(1, "float32", device="cuda"))
            facts = {**_facts(comm, mpi_comm), "start_time": started}
            say = _say if comm.rank == 0 else _say_nothing
            for line in text.header(self.plan, facts):
                say(line)
            report = self._measure(comm, mpi_comm, variants, algorithms, say)
        mpi_comm.Free()
        for table in (text.floor_table, text.ratio_tables):
            for line in table(report, variants):
                say(line)
        facts["end_time"] = now()
        failure = None
        if comm.rank == 0:
            try:
                if json_path is not None:
                    built = document.build(self.plan, variants, algorithms, report, facts)
                    document.write_json(json_path, built)
                    say(f"# JSON report: {json_path}")
                if plot_path is not None:
                    title = f"{self.plan.collective}, {comm.world_size} ranks, {facts['mpi_name']}"
                    plot.draw(plot_path, self.plan, report, title)
                    say(f"# Plot: {plot_path}")
            except OSError as error:
                # The disk filled up, say. The table is out, so this is no reason for a traceback.
                failure = f"cannot write the report: {error}"
        fail_together(self.world, failure)
        return 1 if out_of_bounds(report.rows) else 0

    def _measure(
        self,
        comm: Any,
        mpi_comm: MPI.Comm,
        variants: Sequence[Variant],
        algorithms: Sequence[str],
        say: Callable[[str], None],
    ) -> Report:
        failure = driver = None
        try:
            driver = Driver(self.plan, comm, mpi_comm, variants, [_core.memory_floor])
        except MemoryError as error:
            failure = f"not enough memory for the arrays, use a smaller -e: {error}"
        fail_together(self.world, failure)
        assert driver is not None
        # Rows of one section appear as they are measured; several sections take turns, so their
        # rows must wait for each other.
        live = len(variants) == 1
        if live:
            for line in text.section_header(variants[0], algorithms[0]):
                say(line)

        def on_row(row: Row) -> None:
            if live:
                say(text.row_line(row))

        with _Progress(driver.num_cases, shown=comm.rank == 0 and not live) as progress:
            try:
                report = driver.run(progress.advance, on_row)
            except InvalidArgumentError as error:
                raise click.UsageError(str(error)) from None
        for variant, algorithm in zip(variants, algorithms, strict=True):
            if not live:
                for line in text.section_header(variant, algorithm):
                    say(line)
                for row in report.section(variant):
                    say(text.row_line(row))
            for line in text.section_footer(report.section(variant)):
                say(line)
        return report

    def _variants(self, comm: Any, mpi_comm: MPI.Comm) -> list[Variant]:
        variants = []
        for name in self.backends:
            if name == "mpidp":
                ours = MpidpBackend(comm, self.algorithm)
                memories = self.memories if self.plan.collective != "barrier" else ("plain",)
                variants += [Variant(ours, memory) for memory in memories]
            elif "device" in self.memories and self.plan.collective != "barrier":
                # An MPI cannot be given GPU memory unless it is known to take it: staged for it.
                variants.append(Variant(StagedMpiBackend(comm), "device"))
            else:
                variants.append(Variant(MpiBackend(mpi_comm), "plain"))
        return variants

    def _shown_algorithm(self, comm: Any, variant: Variant) -> str:
        """What the section's header says; for "auto", what that means at which size."""
        if variant.backend.name != "mpidp":
            return "its own"
        rules = comm.describe().get("algorithms", {}).get(self.plan.collective)
        if self.algorithm != "auto" or not rules:
            return self.algorithm
        parts = [
            algorithm if limit is None else f"{algorithm} to {size_label(limit)}"
            for limit, algorithm in rules
        ]
        return f"auto ({', '.join(parts)})"


def _make_communicator(world: MPI.Comm) -> Any:
    """A communicator for the benchmark; bad MPIDP_* variables are bad usage."""
    try:
        return mpidp.Communicator(world)
    except (InvalidArgumentError, MismatchError) as error:
        raise click.UsageError(str(error)) from None


def _facts(comm: Any, mpi_comm: MPI.Comm) -> dict[str, Any]:
    """Where this ran, for the header and the JSON report. Collective."""
    described = comm.describe()
    cores = len(os.sched_getaffinity(0))
    devices = mpi_comm.allgather(
        {
            "rank": comm.rank,
            "group": 0,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "node": comm.node_rank,
            "device_info": _device_name(described),
        }
    )
    nodes = [device["node"] for device in devices]
    local_sizes = [nodes.count(node) for node in sorted(set(nodes))]
    library = " ".join(described.get("mpi_library", "").split("\n")[0].split())
    return {
        "version": mpidp.__version__,
        "device_transport": _device_transport(described),
        "mpi_library": library,
        "mpi_name": library.split(",")[0],
        "instruction_set": described.get("instruction_set", "unknown"),
        "world_size": comm.world_size,
        "local_sizes": local_sizes,
        "cores": cores,
        "oversubscribed": any(mpi_comm.allgather(comm.local_size > cores)),
        "devices": devices,
        "args": ["mpidp", *sys.argv[1:]],
    }


def _device_name(described: dict[str, Any]) -> str:
    index = described.get("device", {}).get("index")
    return "cpu" if index is None else f"cuda:{index} {_core.device_info(index)['name']}"


def _device_transport(described: dict[str, Any]) -> str | None:
    """With the reason where it is not the best; None where no GPU is used."""
    device = described.get("device", {})
    if device.get("index") is None:
        return None
    return (
        f"{device['transport']} ({device['reason']})" if device["reason"] else device["transport"]
    )


class _Progress:
    """A bar on rank 0's terminal while nothing else can be shown yet."""

    def __init__(self, num_cases: int, *, shown: bool) -> None:
        self._bar = None
        self._num_cases = num_cases
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("measuring", total=self._num_cases)
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, case: Any) -> None:
        """Shows what is measured now."""
        if self._bar is not None:
            label = f"{case.dtype} {size_label(case.nbytes)}"
            self._bar.update(self._task, description=label, advance=1)


def _say(line: str) -> None:
    # Flushed, because a launcher's pipe is not a terminal and a sweep takes a while.
    click.echo(line)
    sys.stdout.flush()


def _say_nothing(line: str) -> None:
    pass


def now() -> str:
    """Local time, as nccl-tests writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
