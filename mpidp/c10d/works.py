"""What collectives and messages of a process group return, and the threads that complete them."""

from __future__ import annotations

import collections
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpidp.errors import CollectiveTimeoutError

# Polls of MPI before the thread naps between them, and how long, in seconds.
_EAGER_POLLS = 200
_NAP, _LONGEST_NAP = 20e-6, 1e-3


class _Keeper:
    """Keeps the Python half of works alive that only torch's C++ side still holds.

    Without it their methods would be those of the C++ base class, which raise "not implemented". A
    work is let go once it has ended and been waited for or asked for its future, some works later,
    for torch calls both in a row.
    """

    _MOST_UNUSED = 4096  # nobody waits for the oldest any more

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: collections.OrderedDict[int, Work] = collections.OrderedDict()
        self._used: collections.deque[Work] = collections.deque(maxlen=8)

    def hold(self, work: Work) -> None:
        with self._lock:
            self._unused[id(work)] = work
            if len(self._unused) > self._MOST_UNUSED:
                self._unused.popitem(last=False)

    def let_go(self, work: Work) -> None:
        with self._lock:
            if self._unused.pop(id(work), None) is not None:
                self._used.append(work)


_keeper = _Keeper()


class Work(dist.Work):
    """One collective or message. `wait` raises what went wrong; `get_future` completes with it.

    A future's own `wait` raises too, but torch's wrapper of a future as a Work does not.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._result = result
        self._has_user = False
        self.source = -1
        _keeper.hold(self)

    def complete(self, error: Exception | None) -> None:
        """Called once, by the thread that did it."""
        self._error = error
        self._ended.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            # DistributedDataParallel waits in C++, which cannot show a Python error.
            traceback.print_exception(error)
            self._future.set_exception(error)
        self._let_go()

    def _let_go(self) -> None:
        if self._has_user and self._ended.is_set():
            _keeper.let_go(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True, or raises. Without a timeout the group's own deadline ends the wait."""
        seconds = timeout.total_seconds() if timeout else None  # torch passes 0 for none
        if not self._ended.wait(seconds):
            raise TimeoutError(f"not complete within {seconds:g} s; it goes on")
        self._has_user = True
        self._let_go()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly; never waits."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """What went wrong, if anything has."""
        return self._error

    def result(self) -> Any:
        """The tensors that it filled; waits for them."""
        self.wait()
        return self._result

    def get_future(self) -> Any:
        """A torch Future of the result."""
        self._has_user = True
        self._let_go()
        return self._future

    def source_rank(self) -> int:
        """Who sent the message that was received."""
        return self.source

    _source_rank = source_rank


class Completer:
    """Completes collectives in the order of their calls, on a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="mpidp-c10d", daemon=True)
        self._thread.start()

    def submit(self, finish: Callable[[], Any], result: Any) -> Work:
        """The work that `finish` ends; it is called when its turn comes."""
        work = Work(result)
        self._queue.put((finish, work))
        return work

    def close(self) -> None:
        """Ends the thread once what was submitted is done."""
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            finish, work = entry
            try:
                finish()
            except Exception as error:  # handed to whoever waits for the work
                work.complete(error)
            else:
                work.complete(None)


class _Message:
    """Requests that end together."""

    def __init__(
        self,
        work: Work,
        requests: list[MPI.Request],
        keep: object,
        finish: Callable[[], None],
        what: str,
        timeout: float,
    ) -> None:
        self.work = work
        self.requests = requests
        self.keep = keep  # MPI reads and writes their memory
        self._finish = finish
        self._what = what
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def poll(self) -> bool:
        """Whether it has ended; completes its work then."""
        status = MPI.Status()
        try:
            if MPI.Request.Testall(self.requests, [status] if len(self.requests) == 1 else None):
                if len(self.requests) == 1:
                    self.work.source = status.source
                self._finish()
                self.work.complete(None)
                return True
        except Exception as error:  # handed to whoever waits for the work
            self.work.complete(error)
            return True
        if time.monotonic() > self._deadline:
            late = CollectiveTimeoutError(f"{self._what}: not done within {self._timeout:g} s")
            self.work.complete(late)
            return True
        return False


class Messenger:
    """Completes messages whenever they end, in any order, on a thread that lives while any are out.

    They are not queued behind each other or behind collectives: what one waits for may be sent by
    its peer only after a later one has come.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._messages: list[_Message] = []
        self._lost: list[_Message] = []  # past their deadline; MPI may still touch their memory
        self._thread: threading.Thread | None = None

    def submit(
        self,
        requests: Sequence[MPI.Request],
        *,
        keep: object,
        finish: Callable[[], None],
        what: str,
        result: Any,
    ) -> Work:
        """The work that ends when all `requests` have, after `finish`. `what` is for errors."""
        work = Work(result)
        message = _Message(work, list(requests), keep, finish, what, self._timeout)
        with self._lock:
            self._messages.append(message)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="mpidp-c10d-messages", daemon=True
                )
                self._thread.start()
        return work

    def close(self) -> None:
        """Waits for all messages, each until its deadline at most."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _loop(self) -> None:
        polls, nap = 0, _NAP
        while True:
            with self._lock:
                pending = list(self._messages)
                if not pending:
                    self._thread = None
                    return
            ended = [message for message in pending if message.poll()]
            if ended:
                with self._lock:
                    self._messages = [m for m in self._messages if m not in ended]
                self._lost += [m for m in ended if any(m.requests)]
                polls, nap = 0, _NAP
            polls += 1
            if polls < _EAGER_POLLS:
                time.sleep(0)
            else:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
