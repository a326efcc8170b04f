"""Opt-in behaviour of a program that runs as one rank of a job; the command line uses it.

The library itself never ends the process. A launcher or a script that wants one failing rank to end
the whole job, in place of leaving the others to wait for it, says so once, at its start:

    import mpidp.launch
    mpidp.launch.install_excepthook()
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

_FORWARDING_SECONDS = 0.3

_installed = False


def install_excepthook() -> None:
    """Make an uncaught exception, or SIGTERM, on one rank end the whole MPI job.

    An uncaught exception prints its traceback once, each line marked with the rank, and aborts the
    job with status 1 (130 after Ctrl-C). SIGTERM prints one line and aborts with status 143, even
    while the rank waits in a collective. `sys.exit` is not affected. With a single rank nothing
    needs aborting: the process just ends. Calling this twice is the same as calling it once; the
    signal part needs the main thread and is left out elsewhere.
    """
    global _installed
    sys.excepthook = _abort_on_exception  # again, where something else has put its own there
    if _installed:
        return
    _installed = True
    if threading.current_thread() is threading.main_thread():
        _watch_sigterm()


def _abort_on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    # Not imported here: it may be the very import of mpi4py that failed.
    mpi4py_mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi4py_mpi is None or _is_alone(mpi4py_mpi):
        sys.__excepthook__(kind, error, trace)
        return
    interrupted = issubclass(kind, KeyboardInterrupt)
    prefix = f"[rank {mpi4py_mpi.COMM_WORLD.Get_rank()}] "
    # After Ctrl-C every rank raises: P tracebacks would tell nothing.
    lines = ["interrupted\n"] if interrupted else traceback.format_exception(kind, error, trace)
    text = "".join(prefix + line + "\n" for line in "".join(lines).splitlines())
    _end_job(text, 130 if interrupted else 1)


def _is_alone(mpi: Any) -> bool:
    return not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1


def _end_job(text: str, status: int) -> None:
    from mpi4py import MPI

    # Abort ends the process without running Python's own flushes.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        # One write, so that the lines of several ranks do not interleave.
        sys.stderr.write(text)
        sys.stderr.flush()
    # Launchers forward output through pipes, and on an abort some drop what is still in them.
    time.sleep(_FORWARDING_SECONDS)
    MPI.COMM_WORLD.Abort(status)


def _watch_sigterm() -> None:
    # A Python handler runs only between two bytecodes of the main thread, so never while that
    # thread waits in the extension. The wake-up descriptor is written by the C handler at once,
    # and the watching thread acts on it.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if previous_fd != -1:
        # Another owner (an asyncio loop) has it: leave SIGTERM alone.
        signal.set_wakeup_fd(previous_fd, warn_on_full_buffer=False)
        reader.close()
        writer.close()
        return
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    pid = os.getpid()

    def watch() -> None:
        while True:
            received = reader.recv(1)
            if not received:
                return
            if received[0] == signal.SIGTERM and os.getpid() == pid:
                _terminate()

    def forget_in_child() -> None:
        # The child shares the socket: its SIGTERM (multiprocessing ends workers so) must not end
        # the parent's job.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        writer.close()

    os.register_at_fork(after_in_child=forget_in_child)
    threading.Thread(target=watch, name="mpidp-sigterm", daemon=True).start()


def _terminate() -> None:
    # Importing it would start MPI, in a job that is being ended.
    mpi4py_mpi: Any = sys.modules.get("mpi4py.MPI")
    is_initialized = getattr(mpi4py_mpi, "Is_initialized", None)  # None in mid-import, too
    if is_initialized is None or not is_initialized() or mpi4py_mpi.Is_finalized():
        os._exit(143)  # the default action cannot be restored outside the main thread
    rank = mpi4py_mpi.COMM_WORLD.Get_rank()
    _end_job(f"[rank {rank}] terminated by SIGTERM; ending the job\n", 143)
