"""Sparse gradients: a few rows of a large table, as embeddings give them.

Only the rows that a rank has used travel: the ranks tell each other how many they have, then gather
indices and values, padded to the largest number. Every rank adds the rows up in rank order, so all
hold the same bits. Where that would move more bytes than the whole table does, the table is summed
densely instead, in rank order too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


@dataclass(frozen=True)
class SparseRows:
    """Rows of a table of shape (num_rows, *row shape) whose other rows are zero.

    `indices` (n,) are int64, ascending and distinct; `values` are (n, *row shape).
    """

    num_rows: int
    indices: NDArray[np.int64]
    values: NDArray[Any]

    def to_dense(self) -> NDArray[Any]:
        """The whole table."""
        table = np.zeros((self.num_rows, *self.values.shape[1:]), self.values.dtype)
        table[self.indices] = self.values
        return table


@dataclass(frozen=True)
class ReducedRows:
    """The sum over the ranks, the same bits on all. `densified`: the whole table was exchanged.

    `rows` holds the rows that some rank gave (all rows that are not zero, if densified).
    """

    rows: SparseRows
    densified: bool
    wire_bytes: int


def coalesce(num_rows: int, indices: Any, values: Any) -> SparseRows:
    """Sums the values of equal indices, in their order. Local.

    `indices` (n,) are integers in [0, num_rows) in any order, `values` (n, *row shape). Sums of
    float16 and bfloat16 are made in float32 and rounded once. Raises InvalidArgumentError.

        coalesce(10, [7, 2, 7], [[1.0], [5.0], [2.0]])    # rows 2 and 7: [[5.0], [3.0]]
    """
    indices = np.asarray(indices, dtype=np.int64)
    values = np.asarray(values)
    if indices.ndim != 1 or values.shape[:1] != indices.shape:
        raise InvalidArgumentError(
            f"indices of shape {indices.shape} and values of shape {values.shape}: expected (n,) "
            "and (n, ...)"
        )
    if indices.size and not (indices.min() >= 0 and indices.max() < num_rows):
        raise InvalidArgumentError(f"an index lies outside of the {num_rows} rows")
    distinct, place = np.unique(indices, return_inverse=True)
    total = np.zeros((len(distinct), *values.shape[1:]), _wide(values.dtype))
    np.add.at(total, place, values.astype(total.dtype, copy=False))
    return SparseRows(num_rows, distinct, total.astype(values.dtype, copy=False))


def all_reduce_rows(comm: Communicator, mine: SparseRows) -> ReducedRows:
    """Sums the ranks' rows. Collective; num_rows, row shape and dtype are the same on all ranks.

    A rank without rows gives none (n = 0), and gets the sum all the same.
    """
    shape, dtype = mine.values.shape[1:], mine.values.dtype
    row_count = int(np.prod(shape, dtype=np.int64))
    counts = comm.all_gather(np.array([len(mine.indices)], dtype=np.int64)).reshape(-1)
    largest = int(counts.max())
    row_bytes = row_count * dtype.itemsize
    # What each rank receives: all rows of all others, against a dense sum there and back.
    sparse_bytes = (comm.world_size - 1) * largest * (8 + row_bytes)
    dense_bytes = 2 * (comm.world_size - 1) * mine.num_rows * row_bytes // comm.world_size
    if sparse_bytes > dense_bytes:
        table = mine.to_dense()
        comm.all_reduce(table, deterministic=True)
        flat = table.reshape(mine.num_rows, row_count)
        indices = np.flatnonzero((flat != 0).any(axis=1)).astype(np.int64)
        rows = SparseRows(mine.num_rows, indices, table[indices])
        return ReducedRows(rows, True, 8 + table.nbytes)
    sent_indices = np.zeros(largest, dtype=np.int64)
    sent_values = np.zeros((largest, *shape), dtype)
    sent_indices[: len(mine.indices)] = mine.indices
    sent_values[: len(mine.indices)] = mine.values
    all_indices = comm.all_gather(sent_indices)
    all_values = comm.all_gather(sent_values)
    parts = [all_indices[rank, :count] for rank, count in enumerate(counts)]
    distinct = np.unique(np.concatenate(parts))
    total = np.zeros((len(distinct), *shape), _wide(dtype))
    for rank, indices in enumerate(parts):
        # A rank's indices are distinct, so this adds each of its rows.
        total[np.searchsorted(distinct, indices)] += all_values[rank, : len(indices)]
    rows = SparseRows(mine.num_rows, distinct, total.astype(dtype, copy=False))
    return ReducedRows(rows, False, 8 + sent_indices.nbytes + sent_values.nbytes)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_half = dtype.itemsize == 2 and dtype.kind not in "iu"
    return np.dtype(np.float32) if is_half else dtype
