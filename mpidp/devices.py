"""GPU memory: the plugin that reaches it, arrays in it, and the streams that order work on it.

Nothing here is touched before the first GPU array: importing mpidp initialises no CUDA.

    x = comm.empty((1 << 20,), "float32", device="cuda")
    y = torch.from_dlpack(x)                 # or cupy.from_dlpack(x); the same memory
"""

from __future__ import annotations

import math
import operator
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidp import _core
from mpidp.config import device_plugin_path
from mpidp.errors import CudaError, InvalidArgumentError, InvalidBufferError

PLUGIN_NAME = "_cuda.so"

NO_CUDA = (
    "this build has no CUDA part. Copy the array to host memory first, or reinstall where nvcc is "
    "on PATH (CUDA_HOME set), and check with `mpidp info`"
)

# The CUDA array interface and DLPack call the legacy default stream 1, the CUDA runtime 0.
LEGACY_STREAM = 1


def find_plugin() -> str | None:
    """The path of the CUDA part, or None where this build has none."""
    asked = device_plugin_path()
    if asked is not None:
        return asked
    for folder in (Path(_core.__file__).parent, Path(__file__).parent):
        if (folder / PLUGIN_NAME).is_file():
            return str(folder / PLUGIN_NAME)
    return None


def load() -> None:
    """Load the CUDA part, once. Raises `CudaError` where it, the driver or a GPU is missing."""
    if _core.device_runtime() is not None:
        return
    path = find_plugin()
    if path is None:
        raise CudaError(NO_CUDA)
    _core.load_device_plugin(path)


def describe() -> dict[str, Any]:
    """The GPUs that this process sees, as plain values; never raises."""
    try:
        load()
        names = [_core.device_info(index)["name"] for index in range(_core.device_count())]
    except CudaError as error:
        return {"runtime": None, "devices": [], "reason": str(error)}
    return {"runtime": _core.device_runtime(), "devices": names, "reason": ""}


def stream_handle(stream: Any) -> int:
    """The CUDA stream that `stream` names, as the runtime's integer handle.

    Takes an integer (0 or 1 for the legacy default stream), CuPy's and PyTorch's stream objects, or
    anything with `ptr`, `cuda_stream` or `__cuda_stream__`. Raises `InvalidArgumentError`.
    """
    for attribute in ("cuda_stream", "ptr"):
        found = getattr(stream, attribute, None)
        if found is not None:
            stream = found
            break
    else:
        if hasattr(stream, "__cuda_stream__"):  # (version, handle), as cuda.core has it
            stream = stream.__cuda_stream__()[1]
    try:
        handle = operator.index(stream)
    except TypeError:
        handle = -1
    if isinstance(stream, bool) or handle < 0:
        raise InvalidArgumentError(
            f"stream={stream!r}: expected a CUDA stream of CuPy or PyTorch, its integer handle, or "
            "None for the caller's current stream"
        )
    return 0 if handle == LEGACY_STREAM else handle


def current_stream(x: Any = None) -> int:
    """The handle of the stream on which the caller is taken to work on the GPU array `x`.

    That of the framework that made x, where it has one; else PyTorch's or CuPy's current stream,
    where one of them is in use; else the legacy default stream. No framework is imported.
    """
    maker = type(x).__module__.partition(".")[0]
    for framework in (maker, "torch", "cupy"):
        lookup = _CURRENT.get(framework)
        module = sys.modules.get(framework)
        if lookup is not None and module is not None:
            handle = lookup(module, x if framework == maker else None)
            if handle is not None:
                return stream_handle(handle)
    return 0


def knows_stream_of(x: Any) -> bool:
    """Whether `current_stream` asks the framework that made x."""
    return type(x).__module__.partition(".")[0] in _CURRENT


def _torch_stream(torch: Any, x: Any) -> Any:
    if not torch.cuda.is_available() or (x is None and not torch.cuda.is_initialized()):
        return None
    return torch.cuda.current_stream(None if x is None else x.device)


def _cupy_stream(cupy: Any, x: Any) -> Any:
    return cupy.cuda.get_current_stream()


_CURRENT = {"torch": _torch_stream, "cupy": _cupy_stream}


class DeviceArray:
    """A C-contiguous array in GPU memory that peers can map, as `Communicator.empty` makes it.

    It offers the CUDA array interface (version 3) and DLPack, for whatever framework works on it.
    The memory goes when the last of its users does.
    """

    def __init__(self, buffer: _core.Buffer, shape: tuple[int, ...], device: int) -> None:
        self._buffer = buffer
        self._device = device
        self.shape = shape
        self.dtype = buffer.dtype
        self.size = buffer.count
        self.nbytes = buffer.nbytes

    def __repr__(self) -> str:
        return f"<mpidp.DeviceArray, {self.dtype}{self.shape} on cuda:{self._device}>"

    @property
    def device(self) -> int:
        """The index of its GPU."""
        return self._device

    @property
    def pointer(self) -> int:
        """The address on the GPU."""
        return self._buffer.pointer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype == "bfloat16":
            raise AttributeError("the CUDA array interface has no bfloat16: use DLPack")
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self._buffer.pointer, False),
            "version": 3,
            "strides": None,
            "stream": current_stream(self) or LEGACY_STREAM,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        # -1: the consumer orders the work itself. None means the legacy default stream.
        if stream != -1:
            consumer = 0 if stream is None else stream_handle(stream)
            _core.order_streams(self._device, current_stream(self), consumer)
        view = _core.dlpack_view(self._buffer, list(self.shape), self._device)
        return view.__dlpack__(**options)

    def buffer(self, stream: int) -> _core.Buffer:
        """The memory for the extension, ordered with `stream`."""
        return _core.Buffer(
            self._buffer.pointer, self.size, self.dtype, "cuda", owner=self, stream=stream
        )

    def to_host(self, stream: Any = None) -> NDArray[Any]:
        """A NumPy array of the values, once what `stream` has queued is done; blocks.

        bfloat16, which NumPy lacks, comes as uint16.
        """
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        host = np.empty(self.shape, dtype)
        handle = current_stream(self) if stream is None else stream_handle(stream)
        _core.device_copy(self._device, host.ctypes.data, self.pointer, self.nbytes, handle)
        return host

    def copy_from(self, host: NDArray[Any], stream: Any = None) -> None:
        """Copy a NumPy array of as many bytes here, in the order of `stream`; blocks."""
        host = np.ascontiguousarray(host)
        if host.nbytes != self.nbytes:
            raise InvalidBufferError(f"{host.nbytes} bytes for an array of {self.nbytes}")
        handle = current_stream(self) if stream is None else stream_handle(stream)
        _core.device_copy(self._device, self.pointer, host.ctypes.data, self.nbytes, handle)


def parse_device(device: Any) -> int | None:
    """The index in "cuda:1"; None for "cuda", the current device. Raises for other devices."""
    kind, _, index = str(device).partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise InvalidArgumentError(f'device {device!r}: expected "cpu", "cuda" or "cuda:N"')
    return int(index) if index else None


def empty(context: Any, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """Memory for `Communicator.empty`: a CuPy array where CuPy is installed and has the dtype."""
    asked = parse_device(device)
    load()
    if asked is None:
        mine = context.device_index
        asked = mine if mine >= 0 else _core.current_device()
    if asked >= _core.device_count():
        raise InvalidArgumentError(f"device cuda:{asked}: there are {_core.device_count()} GPUs")
    context.use_device(asked)
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    count = math.prod(shape)
    try:
        memory = _core.device_allocate(asked, count * itemsize)
    except MemoryError:
        raise MemoryError(f"cannot allocate {count * itemsize} bytes on cuda:{asked}") from None
    typed = _core.Buffer(memory.pointer, count, dtype, "cuda", owner=memory)
    array = DeviceArray(typed, shape, asked)
    return _as_cupy(array) if _core.device_runtime() == "cuda" else array


def _as_cupy(array: DeviceArray) -> Any:
    if array.dtype == "bfloat16":
        return array
    try:
        import cupy
    except ImportError:
        return array
    memory = cupy.cuda.UnownedMemory(array.pointer, array.nbytes, array, array.device)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def empty_like(context: Any, x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of x's kind, dtype and GPU with another shape: the result of a collective on x."""
    if hasattr(x, "new_empty"):  # PyTorch
        return x.new_empty(shape)
    if type(x).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"].empty(shape, x.dtype)
    return empty(context, shape, dtype, "cuda")
