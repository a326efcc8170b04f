"""The collectives as table entries, and the sizes of a sweep. Pure.

Bandwidths are nccl-tests': algbw = S/t and busbw = algbw * factor, where S is the size column in
bytes (the larger of what a rank gives and gets) and 1 GB = 1e9 bytes. The factor makes busbw
comparable between numbers of ranks: it is what a link, or a memory bus, has to carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpidp.config import OPS

GB = 1e9


@dataclass(frozen=True)
class Collective:
    """One collective. `count` is elements: of a rank's block where blocks are exchanged, else all.

    `input_blocks` and `output_blocks` tell whether the input and the output hold one such block or
    one for each rank. `bus_steps` is the factor of busbw: a multiple of (P-1)/P, or None for 1.
    """

    name: str
    reduces: bool = False
    rooted: bool = False
    input_blocks: bool = False
    output_blocks: bool = False
    bus_steps: int | None = 1
    out_of_place: bool = True
    in_place: bool = False

    def input_count(self, count: int, world_size: int) -> int:
        """Elements of a rank's input."""
        return count * world_size if self.input_blocks else count

    def output_count(self, count: int, world_size: int) -> int:
        """Elements of a rank's output."""
        return count * world_size if self.output_blocks else count

    def count_for(self, nbytes: int, itemsize: int, world_size: int) -> int:
        """The count whose size is at most `nbytes`, but never below one element."""
        elements = nbytes // itemsize
        if self.input_blocks or self.output_blocks:
            elements //= world_size
        return max(1, elements)

    def size(self, count: int, itemsize: int, world_size: int) -> int:
        """Bytes in the size column."""
        larger = max(self.input_count(count, world_size), self.output_count(count, world_size))
        return larger * itemsize

    def bus_factor(self, world_size: int) -> float:
        """busbw / algbw."""
        if self.bus_steps is None:
            return 1.0
        return self.bus_steps * (world_size - 1) / world_size


COLLECTIVES = {
    entry.name: entry
    for entry in (
        Collective("all_reduce", reduces=True, bus_steps=2, in_place=True),
        Collective("reduce_scatter", reduces=True, input_blocks=True),
        Collective("all_gather", output_blocks=True),
        Collective("all_to_all", input_blocks=True, output_blocks=True),
        Collective("broadcast", rooted=True, bus_steps=None, out_of_place=False, in_place=True),
        Collective("reduce", reduces=True, rooted=True, bus_steps=None, in_place=True),
        Collective("barrier", bus_steps=None, out_of_place=False, in_place=True),
    )
}


@dataclass(frozen=True)
class Case:
    """One row of the table: a collective on `count` elements of one dtype."""

    collective: Collective
    dtype: str
    op: str
    root: int
    count: int
    itemsize: int
    world_size: int

    @property
    def nbytes(self) -> int:
        """The size column."""
        return self.collective.size(self.count, self.itemsize, self.world_size)

    @property
    def input_count(self) -> int:
        """Elements of a rank's input."""
        return self.collective.input_count(self.count, self.world_size)

    @property
    def output_count(self) -> int:
        """Elements of a rank's output."""
        return self.collective.output_count(self.count, self.world_size)

    def bandwidths(self, seconds: float) -> tuple[float, float]:
        """(algbw, busbw) in GB/s."""
        algorithm = self.nbytes / seconds / GB if seconds > 0 else 0.0
        return algorithm, algorithm * self.collective.bus_factor(self.world_size)


def sizes(minimum: int, maximum: int, factor: int | None, step: int | None) -> Iterator[int]:
    """Bytes from `minimum` to `maximum`, multiplied by `factor` or, where given, plus `step`."""
    nbytes = minimum
    while nbytes <= maximum:
        yield nbytes
        nbytes = nbytes + step if step is not None else nbytes * (factor or 2)


def op_fits(op: str, dtype: str) -> bool:
    """Whether `op` is defined for `dtype`."""
    inexact = dtype.startswith(("float", "bfloat", "complex"))
    if op == "mean":
        return inexact
    if op in ("min", "max"):
        return not dtype.startswith("complex")
    return op in OPS
