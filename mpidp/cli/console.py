"""How every command behaves as one of P ranks: rank 0 speaks, and all agree on failure.

A command is declared with `cls=Command`, and reports bad input by raising `click.UsageError` or
`click.BadParameter` on every rank; `mpidp.cli.main` turns it into one line and exit status 2.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mpi4py import MPI

# What launchers tell each process about its rank: Hydra (MPICH, Intel MPI), Open MPI and PRRTE,
# MVAPICH, Slurm, Cray PALS. These are the launcher's variables, not settings of this library.
_RANK_VARIABLES = (
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)

# Open MPI's launcher ends the job at the first rank that fails, and then rank 0's line is lost.
_ENDS_JOB_AT_ONCE = "OMPI_COMM_WORLD_RANK"
_RANK_0_SPEAKS_SECONDS = 5.0


def rank_of_job(environ: Mapping[str, str] | None = None) -> int:
    """This process's rank, without starting MPI where it has not been started.

    A login node may not be able to initialise MPI, and `--help` should be quick, so before MPI is
    up the launcher's word is taken. 0 where nothing is known.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        return int(module.COMM_WORLD.Get_rank())
    environ = os.environ if environ is None else environ
    for variable in _RANK_VARIABLES:
        text = environ.get(variable, "")
        if text.isdecimal():
            return int(text)
    return 0


@contextlib.contextmanager
def only_rank_0_prints() -> Iterator[None]:
    """Drops what ranks other than 0 write to standard output."""
    if rank_of_job() == 0:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class Command(click.Command):
    """A click command whose --help, --version and the like are printed by rank 0 only."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Eager options such as --help print and leave from inside the parsing.
        with only_rank_0_prints():
            return super().parse_args(ctx, args)


def report_error(message: str) -> None:
    """One line on standard error, from rank 0 only; to be followed by the end of the process."""
    if rank_of_job() != 0:
        if _ENDS_JOB_AT_ONCE in os.environ:
            time.sleep(_RANK_0_SPEAKS_SECONDS)
        return
    line = " ".join(message.split())
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def fail_together(comm: MPI.Comm, message: str | None) -> None:
    """Raises `click.UsageError` on every rank of `comm` if any rank has a message.

    Collective. The lowest rank's message is the one shown, marked with its rank where the others
    do not share it. For bad input that only some ranks can see: a path, an environment variable.
    """
    messages = comm.allgather(message)
    found = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    if not found:
        return
    rank, text = found[0]
    everywhere = len(found) == len(messages)
    raise click.UsageError(text if everywhere or rank == 0 else f"rank {rank}: {text}")
