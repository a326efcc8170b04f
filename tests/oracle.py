"""A slow communicator that is plainly right: the oracle for the fast one.

It has the API of `mpidp.Communicator`, on mpi4py alone: every collective is an all-gather of whole
arrays and a loop in rank order. The arithmetic is the canonical one that `deterministic=True`
promises: terms from rank 0 upwards, float16 and bfloat16 in float32, one rounding at the end, the
mean's division before it. `NaiveCommunicator(wide=True)` computes in float64 or complex128 instead
and returns that, unrounded: the reference for error bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidp.errors import ClosedError, InvalidArgumentError, InvalidBufferError

OPS = ("sum", "mean", "prod", "min", "max")


def accumulator_dtype(dtype: np.dtype, wide: bool = False) -> np.dtype:
    """The dtype in which terms of `dtype` are combined."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        return np.dtype(np.complex128) if wide else dtype
    if dtype.kind == "f" or dtype.name == "bfloat16":
        if wide:
            return np.dtype(np.float64)
        return np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    return dtype


def reduce_in_rank_order(
    arrays: Sequence[np.ndarray],
    op: str,
    scales: Sequence[float] | None = None,
    *,
    wide: bool = False,
) -> np.ndarray:
    """The canonical reduction of one array per rank; with `wide`, its float64 reference."""
    dtype = arrays[0].dtype
    accumulator = accumulator_dtype(dtype, wide)
    inexact = accumulator.kind in "fc"
    if op not in OPS:
        raise InvalidArgumentError(f"op {op!r}: expected one of {', '.join(OPS)}")
    if op == "mean" and not inexact:
        raise InvalidArgumentError(f"mean of {dtype.name}: integers have no exact mean")
    if op in ("min", "max") and accumulator.kind == "c":
        raise InvalidArgumentError(f"{op} of {dtype.name}: complex numbers have no order")
    if scales is not None and not inexact:
        raise InvalidArgumentError(f"scale of {dtype.name}: only floating arrays can be scaled")
    combine = {
        "sum": np.logical_or if dtype.kind == "b" else np.add,
        "mean": np.add,
        "prod": np.logical_and if dtype.kind == "b" else np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }[op]
    terms = [array.astype(accumulator) for array in arrays]
    if scales is not None:
        terms = [_times(term, scale) for term, scale in zip(terms, scales, strict=True)]
    total = terms[0].copy()
    with np.errstate(all="ignore"):
        for term in terms[1:]:
            total = combine(total, term)
        if op == "mean":
            total = _divided(total, len(arrays))
        return np.asarray(total if wide else total.astype(dtype))


def _parts(array: np.ndarray) -> np.ndarray:
    """The real numbers an array is made of: NumPy's complex by real division rounds twice."""
    return array.reshape(-1).view(array.real.dtype)


def _times(term: np.ndarray, scale: float) -> np.ndarray:
    parts = _parts(term)
    return (parts * parts.dtype.type(scale)).view(term.dtype).reshape(term.shape)


def _divided(total: np.ndarray, divisor: int) -> np.ndarray:
    parts = _parts(total)
    return (parts / parts.dtype.type(divisor)).view(total.dtype).reshape(total.shape)


class NaiveWork:
    """A collective that ran when it was called."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> Any:
        return self.result


class NaiveCommunicator:
    """See the module; arguments and results are those of `mpidp.Communicator`."""

    def __init__(
        self, comm: MPI.Comm | None = None, *, timeout: float | None = None, wide: bool = False
    ) -> None:
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank, self.world_size = self._comm.rank, self._comm.size
        self.local_rank, self.local_size = node.rank, node.size
        leaders = self._comm.allgather(self.rank if node.rank == 0 else -1)
        leader = node.bcast(self.rank)
        nodes = sorted(r for r in leaders if r >= 0)
        self.num_nodes, self.node_rank = len(nodes), nodes.index(leader)
        node.Free()
        self.timeout = 600.0 if timeout is None else timeout
        self.closed = False
        self.wide = wide

    def __enter__(self) -> NaiveCommunicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._comm.Free()

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deterministic: bool = False,
        scale: float | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        return self._store(self._reduced(x, op, scale), x, out)

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deterministic: bool = False,
        scale: float | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        total = self._reduced(x, op, scale)
        if out is None:
            self._require_divisible(x)
            block = np.split(total, self.world_size)[self.rank]
            return block.copy()
        if out.size * self.world_size != total.size:
            raise InvalidBufferError(f"x has {total.size} elements, out {out.size}")
        return self._store(np.split(total.reshape(-1), self.world_size)[self.rank], None, out)

    def reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        op: str = "sum",
        algorithm: str = "auto",
        deterministic: bool = False,
        scale: float | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        self._require_root(root)
        total = self._reduced(x, op, scale)
        if self.rank != root:
            return None
        return self._store(total, x, out)

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        gathered = np.stack(self._gather(np.asarray(x)))
        if out is None:
            return gathered
        return self._store(gathered, None, out)

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        self._require_root(root)
        source = self._gather(np.asarray(x))[root]
        return x if self.rank == root else self._store(source, x, None)

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        self._require_divisible(x)
        blocks = [np.split(whole, self.world_size)[self.rank] for whole in self._gather(x)]
        received = np.concatenate(blocks)
        if out is None:
            return received
        return self._store(received, None, out)

    def barrier(self, *, timeout: float | None = None) -> None:
        self._require_open()
        self._comm.Barrier()

    def all_reduce_async(self, *args: Any, **kwargs: Any) -> NaiveWork:
        return NaiveWork(self.all_reduce(*args, **kwargs))

    def reduce_scatter_async(self, *args: Any, **kwargs: Any) -> NaiveWork:
        return NaiveWork(self.reduce_scatter(*args, **kwargs))

    def reduce_async(self, *args: Any, **kwargs: Any) -> NaiveWork:
        return NaiveWork(self.reduce(*args, **kwargs))

    def all_gather_async(self, *args: Any, **kwargs: Any) -> NaiveWork:
        return NaiveWork(self.all_gather(*args, **kwargs))

    def broadcast_async(self, *args: Any, **kwargs: Any) -> NaiveWork:
        return NaiveWork(self.broadcast(*args, **kwargs))

    def all_to_all_async(self, *args: Any, **kwargs: Any) -> NaiveWork:
        return NaiveWork(self.all_to_all(*args, **kwargs))

    def barrier_async(self, **kwargs: Any) -> NaiveWork:
        return NaiveWork(self.barrier(**kwargs))

    def split(self, color: int | None, key: int = 0) -> NaiveCommunicator | None:
        self._require_open()
        part = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        try:
            return NaiveCommunicator(part, timeout=self.timeout, wide=self.wide)
        finally:
            part.Free()

    def empty(self, shape: Any, dtype: Any = "float32", device: str = "cpu") -> np.ndarray:
        if str(dtype) == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        return np.empty(shape, dtype)

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        self._require_root(root)
        return self._comm.bcast(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._require_open()
        return self._comm.allgather(obj)

    def describe(self) -> dict[str, Any]:
        return {
            "mpi_library": MPI.Get_library_version(),
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedError("the communicator is closed")

    def _require_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise InvalidArgumentError(f"root {root}: expected 0 to {self.world_size - 1}")

    def _require_divisible(self, x: Any) -> None:
        if x.ndim == 0 or x.shape[0] % self.world_size:
            raise InvalidBufferError(f"x of shape {x.shape} does not split over {self.world_size}")

    def _gather(self, x: np.ndarray) -> list[np.ndarray]:
        self._require_open()
        # As bytes: pickling a bfloat16 array would depend on how ml_dtypes registers itself.
        parts = self._comm.allgather(np.ascontiguousarray(x).tobytes())
        return [np.frombuffer(part, x.dtype).reshape(x.shape) for part in parts]

    def _reduced(self, x: Any, op: str, scale: float | None) -> np.ndarray:
        x = np.asarray(x)
        arrays = self._gather(x)
        scales = self._comm.allgather(scale)
        if all(s is None for s in scales):
            return reduce_in_rank_order(arrays, op, wide=self.wide)
        weights = [1.0 if s is None else s for s in scales]
        return reduce_in_rank_order(arrays, op, weights, wide=self.wide)

    def _store(self, result: np.ndarray, x: Any, out: Any) -> Any:
        if self.wide:
            return result
        target = x if out is None else out
        if target.size != result.size:
            raise InvalidBufferError(f"result has {result.size} elements, out {target.size}")
        target[...] = result.reshape(target.shape)
        return target
