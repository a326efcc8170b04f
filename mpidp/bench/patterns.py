"""Inputs whose right answer is exact in any order of summation, and the count of wrong elements.

Rank r's input is a block of PERIOD pseudo-random values, repeated. PERIOD is a prime, so a chunk
that lands at the wrong place does not match unless it is off by a multiple of it. The expected
result of a reduction repeats too, so it is computed for one block only, by NumPy, from every rank's
block. Values are small enough that every partial result, in any order, is exact in the dtype.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidp.bench.cases import Case

Array = NDArray[Any]

PERIOD = 65521  # the largest prime below 2^16
_POISON = 0xA5  # what an output holds before the collective writes it

# The largest n such that every integer from 0 to n is exact.
_EXACT_LIMIT = {
    "bool": 1,
    "int8": 127,
    "uint8": 255,
    "int16": 32767,
    "uint16": 65535,
    "bfloat16": 256,
    "float16": 2048,
}
_LARGE_LIMIT = 1 << 23  # holds for every other dtype, float32 being the narrowest


def exact_limit(dtype: str) -> int:
    """The largest n such that 0 to n are exact in `dtype`; capped for wide dtypes."""
    return _EXACT_LIMIT.get(dtype, _LARGE_LIMIT)


def _noise(rank: int) -> NDArray[np.uint64]:
    """PERIOD pseudo-random integers below 2^31, the same on every call (splitmix64's mixer)."""
    with np.errstate(over="ignore"):
        z = np.arange(PERIOD, dtype=np.uint64) + np.uint64(rank + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z >> np.uint64(33)
    return mixed


def _contributes(rank: int, world_size: int, most: int) -> NDArray[np.bool_]:
    """Where `rank` gives more than the neutral element: at most `most` ranks do at any place."""
    stride = -(-world_size // max(1, most))
    mask: NDArray[np.bool_] = np.arange(PERIOD) % stride == rank % stride
    return mask


def input_block(case: Case, rank: int, dtype: np.dtype[Any]) -> Array:
    """The PERIOD values of which rank's input is made."""
    noise = _noise(rank)
    signed = not case.dtype.startswith(("uint", "bool"))
    limit = exact_limit(case.dtype)
    if case.dtype == "bool" and case.collective.reduces:
        # Few enough that the result of neither "or" nor "and" is the same everywhere.
        rare = noise % np.uint64(2 * case.world_size) == 0
        flags: Array = np.logical_xor(rare, case.op in ("prod", "min"))
        return flags
    if not case.collective.reduces or case.op in ("min", "max"):
        values = (noise % np.uint64(min(limit, 126) + 1)).astype(np.int64)
        if signed:
            values -= min(limit, 126) // 2
        return np.asarray(values.astype(dtype))
    if case.op == "prod":
        return _factors(case, noise, rank, signed).astype(dtype)
    # A mean is exact where every value is a multiple of world_size. Where that leaves the exact
    # range, a single rank contributes to each element, so that only the division rounds.
    multiples = case.op == "mean" and case.world_size <= limit
    unit = case.world_size if multiples else 1
    most = 1 if case.op == "mean" and not multiples else min(case.world_size, limit // unit)
    span = min(16, limit // (unit * most))  # |value| <= span * unit
    values = (noise % np.uint64(2 * span + 1 if signed else span + 1)).astype(np.int64)
    if signed:
        values -= span
    values *= unit
    return np.where(_contributes(rank, case.world_size, most), values, 0).astype(dtype)


def _factors(case: Case, noise: NDArray[np.uint64], rank: int, signed: bool) -> Array:
    """Factors of a product: powers of two and signs, at most six of them not 1 in size."""
    inexact = case.dtype.startswith(("float", "bfloat", "complex"))
    exponents = (noise % np.uint64(3)).astype(np.int64) - 1
    if not inexact:
        exponents = np.abs(exponents)
    exponents = np.where(_contributes(rank, case.world_size, 6), exponents, 0)
    sizes = np.exp2(exponents)
    turns = (noise >> np.uint64(8)).astype(np.int64)
    if case.dtype.startswith("complex"):
        units = np.array([1, 1j, -1, -1j])[turns % 4]
    else:
        units = np.array([1.0, -1.0])[turns % 2] if signed else np.ones(1)
    factors: Array = sizes * units
    return factors


def reduced_block(case: Case, dtype: np.dtype[Any]) -> Array:
    """The PERIOD values of which the reduction of all ranks' inputs is made. Read-only."""
    return _reduced_block(replace(case, count=0), dtype)


# The same for all sizes of a sweep, which takes one dtype and op after the other.
@lru_cache(maxsize=1)
def _reduced_block(case: Case, dtype: np.dtype[Any]) -> Array:
    wide = _wide_dtype(dtype)
    combine = {
        "sum": np.logical_or if dtype.kind == "b" else np.add,
        "mean": np.add,
        "prod": np.logical_and if dtype.kind == "b" else np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }[case.op]
    blocks = (input_block(case, r, dtype).astype(wide) for r in range(case.world_size))
    total = reduce(combine, blocks)
    if case.op == "mean":
        total = total / case.world_size
    block: Array = np.asarray(total).astype(dtype)
    block.flags.writeable = False
    return block


def _wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind == "c":
        return np.dtype(np.complex128)
    if dtype.kind == "f" or dtype.name == "bfloat16":
        return np.dtype(np.float64)
    return dtype


def write_block(array: Array, block: Array, first: int = 0) -> None:
    """Fills `array` with the repeated `block`, beginning at its element `first`."""
    filled = 0
    while filled < array.size:
        begin = (first + filled) % PERIOD
        piece = block[begin : begin + array.size - filled]
        array[filled : filled + piece.size] = piece
        filled += piece.size


def count_unequal(array: Array, block: Array, first: int = 0) -> int:
    """How many elements of `array` differ from the repeated `block`, beginning at `first`."""
    if array.dtype.kind == "b":
        # A byte that is neither 0 nor 1 would compare as true.
        array, block = array.view(np.uint8), block.view(np.uint8)
    wrong = checked = 0
    while checked < array.size:
        begin = (first + checked) % PERIOD
        piece = block[begin : begin + array.size - checked]
        wrong += int(np.count_nonzero(array[checked : checked + piece.size] != piece))
        checked += piece.size
    return wrong


class Exact:
    """The inputs and the expected output of one case on one rank.

    exact = Exact(case, rank, x.dtype)
    exact.fill(x); exact.poison(out)
    comm.all_reduce(x, out)
    wrong = exact.count_wrong(out)
    """

    def __init__(self, case: Case, rank: int, dtype: np.dtype[Any]) -> None:
        self.case = case
        self.rank = rank
        self.input = input_block(case, rank, dtype)
        # (block, its first element, how many elements it covers), in the order of the output.
        self.expected: list[tuple[Array, int, int]] = []
        name, count = case.collective.name, case.count
        if name == "barrier" or (name == "reduce" and rank != case.root):
            return
        if name in ("all_reduce", "reduce"):
            self.expected = [(reduced_block(case, dtype), 0, count)]
        elif name == "reduce_scatter":
            self.expected = [(reduced_block(case, dtype), rank * count, count)]
        elif name == "broadcast":
            self.expected = [(input_block(case, case.root, dtype), 0, count)]
        else:
            first = rank * count if name == "all_to_all" else 0
            blocks = (input_block(case, r, dtype) for r in range(case.world_size))
            self.expected = [(block, first, count) for block in blocks]

    def fill(self, x: Array) -> None:
        """Writes this rank's input."""
        write_block(x, self.input)

    def fill_for_timing(self, x: Array) -> None:
        """Writes an input that may be reduced in place again and again at full speed.

        Sums grow to infinity without harm, but a product of halves would become subnormal, and
        arithmetic on those is slow.
        """
        if self.case.collective.reduces and self.case.op == "prod":
            x.fill(1)
        else:
            self.fill(x)

    @staticmethod
    def poison(out: Array) -> None:
        """Writes what no right answer is likely to be."""
        out.view(np.uint8).fill(_POISON)

    def count_wrong(self, output: Array) -> int:
        """Wrong elements of this rank's output."""
        wrong = begin = 0
        for block, first, count in self.expected:
            wrong += count_unequal(output[begin : begin + count], block, first)
            begin += count
        return wrong
