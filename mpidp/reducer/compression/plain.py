"""No compression: the bucket itself is all-reduced, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.work import Work


class PlainExchange:
    """See `mpidp.reducer.compression.base.Exchange`."""

    def __init__(self, work: Work, wire_bytes: int) -> None:
        self._work = work
        self.wire_bytes = wire_bytes

    def wait(self) -> None:
        """See `Exchange.wait`."""
        self._work.wait()


class Plain:
    """See `mpidp.reducer.compression.base.Codec`."""

    lossy = False
    needs_scale = False

    def start(
        self,
        comm: Communicator,
        bucket: NDArray[Any],
        residual: NDArray[Any] | None,
        scale: float,
        mean: bool,
    ) -> PlainExchange:
        """See `Codec.start`."""
        return PlainExchange(
            comm.all_reduce_async(bucket, op="mean" if mean else "sum"), bucket.nbytes
        )
