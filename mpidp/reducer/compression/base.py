"""The codec protocol.

A codec replaces the plain all-reduce of a bucket. It encodes bucket + residual, exchanges the code,
and leaves the sum of all ranks' decoded contributions in the bucket, with the same bits on every
rank. What the code could not hold stays in the residual and is sent with a later step (error
feedback: Seide et al. 2014; Karimireddy et al. 2019), so that on each rank

    decoded contribution + new residual == bucket + old residual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


class Exchange(Protocol):
    """One bucket under way."""

    wire_bytes: int  # that this rank puts in

    def wait(self) -> None:
        """Until the bucket holds the sum. Raises the collective's error."""


class Codec(Protocol):
    """See the module's text."""

    lossy: bool  # needs a residual
    needs_scale: bool  # must not start before the scale of the gradients is known

    def start(
        self,
        comm: Communicator,
        bucket: NDArray[Any],
        residual: NDArray[Any] | None,
        scale: float,
        mean: bool,
    ) -> Exchange:
        """Starts the exchange. `scale` is a power of two near the total weight, equal on all
        ranks: bucket / scale is about as large as an averaged gradient. The residual is of the
        bucket's units. A codec that is not lossy divides by the number of ranks where `mean` is
        true; after a lossy one the reducer does.
        """
