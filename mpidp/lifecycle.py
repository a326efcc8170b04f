"""From birth to death of a communicator: the build check, agreed settings, exit and fork."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import sys
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpidp import tuning
from mpidp.config import Config
from mpidp.errors import BuildMismatchError, InvalidArgumentError, MpidpError

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

# Vendors that share the MPICH ABI: a build against one runs with another.
_MPICH_ABI = ("MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")


def first_line(text: str) -> str:
    """The first line of an MPI library's version text, which may run over many."""
    line = (text.strip("\0\n ").splitlines() or ["an unknown MPI"])[0]
    return " ".join(line.split())


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


def unlink_mpi_files(comm: MPI.Comm) -> None:
    """Unlink the shared memory files of MPICH, once all its ranks have mapped them.

    MPICH keeps its file in /dev/shm until MPI_Finalize, so a job that is killed leaves it behind (a
    megabyte a rank), and /dev/shm fills up over many jobs. A file without a name lives as long as a
    process has it mapped. Collective; does nothing for communicators smaller than the world, whose
    other ranks may not have started, nor for other MPIs, which clean up after themselves.
    """
    if MPI.get_vendor()[0] != "MPICH" or comm.size != MPI.COMM_WORLD.size:
        return
    comm.Barrier()
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/mpich_shm_" in line}
        for path in paths:
            os.unlink(path)


def agree_on_settings(
    comm: MPI.Comm, timeout: float | None, config: Config | None
) -> tuple[Config, tuning.Table | None]:
    """Rank 0's settings, with this rank's node_id, and rank 0's tuning table. Collective.

    Both ends of a message depend on them, so one rank's must count. Raises on every rank where one
    rank's settings are wrong, so that no other waits for it.
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
    offers = comm.allgather((None if error is None else str(error), config, table_text))
    if error is not None:
        raise error
    failed = [rank for rank, offer in enumerate(offers) if offer[0] is not None]
    if failed:
        raise InvalidArgumentError(f"rank {failed[0]}: {offers[failed[0]][0]}", failed)
    own = config or Config()
    _, agreed, table_text = offers[0]
    table = None if table_text is None else tuning.Table.from_json(table_text)
    return replace(agreed, node_id=own.node_id), table


# Weak, so that a communicator which is dropped does not live on; in order of creation, which is the
# same on all ranks that share one.
_live: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_serial = itertools.count()


def register(communicator: Communicator) -> None:
    """Have `communicator` closed at interpreter exit and disabled in forked children."""
    _live[next(_serial)] = communicator


def _close_all() -> None:
    # Registered with Python's atexit, so this runs before MPI_Finalize, which mpi4py leaves to
    # the C level. Newest first: what was split off closes before what it came from.
    failing = hasattr(sys, "last_type")  # set when an uncaught exception ends the program
    for _, communicator in sorted(_live.items(), reverse=True):
        with contextlib.suppress(MpidpError):
            communicator._close(synchronize=not failing)


def _disable_in_child() -> None:
    for communicator in list(_live.values()):
        context = communicator._disable(
            "this communicator belongs to the parent process: MPI does not survive a fork. Use "
            'the "spawn" or "forkserver" start method for workers, or fork before creating it'
        )
        # Never destroyed here: it would wait for a thread that only the parent has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    _live.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disable_in_child)
