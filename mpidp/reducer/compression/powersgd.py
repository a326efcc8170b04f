"""PowerSGD: a matrix M (n x m) of gradients as the product of two thin ones, of `rank` r columns.

One step of the power method, from the last step's Q (Vogels et al. 2019, algorithms 1 and 2):

1. P = sum over ranks of M Q (all-reduce), then made orthonormal.
2. Q = sum over ranks of M' P (all-reduce). The sum of the gradients is about P Q'.

On each rank P (M' P)' is what it has sent, and the rest stays in the residual. Leaves that would
not become smaller (vectors, small matrices) travel exactly, along with P.

Every rank computes P's columns and P Q' itself, by element-wise operations in a fixed order and not
by BLAS, so that the bits are equal on unlike processors too. M Q and M' P are each rank's own.

Cost: two all-reduces, of r * n and r * m elements a matrix instead of one of n * m.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidp.errors import InvalidArgumentError
from mpidp.reducer.compression.base import Part, Piece, Rounds

DEFAULT_RANK = 4
# A column of which less than this remains, when the others' share is taken away, is only noise.
_NOISE = 1e-5


class PowerSGD:
    """Sends matrices in factors of `rank` columns (1 or more).

    See `mpidp.reducer.compression.base.Codec`. A leaf of more than two dimensions counts as the
    matrix of its first one by all others. Raises InvalidArgumentError for a rank below 1.

        strategy = mpidp.strategies.Synchronous(compression=PowerSGD(2))
    """

    lossy = True
    needs_scale = False

    def __init__(self, rank: int = DEFAULT_RANK) -> None:
        if rank < 1:
            raise InvalidArgumentError(f"rank={rank!r}: expected an integer >= 1")
        self._rank = rank

    def exchange(self, part: Part, scale: float, mean: bool) -> Rounds:
        """See `Codec.exchange`."""
        comm, wanted = part.comm, part.wanted()
        dtype, rank = wanted.dtype, self._rank
        factored = [piece for piece in part.pieces if self._shrinks(piece)]
        exact = [piece for piece in part.pieces if not self._shrinks(piece)]
        sent = part.scratch("sent", wanted.shape, dtype)
        sent[...] = 0

        counts = [piece.count for piece in exact] + [piece.rows * rank for piece in factored]
        first = part.wire("first", (sum(counts),), dtype)
        parts = np.split(first, np.cumsum(counts)[:-1]) if counts else []
        with np.errstate(invalid="ignore", over="ignore"):
            for piece, values in zip(exact, parts[: len(exact)], strict=True):
                values[...] = _of(piece, wanted)
                _of(piece, sent)[...] = values
            for piece, values in zip(factored, parts[len(exact) :], strict=True):
                start = part.warm.get(piece.leaf)
                if start is None or start.shape != (piece.columns, rank):
                    start = part.warm[piece.leaf] = self._seed(piece, dtype)
                values.reshape(piece.rows, rank)[...] = _matrix(piece, wanted) @ start
        yield comm.all_reduce_async(first), first.nbytes

        counts = [piece.columns * rank for piece in factored]
        second = part.wire("second", (sum(counts),), dtype)
        rights = np.split(second, np.cumsum(counts)[:-1]) if counts else []
        lefts: list[NDArray[Any]] = []
        with np.errstate(invalid="ignore", over="ignore"):
            for piece, values, right in zip(factored, parts[len(exact) :], rights, strict=True):
                left = orthonormal(values.reshape(piece.rows, rank))
                mine = _matrix(piece, wanted).T @ left
                right.reshape(mine.shape)[...] = mine
                _matrix(piece, sent)[...] = left @ mine.T
                lefts.append(left)
        part.keep(wanted, sent)
        total = sent
        total[...] = 0
        for piece, values in zip(exact, parts[: len(exact)], strict=True):
            _of(piece, total)[...] = values
        if factored:
            yield comm.all_reduce_async(second), second.nbytes
            with np.errstate(invalid="ignore", over="ignore"):
                for piece, left, flat in zip(factored, lefts, rights, strict=True):
                    right = flat.reshape(piece.columns, rank)
                    product = _matrix(piece, total)
                    for column in range(rank):
                        product += left[:, column, None] * right[None, :, column]
                    part.warm[piece.leaf] = self._next_start(piece, right)
        part.array[...] = total

    def _shrinks(self, piece: Piece) -> bool:
        return self._rank * (piece.rows + piece.columns) < piece.count

    def _seed(self, piece: Piece, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The same on all ranks."""
        generator = np.random.default_rng([zlib.crc32(piece.leaf.encode()), piece.count])
        return generator.standard_normal((piece.columns, self._rank)).astype(dtype)

    def _next_start(self, piece: Piece, right: NDArray[Any]) -> NDArray[Any]:
        """Q with columns of the size of one; columns that say nothing start afresh."""
        largest = np.abs(right).max(axis=0)
        usable = np.isfinite(largest) & (largest > 0)
        scaled = right / np.where(usable, largest, 1)
        return np.where(usable, scaled, self._seed(piece, right.dtype))


def orthonormal(matrix: NDArray[Any]) -> NDArray[Any]:
    """The columns made orthonormal by Gram-Schmidt, each twice; dependent ones become zero.

    Element-wise operations in a fixed order: equal bits on every processor.
    """
    columns = matrix.T.astype(np.float64)
    largest = np.abs(columns).max(axis=1, keepdims=True)
    columns /= np.where(largest > 0, largest, 1)
    for number, column in enumerate(columns):
        before = np.sqrt(_sum(column * column))
        for _ in range(2):
            if number:
                done = columns[:number]
                shares = _sum((done * column).T)
                for other, share in zip(done, shares, strict=True):
                    column -= share * other
        length = np.sqrt(_sum(column * column))
        # Written so that NaN stays.
        column /= np.inf if length <= _NOISE * before else length
    return np.ascontiguousarray(columns.T.astype(matrix.dtype))


def _sum(values: NDArray[np.float64]) -> Any:
    """Over the first axis, by halves: the order depends on the length alone."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        if len(values) % 2:
            folded[0] = folded[0] + values[-1]
        values = folded
    return values[0]


def _of(piece: Piece, flat: NDArray[Any]) -> NDArray[Any]:
    return flat[piece.offset : piece.offset + piece.count]


def _matrix(piece: Piece, flat: NDArray[Any]) -> NDArray[Any]:
    return _of(piece, flat).reshape(piece.rows, piece.columns)
