"""int8 in blocks: a quarter of float32's bytes, and one scale for every 256 elements.

Terms: the bucket is cut into one chunk for each rank, its owner; a chunk into blocks of `BLOCK`
elements. A block is sent as its scale s = max|x| / 127 and the integers round(x / s).

1. all-to-all: every rank gives every owner its encoded chunk.
2. The owner decodes the chunks and adds them up in float64, in rank order. It encodes the sum anew,
   and keeps what that takes in its own residual.
3. all-gather: every rank decodes the same bytes, the owner too, so all hold the same bits.

Cost: 2(P-1)/P * n/4 bytes a rank instead of 2(P-1)/P * n (n bytes of float32).
Source: block-wise (bucketed) quantization as in QSGD (Alistarh et al. 2017, section 3.3), here with
deterministic rounding and error feedback.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidp.reducer.compression.base import Part, Rounds

BLOCK = 256
_LARGEST = 127


class Int8:
    """Sends one byte an element. See `mpidp.reducer.compression.base.Codec`."""

    lossy = True
    needs_scale = False

    def exchange(self, part: Part, scale: float, mean: bool) -> Rounds:
        """See `Codec.exchange`."""
        comm, wanted = part.comm, part.wanted()
        ranks, dtype = comm.world_size, wanted.dtype
        chunk = -(-wanted.size // ranks)
        blocks = max(1, -(-chunk // BLOCK))
        row_bytes = _codes_bytes(chunk) + blocks * dtype.itemsize
        values = part.scratch("values", (ranks, blocks * BLOCK), dtype)
        _spread(wanted, values, chunk)
        wire = part.wire("wire", (ranks, row_bytes), np.uint8)
        sent = _encode(values, wire, chunk)
        _gather(sent, wanted_sent := part.scratch("sent", wanted.shape, dtype), chunk)
        part.keep(wanted, wanted_sent)
        received = part.wire("received", wire.shape, np.uint8)
        yield comm.all_to_all_async(wire, received), wire.nbytes

        total = np.zeros(chunk)
        for row in received:
            total += _decode(row, chunk, dtype, np.dtype(np.float64))
        values[...] = 0
        values[0, :chunk] = total
        mine = wire[:1]
        decoded = _encode(values[:1], mine, chunk)[0, :chunk]
        with np.errstate(invalid="ignore"):
            lost = total - decoded
        assert part.residual is not None
        own = part.residual[comm.rank * chunk : (comm.rank + 1) * chunk]
        own += np.where(np.isfinite(lost), lost, 0).astype(dtype)[: own.size]
        yield comm.all_gather_async(mine[0], received), mine.nbytes

        for owner, row in enumerate(received):
            place = part.array[owner * chunk : (owner + 1) * chunk]
            place[...] = _decode(row, chunk, dtype, dtype)[: place.size]


def _codes_bytes(chunk: int) -> int:
    return -(-chunk // 8) * 8  # so that the scales behind them are aligned


def _spread(flat: NDArray[Any], rows: NDArray[Any], chunk: int) -> None:
    """Each owner's chunk into its row; what is over in a row stays or becomes zero."""
    rows[...] = 0
    for owner, row in enumerate(rows):
        part = flat[owner * chunk : (owner + 1) * chunk]
        row[: part.size] = part


def _gather(rows: NDArray[Any], flat: NDArray[Any], chunk: int) -> None:
    for owner, row in enumerate(rows):
        part = flat[owner * chunk : (owner + 1) * chunk]
        part[...] = row[: part.size]


def _encode(rows: NDArray[Any], wire: NDArray[Any], chunk: int) -> NDArray[Any]:
    """Codes each row (a whole number of blocks); gives what the decoder will see."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        # NaN and Inf make the scale so, and with it all that the decoder sees of the block.
        scales = np.abs(blocks).max(axis=2, keepdims=True) / rows.dtype.type(_LARGEST)
        usable = np.isfinite(scales) & (scales > 0)
        codes = np.rint(blocks / np.where(usable, scales, 1))
        codes = np.where(usable, np.clip(codes, -_LARGEST, _LARGEST), 0)
        decoded: NDArray[Any] = (codes * scales).reshape(rows.shape)
    wire[:, :chunk] = codes.reshape(rows.shape)[:, :chunk].astype(np.int8).view(np.uint8)
    wire[:, _codes_bytes(chunk) :].view(rows.dtype)[...] = scales[:, :, 0]
    return decoded


def _decode(
    row: NDArray[np.uint8], chunk: int, dtype: np.dtype[Any], wide: np.dtype[Any]
) -> NDArray[Any]:
    """`chunk` elements of `wide`, from scales of `dtype`."""
    scales = row[_codes_bytes(chunk) :].view(dtype).astype(wide)
    codes = row[:chunk].view(np.int8).astype(wide)
    with np.errstate(invalid="ignore"):
        decoded: NDArray[Any] = codes * np.repeat(scales, BLOCK)[:chunk]
    return decoded
