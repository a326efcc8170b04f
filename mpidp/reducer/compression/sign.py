"""1-bit signs: a thirty-second of float32's bytes, and one scale for every leaf.

A leaf x of d elements is sent as its signs and the mean of its magnitudes, |x|_1 / d. Every rank
gives its code to all (all-gather), decodes all of them and adds them up in rank order, so all hold
the same bits, and nothing is encoded twice.

Cost: P * n/32 bytes received a rank (n bytes of float32), less than the plain exchange up to about
64 ranks.
Source: Seide et al. 2014 (1-bit SGD with error feedback); Karimireddy et al. 2019 (EF-SignSGD,
algorithm 1: the scale, for each layer).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidp.reducer.compression.base import Part, Piece, Rounds


class Sign:
    """Sends one bit an element. See `mpidp.reducer.compression.base.Codec`."""

    lossy = True
    needs_scale = False

    def exchange(self, part: Part, scale: float, mean: bool) -> Rounds:
        """See `Codec.exchange`."""
        comm, wanted = part.comm, part.wanted()
        dtype = wanted.dtype
        # Padded, so that every rank's row starts aligned.
        bits_at = len(part.pieces) * dtype.itemsize
        row_bytes = bits_at + sum(_packed_bytes(piece) for piece in part.pieces)
        wire = part.wire("wire", (-(-row_bytes // 8) * 8,), np.uint8)
        scales = wire[:bits_at].view(dtype)
        at = bits_at
        with np.errstate(invalid="ignore", over="ignore"):
            for number, piece in enumerate(part.pieces):
                values = _of(piece, wanted)
                scales[number] = np.mean(np.abs(values)) if piece.count else 0
                packed = np.packbits(values >= 0)
                wire[at : at + packed.size] = packed
                at += packed.size
        sent = part.scratch("sent", wanted.shape, dtype)
        sent[...] = 0
        _add_decoded(wire, part.pieces, bits_at, sent)
        part.keep(wanted, sent)
        received = part.wire("received", (comm.world_size, wire.size), np.uint8)
        yield comm.all_gather_async(wire, received), wire.nbytes

        total = sent
        total[...] = 0
        for row in received:
            _add_decoded(row, part.pieces, bits_at, total)
        part.array[...] = total


def _of(piece: Piece, flat: NDArray[Any]) -> NDArray[Any]:
    return flat[piece.offset : piece.offset + piece.count]


def _packed_bytes(piece: Piece) -> int:
    return -(-piece.count // 8)


def _add_decoded(
    row: NDArray[np.uint8], pieces: tuple[Piece, ...], bits_at: int, total: NDArray[Any]
) -> None:
    scales = row[:bits_at].view(total.dtype)
    at = bits_at
    with np.errstate(invalid="ignore"):
        for piece, scale in zip(pieces, scales, strict=True):
            packed = row[at : at + _packed_bytes(piece)]
            positive = np.unpackbits(packed, count=piece.count).view(np.bool_)
            _of(piece, total)[...] += np.where(positive, scale, -scale)
            at += packed.size
