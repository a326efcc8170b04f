"""The exception tree. The extension raises these already translated.

Catch `MpidpError` for everything this library raises on purpose, or one of its children:

    try:
        comm.all_reduce(x, timeout=30)
    except mpidp.CollectiveTimeoutError as error:
        print("these ranks did not arrive:", error.ranks)
"""

from __future__ import annotations

from collections.abc import Iterable


class MpidpError(Exception):
    """Base of every error of this library.

    `ranks` lists the ranks that the error is about, empty where it is about none: the odd ones out
    of a `MismatchError`, those that did not arrive for a `CollectiveTimeoutError`, the dead for a
    `RankFailedError`.
    """

    ranks: list[int]

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)

    def __reduce__(self) -> tuple[type[MpidpError], tuple[str, list[int]]]:
        # The default would lose the ranks when an error travels to another process.
        return (type(self), (str(self), self.ranks))


class InvalidBufferError(MpidpError, ValueError):
    """An array that cannot take part: its memory, layout, dtype, size or shape is wrong."""


class InvalidArgumentError(MpidpError, ValueError):
    """A bad op, algorithm, root, timeout, scale, setting or the like."""


class MismatchError(MpidpError):
    """The ranks called different collectives, or the same one with arguments that disagree.

    Raised on every rank, with a table of what each one asked for. The communicator stays usable.
    """


class CollectiveTimeoutError(MpidpError, TimeoutError):
    """A collective passed its deadline; `ranks` did not arrive."""


class RankFailedError(MpidpError):
    """Processes died; `ranks` are the dead."""


class ClosedError(MpidpError):
    """The communicator was closed, or belongs to the parent process of a fork."""


class MpiError(MpidpError):
    """An MPI function returned an error."""


class CudaError(MpidpError):
    """A CUDA function returned an error, or this build has no CUDA part."""


class BuildMismatchError(MpidpError, ImportError):
    """The extension cannot be used here: it was built against another MPI, or not at all."""
