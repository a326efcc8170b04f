"""Checks of call arguments, and calls that convert arrays only where the extension asks for it.

The extension parses plain buffers and common argument types itself and answers TypeError to
anything else; only then is Python asked to look closer, so that small calls pay for nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidp.buffers import as_buffer, numpy_dtype
from mpidp.config import ALGORITHMS, OPS
from mpidp.devices import empty_like, stream_handle
from mpidp.errors import InvalidArgumentError, InvalidBufferError


def deadline(timeout: float | None) -> float:
    """Seconds as the extension takes them: negative for the communicator's own."""
    return -1.0 if timeout is None else seconds(timeout)


def seconds(timeout: float) -> float:
    """`timeout` checked: a finite number above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise InvalidArgumentError(f"timeout={timeout!r}: expected seconds, or None")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise InvalidArgumentError(
            f"timeout={timeout!r}: expected a finite number of seconds above 0, or None for the "
            "communicator's own"
        )
    return float(timeout)


def is_index(value: object) -> bool:
    """Whether `value` is an integer, Python's or NumPy's, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_options(
    algorithm: object, op: object = "sum", scale: object = None, deterministic: object = False
) -> None:
    """Raise `InvalidArgumentError` for an option of the wrong type or an unknown name."""
    if not isinstance(op, str) or op not in OPS:
        raise InvalidArgumentError(f"op {op!r}: expected one of {', '.join(OPS)}")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise InvalidArgumentError(
            f"algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS)}"
        )
    if scale is not None and not isinstance(scale, (int, float, np.integer, np.floating)):
        raise InvalidArgumentError(f"scale={scale!r}: expected a real number, or None")
    if not isinstance(deterministic, (bool, np.bool_)):
        raise InvalidArgumentError(f"deterministic={deterministic!r}: expected True or False")


def shapes_differ(x: Any, out: Any) -> InvalidBufferError:
    """The error for an `out` that is not shaped like x."""
    return InvalidBufferError(
        f"out has shape {tuple(out.shape)} and x has {tuple(x.shape)}; give out the shape of x"
    )


def check_same_shape(x: Any, out: Any) -> None:
    """Raise `InvalidBufferError` where both have shapes and these differ."""
    shape = getattr(x, "shape", None)
    if out is not None and shape is not None and getattr(out, "shape", shape) != shape:
        raise shapes_differ(x, out)


def num_elements(shape: Any) -> int:
    """The product of an array shape, which may be a single integer."""
    try:
        lengths = [operator.index(shape)] if not hasattr(shape, "__iter__") else list(shape)
        lengths = [operator.index(length) for length in lengths]
    except TypeError:
        raise InvalidArgumentError(f"shape {shape!r}: expected integers") from None
    if any(length < 0 for length in lengths):
        raise InvalidArgumentError(f"shape {shape!r}: expected integers >= 0")
    return math.prod(lengths)


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array argument; one dimension where it says nothing of shapes."""
    shape = getattr(x, "shape", None)
    return (as_buffer(x).count,) if shape is None else tuple(shape)


def result_for(context: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """An array of `shape` that goes with x: NumPy's for host memory, one on x's GPU else."""
    if isinstance(x, np.ndarray):
        return np.empty(shape, x.dtype)
    buffer = as_buffer(x)
    if buffer.device == "cpu":
        return np.empty(shape, numpy_dtype(buffer.dtype))
    return empty_like(context, x, shape, buffer.dtype)


def call_reduction(
    function: Callable[..., Any],
    x: Any,
    out: Any,
    op: str,
    algorithm: str,
    scale: float | None,
    deterministic: bool,
    timeout: float,
    *,
    root: int | None = None,
    writes_x: bool = False,
    stream: Any = None,
) -> Any:
    """Call a reducing collective, with `root` after `op` where it has one."""
    rooted = () if root is None else (root,)
    try:
        return function(x, out, op, *rooted, algorithm, scale, deterministic, timeout)
    except TypeError:
        check_options(algorithm, op, scale, deterministic)
    x, out = buffers_of(x, out, writes_x, stream)
    scale = None if scale is None else float(scale)
    return function(x, out, op, *rooted, algorithm, scale, bool(deterministic), timeout)


def call_move(
    function: Callable[..., Any],
    x: Any,
    out: Any,
    algorithm: str,
    timeout: float,
    stream: Any = None,
) -> Any:
    """Call a collective that moves x into `out`."""
    try:
        return function(x, out, algorithm, timeout)
    except TypeError:
        check_options(algorithm)
    x, out = buffers_of(x, out, False, stream)
    return function(x, out, algorithm, timeout)


def call_broadcast(
    function: Callable[..., Any],
    x: Any,
    root: int,
    algorithm: str,
    timeout: float,
    is_root: bool,
    stream: Any = None,
) -> Any:
    """Call a broadcast, which writes x everywhere but on the root."""
    try:
        return function(x, root, algorithm, timeout)
    except TypeError:
        check_options(algorithm)
    handle = None if stream is None else stream_handle(stream)
    buffer = as_buffer(x, writable=not is_root, stream=handle)
    return function(buffer, root, algorithm, timeout)


def buffers_of(x: Any, out: Any, writes_x: bool, stream: Any = None) -> tuple[Any, Any]:
    """Both arrays converted; the extension checks that they fit each other."""
    handle = None if stream is None else stream_handle(stream)
    if out is None:
        return as_buffer(x, writable=writes_x, stream=handle), None
    return as_buffer(x, stream=handle), as_buffer(out, "out", writable=True, stream=handle)
