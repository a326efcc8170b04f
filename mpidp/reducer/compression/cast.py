"""float16 and bfloat16: half (or a quarter of) the bytes, by rounding.

The gradients are divided by a common power of two first, so that sums over a large batch do not
leave float16's range; that division loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp.buffers import numpy_dtype

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.work import Work


class CastExchange:
    """See `mpidp.reducer.compression.base.Exchange`."""

    def __init__(self, work: Work, wire: NDArray[Any], bucket: NDArray[Any], scale: float) -> None:
        self._work = work
        self._wire = wire
        self._bucket = bucket
        self._scale = scale
        self.wire_bytes = wire.nbytes

    def wait(self) -> None:
        """See `Exchange.wait`."""
        self._work.wait()
        self._bucket[...] = self._wire.astype(self._bucket.dtype)
        self._bucket *= self._bucket.dtype.type(self._scale)


class Cast:
    """See `mpidp.reducer.compression.base.Codec`."""

    lossy = True
    needs_scale = True

    def __init__(self, dtype: str) -> None:
        self._dtype = numpy_dtype(dtype)
        self._wires: dict[int, NDArray[Any]] = {}  # registered memory, by the bucket's address

    def start(
        self,
        comm: Communicator,
        bucket: NDArray[Any],
        residual: NDArray[Any] | None,
        scale: float,
        mean: bool,
    ) -> CastExchange:
        """See `Codec.start`."""
        assert residual is not None
        number = bucket.dtype.type
        bucket += residual
        wire = self._wire_of(comm, bucket)
        wanted = bucket / number(scale)
        # A value out of range saturates; the excess stays in the residual. NaN and Inf go through.
        # The sum over the ranks stays in range too; half, since its roundings may add up.
        largest = number(_largest(self._dtype) / (2 * comm.world_size))
        finite = np.isfinite(wanted)
        np.copyto(wanted, np.clip(wanted, -largest, largest), where=finite)
        wire[...] = wanted.astype(self._dtype)
        np.subtract(bucket, wire.astype(bucket.dtype) * number(scale), out=residual)
        # A step with NaN or Inf is skipped or fails; it must not poison the later ones.
        residual[~np.isfinite(residual)] = 0
        return CastExchange(comm.all_reduce_async(wire), wire, bucket, scale)

    def _wire_of(self, comm: Communicator, bucket: NDArray[Any]) -> NDArray[Any]:
        key = bucket.ctypes.data
        wire = self._wires.get(key)
        if wire is None or wire.shape != bucket.shape:
            wire = comm.empty(bucket.shape, self._dtype)
            self._wires[key] = wire
        return wire


def _largest(dtype: np.dtype[Any]) -> float:
    if dtype.name == "bfloat16":
        return float.fromhex("0x1.fep127")
    return float(np.finfo(dtype).max)
