"""The CPU reduction kernels against a naive NumPy oracle, bit for bit, on every instruction set.

The oracle follows csrc/reduce/reduce.h one array operation at a time, so that each of NumPy's
operations rounds once. A NaN's payload is the one thing that the contract leaves open.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpidp import _core
from mpidp.errors import InvalidArgumentError

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEXES = ["complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEXES]
SOURCE_COUNTS = [1, 2, 3, 4, 5, 8, 17]
# (count, how many bytes past an aligned address source 0 begins): empty, one, less than a vector,
# whole blocks, and whole blocks with a ragged end.
SHAPES = [(0, 0), (1, 1), (13, 3), (1000, 0), (1003, 1)]
GUARD = 64


def available_instruction_sets() -> list[str]:
    before = _core.instruction_set()
    names = ["baseline", "avx2", "avx512", "neon"]
    found = [name for name in names if _core.set_instruction_set(name)]
    assert _core.set_instruction_set(before)
    return found


INSTRUCTION_SETS = available_instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.instruction_set()
    assert _core.set_instruction_set(request.param)
    yield request.param
    assert _core.set_instruction_set(before)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def accumulator(dtype: str) -> np.dtype[Any]:
    return np.dtype("float32") if dtype in ("float16", "bfloat16") else numpy_dtype(dtype)


def operators(dtype: str) -> list[str]:
    return ["sum", "prod"] if dtype in COMPLEXES else ["sum", "prod", "min", "max"]


DTYPE_OPS = [(dtype, op) for dtype in DTYPES for op in operators(dtype)]


class Guarded:
    """`values` at `shift` bytes past an aligned address, between guard bytes that must survive."""

    def __init__(self, values: np.ndarray[Any, Any], dtype: str, shift: int) -> None:
        self.dtype = dtype
        self.raw = np.full(values.nbytes + 2 * GUARD + 64, 0xA5, np.uint8)
        self.begin = GUARD + (-self.raw.ctypes.data) % 64 + shift % GUARD
        self.end = self.begin + values.nbytes
        self.raw[self.begin : self.end] = np.frombuffer(values.tobytes(), np.uint8)
        self.count = values.size

    def buffer(self) -> _core.Buffer:
        return _core.Buffer(
            pointer=self.raw.ctypes.data + self.begin,
            count=self.count,
            dtype=self.dtype,
            owner=self.raw,
        )

    def values(self) -> np.ndarray[Any, Any]:
        assert (self.raw[: self.begin] == 0xA5).all()
        assert (self.raw[self.end :] == 0xA5).all()
        return np.frombuffer(self.raw[self.begin : self.end].tobytes(), numpy_dtype(self.dtype))


def run(
    sources: Sequence[np.ndarray[Any, Any]],
    dtype: str,
    op: str,
    *,
    scales: list[float] | None = None,
    divisor: float = 1.0,
    num_destinations: int = 1,
    shift: int = 0,
    alias: int | None = None,
) -> np.ndarray[Any, Any]:
    """Reduces copies of `sources`, all at different alignments; returns the common result.

    With `alias` the only destination is that source itself.
    """
    inputs = [Guarded(source, dtype, shift * (2 * i + 1)) for i, source in enumerate(sources)]
    if alias is not None:
        outputs = [inputs[alias]]
    else:
        blank = np.zeros_like(sources[0])
        outputs = [Guarded(blank, dtype, shift * (3 * i + 2)) for i in range(num_destinations)]
    _core.reduce_buffers(
        [x.buffer() for x in inputs], [x.buffer() for x in outputs], op, scales, divisor
    )
    for i, source in enumerate(sources):
        if i != alias:
            assert inputs[i].values().tobytes() == source.tobytes()
    results = [x.values() for x in outputs]
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()
    return results[0]


def multiply(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if a.dtype.kind != "c":
        return a * b
    # NumPy may use fused multiply-add inside a complex product, which rounds differently.
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def extremum(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], op: str) -> np.ndarray[Any, Any]:
    """IEEE 754-2019 minimum and maximum: NaN wins, and -0 is below +0."""
    if a.dtype.kind != "f":
        return np.minimum(a, b) if op == "min" else np.maximum(a, b)
    lower = (a < b) | ((a == b) & np.signbit(a))
    result = np.where(lower == (op == "min"), a, b)
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), result)


def oracle(
    sources: Sequence[np.ndarray[Any, Any]],
    dtype: str,
    op: str,
    scales: list[float] | None = None,
    divisor: float = 1.0,
) -> np.ndarray[Any, Any]:
    wide = accumulator(dtype)
    terms = [source.astype(wide) for source in sources]
    scalar = np.zeros(1, wide).real.dtype.type  # complex numbers have real factors
    with np.errstate(all="ignore"):
        if scales is not None:
            terms = [
                by_part(term, scalar(s), np.multiply) for term, s in zip(terms, scales, strict=True)
            ]
        result = terms[0]
        for term in terms[1:]:
            if op == "sum":
                result = result | term if dtype == "bool" else result + term
            elif op == "prod":
                result = multiply(result, term)
            else:
                result = extremum(result, term, op)
        if divisor != 1.0:
            result = by_part(result, scalar(divisor), np.divide)
        return result.astype(numpy_dtype(dtype))


def by_part(x: np.ndarray[Any, Any], factor: Any, function: Any) -> np.ndarray[Any, Any]:
    """Applies a real factor to the real and imaginary parts apart, if there are two."""
    if x.dtype.kind != "c":
        return function(x, factor)
    result = np.empty_like(x)
    result.real = function(x.real, factor)
    result.imag = function(x.imag, factor)
    return result


def assert_same_bits(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Equal bit for bit; any NaN equals any other."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if actual.dtype.kind == "c":
        actual, expected = (x.view(x.real.dtype) for x in (actual, expected))
    bits = f"u{actual.dtype.itemsize}"
    same = actual.view(bits) == expected.view(bits)
    if actual.dtype.kind not in "biu":
        with np.errstate(invalid="ignore"):  # what converting a signalling NaN raises
            same |= np.isnan(actual.astype("float64")) & np.isnan(expected.astype("float64"))
    wrong = np.flatnonzero(~same)
    assert wrong.size == 0, (wrong[:5], actual[wrong[:5]], expected[wrong[:5]])


def specials(dtype: str) -> np.ndarray[Any, Any]:
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    tiny, small, big = info.smallest_subnormal, info.smallest_normal, info.max
    values = [0.0, tiny, small, small - tiny, big, np.inf, np.nan, 1.0, info.eps]
    return np.array([*values, *(-x for x in values)], numpy_dtype(dtype))


def make_input(dtype: str, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Random values over the dtype's range; the floating ones sprinkled with special values."""
    rng = np.random.default_rng([DTYPES.index(dtype), count, seed])
    if dtype == "bool":
        return rng.random(count) < 0.7
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype, endpoint=True)
    if dtype in COMPLEXES:
        part = "float32" if dtype == "complex64" else "float64"
        return make_input(part, 2 * count, seed).view(dtype)
    values = (rng.standard_normal(count) * 2.0 ** rng.integers(-3, 4, count)).astype("float64")
    values = values.astype(numpy_dtype(dtype))
    chosen = rng.random(count) < 0.02
    values[chosen] = rng.choice(specials(dtype), int(chosen.sum()))
    return values


def make_inputs(dtype: str, count: int, num_sources: int) -> list[np.ndarray[Any, Any]]:
    return [make_input(dtype, count, seed) for seed in range(num_sources)]


@pytest.mark.parametrize(("count", "shift"), SHAPES)
@pytest.mark.parametrize("num_sources", SOURCE_COUNTS)
@pytest.mark.parametrize(("dtype", "op"), DTYPE_OPS)
def test_matches_the_oracle(
    dtype: str, op: str, num_sources: int, count: int, shift: int, instruction_set: str
) -> None:
    sources = make_inputs(dtype, count, num_sources)
    assert_same_bits(run(sources, dtype, op, shift=shift), oracle(sources, dtype, op))


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 0.25, -7.0, 1e-40, 2.0**127, 1e5])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("num_sources", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEXES)
def test_scales_and_divisor(
    dtype: str, num_sources: int, scaled: bool, divisor: float, instruction_set: str
) -> None:
    sources = make_inputs(dtype, 1003, num_sources)
    scales = [0.1 + 0.3 * i for i in range(num_sources)] if scaled else None
    actual = run(sources, dtype, "sum", scales=scales, divisor=divisor, shift=1)
    assert_same_bits(actual, oracle(sources, dtype, "sum", scales, divisor))


@pytest.mark.parametrize(("dtype", "op"), [x for x in DTYPE_OPS if x[0] in FLOATS + COMPLEXES])
def test_scales_and_divisor_with_every_op(dtype: str, op: str, instruction_set: str) -> None:
    sources = make_inputs(dtype, 777, 3)
    scales = [0.3, -1.7, 5.0]
    actual = run(sources, dtype, op, scales=scales, divisor=3.0)
    assert_same_bits(actual, oracle(sources, dtype, op, scales, 3.0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scaled_sum_is_not_fused(dtype: str, instruction_set: str) -> None:
    """round(x * x) - x^2 is zero when the product rounds by itself, and not when it is fused."""
    x = 1.0 + (2.0**-12 if dtype == "float32" else 2.0**-27)
    sources = [np.full(100, -x * x, dtype), np.full(100, x, dtype)]
    assert not run(sources, dtype, "sum", scales=[1.0, x]).any()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_product_is_not_fused(dtype: str, instruction_set: str) -> None:
    x = 1.0 + (2.0**-12 if dtype == "complex64" else 2.0**-27)
    sources = [np.full(50, complex(x, x * x), dtype), np.full(50, complex(x, 1.0), dtype)]
    assert not run(sources, dtype, "prod").real.any()


@pytest.mark.parametrize("num_destinations", [1, 2, 3, 9])
@pytest.mark.parametrize("num_sources", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 31, 5003])
@pytest.mark.parametrize("dtype", ["bool", "int16", "float16", "float32", "complex128"])
def test_destinations_all_get_the_result(
    dtype: str, count: int, num_sources: int, num_destinations: int, instruction_set: str
) -> None:
    sources = make_inputs(dtype, count, num_sources)
    actual = run(sources, dtype, "sum", num_destinations=num_destinations, shift=5)
    assert_same_bits(actual, oracle(sources, dtype, "sum"))


@pytest.mark.parametrize("alias", [0, 1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_destination_may_be_a_source(dtype: str, alias: int, instruction_set: str) -> None:
    for_all = make_inputs(dtype, 1003, 5)
    sources = for_all[: max(alias + 1, 2)]
    actual = run(sources, dtype, "sum", alias=alias, shift=1)
    assert_same_bits(actual, oracle(sources, dtype, "sum"))


@pytest.mark.parametrize("dtype", [x for x in DTYPES if x != "bool"])
def test_single_source_is_copied_untouched(dtype: str, instruction_set: str) -> None:
    """Even a signalling NaN keeps its bits."""
    pattern = np.arange(numpy_dtype(dtype).itemsize * 65536, dtype=np.uint32).astype(np.uint16)
    source = pattern.view(np.uint8)[: numpy_dtype(dtype).itemsize * 50000].view(numpy_dtype(dtype))
    actual = run([source], dtype, "sum", num_destinations=3, shift=3)
    assert actual.tobytes() == source.tobytes()
    assert run([source], dtype, "sum", alias=0).tobytes() == source.tobytes()


# ---- half precision ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_pattern_survives_the_trip_through_float32(
    dtype: str, instruction_set: str
) -> None:
    """The larger of x and x is x: widened, compared, narrowed. A NaN becomes quiet."""
    patterns = np.arange(65536, dtype=np.uint16)
    x = patterns.view(numpy_dtype(dtype))
    quiet = np.uint16(0x200 if dtype == "float16" else 0x40)
    expected = np.where(np.isnan(x.astype("float32")), patterns | quiet, patterns)
    actual = run([x, x], dtype, "max").view(np.uint16)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("scale", [2.0**-k for k in range(14)] + [1 / 3, 1.0009765625, 3.0, 2.0**9])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_pattern_times_a_scale(dtype: str, scale: float, instruction_set: str) -> None:
    """Ties, subnormal results and overflow, from every input there is."""
    x = np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype))
    tiny = x.copy()
    tiny[:] = ml_dtypes.finfo(numpy_dtype(dtype)).smallest_subnormal
    for sources in ([x], [x, tiny]):
        scales = [scale] * len(sources)
        actual = run(sources, dtype, "sum", scales=scales)
        assert_same_bits(actual, oracle(sources, dtype, "sum", scales))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_round_once(dtype: str, instruction_set: str) -> None:
    """Terms below half a step of 1 would vanish one by one; together they count."""
    eps = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
    sources = [np.full(100, value, numpy_dtype(dtype)) for value in [1.0] + [eps / 4] * 4]
    assert (run(sources, dtype, "sum").astype("float32") == 1.0 + eps).all()


# ---- the corners of each operator --------------------------------------------------------------


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_extremes_of_special_values(dtype: str, op: str, instruction_set: str) -> None:
    """Every ordered pair of special values: NaN on either side, and zeros of either sign."""
    values = specials(dtype)
    a, b = (np.ascontiguousarray(x.ravel()) for x in np.meshgrid(values, values))
    actual = run([a, b], dtype, op)
    assert_same_bits(actual, oracle([a, b], dtype, op))
    assert_same_bits(actual, run([b, a], dtype, op))


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("position", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_in_any_source_wins(dtype: str, position: int, op: str, instruction_set: str) -> None:
    sources = [np.ones(70, numpy_dtype(dtype)) for _ in range(5)]
    sources[position][::2] = np.nan
    actual = np.isnan(run(sources, dtype, op).astype("float32"))
    assert actual[::2].all()
    assert not actual[1::2].any()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype: str, instruction_set: str) -> None:
    info = np.iinfo(dtype)
    top = np.full(70, info.max, dtype)
    assert (run([top, np.ones(70, dtype)], dtype, "sum") == info.min).all()
    assert_same_bits(run([top] * 3, dtype, "prod"), oracle([top] * 3, dtype, "prod"))


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [0, 1, 1, 1]), ("max", [0, 1, 1, 1]), ("prod", [0, 0, 0, 1]), ("min", [0, 0, 0, 1])],
)
def test_any_nonzero_byte_is_true(op: str, expected: list[int], instruction_set: str) -> None:
    a = np.array([0, 0, 2, 4] * 25, np.uint8)
    b = np.array([0, 8, 0, 3] * 25, np.uint8)
    actual = run([a.view(bool), b.view(bool)], "bool", op).view(np.uint8)
    np.testing.assert_array_equal(actual, np.array(expected * 25, np.uint8))
    alone = run([b.view(bool)], "bool", op).view(np.uint8)
    np.testing.assert_array_equal(alone, (b != 0).astype(np.uint8))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_a_result_does_not_depend_on_where_it_lies(dtype: str, instruction_set: str) -> None:
    sources = make_inputs(dtype, 300, 3)
    whole = run(sources, dtype, "sum", scales=[0.1, 0.2, 0.3], divisor=3.0)
    for begin in range(0, 300, 23):
        for end in range(begin, 300, 37):
            part = [source[begin:end] for source in sources]
            actual = run(part, dtype, "sum", scales=[0.1, 0.2, 0.3], divisor=3.0, shift=begin)
            assert_same_bits(actual, whole[begin:end])


@pytest.mark.parametrize(("dtype", "op"), DTYPE_OPS)
def test_instruction_sets_agree(dtype: str, op: str) -> None:
    before = _core.instruction_set()
    sources = make_inputs(dtype, 4099, 6)
    results = []
    for name in INSTRUCTION_SETS:
        assert _core.set_instruction_set(name)
        results.append(run(sources, dtype, op, shift=1))
    assert _core.set_instruction_set(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


# ---- choosing and refusing ---------------------------------------------------------------------


def test_unknown_instruction_set_changes_nothing() -> None:
    before = _core.instruction_set()
    assert before in INSTRUCTION_SETS
    assert not _core.set_instruction_set("mmx")
    assert _core.instruction_set() == before


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", COMPLEXES)
def test_complex_numbers_have_no_order(dtype: str, op: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{op} is not defined for {dtype}"):
        run(make_inputs(dtype, 3, 2), dtype, op)


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
def test_integers_take_no_factors(dtype: str) -> None:
    sources = make_inputs(dtype, 3, 2)
    with pytest.raises(InvalidArgumentError, match="scales need a floating dtype"):
        run(sources, dtype, "sum", scales=[0.5, 0.5])
    with pytest.raises(InvalidArgumentError, match="divisor needs a floating dtype"):
        run(sources, dtype, "sum", divisor=2.0)


def test_mean_is_not_a_kernel() -> None:
    with pytest.raises(InvalidArgumentError, match="sum"):
        run(make_inputs("float32", 3, 2), "float32", "mean")
