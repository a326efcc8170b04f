"""Buckets as codecs see them: real numbers, a residual, and where each leaf lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp.reducer.compression.base import Part, Piece
from mpidp.reducer.plan import Bucket, views_of
from mpidp.training.adapter import Leaf

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


def make_part(
    comm: Communicator,
    bucket: Bucket,
    array: NDArray[Any],
    leaves: Sequence[Leaf],
    warm: Mapping[str, NDArray[Any]],
    *,
    lossy: bool,
) -> Part:
    """The part over `array`, the bucket's memory; `warm` holds earlier starts by leaf name."""
    if not lossy:
        return Part(comm, array)
    width = 2 if array.dtype.kind == "c" else 1
    real = array.view(array.real.dtype)
    # A half-width residual would lose what it is there to keep.
    residual = np.zeros(real.shape, real.dtype if real.dtype.itemsize >= 4 else np.float32)
    pieces = []
    for slot in bucket.slots:
        leaf = leaves[slot.leaf]
        rows = leaf.shape[0] if len(leaf.shape) > 1 else slot.count
        columns = slot.count // rows if rows else 0
        pieces.append(Piece(leaf.name, slot.offset * width, rows, columns * width))
    kept = {piece.leaf: warm[piece.leaf] for piece in pieces if piece.leaf in warm}
    return Part(comm, real, residual, tuple(pieces), kept)


def residual_views(
    part: Part, bucket: Bucket, leaves: Sequence[Leaf]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """(leaf name, its residual as a view); nothing where the part has no residual."""
    if part.residual is None:
        return
    residual = part.residual
    if residual.size > bucket.count:
        residual = residual.view(bucket.dtype)  # complex
    for leaf, view in views_of(bucket, residual, leaves).items():
        yield leaves[leaf].name, view
