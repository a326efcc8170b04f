"""`mpidp bench`: options in, report out; the measuring is in mpidp.bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpidp.bench.cases import COLLECTIVES, op_fits
from mpidp.cli.console import Command, fail_together
from mpidp.cli.options import Bytes, ListOf, OneOf
from mpidp.config import ALGORITHMS, OPS

if TYPE_CHECKING:
    from mpidp.bench.driver import Plan

_DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
# The names that nccl-tests has for some of them.
_DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "char": "int8",
    "int": "int32",
}


class _Dtypes(ListOf):
    def __init__(self) -> None:
        super().__init__(_DTYPES, "dtype", allow_all=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, str):
            value = ",".join(_DTYPE_ALIASES.get(part, part) for part in value.split(","))
        return super().convert(value, param, ctx)


@click.command(cls=Command)
@click.argument(
    "collective",
    type=OneOf(COLLECTIVES, "collective"),
    default="all_reduce",
    metavar="[COLLECTIVE]",
)
@click.option(
    "-b", "--minbytes", type=Bytes(), default="8", show_default=True, help="Smallest size."
)
@click.option(
    "-e", "--maxbytes", type=Bytes(), default="64M", show_default=True, help="Largest size."
)
@click.option(
    "-f",
    "--stepfactor",
    type=click.IntRange(min=2),
    metavar="N",
    default=None,
    help="Factor between sizes.  [default: 4]",
)
@click.option("-i", "--stepbytes", type=Bytes(), help="Step between sizes, in place of a factor.")
@click.option(
    "-n",
    "--iters",
    type=click.IntRange(min=1),
    metavar="N",
    help="Timed iterations.  [default: as many as fit a quarter of a second, 5 to 1000]",
)
@click.option(
    "-w",
    "--warmup_iters",
    "--warmup-iters",
    "warmup",
    type=click.IntRange(min=0),
    metavar="N",
    help="Iterations before those.  [default: a tenth of them]",
)
@click.option(
    "-d",
    "--datatype",
    type=_Dtypes(),
    default="float32",
    show_default=True,
    help='Element type, several with commas between, or "all".',
)
@click.option(
    "-o",
    "--op",
    type=ListOf(OPS, "op", allow_all=True),
    default="sum",
    show_default=True,
    help=f'Reduction: {", ".join(OPS)}, several with commas between, or "all".',
)
@click.option(
    "-r",
    "--root",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Root rank.  [default: 0]",
)
@click.option(
    "-c",
    "--check",
    type=click.IntRange(0, 1),
    metavar="[0|1]",
    default=1,
    help="1 to check every element, before and after the timing.  [default: 1]",
)
@click.option(
    "-J",
    "--output_file",
    "--output-file",
    "json_path",
    type=click.Path(path_type=Path),
    help="Write the report to this file as JSON, with nccl-tests' names.",
)
@click.option(
    "--algorithm",
    type=OneOf(ALGORITHMS, "algorithm"),
    default="auto",
    show_default=True,
    help="Algorithm of the mpidp backend.",
)
@click.option(
    "--memory",
    type=OneOf(("registered", "plain", "both"), "memory"),
    default="registered",
    show_default=True,
    help="Where mpidp's arrays lie: in comm.empty(), or anywhere. The mpi backend's are plain.",
)
@click.option(
    "--backend",
    "backends",
    type=ListOf(("mpidp", "mpi"), "backend"),
    default="mpidp",
    show_default=True,
    help="mpidp, mpi (the MPI's own collectives), or both with a comma: measured in turns.",
)
@click.option(
    "--cadence",
    type=OneOf(("isolated", "streaming"), "cadence"),
    default="isolated",
    show_default=True,
    help="A barrier before each iteration, or iterations back to back.",
)
@click.option(
    "--device",
    type=OneOf(("cpu", "cuda"), "device"),
    default="cpu",
    show_default=True,
    help="Where the arrays lie.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    help="Draw busbw over size to this file (.png, .svg, .pdf); needs mpidp[plot].",
)
def bench(
    collective: str,
    minbytes: int,
    maxbytes: int,
    stepfactor: int | None,
    stepbytes: int | None,
    iters: int | None,
    warmup: int | None,
    datatype: tuple[str, ...],
    op: tuple[str, ...],
    root: int,
    check: int,
    json_path: Path | None,
    algorithm: str,
    memory: str,
    backends: tuple[str, ...],
    cadence: str,
    device: str,
    plot_path: Path | None,
) -> int:
    """Measure the time and bandwidth of COLLECTIVE (default: all_reduce) over a range of sizes.

    The table has nccl-tests' columns, and its bandwidths: algbw = size / time, and busbw = algbw
    times 2(P-1)/P for all_reduce, (P-1)/P for all_gather, reduce_scatter and all_to_all, 1 for the
    others, in GB/s (1e9 bytes). The time of an iteration is the slowest rank's; the median over
    iterations is shown. Sizes take K, M and G for powers of 1024.

    Exit status: 0, or 1 where a result was wrong, or 2 for bad usage.

    \b
    mpiexec -n 4 mpidp bench -b 8 -e 64M -f 4
    mpiexec -n 4 mpidp bench --backend mpidp,mpi --memory both -J report.json
    """
    if minbytes > maxbytes and collective != "barrier":
        raise click.UsageError(f"-b {minbytes} is more than -e {maxbytes}")
    if stepfactor is not None and stepbytes is not None:
        raise click.UsageError("give -f or -i, not both")
    if device == "cuda":
        from mpidp import devices

        found = devices.describe()
        if found["runtime"] is None:
            raise click.UsageError(f"--device cuda: {found['reason']}")
    # From here on MPI is up, and the imports below may take a moment.
    from mpi4py import MPI

    from mpidp.cli.bench_run import BenchRun, now

    started = now()
    world = MPI.COMM_WORLD
    if root >= world.Get_size():
        raise click.UsageError(f"-r {root}: there are {world.Get_size()} ranks, from 0")
    fail_together(world, _bad_output(json_path, plot_path) if world.rank == 0 else None)
    plan = _plan(
        collective=collective,
        min_bytes=minbytes,
        max_bytes=maxbytes,
        factor=None if stepbytes is not None else (stepfactor or 4),
        step=stepbytes,
        iterations=iters,
        warmup=warmup,
        dtypes=datatype,
        ops=op,
        root=root,
        check=bool(check),
        cadence=cadence,
    )
    _check_algorithm(collective, algorithm)
    memories = ("registered", "plain") if memory == "both" else (memory,)
    if device == "cuda":
        memories = ("device",)
    run = BenchRun(plan, algorithm, memories, backends, world)
    return run.measure_and_report(started, json_path, plot_path)


def _plan(**settings: Any) -> Plan:
    """The plan, without the dtypes that NumPy lacks here when all were asked for."""
    from mpidp.bench.driver import Plan
    from mpidp.buffers import numpy_dtype
    from mpidp.errors import InvalidBufferError

    dtypes = []
    for dtype in settings["dtypes"]:
        try:
            numpy_dtype(dtype)
        except InvalidBufferError as error:
            if settings["dtypes"] != _DTYPES:
                raise click.UsageError(str(error)) from None
            continue
        dtypes.append(dtype)
    plan = Plan(**{**settings, "dtypes": tuple(dtypes)})
    pairs = [(dtype, op) for dtype in plan.dtypes for op in plan.ops]
    if COLLECTIVES[plan.collective].reduces and not any(op_fits(op, d) for d, op in pairs):
        raise click.UsageError(f"{plan.ops[0]} is not defined for {plan.dtypes[0]}")
    return plan


def _check_algorithm(collective: str, algorithm: str) -> None:
    from mpidp.tuning import AVAILABLE

    # A barrier has no choice, and nothing to be wrong about.
    available = AVAILABLE.get(collective, (algorithm,))
    if algorithm not in ("auto", *available):
        raise click.UsageError(
            f"--algorithm {algorithm}: {collective} has auto, {', '.join(available)}"
        )


def _bad_output(json_path: Path | None, plot_path: Path | None) -> str | None:
    """Why an output file cannot be written; asked before measuring."""
    from mpidp.bench import document, plot

    reason = document.unwritable(json_path) if json_path is not None else None
    if reason is not None:
        return f"-J {reason}"
    if plot_path is None:
        return None
    reason = plot.unavailable(plot_path)
    if reason is not None:
        return reason
    reason = document.unwritable(plot_path)
    return f"--plot {reason}" if reason is not None else None
