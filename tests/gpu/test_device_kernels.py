"""The GPU kernels against the CPU kernels, bit for bit. On the emulated device or a real one."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from standin import StandIn, runtime

from mpidp import _core
from mpidp.reducer.compression import int8 as int8_codec

MOST = 16
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEXES = ["complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEXES]
OPS = ["sum", "mean", "prod", "min", "max"]  # by number, as in csrc/common/types.h
NUMBERED = ["bool", *INTEGERS, *FLOATS, *COMPLEXES]
CASES = [
    (dtype, op)
    for dtype in DTYPES
    for op in (["sum", "prod"] if dtype in COMPLEXES else ["sum", "prod", "min", "max"])
]
# As device_runtime.h lists them after `fill`.
KERNELS = ("reduce", "pack", "cast", "quantize", "dequantize")


class ReduceArgs(ctypes.Structure):
    """DeviceReduceArgs."""

    _fields_ = (
        ("sources", ctypes.c_void_p * MOST),
        ("destinations", ctypes.c_void_p * MOST),
        ("scales", ctypes.c_double * MOST),
        ("num_sources", ctypes.c_int32),
        ("num_destinations", ctypes.c_int32),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_uint8),
        ("op", ctypes.c_uint8),
        ("has_scales", ctypes.c_bool),
        ("divisor", ctypes.c_double),
    )


class Piece(ctypes.Structure):
    """DevicePiece."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
    )


@pytest.fixture(scope="module")
def kernel() -> Any:
    """Calls a kernel by its name, on the default stream, and waits for it."""
    from standin import _Table

    library = runtime().library
    entry = library.mpidp_device_runtime
    entry.restype = ctypes.c_void_p
    first = entry(1) + ctypes.sizeof(_Table)
    entry.restype = ctypes.POINTER(_Table)
    width = ctypes.sizeof(ctypes.c_void_p)

    def call(name: str, *arguments: Any) -> int:
        address = ctypes.c_void_p.from_address(first + width * KERNELS.index(name)).value
        types = [
            ctypes.c_int64 if isinstance(one, int) and one < 1 << 31 else ctypes.c_void_p
            for one in arguments
        ]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *types, ctypes.c_void_p)(address)
        status: int = function(*arguments, None)
        runtime()("synchronize_stream", 0)
        return status

    return call


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def draw(dtype: str, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Any bits: NaN, infinities, subnormals and bools that are neither 0 nor 1 among them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, count * numpy_dtype(dtype).itemsize, np.uint8)
    values = raw.view(numpy_dtype(dtype))
    if dtype in (*FLOATS, *COMPLEXES) and count > 3:
        ordinary = rng.standard_normal(count).astype(numpy_dtype(dtype))
        keep = rng.random(count) < 0.7
        values[keep] = ordinary[keep]
        values[:2] = np.array([0.0, -0.0]).astype(numpy_dtype(dtype))
    return values


def same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Equal bits, but for the payload of a NaN."""
    if found.dtype.kind not in "fcV" and found.dtype != numpy_dtype("bfloat16"):
        return found.tobytes() == expected.tobytes()
    if found.dtype.kind == "c":
        part = np.float32 if found.dtype.itemsize == 8 else np.float64
        found, expected = found.view(part), expected.view(part)
    bits = np.dtype(f"u{found.dtype.itemsize}")
    both_nan = np.isnan(found) & np.isnan(expected)
    return bool((both_nan | (found.view(bits) == expected.view(bits))).all())


def buffer(array: np.ndarray[Any, Any], dtype: str) -> _core.Buffer:
    return _core.Buffer(pointer=array.ctypes.data, count=array.size, dtype=dtype, owner=array)


def reduce_both(
    kernel: Any,
    sources: list[np.ndarray[Any, Any]],
    dtype: str,
    op: str,
    *,
    scales: list[float] | None = None,
    divisor: float = 1.0,
    num_destinations: int = 1,
    misaligned: tuple[bool, ...] = (False,),
    in_place: bool = False,
) -> None:
    expected = np.zeros_like(sources[0])
    _core.reduce_buffers(
        [buffer(one, dtype) for one in sources], [buffer(expected, dtype)], op, scales, divisor
    )
    count = sources[0].size
    there = [
        StandIn(count, one.dtype, misaligned=misaligned[i % len(misaligned)]).upload(one)
        for i, one in enumerate(sources)
    ]
    outputs = [there[0]] if in_place else []
    while len(outputs) < num_destinations:
        place = misaligned[(len(outputs) + 1) % len(misaligned)]
        outputs.append(StandIn(count, sources[0].dtype, misaligned=place))
    args = ReduceArgs(
        num_sources=len(there),
        num_destinations=len(outputs),
        count=count,
        dtype=NUMBERED.index(dtype),
        op=OPS.index(op),
        has_scales=scales is not None,
        divisor=divisor,
    )
    for i, one in enumerate(there):
        args.sources[i] = one.pointer
        args.scales[i] = scales[i] if scales is not None else 1.0
    for i, one in enumerate(outputs):
        args.destinations[i] = one.pointer
    assert kernel("reduce", ctypes.addressof(args)) == 0
    for output in outputs:
        assert same(output.download(), expected)


@pytest.mark.parametrize("num_sources", [1, 2, 3, 16])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_the_bits_are_those_of_the_cpu(kernel, dtype, op, num_sources):
    for count in (1, 7, 1003):
        sources = [draw(dtype, count, 31 * i + count) for i in range(num_sources)]
        with np.errstate(all="ignore"):
            reduce_both(kernel, sources, dtype, op)


@pytest.mark.parametrize("misaligned", [(True,), (True, False), (False, True, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_and_tails(kernel, dtype, misaligned):
    for count in (0, 1, 2, 15, 16, 17, 258):
        sources = [draw(dtype, count, i) for i in range(3)]
        reduce_both(kernel, sources, dtype, "sum", misaligned=misaligned, num_destinations=2)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEXES])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 4.0])
def test_scales_and_divisors(kernel, dtype, divisor):
    sources = [draw(dtype, 501, i) for i in range(4)]
    for scales in (None, [0.5, 3.0, -1.25, 0.1]):
        reduce_both(kernel, sources, dtype, "sum", scales=scales, divisor=divisor)


@pytest.mark.parametrize("num_destinations", [1, 5, 16])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "complex128"])
def test_in_place_and_many_destinations(kernel, dtype, num_destinations):
    sources = [draw(dtype, 777, i) for i in range(5)]
    reduce_both(kernel, sources, dtype, "sum", in_place=True, num_destinations=num_destinations)


def test_every_float16_and_bfloat16_survives(kernel):
    for dtype in ("float16", "bfloat16"):
        every = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))
        reduce_both(kernel, [every], dtype, "sum")


@pytest.mark.parametrize("shift", [0, 1])
def test_pack(kernel, shift):
    rng = np.random.default_rng(3)
    sizes = [0, 1, 15, 16, 1000, 4097, *([33] * 70)]
    sources = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    there = [StandIn(max(one.size, 1), np.uint8) for one in sources]
    for host, device in zip(sources, there, strict=True):
        if host.size:
            device.upload(np.pad(host, (0, device.size - host.size)))
    whole = StandIn(sum(sizes) + shift, np.uint8)
    pieces, at = (Piece * len(sizes))(), shift
    for i, (host, device) in enumerate(zip(sources, there, strict=True)):
        pieces[i] = Piece(device.pointer, whole.pointer + at, host.size)
        at += host.size
    assert kernel("pack", ctypes.addressof(pieces), len(sizes)) == 0
    assert (whole.download()[shift:] == np.concatenate(sources)).all()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts(kernel, source, target):
    host = draw(source, 2000, 5)
    there, out = StandIn(2000, host.dtype).upload(host), StandIn(2000, numpy_dtype(target))
    codes = NUMBERED.index(source), NUMBERED.index(target)
    assert kernel("cast", there.pointer, codes[0], out.pointer, codes[1], 2000) == 0
    with np.errstate(all="ignore"):
        # 16-bit targets go through float32.
        wide = host.astype(np.float32) if numpy_dtype(target).itemsize == 2 else host
        assert same(out.download(), wide.astype(numpy_dtype(target)))


def test_a_cast_without_a_kernel_is_refused(kernel):
    there = StandIn(4, np.float32)
    assert kernel("cast", there.pointer, NUMBERED.index("int8"), there.pointer, 0, 4) == 801


@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
def test_the_int8_codec_is_the_hosts(kernel, count):
    block = int8_codec.BLOCK
    host = draw("float32", count, 9)
    if count > block:
        host[:block] = 0  # a block without a scale
    blocks = -(-count // block)
    codes, scales = StandIn(count, np.int8), StandIn(blocks, np.float32)
    given = StandIn(count, np.float32).upload(host)
    assert kernel("quantize", given.pointer, codes.pointer, scales.pointer, count, block) == 0
    padded = np.zeros((1, blocks * block), np.float32)
    padded[0, :count] = host
    row = np.zeros((1, int8_codec._codes_bytes(count) + 4 * blocks), np.uint8)
    with np.errstate(all="ignore"):
        int8_codec._encode(padded, row, count)
    assert (codes.download() == row[0, :count].view(np.int8)).all()
    assert same(scales.download(), row[0, int8_codec._codes_bytes(count) :].view(np.float32))
    back = StandIn(count, np.float32)
    assert kernel("dequantize", codes.pointer, scales.pointer, back.pointer, count, block) == 0
    with np.errstate(all="ignore"):
        expected = int8_codec._decode(row[0], count, np.dtype("f4"), np.dtype("f4"))
    assert same(back.download(), expected)
