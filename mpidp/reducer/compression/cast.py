"""float16 and bfloat16: half (or a quarter of) the bytes, by rounding.

The gradients are divided by a common power of two first, so that sums over a large batch do not
leave float16's range; that division loses nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidp.buffers import numpy_dtype
from mpidp.reducer.compression.base import Part, Rounds


class Cast:
    """Sends every element as `dtype`, "float16" or "bfloat16".

    See `mpidp.reducer.compression.base.Codec`.
    """

    lossy = True
    needs_scale = True

    def __init__(self, dtype: str) -> None:
        self._dtype = numpy_dtype(dtype)

    def exchange(self, part: Part, scale: float, mean: bool) -> Rounds:
        """See `Codec.exchange`."""
        wanted = part.wanted()
        number = wanted.dtype.type
        wire = part.wire("wire", wanted.shape, self._dtype)
        scaled = wanted / number(scale)
        # A value out of range saturates; the excess stays in the residual. NaN and Inf go through.
        # The sum over the ranks stays in range too; half, since its roundings may add up.
        largest = number(_largest(self._dtype) / (2 * part.comm.world_size))
        np.copyto(scaled, np.clip(scaled, -largest, largest), where=np.isfinite(scaled))
        wire[...] = scaled.astype(self._dtype)
        part.keep(wanted, wire.astype(wanted.dtype) * number(scale))
        yield part.comm.all_reduce_async(wire), wire.nbytes
        part.array[...] = wire.astype(wanted.dtype) * number(scale)


def _largest(dtype: np.dtype[Any]) -> float:
    if dtype.name == "bfloat16":
        return float.fromhex("0x1.fep127")
    return float(np.finfo(dtype).max)
