"""What the emulated device promises, and what it does not: so that tests on it mean something."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from standin import Pinned, StandIn, Stream, runtime

LARGE = 4 << 20


def table(function: str, *arguments: int) -> int:
    """A function of the table that standin.py does not type: every argument a pointer or int."""
    from standin import _FUNCTIONS, _Table

    index = [name for name, _ in _FUNCTIONS].index(function)
    entry = runtime().library.mpidp_device_runtime
    entry.restype = ctypes.c_void_p
    first = entry(1) + _Table.device_count.offset
    entry.restype = ctypes.POINTER(_Table)
    address = ctypes.c_void_p.from_address(first + 8 * index).value
    types = [ctypes.c_void_p] * len(arguments)
    status: int = ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)(*arguments)
    return status


@pytest.fixture(autouse=True)
def _needs_it(emulated):
    """Skips on a real device."""


@pytest.fixture
def event():
    handle = ctypes.c_void_p()
    assert table("create_event", ctypes.addressof(handle), 0) == 0
    yield handle.value
    assert table("destroy_event", handle.value) == 0


def is_done(event: int) -> bool:
    done = ctypes.c_int(-1)
    assert table("query_event", event, ctypes.addressof(done)) == 0
    return bool(done.value)


def busy(stream: Stream) -> StandIn:
    block = StandIn(LARGE, np.uint8)
    for byte in range(8):
        block.fill(byte, stream)
    return block


def test_host_code_that_touches_device_memory_faults():
    script = (
        "import ctypes, sys; sys.path.insert(0, sys.argv[1])\n"
        "from standin import StandIn\n"
        "x = StandIn(4, 'float32')\n"
        "ctypes.c_float.from_address(x.pointer).value\n"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGSEGV


def test_a_kernel_that_misses_its_memory_ends_the_process():
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from standin import StandIn, runtime\n"
        "x = StandIn(4, 'float32'); address = x.pointer; x.close()\n"
        "runtime()('fill', address, 0, 4, 0); runtime()('synchronize_stream', 0)\n"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [sys.executable, "-c", script, folder],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGABRT
    assert "illegal access" in done.stderr


def test_streams_run_out_of_step_without_events():
    producer, consumer = Stream(), Stream()
    stale = 0
    for turn in range(20):
        x, y = StandIn(64, np.uint8), StandIn(64, np.uint8)
        x.fill(0, producer)
        producer.synchronize()
        kept = busy(producer)
        x.fill(turn + 1, producer)
        x.copy_to(y, consumer)
        stale += bool((y.download(consumer) != turn + 1).any())
        producer.synchronize()
        del kept
    assert stale > 0


def test_an_event_orders_two_streams(event):
    producer, consumer = Stream(), Stream()
    for turn in range(20):
        x, y = StandIn(64, np.uint8), StandIn(64, np.uint8)
        kept = busy(producer)
        x.fill(turn + 1, producer)
        assert table("record_event", event, producer.ptr) == 0
        assert table("wait_event", consumer.ptr, event) == 0
        x.copy_to(y, consumer)
        assert (y.download(consumer) == turn + 1).all()
        del kept


def test_an_event_is_done_only_after_what_came_before_it(event):
    assert is_done(event)  # never recorded: nothing to wait for
    stream = Stream()
    kept = busy(stream)
    assert table("record_event", event, stream.ptr) == 0
    assert not is_done(event)
    assert table("synchronize_event", event) == 0
    assert is_done(event)
    del kept


def test_a_wait_is_for_the_record_before_it_whatever_follows(event):
    first, second, waiter = Stream(), Stream(), Stream()
    x, y = StandIn(64, np.uint8), StandIn(64, np.uint8)
    kept = busy(first)
    x.fill(7, first)
    assert table("record_event", event, first.ptr) == 0
    assert table("wait_event", waiter.ptr, event) == 0
    assert table("record_event", event, second.ptr) == 0  # done at once, on an idle stream
    x.copy_to(y, waiter)
    assert (y.download(waiter) == 7).all()
    del kept


def test_pageable_sources_are_read_before_the_call_returns_and_pinned_ones_later():
    stream = Stream()
    x = StandIn(64, np.uint8)
    host = np.full(64, 3, np.uint8)
    kept = busy(stream)
    x.upload(host, stream)
    host[:] = 9
    assert (x.download(stream) == 3).all()
    late = 0
    for _ in range(20):
        pinned = Pinned(64)
        pinned.array[:] = 3
        kept = busy(stream)
        runtime()("copy", x.pointer, pinned.pointer, 64, stream.ptr)
        pinned.array[:] = 9
        late += bool((x.download(stream) == 9).all())
    assert late > 0
    del kept


def test_a_handle_is_of_no_use_in_its_own_process(event):
    x = StandIn(64, np.uint8)
    handle, base = (ctypes.c_ubyte * 64)(), ctypes.c_void_p()
    assert table("export_memory", ctypes.addressof(handle), x.pointer) == 0
    assert table("open_memory", ctypes.addressof(base), ctypes.addressof(handle)) != 0
    assert table("export_event", ctypes.addressof(handle), event) != 0  # not an interprocess event


def test_counters_and_faults(counters, faults):
    before = counters()
    x, stream = StandIn(64, np.uint8), Stream()
    during = counters()
    assert during["allocations"] == before["allocations"] + 1
    assert during["streams"] == before["streams"] + 1
    x.close()
    stream.close()
    assert counters() == before
    faults("out_of_memory", True)
    with pytest.raises(RuntimeError, match="out of memory"):
        StandIn(64, np.uint8)
    faults("out_of_memory", False)
    assert counters() == before
