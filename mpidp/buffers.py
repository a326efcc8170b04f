"""Any array -> `_core.Buffer`: where its memory is, what it holds, and whether it may take part.

The extension parses plain buffers (NumPy arrays of the common dtypes) itself; what it refuses comes
here. Understood, in this order: NumPy arrays including ml_dtypes.bfloat16, the CUDA array
interface, the buffer protocol, the array interface, DLPack (for host and GPU memory). No framework
is imported.

    buffer = as_buffer(tensor, "x", writable=True)
    buffer.dtype, buffer.count              # "bfloat16", 4096
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from mpidp import _core, devices
from mpidp.devices import NO_CUDA
from mpidp.errors import InvalidBufferError

DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype for a name or anything that names one; bfloat16 needs ml_dtypes.

    Raises `InvalidBufferError` for a dtype that no collective takes.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise InvalidBufferError(
                "dtype bfloat16: NumPy has none of its own; install ml_dtypes"
            ) from None
        dtype = ml_dtypes.bfloat16
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise InvalidBufferError(
            f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}"
        ) from None
    _dtype_name(found, "dtype")
    return found


def as_buffer(
    x: Any, name: str = "x", *, writable: bool = False, stream: int | None = None
) -> _core.Buffer:
    """A typed view of the memory of `x`, which it keeps alive.

    `name` is what the caller calls the array in messages; `writable` says that it will be written;
    `stream` is the handle of the CUDA stream that a GPU array is ordered with, None for the
    caller's current one.
    Raises `InvalidBufferError` where the array is not contiguous, not writable, of a dtype that no
    collective takes, in memory that this build cannot reach, or no array at all.
    """
    if isinstance(x, _core.Buffer):
        if writable and x.read_only:
            raise InvalidBufferError(_read_only(name))
        return x
    if isinstance(x, np.ndarray):
        return _from_numpy(x, name, writable, x)
    if isinstance(x, devices.DeviceArray):
        return x.buffer(devices.current_stream(x) if stream is None else stream)
    interface = _cuda_interface(x)
    if interface is not None:
        return _from_cuda_interface(x, interface, name, writable, stream)
    try:
        view = memoryview(x)
    except (TypeError, ValueError, BufferError):
        # No export, or (bfloat16) no format character for the dtype.
        pass
    else:
        if view.format is not None and _has_numpy_format(view):
            return _from_numpy(np.asarray(view), name, writable, x)
    if getattr(x, "__array_interface__", None) is not None:
        return _from_numpy(np.asarray(x), name, writable, x)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, name, writable, stream)
    raise InvalidBufferError(
        f"{name} is {_a(type(x).__name__)}, not an array: give a NumPy array, or an object with "
        "the buffer protocol, the array interface or DLPack"
    )


def _has_numpy_format(view: memoryview) -> bool:
    try:
        np.asarray(view)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def _read_only(name: str) -> str:
    return f"{name} is read-only; pass a writable array, or out= for the result"


def _dtype_name(dtype: np.dtype[Any], name: str) -> str:
    supported = f"use one of {', '.join(DTYPES)}"
    if dtype.kind == "O":
        raise InvalidBufferError(
            f"{name} has dtype object; use broadcast_object or all_gather_object for Python "
            f"objects, or convert it: {supported}"
        )
    if dtype.fields is not None or dtype.subdtype is not None:
        raise InvalidBufferError(f"{name} has the structured dtype {dtype}; {supported}")
    if not dtype.isnative:
        raise InvalidBufferError(
            f"{name} has dtype {dtype.str}, which is not in this machine's byte order; convert it "
            "with x.astype(x.dtype.newbyteorder('='))"
        )
    found: str = dtype.name
    if found not in DTYPES:
        raise InvalidBufferError(f"{name} has dtype {found}, which is not supported; {supported}")
    return found


def _from_numpy(array: np.ndarray[Any, Any], name: str, writable: bool, owner: Any) -> _core.Buffer:
    dtype = _dtype_name(array.dtype, name)
    if not array.flags.c_contiguous:
        raise InvalidBufferError(
            f"{name} of shape {array.shape} and strides {array.strides} is not C-contiguous; use "
            f"numpy.ascontiguousarray({name})"
        )
    if writable and not array.flags.writeable:
        raise InvalidBufferError(_read_only(name))
    return _core.Buffer(
        array.ctypes.data, array.size, dtype, owner=owner, read_only=not array.flags.writeable
    )


def _cuda_interface(x: Any) -> Any:
    try:
        return getattr(x, "__cuda_array_interface__", None)
    except Exception:
        # PyTorch refuses so for bfloat16 and for tensors that require grad; DLPack may do, and says
        # why it does not.
        return None


def _load_for(name: str, what: str) -> None:
    if _core.device_runtime() is None:
        if devices.find_plugin() is None:
            raise InvalidBufferError(f"{name} lies in {what} and {NO_CUDA}")
        devices.load()


# https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, versions 2 and 3
def _from_cuda_interface(
    x: Any, interface: Any, name: str, writable: bool, stream: int | None
) -> _core.Buffer:
    _load_for(name, "GPU memory")
    if interface.get("mask") is not None:
        raise InvalidBufferError(f"{name} is a masked array; pass its data")
    dtype = np.dtype(interface["typestr"])
    dtype_name = _dtype_name(dtype, name)
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(shape, list(strides), dtype.itemsize):
        raise InvalidBufferError(
            f"{name} of shape {shape} and strides {tuple(strides)} is not C-contiguous; use the "
            "framework's ascontiguousarray or contiguous"
        )
    pointer, read_only = interface["data"]
    if writable and read_only:
        raise InvalidBufferError(_read_only(name))
    # Version 3: the stream that a consumer must order itself after; None where there is no need.
    producer = interface.get("stream")
    if stream is None:
        known = devices.knows_stream_of(x)
        stream = (
            devices.current_stream(x)
            if known or producer is None
            else devices.stream_handle(producer)
        )
    count = math.prod(shape)
    return _core.Buffer(
        pointer or 0, count, dtype_name, "cuda", owner=x, read_only=bool(read_only), stream=stream
    )


# DLPack's C layout (dlpack.h, version 1): https://dmlc.github.io/dlpack/latest/c_api.html
class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


# kDLCPU, and host memory pinned by CUDA or ROCm.
_DL_HOST = (1, 3, 11)
_DL_CUDA = (2, 13)  # kDLCUDA, and its managed memory
_DL_READ_ONLY = 1
_DL_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


def _from_dlpack(x: Any, name: str, writable: bool, stream: int | None) -> _core.Buffer:
    on_device = False
    if hasattr(x, "__dlpack_device__"):
        # Asked first: an export from a GPU takes a stream.
        device_type = int(x.__dlpack_device__()[0])
        on_device = device_type in _DL_CUDA
        if on_device:
            _load_for(name, f"device memory (DLPack device type {device_type})")
        elif device_type not in _DL_HOST:
            raise InvalidBufferError(
                f"{name} lies in device memory (DLPack device type {device_type}), which this "
                "library cannot reach: copy it to host memory first"
            )
    handle = 0
    options: dict[str, Any] = {}
    if on_device:
        handle = devices.current_stream(x) if stream is None else stream
        # The exporter makes this stream wait for what it has in flight. DLPack knows no stream 0.
        options["stream"] = handle or devices.LEGACY_STREAM
    try:
        try:
            capsule = x.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # an exporter older than DLPack 1.0
            capsule = x.__dlpack__(**options)
    except Exception as error:
        # Frameworks refuse with types of their own; a tensor that requires grad is the usual case.
        raise InvalidBufferError(f"{name} cannot be exported through DLPack: {error}") from error
    tensor, read_only = _open_capsule(capsule)
    if read_only is None:
        read_only = not on_device and _seems_read_only(x)
    if writable and read_only:
        raise InvalidBufferError(_read_only(name))
    dtype = _dlpack_dtype(tensor.dtype, name)
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides and not _is_contiguous(
        shape, [tensor.strides[a] for a in range(tensor.ndim)]
    ):
        raise InvalidBufferError(
            f"{name} of shape {shape} is not C-contiguous; use {name}.contiguous() or its like"
        )
    count = 1
    for length in shape:
        count *= length
    pointer = (tensor.data or 0) + tensor.byte_offset
    # The capsule stays unconsumed: dropping it runs the exporter's deleter.
    kind = "cuda" if on_device else "cpu"
    return _core.Buffer(
        pointer, count, dtype, kind, owner=(x, capsule), read_only=read_only, stream=handle
    )


def _open_capsule(capsule: Any) -> tuple[_DLTensor, bool | None]:
    """The tensor inside, and whether it is read-only (None: the old form cannot say)."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
    if is_valid(capsule, b"dltensor_versioned"):
        address = get_pointer(capsule, b"dltensor_versioned")
        managed = _DLManagedTensorVersioned.from_address(address)
        return managed.dl_tensor, bool(managed.flags & _DL_READ_ONLY)
    # The unversioned struct begins with the tensor itself.
    return _DLTensor.from_address(get_pointer(capsule, b"dltensor")), None


def _seems_read_only(x: Any) -> bool:
    # JAX arrays are immutable, and their NumPy view says so.
    try:
        view = np.asarray(x)
    except Exception:
        # No NumPy view (torch.bfloat16): only mutable frameworks are like that.
        return False
    return not view.flags.writeable


def _dlpack_dtype(dtype: _DLDataType, name: str) -> str:
    kind = _DL_CODES.get(dtype.code, f"DLPack type code {dtype.code}, ")
    found = kind if kind == "bool" else f"{kind}{dtype.bits}"
    if found not in DTYPES or dtype.lanes != 1:
        raise InvalidBufferError(
            f"{name} has dtype {found}, which is not supported; use one of {', '.join(DTYPES)}"
        )
    return found


def _is_contiguous(shape: tuple[int, ...], strides: list[int], unit: int = 1) -> bool:
    """Whether `strides`, in elements or in bytes (`unit` of them to an element), are C order."""
    if 0 in shape:
        return True
    expected = unit
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
