"""No compression: the bucket itself is all-reduced, in place."""

from __future__ import annotations

from mpidp.reducer.compression.base import Part, Rounds


class Plain:
    """See `mpidp.reducer.compression.base.Codec`."""

    lossy = False
    needs_scale = False

    def exchange(self, part: Part, scale: float, mean: bool) -> Rounds:
        """See `Codec.exchange`."""
        bucket = part.array
        yield part.comm.all_reduce_async(bucket, op="mean" if mean else "sum"), bucket.nbytes
