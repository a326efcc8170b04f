"""The collectives of a Communicator: what each means, and how its result is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidp.arguments import (
    buffers_of,
    call_broadcast,
    call_move,
    call_reduction,
    check_options,
    check_same_shape,
    deadline,
    is_index,
    result_for,
    seconds,
    shape_of,
    shapes_differ,
)
from mpidp.errors import InvalidArgumentError, InvalidBufferError
from mpidp.work import Work


class Collectives:
    """The methods that exchange arrays; `mpidp.Communicator` sets up what they run on."""

    __slots__ = ("_all_reduce", "_all_reduce_async", "_context", "rank", "world_size")

    rank: int
    world_size: int
    # The extension's context, and two of its methods bound once: the lookup would be a tenth of a
    # small all_reduce.
    _context: Any
    _all_reduce: Callable[..., Any]
    _all_reduce_async: Callable[..., Any]

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
        """Combine x over all ranks, element by element; every rank gets the result.

        In place where `out` is None, else into `out`, of x's shape and dtype. Returns the array
        that holds the result. "mean" and `scale` need floating or complex elements.

            comm.all_reduce(gradient, op="mean")
            comm.all_reduce(sums, out=total, scale=0.5)
        """
        # The hot path: small messages take about a microsecond in all.
        try:
            if out is None:
                self._all_reduce(
                    x,
                    None,
                    op,
                    algorithm,
                    scale,
                    deterministic,
                    -1.0 if timeout is None else seconds(timeout),
                )
                return x
            if out.shape != x.shape:
                raise shapes_differ(x, out)
            self._all_reduce(x, out, op, algorithm, scale, deterministic, deadline(timeout))
        except (TypeError, AttributeError):
            check_options(algorithm, op, scale, deterministic)
            check_same_shape(x, out)
            arguments = (op, algorithm, scale, deterministic, deadline(timeout))
            self._all_reduce(*buffers_of(x, out, True, stream), *arguments)
        return x if out is None else out

    def all_reduce_async(
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
    ) -> Work:
        """As `all_reduce`, but returns a `Work` at once."""
        arguments = (op, algorithm, scale, deterministic, deadline(timeout))
        try:
            if out is not None and out.shape != x.shape:
                raise shapes_differ(x, out)
            work = self._all_reduce_async(x, out, *arguments)
        except (TypeError, AttributeError):
            check_options(algorithm, op, scale, deterministic)
            check_same_shape(x, out)
            work = self._all_reduce_async(*buffers_of(x, out, True, stream), *arguments)
        return Work(work, x if out is None else out, (x, out))

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
        """Combine x over all ranks and give each rank its block of the result.

        x holds world_size equal blocks; block r of the result goes to rank r, into `out`, which has
        x.size / world_size elements of x's dtype. Where `out` is None an array of shape
        (x.shape[0] / world_size, *x.shape[1:]) is made. x is not changed. Returns the block.

            mine = comm.reduce_scatter(x)            # x.shape[0] divisible by world_size
        """
        out = self._block_of(x) if out is None else out
        arguments = (op, algorithm, scale, deterministic, deadline(timeout))
        call_reduction(self._context.reduce_scatter, x, out, *arguments, stream=stream)
        return out

    def reduce_scatter_async(
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
    ) -> Work:
        """As `reduce_scatter`, but returns a `Work` at once."""
        out = self._block_of(x) if out is None else out
        arguments = (op, algorithm, scale, deterministic, deadline(timeout))
        work = call_reduction(self._context.reduce_scatter_async, x, out, *arguments, stream=stream)
        return Work(work, out, (x, out))

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
        """Combine x over all ranks on rank `root`.

        The root's result goes into `out`, or into x where `out` is None. Elsewhere x is not changed
        and `out` is ignored. Returns the result array on the root and None elsewhere.

            total = comm.reduce(x, root=0)
        """
        x, out, result = self._rooted(x, out, root)
        arguments = (op, algorithm, scale, deterministic, deadline(timeout))
        here = self.rank == root
        call_reduction(
            self._context.reduce, x, out, *arguments, root=root, writes_x=here, stream=stream
        )
        return result

    def reduce_async(
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
    ) -> Work:
        """As `reduce`, but returns a `Work` at once."""
        x, out, result = self._rooted(x, out, root)
        arguments = (op, algorithm, scale, deterministic, deadline(timeout))
        here = self.rank == root
        work = call_reduction(
            self._context.reduce_async,
            x,
            out,
            *arguments,
            root=root,
            writes_x=here,
            stream=stream,
        )
        return Work(work, result, (x, out))

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Collect every rank's x, in rank order, on every rank.

        `out` has x.size * world_size elements of x's dtype; where it is None an array of shape
        (world_size, *x.shape) is made. Returns it.

            rows = comm.all_gather(row)              # rows[r] is rank r's row
        """
        out = self._gathered_of(x) if out is None else out
        call_move(self._context.all_gather, x, out, algorithm, deadline(timeout), stream)
        return out

    def all_gather_async(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Work:
        """As `all_gather`, but returns a `Work` at once."""
        out = self._gathered_of(x) if out is None else out
        work = call_move(
            self._context.all_gather_async, x, out, algorithm, deadline(timeout), stream
        )
        return Work(work, out, (x, out))

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Copy the root's x into every rank's x, of the same dtype and count. Returns x.

        comm.broadcast(weights, root=0)
        """
        self._check_root(root)
        arguments = (root, algorithm, deadline(timeout), self.rank == root, stream)
        call_broadcast(self._context.broadcast, x, *arguments)
        return x

    def broadcast_async(
        self,
        x: Any,
        *,
        root: int = 0,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Work:
        """As `broadcast`, but returns a `Work` at once."""
        self._check_root(root)
        arguments = (root, algorithm, deadline(timeout), self.rank == root, stream)
        work = call_broadcast(self._context.broadcast_async, x, *arguments)
        return Work(work, x, x)

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Give block p of x to rank p, for every p; block p of the result comes from rank p.

        x and `out` hold world_size equal blocks of one dtype. Where `out` is None an array of
        x's shape is made, and x.shape[0] must be divisible by world_size. Returns the result.

            received = comm.all_to_all(sent)         # received[p] == rank p's sent[rank]
        """
        out = self._exchanged_of(x) if out is None else out
        call_move(self._context.all_to_all, x, out, algorithm, deadline(timeout), stream)
        return out

    def all_to_all_async(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Work:
        """As `all_to_all`, but returns a `Work` at once."""
        out = self._exchanged_of(x) if out is None else out
        work = call_move(
            self._context.all_to_all_async, x, out, algorithm, deadline(timeout), stream
        )
        return Work(work, out, (x, out))

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        self._context.barrier(deadline(timeout))

    def barrier_async(self, *, timeout: float | None = None) -> Work:
        """As `barrier`, but returns a `Work` at once."""
        return Work(self._context.barrier_async(deadline(timeout)), None, None)

    def _check_root(self, root: int) -> None:
        if not is_index(root) or not 0 <= root < self.world_size:
            raise InvalidArgumentError(
                f"root {root!r}: expected a rank from 0 to {self.world_size - 1}"
            )

    def _rooted(self, x: Any, out: Any, root: int) -> tuple[Any, Any, Any]:
        """(x, out, what the caller gets back) on this rank of a reduction to `root`."""
        self._check_root(root)
        if self.rank != root:
            return x, None, None
        check_same_shape(x, out)
        return x, out, x if out is None else out

    def _block_of(self, x: Any) -> Any:
        shape = shape_of(x)
        self._check_divisible(shape)
        return result_for(self._context, x, (shape[0] // self.world_size, *shape[1:]))

    def _gathered_of(self, x: Any) -> Any:
        return result_for(self._context, x, (self.world_size, *shape_of(x)))

    def _exchanged_of(self, x: Any) -> Any:
        shape = shape_of(x)
        self._check_divisible(shape)
        return result_for(self._context, x, shape)

    def _check_divisible(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[0] % self.world_size:
            raise InvalidBufferError(
                f"x has shape {shape}: its first dimension must be divisible by world_size "
                f"{self.world_size}, or pass out= to split by elements"
            )
