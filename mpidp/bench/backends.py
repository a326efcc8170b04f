"""What is measured: the same collective through this library and through the MPI itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpidp.bench.cases import Case

Array = NDArray[Any]
Call = Callable[[], Any]

BACKENDS = ("mpidp", "mpi")


class Backend(Protocol):
    """One way to run a collective."""

    name: str

    def unsupported(self, case: Case) -> str | None:
        """Why the backend cannot run `case`, or None."""

    def bind(self, case: Case, x: Array, out: Array | None) -> Call:
        """The call to be timed, with everything that can be prepared prepared.

        `out` is None for in place.
        """


class MpidpBackend:
    """This library, through its public interface."""

    name = "mpidp"

    def __init__(self, comm: Any, algorithm: str) -> None:
        self._comm = comm
        self._algorithm = algorithm

    def unsupported(self, case: Case) -> str | None:
        """None: what this library cannot do it reports itself."""
        return None

    def bind(self, case: Case, x: Array, out: Array | None) -> Call:
        """See `Backend.bind`."""
        name = case.collective.name
        method = getattr(self._comm, name)
        if name == "barrier":
            return partial(method)
        options: dict[str, Any] = {"algorithm": self._algorithm}
        if case.collective.reduces:
            options["op"] = case.op
        if case.collective.rooted:
            options["root"] = case.root
        if name == "broadcast":
            return partial(method, x, **options)
        if name == "reduce" and self._comm.rank != case.root:
            out = None
        return partial(method, x, out, **options)


class StagedMpiBackend(MpidpBackend):
    """The MPI's own collectives on GPU arrays, which this library stages through the host."""

    name = "mpi"

    def __init__(self, comm: Any) -> None:
        super().__init__(comm, "mpi")


_MPI_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
# MPI's arithmetic operators are not defined for its logical types.
_MPI_BOOL_OPS = {"sum": MPI.LOR, "prod": MPI.LAND, "min": MPI.LAND, "max": MPI.LOR}


class MpiBackend:
    """The MPI library's own collectives, through mpi4py."""

    name = "mpi"

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def unsupported(self, case: Case) -> str | None:
        """MPI has no 16-bit floating types and no mean."""
        if not case.collective.reduces:
            return None
        if case.dtype in ("float16", "bfloat16"):
            return f"MPI cannot reduce {case.dtype}"
        if case.op == "mean":
            return "MPI has no mean"
        return None

    def bind(self, case: Case, x: Array, out: Array | None) -> Call:
        """See `Backend.bind`."""
        comm, name = self._comm, case.collective.name
        if name == "barrier":
            return comm.Barrier
        if not case.collective.reduces:
            # Only moved, so bytes do for every dtype.
            x = x.view(np.uint8)
            out = None if out is None else out.view(np.uint8)
        if name == "broadcast":
            return partial(comm.Bcast, x, case.root)
        if name == "all_gather":
            return partial(comm.Allgather, x, out)
        if name == "all_to_all":
            return partial(comm.Alltoall, x, out)
        op = (_MPI_BOOL_OPS if case.dtype == "bool" else _MPI_OPS)[case.op]
        if name == "all_reduce":
            return partial(comm.Allreduce, MPI.IN_PLACE if out is None else x, _or(out, x), op)
        if name == "reduce_scatter":
            return partial(comm.Reduce_scatter_block, x, out, op)
        if comm.rank != case.root:
            return partial(comm.Reduce, x, None, op, case.root)
        return partial(comm.Reduce, MPI.IN_PLACE if out is None else x, _or(out, x), op, case.root)


def _or(out: Array | None, x: Array) -> Array:
    return x if out is None else out
