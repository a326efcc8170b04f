"""The codec protocol.

A codec replaces the plain all-reduce of a bucket. It encodes gradient + residual, exchanges the
code, and leaves the sum of all ranks' decoded contributions in the bucket, with the same bits on
every rank. What the code could not hold stays in the residual and is sent with a later step (error
feedback: Seide et al. 2014; Karimireddy et al. 2019), so that

    decoded contribution + new residual == gradient + old residual

on each rank, or, where an owner encodes a sum anew, summed over the ranks: the owner keeps what
that took in its own residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.work import Work

# Each collective of an exchange as it is started, with the bytes that this rank puts in.
Rounds = Iterator["tuple[Work, int]"]


@dataclass(frozen=True)
class Piece:
    """One leaf in its bucket: `rows * columns` elements from `offset` on.

    The rows are the first dimension; a leaf of less than two dimensions is a single column.
    """

    leaf: str
    offset: int
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """Elements."""
        return self.rows * self.columns


@dataclass
class Part:
    """One bucket, and what a codec keeps for it from step to step.

    `array` is the bucket, 1-d and real (complex gradients as pairs). `residual` is of its shape, in
    float32 or float64, and None for a codec that loses nothing. `warm` starts the next step better
    by leaf name, is equal on all ranks, and goes into checkpoints.
    """

    comm: Communicator
    array: NDArray[Any]
    residual: NDArray[Any] | None = None
    pieces: tuple[Piece, ...] = ()
    warm: dict[str, NDArray[Any]] = field(default_factory=dict)
    _memory: dict[str, NDArray[Any]] = field(default_factory=dict)

    def wire(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Registered memory that stays from step to step, zero at first."""
        if name not in self._memory:
            self._memory[name] = self.comm.empty(shape, np.dtype(dtype))
            self._memory[name][...] = 0
        return self._memory[name]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Ordinary memory that stays from step to step, zero at first."""
        if name not in self._memory:
            self._memory[name] = np.zeros(shape, dtype)
        return self._memory[name]

    def wanted(self) -> NDArray[Any]:
        """What this rank has to send: gradient + residual, in the residual's dtype."""
        assert self.residual is not None
        wanted = self.scratch("wanted", self.residual.shape, self.residual.dtype)
        np.add(self.array, self.residual, out=wanted)
        return wanted

    def keep(self, wanted: NDArray[Any], sent: NDArray[Any]) -> None:
        """wanted - sent becomes the residual."""
        assert self.residual is not None
        with np.errstate(invalid="ignore"):
            np.subtract(wanted, sent, out=self.residual)
        # A step with NaN or Inf is skipped or fails; it must not poison the later ones.
        finite = np.isfinite(self.residual)
        if not finite.all():
            self.residual[~finite] = 0


class Codec(Protocol):
    """See the module's text. Keeps nothing itself: one may serve several reducers."""

    lossy: bool  # needs a residual
    needs_scale: bool  # must not start before the scale of the gradients is known

    def exchange(self, part: Part, scale: float, mean: bool) -> Rounds:
        """Runs one step's exchange: yields each collective as it starts, and goes on when it ended.

        The number of rounds is the same on all ranks. `scale` is a power of two near the total
        weight, equal on all ranks: part.array / scale is about as large as an averaged gradient. A
        codec that is not lossy divides by the number of ranks where `mean` is true; after a lossy
        one the reducer does.
        """


class Exchange:
    """One bucket under way. `wire_bytes` is what this rank has put in so far."""

    def __init__(self, codec: Codec, part: Part, scale: float, mean: bool) -> None:
        self._rounds = codec.exchange(part, scale, mean)
        self._work, self.wire_bytes = next(self._rounds)

    def advance(self) -> bool:
        """Waits for the collective under way and starts the next; False when there is none left,
        and the bucket holds the sum. Raises the collective's error.
        """
        self._work.wait()
        following = next(self._rounds, None)
        if following is None:
            return False
        self._work, nbytes = following
        self.wire_bytes += nbytes
        return True

    def drop(self) -> None:
        """Waits for the collective under way, and starts no other."""
        self._work.wait()
