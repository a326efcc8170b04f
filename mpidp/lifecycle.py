"""From birth to death of a communicator: the build check, agreed settings, exit and fork."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpidp import tuning
from mpidp.config import Config
from mpidp.errors import BuildMismatchError, InvalidArgumentError, MismatchError, MpidpError

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

# Vendors that share the MPICH ABI: a build against one runs with another.
_MPICH_ABI = ("MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")

# Settings that must be the same on every rank, because both ends of a message depend on them.
_SHARED_SETTINGS = ("shared_memory", "slot_bytes", "inline_bytes", "segment_bytes", "piece_bytes")


def first_line(text: str) -> str:
    """The first line of an MPI library's version text, which may run over many."""
    return (text.strip("\0\n ").splitlines() or ["an unknown MPI"])[0].strip()


def check_build(core_library: str, mpi4py_library: str, built_against: str, vendor: str) -> None:
    """Raise `BuildMismatchError` where the extension and mpi4py do not use the same MPI.

    The first two are MPI_Get_library_version as the extension and mpi4py see it, `built_against`
    the vendor and version of the extension's mpi.h, `vendor` that of mpi4py's MPI.
    """
    advice = "rebuild with MPICC set to the compiler of the MPI that mpi4py uses (pip install .)"
    if core_library.strip("\0\n ") != mpi4py_library.strip("\0\n "):
        raise BuildMismatchError(
            f"mpidp runs on {first_line(core_library)} and mpi4py on "
            f"{first_line(mpi4py_library)}: two MPI libraries in one process; {advice}"
        )
    same = built_against.lower().startswith(vendor.lower())
    compatible = vendor.startswith(_MPICH_ABI) and built_against.startswith(_MPICH_ABI)
    if not same and not compatible:
        raise BuildMismatchError(
            f"mpidp was built against {built_against} and runs on {vendor}; {advice}"
        )


def agree_on_settings(
    comm: MPI.Comm, timeout: float | None, config: Config | None
) -> tuple[Config, tuning.Table | None]:
    """This rank's settings and rank 0's tuning table. Collective.

    Raises on every rank where one rank's settings are wrong (so that no other waits for it), and
    `MismatchError` where settings that both ends of a message depend on differ.
    """
    error: MpidpError | None = None
    table_text = None
    try:
        config = Config.from_environment() if config is None else config
        if timeout is not None:
            config = replace(config, timeout=timeout)
        if comm.rank == 0 and config.tuning_file is not None:
            table_text = tuning.load_table(config.tuning_file).to_json()
    except MpidpError as caught:
        error = caught
    config = config or Config()
    offers = comm.allgather(
        (
            None if error is None else str(error),
            {field: getattr(config, field) for field in _SHARED_SETTINGS},
            config.algorithm,
            table_text,
        )
    )
    if error is not None:
        raise error
    failed = [rank for rank, offer in enumerate(offers) if offer[0] is not None]
    if failed:
        raise InvalidArgumentError(f"rank {failed[0]}: {offers[failed[0]][0]}", failed)
    settings = [offer[1] for offer in offers]
    odd = [rank for rank, theirs in enumerate(settings) if theirs != settings[0]]
    if odd:
        raise MismatchError(_settings_table(settings, [0, *odd]), odd)
    _, _, algorithm, table_text = offers[0]
    table = None if table_text is None else tuning.Table.from_json(table_text)
    return replace(config, algorithm=algorithm), table


def _settings_table(settings: list[dict[str, Any]], ranks: list[int]) -> str:
    lines = ["the ranks have different settings; give all of them the same MPIDP_* variables:"]
    for rank in ranks:
        shown = ", ".join(f"{field}={value}" for field, value in settings[rank].items())
        lines.append(f"  rank {rank}: {shown}")
    return "\n".join(lines)


# Weak, so that a communicator which is dropped does not live on; in order of creation, which is the
# same on all ranks that share one.
_live: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_serial = itertools.count()
# Contexts of the parent process: their destructors must not run in a forked child.
_inherited: list[Any] = []


def register(communicator: Communicator) -> None:
    """Have `communicator` closed at interpreter exit and disabled in forked children."""
    _live[next(_serial)] = communicator


def _close_all() -> None:
    # Registered with Python's atexit, so this runs before MPI_Finalize, which mpi4py leaves to
    # the C level. Newest first: what was split off closes before what it came from.
    for _, communicator in sorted(_live.items(), reverse=True):
        with contextlib.suppress(MpidpError):
            communicator.close()


def _disable_in_child() -> None:
    for communicator in list(_live.values()):
        _inherited.append(
            communicator._disable(
                "this communicator belongs to the parent process: MPI does not survive a fork. Use "
                'the "spawn" or "forkserver" start method for workers, or fork before creating it'
            )
        )
    _live.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disable_in_child)
