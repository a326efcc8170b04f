"""Exact-valued inputs that differ by rank and index, which every rank can compute for all ranks.

Sums, products and quotients of them are exact in every dtype whatever the order of operations, so
each algorithm owes the very bits of the oracle.
"""

from __future__ import annotations

import functools

import numpy as np

from mpidp.buffers import numpy_dtype
from oracle import reduce_in_rank_order

FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)


def has_op(dtype: str, op: str) -> bool:
    """Whether the pair is defined: no mean of integers, no order of complex numbers."""
    if op == "mean":
        return dtype in FLOATS + COMPLEX
    return op not in ("min", "max") or dtype not in COMPLEX


# Values repeat after a prime number of elements, which no chunk, slot or segment is a multiple of.
PERIOD = 1009


@functools.cache
def _pattern(dtype: str, rank: int, op: str, salt: int) -> np.ndarray:
    index = np.arange(PERIOD, dtype=np.int64)
    mixed = (index * 7 + rank * 13 + salt * 5 + (index >> 3) * 3) % 11
    if dtype == "bool":
        # Mostly false for the OR of sum and max, mostly true for the AND of prod and min.
        return (mixed == 0) if op in ("sum", "max") else (mixed != 0)
    if op == "prod":
        # Powers of two, inverse ones only where there are fractions.
        exponents = mixed % 3 - (0 if dtype in INTEGERS else 1)
        numbers = np.ldexp(np.where(mixed % 2, -1.0, 1.0), exponents)
    else:
        numbers = mixed - 5.0
    if dtype in COMPLEX:
        # No power of it has a part that is zero, whose sign would depend on the order.
        numbers = numbers * (2 + 1j)
    if dtype.startswith("uint"):
        return numbers.astype(np.int64).astype(dtype)
    return numbers.astype(numpy_dtype(dtype))


@functools.cache
def _reduced(dtype: str, world_size: int, op: str, scales, salt: int) -> np.ndarray:
    inputs = [_pattern(dtype, rank, op, salt) for rank in range(world_size)]
    return reduce_in_rank_order(inputs, op, scales)


def values(dtype: str, count: int, rank: int, op: str = "sum", salt: int = 0) -> np.ndarray:
    """The input of one rank: `count` elements of `dtype`, exact under `op`."""
    return np.resize(_pattern(dtype, rank, op, salt), count)


def reduced(
    dtype: str, count: int, world_size: int, op: str = "sum", scales=None, salt: int = 0
) -> np.ndarray:
    """What reducing every rank's `values` must give."""
    scales = None if scales is None else tuple(scales)
    return np.resize(_reduced(dtype, world_size, op, scales, salt), count)


def placed(array: np.ndarray, misaligned: bool) -> np.ndarray:
    """A copy of the array, one byte off every alignment where asked."""
    if not misaligned:
        return array.copy()
    raw = np.empty(array.nbytes + 1, np.uint8)
    copy = raw[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal shapes, dtypes and bytes; NaNs and signs of zero count."""
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and found.tobytes() == expected.tobytes()
    )


def difference(found: np.ndarray, expected: np.ndarray) -> str:
    """Empty where the bits are the same, else the first element that differs."""
    if same_bits(found, expected):
        return ""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{found.shape} in place of {expected.dtype}{expected.shape}"
    size = found.itemsize
    left = np.frombuffer(found.tobytes(), np.uint8).reshape(-1, size)
    right = np.frombuffer(expected.tobytes(), np.uint8).reshape(-1, size)
    wrong = np.flatnonzero((left != right).any(axis=1))
    at = int(wrong[0])
    return (
        f"{wrong.size} of {found.size} elements wrong, the first at {at}: "
        f"{found.reshape(-1)[at]!r} in place of {expected.reshape(-1)[at]!r}"
    )


def small_counts(world_size: int) -> list[int]:
    """0, 1, around the world size, and an odd one that spans several cache lines."""
    return sorted({0, 1, world_size - 1, world_size + 1, 333})
