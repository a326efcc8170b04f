"""Top-k: only the largest elements, with their places.

Each rank picks the k elements of its bucket that are largest in magnitude and gives them to all
(all-gather of k indices and values); every rank adds up all picks in rank order, in the same way,
so all hold the same bits. What is not picked stays in the residual, and grows until it is.

Cost: P * k * (4 + itemsize) bytes received a rank; worth it for fractions below 1 / (2P) or so.
Source: Strom 2015; Stich et al. 2018 (sparsified SGD with memory).
"""

from __future__ import annotations

import math

import numpy as np

from mpidp.errors import InvalidArgumentError
from mpidp.reducer.compression.base import Part, Rounds

DEFAULT_FRACTION = 0.05


class TopK:
    """Sends the largest `fraction` (in (0, 1]) of each bucket, at least one element.

    See `mpidp.reducer.compression.base.Codec`. Raises InvalidArgumentError for another fraction.

        strategy = mpidp.strategies.Synchronous(compression=TopK(0.01))
    """

    lossy = True
    needs_scale = False

    def __init__(self, fraction: float = DEFAULT_FRACTION) -> None:
        if not 0 < fraction <= 1:
            raise InvalidArgumentError(f"fraction={fraction!r}: expected a number in (0, 1]")
        self._fraction = fraction

    def exchange(self, part: Part, scale: float, mean: bool) -> Rounds:
        """See `Codec.exchange`."""
        comm, wanted = part.comm, part.wanted()
        count, dtype = wanted.size, wanted.dtype
        k = min(count, max(1, math.ceil(self._fraction * count)))
        # NaN is larger than all, so that it is seen; ties fall alike in every run.
        magnitudes = np.nan_to_num(np.abs(wanted), nan=np.inf, posinf=np.inf)
        picks = np.argpartition(magnitudes, count - k)[count - k :] if k < count else np.arange(k)
        picks.sort()
        sent = part.scratch("sent", wanted.shape, dtype)
        sent[...] = 0
        sent[picks] = wanted[picks]
        # Values first: they have the wider alignment.
        index_dtype = np.dtype(np.uint32 if count < 1 << 32 else np.uint64)
        values_bytes = k * dtype.itemsize
        indices_end = values_bytes + k * index_dtype.itemsize
        # Padded, so that every rank's row starts aligned.
        wire = part.wire("wire", (-(-indices_end // 8) * 8,), np.uint8)
        wire[:values_bytes].view(dtype)[...] = wanted[picks]
        wire[values_bytes:indices_end].view(index_dtype)[...] = picks
        part.keep(wanted, sent)
        received = part.wire("received", (comm.world_size, wire.size), np.uint8)
        yield comm.all_gather_async(wire, received), wire.nbytes

        total = sent
        total[...] = 0
        for row in received:
            # A rank's indices are distinct, so this adds each of its values.
            indices = row[values_bytes:indices_end].view(index_dtype)
            total[indices] += row[:values_bytes].view(dtype)
        part.array[...] = total
