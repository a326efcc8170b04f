"""What CuPy would be here: arrays, streams and copies on whatever device the plugin reaches.

Works on the emulated device and on a real one alike, since it calls the plugin's own table of
functions (csrc/transport/device_runtime.h) and nothing of the library under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any

import numpy as np

from mpidp import devices

_Pointer = ctypes.c_void_p
_Size = ctypes.c_size_t
_Int = ctypes.c_int
_Out = ctypes.POINTER(ctypes.c_void_p)

# The functions of the table, in its order; those not called here have no argument types.
_FUNCTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("device_count", (ctypes.POINTER(_Int),)),
    ("get_device", (ctypes.POINTER(_Int),)),
    ("set_device", (_Int,)),
    ("device_info", ()),
    ("can_access_peer", ()),
    ("enable_peer_access", ()),
    ("classify", ()),
    ("allocate", (_Out, _Size)),
    ("release", (_Pointer,)),
    ("allocate_pinned", (_Out, _Size)),
    ("release_pinned", (_Pointer,)),
    ("create_stream", (_Out,)),
    ("destroy_stream", (_Pointer,)),
    ("synchronize_stream", (_Pointer,)),
    ("create_event", ()),
    ("destroy_event", ()),
    ("record_event", ()),
    ("wait_event", ()),
    ("query_event", ()),
    ("synchronize_event", ()),
    ("export_memory", ()),
    ("open_memory", ()),
    ("close_memory", ()),
    ("export_event", ()),
    ("open_event", ()),
    ("copy", (_Pointer, _Pointer, _Size, _Pointer)),
    ("fill", (_Pointer, _Int, _Size, _Pointer)),
)


class _Table(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("error_string", ctypes.CFUNCTYPE(ctypes.c_char_p, _Int)),
        *((name, ctypes.CFUNCTYPE(_Int, *arguments)) for name, arguments in _FUNCTIONS),
    )


class Runtime:
    """The plugin's table; each function raises where the plugin returns a code."""

    def __init__(self) -> None:
        devices.load()
        path = devices.find_plugin()
        assert path is not None
        self.library = ctypes.CDLL(path)
        entry = self.library.mpidp_device_runtime
        entry.restype = ctypes.POINTER(_Table)
        entry.argtypes = (ctypes.c_uint32,)
        self._table = entry(1).contents
        self.name: str = self._table.name.decode()

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self._table, function)(*arguments)
        if status:
            raise RuntimeError(f"{function}: {self._table.error_string(status).decode()}")

    def made(self, function: str, *arguments: Any) -> int:
        """The handle that a creating function hands out."""
        handle = ctypes.c_void_p()
        self(function, ctypes.byref(handle), *arguments)
        return handle.value or 0


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The one table of this process."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime()
    return _runtime


def _quietly(function: str, handle: int) -> None:
    with contextlib.suppress(RuntimeError):
        runtime()(function, handle)


class Stream:
    """A stream of the caller's own, with the attribute that CuPy's have."""

    def __init__(self) -> None:
        self.ptr = runtime().made("create_stream")
        self._finalizer = weakref.finalize(self, _quietly, "destroy_stream", self.ptr)

    def synchronize(self) -> None:
        """Block until it is idle."""
        runtime()("synchronize_stream", self.ptr)

    def close(self) -> None:
        """Destroy it now."""
        self._finalizer()


class Pinned:
    """Page-locked host memory with a NumPy view."""

    def __init__(self, nbytes: int) -> None:
        self.pointer = runtime().made("allocate_pinned", max(1, nbytes))
        raw = (ctypes.c_uint8 * nbytes).from_address(self.pointer)
        self.array = np.frombuffer(raw, np.uint8)
        self._finalizer = weakref.finalize(self, _quietly, "release_pinned", self.pointer)


class StandIn:
    """A GPU array with the CUDA array interface, version 3. `stream` is the one that it names."""

    def __init__(
        self, shape: Any, dtype: Any, *, misaligned: bool = False, stream: Stream | None = None
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = tuple(np.atleast_1d(shape).tolist())
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.stream = stream
        shift = self.dtype.itemsize if misaligned else 0
        base = runtime().made("allocate", max(1, self.nbytes) + shift)
        self.pointer = base + shift
        self._finalizer = weakref.finalize(self, _quietly, "release", base)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            "stream": None if self.stream is None else self.stream.ptr,
        }

    def upload(self, host: np.ndarray, stream: Stream | None = None) -> StandIn:
        """Queue a copy of `host` to here; the caller keeps `host` alive where it is pinned."""
        host = np.ascontiguousarray(host)
        handle = 0 if stream is None else stream.ptr
        runtime()("copy", self.pointer, host.ctypes.data, host.nbytes, handle)
        if stream is None:
            runtime()("synchronize_stream", 0)
        return self

    def fill(self, byte: int, stream: Stream | None = None) -> None:
        """Queue a fill with one byte."""
        runtime()("fill", self.pointer, byte, self.nbytes, 0 if stream is None else stream.ptr)

    def copy_to(self, other: StandIn, stream: Stream) -> None:
        """Queue a copy to another array."""
        runtime()("copy", other.pointer, self.pointer, self.nbytes, stream.ptr)

    def download(self, stream: Stream | None = None) -> np.ndarray:
        """The values, once what `stream` has queued is done; blocks."""
        host = np.empty(self.shape, self.dtype)
        handle = 0 if stream is None else stream.ptr
        if self.nbytes:
            runtime()("copy", host.ctypes.data, self.pointer, self.nbytes, handle)
        runtime()("synchronize_stream", handle)
        return host

    def close(self) -> None:
        """Give the memory back now."""
        self._finalizer()


class DLPackOnly:
    """A GPU array that offers nothing but DLPack, as a bfloat16 tensor of PyTorch does."""

    def __init__(self, array: Any) -> None:
        self.inner = array
        self.shape = array.shape
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.streams.append(options.get("stream"))
        return self.inner.__dlpack__(**options)


def on_device(host: np.ndarray, misaligned: bool = False, stream: Stream | None = None) -> StandIn:
    """A GPU copy of a NumPy array."""
    return StandIn(host.shape, host.dtype, misaligned=misaligned, stream=stream).upload(host)
