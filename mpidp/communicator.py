"""The Communicator: validates, converts arrays, and calls the extension."""

from __future__ import annotations

import os
import pickle
import warnings
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpidp import lifecycle, tuning
from mpidp.config import Config
from mpidp.errors import (
    BuildMismatchError,
    ClosedError,
    InvalidArgumentError,
    MpidpError,
)

try:
    from mpidp import _core
except ImportError as error:
    raise BuildMismatchError(
        f"the extension mpidp._core cannot be loaded ({error}); build it with scripts/setup.sh or "
        "`pip install .`, against the MPI that mpi4py uses"
    ) from error

from mpidp import devices
from mpidp.arguments import is_index, num_elements
from mpidp.buffers import numpy_dtype
from mpidp.collectives import Collectives

lifecycle.check_build(
    _core.mpi_library(), MPI.Get_library_version(), _core.built_against(), MPI.get_vendor()[0]
)


class _Unusable:
    """Stands in for the extension's context once it must not be used."""

    __slots__ = ("message",)

    def __init__(self, message: str) -> None:
        self.message = message

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(self.message)

    def __call__(self, *args: object) -> None:
        raise ClosedError(self.message)


class Communicator(Collectives):
    """Collectives over the ranks of an MPI communicator, which is duplicated and never used again.

    Creating one is collective over `comm` (default: MPI.COMM_WORLD). `timeout` is the deadline of
    each collective in seconds, `config` the settings; both default to the MPIDP_* variables. Close
    it with `close()` or a with statement; at interpreter exit it closes itself. Rank 0's settings
    count on every rank.

        with mpidp.Communicator() as comm:
            comm.all_reduce(x, op="mean")          # in place
            y = comm.all_gather(x)

    Arrays are NumPy arrays (bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32,
    float64, complex64, complex128) or anything `mpidp.buffers.as_buffer` understands; they must be
    C-contiguous. Every rank must make the same calls in the same order, with the same op, dtype,
    count and root: where they do not, all ranks raise `MismatchError`. Collectives further raise
    `InvalidBufferError`, `InvalidArgumentError`, `CollectiveTimeoutError`, `RankFailedError`,
    `ClosedError` and `MpiError`.

    Common keywords: `algorithm` is one of "auto", "direct", "ring", "recursive_halving",
    "recursive_doubling", "hierarchical", "mpi"; `op` one of "sum", "mean", "prod", "min", "max";
    `deterministic=True` accumulates in rank order whatever the algorithm; `scale` multiplies this
    rank's input first; `timeout` overrides the communicator's. On GPU arrays a collective starts
    after what the caller's current CUDA stream has queued, and what is queued there later sees its
    result; `stream` names another stream, and means nothing for host arrays.
    """

    __slots__ = (
        "__weakref__",
        "_closed",
        "_comm",
        "_config",
        "_pid",
        "_table",
        "_topology",
        "local_rank",
        "local_size",
        "node_rank",
        "num_nodes",
        "timeout",
    )

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    timeout: float

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        timeout: float | None = None,
        config: Config | None = None,
    ) -> None:
        self._closed = True  # until set up, so that a failed creation can be dropped
        base = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(base, MPI.Comm) or base == MPI.COMM_NULL or base.Is_inter():
            raise InvalidArgumentError(
                f"comm is {type(base).__name__}; give an mpi4py intra-communicator"
            )
        self._set_up(base.Dup(), timeout, config)
        lifecycle.unlink_mpi_files(self._comm)

    def _set_up(self, comm: MPI.Comm, timeout: float | None, config: Config | None) -> None:
        """Takes over `comm`. A failure on one rank is raised on all."""
        try:
            self._config, self._table = lifecycle.agree_on_settings(comm, timeout, config)
            self._context = _core.Context(comm.handle, **self._config.core_options())
        except BaseException:
            comm.Free()
            raise
        context = self._context
        self._comm = comm
        self._pid = os.getpid()
        self.rank, self.world_size = context.rank, context.world_size
        self.local_rank, self.local_size = context.local_rank, context.local_size
        self.node_rank, self.num_nodes = context.node_rank, context.num_nodes
        self.timeout = context.timeout
        nodes = comm.allgather((context.local_size, context.shared_memory))
        self._topology = tuning.Topology(
            self.world_size,
            self.num_nodes,
            min(local_size for local_size, _ in nodes),
            max(local_size for local_size, _ in nodes),
            all(shared for _, shared in nodes),
        )
        for collective in tuning.COLLECTIVES:
            context.set_rules(collective, self._rules(collective))
        self._all_reduce = context.all_reduce
        self._all_reduce_async = context.all_reduce_async
        self._closed = False
        lifecycle.register(self)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def close(self) -> None:
        """Wait for pending work and free what the communicator owns. Collective; twice is fine.

        Leaving a with statement by an exception does not wait for the other ranks, which may never
        come.
        """
        self._close(synchronize=True)

    def _close(self, synchronize: bool) -> None:
        if self._closed:
            return
        self._closed = True
        context = self._disable("the communicator is closed; create a new one")
        if os.getpid() != self._pid:
            return
        # Freeing is collective for MPI, and some do not survive it with traffic outstanding: where
        # the others did not come, it is left to the exit.
        if context.close(synchronize) and not MPI.Is_finalized():
            self._comm.Free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(synchronize=error is None)

    def __del__(self) -> None:
        # Closing is collective, and garbage is collected at different times on different ranks.
        if not self._closed and self._pid == os.getpid():
            warnings.warn(
                f"unclosed {self!r}: use close() or a with statement", ResourceWarning, stacklevel=2
            )

    def __repr__(self) -> str:
        if self._closed:
            return "<mpidp.Communicator, closed>"
        return f"<mpidp.Communicator, rank {self.rank} of {self.world_size}>"

    def empty(self, shape: Any, dtype: Any = "float32", device: str = "cpu") -> Any:
        """An array in registered memory, which collectives use without copies. Local.

        `dtype` is a name or a NumPy dtype; "bfloat16" needs ml_dtypes on the host. `device` is
        "cpu" for a NumPy array, or "cuda" or "cuda:1" for memory on the current GPU or on that one:
        a CuPy array where CuPy is installed, else a `mpidp.devices.DeviceArray`, which every
        framework can take through DLPack. The memory is reserved here: raises MemoryError where it
        cannot be, and `CudaError` where there is no GPU. It may outlive the communicator.

            bucket = comm.empty((1 << 20,), "float32")
            x = torch.from_dlpack(comm.empty((1 << 20,), "bfloat16", device="cuda"))
        """
        if device != "cpu":
            lengths = tuple(shape) if hasattr(shape, "__iter__") else (shape,)
            num_elements(lengths)
            name = "bfloat16" if dtype == "bfloat16" else numpy_dtype(dtype).name
            return devices.empty(self._context, lengths, name, device)
        found = numpy_dtype(dtype)
        nbytes = num_elements(shape) * found.itemsize
        try:
            memory = self._context.allocate(nbytes) if nbytes else None
        except MemoryError:
            raise MemoryError(
                f"cannot reserve {nbytes} bytes of registered memory: the node or the job's memory "
                "limit has less left; use smaller arrays, or free some"
            ) from None
        array: NDArray[Any] = np.ndarray(shape, found, buffer=memory)
        return array

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Communicators of the ranks that give the same `color`, ordered by `key`, then rank.

        Collective. A rank that gives None gets None. Waits for pending work first.

            node = comm.split(comm.node_rank)
        """
        if color is not None and (not is_index(color) or not 0 <= color < 1 << 31):
            raise InvalidArgumentError(f"color {color!r}: expected an integer >= 0, or None")
        if not is_index(key):
            raise InvalidArgumentError(f"key {key!r}: expected an integer")
        # MPI's own split must not cross the engine's traffic on the same communicator. A barrier
        # queues behind all pending work, and brings the deadline that MPI's split lacks.
        self.barrier()
        part = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        child = Communicator.__new__(Communicator)
        child._closed = True
        child._set_up(part, None, self._config)
        return child

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        """The root's `obj` on every rank, by pickle. Unpickle data only from ranks you trust.

        Raises `MpidpError` on every rank where the root's object cannot be pickled.
        """
        self._check_root(root)
        payload, failure = _pickled(obj) if self.rank == root else (b"", None)
        length = np.array([-1 if failure else len(payload)], dtype=np.int64)
        self.broadcast(length, root=root)
        if length[0] < 0:
            raise MpidpError(f"rank {root} cannot pickle its object: {failure or 'see its error'}")
        data = bytearray(payload) if self.rank == root else bytearray(int(length[0]))
        self.broadcast(np.frombuffer(data, dtype=np.uint8), root=root)
        return obj if self.rank == root else pickle.loads(data)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, in rank order, by pickle. Unpickle data only from ranks you trust.

        Raises `MpidpError` on every rank where one rank's object cannot be pickled.
        """
        payload, failure = _pickled(obj)
        lengths = self.all_gather(np.array([-1 if failure else len(payload)], dtype=np.int64))
        failed = [rank for rank, length in enumerate(lengths[:, 0]) if length < 0]
        if failed:
            reason = failure or "see their error"
            raise MpidpError(f"ranks {failed} cannot pickle their object: {reason}", failed)
        # One row length for all: the collective moves equal counts.
        row = np.zeros(int(lengths.max()), dtype=np.uint8)
        row[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        rows = self.all_gather(row)
        return [pickle.loads(rows[rank, :length]) for rank, length in enumerate(lengths[:, 0])]

    def describe(self) -> dict[str, Any]:
        """What this communicator runs on, as plain values: for logs, `mpidp info` and bug reports.

        "algorithms" maps each collective to [up_to_bytes, algorithm] pairs; None is no limit.
        "device" tells the transport between GPUs ("undecided" before the first collective on one),
        and why a faster one was not taken.
        """
        context = self._context
        return {
            "mpi_library": lifecycle.first_line(_core.mpi_library()),
            "built_against": _core.built_against(),
            "instruction_set": _core.instruction_set(),
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_size": self.local_size,
            "node_rank": self.node_rank,
            "num_nodes": self.num_nodes,
            "shared_memory": context.shared_memory,
            "stores": context.stores,
            "device": {
                "runtime": _core.device_runtime(),
                "index": context.device_index if context.device_index >= 0 else None,
                "transport": context.device_transport,
                "reason": context.device_reason,
            },
            "timeout": self.timeout,
            "tuning_table": (self._table or tuning.BUILT_IN).name,
            "algorithms": {
                collective: [
                    [None if limit == tuning.UNLIMITED else limit, algorithm]
                    for limit, algorithm in self._rules(collective)
                ]
                for collective in tuning.COLLECTIVES
            },
        }

    def _rules(self, collective: str) -> list[tuple[int, str]]:
        return tuning.rules_for(collective, self._topology, self._table, self._config.algorithm)

    def _disable(self, message: str) -> Any:
        """Make every further use raise `ClosedError(message)`; returns the context."""
        context, unusable = self._context, _Unusable(message)
        self._context = self._all_reduce = self._all_reduce_async = unusable
        return context


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """The bytes, or why there are none: an object's own __reduce__ may raise anything."""
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:
        return b"", error
