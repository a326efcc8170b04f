"""Any array becomes the right Buffer, and the wrong ones are refused with advice."""

import array
import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from mpidp import _core
from mpidp.buffers import DTYPES, as_buffer, numpy_dtype
from mpidp.errors import InvalidBufferError


class DLPackOnly:
    """An array that offers DLPack alone, in the old form or the versioned one."""

    def __init__(self, source, *, versioned=False, device=(1, 0)):
        self.source, self.versioned, self.device = source, versioned, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        if not self.versioned:
            if kwargs:
                raise TypeError("old form: no keywords")
            return self.source.__dlpack__()
        return self.source.__dlpack__(**kwargs)


class BFloat16Tensor:
    """What a framework's bfloat16 tensor is to us: a DLPack capsule, no NumPy view."""

    def __init__(self, bits, code=4, bit_width=16, lanes=1, strides=None):
        from mpidp import buffers

        self.bits = bits
        self.shape_ = (ctypes.c_int64 * 1)(bits.size)
        self.strides_ = (ctypes.c_int64 * 1)(strides) if strides else None
        self.tensor = buffers._DLTensor(
            bits.ctypes.data,
            buffers._DLDevice(1, 0),
            1,
            buffers._DLDataType(code, bit_width, lanes),
            ctypes.cast(self.shape_, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self.strides_, ctypes.POINTER(ctypes.c_int64)) if strides else None,
            0,
        )

    def __dlpack__(self):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


class ArrayInterfaceOnly:
    def __init__(self, source):
        self.source = source

    @property
    def __array_interface__(self):
        return self.source.__array_interface__


def dtype_of(name):
    return numpy_dtype(name)


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_arrays_of_every_dtype(name):
    x = np.zeros((3, 5), dtype_of(name))
    buffer = as_buffer(x, writable=True)
    assert (buffer.pointer, buffer.count, buffer.dtype) == (x.ctypes.data, 15, name)
    assert (buffer.nbytes, buffer.device, buffer.read_only) == (x.nbytes, "cpu", False)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_of_every_dtype(name, versioned):
    if name == "bfloat16":
        bits = np.arange(7, dtype=np.uint16)
        x, pointer = BFloat16Tensor(bits), bits.ctypes.data
    else:
        source = np.zeros(7, name)
        x, pointer = DLPackOnly(source, versioned=versioned), source.ctypes.data
    buffer = as_buffer(x, writable=True)
    assert (buffer.pointer, buffer.count, buffer.dtype) == (pointer, 7, name)


@pytest.mark.parametrize(
    ("x", "dtype", "count"),
    [
        (bytearray(6), "uint8", 6),
        (array.array("d", [1.0, 2.0]), "float64", 2),
        (memoryview(bytearray(8)).cast("i"), "int32", 2),
        ((ctypes.c_float * 3)(), "float32", 3),
        (ArrayInterfaceOnly(np.ones(4, np.int16)), "int16", 4),
    ],
    ids=["bytearray", "array", "memoryview", "ctypes", "array_interface"],
)
def test_other_exporters(x, dtype, count):
    buffer = as_buffer(x, writable=True)
    assert (buffer.dtype, buffer.count) == (dtype, count)


@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (1,)])
def test_empty_and_scalar_shapes(shape):
    x = np.zeros(shape, np.float32)
    assert as_buffer(x, writable=True).count == x.size
    assert as_buffer(DLPackOnly(x), writable=True).count == x.size


def test_misaligned_and_offset_views_are_fine():
    raw = np.zeros(33, np.uint8)
    x = raw[1:].view(np.float64)
    assert as_buffer(x).pointer == raw.ctypes.data + 1


@pytest.mark.parametrize("wrap", [lambda x: x, DLPackOnly], ids=["numpy", "dlpack"])
@pytest.mark.parametrize(
    "view", [lambda x: x.T, lambda x: x[:, ::2]], ids=["transposed", "strided"]
)
def test_non_contiguous_arrays_are_refused_with_advice(wrap, view):
    x = view(np.zeros((4, 6), np.float32))
    with pytest.raises(InvalidBufferError, match="not C-contiguous; use"):
        as_buffer(wrap(x), "gradient")


def test_the_advice_names_numpy_and_the_array():
    with pytest.raises(InvalidBufferError, match=r"numpy\.ascontiguousarray\(out\)"):
        as_buffer(np.zeros((4, 6)).T, "out")


def read_only_array():
    x = np.zeros(4, np.float32)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "x",
    [
        read_only_array(),
        b"abcd",
        ArrayInterfaceOnly(read_only_array()),
        DLPackOnly(read_only_array(), versioned=True),
        np.float32(3),
    ],
    ids=["numpy", "bytes", "array_interface", "dlpack", "scalar"],
)
def test_read_only_memory_is_read_and_not_written(x):
    assert as_buffer(x).read_only
    with pytest.raises(InvalidBufferError, match="read-only; pass a writable array"):
        as_buffer(x, writable=True)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.array([None, 3]), "object.*broadcast_object"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "structured"),
        (np.array(["text"]), "str"),
        (np.zeros(2, ">f4" if np.little_endian else "<f4"), "byte order"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.zeros(2, np.longdouble), "not supported; use one of"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "float8"),
        ([1.0, 2.0], "a list, not an array"),
        (3.5, "a float, not an array"),
        (None, "NoneType, not an array"),
        (BFloat16Tensor(np.zeros(4, np.uint16), code=2, bit_width=8), "float8"),
        (BFloat16Tensor(np.zeros(4, np.uint16), lanes=4), "not supported"),
        (BFloat16Tensor(np.zeros(4, np.uint16), strides=2), "not C-contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_array_for_us_is_refused_with_a_reason(x, message):
    with pytest.raises(InvalidBufferError, match=message):
        as_buffer(x)


def test_gpu_memory_is_refused_with_a_way_out(no_cuda_part):
    class CudaArray:
        @property
        def __cuda_array_interface__(self):
            return {"data": (4096, False), "shape": (4,), "typestr": "<f4", "version": 3}

    with pytest.raises(InvalidBufferError, match=r"GPU memory.*no CUDA part.*reinstall"):
        as_buffer(CudaArray())
    with pytest.raises(InvalidBufferError, match=r"device type 2.*no CUDA part"):
        as_buffer(DLPackOnly(np.zeros(3), device=(2, 0)))


def test_an_exporter_that_refuses_is_quoted():
    class Refuses:
        def __dlpack__(self, **kwargs):
            raise RuntimeError("tensor requires grad")

    with pytest.raises(InvalidBufferError, match="requires grad"):
        as_buffer(Refuses())


def test_a_buffer_keeps_its_owner_alive():
    x = np.zeros(1 << 10)
    alive = weakref.ref(x)
    buffer = as_buffer(x)
    del x
    gc.collect()
    assert alive() is not None
    del buffer
    gc.collect()
    assert alive() is None


def test_a_buffer_passes_through():
    buffer = as_buffer(np.zeros(3))
    assert as_buffer(buffer, writable=True) is buffer
    with pytest.raises(InvalidBufferError, match="read-only"):
        as_buffer(as_buffer(read_only_array()), writable=True)


def test_numpy_dtype():
    assert numpy_dtype("float32") == np.float32
    assert numpy_dtype(np.int8) == np.int8
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    for wrong in ("float99", "S3", object):
        with pytest.raises(InvalidBufferError, match="dtype"):
            numpy_dtype(wrong)


def test_the_extensions_buffer_checks_its_own_arguments():
    with pytest.raises(InvalidBufferError):
        _core.Buffer(4096, 3, "float99")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_torch_tensors(name):
    torch = pytest.importorskip("torch")
    x = torch.zeros(3, 4, dtype=getattr(torch, name))
    buffer = as_buffer(x, writable=True)
    assert (buffer.pointer, buffer.count, buffer.dtype) == (x.data_ptr(), 12, name)
    with pytest.raises(InvalidBufferError, match="not C-contiguous"):
        as_buffer(x.T)
    if x.is_floating_point():
        with pytest.raises(InvalidBufferError, match="require"):
            as_buffer(x.requires_grad_())
