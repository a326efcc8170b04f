"""`mpidp tune`: measures what "auto" should mean here, and writes or checks a tuning table."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpidp.cli.console import Command, fail_together
from mpidp.cli.options import Bytes, ListOf
from mpidp.tuning import COLLECTIVES

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidp.bench.driver import Plan

_RECHECKS = 3


@click.command(cls=Command)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The table's file; an existing one is extended.  [default: mpidp-tuning.json]",
)
@click.option(
    "--collective",
    "collectives",
    type=ListOf(COLLECTIVES, "collective", allow_all=True),
    default="all",
    show_default=True,
    help="What to tune, several with commas between.",
)
@click.option(
    "-e", "--maxbytes", type=Bytes(), default="16M", show_default=True, help="Largest size."
)
@click.option("--quick", is_flag=True, help="Fewer sizes and iterations, up to 1M: a rough table.")
@click.option(
    "--same-bits",
    is_flag=True,
    help="Choose only among algorithms whose float results are the sum in rank order, bit by bit.",
)
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Write nothing; measure "auto" under this table against every fixed algorithm.',
)
def tune(
    output: Path | None,
    collectives: tuple[str, ...],
    maxbytes: int,
    quick: bool,
    same_bits: bool,
    check: Path | None,
) -> int:
    """Measure every algorithm here and write a tuning table for this number and layout of ranks.

    Use the table with MPIDP_TUNING_FILE=FILE. Nothing is measured at run time: with one table, a
    communicator and a size always mean the same algorithm, hence the same bits in every run.

    Exit status: 0, or 1 where --check finds "auto" more than 5% slower than the best algorithm
    again and again, or 2 for bad usage.

    \b
    mpiexec -n 4 mpidp tune -o table.json
    mpiexec -n 4 mpidp tune --check table.json --collective all_reduce
    """
    if check is not None and output is not None:
        raise click.UsageError("give -o or --check, not both")
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    options = (str(output), collectives, maxbytes, quick, same_bits, str(check))
    if len(set(world.allgather(options))) > 1:
        raise click.UsageError("the ranks were given different options")
    run = _TuneRun(world, maxbytes, quick, same_bits)
    if check is not None:
        return run.check(check, collectives)
    return run.write(output or Path("mpidp-tuning.json"), collectives)


class _TuneRun:
    def __init__(self, world: MPI.Comm, max_bytes: int, quick: bool, same_bits: bool) -> None:
        self._world = world
        self._same_bits = same_bits
        self._max_bytes = min(max_bytes, 1 << 20) if quick else max_bytes
        self._quick = quick

    def write(self, path: Path, collectives: tuple[str, ...]) -> int:
        """Measures, and has rank 0 write the table."""
        from mpidp import tuning
        from mpidp.bench import document
        from mpidp.errors import InvalidArgumentError
        from mpidp.tune import choice, measure

        failure = old = None
        if self._world.rank == 0:
            failure = document.unwritable(path)
            try:
                if failure is None and path.is_file():
                    old = tuning.load_table(str(path))
            except InvalidArgumentError as error:
                failure = str(error)
        fail_together(self._world, failure)
        mpi_comm = self._world.Dup()
        entries, found = [], {}
        with self._communicator(None) as comm:
            topology = comm._topology
            cores = min(self._world.allgather(len(os.sched_getaffinity(0))))
            link = measure.link_costs(mpi_comm, comm.node_rank)
            gamma = measure.reduce_cost(mpi_comm)
            for collective in collectives:
                names = choice.candidates(
                    collective, topology.world_size, same_bits=self._same_bits
                )
                sizes, seconds = self._times(comm, mpi_comm, collective, names)
                built_in = [name for _, name in tuning.rules_for(collective, topology)]
                rules = choice.crossovers(sizes, seconds, prefer=built_in)
                entries.append(choice.entry_for(collective, rules, topology))
                found[collective] = {"nbytes": sizes, "seconds": seconds}
                self._say(f"{collective}: {_shown(rules)}")
            mpi = comm.describe()["mpi_library"]
        mpi_comm.Free()
        measured = {
            choice.label_of(topology): {
                "cores": cores,
                "mpi": mpi,
                "alpha": link and link[0],
                "beta": link and link[1],
                "gamma": gamma,
                "collectives": found,
            }
        }
        failure = None
        if self._world.rank == 0:
            table = choice.merge(old, path.stem, entries, measured)
            try:
                document.write_whole(path, lambda temporary: _write(temporary, table.to_json()))
            except OSError as error:
                failure = f"cannot write {path}: {error}"
        fail_together(self._world, failure)
        self._say(f"written: {path}")
        return 0

    def check(self, path: Path, collectives: tuple[str, ...]) -> int:
        """Compares "auto" with the fixed algorithms."""
        from mpidp import tuning
        from mpidp.tune import choice

        mpi_comm = self._world.Dup()
        slow = 0
        with self._communicator(str(path)) as comm:
            for collective in collectives:
                names = choice.candidates(collective, comm.world_size, same_bits=self._same_bits)
                sizes, seconds = self._times(comm, mpi_comm, collective, ("auto", *names))
                for i, nbytes in enumerate(sizes):
                    best = min(names, key=lambda name: seconds[name][i])
                    first = seconds["auto"][i] / seconds[best][i]
                    line = (
                        f"{collective} {nbytes}: auto {seconds['auto'][i] * 1e6:.2f} us, "
                        f"{best} {seconds[best][i] * 1e6:.2f} us, ratio {first:.3f}"
                    )
                    chosen = tuning.select(collective, nbytes, comm._topology, comm._table)
                    if chosen == best:
                        line += ", which is what auto means here"
                    elif first > 1 + choice.MARGIN:
                        again = self._again(comm, mpi_comm, collective, nbytes, best)
                        line += f", measured again {again:.3f}"
                        slow += again > 1 + choice.MARGIN
                    self._say(line)
        mpi_comm.Free()
        self._say(f"sizes where auto is more than 5% slower, measured again: {slow}")
        return 1 if slow else 0

    def _again(
        self, comm: Any, mpi_comm: MPI.Comm, collective: str, nbytes: int, best: str
    ) -> float:
        """The median ratio of more rounds: the best of many is partly the luckiest of many."""
        ratios = []
        for _ in range(_RECHECKS):
            plan = dataclasses.replace(self._plan(collective), min_bytes=nbytes, max_bytes=nbytes)
            _, seconds = self._measured(comm, mpi_comm, plan, ("auto", best))
            ratios.append(seconds["auto"][0] / seconds[best][0])
        return sorted(ratios)[_RECHECKS // 2]

    def _times(
        self, comm: Any, mpi_comm: MPI.Comm, collective: str, names: tuple[str, ...]
    ) -> tuple[list[int], dict[str, list[float]]]:
        return self._measured(comm, mpi_comm, self._plan(collective), names)

    def _measured(
        self, comm: Any, mpi_comm: MPI.Comm, plan: Plan, names: tuple[str, ...]
    ) -> tuple[list[int], dict[str, list[float]]]:
        from mpidp.tune import measure

        failure = driver = None
        try:
            driver = measure.driver_for(comm, mpi_comm, plan, names)
        except MemoryError as error:
            failure = f"not enough memory for the arrays, use a smaller -e: {error}"
        fail_together(self._world, failure)
        assert driver is not None
        return measure.times_of(driver, names)

    def _plan(self, collective: str) -> Plan:
        from mpidp.tune.measure import TunePlan

        return TunePlan(
            collective=collective,
            min_bytes=8,
            max_bytes=max(self._max_bytes, 8),
            factor=16 if self._quick else 4,
            iterations=60 if self._quick else None,
            warmup=5 if self._quick else None,
            check=False,
        )

    def _communicator(self, table: str | None) -> Any:
        """With this table and no forced algorithm; bad MPIDP_* variables are bad usage."""
        import mpidp
        from mpidp.config import Config
        from mpidp.errors import InvalidArgumentError, MismatchError

        config = failure = None
        try:
            config = dataclasses.replace(
                Config.from_environment(), tuning_file=table, algorithm="auto"
            )
        except InvalidArgumentError as error:
            failure = str(error)
        fail_together(self._world, failure)
        try:
            return mpidp.Communicator(self._world, config=config)
        except (InvalidArgumentError, MismatchError) as error:
            raise click.UsageError(str(error)) from None

    def _say(self, line: str) -> None:
        if self._world.rank == 0:
            click.echo(line)


def _shown(rules: Any) -> str:
    from mpidp.bench.text import size_label

    parts = [name if limit is None else f"{name} to {size_label(limit)}" for limit, name in rules]
    return ", ".join(parts)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
