"""Where the arrays of a benchmark lie: in host memory, or on a GPU with a mirror on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidp import _core
from mpidp.bench.cases import Case
from mpidp.buffers import as_buffer, numpy_dtype
from mpidp.devices import DeviceArray, current_stream

Array = NDArray[Any]


class Arena:
    """An input and an output of the largest size, in one kind of memory; cases take views."""

    def __init__(self, allocate: Callable[[int], Array], input_bytes: int, output_bytes: int):
        self._input = allocate(input_bytes)
        self._output = allocate(output_bytes)
        for array in (self._input, self._output):
            array.fill(0)  # touches the pages

    def views(self, case: Case) -> tuple[Array, Array]:
        """(x, out) for `case`, which has at least one element."""
        dtype = numpy_dtype(case.dtype)
        x = self._input[: case.input_count * case.itemsize].view(dtype)
        return x, self._output[: case.output_count * case.itemsize].view(dtype)

    def operands(self, x: Array, out: Array) -> tuple[Any, Any]:
        """What the collective works on, for two views."""
        return x, out

    def push(self, view: Array) -> None:
        """Brings what was written to a view to where the collective works."""

    def pull(self, view: Array) -> None:
        """The other way round."""

    def finish(self) -> None:
        """Blocks until the collective has ended; its return may mean less."""


class DeviceArena(Arena):
    """The same on the GPU; the views are mirrors of it in host memory."""

    def __init__(self, comm: Any, input_bytes: int, output_bytes: int) -> None:
        super().__init__(lambda nbytes: np.empty(nbytes, np.uint8), input_bytes, output_bytes)
        self._on_device = [
            (mirror, as_buffer(comm.empty(max(1, mirror.size), "uint8", device="cuda")))
            for mirror in (self._input, self._output)
        ]
        self._device = comm.describe()["device"]["index"]

    def operands(self, x: Array, out: Array) -> tuple[Any, Any]:
        """See `Arena.operands`."""
        return self._array(x), self._array(out)

    def push(self, view: Array) -> None:
        """See `Arena.push`."""
        self._array(view).copy_from(view.view(np.uint8))

    def pull(self, view: Array) -> None:
        """See `Arena.pull`."""
        view.view(np.uint8)[:] = self._array(view).to_host().view(np.uint8)

    def finish(self) -> None:
        """See `Arena.finish`."""
        _core.device_synchronize(self._device, current_stream())

    def _array(self, view: Array) -> DeviceArray:
        memory = next(m for mirror, m in self._on_device if np.shares_memory(mirror, view))
        typed = _core.Buffer(memory.pointer, view.size, view.dtype.name, "cuda", owner=memory)
        return DeviceArray(typed, (view.size,), self._device)
