"""The handle of one asynchronous collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidp.devices import current_stream, stream_handle
from mpidp.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpidp import _core


class Work:
    """One asynchronous collective, as the `*_async` methods return it.

    Until it is done the arrays of the call must not be read or written. Collectives of one
    communicator run in the order of their calls. Dropping a Work does not cancel it.

        work = comm.all_reduce_async(x, op="mean")
        ...                                  # compute something else
        x = work.wait()

    On GPU arrays `wait` orders the caller's stream, as NCCL's users expect, and `synchronize`
    blocks the host.
    """

    __slots__ = ("_arrays", "_result", "_work")

    def __init__(self, work: _core.Work, result: Any, arrays: object) -> None:
        self._work = work
        self._result = result
        # The extension works on their memory from another thread.
        self._arrays: object = arrays

    def done(self) -> bool:
        """Whether it has ended, well or badly, on the GPU too; never waits."""
        return self._work.done()

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        """Wait for the end and return the result array (None for barriers and off the root).

        On GPU arrays this waits until the collective has been issued and makes `stream` (default:
        the caller's current one) wait for its end: what is queued there later sees the result.

        `timeout` is in seconds; None waits as long as the collective's own deadline allows. Raises
        what the collective raised, or TimeoutError when `timeout` passes first: the collective then
        goes on, and can be waited for again.
        """
        check_wait(timeout)
        if self._work.on_device:
            ordered = current_stream(self._result) if stream is None else stream_handle(stream)
            self._work.wait(timeout, ordered)
        else:
            self._work.wait(timeout)
        self._arrays = None
        return self._result

    def synchronize(self, timeout: float | None = None) -> Any:
        """As `wait`, but on GPU arrays too the host blocks until the collective has ended."""
        check_wait(timeout)
        self._work.synchronize(timeout)
        self._arrays = None
        return self._result

    @property
    def result(self) -> Any:
        """The result array, complete once the work is done; waits for it."""
        return self.wait()


def check_wait(timeout: float | None) -> None:
    """Raise `InvalidArgumentError` where `timeout` is no time to wait."""
    if timeout is not None and not timeout >= 0:
        raise InvalidArgumentError(f"timeout={timeout!r}: expected seconds >= 0, or None")
